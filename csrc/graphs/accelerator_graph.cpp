// torch.accelerator.Graph on bp: implements PyTorch's graph interface for backends, if this PyTorch has it (2.13 does).
#include "graphs/graph.h"

#if __has_include(<ATen/core/GraphImplInterface.h>)

#include <ATen/core/GraphImplInterface.h>
#include <c10/core/DeviceType.h>

#include "graphs/accelerator_graph.h"

namespace backplane {
namespace {

CaptureMode mode_of(at::GraphCaptureMode mode) {
  switch (mode) {
    case at::GraphCaptureMode::ThreadLocal:
      return CaptureMode::ThreadLocal;
    case at::GraphCaptureMode::Relaxed:
      return CaptureMode::Relaxed;
    default:
      return CaptureMode::Global;
  }
}

class AcceleratorGraph final : public at::GraphImplInterface {
 public:
  explicit AcceleratorGraph(const at::GraphImplArgs& given) : graph_(given.keep_graph) {}

  void capture_begin(c10::MempoolId_t pool, at::GraphCaptureMode mode) override {
    graph_.capture_begin(pool, mode_of(mode));
  }
  void capture_end() override {
    graph_.capture_end();
  }
  void instantiate() override {
    graph_.instantiate();
  }
  void replay() override {
    graph_.replay();
  }
  void reset() override {
    graph_.reset();
  }
  c10::MempoolId_t pool() const override {
    return graph_.pool();
  }
  void enable_debug_mode() override {
    graph_.enable_debug_mode();
  }
  void debug_dump(const std::string& path) override {
    graph_.debug_dump(path);
  }

 private:
  Graph graph_;
};

} // namespace

void register_accelerator_graph() {
  at::GraphImplRegistry()->Register(
      c10::DeviceTypeName(c10::kPrivateUse1, /*lower_case=*/false),
      [](const at::GraphImplArgs& given) -> std::unique_ptr<at::GraphImplInterface> {
        return std::make_unique<AcceleratorGraph>(given);
      });
}

} // namespace backplane

#else

#include "graphs/accelerator_graph.h"

namespace backplane {
void register_accelerator_graph() {}
} // namespace backplane

#endif
