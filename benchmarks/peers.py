"""Other libraries' ways to average arrays over the ranks.

Each function takes shapes and a dtype, and returns a call without arguments.

Every call averages in the place of the last result where the library can.
"""

import os
import socket

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from mpi4py import MPI

from jaxmpi import _jaxcompat

COMM = MPI.COMM_WORLD.Dup()


def start_jax(host="localhost"):
    """Start JAX's own processes for gloo, at an address of rank 0, before a backend exists."""
    jax.config.update("jax_cpu_collectives_implementation", "gloo")  # `jaxmpi run` asks for MPI
    if host != "localhost":
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as towards:
            towards.connect((host, 9))  # sends nothing, but chooses the address that leads there
            _jaxcompat.gloo_listens_at(towards.getsockname()[0])
    port = 0
    if COMM.rank == 0:
        with socket.socket() as probe:
            probe.bind(("", 0))
            port = probe.getsockname()[1]
    port = COMM.bcast(port)
    jax.distributed.initialize(
        f"{host}:{port}", COMM.size, COMM.rank, cluster_detection_method="deactivate"
    )


def start_torch(host="localhost"):
    """Return the module torch with gloo started at an address of rank 0; None if not installed."""
    try:
        import torch
        import torch.distributed
    except ImportError:
        return None
    torch.set_num_threads(1)
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = COMM.bcast(probe.getsockname()[1])
    os.environ.update(MASTER_ADDR=host, MASTER_PORT=str(port))
    if host != "localhost":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "cable")  # of tests/network.sh
    torch.distributed.init_process_group("gloo", rank=COMM.rank, world_size=COMM.size)
    return torch


def host(shapes, dtype):
    rng = np.random.default_rng(COMM.rank)
    return [rng.random(shape, np.float32).astype(dtype) for shape in shapes]


def memcpy(shapes, dtype):
    sources, copies = host(shapes, dtype), host(shapes, dtype)

    def call():
        for copy, source in zip(copies, sources, strict=True):
            np.copyto(copy, source)

    return call


def mpi4py_in_place(shapes, dtype):
    """Sum with mpi4py in place, without the division; MPI knows no bfloat16."""
    arrays = host(shapes, np.float32 if dtype == ml_dtypes.bfloat16 else dtype)

    def call():
        for array in arrays:
            array *= 1 / COMM.size  # or it grows to infinity
            COMM.Allreduce(MPI.IN_PLACE, array)

    return call


def mpi4py_after_jit(shapes, dtype):
    """Average with mpi4py after an empty jitted call: the cost of a jitted call plus a message."""
    jitted, message = jax.jit(lambda xs: [x + 1 for x in xs]), mpi4py_in_place(shapes, dtype)
    given = [jnp.asarray(x) for x in host(shapes, dtype)]

    def call():
        jax.block_until_ready(jitted(given))
        message()

    return call


class Fed:
    """Calls of a function, each on what the last one returned."""

    def __init__(self, function, tree):
        self.function, self.tree = function, tree

    def __call__(self):
        self.tree = self.function(self.tree)
        return self.tree


def jaxmpi_mean(shapes, dtype):
    import jaxmpi

    return Fed(
        jaxmpi.jit(jaxmpi.tree_allreduce, donate_argnums=0),
        list(map(jnp.asarray, host(shapes, dtype))),
    )


def codec_mean(codec, shapes):
    """Average with a codec, whose residuals are kept from call to call."""
    import jaxmpi

    def mean(tree):
        means, residuals = codec.mean(tree[0], tree[1].per_rank)
        return means, jaxmpi.PerRankState(residuals)

    arrays = list(map(jnp.asarray, host(shapes, np.float32)))
    return Fed(
        jaxmpi.jit(mean, donate_argnums=0), (arrays, jaxmpi.PerRankState(codec.init(arrays)))
    )


def mpi4jax_per_leaf(shapes, dtype):
    """Average with mpi4jax, one message an array, in float32 as it knows no bfloat16."""
    import mpi4jax

    comm = MPI.COMM_WORLD.Clone()  # mpi4py and mpi4jax must not share one

    def mean(tree):
        means = []
        for x in tree:
            total = mpi4jax.allreduce(x.astype(jnp.float32), op=MPI.SUM, comm=comm)
            means.append((total / comm.size).astype(x.dtype))
        return means

    return Fed(jax.jit(mean, donate_argnums=0), list(map(jnp.asarray, host(shapes, dtype))))


def mpi4jax_concatenated(shapes, dtype):
    import mpi4jax

    comm = MPI.COMM_WORLD.Clone()
    ends = np.cumsum([int(np.prod(shape)) for shape in shapes])

    def mean(tree):
        flat = jnp.concatenate([x.ravel().astype(jnp.float32) for x in tree])
        flat = mpi4jax.allreduce(flat, op=MPI.SUM, comm=comm) / comm.size
        parts = jnp.split(flat, ends[:-1])
        return [y.reshape(x.shape).astype(x.dtype) for y, x in zip(parts, tree, strict=True)]

    return Fed(jax.jit(mean, donate_argnums=0), list(map(jnp.asarray, host(shapes, dtype))))


def mesh():
    """Return a mesh of one device per process, and the sharding of per-process arrays."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("ranks",))
    return mesh, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())


def global_array(sharding, x):
    mine = jax.device_put(x, jax.local_devices()[0])
    return jax.make_array_from_single_device_arrays(mine.shape, sharding, [mine])


def jax_gloo(shapes, dtype):
    """Average with `pmean` in a `shard_map` over one device per process."""
    spec = jax.sharding.PartitionSpec()
    over, sharding = mesh()
    mean = jax.shard_map(
        lambda tree: jax.tree.map(lambda x: jax.lax.pmean(x, "ranks"), tree),
        mesh=over,
        in_specs=spec,
        out_specs=spec,
        check_vma=False,
    )
    return Fed(
        jax.jit(mean, donate_argnums=0), [global_array(sharding, x) for x in host(shapes, dtype)]
    )


def torch_gloo(torch):
    """Average one flat tensor with torch's gloo, as DDP does with its buckets."""

    def peer(shapes, dtype):
        kind = torch.bfloat16 if dtype == ml_dtypes.bfloat16 else torch.float32
        tensor = torch.rand(sum(int(np.prod(shape)) for shape in shapes)).to(kind)

        def call():
            torch.distributed.all_reduce(tensor)
            tensor.div_(COMM.size)

        return call

    return peer
