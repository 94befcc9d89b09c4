"""Numbers of Python and NumPy that 32 bits cannot hold: they keep their value, or raise."""

import csv

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmpi
from jaxmpi.testing import run_ranks

LARGE = 3_000_000_000
MOVES = {
    "tree_allreduce": lambda x: jaxmpi.tree_allreduce(x, "max"),
    "tree_allgather": jaxmpi.tree_allgather,
    "tree_bcast": jaxmpi.tree_bcast,
    "tree_reduce": lambda x: jaxmpi.tree_reduce(x, "min"),
    "fully_shard": jaxmpi.fully_shard,
}
TOO_LARGE = [
    LARGE,
    -LARGE,
    np.int64(LARGE),
    np.uint64(LARGE * 2),
    np.asarray([1, LARGE]),
    np.float64(1e300),
    1e300,
    2**70,
]


def rank_sum(f):
    return sum(f(rank) for rank in range(jaxmpi.size()))


@run_ranks(1, 2, 3)
@pytest.mark.parametrize("function", MOVES)
def test_numbers_beyond_32_bits_are_refused_with_leaf_and_value(function):
    for x in TOO_LARGE:
        number = np.asarray(x).reshape(-1)[-1]
        with pytest.raises(OverflowError) as caught:
            MOVES[function]({"n": x})
        assert str(caught.value).startswith(f"{function}: leaf ['n'] is {number}, which ")
        assert "jax_enable_x64" in str(caught.value)
    total = jaxmpi.tree_allreduce(jaxmpi.rank() + 1.0, "sum")
    assert float(total) == rank_sum(lambda rank: rank + 1)


@run_ranks(2, 3)
def test_a_number_that_one_rank_cannot_send_is_an_error_on_all():
    last = jaxmpi.size() - 1
    for call in (
        lambda x: jaxmpi.tree_allgather({"n": x}),
        lambda x: jaxmpi.average_metrics({"n": x}),
    ):
        if jaxmpi.rank() == last:
            with pytest.raises(OverflowError, match=r"leaf \['n'\] is 1e\+300"):
                call(1e300)
        else:
            with pytest.raises(jaxmpi.RankMismatchError, match=r"(?s)leaf \['n'\] is 1e\+300"):
                call(1.0)
    assert float(jaxmpi.tree_allreduce(1.0, "sum")) == jaxmpi.size()


@run_ranks(1, 2, 3)
def test_numbers_beyond_32_bits_keep_their_value_with_x64():
    with jax.enable_x64(True):
        rank = jaxmpi.rank()
        assert int(jaxmpi.tree_allreduce(LARGE + rank, "max")) == LARGE + jaxmpi.size() - 1
        total = jaxmpi.tree_allreduce(np.int64(LARGE) * (rank + 1), "sum")
        assert int(total) == rank_sum(lambda r: LARGE * (r + 1))
        mean = jaxmpi.tree_allreduce(2**62 + rank)
        assert int(mean) == 2**62 + rank_sum(lambda r: r) // jaxmpi.size()
        assert float(jaxmpi.tree_allreduce(np.float64(1e300), "max")) == 1e300
        got = jaxmpi.average_metrics({"a": 2**40 + 1, "b": np.float64(16777217.0), "c": 16777217.0})
        assert {name: float(x) for name, x in got.items()} == {
            "a": 2**40 + 1,
            "b": 16777217.0,
            "c": 16777217.0,
        }
        if jaxmpi.size() > 1:
            with pytest.raises(
                OverflowError,
                match=r"the sum of leaf .* over the ranks is .*, which int64 cannot hold",
            ):
                jaxmpi.tree_allreduce(2**62, "sum")


@run_ranks(1, 2, 3)
def test_sums_and_means_of_python_and_numpy_integers_are_exact_or_refused():
    rank, size = jaxmpi.rank(), jaxmpi.size()
    each = lambda r: (2**31 - 1) * (-1) ** r - r * (-1) ** r  # large, of both signs: the sum fits
    mean = jaxmpi.tree_allreduce(
        {"python": each(rank), "numpy": np.asarray([each(rank), -5 - rank]), "float": rank + 0.5}
    )
    assert int(mean["python"]) == rank_sum(each) // size and mean["python"].weak_type
    np.testing.assert_array_equal(
        mean["numpy"], [rank_sum(each) // size, rank_sum(lambda r: -5 - r) // size]
    )
    assert float(mean["float"]) == rank_sum(lambda r: r + 0.5) / size
    assert mean["numpy"].dtype == mean["python"].dtype == jnp.int32
    assert int(jaxmpi.tree_allreduce(2_000_000_000)) == 2_000_000_000
    for dtype in ("int8", "uint8", "int16", "uint16", "int32", "uint32"):
        x = np.asarray([3 + rank, 40], dtype)
        got = jaxmpi.tree_allreduce(x, "sum")
        np.testing.assert_array_equal(got, [rank_sum(lambda r: 3 + r), 40 * size])
        assert got.dtype == dtype
        largest = np.iinfo(dtype).max
        assert int(jaxmpi.tree_allreduce(np.asarray(largest, dtype))) == largest
        if size > 1:
            with pytest.raises(
                OverflowError,
                match=rf"tree_allreduce: the sum of leaf \['n'\] .* is {largest * size}, which",
            ):
                jaxmpi.tree_allreduce({"n": np.asarray(largest, dtype)}, "sum")
    total = jaxmpi.tree_reduce(rank + 1, "sum", root=size - 1)
    assert int(total) == (rank_sum(lambda r: r + 1) if rank == size - 1 else rank + 1)
    rows = np.arange(2 * size).reshape(size, 2) * (rank + 1)
    got = jaxmpi.tree_reduce_scatter(rows, "sum")
    np.testing.assert_array_equal(
        got, rank_sum(lambda r: np.arange(2 * size).reshape(size, 2) * (r + 1))[rank]
    )


@run_ranks(2)
def test_sums_of_integers_compare_what_they_are_for():
    rank = jaxmpi.rank()
    for first, second in (
        (lambda: jaxmpi.tree_allreduce(1, "sum"), lambda: jaxmpi.tree_allreduce(1, "mean")),
        (
            lambda: jaxmpi.tree_reduce(1, "sum", root=0),
            lambda: jaxmpi.tree_reduce(1, "sum", root=1),
        ),
        (lambda: jaxmpi.tree_allreduce(1, "sum"), lambda: jaxmpi.tree_reduce(1, "sum")),
    ):
        with pytest.raises(jaxmpi.RankMismatchError):
            first() if rank == 0 else second()


@run_ranks(2)
def test_integers_of_jax_wrap_as_documented():
    x = jnp.asarray(2_000_000_000)
    assert int(jaxmpi.tree_allreduce(x, "sum")) == 4_000_000_000 - 2**32


@run_ranks(1, 2, 3)
def test_average_metrics_of_numbers_beyond_32_bits():
    rank, size = jaxmpi.rank(), jaxmpi.size()
    for kind in (int, np.int64, np.uint64, np.float64, float):
        got = jaxmpi.average_metrics({"n": kind(LARGE * (rank + 1))})["n"]
        np.testing.assert_allclose(got, rank_sum(lambda r: LARGE * (r + 1)) / size, rtol=3e-7)
    for weight in (
        LARGE * (rank + 1),
        np.int64(2**32) * (rank + 1),
        np.uint64(2**33) * np.uint64(rank + 1),
    ):
        got = jaxmpi.average_metrics(float(rank), weight=weight)
        np.testing.assert_allclose(
            got, rank_sum(lambda r: r * (r + 1)) / rank_sum(lambda r: r + 1), rtol=1e-6, atol=1e-7
        )
    with pytest.raises(
        OverflowError, match=r"average_metrics: leaf \['n'\] is 1e\+300, which float32 cannot hold"
    ):
        jaxmpi.average_metrics({"n": np.float64(1e300)})
    with pytest.raises(ValueError, match="average_metrics: weight"):
        jaxmpi.average_metrics(1.0, weight=10**400)


@run_ranks(2)
def test_any_rank_of_numbers_that_32_bits_make_zero_of():
    for flag in (2**32, np.int64(2**32), np.float64(1e-300), 1e-300):
        assert bool(jaxmpi.any_rank(flag if jaxmpi.rank() == 1 else 0))


def test_simulated_ranks_refuse_sums_beyond_32_bits():
    with jaxmpi.simulate(3):
        assert int(jaxmpi.tree_allreduce(7, "sum")) == 21
        with pytest.raises(
            OverflowError, match="the sum of leaf the argument over the ranks is 6000000000"
        ):
            jaxmpi.tree_allreduce(2_000_000_000, "sum")
        with pytest.raises(OverflowError, match=f"leaf .* is {LARGE}"):
            jaxmpi.tree_allgather(jaxmpi.PerRank(np.asarray([1, 2, LARGE])))
        np.testing.assert_allclose(
            jaxmpi.average_metrics(jaxmpi.PerRank(np.asarray([LARGE, 0, 0]))), LARGE / 3
        )


MOST = 2**31 - 1
OF_TWO_RANKS = [  # what ranks 0 and 1 add up
    np.int32([MOST, -MOST]),
    np.int32([-MOST - 1, 0]),
    np.int32([2**30, 2**30]),
    np.int32([-(2**30), -(2**30)]),
    np.int32([-(2**30) - 5, -(2**30) - 5]),
    np.int8([-64, -64]),
    np.int8([64, 64]),
    np.uint8([200, 56]),
    np.int16([[1, -9], [2, 32767]]),
]
REDUCTIONS = {
    "tree_allreduce": lambda x, op: jaxmpi.tree_allreduce(x, op),
    "tree_reduce": lambda x, op: jaxmpi.tree_reduce(x, op, root=1),
    "tree_reduce_scatter": lambda x, op: jaxmpi.tree_reduce_scatter(x, op),
}


def reduction_of(name, stack, op):
    """Return what each of two ranks passes and should get, and a number too large for the dtype.

    The expected values are computed with Python's integers.
    """
    exact = stack.astype(object).sum(0)
    exact = np.asarray(exact // 2 if op == "mean" else exact, object)
    limits = np.iinfo(stack.dtype)
    too_large = [x for x in exact.reshape(-1) if not limits.min <= x <= limits.max]
    passed = [np.stack([x, x]) if name == "tree_reduce_scatter" else x for x in stack]
    wanted = [stack[0] if name == "tree_reduce" else exact, exact]
    return passed, wanted, too_large[0] if too_large else None


@run_ranks(2)
@pytest.mark.parametrize("name", REDUCTIONS)
def test_sums_are_those_of_exact_integers(name):
    rank = jaxmpi.rank()
    for stack in OF_TWO_RANKS:
        for op in ("sum", "mean"):
            passed, wanted, too_large = reduction_of(name, stack, op)
            if too_large is None:
                out = REDUCTIONS[name]({"n": passed[rank]}, op)["n"]
                np.testing.assert_array_equal(out, wanted[rank].astype(stack.dtype))
                assert out.dtype == stack.dtype
                continue
            with pytest.raises(
                OverflowError,
                match=rf"{name}: the sum of leaf \['n'\] over the ranks is {too_large}, which",
            ):
                REDUCTIONS[name]({"n": passed[rank]}, op)


@pytest.mark.parametrize("name", REDUCTIONS)
def test_sums_of_simulated_ranks_are_those_of_exact_integers(name):
    with jaxmpi.simulate(2):
        for stack in OF_TWO_RANKS:
            for op in ("sum", "mean"):
                passed, wanted, too_large = reduction_of(name, stack, op)
                n = jaxmpi.PerRank(np.stack(passed))
                if too_large is None:
                    out = REDUCTIONS[name]({"n": n, "x": jnp.ones((2, 3))}, op)
                    assert np.asarray(out["x"]).max() == (2 if op == "sum" else 1)
                    n = out["n"] if isinstance(out["n"], jaxmpi.PerRank) else [out["n"]] * 2
                    for rank in range(2):
                        np.testing.assert_array_equal(n[rank], wanted[rank].astype(stack.dtype))
                        assert n[rank].dtype == stack.dtype
                    continue
                with pytest.raises(
                    OverflowError, match=rf"{name}: the sum of leaf .* is {too_large}, which"
                ):
                    REDUCTIONS[name]({"n": n}, op)
        assert jaxmpi.tree_allreduce(np.int32(2**30), "mean") == 2**30
        with pytest.raises(OverflowError, match="is -2147483650, which int32"):
            jaxmpi.tree_allreduce(np.int32(-(2**30) - 1), "sum")


@run_ranks(2)
def test_ranks_that_differ_in_an_integer_are_told_leaf_and_op():
    rank = jaxmpi.rank()
    with pytest.raises(
        jaxmpi.RankMismatchError,
        match=r"rank 0: .*integers of Python.*, \['n'\], op mean\"\]: int32\[2\]",
    ):
        jaxmpi.tree_allreduce({"n": 5}, "sum" if rank else "mean")
    with pytest.raises(
        jaxmpi.RankMismatchError, match=r"rank 1: .*integers of Python or NumPy, \['n'\], op sum"
    ):
        jaxmpi.tree_allreduce({"n": 5 if rank else jnp.asarray(5)}, "sum")
    assert int(jaxmpi.tree_allreduce({"n": 5}, "sum")["n"]) == 10


def test_metrics_log_keeps_integers(tmp_path):
    jaxmpi.init()
    log = jaxmpi.MetricsLog(tmp_path)
    log.write(
        5_000_000_000, {"tokens": 2**53 + 1, "n": np.int64(-(2**60) - 1), "loss": 0.5, "small": 3}
    )
    with open(tmp_path / "metrics.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert {name: rows[0][name] for name in ("step", "tokens", "n", "loss", "small")} == {
        "step": "5000000000",
        "tokens": str(2**53 + 1),
        "n": str(-(2**60) - 1),
        "loss": "0.5",
        "small": "3.0",
    }
