// What every kernel file begins with: the narrow SYCL headers, kernel declarations, bf16 and the shared arithmetic.
//
// Built with -ffp-contract=off, and on a GPU with correctly rounded division and square root: every f32 operation here
// rounds once, to nearest even. bf16 is converted with integer operations, because sycl::ext::oneapi::bfloat16 pulls in
// a device library that a SYCLBIN then lacks.
#pragma once
#include <sycl/accessor.hpp>
#include <sycl/bit_cast.hpp>
#include <sycl/builtins.hpp>
#include <sycl/ext/oneapi/free_function_kernel_properties.hpp>
#include <sycl/ext/oneapi/free_function_queries.hpp>
#include <sycl/ext/oneapi/kernel_properties/properties.hpp>
#include <sycl/group_algorithm.hpp>
#include <sycl/group_barrier.hpp>
#include <sycl/nd_item.hpp>

#include <cstdint>

namespace sx = sycl::ext::oneapi::experimental;
namespace this_item = sycl::ext::oneapi::this_work_item;

#define KERNEL(DIMS) extern "C" SYCL_EXT_ONEAPI_FUNCTION_PROPERTY((sx::nd_range_kernel<DIMS>))
#define SUB_GROUP(N) SYCL_EXT_ONEAPI_FUNCTION_PROPERTY((sx::sub_group_size<N>))

inline float bf16_to_f32(uint16_t x) { return sycl::bit_cast<float>(uint32_t(x) << 16); }

// Round to nearest even; every NaN becomes 0x7fc0.
inline uint16_t rn_bf16(float x) {
  uint32_t u = sycl::bit_cast<uint32_t>(x);
  if ((u & 0x7fffffffu) > 0x7f800000u) return 0x7fc0;
  return uint16_t((u + 0x7fffu + ((u >> 16) & 1)) >> 16);
}

enum Epilogue : int { row_then_col = 0, scales_first = 1 };

// The s32 sum to bf16, in the association that the mode names. `bias` may be null.
inline uint16_t epilogue(int32_t acc, float row_scale, float col_scale, const float *bias, int64_t column, int mode) {
  float y = float(acc);
  y = mode == row_then_col ? (y * row_scale) * col_scale : y * (row_scale * col_scale);
  if (bias) y = y + bias[column];
  return rn_bf16(y);
}

// The expert that owns a permuted row: offsets[e] <= row < offsets[e + 1], by bisection over int64 [experts + 1].
inline int expert_of(const int64_t *offsets, int experts, int64_t row) {
  int low = 0, high = experts;
  while (high - low > 1) {
    int middle = (low + high) / 2;
    if (offsets[middle] <= row) low = middle;
    else high = middle;
  }
  return low;
}
