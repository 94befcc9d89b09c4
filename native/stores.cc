#include "stores.h"

#include <algorithm>

namespace jaxmpi {

void Stores::decide() {
  if (spent_.back() == 0) return;  // by the first part of this chunk
  auto median = [this](int64_t way) {
    std::array<double, (kTrial - kWarm) / 2> times;
    for (size_t i = 0; i < times.size(); ++i) times[i] = spent_[kWarm + 2 * i + way];
    std::nth_element(times.begin(), times.begin() + times.size() / 2, times.end());
    return times[times.size() / 2];
  };
  const double ordinary = median(0), streamed = median(1);
  streaming_ = streaming_ ? streamed < 1.1 * ordinary : streamed < 0.9 * ordinary;  // no change for chance
  spent_ = {};
}

}  // namespace jaxmpi
