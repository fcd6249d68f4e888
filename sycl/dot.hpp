// Exact s32 dot products of int8 rows, in the forms that each kind of device is quick at.
#pragma once
#include <sycl/ext/oneapi/dot_product.hpp>

#include <cstdint>

// Columns that one cpu work-item computes: enough to outweigh its start, few enough to share among cores.
constexpr int columns_per_item = 16;

inline int32_t dot(const int8_t *x, const int8_t *y, int k) {
  int32_t acc = 0;
  for (int i = 0; i < k; i++) acc += int32_t(x[i]) * int32_t(y[i]);
  return acc;
}

// One row against four consecutive columns: the row is widened once for all four.
inline void dot4(const int8_t *x, const int8_t *y, int k, int32_t *acc) {
  const int8_t *y1 = y + k, *y2 = y1 + k, *y3 = y2 + k;
  int32_t a0 = 0, a1 = 0, a2 = 0, a3 = 0;
  for (int i = 0; i < k; i++) {
    int32_t v = x[i];
    a0 += v * int32_t(y[i]);
    a1 += v * int32_t(y1[i]);
    a2 += v * int32_t(y2[i]);
    a3 += v * int32_t(y3[i]);
  }
  acc[0] = a0, acc[1] = a1, acc[2] = a2, acc[3] = a3;
}

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
