#include "job.h"

namespace jaxmpi::job {

std::vector<std::unique_ptr<Transport>>& transports = *new std::vector<std::unique_ptr<Transport>>;
std::unique_ptr<Staging>& staging = *new std::unique_ptr<Staging>;
CommunicationThread& communication = *new CommunicationThread;
MessagesAhead& ahead = *new MessagesAhead;
UncomparedCalls& uncompared = *new UncomparedCalls;
std::function<std::string(const Fingerprints&, int32_t)>& explain =
    *new std::function<std::string(const Fingerprints&, int32_t)>([](const Fingerprints&, int32_t) {
      return std::string("collective mismatch between ranks");
    });

Transport& current(size_t group) {
  if (group >= transports.size()) {
    throw std::runtime_error(
        "jaxmpi is not initialized: its programs run between init and finalize");
  }
  return *transports[group];
}

Fingerprints fingerprints_of(int32_t group, int64_t message) {
  return group == kAll ? uncompared.fingerprints_of(message) : Fingerprints{message, message, 0};
}

void drain(int32_t group) {
  const record::Exposed exposed;
  communication.drain();
  ahead.drain(group);
}

Comparison compare(int64_t fingerprint) {
  try {
    drain(kAll);
  } catch (const MessageMismatch& mismatch) {
    throw std::runtime_error(explain(mismatch.fingerprints, mismatch.group));
  }
  const record::Exposed exposed;
  Transport& transport = current(kAll);
  const Fingerprints fingerprints = fingerprints_of(kAll, fingerprint);
  const std::lock_guard<std::mutex> lock(transport.one_at_a_time);
  const record::Entered entered(transport, fingerprint, 0);
  return {transport.compare(fingerprints.compared), fingerprints.calls};
}

void close() {
  communication.forget();
  ahead.forget();
  uncompared.forget();
  for (auto& transport : transports)
    const std::lock_guard<std::mutex> until_its_message_has_ended(transport->one_at_a_time);
  transports.clear();
}

}  // namespace jaxmpi::job
