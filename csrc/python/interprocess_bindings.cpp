// Python bindings for memory and events that are shared between processes; torch_backplane/accelerator/processes.py
// sends tensors with them.
#include <torch/csrc/Event.h>
#include <torch/csrc/utils/pybind.h>
#include <unistd.h>

#include "bindings.h"
#include "c10/adopted_event.h"
#include "c10/storage.h"
#include "devices/interprocess.h"
#include "streams/stream.h"

namespace py = pybind11;

namespace backplane {
namespace {

Interprocess& interprocess_of(c10::DeviceIndex index) {
  Device& owner = device(index);
  Interprocess* found = owner.interprocess();
  TORCH_CHECK_NOT_IMPLEMENTED(
      found != nullptr, "bp:", static_cast<int>(index), " (", owner.properties().name,
      ") shares neither memory nor events between processes: its driver's launcher has no INTERPROCESS functions "
      "(docs/driver-contract.md)");
  return *found;
}

InterprocessHandle as_handle(const py::bytes& given) {
  const std::string text = given;
  InterprocessHandle handle;
  TORCH_CHECK_VALUE(text.size() == handle.size(), "a handle has ", handle.size(), " bytes, but got ", text.size());
  std::copy(text.begin(), text.end(), handle.begin());
  return handle;
}

py::bytes as_bytes(const InterprocessHandle& handle) {
  return py::bytes(handle.data(), handle.size());
}

c10::Event& event_in(const py::object& event) {
  TORCH_CHECK_TYPE(
      THPEvent_Check(event.ptr()), "expected a torch.Event, but got ", std::string(py::str(py::type::of(event))));
  return reinterpret_cast<THPEvent*>(event.ptr())->event;
}

void give(const py::object& owner, c10::DeviceIndex index, EventHandle handle) {
  AdoptedEvent::give(event_in(owner), new Event{index, handle, /*timing=*/false, nullptr});
}

// An imported segment. Its storage owns it.
struct ImportedSegment {
  c10::DeviceIndex index;
  void* address;
  size_t bytes;

  static void close(void* given) {
    const std::unique_ptr<ImportedSegment> segment(static_cast<ImportedSegment*>(given));
    if (in_bad_fork()) {
      return;
    }
    try {
      interprocess_of(segment->index).close_memory(segment->address, segment->bytes);
    } catch (const std::exception& error) {
      TORCH_WARN(error.what()); // must not throw: can be called by a destructor
    }
  }
};

// Memory that another storage owns: shared memory of the CPU, or an imported segment.
struct SharedMemory {
  c10::DeviceIndex index;
  c10::Storage owner;
  int descriptor; // closed with the memory, which tells the sender that it is no longer used; -1: none

  static void release(void* given) {
    const std::unique_ptr<SharedMemory> memory(static_cast<SharedMemory*>(given));
    try {
      if (!in_bad_fork()) {
        synchronize_device(memory->index); // commands can still use the memory, which the owner unmaps
      }
    } catch (const std::exception& error) {
      TORCH_WARN(error.what()); // must not throw: can be called by a destructor
    }
    if (memory->descriptor >= 0) {
      ::close(memory->descriptor);
    }
  }

  static c10::DataPtr make(c10::DeviceIndex index, const c10::Storage& owner, size_t offset, int descriptor) {
    auto* memory = new SharedMemory{index, owner, descriptor};
    return {
        static_cast<char*>(owner.mutable_data()) + offset, memory, &SharedMemory::release,
        c10::Device(c10::kPrivateUse1, index)};
  }
};

// Whether the device computes in the host's memory, and can use any of it: a device of the driver `host`.
bool uses_host_memory(c10::DeviceIndex index) {
  const Device& owner = device(index);
  return owner.properties().dialect.empty() && owner.properties().host_accessible() && owner.host_sees_memory();
}

} // namespace

void bind_interprocess(py::module_& module) {
  module.def(
      "shares_between_processes", [](c10::DeviceIndex index) { return device(index).interprocess() != nullptr; },
      py::arg("index"));
  module.def(
      "make_shared_event",
      [](const py::object& event, c10::DeviceIndex index) {
        index = checked_index(index);
        give(event, index, interprocess_of(index).create_event());
      },
      py::arg("event"), py::arg("index"), "Attach an exportable event to a torch.Event that was never recorded.");
  module.def(
      "export_event",
      [](const py::object& event) {
        const auto* made = static_cast<const Event*>(event_in(event).eventId());
        return as_bytes(interprocess_of(made->device).export_event(made->handle));
      },
      py::arg("event"));
  module.def(
      "import_event",
      [](const py::object& event, c10::DeviceIndex index, const py::bytes& handle) {
        index = checked_index(index);
        Interprocess& owner = interprocess_of(index);
        give(event, index, owner.import_event(as_handle(handle)));
      },
      py::arg("event"), py::arg("index"), py::arg("handle"),
      "Attach another process's event to a torch.Event that was never recorded.");
  module.def(
      "export_memory",
      [](const at::Tensor& tensor) {
        TORCH_CHECK_TYPE(
            tensor.device().is_privateuseone(), "export_memory() takes a bp tensor, but got one on ", tensor.device());
        const auto& storage = tensor.storage();
        const auto found = interprocess_of(tensor.device().index()).export_memory(storage.data(), storage.nbytes());
        return std::make_tuple(as_bytes(found.handle), found.segment_bytes, found.offset, storage.nbytes());
      },
      py::arg("tensor"),
      "Return (handle, segment bytes, offset of the tensor's storage in the segment, storage bytes), for "
      "import_memory() in another process. The storage must live until the other process no longer uses the memory.");
  module.def(
      "import_memory",
      [](c10::DeviceIndex index, const py::bytes& handle, size_t segment_bytes, size_t offset, size_t bytes) {
        index = checked_index(index);
        TORCH_CHECK_VALUE(
            bytes <= segment_bytes && offset <= segment_bytes - bytes, bytes, " bytes at offset ", offset,
            " do not fit in a segment of size ", segment_bytes);
        void* start = interprocess_of(index).import_memory(as_handle(handle), segment_bytes);
        auto segment = std::make_unique<ImportedSegment>(ImportedSegment{index, start, segment_bytes});
        c10::DataPtr data(
            static_cast<char*>(start) + offset, segment.release(), &ImportedSegment::close,
            c10::Device(c10::kPrivateUse1, index));
        c10::Storage storage(
            c10::Storage::use_byte_size_t(), bytes, std::move(data), /*allocator=*/nullptr, /*resizable=*/false);
        return make_tensor(std::move(storage), caffe2::TypeMeta::Make<uint8_t>(), {static_cast<int64_t>(bytes)}, {1});
      },
      py::arg("index"), py::arg("handle"), py::arg("segment_bytes"), py::arg("offset"), py::arg("bytes"),
      "Return a tensor of bytes in another process's memory.");
  module.def(
      "uses_host_memory", [](c10::DeviceIndex index) { return uses_host_memory(checked_index(index)); },
      py::arg("index"));
  module.def(
      "tensor_in",
      [](c10::DeviceIndex index, const at::Tensor& owner, size_t offset, size_t bytes, int descriptor) {
        index = checked_index(index);
        TORCH_CHECK(
            owner.device().is_privateuseone() ? owner.device().index() == index : uses_host_memory(index),
            "bp:", static_cast<int>(index), " cannot use memory of ", owner.device());
        TORCH_CHECK_VALUE(
            bytes <= owner.storage().nbytes() && offset <= owner.storage().nbytes() - bytes, bytes, " bytes at offset ",
            offset, " do not fit in ", owner.storage().nbytes());
        c10::Storage storage(
            c10::Storage::use_byte_size_t(), bytes, SharedMemory::make(index, owner.storage(), offset, descriptor),
            /*allocator=*/nullptr, /*resizable=*/false);
        return make_tensor(std::move(storage), caffe2::TypeMeta::Make<uint8_t>(), {static_cast<int64_t>(bytes)}, {1});
      },
      py::arg("index"), py::arg("owner"), py::arg("offset"), py::arg("bytes"), py::arg("descriptor") = -1,
      "Return a tensor of bytes in the memory of another tensor's storage, which it keeps alive.");
  module.def(
      "move_to",
      [](const at::Tensor& tensor, const at::Tensor& owner) {
        auto* storage = tensor.storage().unsafeGetStorageImpl();
        const auto index = tensor.device().index();
        TORCH_CHECK(
            owner.is_cpu() && uses_host_memory(index) && owner.storage().nbytes() == storage->nbytes(), "memory of ",
            tensor.device(), " cannot move to ", owner.device());
        storage->mutable_data(); // ends copy-on-write
        storage->set_data_ptr_noswap(SharedMemory::make(index, owner.storage(), 0, /*descriptor=*/-1));
        storage->set_resizable(false);
      },
      py::arg("tensor"), py::arg("owner"),
      "Let the storage of a tensor on a host device use the memory of a CPU tensor, which has its contents.");
  module.def(
      "owner_of",
      [](const at::Tensor& tensor) -> std::optional<at::Tensor> {
        const auto& data = tensor.storage().data_ptr();
        if (data.get_deleter() != &SharedMemory::release) {
          return std::nullopt;
        }
        const auto& owner = static_cast<const SharedMemory*>(data.get_context())->owner;
        if (owner.device_type() != c10::kCPU) {
          return std::nullopt;
        }
        return at::detail::make_tensor<at::TensorImpl>(
            c10::Storage(owner), c10::DispatchKeySet(c10::DispatchKey::CPU), caffe2::TypeMeta::Make<uint8_t>());
      },
      py::arg("tensor"), "The CPU tensor whose memory the storage of a bp tensor uses; None if it has its own.");
}

} // namespace backplane
