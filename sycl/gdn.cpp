// GDN decode on a CPU: conv, recurrence, and both in one launch; sixteen rows of V at a time in vectors of sixteen.
#include "gdn.hpp"

constexpr int most_dim = 256;

// ---------------------------------------------------------------- conv

// The same channels on a CPU, tap by tap over all of them, so that every loop is one over neighbours.
inline void conv_block_cpu(const Gdn &g, const uint16_t *qkvz, const uint16_t *weights, const uint16_t *bias, uint16_t *state, int first,
                           int last, int begin, int end, uint16_t *qkv) {
  int n = end - begin, taps = g.width - 1;
  int64_t channels = g.channels();
  uint16_t raw[conv_block];
  float r[conv_block];
  for (int t = first; t < last; t++) {
    const uint16_t *row = qkvz + t * (channels + g.values());
    if (g.interleaved)
      for (int i = 0; i < n; i++) raw[i] = row[source_of(g, begin + i)];
    else
      for (int i = 0; i < n; i++) raw[i] = row[begin + i];
    for (int i = 0; i < n; i++) r[i] = bias && g.bias_first ? bf16_to_f32(bias[begin + i]) : 0.0f;
    for (int tap = 0; tap < taps; tap++) {
      const uint16_t *held = state + tap * channels + begin, *w = weights + int64_t(begin) * g.width + tap;
      for (int i = 0; i < n; i++) r[i] = r[i] + bf16_to_f32(held[i]) * bf16_to_f32(w[i * g.width]);
    }
    const uint16_t *w = weights + int64_t(begin) * g.width + taps;
    for (int i = 0; i < n; i++) r[i] = r[i] + bf16_to_f32(raw[i]) * bf16_to_f32(w[i * g.width]);
    if (bias && !g.bias_first)
      for (int i = 0; i < n; i++) r[i] = r[i] + bf16_to_f32(bias[begin + i]);
    uint16_t *out = qkv + t * channels + begin;
    for (int i = 0; i < n; i++) out[i] = rn_bf16(silu(r[i]));
    for (int tap = 0; tap < taps; tap++) {
      uint16_t *held = state + tap * channels + begin;
      const uint16_t *next = tap + 1 < taps ? held + channels : raw;
      for (int i = 0; i < n; i++) held[i] = next[i];
    }
  }
}

KERNEL(2) void conv_cpu(const uint16_t *qkvz, const uint16_t *ba, const uint16_t *weights, const uint16_t *bias, const int32_t *slots,
                        const int32_t *starts, uint16_t *conv_state, uint16_t *qkv, uint16_t *z, uint16_t *b, uint16_t *a, Gdn g) {
  Lanes<1, 2> lanes;
  int64_t sequence = lanes.row(), slot = slots[sequence];
  int first = starts[sequence], last = starts[sequence + 1], begin = int(lanes.column()) * conv_block;
  if (slot >= 0 && first < last && begin < g.channels())
    conv_block_cpu(g, qkvz, weights, bias, conv_state + slot * g.conv_stride, first, last, begin,
                   sycl::min(begin + conv_block, g.channels()), qkv);
  conv_rest<1>(qkvz, ba, first, last, slot >= 0, begin, 0, z, b, a, g);
}
// ---------------------------------------------------------------- recurrence, cpu body

using f16v = float __attribute__((ext_vector_type(16)));
using f16u = float __attribute__((ext_vector_type(16), aligned(4)));

inline f16v load16(const float *p) { return *reinterpret_cast<const f16u *>(p); }
inline void store16(float *p, f16v x) { *reinterpret_cast<f16u *>(p) = x; }

// Sixteen rows of sixteen partial sums each → the sixteen sums, each folded by 8, 4, 2, 1.
inline f16v fold16(f16v *r) {
  for (int i = 0; i < 8; i++)
    r[i] = __builtin_shufflevector(r[i], r[i + 8], 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
           __builtin_shufflevector(r[i], r[i + 8], 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
  for (int i = 0; i < 4; i++)
    r[i] = __builtin_shufflevector(r[i], r[i + 4], 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
           __builtin_shufflevector(r[i], r[i + 4], 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
  for (int i = 0; i < 2; i++)
    r[i] = __builtin_shufflevector(r[i], r[i + 2], 0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21, 24, 25, 28, 29) +
           __builtin_shufflevector(r[i], r[i + 2], 2, 3, 6, 7, 10, 11, 14, 15, 18, 19, 22, 23, 26, 27, 30, 31);
  f16v sums = __builtin_shufflevector(r[0], r[1], 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30) +
              __builtin_shufflevector(r[0], r[1], 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
  // Rows lie as 0 8 4 12 2 10 6 14, 1 9 5 13 3 11 7 15.
  return __builtin_shufflevector(sums, sums, 0, 8, 4, 12, 2, 10, 6, 14, 1, 9, 5, 13, 3, 11, 7, 15);
}

// A row of q or k in f32, over its length.
inline void norm_row(const Gdn &g, const uint16_t *from, float *to) {
  f16v low = 0.0f, high = 0.0f;
  for (int i = 0; i < g.dim(); i++) to[i] = bf16_to_f32(from[i]);
  for (int i = 0; i < g.dim(); i += 32) {
    f16v x = load16(to + i), y = load16(to + i + 16);
    low += x * x;
    high += y * y;
  }
  float lanes[32];
  store16(lanes, low);
  store16(lanes + 16, high);
  float length = length_of(fold32(lanes), g.l2norm);
  for (int i = 0; i < g.dim(); i += 16)
    store16(to + i, g.l2norm == rsqrt_eps_in ? load16(to + i) * length : load16(to + i) / length);
}

// What one token asks of one v-head.
struct Token {
  float q[most_dim], k[most_dim];
  float g, beta;
};

inline void read_keys(const Gdn &g, const uint16_t *row, int k_head, Token &token) {
  norm_row(g, row + (k_head << g.shift), token.q);
  norm_row(g, row + g.keys() + (k_head << g.shift), token.k);
  float scale = float(1.0 / sycl::sqrt(double(g.dim())));
  for (int i = 0; i < g.dim(); i++) token.q[i] *= scale;
}

// Sixteen rows of V of one head through one token; `s` is f32 [16, K] with rows `apart`.
inline void advance(float *s, int64_t apart, int dim, const Token &token, const uint16_t *v, uint16_t *out) {
  f16v part[16], values;
  for (int i = 0; i < 16; i++) values[i] = bf16_to_f32(v[i]);
  for (int r = 0; r < 16; r++) {
    f16v low = 0.0f, high = 0.0f;
    const float *row = s + r * apart;
    for (int i = 0; i < dim; i += 32) {
      low += load16(row + i) * token.g * load16(token.k + i);
      high += load16(row + i + 16) * token.g * load16(token.k + i + 16);
    }
    part[r] = low + high;
  }
  float d[16];  // in memory once: a lane of a vector by a running index is a store and a load of it for every row
  store16(d, (values - fold16(part)) * token.beta);
  for (int r = 0; r < 16; r++) {
    f16v low = 0.0f, high = 0.0f;
    float *row = s + r * apart;
    float mine = d[r];
    for (int i = 0; i < dim; i += 32) {
      f16v x = load16(row + i) * token.g + mine * load16(token.k + i);
      f16v y = load16(row + i + 16) * token.g + mine * load16(token.k + i + 16);
      store16(row + i, x);
      store16(row + i + 16, y);
      low += x * load16(token.q + i);
      high += y * load16(token.q + i + 16);
    }
    part[r] = low + high;
  }
  f16v o = fold16(part);
  for (int i = 0; i < 16; i++) out[i] = rn_bf16(o[i]);
}

// The 32 partial sums of sixteen rows, a row an element.
inline f16v folded(f16v *lanes) {
  for (int half = 16; half > 0; half /= 2)
    for (int i = 0; i < half; i++) lanes[i] += lanes[i + half];
  return lanes[0];
}

// The same sixteen rows where a head's state is [K, V]: they lie beside one another, `dim` apart from k to k.
inline void advance_columns(float *s, int dim, const Token &token, const uint16_t *v, uint16_t *out) {
  f16v lanes[32], values;
  for (int i = 0; i < 16; i++) values[i] = bf16_to_f32(v[i]);
  for (int i = 0; i < 32; i++) lanes[i] = 0.0f;
  for (int k = 0; k < dim; k += 32)
    for (int i = 0; i < 32; i++) lanes[i] += load16(s + (k + i) * dim) * token.g * token.k[k + i];
  f16v d = (values - folded(lanes)) * token.beta;
  for (int i = 0; i < 32; i++) lanes[i] = 0.0f;
  for (int k = 0; k < dim; k += 32)
    for (int i = 0; i < 32; i++) {
      f16v x = load16(s + (k + i) * dim) * token.g + d * token.k[k + i];
      store16(s + (k + i) * dim, x);
      lanes[i] += x * token.q[k + i];
    }
  f16v o = folded(lanes);
  for (int i = 0; i < 16; i++) out[i] = rn_bf16(o[i]);
}

// Every element of sixteen rows of V from `v` on: its place in a block [16, K] and in the head's state, the latter's neighbours
// one after another.
template <class Do> inline void each_of_block(const Gdn &g, int v, Do use) {
  int dim = g.dim(), outer = g.k_v ? dim : 16, inner = g.k_v ? 16 : dim;
  for (int i = 0; i < outer; i++)
    for (int j = 0; j < inner; j++) {
      int row = g.k_v ? j : i, k = g.k_v ? i : j;
      use(row * dim + k, state_at(g, v + row, k));
    }
}

// One v-head of one sequence. f32 states are changed where they lie, others by way of a block in f32.
inline void head_cpu(const Gdn &g, const Recurrence &r, void *state, int first, int last, int head) {
  int dim = g.dim(), k_head = g.k_head(head);
  bool in_place = g.state_type == state_f32;
  float block[16 * most_dim];
  Token token;
  for (int v = 0; v < dim; v += 16) {
    float *s = in_place ? static_cast<float *>(state) + state_at(g, v, 0) : block;
    if (!in_place) each_of_block(g, v, [&](int at, int64_t from) { block[at] = load_state(state, from, g.state_type); });
    for (int t = first; t < last; t++) {
      const uint16_t *row = r.qkv + int64_t(t) * g.channels();
      if (v == 0 || last - first > 1) {
        read_keys(g, row, k_head, token);
        token.g = r.decayed(g, t, head);
        token.beta = r.beta(g, t, head);
      }
      const uint16_t *value = row + 2 * g.keys() + (head << g.shift) + v;
      uint16_t *out = r.out + int64_t(t) * g.values() + (head << g.shift) + v;
      if (in_place && g.k_v) advance_columns(s, dim, token, value, out);
      else advance(s, dim, dim, token, value, out);
    }
    if (!in_place) each_of_block(g, v, [&](int at, int64_t to) { store_state(state, to, g.state_type, block[at]); });
  }
}

KERNEL(2) void recurrent_cpu(RECURRENT_ARGS) {
  Lanes<1, 2> lanes;
  int64_t sequence = lanes.row(), slot = slots[sequence];
  if (slot < 0 || starts[sequence] == starts[sequence + 1]) return;
  int head = int(lanes.column());
  Recurrence r{qkv, a, b, nullptr, a_log, dt_bias, dt_bf16, out};
  head_cpu(g, r, state_of(ssm_state, g, slot, head), starts[sequence], starts[sequence + 1], head);
}

// ---------------------------------------------------------------- both in one launch

// One work-group a sequence and k-head; `qkv` is scratch.
KERNEL(2) void step_cpu(STEP_ARGS) {
  Lanes<1, 2> lanes;
  int64_t sequence = lanes.row(), slot = slots[sequence];
  int first = starts[sequence], last = starts[sequence + 1], k_head = int(lanes.column());
  if (slot < 0) {
    for (int i = 0; i < g.ratio << g.shift; i++) copy_z(g, qkvz, z, first, last, (k_head * g.ratio << g.shift) + i, false);
    return;
  }
  if (first == last) return;
  uint16_t *state = conv_state + slot * g.conv_stride;
  int parts[3][2] = {{k_head << g.shift, g.dim()}, {g.keys() + (k_head << g.shift), g.dim()},
                     {2 * g.keys() + (k_head * g.ratio << g.shift), g.ratio << g.shift}};
  for (auto &part : parts)
    for (int c = part[0]; c < part[0] + part[1]; c += conv_block)
      conv_block_cpu(g, qkvz, weights, bias, state, first, last, c, sycl::min(c + conv_block, part[0] + part[1]), qkv);
  for (int i = 0; i < g.ratio << g.shift; i++) copy_z(g, qkvz, z, first, last, (k_head * g.ratio << g.shift) + i, true);
  Recurrence r{qkv, nullptr, nullptr, ba, a_log, dt_bias, dt_bf16, out};
  for (int head = k_head * g.ratio; head < (k_head + 1) * g.ratio; head++)
    head_cpu(g, r, state_of(ssm_state, g, slot, head), first, last, head);
}
