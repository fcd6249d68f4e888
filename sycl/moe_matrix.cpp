// Grouped int8 GEMM on the matrix engine: s8×s8→s32 tiles of 8 rows by 16 columns by 32 deep (dpas on Xe2).
//
// Weights are packed four along K, [E, Kp/4, Np, 4] with Kp a multiple of 32 and Np of 16, zeros behind the real sizes.
// A work-group is one expert and four blocks of 16 columns, a sub-group a block. The rows of a tile are staged in local
// memory with zeros behind the last real row, so that nothing outside the expert's own rows is read. A source of its
// own: no CPU device can run it.
#include <sycl/ext/oneapi/matrix/matrix.hpp>

#include "common.hpp"

namespace mx = sycl::ext::oneapi::experimental::matrix;

constexpr int tile_rows = 8, tile_columns = 16, tile_depth = 32, sub_groups = 4;

KERNEL(2) SUB_GROUP(16) void gemm_matrix_gpu(const int8_t *a, const float *a_scale, const int8_t *w,
                                             const float *w_scale, const float *bias, uint16_t *out, int n, int k,
                                             int mode, const int64_t *offsets, sycl::local_accessor<char, 1> memory) {
  auto item = this_item::get_nd_item<2>();
  auto lanes = item.get_sub_group();
  int64_t e = item.get_group(0);
  int depth = (k + tile_depth - 1) / tile_depth * tile_depth, width = (n + tile_columns - 1) / tile_columns * tile_columns;
  int sub_group = int(lanes.get_group_linear_id()), lane = int(lanes.get_local_linear_id());
  int first = (int(item.get_group(1)) * sub_groups + sub_group) * tile_columns;
  int8_t *staged = reinterpret_cast<int8_t *>(&memory[0]);
  int32_t *sums = reinterpret_cast<int32_t *>(&memory[tile_rows * depth]) + sub_group * tile_rows * tile_columns;
  const int8_t *weights = w + e * depth * width;

  for (int64_t row = offsets[e]; row < offsets[e + 1]; row += tile_rows) {
    int valid = int(sycl::min<int64_t>(tile_rows, offsets[e + 1] - row));
    for (int r = 0; r < tile_rows; r++)
      for (int i = int(item.get_local_id(1)); i < depth; i += sub_groups * 16)
        staged[r * depth + i] = r < valid && i < k ? a[(row + r) * k + i] : int8_t(0);
    sycl::group_barrier(item.get_group());
    if (first < width) {
      mx::joint_matrix<sycl::sub_group, int32_t, mx::use::accumulator, tile_rows, tile_columns> acc;
      mx::joint_matrix_fill(lanes, acc, 0);
      for (int i = 0; i < depth; i += tile_depth) {
        mx::joint_matrix<sycl::sub_group, int8_t, mx::use::a, tile_rows, tile_depth, mx::layout::row_major> x;
        mx::joint_matrix<sycl::sub_group, int8_t, mx::use::b, tile_depth, tile_columns, mx::layout::ext_intel_packed> y;
        auto from = sycl::address_space_cast<sycl::access::address_space::local_space, sycl::access::decorated::no>(staged + i);
        auto packed = sycl::address_space_cast<sycl::access::address_space::global_space, sycl::access::decorated::no>(
            const_cast<int8_t *>(weights + int64_t(i) * width + first * 4));
        mx::joint_matrix_load(lanes, x, from, depth);
        mx::joint_matrix_load(lanes, y, packed, width * 4);
        mx::joint_matrix_mad(lanes, acc, x, y, acc);
      }
      auto to = sycl::address_space_cast<sycl::access::address_space::local_space, sycl::access::decorated::no>(sums);
      mx::joint_matrix_store(lanes, acc, to, tile_columns, mx::layout::row_major);
      sycl::group_barrier(lanes);
      int column = first + lane;
      if (column < n)
        for (int r = 0; r < valid; r++)
          out[(row + r) * n + column] = epilogue(sums[r * tile_columns + lane], a_scale[row + r], w_scale[e * n + column],
                                                 bias ? bias + e * n : nullptr, column, mode);
    }
    sycl::group_barrier(item.get_group());
  }
}
