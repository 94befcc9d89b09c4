"""Ranks are started here: by `jaxmpi run`, by a notebook, by a test.

environment     what a job needs where it is started
options         what the command line asks for
mpiexec         which launcher there is, and whether it fits
placement       what the launcher is told
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
hosts           how many ranks a host gets
"""
