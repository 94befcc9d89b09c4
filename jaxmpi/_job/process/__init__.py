"""A rank as a process of this host. Nothing here imports JAX.

settings              the environment variables
launchers             the table of MPI's launchers: variables, options, how they report a failure
joining               ranks that wait for each other in `init`, as processes of this host
run_dir               the folder of a run: what the ranks tell `jaxmpi run`
failure               the record of a failure: rank, pid, host and cause; the sentence about it
signals               the signals of the process, also while it stands inside MPI
communicating_thread  which thread communicates
busy                  blocks in which a rank works alone for long, and is waited for
live_record           what a rank shows of itself to `jaxmpi top`
loaded_mpi            which MPI libraries this process has loaded
jax_collectives       the library for JAX's own collectives, and the variables by which JAX loads it
stderr                messages and the end of the process, though a stream is full, closed or gone
files                 files in folders where other users may write
compiled_files        compiled programs, for the other ranks of a host and for the next job
waits                 the sleeps of a rank that waits for a lock or a message
processor             the kind of this processor, and how much of it there is
stacks                the frames of a thread, for other threads that look at it
garbage               the garbage collector, paused where it has nothing to collect
at_exit               the end of the process: threads, ranks, MPI, one after the other
"""
