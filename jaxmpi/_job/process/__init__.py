"""A rank as a process of this host. Nothing here imports JAX.

settings              the environment variables
launchers             the table of MPI's launchers: variables, options, how they report a failure
failure               the record of a failure: rank, pid, host and cause; the sentence about it
run_dir               who takes part, in files that `jaxmpi run` reads
refused_count         a rank cannot work in a job of so many ranks, for `jaxmpi run`
init_failure          who has not called `init`, while others wait there
peers                 the ranks of this host, as other processes see them
children              processes that a rank starts
signals               what the process is told, also while it stands inside MPI
communicating_thread  which thread communicates
busy                  blocks in which a rank works alone for long, and is waited for
live_record           what a rank shows of itself to `jaxmpi top`
loaded_mpi            which MPI libraries this process has loaded
stderr                messages and the end of the process, though a stream is full, closed or gone
files                 files in folders where other users may write
compiled_files        what JAX has compiled, kept for the next job
made_once             bytes that one rank of a host makes for all that need them
processor             which kind of processor this is
garbage               the garbage collector, paused where it has nothing to collect
at_exit               the end of the process: threads, ranks, MPI, one after the other
"""
