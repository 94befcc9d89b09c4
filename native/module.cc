// The Python module: an XLA FFI handler, and what Python needs to set it up.

#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <tuple>
#include <utility>

#include "communication_thread.h"
#include "gpu_staging.h"
#include "messages_ahead.h"
#include "schedule.h"
#include "transport.h"
#include "uncompared_calls.h"
#include "xla/ffi/api/ffi.h"

namespace nb = nanobind;
namespace ffi = xla::ffi;

namespace jaxmpi {
namespace {

// One of each per process, and for as long as it lives: a program may still run when Python ends.
// The first transport is that of all ranks, and there is one more for each way to part them into groups: that of this rank's.
std::vector<std::unique_ptr<Transport>>& transports = *new std::vector<std::unique_ptr<Transport>>;
std::unique_ptr<Staging>& staging = *new std::unique_ptr<Staging>;  // for arrays of a GPU
CommunicationThread& communication = *new CommunicationThread;  // of messages that are on their way while a program computes
MessagesAhead& ahead = *new MessagesAhead;                      // and of those from one of its calls to a later one
UncomparedCalls& uncompared = *new UncomparedCalls;
PyObject* on_disagreement = nullptr;  // (word, group, calls before it) -> str, or null
std::atomic<int32_t> rank_of_process = 0;

// The last messages, each at its number modulo kEvents, for those who look. Times are nanoseconds of the steady clock: when
// this rank entered it, when all ranks had, and when it was done here; 0 for what has not happened yet.
struct Event {
  std::atomic<int64_t> word, bytes, start, met, end;
};
constexpr int64_t kEvents = 4096;
struct Record {
  std::atomic<int64_t> started, ended;  // messages
  std::atomic<int64_t> exposed;         // nanoseconds for which programs have waited for messages, and done nothing else
  Event events[kEvents];
};

// In a file without a name, which `jaxmpi top` reads as /proc/PID/fd/N; in memory of our own where there can be none.
Record& make_record() {
  const int file = memfd_create("jaxmpi-events", MFD_CLOEXEC);
  if (file < 0) return *new Record{};
  void* memory = MAP_FAILED;
  if (ftruncate(file, sizeof(Record)) == 0) {
    memory = mmap(nullptr, sizeof(Record), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  }
  if (memory != MAP_FAILED) return *static_cast<Record*>(memory);
  ::close(file);
  return *new Record{};
}
Record& record = make_record();
std::atomic<int64_t>&started = record.started, &ended = record.ended, &exposed = record.exposed;
Event* const events = record.events;
std::mutex& entering = *new std::mutex;

constexpr int kAll = 0;  // the transport of all ranks

Transport& current(size_t group) {
  if (group >= transports.size()) {
    throw std::runtime_error("jaxmpi is not initialized: its programs run between init and finalize");
  }
  return *transports[group];
}

// Marks a message as the last one, from when this rank is ready to communicate; under the transport's mutex.
class Entered {
 public:
  Entered(const Transport& transport, int64_t word, int64_t bytes) : transport_(transport), event_(next(word, bytes)) {}
  ~Entered() {
    event_.end = now();
    if (transport_.met() >= event_.start) event_.met = transport_.met();
    ++ended;
  }

 private:
  static Event& next(int64_t word, int64_t bytes) {
    const std::lock_guard<std::mutex> lock(entering);
    Event& event = events[started % kEvents];
    event.word = word;
    event.bytes = bytes;
    event.met = event.end = 0;
    event.start = now();
    ++started;
    return event;
  }

  const Transport& transport_;
  Event& event_;
};

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
std::string explain(const Word& word, int32_t group) {
  nb::gil_scoped_acquire gil;
  if (!on_disagreement) return "the ranks do not do the same";
  try {
    return nb::cast<std::string>(nb::handle(on_disagreement)(word.own, group, word.calls));
  } catch (const std::exception& error) {
    return error.what();
  }
}

// Adds the time for which a program waits.
class Exposed {
 public:
  ~Exposed() { exposed += now() - start_; }

 private:
  const int64_t start_ = now();
};

// `others`: how many operands follow the arrays; the last one is a token.
std::vector<Array> arrays_of(Kind kind, int size, ffi::RemainingArgs args, ffi::RemainingRets rets, size_t first_out = 0,
                             size_t others = 1) {
  const int64_t rows = kind == Kind::Alltoall ? size : 1;  // of both
  std::vector<Array> arrays;
  arrays.reserve(args.size());
  for (size_t i = 0; i + others < args.size(); ++i) {
    const auto in = args.get<ffi::AnyBuffer>(i);
    auto out = rets.get<ffi::AnyBuffer>(first_out + i);
    if (!in || !out) throw std::runtime_error("an operand is no array");
    const auto type = type_of(in->element_type());
    if (!type) throw std::runtime_error("an array of a type that the transport does not know");
    const int64_t items = std::min<int64_t>(in->element_count(), (*out)->element_count());  // of an array, or of a row of it
    const int64_t columns = items / rows;
    if (columns == 0) continue;
    arrays.push_back(
        {*type, static_cast<const char*>(in->untyped_data()), static_cast<char*>((*out)->untyped_data()), columns});
  }
  return arrays;
}

// Ranks that are about to do different things, in one message.
struct Refused : std::runtime_error {
  Refused(const Word& word, int32_t group) : std::runtime_error("the ranks do not do the same"), word(word), group(group) {}
  const Word word;
  const int32_t group;
};

// What a message says to the ranks of a group; to all ranks, it says what this rank has called before, too.
Word said(int32_t group, int64_t word) { return group == kAll ? uncompared.said(word) : Word{word, word, 0}; }

// run(begin): it calls `begin` when this rank is ready to communicate.
template <class Run>
void carry_out(Transport& transport, int32_t group, const Word& word, int64_t bytes, Run run) {
  const std::lock_guard<std::mutex> lock(transport.one_at_a_time);
  std::optional<Entered> entered;
  try {
    run([&] { entered.emplace(transport, word.own, bytes); });
  } catch (const Disagreement&) {
    throw Refused(word, group);
  }
}

// What XLA is told of what is thrown.
template <class Body>
ffi::Error reported(Body body) {
  try {
    body();
    return ffi::Error::Success();
  } catch (const Refused& refused) {
    return ffi::Error(ffi::ErrorCode::kFailedPrecondition, explain(refused.word, refused.group));
  } catch (const std::exception& error) {
    return ffi::Error(ffi::ErrorCode::kInternal, std::string("jaxmpi: ") + error.what());
  }
}

int64_t bytes_of(const std::vector<Array>& arrays) {
  int64_t bytes = 0;
  for (const Array& array : arrays) bytes += array.columns * size_of(array.type);
  return bytes;
}

// Waits until nothing is on its way any more that another message of a group must stay behind.
void drain(int32_t group) {
  const Exposed exposed;
  communication.drain();
  ahead.drain(group);
}

// run(transport, arrays, what they say, begin), as in `carry_out`
template <class Run>
void carry_out_now(int32_t group, std::vector<Array> arrays, int64_t own, Run run) {
  drain(group);
  Transport& transport = current(group);
  const Word word = said(group, own);
  std::optional<Exposed> exposed;
  carry_out(transport, group, word, bytes_of(arrays), [&](auto begin) {
    run(transport, std::move(arrays), word.sent, [&] {
      begin();
      exposed.emplace();
    });
  });
}

template <class Run>
ffi::Error collective(Kind kind, int32_t group, ffi::RemainingArgs args, ffi::RemainingRets rets, int64_t word, Run run) {
  return reported([&] { carry_out_now(group, arrays_of(kind, current(group).size(), args, rets), word, run); });
}

// From and to which rank of a group each one's arrays go: the programs of all ranks are the same.
using Ranks = ffi::Span<const int32_t>;

// As XLA passes them; see `Operation`.
Operation operation_of(const Transport& transport, int32_t kind, int32_t op, int32_t divisor, Ranks sources, Ranks dests) {
  const size_t here = transport.rank();
  if (here >= sources.size() || here >= dests.size()) throw std::runtime_error("the program is that of a job with fewer ranks");
  return {static_cast<Kind>(kind), static_cast<Op>(op), divisor, sources[here], dests[here]};
}

ffi::Error on_host(ffi::RemainingArgs args, ffi::RemainingRets rets, int32_t group, int32_t kind, int32_t op, int32_t divisor,
                   Ranks sources, Ranks dests, int64_t word) {
  return collective(static_cast<Kind>(kind), group, args, rets, word,
                    [=](Transport& transport, std::vector<Array> arrays, int64_t sent, auto begin) {
                      const Operation operation = operation_of(transport, kind, op, divisor, sources, dests);
                      begin();
                      transport.run(operation, sent, std::move(arrays));
                    });
}

// A message that its `wait` ends. The first results are the operands, in place. In an allreduce they are what the wait returns,
// too; otherwise the others are. `first`: of those that are started before any wait.
// carry(transport, operation, arrays, what they say, begin), as in `carry_out`; `prepare` returns it
template <class Prepare>
ffi::Error start(ffi::RemainingArgs args, ffi::RemainingRets rets, int32_t group, int32_t kind, int32_t op, int32_t divisor,
                 Ranks sources, Ranks dests, int64_t word, bool bucket, bool first, Prepare prepare) {
  return reported([&] {
    if (first) communication.forget();  // what a program has left that failed before its waits
    try {
      Transport& transport = current(group);
      Operation operation = operation_of(transport, kind, op, divisor, sources, dests);
      operation.bucket = bucket;
      const size_t arrays_in = args.size() - 1;  // the last one is a token
      const size_t first_out = operation.kind == Kind::Allreduce ? 0 : arrays_in;
      std::vector<Array> arrays = arrays_of(operation.kind, transport.size(), args, rets, first_out);
      CommunicationThread::Memory memory;
      for (size_t i = 0; i + 1 < rets.size(); ++i) memory.push_back((*rets.get<ffi::AnyBuffer>(i))->untyped_data());
      {
        const Exposed exposed;
        ahead.drain(group);
      }
      communication.start(
          [=, &transport, word = said(group, word), carry = prepare()] {
            carry_out(transport, group, word, bytes_of(arrays),
                      [&](auto begin) { carry(transport, operation, std::vector<Array>(arrays), word.sent, begin); });
          },
          std::move(memory));
    } catch (...) {
      communication.forget();
      throw;
    }
  });
}

ffi::Error start_on_host(ffi::RemainingArgs args, ffi::RemainingRets rets, int32_t group, int32_t kind, int32_t op,
                         int32_t divisor, Ranks sources, Ranks dests, int64_t word, bool bucket, bool first) {
  return start(args, rets, group, kind, op, divisor, sources, dests, word, bucket, first, [] {
    return [](Transport& transport, const Operation& operation, std::vector<Array> arrays, int64_t sent, auto begin) {
      begin();
      transport.run(operation, sent, std::move(arrays));
    };
  });
}

// A message that is staged, a batch at a time.
Staging::Carry carrying(Transport& transport, const Operation& operation, int64_t word) {
  return [&transport, operation, word](std::vector<Array> arrays) { transport.run(operation, word, std::move(arrays)); };
}

ffi::Error start_on_gpu(void* stream, ffi::RemainingArgs args, ffi::RemainingRets rets, int32_t group, int32_t kind, int32_t op,
                        int32_t divisor, Ranks sources, Ranks dests, int64_t word, bool bucket, bool first) {
  return start(args, rets, group, kind, op, divisor, sources, dests, word, bucket, first, [stream] {
    const Staging::Ready ready = staging->ready(stream);
    return [ready](Transport& transport, const Operation& operation, std::vector<Array> arrays, int64_t sent, auto begin) {
      staging->run_beside(ready, operation, transport.size(), arrays, begin, carrying(transport, operation, sent));
    };
  });
}

ffi::Error start_rehearsal(ffi::RemainingArgs args, ffi::RemainingRets rets, int32_t group, int32_t kind, int32_t op,
                           int32_t divisor, Ranks sources, Ranks dests, int64_t word, bool bucket, bool first) {
  return start_on_gpu(nullptr, args, rets, group, kind, op, divisor, sources, dests, word, bucket, first);
}

// `started`: how many of its operands are those of the start; others are arrays that are to be computed before.
ffi::Error wait(ffi::RemainingArgs args, ffi::RemainingRets, int32_t started) {
  return reported([&] {
    const Exposed exposed;
    CommunicationThread::Memory memory;
    for (int32_t i = 0; i < started; ++i) memory.push_back(args.get<ffi::AnyBuffer>(i)->untyped_data());
    communication.wait(memory);
  });
}

constexpr size_t kNumberAndToken = 2;  // operands behind the arrays, or the token and the number's result

// The number of a message in two halves: 64-bit integers are not on by default in JAX.
using Number = ffi::BufferR1<ffi::DataType::U32>;

// A message that `take_on_host` takes, in a later call of a program.
ffi::Error send_ahead_on_host(ffi::RemainingArgs args, ffi::Result<Number> number, ffi::RemainingRets, int32_t group,
                              int32_t kind, int32_t op, int32_t divisor, Ranks sources, Ranks dests, int64_t word) {
  return reported([&] {
    {
      const Exposed exposed;
      communication.drain();
    }
    Transport& transport = current(group);
    const Operation operation = operation_of(transport, kind, op, divisor, sources, dests);
    if (operation.kind != Kind::Allreduce && operation.kind != Kind::Allgather) {
      throw std::runtime_error("a message of this kind cannot be sent ahead");
    }
    std::vector<Array> arrays;
    for (size_t i = 0; i + 1 < args.size(); ++i) {
      const auto in = args.get<ffi::AnyBuffer>(i);
      if (!in || !type_of(in->element_type())) throw std::runtime_error("an array of a type that the transport does not know");
      if (!in->element_count()) continue;
      const auto columns = static_cast<int64_t>(in->element_count());
      arrays.push_back({*type_of(in->element_type()), static_cast<const char*>(in->untyped_data()), nullptr, columns});
    }
    const int64_t rows = operation.kind == Kind::Allgather ? transport.size() : 1;
    const int64_t sent = ahead.start(group, arrays, rows, [=, &transport, word = said(group, word)](std::vector<Array> copies) {
      carry_out(transport, group, word, bytes_of(copies), [&](auto begin) {
        begin();
        transport.run(operation, word.sent, std::move(copies));
      });
    });
    number->typed_data()[0] = static_cast<uint32_t>(sent);
    number->typed_data()[1] = static_cast<uint32_t>(sent >> 32);
  });
}

// What a message that was sent ahead has brought. Where there is none, it is sent now.
ffi::Error take_on_host(ffi::RemainingArgs args, ffi::RemainingRets rets, int32_t group, int32_t kind, int32_t op,
                        int32_t divisor, Ranks sources, Ranks dests, int64_t word) {
  return reported([&] {
    std::vector<Array> arrays = arrays_of(static_cast<Kind>(kind), current(group).size(), args, rets, 0, kNumberAndToken);
    const auto number = args.get<Number>(args.size() - kNumberAndToken);
    if (!number) throw std::runtime_error("no number of a message");
    const int64_t sent = static_cast<int64_t>(number->typed_data()[0] | uint64_t{number->typed_data()[1]} << 32);
    {
      const Exposed exposed;
      if (ahead.take(sent, arrays)) return;
    }
    carry_out_now(group, std::move(arrays), word,
                  [=](Transport& transport, std::vector<Array> arrays, int64_t sent, auto begin) {
                    const Operation operation = operation_of(transport, kind, op, divisor, sources, dests);
                    begin();
                    transport.run(operation, sent, std::move(arrays));
                  });
  });
}

// At the start of a program whose first message may not compare it. `later`: whether all of its messages are to all ranks, so
// that a call that differs meets the next one of them.
ffi::Error compare(ffi::RemainingArgs, ffi::RemainingRets, int64_t word, bool later) {
  return reported([&] {
    current(kAll);
    ahead.raise();
    if (later && !uncompared.compare_now(word)) return;
    carry_out_now(kAll, {}, word, [](Transport& transport, std::vector<Array>, int64_t sent, auto begin) {
      begin();
      transport.run({Kind::Allreduce, Op::Sum, 1, -1, -1}, sent, {});
    });
    if (later) uncompared.compared(word);
  });
}

ffi::Error on_gpu(void* stream, ffi::RemainingArgs args, ffi::RemainingRets rets, int32_t group, int32_t kind, int32_t op,
                  int32_t divisor, Ranks sources, Ranks dests, int64_t word) {
  return collective(static_cast<Kind>(kind), group, args, rets, word,
                    [=](Transport& transport, std::vector<Array> arrays, int64_t sent, auto begin) {
                      const Operation operation = operation_of(transport, kind, op, divisor, sources, dests);
                      staging->run(operation, transport.size(), arrays, stream, begin, carrying(transport, operation, sent));
                    });
}

// A GPU's handler for arrays of the host, to try it with a library that stands in for CUDA's.
ffi::Error rehearsal(ffi::RemainingArgs args, ffi::RemainingRets rets, int32_t group, int32_t kind, int32_t op, int32_t divisor,
                     Ranks sources, Ranks dests, int64_t word) {
  const ffi::Error error = on_gpu(nullptr, args, rets, group, kind, op, divisor, sources, dests, word);
  return error.success() ? reported([] { staging->finish(nullptr); }) : error;  // what reads the results is on no stream
}

// The number of this rank, so that the programs of all ranks are the same.
ffi::Error rank_value(ffi::Result<ffi::BufferR0<ffi::DataType::S32>> out) {
  *out->typed_data() = rank_of_process;
  return ffi::Error::Success();
}

template <class Binding>
auto operation(Binding binding) {
  return std::move(binding)
      .template Attr<int32_t>("group")
      .template Attr<int32_t>("kind")
      .template Attr<int32_t>("op")
      .template Attr<int32_t>("divisor")
      .template Attr<Ranks>("sources")
      .template Attr<Ranks>("dests")
      .template Attr<int64_t>("word");
}

template <class Binding>
auto operands(Binding binding) {
  return operation(std::move(binding).RemainingArgs().RemainingRets());
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(host_handler, on_host, operands(ffi::Ffi::Bind()));
XLA_FFI_DEFINE_HANDLER_SYMBOL(start_handler, start_on_host,
                              operands(ffi::Ffi::Bind()).Attr<bool>("bucket").Attr<bool>("first"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    start_gpu_handler, start_on_gpu,
    operands(ffi::Ffi::Bind().Ctx<ffi::PlatformStream<void*>>()).Attr<bool>("bucket").Attr<bool>("first"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(start_rehearsal_handler, start_rehearsal,
                              operands(ffi::Ffi::Bind()).Attr<bool>("bucket").Attr<bool>("first"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(wait_handler, wait, ffi::Ffi::Bind().RemainingArgs().RemainingRets().Attr<int32_t>("started"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(send_ahead_handler, send_ahead_on_host,
                              operation(ffi::Ffi::Bind().RemainingArgs().Ret<Number>().RemainingRets()));
XLA_FFI_DEFINE_HANDLER_SYMBOL(take_handler, take_on_host, operands(ffi::Ffi::Bind()));
XLA_FFI_DEFINE_HANDLER_SYMBOL(compare_handler, compare,
                              ffi::Ffi::Bind().RemainingArgs().RemainingRets().Attr<int64_t>("word").Attr<bool>("later"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(gpu_handler, on_gpu, operands(ffi::Ffi::Bind().Ctx<ffi::PlatformStream<void*>>()));
XLA_FFI_DEFINE_HANDLER_SYMBOL(rehearsal_handler, rehearsal, operands(ffi::Ffi::Bind()));
XLA_FFI_DEFINE_HANDLER_SYMBOL(rank_handler, rank_value, ffi::Ffi::Bind().Ret<ffi::BufferR0<ffi::DataType::S32>>());

nb::capsule handler(const std::string& name) {
  if (name == "host") return nb::capsule(reinterpret_cast<void*>(host_handler));
  if (name == "start") return nb::capsule(reinterpret_cast<void*>(start_handler));
  if (name == "start_gpu") return nb::capsule(reinterpret_cast<void*>(start_gpu_handler));
  if (name == "start_rehearsal") return nb::capsule(reinterpret_cast<void*>(start_rehearsal_handler));
  if (name == "wait") return nb::capsule(reinterpret_cast<void*>(wait_handler));
  if (name == "send_ahead") return nb::capsule(reinterpret_cast<void*>(send_ahead_handler));
  if (name == "take") return nb::capsule(reinterpret_cast<void*>(take_handler));
  if (name == "compare") return nb::capsule(reinterpret_cast<void*>(compare_handler));
  if (name == "gpu") return nb::capsule(reinterpret_cast<void*>(gpu_handler));
  if (name == "rehearsal") return nb::capsule(reinterpret_cast<void*>(rehearsal_handler));
  if (name == "rank") return nb::capsule(reinterpret_cast<void*>(rank_handler));
  throw std::invalid_argument("no handler is called " + name);
}

// Returns the number of the transport; that of all ranks is the first.
size_t open(int rank, std::vector<int> order, std::vector<int> ranks, int node, int local_rank, std::vector<int> local_names,
            int64_t slot_bytes, int slots, int threads, bool crowded, intptr_t memory, int file) {
  const Node::Layout layout = {local_rank, ranks.at(node), slot_bytes, slots, crowded, std::move(local_names)};
  std::vector<std::unique_ptr<Node>> nodes;
  for (int i = 0; i < threads; ++i) {
    nodes.push_back(std::make_unique<Node>(layout, reinterpret_cast<char*>(memory) + i * layout.bytes(), file));
  }
  transports.push_back(std::make_unique<Transport>(Place(rank, std::move(order), std::move(ranks), node), std::move(nodes)));
  return transports.size() - 1;
}

void connect(size_t group, const std::string& library, intptr_t comm, intptr_t byte, int request_bytes, int64_t small_bytes,
             int direct_nodes) {
  auto network = std::make_unique<Network>(library, Network::Handles{comm, byte, request_bytes});
  current(group).connect(std::move(network), Tuning{small_bytes, direct_nodes});
}

void close() {
  Py_CLEAR(on_disagreement);
  nb::gil_scoped_release release;
  communication.forget();
  ahead.forget();
  uncompared.forget();
  for (auto& transport : transports) const std::lock_guard<std::mutex> until_its_message_has_ended(transport->one_at_a_time);
  transports.clear();
}

std::pair<int64_t, int64_t> messages() {
  const int64_t done = ended;  // first, so that what is between two messages does not look like being inside of one
  return {started, done};
}

// The word of the last message.
int64_t word() { return started ? events[(started - 1) % kEvents].word.load() : 0; }

// number, word, bytes, start, met, end
auto last_events() {
  std::vector<std::tuple<int64_t, int64_t, int64_t, int64_t, int64_t, int64_t>> out;
  const int64_t end = started;
  for (int64_t i = std::max<int64_t>(0, end - kEvents); i < end; ++i) {
    const Event& event = events[i % kEvents];
    out.emplace_back(i, event.word, event.bytes, event.start, event.met, event.end);
  }
  return out;
}

// The smallest and the largest word, and how many calls this rank has made before.
std::tuple<int64_t, int64_t, int64_t> meet(int64_t own) {
  nb::gil_scoped_release release;
  try {
    drain(kAll);
  } catch (const Refused& refused) {
    throw std::runtime_error(explain(refused.word, refused.group));
  }
  const Exposed exposed;
  Transport& transport = current(kAll);
  const Word word = said(kAll, own);
  const std::lock_guard<std::mutex> lock(transport.one_at_a_time);
  const Entered entered(transport, own, 0);
  const Extremes words = transport.meet(word.sent);
  return {words.smallest, words.largest, word.calls};
}

// The rounds of a node, each a list of (to, from, send_begin, send_end, receive_begin, receive_end, reduces).
auto schedule(const std::string& name, int nodes, int node, bool direct, int root) {
  const Schedule rounds = name == "reduce_scatter" ? reduce_scatter_schedule(nodes, node, direct)
                          : name == "allgather"    ? allgather_schedule(nodes, node, direct)
                          : name == "bcast"        ? broadcast_schedule(nodes, node, root)
                                                   : recursive_doubling_schedule(nodes, node);
  std::vector<std::vector<std::tuple<int, int, int, int, int, int, bool>>> out;
  for (const Round& round : rounds) {
    auto& transfers = out.emplace_back();
    for (const auto& [to, from, a, b, c, d, reduces] : round) transfers.emplace_back(to, from, a, b, c, d, reduces);
  }
  return out;
}

#if defined(__clang__)
constexpr char kCompiler[] = __VERSION__;
#else
constexpr char kCompiler[] = "GCC " __VERSION__;
#endif

}  // namespace

NB_MODULE(_native, m) {
  m.doc() = "Collectives through shared memory within a node, and over MPI between nodes; see native/ in the sources.";
  m.attr("interface") = 9;  // another number for every change of what Python calls: jaxmpi/_backends/extension.py has it, too
  m.attr("sources") = JAXMPI_SOURCES;
  m.attr("ffi") = std::to_string(XLA_FFI_API_MAJOR) + "." + std::to_string(XLA_FFI_API_MINOR);
  m.attr("compiler") = kCompiler;
  m.def("can_reduce", &can_reduce);
  m.def("handler", &handler);
  m.def("set_rank", [](int32_t rank) { rank_of_process = rank; });
  m.def("use_cuda", [](const std::string& library) { staging = std::make_unique<Staging>(library); });
  m.def("staged_ns", [] {
    return staging ? std::make_pair(staging->waited_ns(), staging->carried_ns()) : std::make_pair(int64_t{0}, int64_t{0});
  });
  m.def("layout_bytes",
        [](int size, int64_t slot_bytes, int slots) { return Node::Layout{0, size, slot_bytes, slots, false, {}}.bytes(); });
  m.def("open", &open, nb::kw_only(), nb::arg("rank"), nb::arg("order"), nb::arg("ranks"), nb::arg("node"),
        nb::arg("local_rank"), nb::arg("local_names") = std::vector<int>(), nb::arg("slot_bytes"), nb::arg("slots"),
        nb::arg("threads") = 1, nb::arg("crowded"), nb::arg("memory"), nb::arg("file"));
  m.def("connect", &connect, nb::kw_only(), nb::arg("group"), nb::arg("library"), nb::arg("comm"), nb::arg("byte"),
        nb::arg("request_bytes"), nb::arg("small_bytes"), nb::arg("direct_nodes"));
  m.def("schedule", &schedule, nb::arg("name"), nb::arg("nodes"), nb::arg("node"), nb::arg("direct") = false,
        nb::arg("root") = 0);
  m.def("count_ahead_from", [](int64_t first) { ahead.count_from(first); });
  m.def("on_disagreement", [](nb::callable f) { Py_XDECREF(std::exchange(on_disagreement, f.release().ptr())); });
  m.def("meet", &meet);
  m.def("calls_before", [](int64_t calls) { return uncompared.before(calls); });
  m.def("forget_calls", [] { uncompared.forget_calls(); });
  m.def("messages", &messages);
  m.def("exposed_ns", [] { return exposed.load(); });
  m.def("word", &word);
  m.def("events", &last_events);
  m.def("close", &close);
}

}  // namespace jaxmpi
