"""The tree collectives against NumPy, on 1 to 4 ranks."""

import dataclasses
import functools
import itertools
from functools import reduce
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.core import FrozenDict
from jax import lax

import jaxmpi
from jaxmpi.testing import run_ranks

RANKS = (1, 2, 3, 4)
INTEGERS = [
    "int4",
    "uint4",
    "int8",
    "uint8",
    "int16",
    "uint16",
    "int32",
    "uint32",
    "int64",
    "uint64",
]
FLOATS = ["float8_e4m3fn", "float8_e5m2", "bfloat16", "float16", "float32", "float64"]
COMPLEX = ["complex64", "complex128"]
COMBINE = {"mean": np.add, "sum": np.add, "max": np.maximum, "min": np.minimum, "prod": np.multiply}


def stack(dtype, shape, size):
    """Make the inputs of all ranks, `[size, *shape]`: small numbers that differ everywhere."""
    count = int(np.prod(shape))
    numbers = (np.arange(size)[:, None] * 2 + np.arange(count)[None] * 3) % 5 + 1
    if dtype in COMPLEX:
        numbers = numbers + 1j * np.flip(numbers)
    numbers = numbers.reshape(size, *shape)
    return numbers.astype(jnp.dtype(dtype)) if dtype != "bool" else numbers % 2 == 0


def expected(inputs, op):
    """Reduce over the first axis: exactly, then rounded once into the dtype."""
    dtype = inputs.dtype
    if dtype.kind in "iub" and dtype.itemsize > 1:
        wide = dtype
    elif dtype.kind == "c":
        wide = np.complex128
    elif jnp.issubdtype(dtype, jnp.integer):
        wide = np.int64
    else:
        wide = np.bool_ if dtype == np.bool_ else np.float64
    exact = inputs.astype(wide)
    out = reduce(COMBINE[op], exact)
    if op == "mean":
        out = out // len(inputs) if jnp.issubdtype(dtype, jnp.integer) else out / len(inputs)
    if jnp.issubdtype(dtype, jnp.integer):
        bits = jnp.iinfo(dtype).bits
        # wrap as the dtype does
        out = np.asarray(out).astype(np.int64) & ((1 << bits) - 1) if bits < 64 else out
        if bits < 64 and jnp.iinfo(dtype).min < 0:
            out = np.where(out >= 1 << (bits - 1), out - (1 << bits), out)
    return np.asarray(out).astype(dtype)


def check(got, want):
    got = np.asarray(got)
    assert (got.dtype, got.shape) == (want.dtype, want.shape)
    np.testing.assert_allclose(got.astype(np.complex128), want.astype(np.complex128), rtol=1e-6)


@run_ranks(*RANKS)
@pytest.mark.parametrize("op", list(COMBINE))
@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_allreduce_every_dtype(op, jit):
    r, n = jaxmpi.rank(), jaxmpi.size()
    dtypes = INTEGERS + FLOATS
    dtypes = [*dtypes, "bool"] if op in ("max", "min") else dtypes + COMPLEX
    with jax.enable_x64(True):
        inputs = {}
        for dtype, shape in itertools.product(dtypes, [(), (3,), (2, 0), (2, 3)]):
            inputs[f"{dtype}{shape}"] = stack(dtype, shape, n)
        mine = {name: jnp.asarray(x[r]) for name, x in inputs.items()}
        allreduce = lambda tree: jaxmpi.tree_allreduce(tree, op)
        got = (jax.jit(allreduce) if jit else allreduce)(mine)
        for name, x in inputs.items():
            check(got[name], expected(x, op)) if n > 1 else check(got[name], x[0])


@run_ranks(*RANKS)
@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_moves_every_dtype(jit):
    r, n = jaxmpi.rank(), jaxmpi.size()
    maybe_jit = jax.jit if jit else lambda f: f
    root = n - 1
    with jax.enable_x64(True):
        for shape in [(), (3,), (2, 0), (2, 3)]:
            inputs = {
                dtype: stack(dtype, shape, n) for dtype in [*INTEGERS, *FLOATS, *COMPLEX, "bool"]
            }
            mine = {dtype: jnp.asarray(x[r]) for dtype, x in inputs.items()}
            bcast = maybe_jit(lambda t: jaxmpi.tree_bcast(t, root))(mine)
            gathered = maybe_jit(jaxmpi.tree_allgather)(mine)
            rows = {
                dtype: jnp.asarray(np.stack([x[(r + q) % n] for q in range(n)]))
                for dtype, x in inputs.items()
            }
            swapped = maybe_jit(jaxmpi.tree_alltoall)(rows)
            for dtype, x in inputs.items():
                check(bcast[dtype], x[root])
                check(gathered[dtype], x)
                check(swapped[dtype], np.stack([x[(q + r) % n] for q in range(n)]))


def check_tiled_allgather():
    """Eagerly and in a step, with the gradient: as `lax.all_gather(tiled=True)`."""
    r = jaxmpi.rank()
    key = jax.random.split(jax.random.key(r), 2)
    tree = {
        "w": jnp.arange(6.0).reshape(2, 3) + r,
        "none": jnp.zeros((0, 3)),
        "flags": jnp.array([r > 0]),
        "key": key,
    }
    of_lax = jaxmpi.jit(lambda tree: lax.all_gather(tree, jaxmpi.AXIS, tiled=True))(tree)
    tiled = lambda tree: jaxmpi.tree_allgather(tree, tiled=True)
    for got in (tiled(tree), jaxmpi.jit(tiled)(tree)):
        for name, want in of_lax.items():
            assert (
                got[name].shape == want.shape == (jaxmpi.size() * len(tree[name]), *want.shape[1:])
            )
            numbers = jax.random.key_data if name == "key" else np.asarray
            np.testing.assert_array_equal(numbers(got[name]), numbers(want))

    def loss(gather, w):
        y = gather(w)
        return jnp.sum(jnp.sin(y) * jnp.cos(jnp.arange(y.size).reshape(y.shape) + jaxmpi.rank()))

    gathers = (tiled, lambda w: lax.all_gather(w, jaxmpi.AXIS, tiled=True))
    got, want = (
        jaxmpi.jit(jax.grad(functools.partial(loss, gather)))(tree["w"]) for gather in gathers
    )
    np.testing.assert_allclose(got, want, rtol=1e-6)
    for leaf in (np.float32(1), jax.random.key(0)):
        for call in (tiled, jaxmpi.jit(tiled)):
            with pytest.raises(
                ValueError, match=r"tree_allgather: leaf \['x'\] has no axis.*Leave out tiled"
            ):
                call({"x": leaf})


@run_ranks(*RANKS)
def test_tiled_allgather_is_that_of_lax():
    check_tiled_allgather()


@run_ranks(2, backend="xla")
def test_tiled_allgather_is_that_of_lax_on_xla():
    check_tiled_allgather()


def test_tiled_allgather_of_simulated_ranks():
    rows = np.arange(12.0, dtype=np.float32).reshape(3, 2, 2)
    for run in (lambda f: f, jaxmpi.jit):
        with jaxmpi.simulate(3):
            got = run(lambda x: jaxmpi.tree_allgather({"x": x}, tiled=True))(jaxmpi.PerRank(rows))
        np.testing.assert_array_equal(got["x"], rows.reshape(6, 2))
    with (
        jaxmpi.simulate(3),
        pytest.raises(ValueError, match=r"tree_allgather: leaf \['x'\] has no axis"),
    ):
        jaxmpi.tree_allgather({"x": jaxmpi.PerRank(np.arange(3.0))}, tiled=True)


@run_ranks(2)
def test_ranks_that_differ_in_tiled_are_told():
    with pytest.raises(jaxmpi.RankMismatchError, match="tiled=True"):
        jaxmpi.tree_allgather(np.ones(2), tiled=jaxmpi.rank() == 1)
    np.testing.assert_array_equal(jaxmpi.tree_allgather(jaxmpi.rank()), [0, 1])


@run_ranks(*RANKS)
@pytest.mark.parametrize("op", list(COMBINE))
def test_reduce_scatter_then_allgather_is_allreduce(op):
    r, n = jaxmpi.rank(), jaxmpi.size()
    tree = {
        d: jnp.asarray(stack(d, (n, 2), n)[r])
        for d in ["int32", "uint8", "bfloat16", "float16", "float32", "complex64"]
    }
    if op in ("max", "min"):
        del tree["complex64"]
    scattered = jaxmpi.tree_reduce_scatter(tree, op)
    for name, x in jaxmpi.tree_allgather(scattered).items():
        check(x, np.asarray(jaxmpi.tree_allreduce(tree, op)[name]))
        check(
            scattered[name],
            expected(stack(name, (n, 2), n), op)[r] if n > 1 else stack(name, (n, 2), n)[0][0],
        )


@run_ranks(*RANKS)
def test_alltoall_marks_source_and_target():
    r, n = jaxmpi.rank(), jaxmpi.size()
    out = jaxmpi.tree_alltoall(jnp.arange(n) + 100 * r)  # row q for rank q
    np.testing.assert_array_equal(out, 100 * np.arange(n) + r)


@run_ranks(*RANKS)
def test_reduce_gives_the_others_their_own():
    r, n = jaxmpi.rank(), jaxmpi.size()
    for root in range(n):
        out = jaxmpi.tree_reduce({"x": jnp.array([r + 1.0, 5.0 * r])}, "sum", root=root)["x"]
        total = np.array([n * (n + 1) / 2, 5.0 * n * (n - 1) / 2])
        np.testing.assert_array_equal(out, total if r == root else [r + 1.0, 5.0 * r])


class Pair(NamedTuple):
    left: object
    right: object


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Record:
    weight: object
    name: str = dataclasses.field(default="r", metadata={"static": True})


@run_ranks(*RANKS)
def test_allreduce_keeps_every_kind_of_tree():
    r = jaxmpi.rank()
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(r))
    trees = {
        "dict": {"b": jnp.full(2, r), "a": [1.0 * r, (np.arange(3) * r, None)]},
        "namedtuple": Pair(jnp.array(r), {"x": np.float32(r)}),
        "dataclass": Record(jnp.array([1.0 * r])),
        "frozen": FrozenDict({"w": jnp.array([1.0 * r])}),
        "nnx": nnx.state(model),
        "optax": optax.adam(0.1).init({"w": jnp.array([1.0])}),
        "none": None,
        "empty": {},
        "scalar": 2.0 * r,
    }
    for name, tree in trees.items():
        out = jaxmpi.tree_allreduce(tree, "sum")
        assert jax.tree.structure(out) == jax.tree.structure(tree), name
        everyone = jaxmpi.allgather_object(jax.tree.map(np.asarray, jax.tree.leaves(tree)))
        for got, *parts in zip(jax.tree.leaves(out), *everyone, strict=True):
            np.testing.assert_allclose(got, sum(parts), rtol=1e-6)


@run_ranks(*RANKS)
def test_prng_keys_move_and_do_not_reduce():
    r, n = jaxmpi.rank(), jaxmpi.size()
    key = jax.random.split(jax.random.key(r + 5), 2)
    root = n - 1
    keys_of = lambda rank: jax.random.split(jax.random.key(rank + 5), 2)
    assert (jaxmpi.tree_bcast({"k": key}, root)["k"] == keys_of(root)).all()
    gathered = jax.jit(jaxmpi.tree_allgather)(key)
    assert gathered.shape == (n, 2) and (gathered[0] == keys_of(0)).all()
    with pytest.raises(TypeError, match=r"tree_allreduce: leaf \['k'\] is a PRNG key"):
        jaxmpi.tree_allreduce({"k": key})


@run_ranks(*RANKS)
def test_allreduce_in_scan_cond_while_and_vmap():
    r, n = jaxmpi.rank(), jaxmpi.size()
    mean = lambda x: jaxmpi.tree_allreduce(x)
    ranks = np.arange(n)

    def body(c, x):
        c = mean(c + x * (r + 1))
        return c, mean(x * r)

    carry, ys = jax.jit(lambda xs: jax.lax.scan(body, 0.0, xs))(jnp.arange(4.0))
    np.testing.assert_allclose(carry, 6.0 * (ranks + 1).mean(), rtol=1e-6)
    np.testing.assert_allclose(ys, np.arange(4) * ranks.mean(), rtol=1e-6)

    both = jax.jit(lambda p, x: jax.lax.cond(p, mean, lambda x: mean(2 * x), x))
    np.testing.assert_allclose(both(True, 1.0 * r), ranks.mean(), rtol=1e-6)
    np.testing.assert_allclose(both(False, 1.0 * r), 2 * ranks.mean(), rtol=1e-6)

    power = jax.jit(
        lambda x: jax.lax.while_loop(
            lambda s: s[1] < 3, lambda s: (mean(s[0]) + r, s[1] + 1), (x, 0)
        )[0]
    )
    np.testing.assert_allclose(power(1.0 * r), 3 * ranks.mean() + r, rtol=1e-6)

    batch = jnp.arange(6.0).reshape(3, 2) * (r + 1)
    for axis in (0, 1):
        np.testing.assert_allclose(
            jax.vmap(mean, axis, axis)(batch),
            np.arange(6).reshape(3, 2) * (ranks + 1).mean(),
            rtol=1e-6,
        )
    stacked = jax.vmap(jaxmpi.tree_allgather, 0, 1)(batch)
    np.testing.assert_allclose(stacked, np.arange(6).reshape(3, 2) * (ranks + 1)[:, None, None])
    rows = jnp.arange(3.0 * n * 2).reshape(3, n, 2) * (r + 1)
    np.testing.assert_allclose(
        jax.vmap(lambda x: jaxmpi.tree_reduce_scatter(x, "sum"))(rows),
        (np.arange(3.0 * n * 2).reshape(3, n, 2) * (ranks + 1).sum())[:, r],
    )


@run_ranks(2, 3)
def test_vmap_sends_one_message():
    batched = jax.make_jaxpr(jax.vmap(lambda x: jaxmpi.tree_allreduce(x, "sum")))(jnp.ones((50, 3)))
    assert str(batched).count("jaxmpi_collective") == 1


@run_ranks(2, 3)
def test_rank_and_size_are_constants_of_a_loss():
    loss = lambda x: (jaxmpi.rank() + 1) * jnp.sum(x**2) / jaxmpi.size()
    np.testing.assert_allclose(
        jax.jit(jax.grad(loss))(3.0), 6.0 * (jaxmpi.rank() + 1) / jaxmpi.size(), rtol=1e-6
    )


@run_ranks(1, 2, 3)
def test_donated_arguments_are_reduced_and_gone():
    r, n = jaxmpi.rank(), jaxmpi.size()
    x = jnp.arange(1000.0) + r
    out = jax.jit(lambda x: jaxmpi.tree_allreduce(x) + 1, donate_argnums=0)(x)
    assert x.is_deleted()
    np.testing.assert_allclose(out, np.arange(1000.0) + (n - 1) / 2 + 1, rtol=1e-6)


@run_ranks(2, 3)
def test_eager_calls_compile_once_per_signature():
    compiled = []

    def listen(event, *_, **__):
        if event.endswith("backend_compile_duration"):
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    tree = {"a": jnp.arange(3.0), "b": jnp.float32(jaxmpi.rank())}
    for op in ("mean", "max"):
        jax.block_until_ready(jaxmpi.tree_allreduce(tree, op))
    first = len(compiled)
    assert first > 0
    for _ in range(3):
        for op in ("mean", "max"):
            jax.block_until_ready(jaxmpi.tree_allreduce(tree, op))
    assert len(compiled) == first


@run_ranks(2, 3)
def test_collectives_without_data_between_them_keep_their_order():
    r, n = jaxmpi.rank(), jaxmpi.size()

    def step(x):  # 20 independent collectives, the ranks busy for different times before each
        work = [jnp.sum(jnp.sin(jnp.outer(x + i, x))) * 0 for i in range((r + 1) * 3)]
        return [
            jaxmpi.tree_allreduce(x[i] * (r + 1) + (work[i % len(work)]), "sum" if i % 2 else "max")
            for i in range(20)
        ]

    f = jax.jit(step)
    for repeat in range(20):
        out = f(jnp.arange(20.0) + repeat)
        want = [(i + repeat) * (n * (n + 1) / 2 if i % 2 else n) for i in range(20)]
        np.testing.assert_allclose(out, want, rtol=1e-6)


@pytest.mark.slow
@run_ranks(2)
def test_programs_run_in_the_order_of_their_dispatch():
    r = jaxmpi.rank()
    slow = jax.jit(
        lambda x: jaxmpi.tree_allreduce(jnp.sum(jnp.sin(jnp.outer(x, x))) * 0 + x[0] + r, "sum")
    )
    fast = jax.jit(lambda y: jaxmpi.tree_allreduce(y * 10 + r, "max"))
    x = jnp.arange(400.0) + 1
    for i in range(30):
        a, b = slow(x + i), fast(jnp.float32(i))
        np.testing.assert_allclose([a, b], [2 * (1 + i) + 1, 10 * i + 1])


@run_ranks(1, 2, 3)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float8_e4m3fn", "float32", "float64"])
def test_max_and_min_let_no_nan_pass_unseen(dtype):
    r, n = jaxmpi.rank(), jaxmpi.size()
    with jax.enable_x64(True):
        for op, sign in [("max", 1), ("min", -1)]:
            for bad in range(n):
                nan = jnp.array(
                    [
                        jnp.nan if r == bad else 1.0,
                        -0.0 if r == bad else 0.0,
                        sign * (r - 1.5),
                        -1.0 * r,
                    ],
                    dtype,
                )
                got = np.asarray(jaxmpi.tree_allreduce(nan, op)).astype(float)
                assert np.isnan(got[0])
                np.testing.assert_array_equal(
                    got[1:], [0.0, sign * (n - 2.5), 0.0 if op == "max" else 1.0 - n]
                )
                rows = jaxmpi.tree_reduce_scatter(jnp.stack([nan] * n), op)
                assert np.isnan(np.asarray(rows).astype(float)[0])
        if dtype in ("float32", "float64"):
            edge = jnp.array([jnp.inf, -jnp.inf, 5e-324, -3.4e38], dtype) * (r + 1)
            np.testing.assert_array_equal(
                jaxmpi.tree_allreduce(edge, "max"),
                [
                    np.inf,
                    -np.inf,
                    n * edge[2] / (r + 1),
                    -3.4e38 if dtype == "float64" else np.float32(-3.4e38),
                ],
            )


@run_ranks(1, 3)
def test_weak_types_stay_weak():
    functions = {
        "mean": lambda x: jaxmpi.tree_allreduce(x),
        "max": lambda x: jaxmpi.tree_allreduce(x, "max"),
        "bcast": jaxmpi.tree_bcast,
        "reduce": lambda x: jaxmpi.tree_reduce(x),
    }
    for function in functions.values():
        assert (function(0.5) * jnp.ones(2, jnp.bfloat16)).dtype == jnp.bfloat16
        assert (jax.jit(function)(0.5) * jnp.ones(2, jnp.bfloat16)).dtype == jnp.bfloat16
        assert (function(jnp.float32(0.5)) * jnp.ones(2, jnp.bfloat16)).dtype == jnp.float32


@run_ranks(1, 2)
def test_collectives_of_jax_have_the_weak_types_of_jax():
    for collective in (jax.lax.psum, jax.lax.pmean, jax.lax.pmax):
        step = jaxmpi.jit(lambda x, collective=collective: collective(x, jaxmpi.AXIS))
        assert (step(0.5) * jnp.ones(2, jnp.bfloat16)).dtype == jnp.float32


@run_ranks(2)
def test_numbers_in_the_other_byte_order():
    np.testing.assert_array_equal(
        jaxmpi.tree_allreduce(np.arange(3, dtype=">f4") * (jaxmpi.rank() + 1), "sum"), [0, 3, 6]
    )


# bad input


@run_ranks(1, 2)
def test_bad_input_raises_before_anything_is_sent():
    n = jaxmpi.size()
    one = {"w": jnp.ones(2)}
    bools = {"mask": jnp.array([True])}
    cases = [
        (
            lambda: jaxmpi.tree_allreduce(one, "avg"),
            ValueError,
            "tree_allreduce: op 'avg' is unknown",
        ),
        (lambda: jaxmpi.tree_reduce(one, "avg"), ValueError, "tree_reduce: op 'avg' is unknown"),
        (lambda: jaxmpi.tree_allreduce(one, None), ValueError, "op None is unknown"),
        (
            lambda: jaxmpi.tree_allreduce({"n": 2**40}),
            OverflowError,
            r"tree_allreduce: leaf \['n'\] is 1099511627776, which int32 cannot hold",
        ),
        (
            lambda: jaxmpi.tree_bcast(one, n),
            ValueError,
            f"tree_bcast: root is {n}, and the ranks are 0 to {n - 1}. Pass one of these.",
        ),
        (lambda: jaxmpi.tree_bcast(one, -1), ValueError, "root is -1"),
        (lambda: jaxmpi.tree_bcast(one, 0.0), TypeError, "root is a float"),
        (lambda: jaxmpi.tree_bcast(one, [0]), TypeError, "root is a list"),
        (
            lambda: jax.jit(lambda r: jaxmpi.tree_bcast(one, r))(0),
            TypeError,
            "must be a Python int",
        ),
        (
            lambda: jaxmpi.tree_allreduce(bools, "sum"),
            TypeError,
            r"leaf \['mask'\] is bool, which has no sum",
        ),
        (
            lambda: jaxmpi.tree_allreduce(bools),
            TypeError,
            r"leaf \['mask'\] is bool, which has no mean",
        ),
        (lambda: jax.jit(jaxmpi.tree_allreduce)(bools), TypeError, r"leaf \['mask'\] is bool"),
        (lambda: jaxmpi.tree_allreduce({"c": 1j}, "max"), TypeError, "which has no order"),
        (lambda: jaxmpi.tree_allreduce({"a": "text"}), TypeError, r"leaf \['a'\] is a str"),
        (lambda: jaxmpi.tree_allreduce({"a": object()}), TypeError, r"leaf \['a'\] is a object"),
        (
            lambda: jaxmpi.tree_allreduce({"a": np.array([None])}),
            TypeError,
            r"leaf \['a'\] has dtype object",
        ),
        (
            lambda: jaxmpi.tree_allreduce({"a": np.array(["x"])}),
            TypeError,
            r"leaf \['a'\] has dtype <U1",
        ),
        (
            lambda: jaxmpi.tree_alltoall({"a": jnp.ones((n + 1, 2))}),
            ValueError,
            rf"leaf \['a'\] has shape \[{n + 1}, 2\]",
        ),
        (lambda: jaxmpi.tree_reduce_scatter(jnp.ones(())), ValueError, "the argument has shape"),
        (lambda: jaxmpi.broadcast_object(1, n), ValueError, "broadcast_object: root"),
        (
            lambda: jax.jit(lambda x: jaxmpi.synchronize(x))(1.0),
            RuntimeError,
            "inside a traced function",
        ),
        (
            lambda: jax.jit(lambda x: jaxmpi.broadcast_object(x))(1.0),
            RuntimeError,
            "inside a traced function",
        ),
        (lambda: jaxmpi.distributed(optax.sgd(1.0), op="avg"), ValueError, "distributed: op 'avg'"),
        (lambda: jaxmpi.distributed(lambda g: g), TypeError, "inner is a function"),
    ]
    for call, error, text in cases:
        with pytest.raises(error, match=text):
            call()
