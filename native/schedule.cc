#include "schedule.h"

#include <algorithm>

namespace jaxmpi {
namespace {

int modulo(int i, int n) { return (i % n + n) % n; }

// Return how many blocks are left after each round of a circulant reduce-scatter: p, ceil(p / 2),
// ceil(p / 4), ..., 1.
std::vector<int> halvings(int nodes) {
  std::vector<int> left = {nodes};
  while (left.back() > 1) left.push_back((left.back() + 1) / 2);
  return left;
}

}  // namespace

Schedule reduce_scatter_schedule(int nodes, int node, bool direct) {
  Schedule schedule;
  if (direct) {
    Round all;
    for (int i = 1; i < nodes; ++i) {
      all.push_back({modulo(node + i, nodes), modulo(node - i, nodes), i, i + 1, 0, 1, true});
    }
    schedule.push_back(all);
    return schedule;
  }
  // In each round a node sends the upper half of the blocks that it still has to the node `skip`
  // ahead, for which they are its lower half.
  const std::vector<int> left = halvings(nodes);
  for (size_t k = 0; k + 1 < left.size(); ++k) {
    const int skip = left[k + 1], sent = left[k] - skip;
    schedule.push_back(
        {{modulo(node + skip, nodes), modulo(node - skip, nodes), skip, left[k], 0, sent, true}});
  }
  return schedule;
}

Schedule allgather_schedule(int nodes, int node, bool direct) {
  Schedule schedule;
  if (direct) {
    Round all;
    for (int i = 1; i < nodes; ++i) {
      all.push_back({modulo(node - i, nodes), modulo(node + i, nodes), 0, 1, i, i + 1, false});
    }
    schedule.push_back(all);
    return schedule;
  }
  // The rounds of the reduce-scatter backwards, in the other direction.
  const std::vector<int> left = halvings(nodes);
  for (size_t k = left.size() - 1; k-- > 0;) {
    const int skip = left[k + 1], sent = left[k] - skip;
    schedule.push_back(
        {{modulo(node - skip, nodes), modulo(node + skip, nodes), 0, sent, skip, left[k], false}});
  }
  return schedule;
}

Schedule recursive_doubling_schedule(int nodes, int node) {
  int power = 1;
  while (2 * power <= nodes) power *= 2;
  // Of the first 2 · rest nodes, the odd ones leave their part with the node before them, and get
  // the result from it at the end. The other nodes are a power of two, and double their distance.
  const int rest = nodes - power;
  Schedule schedule;
  const bool folds = node < 2 * rest;
  if (folds && node % 2 == 1) {
    schedule.push_back({{node - 1, -1, 0, 1, 0, 0, false}});
    schedule.push_back({{-1, node - 1, 0, 0, 0, 1, false}});
    return schedule;
  }
  if (folds) schedule.push_back({{-1, node + 1, 0, 0, 0, 1, true}});
  const int position = folds ? node / 2 : node - rest;
  for (int distance = 1; distance < power; distance *= 2) {
    const int other = position ^ distance, peer = other < rest ? 2 * other : other + rest;
    schedule.push_back({{peer, peer, 0, 1, 0, 1, true}});
  }
  if (folds) schedule.push_back({{node + 1, -1, 0, 1, 0, 0, false}});
  return schedule;
}

Schedule broadcast_schedule(int nodes, int node, int root) {
  const int position = modulo(node - root, nodes);
  Schedule schedule;
  // A node receives from the position without its lowest bit, and sends to those with one lower bit
  // more. The root has no bit: its first child is the highest power of two.
  int distance = 1;
  while (distance < nodes && !(position & distance)) distance *= 2;
  if (position)
    schedule.push_back({{-1, modulo(position - distance + root, nodes), 0, 0, 0, 1, false}});
  Round children;
  for (distance /= 2; distance > 0; distance /= 2) {
    if (position + distance < nodes)
      children.push_back({modulo(position + distance + root, nodes), -1, 0, 1, 0, 0, false});
  }
  if (!children.empty()) schedule.push_back(children);
  return schedule;
}

}  // namespace jaxmpi
