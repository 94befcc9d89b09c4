#include "plain_record.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <future>
#include <random>
#include <stdexcept>
#include <thread>

#include "clock.h"
#include "record.h"

namespace jaxmpi::mpi {
namespace {

constexpr const char* kFileName = "jaxmpi-rank";
constexpr size_t kTextBytes = 1 << 14;  // TEXT_BYTES of live_record.py
constexpr size_t kCountBytes = 16;      // behind it: programs, which are not counted here
// MAX_HOSTS of _job/monitor/live.py
constexpr size_t kMostHosts = 256, kMostAwaited = 64, kDoingBytes = 200;
constexpr auto kDumpTime = std::chrono::seconds(5);  // a folder may be on a server that hangs

// A file descriptor that is closed at the end of its block.
class File {
 public:
  explicit File(int file) : file_(file) {}
  ~File() {
    if (file_ >= 0) ::close(file_);
  }
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  operator int() const { return file_; }

 private:
  const int file_;
};

[[noreturn]] void fail(const std::string& what) {
  throw std::runtime_error(what + ": " + std::strerror(errno));
}

// Return number / unit, whatever decimal point the program's locale has.
std::string decimal(int64_t number, int64_t unit, size_t digits) {
  std::string fraction = std::to_string(std::abs(number) % unit);
  fraction.insert(0, digits - fraction.size(), '0');
  return (number < 0 ? "-" : "") + std::to_string(std::abs(number) / unit) + "." + fraction;
}

std::string quoted(const std::string& text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') out += '\\';
    out += static_cast<unsigned char>(c) < 0x20 ? ' ' : c;
  }
  return out + '"';
}

// JSON's array of values.
std::string array_of(const std::vector<std::string>& values) {
  std::string out = "[";
  for (size_t i = 0; i < values.size(); ++i) out += (i ? ", " : "") + values[i];
  return out + "]";
}

// JSON's object of names and values.
std::string object_of(const std::vector<std::pair<const char*, std::string>>& fields) {
  std::string out = "{";
  for (const auto& [name, value] : fields)
    out += (out.size() > 1 ? ", " : "") + quoted(name) + ": " + value;
  return out + "}\n";
}

std::string variable(const char* name) {
  const char* text = std::getenv(name);
  return text ? text : "";
}

enum class Owner { kAnyone, kThisUserAlone };

void make_folder(int in, const std::string& name) {
  if (mkdirat(in, name.c_str(), 0700) != 0 && errno != EEXIST) fail(name);
}

// Open a folder in another one (AT_FDCWD: a path).
int open_folder(int in, const std::string& name, Owner owner) {
  const bool may_be_link = in == AT_FDCWD && owner == Owner::kAnyone;  // a path of the user's
  const int flags = O_RDONLY | O_DIRECTORY | O_CLOEXEC | (may_be_link ? 0 : O_NOFOLLOW);
  const int folder = openat(in, name.c_str(), flags);
  if (folder < 0) fail(name);
  struct stat found = {};
  if (owner == Owner::kThisUserAlone &&
      (fstat(folder, &found) != 0 || found.st_uid != getuid() || (found.st_mode & 077))) {
    ::close(folder);
    throw std::runtime_error(name + " is not a folder of this user alone");
  }
  return folder;
}

void write_all(int file, const std::string& text) {
  for (size_t done = 0; done < text.size();) {
    const ssize_t bytes = ::write(file, text.data() + done, text.size() - done);
    if (bytes < 0 && errno == EINTR) continue;
    if (bytes < 0) fail("write");
    done += static_cast<size_t>(bytes);
  }
}

// Write a file so that a reader finds the old text or the new one.
void replace(int folder, const std::string& name, const std::string& text) {
  const std::string draft = name + "." + std::to_string(std::random_device()());
  const int flags = O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC;
  const File file(openat(folder, draft.c_str(), flags, 0600));
  if (file < 0) fail(name);
  try {
    write_all(file, text);
    if (renameat(folder, draft.c_str(), folder, name.c_str()) != 0) fail(name);
  } catch (const std::exception&) {
    unlinkat(folder, draft.c_str(), 0);
    throw;
  }
}

}  // namespace

PlainRecord::PlainRecord(JobPlace place, std::function<std::optional<std::vector<int>>()> waits_for)
    : place_(std::move(place)),
      waits_for_(std::move(waits_for)),
      began_us_(std::chrono::duration_cast<std::chrono::microseconds>(
                    std::chrono::system_clock::now().time_since_epoch())
                    .count()),
      run_folder_(variable("JAXMPI_RUN_DIR")) {
  record::open();  // first: a reader that finds the next file looks for this one at once
  file_ = memfd_create(kFileName, MFD_CLOEXEC);
  // Without memory for it, `jaxmpi top` does not show this rank; the job goes on.
  if (file_ >= 0 && ftruncate(file_, kTextBytes + kCountBytes) != 0) {
    ::close(file_);
    file_ = -1;
  }
  std::vector<std::string> hosts;
  for (const Member& member : place_.members) hosts.push_back(quoted(member.host));
  std::sort(hosts.begin(), hosts.end());
  hosts.erase(std::unique(hosts.begin(), hosts.end()), hosts.end());
  hosts.resize(std::min(hosts.size(), kMostHosts));
  hosts_ = array_of(hosts);
  // The variables and the folder are read now: Python may change them while other threads run.
  const std::string named = variable("JAXMPI_FLIGHT_DIR"), restart = variable("JAXMPI_RESTART");
  has_named_folder_ = !named.empty();
  if (has_named_folder_) {
    std::error_code ignored;
    folder_ = std::filesystem::absolute(named, ignored).string();
    // A restarted job keeps the records of the job that failed.
    if (!restart.empty() && restart != "0") inner_ = "restart-" + restart;
  } else {
    const std::string temporary = variable("TMPDIR");
    char token[17];
    std::snprintf(token, sizeof token, "%016llx", static_cast<unsigned long long>(place_.token));
    folder_ = (temporary.empty() ? "/tmp" : temporary) + "/jaxmpi-flight-" +
              std::to_string(getuid()) + "-" + token;
  }
  write_run_record(false);
}

void PlainRecord::leave_run() {
  const std::lock_guard lock(mutex_);
  write_run_record(true);
}

void PlainRecord::write_run_record(bool has_left) {
  if (run_folder_.empty()) return;
  const Member& mine = place_.members[place_.rank];
  try {
    const File folder(open_folder(AT_FDCWD, run_folder_, Owner::kThisUserAlone));
    replace(folder, "rank-" + std::to_string(place_.rank) + ".json",
            object_of({
                {"rank", std::to_string(place_.rank)},
                {"pid", std::to_string(mine.pid)},
                {"host", quoted(mine.host)},
                {"segments", "[]"},
                {"left", has_left ? "true" : "false"},
                {"notes_end", "false"},
            }));
  } catch (const std::exception&) {
    // Most likely this is not the launcher's host, and has no such folder. `jaxmpi run` knows less
    // of the rank then: what MPI's launcher says of it.
  }
}

void PlainRecord::name(int64_t fingerprint, const std::function<std::string()>& describe) {
  const std::lock_guard lock(mutex_);
  std::string& name = names_[fingerprint];
  if (name.empty()) name = describe();
}

std::string PlainRecord::name_of(int64_t fingerprint) {
  const std::lock_guard lock(mutex_);
  const auto found = names_.find(fingerprint);
  return found == names_.end() ? "a collective" : found->second;
}

void PlainRecord::show() {
  const int64_t started = record::messages().first;
  const auto current = record::current_event();
  const std::string doing = started ? name_of(current.fingerprint) : "before the first collective";
  const Member &mine = place_.members[place_.rank], &first = place_.members[0];
  std::string waits_for = "null";
  if (const auto ranks = waits_for_()) {
    std::vector<std::string> awaited;
    for (const int rank : *ranks) awaited.push_back(std::to_string(rank));
    awaited.resize(std::min(awaited.size(), kMostAwaited));
    waits_for = array_of(awaited);
  }
  const std::string text = object_of({
      {"rank", std::to_string(place_.rank)},
      {"size", std::to_string(place_.members.size())},
      {"pid", std::to_string(mine.pid)},
      {"host", quoted(mine.host)},
      {"job", quoted(std::to_string(first.pid) + "@" + first.host)},
      {"hosts", hosts_},
      {"transport", "\"native\""},
      {"entered", std::to_string(started)},
      {"inside", current.in_progress ? "true" : "false"},
      {"waits_for", waits_for},
      {"doing", quoted(doing.substr(0, kDoingBytes))},
      {"busy", "false"},
      {"since_ns", std::to_string(started ? current.start : place_.zero_ns)},
      {"written_ns", std::to_string(now())},
      {"samples", "0"},
      {"samples_per_second", "null"},
  });
  const std::lock_guard lock(mutex_);
  // A reader that comes in the middle of the writing finds no valid JSON, and reads again.
  if (file_ >= 0 && text.size() < kTextBytes) [[maybe_unused]]
    const ssize_t bytes = pwrite(file_, text.data(), text.size(), 0);
}

void PlainRecord::hide() {
  const std::lock_guard lock(mutex_);
  if (file_ >= 0) ::close(file_);
  file_ = -1;
  run_folder_.clear();
  record::hide();
}

std::string PlainRecord::flight_record(const std::string& why) {
  const auto seconds = [this](int64_t ns) {
    return ns ? decimal(ns - place_.zero_ns, 1'000'000'000, 9) : std::string("null");
  };
  std::vector<std::string> events, waits;
  for (const auto& [number, fingerprint, bytes, start, all_entered, end] : record::last_events()) {
    events.push_back(
        array_of({std::to_string(number), quoted(name_of(fingerprint)), std::to_string(bytes),
                  seconds(start), seconds(all_entered), seconds(end)}));
  }
  for (const auto& [start, end] : record::last_waits()) {
    if (start && end) waits.push_back(array_of({seconds(start), seconds(end)}));
  }
  const Member& mine = place_.members[place_.rank];
  return object_of({
      {"rank", std::to_string(place_.rank)},
      {"size", std::to_string(place_.members.size())},
      {"host", quoted(mine.host)},
      {"pid", std::to_string(mine.pid)},
      {"began", decimal(began_us_, 1'000'000, 6)},
      {"events", array_of(events)},
      {"waits", array_of(waits)},
      {"why", quoted(why)},
  });
}

void PlainRecord::write_flight_record(const std::string& why) {
  const std::string name = "rank-" + std::to_string(place_.rank) + ".json";
  if (has_named_folder_)
    std::filesystem::create_directories(std::filesystem::path(folder_).parent_path());
  const Owner owner = has_named_folder_ ? Owner::kAnyone : Owner::kThisUserAlone;
  make_folder(AT_FDCWD, folder_);
  const File folder(open_folder(AT_FDCWD, folder_, owner));
  if (inner_.empty()) {
    replace(folder, name, flight_record(why));
  } else {
    make_folder(folder, inner_);
    const File inner(open_folder(folder, inner_, owner));
    replace(inner, name, flight_record(why));
  }
}

std::string PlainRecord::dump(const std::string& why) {
  const std::string late =
      folder_ + ": it takes longer than " + std::to_string(kDumpTime.count()) + " s to write there";
  // One at a time, as several threads may come to the end of the job.
  const std::unique_lock lock(dumping_, kDumpTime);
  if (!lock) throw std::runtime_error(late);
  std::packaged_task<void()> write([this, why] { write_flight_record(why); });
  std::future<void> written = write.get_future();
  std::thread(std::move(write)).detach();
  if (written.wait_for(kDumpTime) != std::future_status::ready) throw std::runtime_error(late);
  written.get();
  return folder_ + (inner_.empty() ? "" : "/" + inner_) + "/rank-" + std::to_string(place_.rank) +
         ".json";
}

}  // namespace jaxmpi::mpi
