#include "int8_handlers.h"

#include <algorithm>
#include <atomic>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "int8.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace jaxmpi::int8 {
namespace {

using Floats = ffi::Buffer<ffi::DataType::F32>;
using Codes = ffi::Buffer<ffi::DataType::S8>;

constexpr int64_t kTaskNumbers = 1 << 16;  // at least, in whole blocks

// Work that is cut into tasks. A thread that comes to help takes those that nobody has taken.
struct Tasks {
  const int64_t count;
  const std::function<void(int64_t)> work;
  std::atomic<int64_t> next = 0, done = 0;

  void run() {
    for (int64_t task; (task = next++) < count; ++done) work(task);
  }
};

// Call work(first, end) for ranges of the blocks of all rows, on threads of XLA that are free.
// range has blocks of two rows. A helper that XLA starts only when the work is done finds no task,
// so nothing waits for a thread that waits for this one.
void in_ranges(ffi::ThreadPool threads, int64_t block, int64_t blocks,
               const std::function<void(int64_t, int64_t)>& work) {
  const int64_t each = std::max<int64_t>(1, kTaskNumbers / block);
  const int64_t count = (blocks + each - 1) / each;
  const int64_t helpers = std::min(threads.num_threads(), count) - 1;
  if (helpers < 1) return work(0, blocks);
  const auto tasks = std::shared_ptr<Tasks>(new Tasks{
      count, [&](int64_t task) { work(task * each, std::min(blocks, (task + 1) * each)); }});
  for (int64_t i = 0; i < helpers; ++i) threads.Schedule([tasks] { tasks->run(); });
  tasks->run();
  while (tasks->done < count) std::this_thread::yield();
}

// Rows of encoded numbers, `[rows, k + 4·k/block]`.
template <class Byte>
struct Rows {
  Byte* codes;
  int64_t k, block;

  Encoded<Byte> at(int64_t row, int64_t i) const {
    Byte* begin = codes + row * (k + k / block * 4);
    return {begin + i * block, begin + k + i * 4};
  }
};

template <class Buffer>
const char* codes_of(const Buffer& buffer) {
  return reinterpret_cast<const char*>(buffer.typed_data());
}
template <class Buffer>
char* codes_of(ffi::Result<Buffer>& buffer) {
  return reinterpret_cast<char*>(buffer->typed_data());
}

ffi::Error bad(const char* what) {
  return ffi::Error(ffi::ErrorCode::kInvalidArgument, std::string("jaxmpi: codecs.int8: ") + what);
}

// (e [..., k], arrays of numbers...) -> (codes [..., k + 4·k/block], e').
ffi::Error encode_arrays(ffi::ThreadPool threads, Floats e, ffi::RemainingArgs arrays,
                         ffi::Result<Codes> codes, ffi::Result<Floats> residual, int64_t block) {
  const int64_t k = e.dimensions().back(), numbers = e.element_count();
  if (k == 0) return ffi::Error::Success();
  if (k % block != 0 ||
      static_cast<int64_t>(codes->element_count()) != numbers / k * (k + k / block * 4))
    return bad("the residual is not in whole blocks");
  std::vector<Part> parts;
  for (size_t i = 0; i < arrays.size(); ++i) {
    const auto array = arrays.get<Floats>(i);
    if (!array) return bad("an array is not of float32");
    parts.push_back({array->typed_data(), static_cast<int64_t>(array->element_count())});
  }
  const Rows<char> rows{codes_of(codes), k, block};
  const int64_t blocks_of_row = k / block;
  in_ranges(threads, block, numbers / block, [&](int64_t first, int64_t end) {
    while (first < end) {
      const int64_t row = first / blocks_of_row, i = first % blocks_of_row;
      const int64_t blocks = std::min(end - first, blocks_of_row - i), begin = first * block;
      encode(parts.data(), parts.size(), begin, e.typed_data() + begin, block, blocks,
             rows.at(row, i), residual->typed_data() + begin);
      first += blocks;
    }
  });
  return ffi::Error::Success();
}

// (e [k], codes [size, k + 4·k/block]) -> (codes of the mean [k + 4·k/block], e').
ffi::Error encode_mean_of(ffi::ThreadPool threads, Floats e, Codes received,
                          ffi::Result<Codes> codes, ffi::Result<Floats> residual, int64_t block) {
  const int64_t k = e.element_count(), size = received.dimensions().front();
  if (k == 0) return ffi::Error::Success();
  if (k % block != 0 ||
      static_cast<int64_t>(received.element_count()) != size * (k + k / block * 4))
    return bad("the residual is not in whole blocks");
  const Rows<const char> rows{codes_of(received), k, block};
  const Rows<char> out{codes_of(codes), k, block};
  in_ranges(threads, block, k / block, [&](int64_t first, int64_t end) {
    std::vector<ConstBytes> sources;
    for (int64_t row = 0; row < size; ++row) sources.push_back(rows.at(row, first));
    const int64_t begin = first * block;
    encode_mean(sources.data(), static_cast<int>(size), e.typed_data() + begin, block, end - first,
                out.at(0, first), residual->typed_data() + begin);
  });
  return ffi::Error::Success();
}

// codes [rows, k + 4·k/block] -> arrays, which have the decoded numbers one behind the other.
ffi::Error decode_arrays(ffi::ThreadPool threads, Codes codes, ffi::RemainingRets arrays,
                         int64_t block) {
  const int64_t rows = codes.dimensions().front(), bytes = codes.dimensions().back();
  const int64_t blocks_of_row = bytes / (block + 4), k = blocks_of_row * block;
  std::vector<float*> outs;
  std::vector<int64_t> ends{0};  // of the arrays, in the numbers of all
  for (size_t i = 0; i < arrays.size(); ++i) {
    auto array = arrays.get<Floats>(i);
    if (!array) return bad("an array is not of float32");
    outs.push_back((*array)->typed_data());
    ends.push_back(ends.back() + (*array)->element_count());
  }
  if (bytes != blocks_of_row * (block + 4) || ends.back() > rows * k)
    return bad("the arrays have more numbers than were encoded");
  if (ends.back() == 0) return ffi::Error::Success();
  const Rows<const char> from{codes_of(codes), k, block};
  in_ranges(threads, block, rows * blocks_of_row, [&](int64_t first, int64_t end) {
    int64_t position = first * block;
    const int64_t last = std::min(end * block, ends.back());
    // the array that has the number at `position`
    size_t i = std::upper_bound(ends.begin(), ends.end(), position) - ends.begin() - 1;
    while (position < last) {
      while (position == ends[i + 1]) ++i;
      const int64_t row = position / k, in_row = position % k;
      const int64_t count = std::min({last, ends[i + 1], (row + 1) * k}) - position;
      decode(from.at(row, 0), block, in_row, count, outs[i] + position - ends[i]);
      position += count;
    }
  });
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(encode_handler, encode_arrays,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Floats>()
                                  .RemainingArgs()
                                  .Ret<Codes>()
                                  .Ret<Floats>()
                                  .Attr<int64_t>("block"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(encode_mean_handler, encode_mean_of,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Floats>()
                                  .Arg<Codes>()
                                  .Ret<Codes>()
                                  .Ret<Floats>()
                                  .Attr<int64_t>("block"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    decode_handler, decode_arrays,
    ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<Codes>().RemainingRets().Attr<int64_t>("block"));

}  // namespace

void* find_handler(const std::string& name) {
  if (name == "int8_encode") return reinterpret_cast<void*>(encode_handler);
  if (name == "int8_encode_mean") return reinterpret_cast<void*>(encode_mean_handler);
  if (name == "int8_decode") return reinterpret_cast<void*>(decode_handler);
  return nullptr;
}

}  // namespace jaxmpi::int8
