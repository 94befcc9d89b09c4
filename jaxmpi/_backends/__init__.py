"""Backends: ranks, and transports of messages between them.

Interface:
base               records: a collective, its messages, a place among the ranks, and facts that a
                   rank remembers between calls
interface          the abstract classes: `Ranks`, and the `Transport` of their programs
groups             groups of ranks: those along named axes

One process:
one_process        one rank, or several simulated ones

Ranks of an MPI job, outside of programs:
start              checks of all ranks, and the choice of the transport
mpi_library        mpi4py and mpi4jax imported, MPI started and ended, types of communicators
mpi_ranks          objects, barriers and the monitor's channel
program_log        programs that a rank has entered and left, where nobody sees their messages
comparison         comparisons of what the ranks do, between programs
asleep             exchanges with a rank that may be seconds late: barrier, broadcast, votes

Native transport:
native             shared memory within a node, MPI between nodes; comparison in the messages
native_calls       its calls in a program: at once, or a start and a wait
native_transports  opens its shared memory and its connections to other nodes
extension          the C++ extension loaded and checked
tuning             chunk sizes within a node and between nodes, thresholds between algorithms

Other transports:
mpi4jax            mpi4jax
xla                NCCL, gloo or the native transport, on JAX's own processes
jax_processes      JAX's own processes, which the ranks join, and the address of rank 0
nccl               NCCL's version, and its variables where ranks share a GPU

Collectives in programs:
primitive          one JAX primitive for all collectives of backend "mpi"
branches           branches under plain `jax.jit` that send different messages
sent_ahead         messages from one call of a program to a later one
lax_collectives    collectives by JAX's own, where the axis is bound
wire               collectives by a transport that lacks a dtype, an operation or groups
"""
