// The state of a job in this process: its transports, threads and counters. There is one of each
// for as long as the process lives, because a program may still run when Python ends.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "gpu_staging.h"
#include "message_queue.h"
#include "record.h"
#include "transport.h"
#include "uncompared_calls.h"

namespace jaxmpi::job {

constexpr int kAll = 0;  // the transport of all ranks

// The first is that of all ranks. For each way to divide the ranks into groups there is one more,
// of the group of this rank.
extern std::vector<std::unique_ptr<Transport>>& transports;
extern std::unique_ptr<Staging>& staging;  // for arrays of a GPU
extern MessageQueue& queue;                // of the messages of all transports
extern UncomparedCalls& uncompared;
// Describes a mismatch: Python asks the other ranks what they are doing, and returns the text.
extern std::function<std::string(const Fingerprints&, int32_t group)>& explain;

// Return a transport; throw where there is none, which is between `finalize` and `init`.
Transport& current(size_t group);

// The fingerprints of a message differ: what this rank was about to send, and to which group.
struct MessageMismatch : std::runtime_error {
  MessageMismatch(const Fingerprints& fingerprints, int32_t group)
      : std::runtime_error("collective mismatch between ranks"),
        fingerprints(fingerprints),
        group(group) {}
  const Fingerprints fingerprints;
  const int32_t group;
};

// Return the fingerprints of a message to a group. In a message to all ranks, the calls that this
// rank has made before are part of what is compared.
Fingerprints fingerprints_of(int32_t group, int64_t message);

// Carry out a message that has its turn by run(begin), which calls `begin` when this rank is ready
// to communicate: then the message is on record. Throw MessageMismatch where the ranks differ.
template <class Run>
void carry_out(Transport& transport, int32_t group, const Fingerprints& fingerprints, int64_t bytes,
               Run run) {
  std::optional<record::Entered> entered;
  try {
    run([&] { entered.emplace(transport, fingerprints.message, bytes); });
  } catch (const CollectiveMismatch&) {
    throw MessageMismatch(fingerprints, group);
  }
}

// Compare a fingerprint between all ranks. Return the range, and how many calls this rank has made
// before.
struct Comparison {
  FingerprintRange range;
  int64_t calls;
};
Comparison compare(int64_t fingerprint);

// End all messages, and close the transports.
void close();

}  // namespace jaxmpi::job
