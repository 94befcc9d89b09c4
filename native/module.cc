// The Python module: functions to set up the transports and XLA's handlers and to look at what they
// do, and the tables, limits and layouts that Python and C++ share, which are defined in C++ alone.

#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <tuple>
#include <utility>

#include "checksum.h"
#include "handlers.h"
#include "job.h"
#include "schedule.h"

namespace nb = nanobind;

namespace jaxmpi {
namespace {

PyObject* on_mismatch = nullptr;  // (fingerprint, group, calls before it) -> str, or null

std::string explain(const Fingerprints& fingerprints, int32_t group) {
  nb::gil_scoped_acquire gil;
  if (!on_mismatch) return "collective mismatch between ranks";
  try {
    return nb::cast<std::string>(
        nb::handle(on_mismatch)(fingerprints.message, group, fingerprints.calls));
  } catch (const std::exception& error) {
    return error.what();
  }
}

void set_explain(nb::callable f) {
  Py_XDECREF(std::exchange(on_mismatch, f.release().ptr()));
  job::explain = explain;
}

// Open a transport, and return its number. The first one, of all ranks, is 0.
size_t open(int rank, std::vector<int> order, std::vector<int> ranks, int node, int local_rank,
            std::vector<int> local_names, int64_t slot_bytes, int slots, int threads, bool crowded,
            intptr_t memory, int file) {
  const Node::Layout layout = {local_rank, ranks.at(node), slot_bytes,
                               slots,      crowded,        std::move(local_names)};
  std::vector<std::unique_ptr<Node>> nodes;
  for (int i = 0; i < threads; ++i) {
    nodes.push_back(
        std::make_unique<Node>(layout, reinterpret_cast<char*>(memory) + i * layout.bytes(), file));
  }
  job::transports.push_back(std::make_unique<Transport>(
      Topology(rank, std::move(order), std::move(ranks), node), std::move(nodes)));
  job::queue.open();
  return job::transports.size() - 1;
}

void connect(size_t group, const std::string& library, intptr_t comm, intptr_t byte,
             int request_bytes, int64_t small_bytes, int direct_nodes) {
  auto network = std::make_unique<Network>(library, Network::Handles{comm, byte, request_bytes});
  job::current(group).connect(std::move(network), Tuning{small_bytes, direct_nodes});
}

void close() {
  Py_CLEAR(on_mismatch);
  nb::gil_scoped_release release;
  job::close();
}

// Compare a fingerprint. Return the smallest and the largest of all ranks, and how many calls this
// rank has made before.
std::tuple<int64_t, int64_t, int64_t> compare(int64_t fingerprint) {
  nb::gil_scoped_release release;
  const job::Comparison comparison = job::compare(fingerprint);
  return {comparison.range.smallest, comparison.range.largest, comparison.calls};
}

// Return the rounds of a node, each a list of (to, from, send_begin, send_end, receive_begin,
// receive_end, reduces).
auto schedule(const std::string& name, int nodes, int node, bool direct, int root) {
  const Schedule rounds = name == "reduce_scatter" ? reduce_scatter_schedule(nodes, node, direct)
                          : name == "allgather"    ? allgather_schedule(nodes, node, direct)
                          : name == "bcast"        ? broadcast_schedule(nodes, node, root)
                                                   : recursive_doubling_schedule(nodes, node);
  std::vector<std::vector<std::tuple<int, int, int, int, int, int, bool>>> out;
  for (const Round& round : rounds) {
    auto& transfers = out.emplace_back();
    for (const auto& [to, from, a, b, c, d, reduces] : round)
      transfers.emplace_back(to, from, a, b, c, d, reduces);
  }
  return out;
}

template <class Enum, size_t count>
nb::dict numbers_of(const Named<Enum> (&table)[count]) {
  nb::dict numbers;
  for (const Named<Enum>& named : table) numbers[named.name] = static_cast<int>(named.value);
  return numbers;
}

#if defined(__clang__)
constexpr char kCompiler[] = __VERSION__;
#else
constexpr char kCompiler[] = "GCC " __VERSION__;
#endif

}  // namespace

NB_MODULE(_native, m) {
  record::open();  // `jaxmpi top` looks for it once
  m.doc() =
      "Collectives through shared memory within a node, and over MPI between nodes; see native/ in "
      "the sources.";
  // Change the number with every change of what Python calls, and that in extension.py with it: by
  // this Python refuses an extension of another version.
  m.attr("interface") = 13;
  m.attr("sources") = JAXMPI_SOURCES;
  m.attr("ffi") = handlers::ffi_version();
  m.attr("compiler") = kCompiler;

  // What Python and C++ share.
  m.attr("kinds") = numbers_of(kKinds);
  m.attr("operations") = numbers_of(kOps);
  m.attr("dtypes") = numbers_of(kTypes);
  m.attr("piece_bytes") = kPieceBytes;
  m.attr("record_name") = record::kFileName;
  m.attr("record_layout") = record::layout();

  m.def("can_reduce", &can_reduce);
  m.def("sum_of_words", [](uintptr_t words, size_t count, uintptr_t factors, size_t block,
                           int shift, uint64_t block_factor, uint64_t total) {
    nb::gil_scoped_release release;
    return sum_of_words(reinterpret_cast<const char*>(words), count,
                        reinterpret_cast<const uint64_t*>(factors), block, shift, block_factor,
                        total);
  });
  m.def("handler", [](const std::string& name) { return nb::capsule(handlers::find(name)); });
  m.def("set_rank", &handlers::set_rank);
  m.def("use_cuda", [](const std::string& library) {
    // Pinned memory is never freed, so each `init` uses what is there.
    if (!job::staging || job::staging->library() != library)
      job::staging = std::make_unique<Staging>(library);
  });
  m.def("staged_ns", [] {
    const auto& staging = job::staging;
    return staging ? std::make_pair(staging->waited_ns(), staging->carried_ns())
                   : std::make_pair(int64_t{0}, int64_t{0});
  });
  m.def("layout_bytes", [](int size, int64_t slot_bytes, int slots) {
    return Node::Layout{0, size, slot_bytes, slots, false, {}}.bytes();
  });
  m.def("open", &open, nb::kw_only(), nb::arg("rank"), nb::arg("order"), nb::arg("ranks"),
        nb::arg("node"), nb::arg("local_rank"), nb::arg("local_names") = std::vector<int>(),
        nb::arg("slot_bytes"), nb::arg("slots"), nb::arg("threads") = 1, nb::arg("crowded"),
        nb::arg("memory"), nb::arg("file"));
  m.def("connect", &connect, nb::kw_only(), nb::arg("group"), nb::arg("library"), nb::arg("comm"),
        nb::arg("byte"), nb::arg("request_bytes"), nb::arg("small_bytes"), nb::arg("direct_nodes"));
  m.def("schedule", &schedule, nb::arg("name"), nb::arg("nodes"), nb::arg("node"),
        nb::arg("direct") = false, nb::arg("root") = 0);
  m.def("count_ahead_from", [](int64_t first) { job::queue.count_from(first); });
  m.def("end_started", [] {
    nb::gil_scoped_release release;
    job::queue.end_started();
  });
  m.def("wait_for_all", [] {
    nb::gil_scoped_release release;
    job::queue.wait_for_all();
  });
  m.def("on_mismatch", &set_explain);
  m.def("compare", &compare);
  m.def("calls_before", [](int64_t calls) { return job::uncompared.before(calls); });
  m.def("forget_calls", [] { job::uncompared.forget_calls(); });
  m.def("messages", &record::messages);
  m.def("exposed_ns", &record::exposed_ns);
  m.def("waits", &record::last_waits);
  m.def("last_fingerprint", &record::last_fingerprint);
  m.def("events", &record::last_events);
  m.def("close", &close);
}

}  // namespace jaxmpi
