// Host side of the SYCL kernels: compile source at run time, keep it as SYCLBIN, and launch recorded programs.
//
// A plain C interface for ctypes. Every function that can fail returns null or -1 and leaves its reason in b70_error().
// A *program* is a list of launches recorded once; running it patches the pointers and submits them in order, so one
// call from Python costs one call however many kernels a layer has.
#define SYCL_DISABLE_FSYCL_SYCLHPP_WARNING 1
#include <sycl/sycl.hpp>

#include <cstring>
#include <string>
#include <vector>

namespace sx = sycl::ext::oneapi::experimental;
using Bundle = sycl::kernel_bundle<sycl::bundle_state::executable>;

#define API extern "C" __attribute__((visibility("default")))

static thread_local std::string last_error;

template <class R, class F> static R guarded(R failed, F body) {
  try {
    return body();
  } catch (const std::exception &error) {
    last_error = std::string(error.what()) + last_error;
    return failed;
  }
}

API const char *b70_error() { return last_error.c_str(); }

// The queue of torch's stream or of dpctl; SYCL queues are handles, so this shares the queue itself.
API void *b70_queue(void *queue) {
  return guarded<void *>(nullptr, [&] { return new sycl::queue(*static_cast<sycl::queue *>(queue)); });
}

API int b70_wait(void *queue) {
  return guarded(-1, [&] {
    static_cast<sycl::queue *>(queue)->wait_and_throw();
    return 0;
  });
}

API int b70_has_matrix(void *queue) {
  return guarded(-1, [&] {
    return static_cast<sycl::queue *>(queue)->get_device().has(sycl::aspect::ext_intel_matrix) ? 1 : 0;
  });
}

API void *b70_build(void *queue, const char *source, const char **options, int count) {
  last_error.clear();
  return guarded<void *>(nullptr, [&] {
    auto &q = *static_cast<sycl::queue *>(queue);
    std::vector<std::string> flags(options, options + count);
    auto text = sx::create_kernel_bundle_from_source(q.get_context(), sx::source_language::sycl, std::string(source));
    sx::properties properties{sx::build_options{flags}, sx::save_log{&last_error}};
    return new Bundle(sx::build(text, std::vector<sycl::device>{q.get_device()}, properties));
  });
}

API void *b70_load(void *queue, const char *bytes, size_t size) {
  return guarded<void *>(nullptr, [&] {
    auto &q = *static_cast<sycl::queue *>(queue);
    sycl::span<char> content(const_cast<char *>(bytes), size);
    std::vector<sycl::device> devices{q.get_device()};
    return new Bundle(sx::get_kernel_bundle<sycl::bundle_state::executable>(q.get_context(), devices, content));
  });
}

// The SYCLBIN of a bundle: its size when `into` is null, else the bytes.
API long b70_content(void *bundle, char *into) {
  return guarded(-1L, [&] {
    std::vector<char> content = static_cast<Bundle *>(bundle)->ext_oneapi_get_content();
    if (into) std::memcpy(into, content.data(), content.size());
    return static_cast<long>(content.size());
  });
}

API void *b70_kernel(void *bundle, const char *name) {
  return guarded<void *>(nullptr, [&] {
    return new sycl::kernel(static_cast<Bundle *>(bundle)->ext_oneapi_get_kernel(std::string(name)));
  });
}

namespace {

struct Argument {
  char kind;  // 'p' pointer slot, 'v' raw value, 'l' local memory
  size_t number;  // slot of 'p', bytes of 'l'
  std::vector<char> value;
};

struct Launch {
  sycl::kernel kernel;
  int dims;
  size_t global[3], local[3];
  std::vector<Argument> arguments;
};

struct Program {
  sycl::queue queue;
  std::vector<Launch> launches;
};

void submit(sycl::queue &queue, const Launch &launch, void *const *pointers) {
  sx::submit(queue, [&](sycl::handler &h) {
    for (size_t i = 0; i < launch.arguments.size(); i++) {
      const Argument &a = launch.arguments[i];
      if (a.kind == 'p') h.set_arg(i, pointers[a.number]);
      else if (a.kind == 'v') h.set_arg(i, sx::raw_kernel_arg(a.value.data(), a.value.size()));
      else h.set_arg(i, sycl::local_accessor<char, 1>(a.number, h));
    }
    const size_t *g = launch.global, *l = launch.local;
    if (launch.dims == 1) h.parallel_for(sycl::nd_range<1>(g[0], l[0]), launch.kernel);
    else if (launch.dims == 2) h.parallel_for(sycl::nd_range<2>({g[0], g[1]}, {l[0], l[1]}), launch.kernel);
    else h.parallel_for(sycl::nd_range<3>({g[0], g[1], g[2]}, {l[0], l[1], l[2]}), launch.kernel);
  });
}

}  // namespace

API void *b70_program(void *queue) {
  return guarded<void *>(nullptr, [&] { return new Program{*static_cast<sycl::queue *>(queue), {}}; });
}

API void b70_program_free(void *program) { delete static_cast<Program *>(program); }

API int b70_program_add(void *program, void *kernel, int dims, const size_t *global, const size_t *local, int count,
                        const char *kinds, const size_t *numbers, const void *const *values) {
  return guarded(-1, [&] {
    Launch launch{*static_cast<sycl::kernel *>(kernel), dims, {1, 1, 1}, {1, 1, 1}, {}};
    for (int d = 0; d < dims; d++) launch.global[d] = global[d], launch.local[d] = local[d];
    for (int i = 0; i < count; i++) {
      const char *bytes = static_cast<const char *>(values[i]);
      std::vector<char> value = kinds[i] == 'v' ? std::vector<char>(bytes, bytes + numbers[i]) : std::vector<char>();
      launch.arguments.push_back({kinds[i], numbers[i], std::move(value)});
    }
    static_cast<Program *>(program)->launches.push_back(std::move(launch));
    return 0;
  });
}

API int b70_program_run(void *program, void *const *pointers, int wait) {
  return guarded(-1, [&] {
    auto &p = *static_cast<Program *>(program);
    for (const Launch &launch : p.launches) submit(p.queue, launch, pointers);
    if (wait) p.queue.wait_and_throw();
    return 0;
  });
}
