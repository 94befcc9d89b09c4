#include "job.h"

namespace jaxmpi::job {

std::vector<std::unique_ptr<Transport>>& transports = *new std::vector<std::unique_ptr<Transport>>;
std::unique_ptr<Staging>& staging = *new std::unique_ptr<Staging>;
MessageQueue& queue = *new MessageQueue;
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

Comparison compare(int64_t fingerprint) {
  Comparison found = {};
  try {
    queue.run_at_once(kAll, [&] {
      const record::Exposed exposed;
      Transport& transport = current(kAll);
      const Fingerprints fingerprints = fingerprints_of(kAll, fingerprint);
      const record::Entered entered(transport, fingerprint, 0);
      found = {transport.compare(fingerprints.compared), fingerprints.calls};
    });
  } catch (const MessageMismatch& mismatch) {
    throw std::runtime_error(explain(mismatch.fingerprints, mismatch.group));
  }
  return found;
}

void close() {
  queue.close();
  uncompared.forget();
  transports.clear();
}

}  // namespace jaxmpi::job
