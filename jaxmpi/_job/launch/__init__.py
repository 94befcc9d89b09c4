"""Ranks are started here: by `jaxmpi run`, by a notebook, by a test.

machine         the host on which a job is started, and whether it allows one
options         what the command line asks for
mpiexec         the launcher and the MPI library of this environment
mps             CUDA's Multi-Process Service for the job, by `jaxmpi run --mps`
placement       hosts, cores of each rank, the launcher's command line
plain_jax       variables for programs of JAX alone: its collectives, and its coordinator
run             `jaxmpi run`: from the command line to the exit code, with restarts
scaling         `jaxmpi run --scaling`: throughput against the number of ranks
supervisor      one run of the launcher: output, signals, the end of the job
host_ranks      the ranks and daemons of this host, and the order in which they end
find_failure    the rank that ended a job, from the launcher's output and the ends of ranks
pool            `jaxmpi.launch` and the ranks of tests: ranks that wait for functions to run
worker          one of these ranks
"""
