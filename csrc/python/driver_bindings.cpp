// Python bindings for drivers: adding devices to the runtime, fault injection, and kernels for tests.
#include <c10/util/SmallVector.h>
#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <vector>

#include "bindings.h"
#include "devices/communicator.h"
#include "devices/compiled_kernel.h"
#include "devices/device.h"
#include "devices/discovery.h"
#include "devices/faulty_device.h"
#include "devices/shutdown.h"
#include "drivers/cuda/cublas.h"
#include "drivers/cuda/cublaslt.h"
#include "drivers/cuda/cuda_launcher.h"
#include "drivers/cuda/cudnn.h"
#include "drivers/cuda/cufft.h"
#include "drivers/cuda/cusolver.h"
#include "drivers/cuda/nccl.h"
#include "drivers/driver_device.h"
#include "drivers/hip/hip_functions.h"
#include "drivers/host/discrete_device.h"
#include "drivers/host/host_device.h"
#include "drivers/opencl/clblast.h"
#include "drivers/opencl/vkfft.h"
#include "streams/stream.h"

namespace py = pybind11;

namespace backplane {
namespace {

void add(std::unique_ptr<Device> device, bool discrete) {
  const bool hide = discrete && device->properties().host_accessible();
  auto shown = hide ? make_discrete(std::move(device)) : std::move(device);
  add_device(faults_are_prepared() ? make_faulty(std::move(shown)) : std::move(shown));
}

// Kernels that tests compiled, by the handle that compile_kernel() returned.
std::map<uintptr_t, std::shared_ptr<const CompiledKernel>>& kernels() {
  static auto* all = new std::map<uintptr_t, std::shared_ptr<const CompiledKernel>>; // under the GIL
  return *all;
}

uintptr_t compile_kernel(c10::DeviceIndex index, const py::object& code, std::string entry, std::string operator_name) {
  KernelSource source{
      code.cast<std::string>(), std::move(entry), std::move(operator_name), py::isinstance<py::bytes>(code)};
  auto kernel = std::make_shared<const CompiledKernel>(index, std::move(source), std::vector<KernelParameter>());
  const auto number = reinterpret_cast<uintptr_t>(kernel.get());
  kernels().emplace(number, std::move(kernel));
  return number;
}

void destroy_kernel(c10::DeviceIndex, uintptr_t kernel) {
  kernels().erase(kernel);
}

void launch_kernel(
    c10::DeviceIndex index,
    uintptr_t kernel,
    const std::array<size_t, 3>& global_size,
    const std::array<size_t, 3>& group_size,
    const std::vector<py::object>& arguments,
    std::optional<c10::StreamId> stream_id,
    int64_t times,
    bool keep_gil) {
  c10::SmallVector<KernelArgument, 24> values;
  for (const py::object& argument : arguments) {
    if (PyBytes_Check(argument.ptr())) {
      values.push_back({PyBytes_AS_STRING(argument.ptr()), static_cast<uint32_t>(PyBytes_GET_SIZE(argument.ptr()))});
    } else {
      values.push_back({argument.cast<at::Tensor>().const_data_ptr(), 0});
    }
  }
  Device& owner = device(index);
  const StreamHandle stream = stream_handle(
      stream_id ? c10::Stream(c10::Stream::UNSAFE, c10::Device(c10::kPrivateUse1, index), *stream_id)
                : current_stream(index));
  const auto launched = kernels().at(kernel);
  std::optional<py::gil_scoped_release> released;
  if (!keep_gil) {
    released.emplace();
  }
  for (int64_t i = 0; i < times; ++i) {
    owner.submit(KernelLaunch{launched.get(), {global_size, group_size}, values}, stream);
  }
}

} // namespace

void bind_drivers(py::module_& module) {
  module.def(
      "set_discovery_functions",
      [](const py::function& discover, const py::function& initialize) {
        set_discovery_functions(discover.ptr(), initialize.ptr());
      },
      py::arg("discover"), py::arg("initialize"));
  module.def("finish_discovery", &finish_discovery);
  module.def("is_discovered", &is_discovered);
  module.def("finish_initialization", &finish_initialization);
  module.def("is_initialized", &is_initialized);
  module.def("is_lost", [](c10::DeviceIndex index) { return device(index).is_lost(); }, py::arg("index"));
  module.def(
      "add_host_device",
      [](DeviceProperties properties, bool discrete) {
        const size_t limit = properties.total_memory;
        add(make_host_device(std::move(properties), limit), discrete);
      },
      py::arg("properties"), py::arg("discrete") = false,
      "Add a device in host memory, limited to total_memory. `discrete`: with addresses that the CPU cannot access.");
  module.def("make_host_devices_asynchronous", &make_host_devices_asynchronous, py::arg("delays"));
  module.def(
      "add_driver_device",
      [](py::object device, DeviceProperties properties, bool discrete) {
        add(make_driver_device(next_device_index(), std::move(properties), std::move(device), discrete), discrete);
      },
      py::arg("device"), py::arg("properties"), py::arg("discrete") = false,
      "Add a torch_backplane.drivers.base.Device.");

  module.def(
      "clblast_products", &clblast_products, py::arg("functions"),
      "Return the addresses of the matmul routines, by dtype name, from the addresses of CLBlast's functions.");
  module.def(
      "vkfft_transforms", &vkfft_transforms, py::arg("functions"), py::arg("dimensions"),
      "Return the addresses of the fft routines, by dtype name, from the addresses of VkFFT's and OpenCL's functions.");
  module.def("vkfft_applications", &vkfft_applications);
  module.def("vkfft_max_applications", &vkfft_max_applications);
  module.def(
      "vkfft_limit_applications", &vkfft_limit_applications, py::arg("most"), py::call_guard<py::gil_scoped_release>());
  module.def("cuda_functions", &cuda::function_names, "Return the names of the functions that cuda_launcher needs.");
  module.def(
      "cuda_launcher", &cuda::make_launcher, py::arg("functions"), py::arg("index"), py::arg("device"),
      "Return the addresses of a C launcher's functions for a CUDA device, by name, from those of libcuda's "
      "functions.");
  module.def(
      "cuda_context", &cuda::context, py::arg("index"), py::call_guard<py::gil_scoped_release>(),
      "Return a CUresult and the primary context of a device of cuda_launcher.");
  module.def(
      "cuda_failed_call", &cuda::take_failed_call, py::arg("status"),
      "Return the name of the function of libcuda that has failed with a CUresult in this thread, or \"\".");
  module.def("cuda_sleep", &cuda::sleep, py::arg("index"), py::arg("stream"), py::arg("milliseconds"));
  module.def("hip_adapted", &hip::adapted_names, "Return the names of the functions of HIP that hip_adapt needs.");
  module.def(
      "hip_adapt", &hip::adapt, py::arg("functions"),
      "Return the addresses of functions with the parameters of CUDA's, by CUDA's name, from those of HIP's "
      "functions.");
  module.def("cublas_functions", &cuda::cublas_functions, "Return the names of the functions of cuBLAS that are used.");
  module.def(
      "cublas_routines", &cuda::cublas_routines, py::arg("functions"), py::arg("index"),
      "Return the addresses of the routines for a CUDA device, by family and dtype name, from those of cuBLAS's "
      "functions.");
  module.def(
      "cublas_prepare", &cuda::cublas_prepare, py::arg("index"), py::call_guard<py::gil_scoped_release>(),
      "Make cuBLAS ready for a CUDA device, and return a status of the routine.");
  module.def(
      "cublaslt_functions", &cuda::lt::functions, "Return the names of the functions of cuBLASLt that are used.");
  module.def(
      "cublaslt_routines", &cuda::lt::routines, py::arg("functions"), py::arg("index"), py::arg("workspace"),
      "Return the addresses of the routines for a CUDA device, by family and dtype name, from those of cuBLASLt's "
      "functions. `workspace`: the bytes that an algorithm can have.");
  module.def(
      "cublaslt_algorithms",
      [](size_t index, const std::string& family, const std::string& dtype, const std::vector<int64_t>& integers) {
        const cuda::lt::AlgorithmsFound found = cuda::lt::algorithms(index, family, dtype, integers);
        return std::make_tuple(found.status, found.count, found.workspace);
      },
      py::arg("index"), py::arg("family"), py::arg("dtype"), py::arg("integers"),
      py::call_guard<py::gil_scoped_release>(),
      "Return a status of the routine, how many algorithms there are, and the bytes of workspace of the one that is "
      "selected. `integers`: those of the family, in its order.");
  module.def("cudnn_functions", &cuda::cudnn_functions, "Return the names of the functions of cuDNN that are used.");
  module.def(
      "cudnn_routines", &cuda::cudnn_routines, py::arg("functions"), py::arg("family"), py::arg("index"),
      "Return the addresses of the routines of a family for a CUDA device, by dtype name, from those of cuDNN's "
      "functions.");
  module.def(
      "cudnn_workspace", &cuda::cudnn_workspace, py::arg("index"), py::arg("family"), py::arg("dtype"),
      py::arg("integers"), py::call_guard<py::gil_scoped_release>(),
      "Return a status of the routine and its bytes of workspace. `integers`: those of the family, in its order.");
  module.def("cufft_functions", &cuda::cufft_functions, "Return the names of the functions of cuFFT that are used.");
  module.def(
      "cufft_transforms", &cuda::cufft_transforms, py::arg("functions"), py::arg("index"),
      "Return the addresses of the fft routines for a CUDA device, by dtype name, from those of cuFFT's functions.");
  module.def(
      "cufft_workspace", &cuda::cufft_workspace, py::arg("index"), py::arg("dtype"), py::arg("kind"), py::arg("batch"),
      py::arg("sizes"), py::call_guard<py::gil_scoped_release>(),
      "Return a status of the routine and its bytes of workspace. `sizes`: outer, middle, inner.");
  module.def("cufft_plans", &cuda::cufft_plans, py::arg("index"));
  module.def("cufft_max_plans", &cuda::cufft_max_plans, py::arg("index"));
  module.def(
      "cufft_limit_plans", &cuda::cufft_limit_plans, py::arg("index"), py::arg("most"),
      py::call_guard<py::gil_scoped_release>());
  module.def(
      "cusolver_functions", &cuda::cusolver_functions, "Return the names of the functions of cuSOLVER that are used.");
  module.def(
      "cusolver_routines", &cuda::cusolver_routines, py::arg("functions"), py::arg("index"),
      "Return the addresses of the routines for a CUDA device, by family and dtype name, from those of cuSOLVER's "
      "functions.");
  module.def(
      "cusolver_workspace", &cuda::cusolver_workspace, py::arg("index"), py::arg("family"), py::arg("dtype"),
      py::arg("integers"), py::call_guard<py::gil_scoped_release>(),
      "Return a status of the routine and its bytes of workspace. `integers`: those of the family, in its order.");
  py::class_<CommunicationLibrary, std::shared_ptr<CommunicationLibrary>>(module, "CommunicationLibrary")
      .def_property_readonly("name", &CommunicationLibrary::name)
      .def_property_readonly("place", &CommunicationLibrary::place);
  module.def("nccl_functions", &cuda::nccl_functions, "Return the names of the functions of NCCL that are used.");
  module.def(
      "nccl_library", &cuda::nccl_library, py::arg("functions"), py::arg("index"), py::arg("name"), py::arg("place"),
      "Return NCCL for a CUDA device as a CommunicationLibrary, from the addresses of NCCL's functions. `name`: with "
      "the version. `place`: identifies the GPU among those of all machines.");
  // For torch_backplane.testing.faults.
  module.def("prepare_faults", &prepare_faults);
  module.def("fault_names", &fault_names);
  module.def(
      "fail_call",
      [](const std::string& name, uint64_t nth, const std::string& kind) {
        fail_call(
            name, nth,
            kind == "error"      ? FaultKind::Error
                : kind == "lost" ? FaultKind::Loss
                                 : FaultKind::OutOfMemory);
      },
      py::arg("name"), py::arg("nth") = 1, py::arg("kind") = "error");
  module.def("fail_by_chance", &fail_by_chance, py::arg("names"), py::arg("probability"), py::arg("seed"));
  module.def("slow_calls", &slow_calls, py::arg("milliseconds"));
  module.def("clear_faults", &clear_faults);
  module.def(
      "fault_counts",
      [](bool reset) {
        const FaultCounts counts = fault_counts(reset);
        return std::make_pair(counts.calls, counts.failed);
      },
      py::arg("reset") = false);
  module.def("finish_autograd_threads", &finish_autograd_threads, py::call_guard<py::gil_scoped_release>());
  module.def("finish_host_calls_at_exit", &finish_host_calls_at_exit);

  module.def(
      "is_planned",
      // The Python object and the argument hold one reference each.
      [](const std::shared_ptr<CompiledKernel>& kernel) { return kernel.use_count() > 2; }, py::arg("kernel"),
      "Return whether a plan or a running call holds the kernel, in addition to its Python object.");

  // Kernels without an operator, for tests and benchmarks.
  module.def(
      "compile_kernel", &compile_kernel, py::arg("device_index"), py::arg("code"), py::arg("entry"),
      py::arg("operator_name"),
      "Return a handle for launch_kernel and destroy_kernel. The kernel is built in the background.");
  module.def("destroy_kernel", &destroy_kernel, py::arg("device_index"), py::arg("handle"));
  module.def(
      "launch_kernel", &launch_kernel, py::arg("device_index"), py::arg("handle"), py::arg("global_size"),
      py::arg("group_size"), py::arg("arguments"), py::arg("stream_id") = py::none(), py::arg("times") = 1,
      py::arg("keep_gil") = false,
      "Launch a kernel on a stream; None: the current stream. Arguments are tensors, whose addresses are passed, and "
      "bytes.");
}

} // namespace backplane
