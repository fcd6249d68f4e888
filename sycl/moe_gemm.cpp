// Grouped int8 GEMM over permuted rows: out[r, n] = epilogue(Σ_k a[r, k]·w[e, n, k]), e the expert that owns row r.
//
// Weights are packed [E, N, K], so that one output column is one contiguous run. The s32 sum is exact in any order;
// only the epilogue has an order, and that is shared. Rows past offsets[E] are not touched.
#include "common.hpp"

constexpr int columns_per_item = 8;

// cpu body: one work-item, one row, eight columns, each a plain dot product that the CPU compiler vectorises.
KERNEL(2) void gemm_rows_cpu(const int8_t *a, const float *a_scale, const int64_t *offsets, const int8_t *w,
                        const float *w_scale, const float *bias, uint16_t *out, int experts, int n, int k, int mode) {
  auto item = this_item::get_nd_item<2>();
  int64_t row = item.get_global_id(0);
  if (row >= offsets[experts]) return;
  int64_t e = expert_of(offsets, experts, row);
  const int8_t *x = a + row * k;
  int first = int(item.get_global_id(1)) * columns_per_item;
  for (int column = first; column < n && column < first + columns_per_item; column++) {
    const int8_t *y = w + (e * n + column) * k;
    int32_t acc = 0;
    for (int i = 0; i < k; i++) acc += int32_t(x[i]) * int32_t(y[i]);
    out[row * n + column] =
        epilogue(acc, a_scale[row], w_scale[e * n + column], bias ? bias + e * n : nullptr, column, mode);
  }
}

// gpu body, portable form: one sub-group of 16 an output column, lanes along K, an integer sum over the lanes.
KERNEL(2) SUB_GROUP(16) void gemm_rows_gpu(const int8_t *a, const float *a_scale, const int64_t *offsets, const int8_t *w,
                                      const float *w_scale, const float *bias, uint16_t *out, int experts, int n,
                                      int k, int mode) {
  auto item = this_item::get_nd_item<2>();
  auto lanes = item.get_sub_group();
  int64_t row = item.get_group(0);
  int column = int(item.get_group(1) * lanes.get_group_linear_range() + lanes.get_group_linear_id());
  if (row >= offsets[experts] || column >= n) return;
  int64_t e = expert_of(offsets, experts, row);
  const int8_t *x = a + row * k, *y = w + (e * n + column) * k;
  int32_t acc = 0;
  for (int i = lanes.get_local_linear_id(); i < k; i += 16) acc += int32_t(x[i]) * int32_t(y[i]);
  acc = sycl::reduce_over_group(lanes, acc, sycl::plus<int32_t>());
  if (lanes.leader())
    out[row * n + column] =
        epilogue(acc, a_scale[row], w_scale[e * n + column], bias ? bias + e * n : nullptr, column, mode);
}
