// User objects: what graphs keep until they do not use it any more.

#include "entry.h"
#include "graph.h"

UserObject::~UserObject() {
  call_from_driver(destroy, given);
}

API cuUserObjectCreate(CUuserObject* made, void* given, CUhostFn destroy, unsigned references, unsigned flags) {
  ENTER_UNLESS_FAILED();
  REQUIRE(made != nullptr && destroy != nullptr && references != 0 && flags == 1, CUDA_ERROR_INVALID_VALUE);
  auto object = std::make_shared<UserObject>();
  object->given = given;
  object->destroy = destroy;
  object->references = references;
  *made = Registry<UserObject>::all().add(object);
  return CUDA_SUCCESS;
}

namespace {

// Takes references from the caller. The object is removed with the last one.
CUresult take(const std::shared_ptr<UserObject>& object, unsigned references) {
  REQUIRE(object != nullptr && references != 0 && references <= object->references, CUDA_ERROR_INVALID_VALUE);
  object->references -= references;
  if (object->references == 0) {
    Registry<UserObject>::all().remove(object.get());
  }
  return CUDA_SUCCESS;
}

} // namespace

API cuUserObjectRelease(CUuserObject handle, unsigned references) {
  ENTER_UNLESS_FAILED();
  return take(find(handle), references);
}

API cuGraphRetainUserObject(CUgraph to, CUuserObject handle, unsigned references, unsigned flags) {
  ENTER_UNLESS_FAILED();
  const auto graph = find(to);
  const auto object = find(handle);
  REQUIRE(graph != nullptr && object != nullptr && references != 0 && flags <= 1, CUDA_ERROR_INVALID_VALUE);
  if (flags == 1) { // CU_GRAPH_USER_OBJECT_MOVE
    RETURN_ERROR(take(object, references));
  }
  std::lock_guard lock(graph->mutex);
  graph->objects.push_back(object);
  return CUDA_SUCCESS;
}
