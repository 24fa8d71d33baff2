// Stream capture: operations of streams become nodes of a graph. Recording of events and waiting for them.

#pragma once

#include <map>
#include <thread>

#include "streams.h"

struct Capture {
  std::shared_ptr<Graph> graph;
  bool is_into_graph = false; // one that existed before
  std::weak_ptr<Stream> origin;
  int mode = 0;
  std::thread::id thread;
  unsigned long long id = 0;
  bool is_invalid = false;
  std::map<std::shared_ptr<Stream>, std::vector<CUgraphNode>>
      tails; // of each captured stream: what its next operation depends on
};

struct EventRecord : Operation {
  explicit EventRecord(std::shared_ptr<Event> given) : event(std::move(given)) {}
  CUresult execute(Context& context) override;
  void submitted(const std::shared_ptr<Completion>& done) override;
  int node_type() const override {
    return 7;
  }
  std::shared_ptr<Operation> clone() const override {
    return std::make_shared<EventRecord>(event);
  }

  std::shared_ptr<Event> event;
  uint64_t ticket = 0; // of an interprocess event
};

struct EventWait : Operation {
  explicit EventWait(std::shared_ptr<Event> given) : event(std::move(given)) {}
  CUresult execute(Context& context) override;
  Completions waits_for() override;
  int node_type() const override {
    return 6;
  }
  std::shared_ptr<Operation> clone() const override {
    return std::make_shared<EventWait>(event);
  }

  std::shared_ptr<Event> event;
  uint64_t ticket = 0;
};

// Records an event, or waits for one. `external`: as a node of the graph if the stream is captured.
CUresult record(const std::shared_ptr<Event>& event, const std::shared_ptr<Stream>& stream, bool external);
CUresult wait(const std::shared_ptr<Stream>& stream, const std::shared_ptr<Event>& event, bool external);

// Adds an operation to the graph of the stream's capture, and sets `is_captured`, if there is a capture.
CUresult capture_operation(
    const std::shared_ptr<Stream>& stream, const std::shared_ptr<Operation>& operation, bool* is_captured);

// Ends the capture that began in a stream, which is destroyed.
void abandon_capture(const std::shared_ptr<Stream>& stream);

// Returns an error if the stream is captured, and invalidates the capture.
CUresult refuse_if_capturing(const std::shared_ptr<Stream>& stream);
