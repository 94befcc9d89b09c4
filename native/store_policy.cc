#include "store_policy.h"

#include <algorithm>
#include <vector>

namespace jaxmpi {

void StorePolicy::decide() {
  // An earlier step of this chunk has decided, and cleared the times.
  if (spent_.back() == 0) return;
  auto median = [this](bool streamed) {
    std::vector<double> times;
    for (int64_t at = 0; at < kTrial; ++at) {
      if (at % kHalf >= kWarm && tried(at) == streamed) times.push_back(spent_[at]);
    }
    std::nth_element(times.begin(), times.begin() + times.size() / 2, times.end());
    return times[times.size() / 2];
  };
  const double ordinary = median(false), streamed = median(true);
  // A margin of a tenth, so that noise changes nothing.
  streaming_ = streaming_ ? streamed < 1.1 * ordinary : streamed < 0.9 * ordinary;
  spent_ = {};
}

}  // namespace jaxmpi
