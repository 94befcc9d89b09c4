#include "handlers.h"

#include <algorithm>
#include <atomic>
#include <optional>
#include <utility>
#include <vector>

#include "job.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace jaxmpi::handlers {
namespace {

using namespace job;

std::atomic<int32_t> rank_of_process = 0;

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

// `others`: how many operands follow the arrays; the last one is a token.
std::vector<Array> arrays_of(Kind kind, int size, ffi::RemainingArgs args, ffi::RemainingRets rets,
                             size_t first_out = 0, size_t others = 1) {
  const int64_t rows = kind == Kind::Alltoall ? size : 1;  // of both
  std::vector<Array> arrays;
  arrays.reserve(args.size());
  for (size_t i = 0; i + others < args.size(); ++i) {
    const auto in = args.get<ffi::AnyBuffer>(i);
    auto out = rets.get<ffi::AnyBuffer>(first_out + i);
    if (!in || !out) throw std::runtime_error("an operand is no array");
    const auto type = type_of(in->element_type());
    if (!type) throw std::runtime_error("an array of a type that the transport does not know");
    const int64_t items = std::min<int64_t>(
        in->element_count(), (*out)->element_count());  // of an array, or of a row of it
    const int64_t columns = items / rows;
    if (columns == 0) continue;
    arrays.push_back({*type, static_cast<const char*>(in->untyped_data()),
                      static_cast<char*>((*out)->untyped_data()), columns});
  }
  return arrays;
}

// What XLA is told of what is thrown.
template <class Body>
ffi::Error reported(Body body) {
  try {
    body();
    return ffi::Error::Success();
  } catch (const Refused& refused) {
    return ffi::Error(ffi::ErrorCode::kFailedPrecondition,
                      job::explain(refused.word, refused.group));
  } catch (const std::exception& error) {
    return ffi::Error(ffi::ErrorCode::kInternal, std::string("jaxmpi: ") + error.what());
  }
}

// run(transport, arrays, what they say, begin), as in `carry_out`
template <class Run>
void carry_out_now(int32_t group, std::vector<Array> arrays, int64_t own, Run run) {
  drain(group);
  Transport& transport = current(group);
  const Fingerprints word = fingerprints_of(group, own);
  std::optional<record::Exposed> exposed;
  carry_out(transport, group, word, bytes_of(arrays), [&](auto begin) {
    run(transport, std::move(arrays), word.sent, [&] {
      begin();
      exposed.emplace();
    });
  });
}

template <class Run>
ffi::Error collective(Kind kind, int32_t group, ffi::RemainingArgs args, ffi::RemainingRets rets,
                      int64_t word, Run run) {
  return reported(
      [&] { carry_out_now(group, arrays_of(kind, current(group).size(), args, rets), word, run); });
}

// From and to which rank of a group each one's arrays go: the programs of all ranks are the same.
using Ranks = ffi::Span<const int32_t>;

// As XLA passes them; see `Operation`.
Operation operation_of(const Transport& transport, int32_t kind, int32_t op, int32_t divisor,
                       Ranks sources, Ranks dests) {
  const size_t here = transport.rank();
  if (here >= sources.size() || here >= dests.size())
    throw std::runtime_error("the program is that of a job with fewer ranks");
  return {static_cast<Kind>(kind), static_cast<Op>(op), divisor, sources[here], dests[here]};
}

ffi::Error on_host(ffi::RemainingArgs args, ffi::RemainingRets rets, int32_t group, int32_t kind,
                   int32_t op, int32_t divisor, Ranks sources, Ranks dests, int64_t word) {
  return collective(static_cast<Kind>(kind), group, args, rets, word,
                    [=](Transport& transport, std::vector<Array> arrays, int64_t sent, auto begin) {
                      const Operation operation =
                          operation_of(transport, kind, op, divisor, sources, dests);
                      begin();
                      transport.run(operation, sent, std::move(arrays));
                    });
}

// A message that its `wait` ends. The first results are the operands, in place. In an allreduce
// they are what the wait returns, too; otherwise the others are. `first`: of those that are started
// before any wait. carry(transport, operation, arrays, what they say, begin), as in `carry_out`;
// `prepare` returns it
template <class Prepare>
ffi::Error start(ffi::RemainingArgs args, ffi::RemainingRets rets, int32_t group, int32_t kind,
                 int32_t op, int32_t divisor, Ranks sources, Ranks dests, int64_t word, bool bucket,
                 bool first, Prepare prepare) {
  return reported([&] {
    if (first) communication.forget();  // what a program has left that failed before its waits
    try {
      Transport& transport = current(group);
      Operation operation = operation_of(transport, kind, op, divisor, sources, dests);
      operation.bucket = bucket;
      operation.beside = true;
      const size_t arrays_in = args.size() - 1;  // the last one is a token
      const size_t first_out = operation.kind == Kind::Allreduce ? 0 : arrays_in;
      std::vector<Array> arrays =
          arrays_of(operation.kind, transport.size(), args, rets, first_out);
      CommunicationThread::Memory memory;
      for (size_t i = 0; i + 1 < rets.size(); ++i)
        memory.push_back((*rets.get<ffi::AnyBuffer>(i))->untyped_data());
      {
        const record::Exposed exposed;
        ahead.drain(group);
      }
      communication.start(
          [=, &transport, word = fingerprints_of(group, word), carry = prepare()] {
            carry_out(transport, group, word, bytes_of(arrays), [&](auto begin) {
              carry(transport, operation, std::vector<Array>(arrays), word.sent, begin);
            });
          },
          std::move(memory));
    } catch (...) {
      communication.forget();
      throw;
    }
  });
}

ffi::Error start_on_host(ffi::RemainingArgs args, ffi::RemainingRets rets, int32_t group,
                         int32_t kind, int32_t op, int32_t divisor, Ranks sources, Ranks dests,
                         int64_t word, bool bucket, bool first) {
  return start(args, rets, group, kind, op, divisor, sources, dests, word, bucket, first, [] {
    return [](Transport& transport, const Operation& operation, std::vector<Array> arrays,
              int64_t sent, auto begin) {
      begin();
      transport.run(operation, sent, std::move(arrays));
    };
  });
}

// A message that is staged, a batch at a time.
Staging::Carry carrying(Transport& transport, const Operation& operation, int64_t word) {
  return [&transport, operation, word](std::vector<Array> arrays) {
    transport.run(operation, word, std::move(arrays));
  };
}

ffi::Error start_on_gpu(void* stream, ffi::RemainingArgs args, ffi::RemainingRets rets,
                        int32_t group, int32_t kind, int32_t op, int32_t divisor, Ranks sources,
                        Ranks dests, int64_t word, bool bucket, bool first) {
  return start(args, rets, group, kind, op, divisor, sources, dests, word, bucket, first, [stream] {
    const Staging::Ready ready = staging->ready(stream);
    return [ready](Transport& transport, const Operation& operation, std::vector<Array> arrays,
                   int64_t sent, auto begin) {
      staging->run_beside(ready, operation, transport.size(), arrays, begin,
                          carrying(transport, operation, sent));
    };
  });
}

ffi::Error start_rehearsal(ffi::RemainingArgs args, ffi::RemainingRets rets, int32_t group,
                           int32_t kind, int32_t op, int32_t divisor, Ranks sources, Ranks dests,
                           int64_t word, bool bucket, bool first) {
  return start_on_gpu(nullptr, args, rets, group, kind, op, divisor, sources, dests, word, bucket,
                      first);
}

// `started`: how many of its operands are those of the start; others are arrays that are to be
// computed before.
ffi::Error wait(ffi::RemainingArgs args, ffi::RemainingRets, int32_t started) {
  return reported([&] {
    const record::Exposed exposed;
    CommunicationThread::Memory memory;
    for (int32_t i = 0; i < started; ++i)
      memory.push_back(args.get<ffi::AnyBuffer>(i)->untyped_data());
    communication.wait(memory);
  });
}

constexpr size_t kNumberAndToken =
    2;  // operands behind the arrays, or the token and the number's result

// The number of a message in two halves: 64-bit integers are not on by default in JAX.
using Number = ffi::BufferR1<ffi::DataType::U32>;

// A message that `take_on_host` takes, in a later call of a program.
ffi::Error send_ahead_on_host(ffi::RemainingArgs args, ffi::Result<Number> number,
                              ffi::RemainingRets, int32_t group, int32_t kind, int32_t op,
                              int32_t divisor, Ranks sources, Ranks dests, int64_t word) {
  return reported([&] {
    {
      const record::Exposed exposed;
      communication.drain();
    }
    Transport& transport = current(group);
    Operation operation = operation_of(transport, kind, op, divisor, sources, dests);
    operation.beside = true;
    if (operation.kind != Kind::Allreduce && operation.kind != Kind::Allgather) {
      throw std::runtime_error("a message of this kind cannot be sent ahead");
    }
    std::vector<Array> arrays;
    for (size_t i = 0; i + 1 < args.size(); ++i) {
      const auto in = args.get<ffi::AnyBuffer>(i);
      if (!in || !type_of(in->element_type()))
        throw std::runtime_error("an array of a type that the transport does not know");
      if (!in->element_count()) continue;
      const auto columns = static_cast<int64_t>(in->element_count());
      arrays.push_back({*type_of(in->element_type()), static_cast<const char*>(in->untyped_data()),
                        nullptr, columns});
    }
    const int64_t rows = operation.kind == Kind::Allgather ? transport.size() : 1;
    const int64_t sent = ahead.start(
        group, arrays, rows,
        [=, &transport, word = fingerprints_of(group, word)](std::vector<Array> copies) {
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
ffi::Error take_on_host(ffi::RemainingArgs args, ffi::RemainingRets rets, int32_t group,
                        int32_t kind, int32_t op, int32_t divisor, Ranks sources, Ranks dests,
                        int64_t word) {
  return reported([&] {
    std::vector<Array> arrays =
        arrays_of(static_cast<Kind>(kind), current(group).size(), args, rets, 0, kNumberAndToken);
    const auto number = args.get<Number>(args.size() - kNumberAndToken);
    if (!number) throw std::runtime_error("no number of a message");
    const int64_t sent =
        static_cast<int64_t>(number->typed_data()[0] | uint64_t{number->typed_data()[1]} << 32);
    {
      const record::Exposed exposed;
      if (ahead.take(sent, arrays)) return;
    }
    carry_out_now(group, std::move(arrays), word,
                  [=](Transport& transport, std::vector<Array> arrays, int64_t sent, auto begin) {
                    const Operation operation =
                        operation_of(transport, kind, op, divisor, sources, dests);
                    begin();
                    transport.run(operation, sent, std::move(arrays));
                  });
  });
}

// At the start of a program whose first message may not compare it. `later`: whether all of its
// messages are to all ranks, so that a call that differs meets the next one of them.
ffi::Error compare(ffi::RemainingArgs, ffi::RemainingRets, int64_t word, bool later) {
  return reported([&] {
    current(kAll);
    ahead.raise();
    if (later && !uncompared.compare_now(word)) return;
    carry_out_now(kAll, {}, word,
                  [](Transport& transport, std::vector<Array>, int64_t sent, auto begin) {
                    begin();
                    transport.run({Kind::Allreduce, Op::Sum, 1, -1, -1}, sent, {});
                  });
    if (later) uncompared.compared(word);
  });
}

ffi::Error on_gpu(void* stream, ffi::RemainingArgs args, ffi::RemainingRets rets, int32_t group,
                  int32_t kind, int32_t op, int32_t divisor, Ranks sources, Ranks dests,
                  int64_t word) {
  return collective(static_cast<Kind>(kind), group, args, rets, word,
                    [=](Transport& transport, std::vector<Array> arrays, int64_t sent, auto begin) {
                      const Operation operation =
                          operation_of(transport, kind, op, divisor, sources, dests);
                      staging->run(operation, transport.size(), arrays, stream, begin,
                                   carrying(transport, operation, sent));
                    });
}

// A GPU's handler for arrays of the host, to try it with a library that stands in for CUDA's.
ffi::Error rehearsal(ffi::RemainingArgs args, ffi::RemainingRets rets, int32_t group, int32_t kind,
                     int32_t op, int32_t divisor, Ranks sources, Ranks dests, int64_t word) {
  const ffi::Error error =
      on_gpu(nullptr, args, rets, group, kind, op, divisor, sources, dests, word);
  return error.success() ? reported([] { staging->finish(nullptr); })
                         : error;  // what reads the results is on no stream
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
XLA_FFI_DEFINE_HANDLER_SYMBOL(start_gpu_handler, start_on_gpu,
                              operands(ffi::Ffi::Bind().Ctx<ffi::PlatformStream<void*>>())
                                  .Attr<bool>("bucket")
                                  .Attr<bool>("first"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(start_rehearsal_handler, start_rehearsal,
                              operands(ffi::Ffi::Bind()).Attr<bool>("bucket").Attr<bool>("first"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    wait_handler, wait, ffi::Ffi::Bind().RemainingArgs().RemainingRets().Attr<int32_t>("started"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    send_ahead_handler, send_ahead_on_host,
    operation(ffi::Ffi::Bind().RemainingArgs().Ret<Number>().RemainingRets()));
XLA_FFI_DEFINE_HANDLER_SYMBOL(take_handler, take_on_host, operands(ffi::Ffi::Bind()));
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    compare_handler, compare,
    ffi::Ffi::Bind().RemainingArgs().RemainingRets().Attr<int64_t>("word").Attr<bool>("later"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(gpu_handler, on_gpu,
                              operands(ffi::Ffi::Bind().Ctx<ffi::PlatformStream<void*>>()));
XLA_FFI_DEFINE_HANDLER_SYMBOL(rehearsal_handler, rehearsal, operands(ffi::Ffi::Bind()));
XLA_FFI_DEFINE_HANDLER_SYMBOL(rank_handler, rank_value,
                              ffi::Ffi::Bind().Ret<ffi::BufferR0<ffi::DataType::S32>>());

}  // namespace

void* find(const std::string& name) {
  if (name == "host") return reinterpret_cast<void*>(host_handler);
  if (name == "start") return reinterpret_cast<void*>(start_handler);
  if (name == "start_gpu") return reinterpret_cast<void*>(start_gpu_handler);
  if (name == "start_rehearsal") return reinterpret_cast<void*>(start_rehearsal_handler);
  if (name == "wait") return reinterpret_cast<void*>(wait_handler);
  if (name == "send_ahead") return reinterpret_cast<void*>(send_ahead_handler);
  if (name == "take") return reinterpret_cast<void*>(take_handler);
  if (name == "compare") return reinterpret_cast<void*>(compare_handler);
  if (name == "gpu") return reinterpret_cast<void*>(gpu_handler);
  if (name == "rehearsal") return reinterpret_cast<void*>(rehearsal_handler);
  if (name == "rank") return reinterpret_cast<void*>(rank_handler);
  throw std::invalid_argument("no handler is called " + name);
}

void set_rank(int32_t rank) { rank_of_process = rank; }

std::string ffi_version() {
  return std::to_string(XLA_FFI_API_MAJOR) + "." + std::to_string(XLA_FFI_API_MINOR);
}

}  // namespace jaxmpi::handlers
