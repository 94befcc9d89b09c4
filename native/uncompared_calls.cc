#include "uncompared_calls.h"

#include <algorithm>

namespace jaxmpi {
namespace {

constexpr int64_t kMost = 4096;      // calls that wait for a message: seconds or minutes of steps
constexpr size_t kLast = 4 * kMost;  // calls that an error can name

using Lock = std::lock_guard<std::mutex>;

// Hash two numbers into one. The last step is that of MurmurHash3.
uint64_t mixed(uint64_t a, uint64_t b) {
  uint64_t x = a * 0x9e3779b97f4a7c15 + b;
  x = (x ^ x >> 33) * 0xff51afd7ed558ccd;
  x = (x ^ x >> 33) * 0xc4ceb9fe1a85ec53;
  return x ^ x >> 33;
}

}  // namespace

bool UncomparedCalls::compare_now(int64_t program) {
  const Lock lock(mutex_);
  if (since_ >= kMost || !known_.count(program)) return true;
  add(program);
  ++since_;
  return false;
}

void UncomparedCalls::record(int64_t branch) {
  const Lock lock(mutex_);
  add(branch);
}

void UncomparedCalls::add(int64_t call) {
  digest_ = mixed(digest_, call);
  last_.push_back(call);
  if (last_.size() > kLast) last_.pop_front();
  ++count_;
}

void UncomparedCalls::compared(int64_t program) {
  const Lock lock(mutex_);
  known_.insert(program);
}

Fingerprints UncomparedCalls::fingerprints_of(int64_t message) {
  const Lock lock(mutex_);
  since_ = 0;
  // A fingerprint has 62 bits, so that its negative is an int64, too.
  return {message, count_ ? static_cast<int64_t>(mixed(digest_, message) >> 2) : message, count_};
}

std::pair<int64_t, std::vector<int64_t>> UncomparedCalls::before(int64_t calls) {
  const Lock lock(mutex_);
  const int64_t first = count_ - static_cast<int64_t>(last_.size());
  const int64_t known = std::clamp<int64_t>(calls - first, 0, last_.size());
  return {first, {last_.begin(), last_.begin() + known}};
}

void UncomparedCalls::forget_calls() {
  const Lock lock(mutex_);
  last_.clear();
  count_ = since_ = 0;
  digest_ = 0;
}

void UncomparedCalls::forget() {
  forget_calls();
  const Lock lock(mutex_);
  known_.clear();
}

}  // namespace jaxmpi
