// The rank that this process is for JAX's own collectives: its start, what it says of itself, and
// its end. Where the program calls jaxmpi.init, the rank's monitor takes over most of this.
//
// A program ends, and plain_hooks.py sees how: with a failure, which ends the job for all ranks; or
// else the rank begins to leave, and ranks that wait for it in vain end the job later. Whatever
// ends the job does so by `abort_job`.
#pragma once

#include <string>
#include <vector>

#include "mpi_groups.h"
#include "plain_record.h"

namespace jaxmpi::mpi {

// Start MPI and meet the other ranks, at the first call. End the job where that fails.
void begin();

// Return whether the ranks have met.
bool has_begun();

// Return this rank's job. Throw a std::runtime_error before `begin`, and in a forked child.
Job& running();

// Return the records of this rank; null where a monitor writes them.
PlainRecord* plain_record();

// Return words such as "ranks 0, 1".
std::string list(const std::vector<int>& ranks);

// Say a sentence about this rank, and end the job. XLA ignores the codes of some functions: what
// fails there ends the job.
[[noreturn]] void die(const std::string& text);

// End the job; `why` is for the flight record.
[[noreturn]] void abort_job(int code, const std::string& why = "");

// Note the ranks that had not come to a collective that has failed, because one of them has ended
// or left. If this rank ends the job later, these are to blame.
void note_lost(std::vector<int> ranks);

// jaxmpi.init begins: a monitor watches this rank from now on, and writes its records.
void leave_rank_to_monitor();

// This rank has come to its end. Once it has been idle for two seconds it tells the other ranks
// that it has left, and does not take that back.
void begin_to_leave();

}  // namespace jaxmpi::mpi
