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
#include <sstream>
#include <stdexcept>

#include "clock.h"
#include "record.h"

namespace jaxmpi::mpi {
namespace {

constexpr const char* kFileName = "jaxmpi-rank";
constexpr size_t kTextBytes = 1 << 14;  // TEXT_BYTES of live_record.py
constexpr size_t kCountBytes = 16;      // behind it: programs, which are not counted here
constexpr size_t kMostHosts = 256;

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

std::string quoted(const std::string& text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') out += '\\';
    out += static_cast<unsigned char>(c) < 0x20 ? ' ' : c;
  }
  return out + '"';
}

// JSON's array of texts.
std::string array_of(const std::vector<std::string>& texts) {
  std::string out = "[";
  for (size_t i = 0; i < texts.size(); ++i) out += (i ? ", " : "") + texts[i];
  return out + "]";
}

std::string host_of(const Member& member) { return member.host; }

std::string variable(const char* name) {
  const char* text = std::getenv(name);
  return text ? text : "";
}

// Open a folder in another one (AT_FDCWD: a path). A private one is of this user, and no link.
int open_folder(int in, const std::string& name, bool is_private) {
  if (mkdirat(in, name.c_str(), 0700) != 0 && errno != EEXIST) fail(name);
  const int flags = O_RDONLY | O_DIRECTORY | O_CLOEXEC | (is_private ? O_NOFOLLOW : 0);
  const int folder = openat(in, name.c_str(), flags);
  struct stat found = {};
  if (folder < 0 || fstat(folder, &found) != 0) fail(name);
  if (is_private && (found.st_uid != getuid() || (found.st_mode & 077))) {
    ::close(folder);
    throw std::runtime_error(name + " is not a folder of this user alone");
  }
  return folder;
}

// Write a file so that a reader finds the old text or the new one.
void replace(int folder, const std::string& name, const std::string& text) {
  const std::string part = name + ".part";
  unlinkat(folder, part.c_str(), 0);
  const int flags = O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC;
  const File file(openat(folder, part.c_str(), flags, 0600));
  if (file < 0) fail(name);
  for (size_t done = 0; done < text.size();) {
    const ssize_t bytes = ::write(file, text.data() + done, text.size() - done);
    if (bytes < 0) fail(name);
    done += static_cast<size_t>(bytes);
  }
  if (renameat(folder, part.c_str(), folder, name.c_str()) != 0) fail(name);
}

}  // namespace

PlainRecord::PlainRecord(JobPlace place, std::function<std::vector<int>()> waits_for)
    : place_(std::move(place)),
      waits_for_(std::move(waits_for)),
      began_(std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch())
                 .count()),
      file_(memfd_create(kFileName, MFD_CLOEXEC)) {
  record::open();  // a reader that finds the one file looks for the other at once
  // Without memory for it, `jaxmpi top` does not show this rank; the job goes on.
  if (file_ >= 0 && ftruncate(file_, kTextBytes + kCountBytes) != 0) {
    ::close(file_);
    file_ = -1;
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
  if (file_ < 0) return;
  const auto [started, ended] = record::messages();
  const auto last = record::last_event();
  const std::string doing = started ? name_of(last.fingerprint) : "before the first collective";
  const Member &mine = place_.members[place_.rank], &first = place_.members[0];
  std::vector<std::string> hosts, waited_for;
  for (const Member& member : place_.members) hosts.push_back(quoted(host_of(member)));
  std::sort(hosts.begin(), hosts.end());
  hosts.erase(std::unique(hosts.begin(), hosts.end()), hosts.end());
  hosts.resize(std::min(hosts.size(), kMostHosts));
  for (const int rank : waits_for_()) waited_for.push_back(std::to_string(rank));
  const int64_t since = started ? last.start : place_.zero_ns;
  std::ostringstream text;
  text << "{\"rank\": " << place_.rank << ", \"size\": " << place_.members.size()
       << ", \"pid\": " << mine.pid << ", \"host\": " << quoted(host_of(mine))
       << ", \"job\": " << quoted(std::to_string(first.pid) + "@" + host_of(first))
       << ", \"hosts\": " << array_of(hosts) << ", \"transport\": \"native\""
       << ", \"entered\": " << started << ", \"inside\": " << (started > ended ? "true" : "false")
       << ", \"waits_for\": " << array_of(waited_for) << ", \"doing\": " << quoted(doing)
       << ", \"busy\": false, \"since_ns\": " << since << ", \"written_ns\": " << now()
       << ", \"samples\": 0, \"samples_per_second\": null}\n";
  const std::string all = text.str();
  // A reader that comes in the middle finds no valid JSON, and reads again.
  if (all.size() < kTextBytes && pwrite(file_, all.data(), all.size(), 0) < 0) return;
}

std::string PlainRecord::flight_record(const std::string& why) {
  const auto seconds = [this](int64_t ns) {
    if (!ns) return std::string("null");
    char text[32];
    std::snprintf(text, sizeof text, "%.9f", static_cast<double>(ns - place_.zero_ns) / 1e9);
    return std::string(text);
  };
  std::vector<std::string> events, waits;
  for (const auto& [number, fingerprint, bytes, start, all_entered, end] : record::last_events()) {
    events.push_back("[" + std::to_string(number) + ", " + quoted(name_of(fingerprint)) + ", " +
                     std::to_string(bytes) + ", " + seconds(start) + ", " + seconds(all_entered) +
                     ", " + seconds(end) + "]");
  }
  for (const auto& [start, end] : record::last_waits()) {
    if (start && end) waits.push_back("[" + seconds(start) + ", " + seconds(end) + "]");
  }
  std::ostringstream text;
  text.precision(17);
  text << "{\"rank\": " << place_.rank << ", \"size\": " << place_.members.size()
       << ", \"host\": " << quoted(host_of(place_.members[place_.rank]))
       << ", \"pid\": " << place_.members[place_.rank].pid << ", \"began\": " << began_
       << ", \"events\": " << array_of(events) << ", \"waits\": " << array_of(waits)
       << ", \"why\": " << quoted(why) << "}\n";
  return text.str();
}

std::string PlainRecord::dump(const std::string& why) {
  const std::string name = "rank-" + std::to_string(place_.rank) + ".json";
  std::string path = variable("JAXMPI_FLIGHT_DIR");
  const bool is_private = path.empty();
  if (is_private) {
    const std::string folder = variable("TMPDIR");
    char token[17];
    std::snprintf(token, sizeof token, "%016llx", static_cast<unsigned long long>(place_.token));
    path = (folder.empty() ? "/tmp" : folder) + "/jaxmpi-flight-" + std::to_string(getuid()) + "-" +
           token;
  }
  try {
    const File folder(open_folder(AT_FDCWD, path, is_private));
    // A restarted job keeps the records of the job that failed.
    const std::string restart = is_private ? "" : variable("JAXMPI_RESTART");
    if (restart.empty() || restart == "0") {
      replace(folder, name, flight_record(why));
    } else {
      path += "/restart-" + restart;
      const File inner(open_folder(folder, "restart-" + restart, false));
      replace(inner, name, flight_record(why));
    }
    return "Its last collectives are in " + path + "/" + name;
  } catch (const std::exception& error) {
    return std::string("Its last collectives cannot be written (") + error.what() +
           "): set JAXMPI_FLIGHT_DIR to another folder.";
  }
}

}  // namespace jaxmpi::mpi
