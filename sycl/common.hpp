// What every kernel file begins with: the narrow SYCL headers, kernel declarations, and the shared arithmetic.
#pragma once
#include <sycl/accessor.hpp>
#include <sycl/atomic_ref.hpp>
#include <sycl/ext/oneapi/free_function_kernel_properties.hpp>
#include <sycl/ext/oneapi/free_function_queries.hpp>
#include <sycl/ext/oneapi/kernel_properties/properties.hpp>
#include <sycl/group_algorithm.hpp>
#include <sycl/group_barrier.hpp>
#include <sycl/nd_item.hpp>

#include "arith.hpp"

namespace sx = sycl::ext::oneapi::experimental;
namespace this_item = sycl::ext::oneapi::this_work_item;

#define KERNEL(DIMS) extern "C" SYCL_EXT_ONEAPI_FUNCTION_PROPERTY((sx::nd_range_kernel<DIMS>))
#define SUB_GROUP(N) SYCL_EXT_ONEAPI_FUNCTION_PROPERTY((sx::sub_group_size<N>))

// A work-group of LANES items that works on one row. With one lane every loop below is a plain loop, which is the body
// for a CPU device; with many it is the body for a GPU. Only integers are reduced, so the order never shows.
//
// Groups lie in one or two dimensions: (row) or (token, slot or block). A run-time division to tell them apart would
// cost the B70 an inexact reciprocal.
template <int LANES, int DIMS = 1> struct Lanes {
  sycl::nd_item<DIMS> item;
  int lane;

  Lanes() : item(this_item::get_nd_item<DIMS>()), lane(LANES == 1 ? 0 : int(item.get_local_id(DIMS - 1))) {}
  int64_t row() const { return item.get_group(0); }
  int64_t column() const { return item.get_group(DIMS - 1); }
  void barrier() const {
    if constexpr (LANES > 1) sycl::group_barrier(item.get_group());
  }
  uint32_t max(uint32_t x) const {
    if constexpr (LANES > 1) return sycl::reduce_over_group(item.get_group(), x, sycl::maximum<uint32_t>());
    else return x;
  }
};

// A row of codes from one place to another, in words of eight where the row is made of whole ones.
template <int LANES> inline void copy_codes(const int8_t *from, int8_t *to, int lane, int width) {
  if (width & 7) {
    for (int i = lane; i < width; i += LANES) to[i] = from[i];
    return;
  }
  const uint64_t *words = reinterpret_cast<const uint64_t *>(from);
  uint64_t *into = reinterpret_cast<uint64_t *>(to);
  for (int i = lane; i < width / 8; i += LANES) into[i] = words[i];
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
