// Two waits of two threads that begin at different times, and what is reported
// of them.
//
//     check_waits SECONDS_OF_FIRST_BEFORE_SECOND SECONDS_OF_BOTH
//     [monitored|left]
//
// The second is for ranks 0 and 1; with "left", rank 1 has left.
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <string>

#include "mpi_waits.h"

using jaxmpi::mpi::Wait;

int main(int count, char **arguments) {
  const std::string how = count > 3 ? arguments[3] : "";
  if (how == "monitored")
    jaxmpi::mpi::leave_end_to_monitor(true);
  const auto pause = [](const char *seconds) {
    usleep(static_cast<useconds_t>(1e6 * std::atof(seconds)));
  };
  jaxmpi::mpi::watch_waits(
      {[](const std::string &text) { std::printf("%s\n", text.c_str()); },
       [how](int rank) { return how == "left" && rank == 1; },
       [](const std::set<int> &left) {
         std::printf("end for %zu that have left\n", left.size());
         std::fflush(stdout);
         std::_Exit(0);
       },
       [] {}});
  // Several of each: the order in which they are looked at is that of their
  // addresses.
  const auto none = [] { return std::string(); };
  const auto first = [] { return std::string("the first"); };
  const auto second = [] { return std::string("the second"); };
  const Wait a(first, none, {}), b(first, none, {});
  pause(arguments[1]);
  const Wait c(second, [] { return std::string("it waits for rank 1"); },
               {0, 1}),
      d(second, none, {});
  pause(arguments[2]);
  return 0;
}
