"""Programs of plain JAX that communicate, by shard_map and by jit; jaxmpi is not imported.

With virtual devices of one process they give the results that ranks must give:

    XLA_FLAGS=--xla_force_host_platform_device_count=4 python sharded_cases.py 4 save results.npz
    jaxmpi run -n 4 sharded_cases.py 4 compare results.npz

The second writes results.npz.RANK in JSON: for each case "" or what is wrong.
"""

import json
import sys
import threading
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

CASES = {}
DTYPES = (
    *("float32", "float64", "bfloat16", "float16", "int8", "int16", "int32", "int64"),
    *("uint8", "uint16", "uint32", "uint64", "complex64", "complex128", "bool"),
)
ORDERED = tuple(name for name in DTYPES if not name.startswith("complex"))
SUMMED = tuple(name for name in DTYPES if name != "bool")


def case(ranks, name=None):
    """Register a function of the devices for some numbers of ranks."""

    def register(function):
        CASES[name or function.__name__] = (ranks, function)
        return function

    return register


def mesh_of(devices, *shape):
    names = ("a", "b", "c")[: len(shape)]
    return Mesh(np.array(devices).reshape(shape), names, axis_types=(AxisType.Auto,) * len(shape))


def put(mesh, spec, x):
    return jax.make_array_from_callback(x.shape, NamedSharding(mesh, spec), lambda i: x[i])


def values(shape, dtype="float32", seed=0):
    """Small whole numbers: their sums and products are exact in every type."""
    x = np.random.default_rng(seed).integers(1, 4, shape)
    if dtype.startswith("complex"):
        return (x - 1j * x[::-1]).astype(dtype)
    return (x % 2 == 0) if dtype == "bool" else x.astype(jnp.dtype(dtype))


BY_ROWS = P("a")


def mapped(f, mesh, spec=BY_ROWS, out=None, **options):
    return jax.jit(
        jax.shard_map(f, mesh=mesh, in_specs=spec, out_specs=out or spec, check_vma=False),
        **options,
    )


# Collectives of one axis, in every type

COLLECTIVES = {
    "psum": (lambda x: lax.psum(x, "a"), SUMMED),
    "pmax": (lambda x: lax.pmax(x, "a"), ORDERED),
    "pmin": (lambda x: lax.pmin(x, "a"), ORDERED),
    "all_gather": (lambda x: lax.all_gather(x, "a", axis=1, tiled=True), DTYPES),
    "psum_scatter": (lambda x: lax.psum_scatter(x, "a", scatter_dimension=1, tiled=True), SUMMED),
    "all_to_all": (lambda x: lax.all_to_all(x, "a", 1, 1, tiled=True), DTYPES),
    "ring": (lambda x: shifted(x, 1), DTYPES),
    "edge": (lambda x: lax.ppermute(x, "a", [(0, 1)]), DTYPES),
}


def shifted(x, by):
    n = lax.axis_size("a")
    return lax.ppermute(x, "a", [(i, (i + by) % n) for i in range(n)])


def collective(f, dtype, devices):
    n = len(devices)
    mesh = mesh_of(devices, n)
    return mapped(f, mesh)(put(mesh, P("a"), values((n, 5 * n), dtype)))


for name, (f, dtypes) in COLLECTIVES.items():
    for dtype in dtypes:
        case((2, 3), f"{name} {dtype}")(partial(collective, f, dtype))


@case((2, 3, 4))
def pmean_of_many_arrays(devices):
    mesh = mesh_of(devices, len(devices))
    tree = [put(mesh, P("a"), values((len(devices), n), seed=n)) for n in (1, 7, 40_000, 300_000)]
    return mapped(lambda t: jax.tree.map(lambda x: lax.pmean(x, "a"), t), mesh)(tree)


@case((2, 3, 4))
def donated_large_psum(devices):
    mesh = mesh_of(devices, len(devices))
    f = mapped(lambda x: lax.psum(x, "a"), mesh, donate_argnums=0)
    return f(f(put(mesh, P("a"), values((len(devices), 3_000_000)))))


@case((2, 3, 4))
def scattered_large_sum(devices):
    n = len(devices)
    mesh = mesh_of(devices, n)
    f = mapped(lambda x: lax.psum_scatter(x, "a", scatter_dimension=1, tiled=True), mesh)
    return f(put(mesh, P("a"), values((n, 1_000_000 * n))))


@case((2, 3, 4))
def empty_array(devices):
    mesh = mesh_of(devices, len(devices))
    return mapped(lambda x: lax.psum(x, "a"), mesh)(put(mesh, P("a"), values((len(devices), 0))))


@case((2, 3, 4))
def scan_with_psum(devices):
    mesh = mesh_of(devices, len(devices))

    def f(x):
        return lax.scan(lambda c, _: (lax.psum(c, "a") / 4 + shifted(c, 1), c.sum()), x, None, 5)[0]

    return mapped(f, mesh)(put(mesh, P("a"), values((len(devices), 16))))


@case((3,))
def groups_of_uneven_ranks(devices):
    mesh = mesh_of(devices, 3)
    f = mapped(lambda x: lax.all_gather(x, "a", axis=1, tiled=True), mesh)
    two = mesh_of(devices[:2], 2)
    x = values((3, 6))
    found = [f(put(mesh, P("a"), x))]
    if any(device.process_index == jax.process_index() for device in devices[:2]):
        found.append(mapped(lambda x: lax.psum(x, "a"), two)(put(two, P("a"), x[:2])))
    return found


# Meshes of two axes


@case((4,))
def rows_and_columns(devices):
    mesh = mesh_of(devices, 2, 2)
    x = put(mesh, P("a", "b"), values((4, 8)))
    spec = P("a", "b")
    return [
        mapped(lambda x: lax.psum(x, "a"), mesh, spec)(x),
        mapped(lambda x: lax.psum(x, "b"), mesh, spec)(x),
        mapped(lambda x: lax.psum(x, ("a", "b")), mesh, spec)(x),
        mapped(lambda x: lax.psum(lax.all_gather(x, "b", axis=1, tiled=True), "a"), mesh, spec)(x),
    ]


@case((4,))
def columns_before_rows(devices):
    """Columns first, in a mesh of other devices than `rows_and_columns`."""
    mesh = mesh_of([devices[i] for i in (0, 1, 3, 2)], 2, 2)
    x = put(mesh, P("a", "b"), values((4, 8), seed=1))
    return mapped(lambda x: lax.psum(lax.pmax(x, "a"), "b"), mesh, P("a", "b"))(x)


@case((4,))
def reversed_devices(devices):
    mesh = mesh_of(devices[::-1], 4)
    f = mapped(
        lambda x: lax.psum_scatter(shifted(x, 1), "a", scatter_dimension=1, tiled=True), mesh
    )
    return f(put(mesh, P("a"), values((4, 8), seed=2)))


@case((4,))
def diagonal_pairs(devices):
    mesh = mesh_of([devices[i] for i in (0, 3, 1, 2)], 2, 2)
    x = put(mesh, P("a", "b"), values((4, 8), seed=3))
    return mapped(lambda x: lax.all_to_all(x, "b", 1, 1, tiled=True), mesh, P("a", "b"))(x)


@case((4,))
def half_of_the_ranks(devices):
    """Each half has a mesh and a program of its own, of which the other knows nothing."""
    found = []
    for half, f in ((devices[:2], lax.psum), (devices[2:], lax.pmax)):
        mesh = mesh_of(half, 2)
        mine = any(device.process_index == jax.process_index() for device in half)
        program = mapped(lambda x, f=f: f(x, "a"), mesh)
        found.append(program(put(mesh, P("a"), values((2, 8)))) if mine else None)
    return found


@case((4,))
def groups_by_index(devices):
    mesh = mesh_of(devices, 4)
    groups = [[0, 1], [2, 3]], [[0, 2], [1, 3]], [[0, 3], [2, 1]]
    x = put(mesh, P("a"), values((4, 8), seed=4))
    return [mapped(lambda x, g=g: lax.psum(x, "a", axis_index_groups=g), mesh)(x) for g in groups]


@case((4,))
def partial_permutes(devices):
    mesh = mesh_of(devices, 4)
    x = put(mesh, P("a"), values((4, 8), seed=5))
    pairs = [(0, 1)], [(0, 2), (2, 0)], [(3, 0), (1, 2)], [(i, 3 - i) for i in range(4)], [(2, 2)]
    return [mapped(lambda x, p=p: lax.ppermute(x, "a", p), mesh)(x) for p in pairs]


# jit with shardings


def loss(p, x, y):
    hidden = jnp.tanh(x @ p["w1"] + p["b1"])
    return jnp.mean((hidden @ p["w2"] - y) ** 2)


def parameters():
    rng = np.random.default_rng(0)
    shapes = {"w1": (12, 24), "b1": (24,), "w2": (24, 12)}
    return {k: rng.normal(size=s).astype(np.float32) / 4 for k, s in shapes.items()}


def batch(seed=0):
    rng = np.random.default_rng(seed)
    return [rng.normal(size=(24, 12)).astype(np.float32) for _ in range(2)]


def trained(mesh, specs, batch_spec, steps=5):
    """Gradient descent with sharded parameters; donated, with in and out shardings."""
    shardings = {k: NamedSharding(mesh, s) for k, s in specs.items()}
    data = NamedSharding(mesh, batch_spec)

    @partial(
        jax.jit,
        in_shardings=(shardings, data, data),
        out_shardings=(shardings, NamedSharding(mesh, P())),
        donate_argnums=0,
    )
    def step(p, x, y):
        value, gradient = jax.value_and_grad(loss)(p, x, y)
        return jax.tree.map(lambda p, g: p - 0.1 * g, p, gradient), value

    p = {k: put(mesh, specs[k], v) for k, v in parameters().items()}
    values = []
    for i in range(steps):
        x, y = (put(mesh, batch_spec, z) for z in batch(i))
        p, value = step(p, x, y)
        values.append(value)
    return p, values


@case((2, 3, 4))
def data_parallel_training(devices):
    mesh = mesh_of(devices, len(devices))
    return trained(mesh, {"w1": P(), "b1": P(), "w2": P()}, P("a"))


@case((2, 3, 4))
def fsdp_training(devices):
    mesh = mesh_of(devices, len(devices))
    return trained(mesh, {"w1": P("a"), "b1": P("a"), "w2": P(None, "a")}, P("a"))


@case((4,))
def tensor_parallel_training(devices):
    mesh = mesh_of(devices, 2, 2)
    return trained(mesh, {"w1": P(None, "b"), "b1": P("b"), "w2": P("b")}, P("a"))


@case((4,))
def sharded_over_both_axes(devices):
    mesh = mesh_of(devices, 2, 2)
    return trained(mesh, {"w1": P("a", "b"), "b1": P(("a", "b")), "w2": P("b", "a")}, P("a"))


@case((4,))
def resharded(devices):
    mesh = mesh_of(devices, 2, 2)
    x = put(mesh, P("a", "b"), values((8, 8)))
    specs = P("b", "a"), P(("a", "b")), P(None, "a"), P(), P(None, ("b", "a"))
    return [jax.jit(lambda x: x, out_shardings=NamedSharding(mesh, s))(x) for s in specs]


@case((4,))
def constrained(devices):
    mesh = mesh_of(devices, 2, 2)

    @jax.jit
    def f(x):
        y = lax.with_sharding_constraint(x @ x.T, NamedSharding(mesh, P("b", "a")))
        z = lax.with_sharding_constraint(jnp.sort(y, axis=0), NamedSharding(mesh, P(None, "b")))
        return jnp.cumsum(z, axis=1), z.sum()

    return f(put(mesh, P("a", "b"), values((8, 8))))


@case((2, 3, 4))
def gradient_through_collectives(devices):
    n = len(devices)
    mesh = mesh_of(devices, n)

    def f(x):
        g = lax.all_gather(x, "a", axis=1, tiled=True)
        return lax.pmean(jnp.sum(jnp.sin(g) * shifted(g, 1)), "a")

    whole = jax.shard_map(f, mesh=mesh, in_specs=P("a"), out_specs=P(), check_vma=False)
    return jax.jit(jax.grad(whole))(put(mesh, P("a"), values((n, 6))))


@case((2, 3, 4))
def fft_by_all_to_all(devices):
    n = len(devices)
    mesh = mesh_of(devices, n)

    def f(x):
        x = jnp.fft.fft(x, axis=1)
        x = lax.all_to_all(x, "a", 1, 0, tiled=True)
        return jnp.fft.fft(x, axis=0)

    x = values((4 * n, 4 * n), "complex64")
    return mapped(f, mesh, P("a"), P(None, "a"))(put(mesh, P("a"), x))


@case((2, 4))
def programs_of_threads_in_turn(devices):
    """Each thread has a mesh of its own, and waits for its program before the next one starts."""
    meshes = mesh_of(devices, len(devices)), mesh_of(devices[::-1], len(devices) // 2, 2)
    found = [[], []]
    order = [threading.Semaphore(1), threading.Semaphore(0)]

    def work(i):
        mesh, axis = meshes[i], ("a", "b")[i]
        f = mapped(lambda x: lax.psum(x, axis), mesh)
        for k in range(10):
            x = put(mesh, P("a"), values((len(devices), 20_000), seed=k))
            order[i].acquire()
            found[i].append(jax.block_until_ready(f(x)))
            order[1 - i].release()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


@case((2, 4))
def programs_under_way_together(devices):
    """One thread starts programs on two meshes, and waits for none before the last."""
    n = len(devices)
    one, two = mesh_of(devices, n), mesh_of(devices[::-1], n // 2, 2)
    f = mapped(lambda x: lax.psum(x, "a") + shifted(x, 1), one)
    g = mapped(lambda x: lax.psum(x, "b"), two)
    x, y = (put(mesh, P("a"), values((n, 60_000))) for mesh in (one, two))
    return [f(x) if i % 2 else g(y) for i in range(20)]


# Comparing


def results(size, devices):
    for name, (ranks, f) in CASES.items():
        if size in ranks:
            yield name, f


def save(size, path):
    arrays = {}
    for name, f in results(size, jax.devices()):
        for i, leaf in enumerate(jax.tree.leaves(f(jax.devices()), is_leaf=lambda x: x is None)):
            array = np.asarray(leaf)
            wide = array.dtype.kind == "V"  # bfloat16
            arrays[f"{name}/{i}"] = array.astype(np.float32) if wide else array
    np.savez(path, **arrays)


def compare(size, path):
    expected, wrong = np.load(path), {}
    for name, f in results(size, jax.devices()):
        try:
            wrong[name] = ""
            leaves = jax.tree.leaves(f(jax.devices()), is_leaf=lambda x: x is None)
            for i, leaf in enumerate(leaves):
                for shard in leaf.addressable_shards if leaf is not None else ():
                    got = np.asarray(shard.data)
                    want = expected[f"{name}/{i}"][shard.index]
                    if got.dtype.kind == "V":
                        got = got.astype(np.float32)
                    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
        except Exception as error:
            wrong[name] = f"{type(error).__name__}: {error}"[:400]
    Path(f"{path}.{jax.process_index()}").write_text(json.dumps(wrong))


if __name__ == "__main__":
    jax.config.update("jax_enable_x64", True)
    size, what, path = int(sys.argv[1]), *sys.argv[2:]
    if what == "compare":
        jax.distributed.initialize()
        assert jax.config.jax_cpu_collectives_implementation == "mpi"
        assert jax.process_count() == size
    assert len(jax.devices()) == size
    {"save": save, "compare": compare}[what](size, path)
