// Exact s32 dot products of int8 rows, in the forms that each kind of device is quick at.
#pragma once
#include <sycl/builtins.hpp>
#include <sycl/ext/oneapi/dot_product.hpp>

#include <cstdint>

// Columns whose sums the cpu body holds before their epilogue, which then runs along them.
constexpr int columns_together = 16;
// Rows of one expert that the cpu body takes together, so that weights are widened once for all of them.
constexpr int rows_together = 4;
// Depth of the widened copy of those rows: 16 KiB, which stays in the first-level cache.
constexpr int depth_chunk = 2048;

namespace cpu {

using Codes = int8_t __attribute__((ext_vector_type(32), aligned(1)));
using Shorts = int16_t __attribute__((ext_vector_type(32), aligned(2)));
using Products = int32_t __attribute__((ext_vector_type(32)));
using Sums = int32_t __attribute__((ext_vector_type(16)));

// Pairs of s16 products added into s32: the one multiply of a CPU that takes 32 of them at once.
inline Sums multiply_add(Shorts x, Shorts y) {
  Products p = __builtin_convertvector(x, Products) * __builtin_convertvector(y, Products);
  return p.even + p.odd;
}

inline int32_t sum(Sums v) {
  auto a = v.lo + v.hi;
  auto b = a.lo + a.hi;
  auto c = b.lo + b.hi;
  return c.x + c.y;
}

// One column of `depth` codes against R widened rows. One column at a time: a single sequential stream is what the
// prefetcher follows best; four at once read cold memory at two thirds of the rate.
template <int R>
inline void dot_rows(const int16_t (&wide)[R][depth_chunk], const int8_t *column, int depth, int32_t (*sums)[columns_together]) {
  Sums acc[R];
  for (Sums &a : acc) a = 0;
  int i = 0;
  for (; i + 32 <= depth; i += 32) {
    Shorts y = __builtin_convertvector(*reinterpret_cast<const Codes *>(column + i), Shorts);
    for (int r = 0; r < R; r++) acc[r] += multiply_add(*reinterpret_cast<const Shorts *>(&wide[r][i]), y);
  }
  for (int r = 0; r < R; r++) sums[r][0] += sum(acc[r]);
  for (; i < depth; i++)
    for (int r = 0; r < R; r++) sums[r][0] += int32_t(wide[r][i]) * int32_t(column[i]);
}

// R rows, `stride` codes apart, against columns [begin, end) of w [n, k]: store(column, r, sum) for each.
template <int R, class Store>
inline void some_rows(const int8_t *x, int64_t stride, const int8_t *w, int begin, int end, int k, Store store) {
  int16_t wide[R][depth_chunk];
  for (int base = begin; base < end; base += columns_together) {
    int32_t sums[R][columns_together] = {};
    int last = end - base < columns_together ? end - base : columns_together;
    for (int start = 0; start < k; start += depth_chunk) {
      int depth = k - start < depth_chunk ? k - start : depth_chunk;
      if (base == begin || k > depth_chunk)
        for (int r = 0; r < R; r++)
          for (int i = 0; i < depth; i++) wide[r][i] = x[r * stride + start + i];
      for (int c = 0; c < last; c++) 
        dot_rows<R>(wide, w + int64_t(base + c) * k + start, depth,
                    reinterpret_cast<int32_t(*)[columns_together]>(&sums[0][c]));
    }
    for (int r = 0; r < R; r++)
      for (int c = 0; c < last; c++) store(base + c, r, sums[r][c]);
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
