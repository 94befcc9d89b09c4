"""Backends: ranks, and transports of messages between them.

Interface:
base             records: a collective, its messages, a place among the ranks
interface        the abstract classes: `Ranks`, and the `Transport` of their programs
groups           groups of ranks: those along named axes
within_groups    collectives within groups, by collectives over all ranks

One process:
one_process      one rank, or several simulated ones

Start of MPI:
transport        choice of the transport of backend "mpi": native or mpi4jax
start_checks     checks of all ranks before there is a backend
mpi_library      mpi4py and mpi4jax imported, MPI started and ended
extension        the native extension loaded and checked

Ranks of an MPI job, outside of programs:
mpi_ranks        objects, barriers and the monitor's channel
comparison       comparisons of what the ranks do, between programs
communicator     types of mpi4py's communicators
handover         messages for which ranks wait asleep
votes            yes or no of each rank, received later, within a node without a message

Native transport:
native           the backend: shared memory within a node, MPI between nodes
native_calls     its calls in a program: at once, or a start and a wait
native_transports  opens its shared memory and its connections to other nodes
shared_memory    memory that the ranks of a node share; `_job/process/run_dir` removes it after a kill
tuning           chunk sizes within a node and between nodes, and thresholds between algorithms

Other transports:
mpi4jax          mpi4jax
xla              backend "xla": NCCL or gloo
jax_processes    JAX's own processes, which the ranks join

Collectives in programs:
primitive        one JAX primitive for all collectives of backend "mpi"
sent_ahead       messages from one call of a program to a later one
lax_collectives  collectives by JAX's own, where the axis is bound
on_axis          the same, without operations that XLA's CPU backend lacks
packing          several small arrays in one of XLA's collectives
bucketing        leaves grouped into messages
wire_dtypes      dtypes that travel for others, for mpi4jax and XLA on CPUs
"""
