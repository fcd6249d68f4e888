// Grouped int8 GEMM over permuted rows: out[r, n] = epilogue(Σ_k a[r, k]·w[e, n, k]), e the expert that owns row r.
//
// Weights are packed for the body: [E, N, K] for a GPU, so that an output column is one contiguous run; blocks of 16
// columns and pairs along K for a CPU (dot.hpp). The s32 sum is exact in any order; only
// the epilogue has an order, and that is shared. Rows past offsets[E] are not touched. The variants differ in who works
// on what:
//   rows            an item a row and block of columns; the expert is found by bisection
//   offsets         an item an expert and block of columns; an expert without rows leaves at once
//   active_offsets  the same over a list of the experts that have rows, made by a launch before
//   topk_direct     an item a (token, slot) pair and block of columns: no permutation is looked up but the pair's own
#include "common.hpp"
#include "dot.hpp"

struct Gemm {
  const int8_t *a;
  const float *a_scale;
  const int8_t *w;
  const float *w_scale, *bias;
  uint16_t *out;
  int n, k, mode, columns;  // columns that one cpu work-item computes

  void store(int64_t row, int64_t e, int column, int32_t acc) const {
    out[row * n + column] =
        epilogue(acc, a_scale[row], w_scale[e * n + column], bias ? bias + e * n : nullptr, column, mode);
  }
};

// Rows [first, last) of expert e against one block of columns, `rows_together` rows at a time.
inline void gemm_block_cpu(const Gemm &g, int64_t e, int64_t first, int64_t last, int block) {
  int begin = block * g.columns, end = sycl::min(g.n, begin + g.columns);
  for (int64_t row = first; row < last; row += rows_together)
    cpu::rows(int(sycl::min<int64_t>(rows_together, last - row)), g.a + row * g.k, g.k, g.w + e * cpu::expert_bytes(g.n, g.k), begin, end,
              g.k, [&](int column, int r, int32_t acc) { g.store(row + r, e, column, acc); });
}

// gpu body, portable form: a sub-group of 16 an output column, lanes along K in words of four codes.
inline void gemm_block_gpu(const Gemm &g, int64_t e, int64_t first, int64_t last, sycl::nd_item<2> item) {
  auto lanes = item.get_sub_group();
  int column = int(item.get_group(1) * lanes.get_group_linear_range() + lanes.get_group_linear_id());
  if (column >= g.n) return;
  for (int64_t row = first; row < last; row++) {
    int32_t acc = dot_lanes(g.a + row * g.k, g.w + (e * g.n + column) * g.k, g.k, lanes.get_local_linear_id());
    acc = sycl::reduce_over_group(lanes, acc, sycl::plus<int32_t>());
    if (lanes.leader()) g.store(row, e, column, acc);
  }
}

#define GEMM_ARGS                                                                                                     \
  const int8_t *a, const float *a_scale, const int8_t *w, const float *w_scale, const float *bias, uint16_t *out,    \
      int n, int k, int mode, int columns
#define GEMM Gemm{a, a_scale, w, w_scale, bias, out, n, k, mode, columns}

KERNEL(2) void gemm_rows_cpu(GEMM_ARGS, const int64_t *offsets, int experts) {
  auto item = this_item::get_nd_item<2>();
  int64_t row = item.get_group(0);
  if (row >= offsets[experts]) return;
  gemm_block_cpu(GEMM, expert_of(offsets, experts, row), row, row + 1, int(item.get_group(1)));
}
KERNEL(2) SUB_GROUP(16) void gemm_rows_gpu(GEMM_ARGS, const int64_t *offsets, int experts) {
  auto item = this_item::get_nd_item<2>();
  int64_t row = item.get_group(0);
  if (row >= offsets[experts]) return;
  gemm_block_gpu(GEMM, expert_of(offsets, experts, row), row, row + 1, item);
}

KERNEL(2) void gemm_offsets_cpu(GEMM_ARGS, const int64_t *offsets) {
  auto item = this_item::get_nd_item<2>();
  int64_t e = item.get_group(0);
  gemm_block_cpu(GEMM, e, offsets[e], offsets[e + 1], int(item.get_group(1)));
}
KERNEL(2) SUB_GROUP(16) void gemm_offsets_gpu(GEMM_ARGS, const int64_t *offsets) {
  auto item = this_item::get_nd_item<2>();
  int64_t e = item.get_group(0);
  gemm_block_gpu(GEMM, e, offsets[e], offsets[e + 1], item);
}

// The experts that have rows, ascending, and behind them −1 up to `slots`.
KERNEL(1) void list_active(const int64_t *offsets, int32_t *active, int experts, int slots) {
  int count = 0;
  for (int e = 0; e < experts && count < slots; e++)
    if (offsets[e + 1] > offsets[e]) active[count++] = e;
  for (; count < slots; count++) active[count] = -1;
}

KERNEL(2) void gemm_active_cpu(GEMM_ARGS, const int64_t *offsets, const int32_t *active) {
  auto item = this_item::get_nd_item<2>();
  int64_t e = active[item.get_group(0)];
  if (e >= 0) gemm_block_cpu(GEMM, e, offsets[e], offsets[e + 1], int(item.get_group(1)));
}
KERNEL(2) SUB_GROUP(16) void gemm_active_gpu(GEMM_ARGS, const int64_t *offsets, const int32_t *active) {
  auto item = this_item::get_nd_item<2>();
  int64_t e = active[item.get_group(0)];
  if (e >= 0) gemm_block_gpu(GEMM, e, offsets[e], offsets[e + 1], item);
}

KERNEL(2) void gemm_direct_cpu(GEMM_ARGS, const int32_t *ids, const int32_t *permuted) {
  auto item = this_item::get_nd_item<2>();
  int64_t row = permuted[item.get_group(0)];
  if (row >= 0) gemm_block_cpu(GEMM, ids[item.get_group(0)], row, row + 1, int(item.get_group(1)));
}
KERNEL(2) SUB_GROUP(16) void gemm_direct_gpu(GEMM_ARGS, const int32_t *ids, const int32_t *permuted) {
  auto item = this_item::get_nd_item<2>();
  int64_t row = permuted[item.get_group(0)];
  if (row >= 0) gemm_block_gpu(GEMM, ids[item.get_group(0)], row, row + 1, item);
}
