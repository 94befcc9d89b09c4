#include "handlers.h"

#include <algorithm>
#include <atomic>
#include <optional>
#include <utility>
#include <vector>

#include "int8_handlers.h"
#include "job.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace jaxmpi::handlers {

// For each rank of a group, another one: every rank gets the same list, so that all have the same
// program.
using Ranks = ffi::Span<const int32_t>;

// The attributes of a call of a collective, as jaxmpi/_backends/native_calls.py passes them.
struct CallAttributes {
  int32_t group;  // the number of the transport
  Kind kind;
  Op op;
  int32_t divisor;
  Ranks sources, dests;  // from and to which rank the arrays of each go, or -1
  int64_t fingerprint;
  bool bucket;  // whether the message is a part of a large one
  bool first;   // whether it is the first that is started before any is waited for

  Operation operation(const Transport& transport) const {
    const size_t rank = transport.rank();
    if (rank >= sources.size() || rank >= dests.size())
      throw std::runtime_error("the program is that of a job with fewer ranks");
    return {kind, op, divisor, sources[rank], dests[rank], bucket};
  }
};

// Decodes an enum from an int32, and refuses a number that is not in the table of its names.
template <class Enum>
struct EnumDecoding {
  using Type = Enum;

  template <size_t count>
  static std::optional<Enum> decode(const Named<Enum> (&table)[count], const char* what,
                                    XLA_FFI_AttrType type, void* attr,
                                    ffi::DiagnosticEngine& diagnostic) {
    const auto number = ffi::AttrDecoding<int32_t>::Decode(type, attr, diagnostic);
    if (!number) return std::nullopt;
    for (const Named<Enum>& named : table) {
      if (static_cast<int32_t>(named.value) == *number) return named.value;
    }
    return diagnostic.Emit("jaxmpi: there is no ") << what << " of number " << *number;
  }
};

}  // namespace jaxmpi::handlers

template <>
struct xla::ffi::AttrDecoding<jaxmpi::Kind> : jaxmpi::handlers::EnumDecoding<jaxmpi::Kind> {
  static std::optional<jaxmpi::Kind> Decode(XLA_FFI_AttrType type, void* attr,
                                            DiagnosticEngine& diagnostic) {
    return decode(jaxmpi::kKinds, "kind of collective", type, attr, diagnostic);
  }
};
template <>
struct xla::ffi::AttrDecoding<jaxmpi::Op> : jaxmpi::handlers::EnumDecoding<jaxmpi::Op> {
  static std::optional<jaxmpi::Op> Decode(XLA_FFI_AttrType type, void* attr,
                                          DiagnosticEngine& diagnostic) {
    return decode(jaxmpi::kOps, "reduce operation", type, attr, diagnostic);
  }
};

// Decodes the attributes of a call. XLA keeps them sorted by name, so one walk finds them all. The
// decoding that XLA_FFI_REGISTER_STRUCT_ATTR_DECODING makes searches each by its name, at every
// call.
template <>
struct xla::ffi::AttrsBinding<jaxmpi::handlers::CallAttributes> {
  using Attrs = jaxmpi::handlers::CallAttributes;
};
template <>
struct xla::ffi::AttrDecoding<jaxmpi::handlers::CallAttributes> {
  using Type = jaxmpi::handlers::CallAttributes;

  static std::optional<Type> Decode(XLA_FFI_AttrType, void* dictionary,
                                    DiagnosticEngine& diagnostic) {
    const auto* attrs = static_cast<const XLA_FFI_Attrs*>(dictionary);
    constexpr int64_t kAttributes = 9;
    if (attrs->size != kAttributes)
      return diagnostic.Emit("Wrong number of attributes: expected ")
             << kAttributes << " attributes but got " << attrs->size;
    Type call{};
    int64_t i = 0;
    const auto next = [&](std::string_view name, auto& value) {
      using Value = std::remove_reference_t<decltype(value)>;
      if (std::string_view(attrs->names[i]->ptr, attrs->names[i]->len) != name) {
        diagnostic.Emit("jaxmpi: a call lacks the attribute ") << name;
        return false;
      }
      const auto decoded =
          AttrDecoding<Value>::Decode(attrs->types[i], attrs->attrs[i], diagnostic);
      ++i;
      if (decoded) value = *decoded;
      return decoded.has_value();
    };
    const bool complete = next("bucket", call.bucket) && next("dests", call.dests) &&
                          next("divisor", call.divisor) && next("fingerprint", call.fingerprint) &&
                          next("first", call.first) && next("group", call.group) &&
                          next("kind", call.kind) && next("op", call.op) &&
                          next("sources", call.sources);
    return complete ? std::optional(call) : std::nullopt;
  }
};

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

// Return the arrays of a call: operand i, and result first_out + i. Behind the arrays there are
// `others` more operands, the last of which is a token.
std::vector<Array> arrays_of(Kind kind, int size, ffi::RemainingArgs args, ffi::RemainingRets rets,
                             size_t first_out = 0, size_t others = 1) {
  const int64_t rows = kind == Kind::Alltoall ? size : 1;  // of operand and result alike
  std::vector<Array> arrays;
  arrays.reserve(args.size());
  for (size_t i = 0; i + others < args.size(); ++i) {
    const auto in = args.get<ffi::AnyBuffer>(i);
    auto out = rets.get<ffi::AnyBuffer>(first_out + i);
    if (!in || !out) throw std::runtime_error("an operand is no array");
    const auto type = type_of(in->element_type());
    if (!type) throw std::runtime_error("an array of a type that the transport does not know");
    // In a reduce-scatter and an allgather, the smaller of the two has one row; in an alltoall,
    // both have a row for each rank.
    const int64_t items = std::min<int64_t>(in->element_count(), (*out)->element_count());
    const int64_t columns = items / rows;
    if (columns == 0) continue;
    arrays.push_back({*type, static_cast<const char*>(in->untyped_data()),
                      static_cast<char*>((*out)->untyped_data()), columns});
  }
  return arrays;
}

// Run the body of a handler, and return what it throws as an error of XLA. With the error, XLA
// frees the arrays of the program, and so of the messages that it has started.
template <class Body>
ffi::Error reported(Body body) {
  ffi::Error failure;
  try {
    body();
    return ffi::Error::Success();
  } catch (const MessageMismatch& mismatch) {
    failure = ffi::Error(ffi::ErrorCode::kFailedPrecondition,
                         job::explain(mismatch.fingerprints, mismatch.group));
  } catch (const std::exception& error) {
    failure = ffi::Error(ffi::ErrorCode::kInternal, std::string("jaxmpi: ") + error.what());
  }
  queue.end_started();
  return failure;
}

// Carry out a message on this thread, in its turn, by run(transport, arrays, fingerprint, begin),
// which calls `begin` as in `carry_out`.
template <class Run>
void carry_out_now(int32_t group, std::vector<Array> arrays, int64_t message, Run run) {
  queue.run_at_once(group, [&] {
    Transport& transport = current(group);
    const Fingerprints fingerprints = fingerprints_of(group, message);
    std::optional<record::Exposed> exposed;
    carry_out(transport, group, fingerprints, bytes_of(arrays), [&](auto begin) {
      run(transport, std::move(arrays), fingerprints.compared, [&] {
        begin();
        exposed.emplace();
      });
    });
  });
}

// `carry_out_now` for arrays of the host.
void carry_out_on_host(std::vector<Array> arrays, const CallAttributes& call) {
  carry_out_now(
      call.group, std::move(arrays), call.fingerprint,
      [&](Transport& transport, std::vector<Array> arrays, int64_t fingerprint, auto begin) {
        const Operation operation = call.operation(transport);
        begin();
        transport.run(operation, fingerprint, std::move(arrays));
      });
}

// Carry a message that is staged, a batch at a time.
Staging::Carry carrying(Transport& transport, const Operation& operation, int64_t fingerprint) {
  return [&transport, operation, fingerprint](std::vector<Array> arrays) {
    transport.run(operation, fingerprint, std::move(arrays));
  };
}

// A collective

ffi::Error on_host(ffi::RemainingArgs args, ffi::RemainingRets rets, CallAttributes call) {
  return reported([&] {
    carry_out_on_host(arrays_of(call.kind, current(call.group).size(), args, rets), call);
  });
}

ffi::Error on_gpu(void* stream, ffi::RemainingArgs args, ffi::RemainingRets rets,
                  CallAttributes call) {
  return reported([&] {
    carry_out_now(
        call.group, arrays_of(call.kind, current(call.group).size(), args, rets), call.fingerprint,
        [&](Transport& transport, std::vector<Array> arrays, int64_t fingerprint, auto begin) {
          const Operation operation = call.operation(transport);
          staging->run(operation, transport.size(), arrays, stream, begin,
                       carrying(transport, operation, fingerprint));
        });
  });
}

// The handler of a GPU for arrays of the host, to try it with a library that stands in for CUDA's.
ffi::Error rehearsal(ffi::RemainingArgs args, ffi::RemainingRets rets, CallAttributes call) {
  const ffi::Error error = on_gpu(nullptr, args, rets, call);
  if (!error.success()) return error;
  // What reads the results is on no stream that would wait for them.
  return reported([] { staging->finish(nullptr); });
}

// A collective that is started, and waited for later in the same call of the program

// Start a message that `wait` ends. The first results are the operands, in place. In an allreduce
// the wait returns them; otherwise it returns the results behind them. prepare() returns
// carry(transport, operation, arrays, fingerprint, begin), which the queue's thread calls.
template <class Prepare>
ffi::Error start(ffi::RemainingArgs args, ffi::RemainingRets rets, const CallAttributes& call,
                 Prepare prepare) {
  return reported([&] {
    // A program that failed before its waits has left its messages.
    if (call.first) queue.forget_started();
    try {
      Transport& transport = current(call.group);
      Operation operation = call.operation(transport);
      operation.overlapped = true;
      const size_t arrays_in = args.size() - 1;  // the last operand is a token
      const size_t first_out = operation.kind == Kind::Allreduce ? 0 : arrays_in;
      std::vector<Array> arrays =
          arrays_of(operation.kind, transport.size(), args, rets, first_out);
      MessageQueue::Memory memory;
      for (size_t i = 0; i + 1 < rets.size(); ++i)
        memory.push_back((*rets.get<ffi::AnyBuffer>(i))->untyped_data());
      // The fingerprints are those of this moment, not of when the thread gets to the message.
      queue.start(
          call.group,
          [arrays = std::move(arrays), operation, &transport, group = call.group,
           fingerprints = fingerprints_of(call.group, call.fingerprint), carry = prepare()] {
            carry_out(transport, group, fingerprints, bytes_of(arrays), [&](auto begin) {
              carry(transport, operation, arrays, fingerprints.compared, begin);
            });
          },
          std::move(memory));
    } catch (...) {
      queue.forget_started();
      throw;
    }
  });
}

ffi::Error start_on_host(ffi::RemainingArgs args, ffi::RemainingRets rets, CallAttributes call) {
  return start(args, rets, call, [] {
    return [](Transport& transport, const Operation& operation, std::vector<Array> arrays,
              int64_t fingerprint, auto begin) {
      begin();
      transport.run(operation, fingerprint, std::move(arrays));
    };
  });
}

ffi::Error start_on_gpu(void* stream, ffi::RemainingArgs args, ffi::RemainingRets rets,
                        CallAttributes call) {
  return start(args, rets, call, [stream] {
    const Staging::Ready ready = staging->ready(stream);
    return [ready](Transport& transport, const Operation& operation,
                   const std::vector<Array>& arrays, int64_t fingerprint, auto begin) {
      staging->run_overlapped(ready, operation, transport.size(), arrays, begin,
                              carrying(transport, operation, fingerprint));
    };
  });
}

ffi::Error start_rehearsal(ffi::RemainingArgs args, ffi::RemainingRets rets, CallAttributes call) {
  return start_on_gpu(nullptr, args, rets, call);
}

// Wait for a started message. Its first `started` operands are the results of the start; behind
// them are arrays that the program computes before it waits.
ffi::Error wait(ffi::RemainingArgs args, ffi::RemainingRets, int32_t started) {
  return reported([&] {
    const record::Exposed exposed;
    MessageQueue::Memory memory;
    for (int32_t i = 0; i < started; ++i)
      memory.push_back(args.get<ffi::AnyBuffer>(i)->untyped_data());
    queue.wait(memory);
  });
}

// A collective that is sent ahead, and taken in a later call of the program

constexpr size_t kNumberAndToken = 2;  // operands behind the arrays of a take

// The number of a message in two halves, because JAX has no 64-bit integers by default.
using Number = ffi::BufferR1<ffi::DataType::U32>;
constexpr size_t kHalves = 2;

// Send a message that `take_on_host` takes, in a later call of the program.
ffi::Error send_ahead_on_host(ffi::RemainingArgs args, ffi::Result<Number> number,
                              ffi::RemainingRets, CallAttributes call) {
  return reported([&] {
    if (number->element_count() != kHalves) throw std::runtime_error("no number of a message");
    Transport& transport = current(call.group);
    Operation operation = call.operation(transport);
    operation.overlapped = true;
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
    const int64_t sent = queue.send_ahead(
        call.group, call.fingerprint, arrays, rows,
        [operation, &transport, group = call.group,
         fingerprints = fingerprints_of(call.group, call.fingerprint)](std::vector<Array> copies) {
          carry_out(transport, group, fingerprints, bytes_of(copies), [&](auto begin) {
            begin();
            transport.run(operation, fingerprints.compared, std::move(copies));
          });
        });
    number->typed_data()[0] = static_cast<uint32_t>(sent);
    number->typed_data()[1] = static_cast<uint32_t>(sent >> 32);
  });
}

// Take the results of a message that was sent ahead. Where there is none, carry it out now.
ffi::Error take_on_host(ffi::RemainingArgs args, ffi::RemainingRets rets, CallAttributes call) {
  return reported([&] {
    std::vector<Array> arrays =
        arrays_of(call.kind, current(call.group).size(), args, rets, 0, kNumberAndToken);
    const auto number = args.get<Number>(args.size() - kNumberAndToken);
    if (!number || number->element_count() != kHalves)
      throw std::runtime_error("no number of a message");
    const int64_t sent =
        static_cast<int64_t>(number->typed_data()[0] | uint64_t{number->typed_data()[1]} << 32);
    {
      const record::Exposed exposed;
      if (queue.take(sent, arrays)) return;
    }
    carry_out_on_host(std::move(arrays), call);
  });
}

// A comparison

// Compare a program at its start, where its first message may not do so. With `later`, all of its
// messages are to all ranks, and a call after its first is compared with the next of them: where
// an earlier message to all ranks has failed, it sends nothing, and need not get that far.
ffi::Error compare_on_host(ffi::RemainingArgs, ffi::RemainingRets, int64_t fingerprint,
                           bool later) {
  return reported([&] {
    current(kAll);
    if (later) {
      queue.raise(kAll);
      if (!uncompared.compare_now(fingerprint)) return;
    }
    carry_out_now(kAll, {}, fingerprint,
                  [](Transport& transport, std::vector<Array>, int64_t compared, auto begin) {
                    begin();
                    transport.run({Kind::Allreduce, Op::Sum, 1, -1, -1}, compared, {});
                  });
    if (later) uncompared.compared(fingerprint);
  });
}

// Record the branch in which a program under plain jax.jit is.
ffi::Error record_branch(ffi::RemainingArgs, ffi::RemainingRets, int64_t fingerprint) {
  return reported([&] {
    current(kAll);
    uncompared.record(fingerprint);
  });
}

// Return the number of this rank, so that the programs of all ranks are the same.
ffi::Error rank_value(ffi::Result<ffi::BufferR0<ffi::DataType::S32>> out) {
  *out->typed_data() = rank_of_process;
  return ffi::Error::Success();
}

auto bound() { return ffi::Ffi::Bind().RemainingArgs().RemainingRets(); }
auto bound_on_stream() {
  return ffi::Ffi::Bind().Ctx<ffi::PlatformStream<void*>>().RemainingArgs().RemainingRets();
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(host_handler, on_host, bound().Attrs<CallAttributes>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(gpu_handler, on_gpu, bound_on_stream().Attrs<CallAttributes>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(rehearsal_handler, rehearsal, bound().Attrs<CallAttributes>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(start_handler, start_on_host, bound().Attrs<CallAttributes>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(start_gpu_handler, start_on_gpu,
                              bound_on_stream().Attrs<CallAttributes>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(start_rehearsal_handler, start_rehearsal,
                              bound().Attrs<CallAttributes>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(wait_handler, wait, bound().Attr<int32_t>("started"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    send_ahead_handler, send_ahead_on_host,
    ffi::Ffi::Bind().RemainingArgs().Ret<Number>().RemainingRets().Attrs<CallAttributes>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(take_handler, take_on_host, bound().Attrs<CallAttributes>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(compare_handler, compare_on_host,
                              bound().Attr<int64_t>("fingerprint").Attr<bool>("later"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(branch_handler, record_branch, bound().Attr<int64_t>("fingerprint"));
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
  if (name == "branch") return reinterpret_cast<void*>(branch_handler);
  if (name == "gpu") return reinterpret_cast<void*>(gpu_handler);
  if (name == "rehearsal") return reinterpret_cast<void*>(rehearsal_handler);
  if (name == "rank") return reinterpret_cast<void*>(rank_handler);
  if (void* handler = int8::find_handler(name)) return handler;
  throw std::invalid_argument("no handler is called " + name);
}

void set_rank(int32_t rank) { rank_of_process = rank; }

std::string ffi_version() {
  return std::to_string(XLA_FFI_API_MAJOR) + "." + std::to_string(XLA_FFI_API_MINOR);
}

}  // namespace jaxmpi::handlers
