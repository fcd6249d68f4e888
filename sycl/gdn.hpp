// GDN decode: what the conv, the recurrence and the fused step share. semantics: GDN; sums over K in strided32_tree.
#pragma once
#include "common.hpp"

// Sizes of one rank and strides of its tables, in elements; passed by value.
struct Gdn {
  int32_t k_heads, v_heads, ratio, shift;    // head dim = 1 << shift, of k and of v
  int32_t ratio_reciprocal;                  // 65536 / ratio, rounded up: v-head / ratio without a division
  int32_t width;                             // of the conv, taps
  int32_t interleaved;                       // qkvz and ba by k-head groups
  int32_t bias_first;
  int32_t padding_z;                         // z of a padding row is written
  int32_t l2norm, softplus;
  int32_t state_type, k_v;                   // f32, bf16, f16; [K, V] per head
  int64_t conv_stride, ssm_stride;           // from slot to slot

  int dim() const { return 1 << shift; }
  int keys() const { return k_heads << shift; }
  int values() const { return v_heads << shift; }
  int channels() const { return 2 * keys() + values(); }
  int k_head(int v_head) const { return (v_head * ratio_reciprocal) >> 16; }
};

enum L2norm : int { div_sqrt_eps_in = 0, rsqrt_eps_in = 1, eps_out = 2 };
enum Softplus : int { softplus_log = 0, softplus_log1p = 1 };
enum StateType : int { state_f32 = 0, state_bf16 = 1, state_f16 = 2 };

// ---------------------------------------------------------------- where things lie

// Element of a projected row [q|k|v|z] that channel c comes from; c counts q, k, v, then z.
inline int source_of(const Gdn &g, int c) {
  if (!g.interleaved) return c;
  int dim = g.dim(), group = (2 + 2 * g.ratio) << g.shift;
  if (c < 2 * g.keys()) {
    int second = c >= g.keys(), at = c - second * g.keys();
    return (at >> g.shift) * group + second * dim + (at & (dim - 1));
  }
  int z = c >= g.channels(), at = c - (z ? g.channels() : 2 * g.keys());
  int head = at >> g.shift, k_head = g.k_head(head), among = head - k_head * g.ratio;
  return k_head * group + ((2 + z * g.ratio + among) << g.shift) + (at & (dim - 1));
}

// Element of a row [b|a] that gate number h comes from: b of v-head h, or a of v-head h − v_heads.
inline int gate_source(const Gdn &g, int h) {
  if (!g.interleaved) return h;
  int a = h >= g.v_heads, head = h - a * g.v_heads, k_head = g.k_head(head);
  return (2 * k_head + a) * g.ratio + head - k_head * g.ratio;
}

// ---------------------------------------------------------------- arithmetic

inline float softplus(float x, int mode) {
  if (x > 20.0f) return x;
  float e = exp_cr(x);
  return mode == softplus_log ? float(sycl::log(double(1.0f + e))) : float(sycl::log1p(double(e)));
}

inline float decay(uint16_t a, float a_log, float dt_bias, int mode) {
  return exp_cr(-exp_cr(a_log) * softplus(bf16_to_f32(a) + dt_bias, mode));
}

// What a row whose squares sum to `total` is divided by, or under rsqrt_eps_in multiplied by.
inline float length_of(float total, int mode) {
  if (mode == rsqrt_eps_in) return float(1.0 / sycl::sqrt(double(total + 1e-6f)));
  return mode == div_sqrt_eps_in ? sycl::sqrt(total + 1e-6f) : sycl::sqrt(total) + 1e-6f;
}

inline float normed(float x, float length, int mode) { return mode == rsqrt_eps_in ? x * length : x / length; }

// f16 by integers and exact products: sycl::half pulls in what a SYCLBIN then lacks on some devices, and denormals are kept.
inline float f16_to_f32(uint16_t x) {
  uint32_t sign = uint32_t(x & 0x8000u) << 16, rest = x & 0x7fffu;
  if (rest >= 0x7c00u) return sycl::bit_cast<float>(sign | 0x7f800000u | (rest & 0x3ffu) << 13);
  return sycl::bit_cast<float>(sign | sycl::bit_cast<uint32_t>(sycl::bit_cast<float>(rest << 13) * 0x1p112f));
}

// Round to nearest even; every NaN becomes 0x7e00.
inline uint16_t rn_f16(float x) {
  uint32_t u = sycl::bit_cast<uint32_t>(x), sign = u >> 16 & 0x8000u, m = u & 0x7fffffffu;
  if (m > 0x7f800000u) return 0x7e00;
  if (m >= 0x477ff000u) return uint16_t(sign | 0x7c00u);  // 65520 and above
  if (m < 0x38800000u)                                     // below 2^-14: the sum rounds at 2^-24, where denormals step
    return uint16_t(sign | (sycl::bit_cast<uint32_t>(sycl::bit_cast<float>(m) + 0.5f) - 0x3f000000u));
  m += 0xfffu + (m >> 13 & 1) - 0x38000000u;
  return uint16_t(sign | m >> 13);
}

inline float load_state(const void *table, int64_t at, int type) {
  if (type == state_f32) return static_cast<const float *>(table)[at];
  uint16_t bits = static_cast<const uint16_t *>(table)[at];
  return type == state_bf16 ? bf16_to_f32(bits) : f16_to_f32(bits);
}

inline void store_state(void *table, int64_t at, int type, float x) {
  if (type == state_f32) static_cast<float *>(table)[at] = x;
  else static_cast<uint16_t *>(table)[at] = type == state_bf16 ? rn_bf16(x) : rn_f16(x);
}

// Element (v, k) of a head's state, from the head's first.
inline int64_t state_at(const Gdn &g, int v, int k) { return g.k_v ? (int64_t(k) << g.shift) + v : (int64_t(v) << g.shift) + k; }

// ---------------------------------------------------------------- conv

// One channel of one sequence through all its tokens; `put(token, bits)` takes what comes out.
template <class Put>
inline void conv_channel(const Gdn &g, const uint16_t *qkvz, const uint16_t *weights, const uint16_t *bias, uint16_t *state,
                         int first, int last, int c, Put put) {
  constexpr int most = 8;
  int64_t row = g.channels() + g.values();
  float w[most], window[most];
  uint16_t raw[most];
  for (int i = 0; i < most; i++) {
    w[i] = i < g.width ? bf16_to_f32(weights[c * g.width + i]) : 0.0f;
    raw[i] = i < g.width - 1 ? state[i * int64_t(g.channels()) + c] : 0;
  }
  float added = bias ? bf16_to_f32(bias[c]) : 0.0f;
  int from = source_of(g, c);
  for (int t = first; t < last; t++) {
    raw[g.width - 1] = qkvz[t * row + from];
    for (int i = 0; i < most; i++) window[i] = bf16_to_f32(raw[i]);
    float r = bias && g.bias_first ? added : 0.0f;
    for (int i = 0; i < g.width; i++) r = r + window[i] * w[i];
    if (bias && !g.bias_first) r = r + added;
    put(t, rn_bf16(silu(r)));
    for (int i = 0; i + 1 < g.width; i++) raw[i] = raw[i + 1];
  }
  for (int i = 0; i < g.width - 1; i++) state[i * int64_t(g.channels()) + c] = raw[i];
}

// z, one channel of one sequence; a padding row's only under its mode.
inline void copy_z(const Gdn &g, const uint16_t *qkvz, uint16_t *z, int first, int last, int at, bool live) {
  if (!live && !g.padding_z) return;
  int from = source_of(g, g.channels() + at);
  for (int t = first; t < last; t++) z[int64_t(t) * g.values() + at] = qkvz[int64_t(t) * (g.channels() + g.values()) + from];
}

constexpr int conv_block = 256;  // channels of a work-group

// What a work-group's 256 columns hold behind the channels: z, then b and a.
template <int LANES>
inline void conv_rest(const uint16_t *qkvz, const uint16_t *ba, int first, int last, bool live, int begin, int lane, uint16_t *z,
                      uint16_t *b, uint16_t *a, const Gdn &g) {
  int all = g.channels() + g.values();
  if (begin + conv_block <= g.channels()) return;
  for (int c = begin + lane; c < begin + conv_block; c += LANES) {
    if (c < g.channels()) continue;
    if (c < all) {
      copy_z(g, qkvz, z, first, last, c - g.channels(), live);
    } else if (c < all + 2 * g.v_heads) {
      int gate = c - all, from = gate_source(g, gate), head = gate < g.v_heads ? gate : gate - g.v_heads;
      uint16_t *to = gate < g.v_heads ? b : a;
      for (int t = first; t < last; t++) to[int64_t(t) * g.v_heads + head] = ba[int64_t(t) * 2 * g.v_heads + from];
    }
  }
}

// ---------------------------------------------------------------- recurrence

// What the recurrence reads beside the state. a and b come apart, or both in `ba` as they were projected.
struct Recurrence {
  const uint16_t *qkv, *a, *b, *ba;
  const float *a_log;
  const void *dt_bias;
  int dt_bf16;
  uint16_t *out;

  float beta(const Gdn &g, int64_t t, int head) const {
    return sigmoid(bf16_to_f32(ba ? ba[t * 2 * g.v_heads + gate_source(g, head)] : b[t * g.v_heads + head]));
  }
  float decayed(const Gdn &g, int64_t t, int head) const {
    uint16_t mine = ba ? ba[t * 2 * g.v_heads + gate_source(g, g.v_heads + head)] : a[t * g.v_heads + head];
    return decay(mine, a_log[head], bias(head), g.softplus);
  }
  float bias(int head) const {
    return dt_bf16 ? bf16_to_f32(static_cast<const uint16_t *>(dt_bias)[head]) : static_cast<const float *>(dt_bias)[head];
  }
};

inline void *state_of(void *table, const Gdn &g, int64_t slot, int head) {
  int64_t at = slot * g.ssm_stride + (int64_t(head) << (2 * g.shift));
  return static_cast<char *>(table) + at * (g.state_type == state_f32 ? 4 : 2);
}

// What the kernels of every device are given.
#define RECURRENT_ARGS                                                                                                      \
  const uint16_t *qkv, const uint16_t *a, const uint16_t *b, const float *a_log, const void *dt_bias, const int32_t *slots, \
      const int32_t *starts, void *ssm_state, uint16_t *out, Gdn g, int dt_bf16
#define STEP_ARGS                                                                                                          \
  const uint16_t *qkvz, const uint16_t *ba, const uint16_t *weights, const uint16_t *bias, const float *a_log, const void *dt_bias, \
      const int32_t *slots, const int32_t *starts, uint16_t *conv_state, void *ssm_state, uint16_t *z, uint16_t *out, uint16_t *qkv, Gdn g, \
      int dt_bf16
