// The Python module: an XLA FFI handler, and what Python needs to set it up.

#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <mutex>
#include <optional>

#include "transport.h"
#include "xla/ffi/api/ffi.h"

namespace nb = nanobind;
namespace ffi = xla::ffi;

namespace jaxmpi {
namespace {

// One of each per process. The mutex keeps the messages of two threads apart; the flag is for those who only look.
std::unique_ptr<Transport> transport;
std::mutex one_at_a_time;
std::atomic<bool> inside = false;
PyObject* on_disagreement = nullptr;  // (word) -> str; held for as long as the process lives

class Entered {
 public:
  Entered() : lock_(one_at_a_time) { inside = true; }
  ~Entered() { inside = false; }

 private:
  std::lock_guard<std::mutex> lock_;
};

Transport& current() {
  if (!transport) throw std::runtime_error("jaxmpi is not initialized: its programs run between init and finalize");
  return *transport;
}

std::optional<Type> type_of(ffi::DataType type) {
  switch (type) {
    case ffi::DataType::F32: return Type::F32;
    case ffi::DataType::F64: return Type::F64;
    case ffi::DataType::BF16: return Type::BF16;
    case ffi::DataType::F16: return Type::F16;
    case ffi::DataType::S8: return Type::S8;
    case ffi::DataType::S16: return Type::S16;
    case ffi::DataType::S32: return Type::S32;
    case ffi::DataType::S64: return Type::S64;
    case ffi::DataType::U8: return Type::U8;
    case ffi::DataType::U16: return Type::U16;
    case ffi::DataType::U32: return Type::U32;
    case ffi::DataType::U64: return Type::U64;
    case ffi::DataType::C64: return Type::C64;
    case ffi::DataType::C128: return Type::C128;
    default: return std::nullopt;
  }
}

// What Python makes of a disagreement: it asks the other ranks for their sides, in words.
std::string explain(int64_t word) {
  nb::gil_scoped_acquire gil;
  try {
    return nb::cast<std::string>(nb::handle(on_disagreement)(word));
  } catch (const std::exception& error) {
    return error.what();
  }
}

ffi::Error collective(ffi::RemainingArgs args, ffi::RemainingRets rets, int32_t kind, int32_t op, int32_t divisor, int64_t word) {
  std::vector<Array> arrays;
  arrays.reserve(args.size());
  for (size_t i = 0; i < args.size(); ++i) {
    const auto in = args.get<ffi::AnyBuffer>(i);
    auto out = rets.get<ffi::AnyBuffer>(i);
    if (!in || !out) return ffi::Error::InvalidArgument("jaxmpi: an operand is no array");
    if (in->element_type() == ffi::DataType::TOKEN) continue;
    const auto type = type_of(in->element_type());
    if (!type) return ffi::Error::InvalidArgument("jaxmpi: an array of a type that the transport does not know");
    const int64_t columns = std::min<int64_t>(in->element_count(), (*out)->element_count());  // of an array, or of a row of it
    if (columns == 0) continue;
    arrays.push_back({*type, static_cast<const char*>(in->untyped_data()), static_cast<char*>((*out)->untyped_data()), columns});
  }
  try {
    const Entered entered;
    current().run(static_cast<Kind>(kind), static_cast<Op>(op), divisor, word, std::move(arrays));
  } catch (const Disagreement&) {
    return ffi::Error(ffi::ErrorCode::kFailedPrecondition, explain(word));
  } catch (const RankLost& error) {
    return ffi::Error(ffi::ErrorCode::kAborted, std::string("jaxmpi: ") + error.what() + " while this rank waited for it.");
  } catch (const std::exception& error) {
    return ffi::Error(ffi::ErrorCode::kInternal, std::string("jaxmpi: ") + error.what());
  }
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(handler, collective,
                              ffi::Ffi::Bind()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<int32_t>("kind")
                                  .Attr<int32_t>("op")
                                  .Attr<int32_t>("divisor")
                                  .Attr<int64_t>("word"));

void open(int rank, int size, std::vector<int> order, int owners, int local_rank, int local_size, int64_t slot_bytes, int slots,
          bool crowded, intptr_t memory, int file) {
  const Node::Layout layout = {local_rank, local_size, slot_bytes, slots, crowded};
  auto node = std::make_unique<Node>(layout, reinterpret_cast<char*>(memory), file);
  transport = std::make_unique<Transport>(Transport::Place{rank, size, std::move(order), owners}, std::move(node));
}

void connect(const std::string& library, intptr_t comm, const std::vector<intptr_t>& bytes, intptr_t int64, intptr_t max,
             std::vector<int> ranks, int node) {
  Nodes::Handles handles = {comm, {}, int64, max, std::move(ranks)};
  std::copy(bytes.begin(), bytes.end(), handles.bytes);
  current().connect(std::make_unique<Nodes>(library, handles, node));
}

std::pair<int64_t, int64_t> meet(int64_t word) {
  nb::gil_scoped_release release;
  const Entered entered;
  const Extremes words = current().meet(word);
  return {words.smallest, words.largest};
}

}  // namespace

NB_MODULE(_native, m) {
  m.doc() = "Collectives through shared memory within a node, and over MPI between nodes; see native/ in the sources.";
  m.def("can_reduce", &can_reduce);
  m.def("handler", [] { return nb::capsule(reinterpret_cast<void*>(handler)); });
  m.def("layout_bytes", [](int size, int64_t slot_bytes, int slots) { return Node::Layout{0, size, slot_bytes, slots, false}.bytes(); });
  m.def("open", &open, nb::kw_only(), nb::arg("rank"), nb::arg("size"), nb::arg("order"), nb::arg("owners"), nb::arg("local_rank"),
        nb::arg("local_size"), nb::arg("slot_bytes"), nb::arg("slots"), nb::arg("crowded"), nb::arg("memory"), nb::arg("file"));
  m.def("connect", &connect, nb::kw_only(), nb::arg("library"), nb::arg("comm"), nb::arg("bytes"), nb::arg("int64"), nb::arg("max"),
        nb::arg("ranks"), nb::arg("node"));
  m.def("on_disagreement", [](nb::callable f) { on_disagreement = f.release().ptr(); });
  m.def("meet", &meet);
  m.def("inside", [] { return inside.load(); });
  m.def("messages", [] { return transport ? transport->messages() : 0; });
  m.def("close", [] { transport.reset(); });
}

}  // namespace jaxmpi
