// The state of a job in this process: what carries its messages. One of each, and for as long as
// the process lives: a program may still run when Python ends.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "communication_thread.h"
#include "gpu_staging.h"
#include "messages_ahead.h"
#include "record.h"
#include "transport.h"
#include "uncompared_calls.h"

namespace jaxmpi::job {

constexpr int kAll = 0;  // the transport of all ranks

// The first is that of all ranks, and there is one more for each way to part them into groups: that
// of this rank's.
extern std::vector<std::unique_ptr<Transport>>& transports;
extern std::unique_ptr<Staging>& staging;  // for arrays of a GPU
extern CommunicationThread&
    communication;            // of messages that are on their way while a program computes
extern MessagesAhead& ahead;  // and of those from one of its calls to a later one
extern UncomparedCalls& uncompared;
// What Python makes of a disagreement: it asks the other ranks for their sides, in words.
extern std::function<std::string(const Fingerprints&, int32_t group)>& explain;

// Throws where there is none: between `finalize` and `init`.
Transport& current(size_t group);

// Ranks that are about to do different things, in one message.
struct Refused : std::runtime_error {
  Refused(const Fingerprints& word, int32_t group)
      : std::runtime_error("the ranks do not do the same"), word(word), group(group) {}
  const Fingerprints word;
  const int32_t group;
};

// Of a message to the ranks of a group; to all ranks, what this rank has called before is part of
// them.
Fingerprints fingerprints_of(int32_t group, int64_t word);

// Waits until nothing is on its way any more that another message of a group must stay behind.
void drain(int32_t group);

// run(begin): it calls `begin` when this rank is ready to communicate.
template <class Run>
void carry_out(Transport& transport, int32_t group, const Fingerprints& word, int64_t bytes,
               Run run) {
  const std::lock_guard<std::mutex> lock(transport.one_at_a_time);
  std::optional<record::Entered> entered;
  try {
    run([&] { entered.emplace(transport, word.own, bytes); });
  } catch (const Disagreement&) {
    throw Refused(word, group);
  }
}

// The smallest and the largest word of the ranks, and how many calls this rank has made before.
struct Met {
  Extremes words;
  int64_t calls;
};
Met meet(int64_t own);

// Nothing is carried any more.
void close();

}  // namespace jaxmpi::job
