"""Ranks are started here: by `jaxmpi run`, by a notebook, by a test.

machine         the host on which a job is started, and whether it allows one
options         what the command line asks for
mpiexec         the launcher and the MPI library of this environment
placement       hosts, cores of each rank, the launcher's command line
supervisor      the launcher, run to its end
host_ranks      the ranks of this host, and in which order they end
mpi_daemons     through which MPICH's launcher reaches the hosts
output          its output, passed on
failure_report  which rank failed, and how
failed_host     on which host
restart         what a restart runs on
scaling         a program on several numbers of ranks, compared
run             all of that: `jaxmpi run`
pool            `jaxmpi.launch` and the ranks of tests: ranks that wait for functions to run
worker          one of these ranks
"""
