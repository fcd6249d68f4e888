// Many stages in one launch: the prologue, the middle of a layer, and a layer up to its combine.
//
// A pair is a (token, slot); its *leader* is the one pair of an expert that does the expert's rows, so that weights are
// read once and no list of active experts has to be made. What passes between stages lies in scratch of the kernel's own.
#include "common.hpp"
#include "dot.hpp"

constexpr int gpu_lanes = 256;

// Quantise, route and remap in one launch of one work-group.
template <int LANES>
inline void prologue(const uint16_t *x, const int32_t *ids, int8_t *a, float *a_scale, int64_t *offsets,
                     int32_t *permuted, int32_t *count, int tokens, int top_k, int width, int experts, int mode) {
  Lanes<LANES> lanes;
  int64_t pairs = int64_t(tokens) * top_k;
  for (int e = lanes.lane; e < experts; e += LANES) {
    int rows = 0;
    if constexpr (LANES > 1)
      for (int64_t i = 0; i < pairs; i++) rows += ids[i] == e;
    count[e] = rows;
  }
  if constexpr (LANES == 1)
    for (int64_t i = 0; i < pairs; i++)
      if (ids[i] >= 0) count[ids[i]]++;
  lanes.barrier();
  if (lanes.lane == 0) {
    int64_t sum = 0;
    for (int e = 0; e < experts; e++) {
      offsets[e] = sum;
      sum += count[e];
      count[e] = 0;
    }
    offsets[experts] = sum;
    for (int64_t i = 0; i < pairs; i++) permuted[i] = ids[i] < 0 ? -1 : int32_t(offsets[ids[i]] + count[ids[i]]++);
  }
  lanes.barrier();
  for (int t = 0; t < tokens; t++) {
    const uint16_t *from = x + int64_t(t) * width;
    uint32_t absmax = 0;
    for (int i = lanes.lane; i < width; i += LANES) absmax = sycl::max(absmax, magnitude(bf16_to_f32(from[i])));
    RowScale s = row_scale(lanes.max(absmax), mode);
    int64_t first = -1;  // quantised into the token's first row, copied to the others
    for (int j = 0; j < top_k; j++) {
      int64_t to = permuted[int64_t(t) * top_k + j];
      if (to < 0) continue;
      int8_t *row = a + to * width;
      if (first < 0) {
        quantize<LANES>([=](int i) { return bf16_to_f32(from[i]); }, row, s, lanes.lane, width, mode);
        lanes.barrier();  // the copies below read in words what other lanes wrote in bytes
        first = to;
      } else {
        copy_codes<LANES>(a + first * width, row, lanes.lane, width);
      }
      if (lanes.lane == 0) a_scale[to] = s.scale;
    }
  }
}

KERNEL(1) void prologue_cpu(const uint16_t *x, const int32_t *ids, int8_t *a, float *a_scale, int64_t *offsets,
                            int32_t *permuted, int32_t *count, int tokens, int top_k, int width, int experts, int mode) {
  prologue<1>(x, ids, a, a_scale, offsets, permuted, count, tokens, top_k, width, experts, mode);
}
KERNEL(1) SUB_GROUP(16) void prologue_gpu(const uint16_t *x, const int32_t *ids, int8_t *a, float *a_scale,
                                          int64_t *offsets, int32_t *permuted, int32_t *count, int tokens, int top_k,
                                          int width, int experts, int mode) {
  prologue<gpu_lanes>(x, ids, a, a_scale, offsets, permuted, count, tokens, top_k, width, experts, mode);
}

struct Expert {
  const int8_t *w13, *w2;
  const float *w13_scale, *w2_scale;
  int hidden, inter, act, quant, mode;
};

// gate_up bf16 [2·inter] → h s8 [inter], by way of p f32 [inter]; the scale is returned.
template <int LANES, int DIMS>
inline float act_quant(const Lanes<LANES, DIMS> &lanes, const Expert &x, const uint16_t *gate_up, float *p, int8_t *h) {
  uint32_t absmax = 0;
  for (int i = lanes.lane; i < x.inter; i += LANES) {
    p[i] = activate(gate_up[i], gate_up[x.inter + i], x.act);
    absmax = sycl::max(absmax, magnitude(p[i]));
  }
  RowScale s = row_scale(lanes.max(absmax), x.quant);
  quantize<LANES>([=](int i) { return p[i]; }, h, s, lanes.lane, x.inter, x.quant);
  return s.scale;
}

// Rows that one expert takes together: where each lies, and how they are scaled. The gpu body takes one at a time.
template <int LANES> constexpr int together = LANES == 1 ? rows_together : 1;

template <int LANES> struct Rows {
  int count = 0;
  int64_t at[together<LANES>];
  float scale[together<LANES>];
};

// `count` rows from x, `stride` apart, against all columns of weights [n, k]: out(r) is where row r's bf16 go.
template <int LANES, int DIMS, class Out>
inline void columns(const Lanes<LANES, DIMS> &lanes, int count, const int8_t *x, int64_t stride, const float *scale,
                    const int8_t *w, const float *w_scale, int n, int k, int mode, Out out) {
  if constexpr (LANES == 1) {
    cpu::rows(count, x, stride, w, 0, n, k, [&](int column, int r, int32_t acc) {
      out(r)[column] = epilogue(acc, scale[r], w_scale[column], nullptr, 0, mode);
    });
  } else {
    auto group = lanes.item.get_sub_group();
    int groups = int(group.get_group_linear_range());
    for (int column = int(group.get_group_linear_id()); column < n; column += groups) {
      int32_t acc = dot_lanes(x, w + int64_t(column) * k, k, int(group.get_local_linear_id()));
      acc = sycl::reduce_over_group(group, acc, sycl::plus<int32_t>());
      if (group.leader()) out(0)[column] = epilogue(acc, scale[0], w_scale[column], nullptr, 0, mode);
    }
  }
}

// Quantised rows through one expert: gemm1, activation and quantisation, gemm2. The rows lie `hidden` apart from `a`;
// gate_up and h are this group's scratch for as many rows; row r's output goes to y + at[r]·hidden.
template <int LANES, int DIMS>
inline void through(const Lanes<LANES, DIMS> &lanes, const Expert &x, const Rows<LANES> &rows, const int8_t *a,
                    uint16_t *gate_up, float *p, int8_t *h, uint16_t *y) {
  columns(lanes, rows.count, a, x.hidden, rows.scale, x.w13, x.w13_scale, 2 * x.inter, x.hidden, x.mode,
          [&](int r) { return gate_up + r * 2 * x.inter; });
  lanes.barrier();
  float h_scale[together<LANES>];
  for (int r = 0; r < rows.count; r++) h_scale[r] = act_quant(lanes, x, gate_up + r * 2 * x.inter, p, h + r * x.inter);
  lanes.barrier();
  columns(lanes, rows.count, h, x.inter, h_scale, x.w2, x.w2_scale, x.hidden, x.inter, x.mode,
          [&](int r) { return y + rows.at[r] * x.hidden; });
  lanes.barrier();
}

template <int LANES> inline int64_t packed_bytes(int n, int k) {
  return LANES == 1 ? cpu::expert_bytes(n, k) : int64_t(n) * k;
}

#define EXPERT_ARGS                                                                                                  \
  const int8_t *w13, const float *w13_scale, const int8_t *w2, const float *w2_scale, int hidden, int inter, int act, \
      int quant, int mode
#define EXPERT(e)                                                                                                     \
  Expert{w13 + (e)*packed_bytes<LANES>(2 * inter, hidden), w2 + (e)*packed_bytes<LANES>(hidden, inter), w13_scale + (e)*2 * inter, w2_scale + (e)*hidden,     \
         hidden, inter, act, quant, mode}

// moe.middle: one work-group a pair; the pair whose row is its expert's first is the leader.
template <int LANES>
inline void middle(const int8_t *a, const float *a_scale, const int32_t *ids, const int32_t *permuted,
                   const int64_t *offsets, uint16_t *gate_up, float *p, int8_t *h, uint16_t *y, EXPERT_ARGS) {
  Lanes<LANES> lanes;
  int64_t row = permuted[lanes.row()];
  if (row < 0) return;
  int64_t e = ids[lanes.row()];
  if (row != offsets[e]) return;
  Expert expert = EXPERT(e);
  while (row < offsets[e + 1]) {
    int64_t first = row;
    Rows<LANES> rows;
    for (; rows.count < together<LANES> && row < offsets[e + 1]; row++, rows.count++) {
      rows.at[rows.count] = row;
      rows.scale[rows.count] = a_scale[row];
    }
    through(lanes, expert, rows, a + first * hidden, gate_up + first * 2 * inter, p + first * inter, h + first * inter, y);
  }
}

KERNEL(1) void middle_cpu(const int8_t *a, const float *a_scale, const int32_t *ids, const int32_t *permuted,
                          const int64_t *offsets, uint16_t *gate_up, float *p, int8_t *h, uint16_t *y, EXPERT_ARGS) {
  middle<1>(a, a_scale, ids, permuted, offsets, gate_up, p, h, y, w13, w13_scale, w2, w2_scale, hidden, inter, act, quant, mode);
}
KERNEL(1) SUB_GROUP(16) void middle_gpu(const int8_t *a, const float *a_scale, const int32_t *ids,
                                        const int32_t *permuted, const int64_t *offsets, uint16_t *gate_up, float *p, int8_t *h,
                                        uint16_t *y, EXPERT_ARGS) {
  middle<gpu_lanes>(a, a_scale, ids, permuted, offsets, gate_up, p, h, y, w13, w13_scale, w2, w2_scale, hidden, inter, act, quant,
                    mode);
}

// Quantise a token's row into a pair's scratch row; the scale is returned.
template <int LANES, int DIMS>
inline float quantize_into(const Lanes<LANES, DIMS> &lanes, const uint16_t *from, int8_t *to, int width, int mode) {
  uint32_t absmax = 0;
  for (int i = lanes.lane; i < width; i += LANES) absmax = sycl::max(absmax, magnitude(bf16_to_f32(from[i])));
  RowScale s = row_scale(lanes.max(absmax), mode);
  quantize<LANES>([=](int i) { return bf16_to_f32(from[i]); }, to, s, lanes.lane, width, mode);
  lanes.barrier();
  return s.scale;
}

// moe.layer up to its combine: y bf16 [pairs, hidden], in the order of the pairs. The first pair of an expert leads.
template <int LANES>
inline void layer(const uint16_t *x, const int32_t *ids, int8_t *a, uint16_t *gate_up, float *p, int8_t *h, uint16_t *y, int tokens,
                  int top_k, EXPERT_ARGS) {
  Lanes<LANES, 2> lanes;
  int64_t me = lanes.row() * top_k + lanes.column();
  int64_t e = ids[me];
  if (e < 0) return;
  for (int64_t i = 0; i < me; i++)
    if (ids[i] == e) return;
  Expert expert = EXPERT(e);
  // Scratch is a group's own: `together` rows each.
  Rows<LANES> rows;
  for (int64_t t = lanes.row(); t < tokens; t++)
    for (int64_t i = t * top_k; i < (t + 1) * top_k; i++) {
      if (ids[i] == e) {
        rows.at[rows.count] = i;
        rows.scale[rows.count] = quantize_into(lanes, x + t * hidden, a + (me * together<LANES> + rows.count) * hidden, hidden, quant);
        rows.count++;
      }
      bool last = i + 1 == int64_t(tokens) * top_k;
      if (rows.count == together<LANES> || (last && rows.count)) {
        through(lanes, expert, rows, a + me * together<LANES> * hidden, gate_up + me * together<LANES> * 2 * inter,
                p + me * together<LANES> * inter, h + me * together<LANES> * inter, y);
        rows.count = 0;
      }
    }
}

KERNEL(2) void layer_cpu(const uint16_t *x, const int32_t *ids, int8_t *a, uint16_t *gate_up, float *p, int8_t *h, uint16_t *y,
                         int tokens, int top_k, EXPERT_ARGS) {
  layer<1>(x, ids, a, gate_up, p, h, y, tokens, top_k, w13, w13_scale, w2, w2_scale, hidden, inter, act, quant, mode);
}
KERNEL(2) SUB_GROUP(16) void layer_gpu(const uint16_t *x, const int32_t *ids, int8_t *a, uint16_t *gate_up, float *p, int8_t *h,
                                       uint16_t *y, int tokens, int top_k, EXPERT_ARGS) {
  layer<gpu_lanes>(x, ids, a, gate_up, p, h, y, tokens, top_k, w13, w13_scale, w2, w2_scale, hidden, inter, act, quant, mode);
}
