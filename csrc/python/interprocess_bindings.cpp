// Python bindings for memory and events that are shared between processes.
#include <torch/csrc/Event.h>
#include <torch/csrc/utils/pybind.h>

#include "bindings.h"
#include "c10/adopted_event.h"
#include "c10/storage.h"
#include "devices/interprocess.h"

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
}

} // namespace backplane
