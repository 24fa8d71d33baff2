// Handles of memory and events for other processes.

#include "interprocess.h"

std::shared_ptr<SharedEvent> make_shared_event() {
  return std::make_shared<SharedEvent>();
}
