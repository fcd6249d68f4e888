// The SYCL kernels as a torch XPU extension, compiled ahead of time by icpx: host side.
//
// Registers torch.ops.b70_replay.*, the stages that an engine calls one by one, on torch's current stream. The device
// code is included for icpx only; any other compiler sees prototypes, which is enough to check this file's syntax.
#define SYCL_DISABLE_FSYCL_SYCLHPP_WARNING 1
#include <torch/library.h>

#include <limits>
#include <string>
#include <sycl/sycl.hpp>

#ifdef __INTEL_LLVM_COMPILER
#include <c10/xpu/XPUStream.h>

#include "moe_gemm.cpp"
#include "moe_rows.cpp"

static sycl::queue &current_queue() { return c10::xpu::getCurrentXPUStream().queue(); }
#else
extern "C" {
void gemm_offsets_gpu(const int8_t *a, const float *a_scale, const int8_t *w, const float *w_scale, const float *bias,
                      uint16_t *out, int n, int k, int mode, int columns, const int64_t *offsets);
void quantize_rows_gpu(const uint16_t *x, int8_t *q, float *scale, int width, int mode);
void act_quant_gpu(const uint16_t *gate_up, const int64_t *offsets, int8_t *h, float *h_scale, int experts, int inter,
                   int act, int mode);
void combine_gpu(const uint16_t *y, const int32_t *permuted, const float *weights, uint16_t *out, int width, int top_k,
                 int chain, int direct);
}
constexpr int combine_columns = 512;

static sycl::queue &current_queue() {
  static sycl::queue queue;
  return queue;
}
#endif

namespace {

namespace sx = sycl::ext::oneapi::experimental;

constexpr size_t row_lanes = 256, sub_group = 16, sub_groups = 4;

// One tensor against what it must be: dtype, shape, contiguous, on the device of the first.
void check(const char *name, const at::Tensor &t, at::ScalarType dtype, at::IntArrayRef shape, const at::Tensor &first) {
  TORCH_CHECK(t.scalar_type() == dtype, name, ": expected ", dtype, ", got ", t.scalar_type());
  TORCH_CHECK(t.sizes() == shape, name, ": expected shape ", shape, ", got ", t.sizes());
  TORCH_CHECK(t.is_contiguous(), name, ": expected contiguous");
  TORCH_CHECK(t.device() == first.device(), name, ": expected device ", first.device(), ", got ", t.device());
}

int to_int(const char *name, int64_t value) {
  TORCH_CHECK(0 < value && value <= std::numeric_limits<int>::max(), name, ": expected 1 to 2^31-1, got ", value);
  return static_cast<int>(value);
}

template <class T> const T *in(const at::Tensor &t) { return reinterpret_cast<const T *>(t.const_data_ptr()); }
template <class T> T *out_of(const at::Tensor &t) { return reinterpret_cast<T *>(t.mutable_data_ptr()); }

// a s8 [R, K], a_scale f32 [R], w s8 [E, N, K], w_scale f32 [E, N], offsets s64 [E+1] → out bf16 [R, N].
void grouped_gemm_s8(const at::Tensor &a, const at::Tensor &a_scale, const at::Tensor &w, const at::Tensor &w_scale,
                     const at::Tensor &offsets, const at::Tensor &out, bool scales_first) {
  TORCH_CHECK(a.dim() == 2 && w.dim() == 3, "a, w: expected 2 and 3 dimensions, got ", a.dim(), " and ", w.dim());
  const int64_t rows = a.size(0), experts = w.size(0), n = w.size(1), k = w.size(2);
  check("a", a, at::kChar, {rows, k}, a);
  check("a_scale", a_scale, at::kFloat, {rows}, a);
  check("w", w, at::kChar, {experts, n, k}, a);
  check("w_scale", w_scale, at::kFloat, {experts, n}, a);
  check("offsets", offsets, at::kLong, {experts + 1}, a);
  check("out", out, at::kBFloat16, {rows, n}, a);
  const size_t groups = (static_cast<size_t>(to_int("n", n)) + sub_groups - 1) / sub_groups;
  const sycl::nd_range<2> range({static_cast<size_t>(to_int("experts", experts)), groups * sub_group * sub_groups},
                                {1, sub_group * sub_groups});
  const float *bias = nullptr;
  sx::nd_launch(current_queue(), range, sx::kernel_function<gemm_offsets_gpu>, in<int8_t>(a), in<float>(a_scale),
                in<int8_t>(w), in<float>(w_scale), bias, out_of<uint16_t>(out), static_cast<int>(n), to_int("k", k),
                static_cast<int>(scales_first), 0, in<int64_t>(offsets));
}

// x bf16 [T, H] → q s8 [T, H], scale f32 [T]; mode as in arith.hpp's Quant.
void quantize_rows(const at::Tensor &x, const at::Tensor &q, const at::Tensor &scale, int64_t mode) {
  TORCH_CHECK(x.dim() == 2, "x: expected 2 dimensions, got ", x.dim());
  TORCH_CHECK(0 <= mode && mode < 4, "mode: expected 0 to 3, got ", mode);
  check("x", x, at::kBFloat16, x.sizes(), x);
  check("q", q, at::kChar, x.sizes(), x);
  check("scale", scale, at::kFloat, {x.size(0)}, x);
  const sycl::nd_range<1> range(static_cast<size_t>(to_int("rows", x.size(0))) * row_lanes, row_lanes);
  sx::nd_launch(current_queue(), range, sx::kernel_function<quantize_rows_gpu>, in<uint16_t>(x), out_of<int8_t>(q),
                out_of<float>(scale), to_int("width", x.size(1)), static_cast<int>(mode));
}

// gate_up bf16 [R, 2I] → h s8 [R, I], h_scale f32 [R]; rows past offsets[E] are left alone.
void silu_mul_quantize(const at::Tensor &gate_up, const at::Tensor &offsets, const at::Tensor &h, const at::Tensor &h_scale,
                       int64_t act, int64_t mode) {
  TORCH_CHECK(gate_up.dim() == 2 && gate_up.size(1) % 2 == 0, "gate_up: expected [R, 2I], got ", gate_up.sizes());
  TORCH_CHECK(0 <= act && act < 3 && 0 <= mode && mode < 4, "act, mode: expected 0 to 2 and 0 to 3, got ", act, " and ", mode);
  const int64_t rows = gate_up.size(0), inter = gate_up.size(1) / 2, experts = offsets.numel() - 1;
  check("gate_up", gate_up, at::kBFloat16, gate_up.sizes(), gate_up);
  check("offsets", offsets, at::kLong, {experts + 1}, gate_up);
  check("h", h, at::kChar, {rows, inter}, gate_up);
  check("h_scale", h_scale, at::kFloat, {rows}, gate_up);
  const sycl::nd_range<1> range(static_cast<size_t>(to_int("rows", rows)) * row_lanes, row_lanes);
  sx::nd_launch(current_queue(), range, sx::kernel_function<act_quant_gpu>, in<uint16_t>(gate_up), in<int64_t>(offsets),
                out_of<int8_t>(h), out_of<float>(h_scale), to_int("experts", experts), to_int("inter", inter),
                static_cast<int>(act), static_cast<int>(mode));
}

// y bf16 [R, H], unpermuted_to_permuted s32 [T, k], weights f32 [T, k] → out bf16 [T, H].
void combine(const at::Tensor &y, const at::Tensor &permuted, const at::Tensor &weights, const at::Tensor &out, bool fma_chain) {
  TORCH_CHECK(y.dim() == 2 && permuted.dim() == 2, "y, permuted: expected 2 dimensions each");
  const int64_t tokens = permuted.size(0), top_k = permuted.size(1), width = y.size(1);
  check("y", y, at::kBFloat16, y.sizes(), y);
  check("permuted", permuted, at::kInt, {tokens, top_k}, y);
  check("weights", weights, at::kFloat, {tokens, top_k}, y);
  check("out", out, at::kBFloat16, {tokens, width}, y);
  const size_t blocks = (static_cast<size_t>(to_int("width", width)) + combine_columns - 1) / combine_columns;
  const sycl::nd_range<2> range({static_cast<size_t>(to_int("tokens", tokens)), blocks * row_lanes}, {1, row_lanes});
  sx::nd_launch(current_queue(), range, sx::kernel_function<combine_gpu>, in<uint16_t>(y), in<int32_t>(permuted),
                in<float>(weights), out_of<uint16_t>(out), static_cast<int>(width), to_int("top_k", top_k),
                static_cast<int>(fma_chain), 0);
}

}  // namespace

TORCH_LIBRARY(b70_replay, m) {
  m.def("grouped_gemm_s8(Tensor a, Tensor a_scale, Tensor w, Tensor w_scale, Tensor offsets, Tensor(a!) out, "
        "bool scales_first=False) -> ()");
  m.def("quantize_rows(Tensor x, Tensor(a!) q, Tensor(b!) scale, int mode=0) -> ()");
  m.def("silu_mul_quantize(Tensor gate_up, Tensor offsets, Tensor(a!) h, Tensor(b!) h_scale, int act=0, int mode=0) -> ()");
  m.def("combine(Tensor y, Tensor permuted, Tensor weights, Tensor(a!) out, bool fma_chain=False) -> ()");
}

TORCH_LIBRARY_IMPL(b70_replay, XPU, m) {
  m.impl("grouped_gemm_s8", grouped_gemm_s8);
  m.impl("quantize_rows", quantize_rows);
  m.impl("silu_mul_quantize", silu_mul_quantize);
  m.impl("combine", combine);
}
