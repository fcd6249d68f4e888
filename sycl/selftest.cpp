// What every bitwise claim on a device rests on, one kernel a question; `b70-replay doctor --selftest` holds the answers
// against the oracle's.
#include "common.hpp"

KERNEL(1) void divide(const float *a, const float *b, float *out) {
  size_t i = this_item::get_nd_item<1>().get_global_linear_id();
  out[i] = a[i] / b[i];
}

KERNEL(1) void square_root(const float *a, float *out) {
  size_t i = this_item::get_nd_item<1>().get_global_linear_id();
  out[i] = sycl::sqrt(a[i]);
}

// a·b + c must round twice: contraction shows in about a quarter of random inputs.
KERNEL(1) void multiply_add(const float *a, const float *b, const float *c, float *out) {
  size_t i = this_item::get_nd_item<1>().get_global_linear_id();
  out[i] = a[i] * b[i] + c[i];
}

KERNEL(1) void to_bf16(const float *a, uint16_t *out) {
  size_t i = this_item::get_nd_item<1>().get_global_linear_id();
  out[i] = rn_bf16(a[i]);
}

KERNEL(1) void gate(const uint16_t *gates, uint16_t *out) {
  size_t i = this_item::get_nd_item<1>().get_global_linear_id();
  out[i] = rn_bf16(silu(bf16_to_f32(gates[i])));
}

// Each item's sum and maximum over its sub-group, and which sub-group of which group it was in.
KERNEL(1) void sub_group(const int32_t *a, int32_t *sum, int32_t *largest, int32_t *owner) {
  auto item = this_item::get_nd_item<1>();
  auto mine = item.get_sub_group();
  size_t i = item.get_global_linear_id();
  sum[i] = sycl::reduce_over_group(mine, a[i], sycl::plus<int32_t>());
  largest[i] = sycl::reduce_over_group(mine, a[i], sycl::maximum<int32_t>());
  owner[i] = int32_t(item.get_group_linear_id() * mine.get_group_linear_range() + mine.get_group_linear_id());
}
