// A MoE layer without quantisation, bf16 rows and weights [E, K, N] as they lie: one launch up to the activation, one for the rest.
//
// Sums are f32, k by k, for columns beside one another: a cpu item has a block of them in vectors, a gpu's lanes one each.
#include "common.hpp"

constexpr int wide_lanes = 256, wide_columns = 64;

// `columns` sums of one row [depth] against weights [depth, width] from column `first` on, step LANES, rounded to bf16.
template <int LANES, int COLUMNS>
inline void dot_columns(const uint16_t *row, const uint16_t *w, int depth, int64_t width, int first, int columns, float *sum) {
  for (int n = 0; n < COLUMNS; n++) sum[n] = 0.0f;
  for (int k = 0; k < depth; k++) {
    float x = bf16_to_f32(row[k]);
    const uint16_t *at = w + k * width + first;
    for (int n = 0; n < columns; n++) sum[n] = sum[n] + x * bf16_to_f32(at[n * LANES]);
  }
}

// Groups [pairs, blocks of columns]: gate and up of a pair's token, activated into p bf16 [pairs, inter]; id −1 has none.
template <int LANES>
inline void wide_first(const uint16_t *x, const int32_t *ids, const uint16_t *w13, uint16_t *p, int hidden, int inter, int top_k, int act) {
  Lanes<LANES, 3> lanes;
  constexpr int mine = LANES == 1 ? wide_columns : 1;
  int64_t token = lanes.row(), pair = token * top_k + lanes.item.get_group(1);
  int64_t expert = ids[pair];
  int first = int(lanes.column()) * mine * LANES + lanes.lane;
  if (expert < 0 || first >= inter) return;
  int columns = LANES == 1 ? sycl::min(mine, inter - first) : 1;
  const uint16_t *row = x + token * hidden, *w = w13 + expert * hidden * 2 * inter;
  float gate[mine], up[mine];
  dot_columns<LANES, mine>(row, w, hidden, 2 * inter, first, columns, gate);
  dot_columns<LANES, mine>(row, w, hidden, 2 * inter, inter + first, columns, up);
  for (int n = 0; n < columns; n++) p[pair * inter + first + n] = rn_bf16(activate(rn_bf16(gate[n]), rn_bf16(up[n]), act));
}

// Groups [tokens, blocks of columns]: each slot's product rounded, weighted and summed in the slots' order.
template <int LANES>
inline void wide_second(const uint16_t *p, const int32_t *ids, const float *weights, const uint16_t *w2, uint16_t *out, int hidden, int inter,
                        int top_k) {
  Lanes<LANES, 2> lanes;
  constexpr int mine = LANES == 1 ? wide_columns : 1;
  int64_t token = lanes.row();
  int first = int(lanes.column()) * mine * LANES + lanes.lane;
  if (first >= hidden) return;
  int columns = LANES == 1 ? sycl::min(mine, hidden - first) : 1;
  float total[mine], y[mine];
  for (float &t : total) t = 0.0f;
  for (int j = 0; j < top_k; j++) {
    int64_t pair = token * top_k + j, expert = ids[pair];
    if (expert < 0) continue;
    dot_columns<LANES, mine>(p + pair * inter, w2 + expert * inter * hidden, inter, hidden, first, columns, y);
    for (int n = 0; n < columns; n++) total[n] = total[n] + bf16_to_f32(rn_bf16(y[n])) * weights[pair];
  }
  for (int n = 0; n < columns; n++) out[token * hidden + first + n] = rn_bf16(total[n]);
}

KERNEL(3) void wide_first_cpu(const uint16_t *x, const int32_t *ids, const uint16_t *w13, uint16_t *p, int hidden, int inter, int top_k,
                              int act) {
  wide_first<1>(x, ids, w13, p, hidden, inter, top_k, act);
}
KERNEL(3) SUB_GROUP(16) void wide_first_gpu(const uint16_t *x, const int32_t *ids, const uint16_t *w13, uint16_t *p, int hidden, int inter,
                                            int top_k, int act) {
  wide_first<wide_lanes>(x, ids, w13, p, hidden, inter, top_k, act);
}
KERNEL(2) void wide_second_cpu(const uint16_t *p, const int32_t *ids, const float *weights, const uint16_t *w2, uint16_t *out, int hidden,
                               int inter, int top_k) {
  wide_second<1>(p, ids, weights, w2, out, hidden, inter, top_k);
}
KERNEL(2) SUB_GROUP(16) void wide_second_gpu(const uint16_t *p, const int32_t *ids, const float *weights, const uint16_t *w2, uint16_t *out,
                                             int hidden, int inter, int top_k) {
  wide_second<wide_lanes>(p, ids, weights, w2, out, hidden, inter, top_k);
}
