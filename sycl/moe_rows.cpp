// The MoE stages that work row by row: quantise, remap, activation, combine, and the shared expert's gate.
//
// One work-group a row; `_cpu` with one lane, `_gpu` with 256 lanes in sub-groups of 16.
#include "common.hpp"

constexpr int gpu_lanes = 256;

// x bf16 [rows, width] → q s8 [rows, width], scale f32 [rows]; for group_trunc a row is one group.
template <int LANES>
inline void quantize_row(const uint16_t *x, int8_t *q, float *scale, int width, int mode) {
  Lanes<LANES> lanes;
  const uint16_t *from = x + lanes.row() * width;
  uint32_t absmax = 0;
  for (int i = lanes.lane; i < width; i += LANES) absmax = sycl::max(absmax, magnitude(bf16_to_f32(from[i])));
  RowScale s = row_scale(lanes.max(absmax), mode);
  quantize<LANES>([=](int i) { return bf16_to_f32(from[i]); }, q + lanes.row() * width, s, lanes.lane, width, mode);
  if (lanes.lane == 0) scale[lanes.row()] = s.scale;
}

KERNEL(1) void quantize_rows_cpu(const uint16_t *x, int8_t *q, float *scale, int width, int mode) {
  quantize_row<1>(x, q, scale, width, mode);
}
KERNEL(1) SUB_GROUP(16) void quantize_rows_gpu(const uint16_t *x, int8_t *q, float *scale, int width, int mode) {
  quantize_row<gpu_lanes>(x, q, scale, width, mode);
}

// One work-group a (token, slot) pair: its token's row goes to the pair's place; −1 goes nowhere.
template <int LANES>
inline void remap_row(const int8_t *q, const float *q_scale, const int32_t *permuted, int8_t *a, float *a_scale,
                      int width, int top_k) {
  Lanes<LANES, 2> lanes;
  int64_t to = permuted[lanes.row() * top_k + lanes.column()];
  if (to < 0) return;
  const int8_t *from = q + lanes.row() * width;
  copy_codes<LANES>(from, a + to * width, lanes.lane, width);
  if (lanes.lane == 0) a_scale[to] = q_scale[lanes.row()];
}

KERNEL(2) void remap_rows_cpu(const int8_t *q, const float *q_scale, const int32_t *permuted, int8_t *a,
                              float *a_scale, int width, int top_k) {
  remap_row<1>(q, q_scale, permuted, a, a_scale, width, top_k);
}
KERNEL(2) SUB_GROUP(16) void remap_rows_gpu(const int8_t *q, const float *q_scale, const int32_t *permuted, int8_t *a,
                                            float *a_scale, int width, int top_k) {
  remap_row<gpu_lanes>(q, q_scale, permuted, a, a_scale, width, top_k);
}

// Fused activation and quantisation: gate_up bf16 [rows, 2·inter] → h s8 [rows, inter] and its scale.
template <int LANES>
inline void act_quant_row(const uint16_t *gate_up, const int64_t *offsets, int8_t *h, float *h_scale, int experts,
                          int inter, int act, int mode) {
  Lanes<LANES> lanes;
  int64_t row = lanes.row();
  if (row >= offsets[experts]) return;
  const uint16_t *gate = gate_up + row * 2 * inter, *up = gate + inter;
  uint32_t absmax = 0;
  auto active = [=](int i) { return activate(gate[i], up[i], act); };
  // A cpu item keeps what it activated, as far as that fits; a lane of a gpu activates twice and keeps its registers.
  constexpr int kept = LANES == 1 ? 1024 : 0;
  if constexpr (kept > 0) {
    if (inter <= kept) {
      float p[kept];
      for (int i = 0; i < inter; i++) absmax = sycl::max(absmax, magnitude(p[i] = active(i)));
      RowScale s = row_scale(absmax, mode);
      quantize<LANES>([&](int i) { return p[i]; }, h + row * inter, s, 0, inter, mode);
      h_scale[row] = s.scale;
      return;
    }
  }
  for (int i = lanes.lane; i < inter; i += LANES) absmax = sycl::max(absmax, magnitude(active(i)));
  RowScale s = row_scale(lanes.max(absmax), mode);
  quantize<LANES>(active, h + row * inter, s, lanes.lane, inter, mode);
  if (lanes.lane == 0) h_scale[row] = s.scale;
}

KERNEL(1) void act_quant_cpu(const uint16_t *gate_up, const int64_t *offsets, int8_t *h, float *h_scale, int experts,
                             int inter, int act, int mode) {
  act_quant_row<1>(gate_up, offsets, h, h_scale, experts, inter, act, mode);
}
KERNEL(1) SUB_GROUP(16) void act_quant_gpu(const uint16_t *gate_up, const int64_t *offsets, int8_t *h, float *h_scale,
                                           int experts, int inter, int act, int mode) {
  act_quant_row<gpu_lanes>(gate_up, offsets, h, h_scale, experts, inter, act, mode);
}

// Two steps: the activation alone into f32 scratch, then the quantisation of that.
template <int LANES>
inline void activate_row(const uint16_t *gate_up, const int64_t *offsets, float *p, int experts, int inter, int act) {
  Lanes<LANES> lanes;
  int64_t row = lanes.row();
  if (row >= offsets[experts]) return;
  const uint16_t *gate = gate_up + row * 2 * inter, *up = gate + inter;
  for (int i = lanes.lane; i < inter; i += LANES) p[row * inter + i] = activate(gate[i], up[i], act);
}

KERNEL(1) void activate_cpu(const uint16_t *gate_up, const int64_t *offsets, float *p, int experts, int inter, int act) {
  activate_row<1>(gate_up, offsets, p, experts, inter, act);
}
KERNEL(1) SUB_GROUP(16) void activate_gpu(const uint16_t *gate_up, const int64_t *offsets, float *p, int experts,
                                          int inter, int act) {
  activate_row<gpu_lanes>(gate_up, offsets, p, experts, inter, act);
}

template <int LANES>
inline void quantize_f32_row(const float *p, const int64_t *offsets, int8_t *h, float *h_scale, int experts, int inter,
                             int mode) {
  Lanes<LANES> lanes;
  int64_t row = lanes.row();
  if (row >= offsets[experts]) return;
  uint32_t absmax = 0;
  for (int i = lanes.lane; i < inter; i += LANES) absmax = sycl::max(absmax, magnitude(p[row * inter + i]));
  RowScale s = row_scale(lanes.max(absmax), mode);
  quantize<LANES>([=](int i) { return p[row * inter + i]; }, h + row * inter, s, lanes.lane, inter, mode);
  if (lanes.lane == 0) h_scale[row] = s.scale;
}

KERNEL(1) void quantize_f32_cpu(const float *p, const int64_t *offsets, int8_t *h, float *h_scale, int experts,
                                int inter, int mode) {
  quantize_f32_row<1>(p, offsets, h, h_scale, experts, inter, mode);
}
KERNEL(1) SUB_GROUP(16) void quantize_f32_gpu(const float *p, const int64_t *offsets, int8_t *h, float *h_scale,
                                              int experts, int inter, int mode) {
  quantize_f32_row<gpu_lanes>(p, offsets, h, h_scale, experts, inter, mode);
}

// Weighted sum over a token's slots, in slot order, f32; −1 is skipped. One work-group a token and block of columns.
// With `direct`, y is in the order of the pairs and `permuted` only says which of them exist.
constexpr int combine_columns = 512;

template <int LANES>
inline void combine_row(const uint16_t *y, const int32_t *permuted, const float *weights, uint16_t *out, int width,
                        int top_k, int chain, int direct) {
  Lanes<LANES, 2> lanes;
  int64_t token = lanes.row();
  int first = int(lanes.column()) * combine_columns, last = sycl::min(width, first + combine_columns);
  float total[combine_columns / LANES];
  for (float &t : total) t = 0.0f;
  int mine = (last - first - lanes.lane + LANES - 1) / LANES;
  for (int j = 0; j < top_k; j++) {
    int64_t row = permuted[token * top_k + j];
    if (row < 0) continue;
    if (direct) row = token * top_k + j;
    float weight = weights[token * top_k + j];
    const uint16_t *from = y + row * width + first + lanes.lane;
    if (chain)
      for (int n = 0; n < mine; n++) total[n] = sycl::fma(bf16_to_f32(from[n * LANES]), weight, total[n]);
    else
      for (int n = 0; n < mine; n++) total[n] = total[n] + bf16_to_f32(from[n * LANES]) * weight;
  }
  uint16_t *to = out + token * width + first + lanes.lane;
  for (int n = 0; n < mine; n++) to[n * LANES] = rn_bf16(total[n]);
}

KERNEL(2) void combine_cpu(const uint16_t *y, const int32_t *permuted, const float *weights, uint16_t *out, int width,
                           int top_k, int chain, int direct) {
  combine_row<1>(y, permuted, weights, out, width, top_k, chain, direct);
}
KERNEL(2) SUB_GROUP(16) void combine_gpu(const uint16_t *y, const int32_t *permuted, const float *weights,
                                         uint16_t *out, int width, int top_k, int chain, int direct) {
  combine_row<gpu_lanes>(y, permuted, weights, out, width, top_k, chain, direct);
}

// The shared expert's gate: out = rn(routed + rn(s·y)), s = rn(sigmoid(−…)) of the ordered dot product x·w_gate.
// 32 items a token stand for the contract's 32 virtual lanes on a GPU; the cpu body keeps them in an array.
KERNEL(1) void shared_gate_cpu(const uint16_t *x, const uint16_t *w_gate, const uint16_t *y, const uint16_t *routed,
                               uint16_t *out, int width) {
  int64_t token = this_item::get_nd_item<1>().get_group(0);
  const uint16_t *row = x + token * width;
  float lanes[32] = {};
  for (int k = 0; k < width; k += 32)
    for (int l = 0; l < 32 && k + l < width; l++) lanes[l] += bf16_to_f32(row[k + l]) * bf16_to_f32(w_gate[k + l]);
  float s = bf16_to_f32(rn_bf16(sigmoid(bf16_to_f32(rn_bf16(fold32(lanes))))));
  for (int i = 0; i < width; i++) {
    float p = bf16_to_f32(rn_bf16(s * bf16_to_f32(y[token * width + i])));
    out[token * width + i] = rn_bf16(bf16_to_f32(routed[token * width + i]) + p);
  }
}

KERNEL(1) SUB_GROUP(16) void shared_gate_gpu(const uint16_t *x, const uint16_t *w_gate, const uint16_t *y,
                                             const uint16_t *routed, uint16_t *out, int width,
                                             sycl::local_accessor<char, 1> memory) {
  auto item = this_item::get_nd_item<1>();
  float *lanes = reinterpret_cast<float *>(&memory[0]);
  int64_t token = item.get_group(0);
  int lane = int(item.get_local_id(0));
  if (lane < 32) {
    float sum = 0.0f;
    for (int k = lane; k < width; k += 32) sum += bf16_to_f32(x[token * width + k]) * bf16_to_f32(w_gate[k]);
    lanes[lane] = sum;
  }
  for (int half = 16; half > 0; half /= 2) {
    sycl::group_barrier(item.get_group());
    if (lane < half) lanes[lane] += lanes[lane + half];
  }
  sycl::group_barrier(item.get_group());
  float s = bf16_to_f32(rn_bf16(sigmoid(bf16_to_f32(rn_bf16(lanes[0])))));
  for (int i = lane; i < width; i += gpu_lanes) {
    float p = bf16_to_f32(rn_bf16(s * bf16_to_f32(y[token * width + i])));
    out[token * width + i] = rn_bf16(bf16_to_f32(routed[token * width + i]) + p);
  }
}
