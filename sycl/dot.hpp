// Exact s32 dot products of int8 rows, in the forms that each kind of device is quick at.
#pragma once
#include <sycl/bit_cast.hpp>
#include <sycl/ext/oneapi/dot_product.hpp>

#include <cstdint>

// Columns that lie together in weights packed for the cpu body, and that it sums in the lanes of one vector.
constexpr int columns_together = 16;
// Rows of one expert that the cpu body takes together, so that weights are widened once for all of them.
constexpr int rows_together = 4;
// Depth of the widened copy of those rows: 16 KiB, which stays in the first-level cache.
constexpr int depth_chunk = 2048;

namespace cpu {

// Weights for the cpu body: [ceil(N/16), ceil(K/2), 16, 2] an expert, zeros behind the real sizes. A block of 16 columns
// is one sequential stream, which is what the prefetcher follows best, and its sums need no fold at the end.
using Codes = int8_t __attribute__((ext_vector_type(32)));
using Shorts = int16_t __attribute__((ext_vector_type(32)));
using Products = int32_t __attribute__((ext_vector_type(32)));
using Sums = int32_t __attribute__((ext_vector_type(columns_together)));

inline int64_t block_bytes(int k) { return int64_t((k + 1) / 2) * 2 * columns_together; }
inline int64_t expert_bytes(int n, int k) { return (n + columns_together - 1) / columns_together * block_bytes(k); }

// Pairs of s16 products added into s32: the one multiply of a CPU that takes 32 of them at once.
inline Sums multiply_add(Shorts x, Shorts y) {
  Products p = __builtin_convertvector(x, Products) * __builtin_convertvector(y, Products);
  return p.even + p.odd;
}

// One block of columns against R widened rows, `pairs` pairs deep.
template <int R>
inline void dot_block(const int16_t (&wide)[R][depth_chunk], const int8_t *block, int pairs, Sums (&acc)[R]) {
  const Codes *w = reinterpret_cast<const Codes *>(block);
  for (int i = 0; i < pairs; i++) {
    Shorts y = __builtin_convertvector(w[i], Shorts);
    for (int r = 0; r < R; r++) {
      Sums pair = *reinterpret_cast<const int32_t *>(&wide[r][2 * i]);  // the same pair in every column's lane
      acc[r] += multiply_add(sycl::bit_cast<Shorts>(pair), y);
    }
  }
}

// R rows, `stride` codes apart, against columns [begin, end) of one expert's packed weights, `begin` a multiple of 16:
// store(column, r, sum) for each.
template <int R, class Store>
inline void some_rows(const int8_t *x, int64_t stride, const int8_t *w, int begin, int end, int k, Store store) {
  alignas(64) int16_t wide[R][depth_chunk];
  for (int base = begin; base < end; base += columns_together) {
    Sums acc[R];
    for (int r = 0; r < R; r++) acc[r] = 0;
    const int8_t *block = w + base / columns_together * block_bytes(k);
    for (int start = 0; start < k; start += depth_chunk) {
      int depth = k - start < depth_chunk ? k - start : depth_chunk;
      if (base == begin || k > depth_chunk)
        for (int r = 0; r < R; r++) {
          for (int i = 0; i < depth; i++) wide[r][i] = x[r * stride + start + i];
          if (depth & 1) wide[r][depth] = 0;
        }
      dot_block<R>(wide, block + int64_t(start) * columns_together, (depth + 1) / 2, acc);
    }
    int last = end - base < columns_together ? end - base : columns_together;
    for (int r = 0; r < R; r++)
      for (int c = 0; c < last; c++) store(base + c, r, acc[r][c]);
  }
}

// At most `rows_together` rows.
template <class Store>
inline void rows(int count, const int8_t *x, int64_t stride, const int8_t *w, int begin, int end, int k, Store store) {
  if (count == 1) some_rows<1>(x, stride, w, begin, end, k, store);
  else if (count == 2) some_rows<2>(x, stride, w, begin, end, k, store);
  else if (count == 3) some_rows<3>(x, stride, w, begin, end, k, store);
  else some_rows<4>(x, stride, w, begin, end, k, store);
}

}  // namespace cpu

// One lane's share of a dot product among 16: every 16th word of four codes (dp4a on Xe2) where rows are made of whole
// words, else every 16th code.
inline int32_t dot_lanes(const int8_t *x, const int8_t *y, int k, int lane) {
  int32_t acc = 0;
  if (k & 3) {
    for (int i = lane; i < k; i += 16) acc += int32_t(x[i]) * int32_t(y[i]);
    return acc;
  }
  const int32_t *xs = reinterpret_cast<const int32_t *>(x), *ys = reinterpret_cast<const int32_t *>(y);
  for (int i = lane; i < k / 4; i += 16) acc = sycl::ext::oneapi::dot_acc(xs[i], ys[i], acc);
  return acc;
}
