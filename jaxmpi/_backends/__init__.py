"""What carries the messages between the ranks.

base             the interface of a backend; a collective; the place of a rank
groups           groups of ranks: those along named axes
within_groups    collectives within groups, by those of all ranks
single           one rank
simulate         several ranks in one process
transport        backend "mpi": which of the next two carries the messages
native           the native extension, in shared memory and over MPI
mpi              mpi4jax
native_transports  the shared memory of the native extension within a node, and its connections to
other nodes shared_memory    memory that the ranks of a node share
votes            yes or no of each rank, heard of later, within a node without a message
native_calls     the calls of the native extension in a program: at once, a start and a wait, or a
start that a later call takes tuning           sizes and algorithms of the messages between nodes
mpi_library      mpi4py and mpi4jax imported, MPI started and ended
start_checks     what the ranks tell each other before there is a backend
xla              backend "xla": NCCL or gloo
jax_processes    the processes that JAX itself knows, which are the ranks
process_group    the ranks of an MPI job, outside of compiled programs
activity         what a rank is doing, for those who watch it
communicator     what is used of mpi4py's communicators, as types
handover         messages that ranks wait for asleep
extension        the native extension, if it is the one that belongs to these sources
primitive        one JAX primitive for all collectives of backend "mpi"
lax_collectives  collectives by JAX's own, where the axis is bound
sent_ahead       messages from one call of a program to a later one, in JAX's own words
on_axis          the same, with what XLA's backends on CPUs cannot do
packing          several small arrays in one of XLA's collectives
bucketing        which leaves travel together
wire_dtypes      the dtypes that travel in the place of those that cannot, for mpi4jax and XLA on
CPUs
"""
