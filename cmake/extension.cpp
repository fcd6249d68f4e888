// The SYCL kernels as a torch XPU extension, compiled ahead of time by icpx: host side.
//
// Registers torch.ops.b70_replay.grouped_gemm_s8, which launches gemm_offsets_gpu on torch's current stream. The device
// code is included for icpx only; any other compiler sees the prototype, which is enough to check this file's syntax.
#define SYCL_DISABLE_FSYCL_SYCLHPP_WARNING 1
#include <torch/library.h>

#include <sycl/sycl.hpp>

#ifdef __INTEL_LLVM_COMPILER
#include <c10/xpu/XPUStream.h>

#include "moe_gemm.cpp"

static sycl::queue &current_queue() { return c10::xpu::getCurrentXPUStream().queue(); }
#else
extern "C" void gemm_offsets_gpu(const int8_t *a, const float *a_scale, const int8_t *w, const float *w_scale,
                                 const float *bias, uint16_t *out, int n, int k, int mode, int columns,
                                 const int64_t *offsets);

static sycl::queue &current_queue() {
  static sycl::queue queue;
  return queue;
}
#endif

namespace {

namespace sx = sycl::ext::oneapi::experimental;

constexpr int sub_group = 16, sub_groups = 4;

// a s8 [R, K], a_scale f32 [R], w s8 [E, N, K], w_scale f32 [E, N], offsets s64 [E+1] → out bf16 [R, N], in place.
void grouped_gemm_s8(const at::Tensor &a, const at::Tensor &a_scale, const at::Tensor &w, const at::Tensor &w_scale,
                     const at::Tensor &offsets, at::Tensor &out, bool scales_first) {
  TORCH_CHECK(a.scalar_type() == at::kChar && w.scalar_type() == at::kChar, "a, w: expected int8");
  TORCH_CHECK(a_scale.scalar_type() == at::kFloat && w_scale.scalar_type() == at::kFloat, "scales: expected float32");
  TORCH_CHECK(offsets.scalar_type() == at::kLong, "offsets: expected int64");
  TORCH_CHECK(out.scalar_type() == at::kBFloat16, "out: expected bfloat16");
  TORCH_CHECK(a.is_contiguous() && w.is_contiguous() && out.is_contiguous(), "a, w, out: expected contiguous");
  const int64_t experts = w.size(0), n = w.size(1), k = w.size(2);
  TORCH_CHECK(a.size(1) == k, "a: expected ", k, " columns, got ", a.size(1));
  TORCH_CHECK(offsets.numel() == experts + 1, "offsets: expected ", experts + 1, " values, got ", offsets.numel());
  const size_t groups = static_cast<size_t>((n + sub_groups - 1) / sub_groups);
  const sycl::nd_range<2> range({static_cast<size_t>(experts), groups * sub_group * sub_groups}, {1, sub_group * sub_groups});
  const float *bias = nullptr;
  sx::nd_launch(current_queue(), range, sx::kernel_function<gemm_offsets_gpu>, a.const_data_ptr<int8_t>(),
                a_scale.const_data_ptr<float>(), w.const_data_ptr<int8_t>(), w_scale.const_data_ptr<float>(), bias,
                reinterpret_cast<uint16_t *>(out.mutable_data_ptr()), static_cast<int>(n), static_cast<int>(k),
                static_cast<int>(scales_first), 0, offsets.const_data_ptr<int64_t>());
}

}  // namespace

TORCH_LIBRARY(b70_replay, m) {
  m.def("grouped_gemm_s8(Tensor a, Tensor a_scale, Tensor w, Tensor w_scale, Tensor offsets, Tensor(a!) out, "
        "bool scales_first=False) -> ()");
}

TORCH_LIBRARY_IMPL(b70_replay, XPU, m) { m.impl("grouped_gemm_s8", grouped_gemm_s8); }
