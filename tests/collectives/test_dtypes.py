"""Every dtype through every collective on every backend: right numbers, or a precise error.

    python tests/collectives/test_dtypes.py     prints the table

The expected values are NumPy's, with the dtypes of ml_dtypes. What only moves keeps its bits;
floats below 32 bits are reduced in float32 and rounded once; integers wrap. Arrays have odd
lengths, so that dtypes of which several share a byte end in the middle of one.
"""

import os
import tempfile
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from jax import lax
from other_transport import mpi4jax_pool

import jaxmpi
from jaxmpi._backends.groups import groups_along
from jaxmpi._job.launch.pool import Task, pool
from jaxmpi.testing import IDLE_RANKS_SECONDS, run_ranks

LENGTHS = {"jit": (0, 7), "eager": (0, 1, 3)}
QUICKLY = {"xla_backend_optimization_level": 0}  # is how these programs are to be compiled

BITS = (
    "bool",
    "int2",
    "int4",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint2",
    "uint4",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
)
FLOATS = (
    *(
        "float4_e2m1fn",
        "float8_e3m4",
        "float8_e4m3",
        "float8_e4m3b11fnuz",
        "float8_e4m3fn",
        "float8_e4m3fnuz",
    ),
    *(
        "float8_e5m2",
        "float8_e5m2fnuz",
        "float8_e8m0fnu",
        "bfloat16",
        "float16",
        "float32",
        "float64",
    ),
)
COMPLEX = ("complex64", "complex128")
KEYS = ("threefry2x32", "rbg", "unsafe_rbg")  # by their implementations
DTYPES = (*BITS, *FLOATS, *COMPLEX, *KEYS, "float0")
# names of jax.numpy that XLA on CPUs does not hold
NOT_OF_JAX = ("float6_e2m3fn", "float6_e3m2fn", "int1", "uint1")


class Use(NamedTuple):
    """A collective on arrays `[k]` or `[ranks, k]`, and its expected results.

    `want` computes the results of a group's ranks from the stack of their arrays.
    """

    fun: Callable[[Any, Any], Any]  # of one rank's array and an axis
    want: Callable[[np.ndarray], np.ndarray]
    op: str = ""  # of a reduction
    rows: bool = False  # whether it takes [ranks, k]
    outside: bool = True  # whether it may be called outside of jaxmpi.jit


USES: dict[str, Use] = {}


# the expected values


def everyone(y, n):
    return np.stack([y] * n)


def reduced(stack, op, *, of_lax=False):
    """One rank's result of a reduction over the first axis."""
    dtype, n = stack.dtype, len(stack)
    if dtype == jax.dtypes.float0:
        return stack[0]
    if dtype == np.bool_:
        if op in ("max", "min"):
            return stack.any(0) if op == "max" else stack.all(0)
        counts = stack.sum(0, dtype=np.int32)  # lax counts them
        return counts if op == "sum" else quotient(counts, np.dtype(np.int32), n)
    if jnp.issubdtype(dtype, jnp.integer):
        if op in ("max", "min"):
            return getattr(np, op)(
                stack.astype(object), 0, initial=None if stack.size else 0
            ).astype(dtype)
        exact = (np.prod if op == "prod" else np.sum)(stack.astype(object), 0)
        if op != "mean":
            return wrapped(exact, dtype)
        if of_lax:  # a sum that wraps, and a division
            return quotient(wrapped(exact, dtype), dtype, n)
        wide = np.dtype(f"{'' if jnp.iinfo(dtype).min else 'u'}int{max(jnp.iinfo(dtype).bits, 32)}")
        return (wrapped(exact, wide) // n).astype(dtype)
    wide = (
        np.dtype(np.float32)
        if jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32
        else dtype
    )
    with np.errstate(all="ignore"):
        if op in ("max", "min") and np.iscomplexobj(stack):  # by real part, then by imaginary part
            order = np.argsort(stack, 0, kind="stable")
            return np.take_along_axis(stack, order[-1:] if op == "max" else order[:1], 0)[0]
        y = {"max": np.max, "min": np.min, "prod": np.prod}.get(op, np.sum)(stack.astype(wide), 0)
        return (y / wide.type(n) if op == "mean" else y).astype(dtype)


def wrapped(exact, dtype):
    low, bits = jnp.iinfo(dtype).min, jnp.iinfo(dtype).bits
    return np.array((exact - int(low)) % 2**bits + int(low), object).astype(dtype)


def quotient(sums, dtype, n):
    """Return the dtype's mean of n numbers from their sums, with JAX's division of integers."""
    inexact = jax.eval_shape(lambda x: x / n, jax.ShapeDtypeStruct((), dtype)).dtype
    return (sums.astype(inexact) / inexact.type(n)).astype(inexact)


def moved(stack, pairs):
    y = np.zeros_like(stack)
    for p, q in pairs:
        y[q] = stack[p]
    return y


def onto(stack, y, root):
    out = stack.copy()
    out[root] = y
    return out


# the collectives


def size(axis):
    return lax.axis_size(axis)


def ring(n):
    return [(r, (r + 1) % n) for r in range(n)]


def last(axis):
    """The last rank of a group, where the axis need not be bound."""
    backend = jaxmpi._world.session.current("test")
    return backend.axes[axis] - 1


for op in ("mean", "sum", "max", "min", "prod"):
    USES[f"tree_allreduce {op}"] = Use(
        lambda x, axis, op=op: jaxmpi.tree_allreduce(x, op, axis=axis),
        lambda s, op=op: everyone(reduced(s, op), len(s)),
        op,
    )
    USES[f"tree_reduce {op}"] = Use(
        lambda x, axis, op=op: jaxmpi.tree_reduce(x, op, root=last(axis), axis=axis),
        lambda s, op=op: onto(s, reduced(s, op), len(s) - 1),
        op,
    )
    USES[f"tree_reduce_scatter {op}"] = Use(
        lambda x, axis, op=op: jaxmpi.tree_reduce_scatter(x, op, axis=axis),
        lambda s, op=op: reduced(s, op),
        op,
        rows=True,
    )
USES["tree_bcast"] = Use(
    lambda x, axis: jaxmpi.tree_bcast(x, root=last(axis), axis=axis),
    lambda s: everyone(s[-1], len(s)),
)
USES["tree_allgather"] = Use(
    lambda x, axis: jaxmpi.tree_allgather(x, axis=axis), lambda s: everyone(s, len(s))
)
USES["tree_allgather tiled"] = Use(
    lambda x, axis: jaxmpi.tree_allgather(x, axis=axis, tiled=True),
    lambda s: everyone(s.reshape(-1), len(s)),
)
USES["tree_alltoall"] = Use(
    lambda x, axis: jaxmpi.tree_alltoall(x, axis=axis), lambda s: s.swapaxes(0, 1), rows=True
)
inside = partial(Use, outside=False)
for op, fun in {"sum": lax.psum, "mean": lax.pmean, "max": lax.pmax, "min": lax.pmin}.items():
    USES[f"lax.p{op}" if op != "sum" else "lax.psum"] = inside(
        fun, lambda s, op=op: everyone(reduced(s, op, of_lax=True), len(s)), op
    )
USES["lax.all_gather"] = inside(lax.all_gather, lambda s: everyone(s, len(s)))
USES["lax.all_gather tiled"] = inside(
    lambda x, axis: lax.all_gather(x, axis, tiled=True), lambda s: everyone(s.reshape(-1), len(s))
)
USES["lax.psum_scatter"] = inside(lax.psum_scatter, lambda s: reduced(s, "sum"), "sum", rows=True)
USES["lax.psum_scatter tiled"] = inside(
    lambda x, axis: lax.psum_scatter(x, axis, scatter_dimension=0, tiled=True),
    lambda s: reduced(s, "sum")[:, None],
    "sum",
    rows=True,
)
USES["lax.all_to_all"] = inside(
    lambda x, axis: lax.all_to_all(x, axis, 0, 1), lambda s: np.moveaxis(s, 0, 2), rows=True
)
USES["lax.all_to_all tiled"] = inside(
    lambda x, axis: lax.all_to_all(x, axis, 0, 1, tiled=True),
    lambda s: s.swapaxes(0, 1).reshape(len(s), 1, -1),
    rows=True,
)
USES["lax.ppermute"] = inside(
    lambda x, axis: lax.ppermute(x, axis, ring(size(axis))), lambda s: moved(s, ring(len(s)))
)
USES["lax.ppermute to some"] = inside(
    lambda x, axis: lax.ppermute(x, axis, ring(size(axis))[:-1]),
    lambda s: moved(s, ring(len(s))[:-1]),
)
USES["lax.pshuffle"] = inside(
    lambda x, axis: lax.pshuffle(x, axis, [*range(1, size(axis)), 0]), lambda s: np.roll(s, -1, 0)
)
USES["lax.pbroadcast"] = inside(
    lambda x, axis: lax.pbroadcast(x, (axis,), size(axis) - 1), lambda s: everyone(s[-1], len(s))
)
USES["average_gradients"] = Use(
    lambda x, axis: jaxmpi.average_gradients(axis=axis).update(x, optax.EmptyState())[0],
    lambda s: everyone(reduced(s, "mean"), len(s)),
    "mean",
)


# the table


def refusal(dtype, name):
    """Return the error of a cell as (type, texts in it); None where the numbers are right."""
    op, of_lax = USES[name].op, name.startswith("lax.")
    function = {"lax.pshuffle": "ppermute"}.get(name, name.split()[0])
    if dtype == "float0" and of_lax:
        return TypeError, function, "float0", "Take it out of the tree"
    if dtype == "float8_e8m0fnu" and name == "lax.ppermute to some":
        return (
            TypeError,
            function,
            "zero, which float8_e8m0fnu cannot represent",
            "Name a source for every rank",
        )
    if dtype in KEYS and op:
        return TypeError, function, "PRNG key", "which cannot be reduced"
    if dtype == "bool" and op in ("mean", "sum", "prod") and not of_lax:
        return TypeError, function, "is bool", f"has no {op}"
    if dtype == "bool" and function == "lax.psum_scatter":
        return TypeError, "psum_scatter", "booleans", "Convert them to integers"
    if dtype in COMPLEX and op in ("max", "min") and not of_lax:
        return TypeError, function, f"is {dtype}", "has no order"
    return None


def table():
    lines = [f"| | {' | '.join(USES)} |", "|---|" + "---|" * len(USES)]
    for dtype in DTYPES:
        cells = [refusal(dtype, name) for name in USES]
        lines.append(
            f"| {dtype} | {' | '.join('right' if c is None else c[0].__name__ for c in cells)} |"
        )
    return "\n".join(lines)


# the arrays


def bits(dtype, shape, rng):
    """Numbers of any bits, among them infinities and NaN."""
    if dtype == "bool":
        return rng.integers(0, 2, shape).astype(bool)
    dtype = jnp.dtype(dtype)
    if jnp.issubdtype(dtype, jnp.integer):
        info = jnp.iinfo(dtype)
        return rng.integers(
            int(info.min), int(info.max), shape, np.uint64 if info.min == 0 else np.int64, True
        ).astype(dtype)
    if dtype == "float4_e2m1fn":
        return rng.integers(0, 16, shape, np.uint8).view(dtype)
    if shape[-1] == 0:
        return np.zeros(shape, dtype)
    raw = rng.integers(0, 256, (*shape[:-1], shape[-1] * dtype.itemsize), np.uint8)
    return raw.view(dtype)


def numbers(dtype, shape, rng):
    """Make numbers whose sums and products are exact, so that their order does not matter.

    Exact in the dtype in which they are computed.
    """
    dtype = jnp.dtype(dtype)
    if not jnp.issubdtype(dtype, jnp.inexact):
        return bits(dtype, shape, rng)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return (rng.integers(-15, 16, shape) + 1j * rng.integers(-15, 16, shape)).astype(dtype)
    x = (rng.integers(-127, 128, shape) * 2.0 ** rng.integers(-8, 1, shape)).astype(np.float32)
    if dtype == "float8_e8m0fnu":
        x = 2.0 ** rng.integers(-3, 4, shape)
    x = x.astype(dtype)
    if shape[-1] == 7:
        # whose sum is infinite, and whose mean is not: where float32 holds both
        largest = float(jnp.finfo(dtype).max)
        x[..., 1] = largest if largest < 1e30 else 1
        if dtype != "float4_e2m1fn":
            x[0, ..., 0] = np.nan  # of the first rank
    return x


def stacks(dtype, use, n, group, lengths):
    """An array for each length, `[n, k]` or `[n, ranks of a group, k]`."""
    for k in lengths:
        rng = np.random.default_rng([n, k, use.rows])
        shape = (n, group, k) if use.rows else (n, k)
        if dtype == "float0":
            yield np.zeros(shape, jax.dtypes.float0)
        elif dtype in KEYS:
            words = jax.random.key_data(jax.random.key(0, impl=dtype)).shape
            yield jax.random.wrap_key_data(
                rng.integers(0, 2**32, (*shape, *words), np.uint32), impl=dtype
            )
        else:
            yield (numbers if use.op else bits)(dtype, shape, rng)


def raw(x):
    """Return a NumPy array; for keys, their data with one number a key."""
    if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        data = np.asarray(jax.random.key_data(x))
        return np.ascontiguousarray(data).view([("", data.dtype)] * data.shape[-1])[..., 0]
    return np.asarray(x)


def difference(use, got, want):
    """Describe the difference of two results; return nothing where they are equal.

    Data that only moves is compared by bits, but for the payloads of NaNs.
    """
    got = raw(got)
    if (got.dtype, got.shape) != (want.dtype, want.shape):
        return f"is {got.dtype}{list(got.shape)}, not {want.dtype}{list(want.shape)}"
    if got.tobytes() == want.tobytes():
        return ""
    text = f"is {got.tolist()}, not {want.tolist()}"
    if not jnp.issubdtype(got.dtype, jnp.inexact):
        return text
    if not use.op:
        real = got.dtype.type(0).real.dtype
        x, y = (np.atleast_1d(z).view(real) for z in (got, want))
        differ = (bits_of(x) != bits_of(y)) & ~(np.isnan(x) & np.isnan(y))
        return text if differ.any() else ""
    if jnp.finfo(got.dtype).bits < 32:
        same = np.array_equal(got.astype(np.float32), want.astype(np.float32), equal_nan=True)
    else:  # XLA divides by a number as it multiplies by its reciprocal
        rtol = 4 * jnp.finfo(got.dtype).eps if use.op == "mean" else 0
        same = np.allclose(got, want, rtol=rtol, atol=0, equal_nan=True)
    return "" if same else text


def bits_of(x):
    return x.view(f"u{x.dtype.itemsize}")


# the cells on one backend


class Ranks:
    """The ranks that this process is one of, or simulates, along an axis of theirs."""

    def __init__(self, axis):
        backend = jaxmpi._world.session.current("test")
        self.axis, self.size, self.group = axis, backend.place.size, backend.axes[axis]
        self.here = backend.ranks_here
        self.simulates = backend.eager(alone=False, stacked=True, parallel=False)
        self.members = groups_along(backend.axes, (axis,))

    def mine(self, stack):
        return jaxmpi.PerRank(stack) if self.simulates else stack[self.here[0]]

    def stacks(self, dtype, use, how="jit"):
        return [*stacks(dtype, use, self.size, self.group, LENGTHS[how])]

    def differences(self, use, got, stack):
        """Yield the differences between the results of the ranks here and the expected ones."""
        x, want = raw(stack), {}
        for group in self.members:
            want.update(zip(group, use.want(x[list(group)]), strict=True))
        for rank in self.here:
            y = got.stack[rank] if isinstance(got, jaxmpi.PerRank) else got
            if text := difference(use, y, want[rank]):
                yield f"on rank {rank} {text}"


def wide(dtype):
    return jax.enable_x64(True) if "64" in dtype or "128" in dtype else nullcontext()


def check_dtype(dtype, axis=jaxmpi.AXIS):
    """Check all cells of a dtype in jaxmpi.jit.

    The right cells are one program; each refused cell has its own.
    """
    ranks = Ranks(axis)
    held = {}
    for name, use in USES.items():
        if not refusal(dtype, name):
            held[name] = ranks.stacks(dtype, use)

    def program(args):
        return {name: [USES[name].fun(x, axis) for x in xs] for name, xs in args.items()}

    with wide(dtype), quiet():
        got = jaxmpi.jit(program, compiler_options=QUICKLY)(jax.tree.map(ranks.mine, held))
        wrong = []
        for name, xs in held.items():
            for x, y in zip(xs, got[name], strict=True):
                wrong += [f"{dtype} {name}: {text}" for text in ranks.differences(USES[name], y, x)]
        for name, use in USES.items():
            if error := refusal(dtype, name):
                x = ranks.mine(ranks.stacks(dtype, use)[-1])
                wrong += not_refused(
                    dtype, name, error, jaxmpi.jit(lambda x, use=use: use.fun(x, axis)), x
                )
                if use.outside:
                    wrong += not_refused(dtype, name, error, lambda x, use=use: use.fun(x, axis), x)
    assert not wrong, "\n".join(wrong)


def check_eager(name, narrow, axis=jaxmpi.AXIS):
    """Check all cells of a collective outside of jaxmpi.jit, in one call.

    The call has arrays of each dtype that the collective does not refuse.
    """
    ranks, use, wrong = Ranks(axis), USES[name], []
    stacks = {}
    for dtype in DTYPES:
        if isinstance(wide(dtype), nullcontext) == narrow and not refusal(dtype, name):
            stacks[dtype] = ranks.stacks(dtype, use, "eager")
    with nullcontext() if narrow else jax.enable_x64(True), quiet():
        # JAX's arrays: sums of NumPy's integers do not wrap outside of jaxmpi.jit, which has tests
        # of its own
        args = {}
        for dtype, xs in stacks.items():
            args[dtype] = [ranks.mine(x if dtype == "float0" else jnp.asarray(x)) for x in xs]
        got = use.fun(args, axis)
        for dtype, xs in stacks.items():
            for x, y in zip(xs, got[dtype], strict=True):
                wrong += [
                    f"{dtype} {name} eagerly: {text}" for text in ranks.differences(use, y, x)
                ]
    assert not wrong, "\n".join(wrong)


def not_refused(dtype, name, error, function, x):
    """List what is wrong if a call does not raise this error, in words."""
    kind, *texts = error
    try:
        function(x)
    except Exception as found:
        if type(found) is kind and all(text.removeprefix("lax.") in str(found) for text in texts):
            return []
        return [f"{dtype} {name}: {found!r}"]
    return [f"{dtype} {name}: not refused"]


def quiet():
    return warnings.catch_warnings(action="ignore", category=UserWarning)


# on every backend

ROWS = {
    **{f"{n} simulated": ("simulate", n, None) for n in (1, 2, 3)},
    "6 simulated in groups of 3": ("simulate", 6, {"pair": 2, "triple": 3}),
    "one rank": ("single", 1, None),
    "native on 2": ("native", 2, None),
    "native on 3": ("native", 3, None),
    "mpi4jax on 2": ("mpi4jax", 2, None),
    "mpi4jax on 3": ("mpi4jax", 3, None),
    "xla on 2": ("xla", 2, None),
    "xla on 3": ("xla", 3, None),
    "native on 4 in groups of 2": ("native", 4, {"row": 2, "column": 2}),
    "xla on 4 in groups of 2": ("xla", 4, {"row": 2, "column": 2}),
}
# dtypes of the quick tests
ACROSS = ("bool", "int2", "uint4", "float4_e2m1fn", "float8_e8m0fnu", "uint64", "rbg", "float0")
QUICK_ROWS = ("2 simulated", "one rank", "native on 3")
# rows that repeat earlier ones with more ranks, or on another transport
EXHAUSTIVE_ROWS = (
    "1 simulated",
    "3 simulated",
    "6 simulated in groups of 3",
    "mpi4jax on 2",
    "mpi4jax on 3",
    "native on 4 in groups of 2",
    "xla on 3",
    "xla on 4 in groups of 2",
)


@pytest.fixture(scope="module")
def mpi4jax_ranks():
    """Jobs of the other transport, by their numbers of ranks."""
    jobs = {}
    yield jobs
    for job in jobs.values():
        job.end()


def run_on(row, check, jobs, **kwargs):
    transport, n, axes = ROWS[row]
    if axes:
        kwargs["axis"] = [*axes][-1]
    if transport in ("single", "simulate"):
        jaxmpi.init()
        with jaxmpi.simulate(n, axes=axes) if transport == "simulate" else nullcontext():
            check(**kwargs)
        return
    if transport == "mpi4jax" and n not in jobs:
        jobs[n] = mpi4jax_pool(n)
    job = (
        jobs[n]
        if transport == "mpi4jax"
        else pool(n, "xla" if transport == "xla" else "auto", IDLE_RANKS_SECONDS, axes)
    )
    job.run(Task(__file__, check.__name__, kwargs, 300.0))


def parts():
    """Pair each row of ranks with each dtype in jaxmpi.jit and each eager collective."""
    keys = [(dtype, "") for dtype in DTYPES]
    keys += [("", name) for name, use in USES.items() if use.outside]
    for row in ROWS:
        for dtype, name in keys:
            marks = () if row in QUICK_ROWS and dtype in ACROSS else (pytest.mark.slow,)
            if row in EXHAUSTIVE_ROWS:
                marks = (pytest.mark.exhaustive,)
            where = f"{dtype} in jit" if dtype else f"{name} eagerly"
            yield pytest.param(row, dtype, name, marks=marks, id=f"{row} {where}".replace(" ", "_"))


@pytest.mark.parametrize("row, dtype, name", [*parts()])
def test_every_dtype_through_every_collective(row, dtype, name, mpi4jax_ranks):
    if dtype:
        run_on(row, check_dtype, mpi4jax_ranks, dtype=dtype)
    else:
        for narrow in (True, False):
            run_on(row, check_eager, mpi4jax_ranks, name=name, narrow=narrow)


def test_the_table_has_every_dtype_and_collective():
    types = {name for name in dir(jnp) if isinstance(getattr(jnp, name), type(jnp.float32))}
    names = {jnp.dtype(getattr(jnp, name)).name for name in types if name not in NOT_OF_JAX}
    assert names <= {*DTYPES}, "a dtype of JAX is not in the table"
    functions = {
        f"tree_{name}"
        for name in ("allreduce", "reduce", "bcast", "allgather", "reduce_scatter", "alltoall")
    }
    assert functions == {name for name in jaxmpi.__all__ if name.startswith("tree_")}
    assert functions < {name.split()[0] for name in USES}


@pytest.mark.parametrize("dtype", [*NOT_OF_JAX, "complex32", "longdouble", "object", "U1", "M8[s]"])
def test_what_jax_cannot_hold_is_refused_with_the_leaf(dtype):
    jaxmpi.init()
    kind = getattr(ml_dtypes, dtype, None) or np.dtype(dtype)
    with pytest.raises(TypeError, match=r"^tree_bcast: leaf \['w'\]"):
        jaxmpi.tree_bcast({"w": np.empty(3, kind)})


def array(dtype, rank, n):
    """Three numbers of any bits that no two ranks share."""
    return next(stacks(dtype, USES["tree_bcast"], n, n, (3,)))[rank]


def all_equal(got, want):
    return [text for d in want if (text := difference(USES["tree_bcast"], got[d], raw(want[d])))]


@run_ranks(2)
def test_every_dtype_in_objects_and_checkpoints():
    rank, n = jaxmpi.rank(), jaxmpi.size()
    trees = [{dtype: array(dtype, r, n) for dtype in DTYPES} for r in range(n)]
    with jax.enable_x64(True):
        mine = trees[rank]
        for made in (
            mine,
            {dtype: x if dtype == "float0" else jnp.asarray(x) for dtype, x in mine.items()},
        ):
            same = jaxmpi.synchronize(made, root=n - 1)
            assert not all_equal(same, trees[n - 1])
            assert all(type(same[dtype]) is type(made[dtype]) for dtype in DTYPES)
            assert not all_equal(jaxmpi.broadcast_object(made, root=n - 1), trees[n - 1])
            for r, tree in enumerate(jaxmpi.allgather_object(made)):
                assert not all_equal(tree, trees[r])
            saved = {"same": {**same}, "own": jaxmpi.PerRankState({**made})}
            folder = jaxmpi.broadcast_object(tempfile.mkdtemp() if rank == 0 else None)
            with pytest.raises(TypeError, match=r"\['float0'\] has dtype .*float0.* Take it out"):
                jaxmpi.save(folder, 1, saved, background=False)
            del saved["same"]["float0"], saved["own"].per_rank["float0"]
            jaxmpi.save(folder, 1, saved, background=False)
            back = jaxmpi.restore(folder, like=saved)
            held = [dtype for dtype in DTYPES if dtype != "float0"]
            assert not all_equal(back["same"], {dtype: trees[n - 1][dtype] for dtype in held})
            assert not all_equal(back["own"].per_rank, {dtype: mine[dtype] for dtype in held})


@run_ranks(2)
def test_every_dtype_in_comparisons_of_the_ranks():
    rank, n = jaxmpi.rank(), jaxmpi.size()
    tx = jaxmpi.watch_replicas(optax.identity(), every=1)
    watch = lambda state, params: tx.update(jnp.zeros(1), state, params)[1]
    step = jaxmpi.jit(watch, replicated_argnums=1)
    checked = jaxmpi.jit(watch, replicated_argnums=1)
    with jax.enable_x64(True):
        same = {dtype: array(dtype, 0, n) for dtype in DTYPES}
        assert step(tx.init(same), same).found == -1
        with mock.patch.dict(os.environ, JAXMPI_CHECK="1"):  # which a step reads at its first call
            assert checked(tx.init(same), same).found == -1
        for number, dtype in enumerate(sorted(DTYPES)):
            if dtype != "float0":
                params = {**same, dtype: array(dtype, rank, n)}
                state = step(tx.init(same), params)
                assert (int(state.found), int(state.leaf)) == (0, number), dtype
                with pytest.raises(
                    jaxmpi.RankMismatchError, match=rf"\['{dtype}'\]: .* is not equal"
                ):
                    checked(tx.init(same), params)


if __name__ == "__main__":
    print(table())
