"""JAX's own tests of collectives over one named axis, rewritten as cases for `jaxmpi.jit`.

The subjects are those of JAX's `pmap_test`, `batching_test` and `shard_map_test`, and a case names
the tests whose subject it shares. A case is a function of one rank's arrays and the stacked
arguments `[n, ...]` of n ranks. It must give what `jax.vmap(fun, axis_name="ranks")` makes of the
stacks, or where vmap has no rule, or a wrong one, what NumPy does; or it is refused, on the
backends that are named, with an error that has the line of the collective in it.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.scipy.sparse import linalg as sparse

import jaxmpi

R = jaxmpi.AXIS
ROWS = ("single", "simulate", "native", "mpi4jax", "xla")
SEVERAL = ROWS[1:]
LINE = r"at lax_cases\.py:\d+"


class Case(NamedTuple):
    title: str
    tests: str  # of JAX
    fun: Callable[..., Any]
    args: Callable[[int], tuple]
    want: Callable[..., Any] | None  # of n and the stacks; None for what jax.vmap gives
    error: tuple[type, str] | None = None
    rows: tuple[str, ...] = ()  # that refuse it
    instead: str = ""  # what to do
    # from JAX 0.12 on: the error, or None where it holds
    later: tuple[type, str] | bool | None = False


GROUPS: dict[str, list[Case]] = {}


def group(name):
    GROUPS[name] = []


def values(n, *shape, seed=0):
    return np.random.default_rng(seed).normal(size=(n, *shape))


def real(n):
    """Make x `[n, 3]` for each rank."""
    return (values(n, n, 3),)


def cube(n):
    return (values(n, n, n, n),)


def tall(n):
    return (values(n, 2 * n, 2 * n, 2 * n),)


def lanes(n):
    """Make x `[2, 2 n]` for each rank, for a vmap over the first axis."""
    return (values(n, 2, 2 * n),)


def holds(title, tests, fun, args=real, want=None, later=False):
    list(GROUPS.values())[-1].append(Case(title, tests, fun, args, want, later=later))


def refused(title, tests, fun, error, instead, args=real, rows=ROWS, want=None, later=False):
    list(GROUPS.values())[-1].append(
        Case(title, tests, fun, args, want, error, rows, instead, later)
    )


def cases_here(name):
    """Return the cases of a group, as this version of JAX has them."""
    if jax.__version_info__ < (0, 12):
        return GROUPS[name]
    cases = []
    for case in GROUPS[name]:
        if case.later is not False:
            case = case._replace(error=case.later, rows=ROWS if case.later else ())
        cases.append(case)
    return cases


def not_here(text):
    return NotImplementedError, text


def size():
    return lax.axis_size(R)


def me():
    return 1 + lax.axis_index(R)


def ring(step=1, n=None):
    n = n or size()
    return [(r, (r + step) % n) for r in range(n)]


def alone():
    return [[r] for r in range(size())]


def turned():
    return [[*reversed(range(size()))]]


def everyone(y, n):
    """Return the stacked results of n ranks that all get y."""
    return np.stack([np.asarray(y)] * n)


def vmapped(fun):
    """Compute the expected results by vmap of another form of the case."""
    return lambda n, *args: jax.tree.map(np.asarray, jax.vmap(fun, axis_name=R)(*args))


def over_lanes(fun, **kwargs):
    return jax.vmap(fun, axis_name="j", **kwargs)


group("psum")
holds(
    "an array",
    "pmap.testGradOfPsum, shard_map.test_repeated_psum_allowed",
    lambda x: lax.psum(lax.psum(x, R) + x, R),
)
holds(
    "a tree of different dtypes, None and nothing",
    "pmap.testCollectivesWithTreesOfDifferentDtypes, pmap.testTrees",
    lambda x: lax.psum(
        {"a": x, "b": ((x * 9).astype(jnp.int32), None), "c": [], "d": x.astype(jnp.float32)}, R
    ),
)
holds("the axis in a tuple", "batching.testCommAssocCollective", lambda x: lax.psum(x, (R,)))
holds(
    "over the ranks and an axis of the array",
    "batching.testCommAssocCollective",
    lambda x: lax.psum(x, (R, 0)),
)
for names in ((R, "j"), ("j", R)):
    holds(
        f"over the ranks and an axis of vmap, {names}",
        "pmap.testCollectivesWithVmap, batching.testCommAssocCollective",
        over_lanes(lambda x, names=names: x - lax.psum(x, names)),
    )
holds(
    "over an axis of vmap alone",
    "batching.testCommAssocCollective",
    over_lanes(lambda x: x - lax.psum(x, "j")),
)
holds("booleans are counted", "pmap.testPsumOnBooleanDtype", lambda x: lax.psum(x > 0, R))
holds("complex numbers", "pmap.testComplexPsum", lambda x: x - lax.psum(x + 1j * x**2, R))
holds(
    "integers wrap",
    "",
    lambda x: (lax.psum((x * 50).astype(jnp.int8), R), lax.psum((x**2 * 80).astype(jnp.uint8), R)),
)
holds(
    "bfloat16 is summed in float32 and rounded once",
    "",
    lambda x: lax.psum(x.astype(jnp.bfloat16), R),
    want=lambda n, x: everyone(
        jnp.asarray(x).astype(jnp.bfloat16).astype(jnp.float32).sum(0).astype(jnp.bfloat16), n
    ),
)
holds(
    "float8 and int4",
    "",
    lambda x: (lax.psum(jnp.sign(x).astype(jnp.float8_e4m3fn), R), lax.psum(x.astype(jnp.int4), R)),
)
holds("no elements", "", lambda x: lax.psum(x[:0], R))
holds(
    "a Python number",
    "pmap.testCollectiveConstant, pmap.testPmapDtype",
    lambda x: x * lax.psum(2, R) + lax.psum(2.5, R),
)
holds(
    "a constant array, and one of ones",
    "pmap.testPmapConstant",
    lambda x: (
        lax.psum(jnp.ones(3), R) * x,
        lax.psum(np.arange(3.0), R) * x,
        lax.psum(jnp.ones_like(x), R),
    ),
)
holds(
    "constants beside an array",
    "pmap.testPartiallyMapped",
    lambda x: lax.psum((x, 1, np.float32(2)), R),
)
refused(
    "PRNG keys",
    "",
    lambda x: jax.random.key_data(lax.psum(jax.random.key(0), R)) + x[0, 0].astype(jnp.uint32),
    (TypeError, rf"psum {LINE} is of PRNG keys, which cannot be reduced"),
    "JAX refuses it, too. `all_gather` and `ppermute` move keys.",
)
holds(
    "`axis_index_groups` of one rank each, and of all",
    "pmap.testPsumReplicaGroups, pmap.testPsumConstantReplicaGroups",
    lambda x: (
        lax.psum(x, R, axis_index_groups=alone()),
        lax.psum(x, R, axis_index_groups=turned()),
    ),
    want=lambda n, x: (x, everyone(x.sum(0), n)),
)
refused(
    "`axis_index_groups` without some of the ranks, or of different sizes",
    "pmap.testPsumUnevenReplicaGroups",
    lambda x: lax.psum(x, R, axis_index_groups=[[0]]),
    (ValueError, rf"psum {LINE} has axis_index_groups \[\[0\]\] on [23] ranks"),
    "Put each rank into one group, and all groups of one size.",
    rows=SEVERAL,
    want=lambda n, x: x,
)

group("pmean")
holds("an array", "pmap.testMean", lambda x: x - lax.pmean(x, R))
holds(
    "integers and booleans become floats",
    "pmap.testPsumOnBooleanDtype",
    lambda x: (lax.pmean((x * 9).astype(jnp.int32), R), lax.pmean(x > 0, R)),
)
holds("complex numbers", "", lambda x: lax.pmean(x * (1 + 2j), R))
holds(
    "float16 whose sum does not fit",
    "",
    lambda x: lax.pmean(jnp.float16(60000) + 0 * x[0].astype(jnp.float16), R),
    want=lambda n, x: np.full((n, 3), 60000, np.float16),
)
holds(
    "bfloat16, rounded once",
    "",
    lambda x: lax.pmean(x.astype(jnp.bfloat16), R),
    want=lambda n, x: everyone(
        jnp.asarray(x).astype(jnp.bfloat16).astype(jnp.float32).mean(0).astype(jnp.bfloat16), n
    ),
)
holds("a tree", "pmap.testTrees", lambda x: lax.pmean({"a": x, "b": x.astype(jnp.float32)}, R))
holds(
    "a constant",
    "pmap.testPmapConstant",
    lambda x: lax.pmean(3.0, R) + lax.pmean(jnp.ones(3), R) * x,
)
holds(
    "over the ranks and an axis of vmap",
    "pmap.testCollectivesWithVmap2",
    over_lanes(lambda x: lax.pmean(x, (R, "j"))),
)


def with_nan(n):
    x = values(n, 5)
    x[0, 0], x[-1, 1], x[:, 2], x[0, 3], x[-1, 4] = np.nan, -np.nan, np.inf, -np.inf, np.inf
    return (x,)


def extremes(n, x):
    return everyone(x.max(0), n), everyone(x.min(0), n)


group("pmax and pmin")
both = lambda x, axis=R: (lax.pmax(x, axis), lax.pmin(x, axis))
holds(
    "an array",
    "pmap.testReduceMax, pmap.testReduceMin, shard_map.test_pmax, shard_map.test_pmin",
    both,
)
holds(
    "integers of every width",
    "",
    lambda x: [both((100 * x).astype(t)) for t in (jnp.int8, jnp.int16, jnp.int64, jnp.uint32)],
)
holds("booleans are or and and", "", lambda x: both(x > 0))
holds(
    "float16 and bfloat16", "", lambda x: [both(x.astype(t)) for t in (jnp.float16, jnp.bfloat16)]
)
holds(
    "complex numbers, by real part, then imaginary part", "", lambda x: both(jnp.round(x) + 1j * x)
)
holds("a NaN on any rank wins", "", both, with_nan, extremes)
holds(
    "a NaN of float32 wins",
    "",
    lambda x: both(x.astype(jnp.float32)),
    with_nan,
    lambda n, x: extremes(n, x.astype(np.float32)),
)
holds(
    "a constant",
    "pmap.testPmapConstant",
    lambda x: (x + lax.pmax(3.0, R), lax.pmin(jnp.ones(3), R)),
)
holds(
    "over the ranks and an axis of vmap",
    "pmap.testCollectivesWithVmap",
    over_lanes(lambda x: both(x, (R, "j"))),
)
holds(
    "the rank that has them, as pargmax and pargmin find it",
    "pmap.testArgAllReduce, batching.testArgAllReduce",
    lambda x: [
        lax.pmin(jnp.where(x == extreme, lax.axis_index(R), size()), R) for extreme in both(x)
    ],
)
refused(
    "PRNG keys",
    "",
    lambda x: jax.random.key_data(lax.pmax(jax.random.key(0), R)),
    (TypeError, rf"pmax {LINE} is of PRNG keys"),
    "`all_gather` and `ppermute` move keys.",
)
refused(
    "a derivative",
    "",
    jax.grad(lambda x: lax.pmax(x, R).sum()),
    not_here(f"pmax {LINE} is not supported"),
    "JAX has none. `jaxmpi.tree_allreduce(x, 'max')` has one.",
)

group("all_gather")
holds(
    "an array",
    "pmap.testGather, pmap.testVsVmap, batching.testAllGatherToUnmapped",
    lambda x: lax.all_gather(x, R),
)
for axis in (1, 2, -1, -3):
    holds(
        f"axis={axis}",
        "pmap.testGatherNegativeAxis",
        lambda x, axis=axis: lax.all_gather(x, R, axis=axis),
    )
for axis in (0, 1, -1):
    holds(
        f"tiled, axis={axis}",
        "pmap.testGatherTiled, pmap.testGatherTiledNegativeAxis, shard_map.test_all_gather, "
        "batching.testAllGatherTiled",
        lambda x, axis=axis: lax.all_gather(x, R, axis=axis, tiled=True),
    )
holds(
    "scalars, booleans and nothing",
    "pmap.testGatherBool",
    lambda x: (lax.all_gather(x[0, 0], R), lax.all_gather(x > 0, R), lax.all_gather(x[:0], R)),
)
holds(
    "constants",
    "batching.testAllGatherOfConst",
    lambda x: (lax.all_gather(1, R), lax.all_gather(jnp.ones_like(x), R)),
)
holds("a tree", "pmap.testTrees", lambda x: lax.all_gather({"a": x, "b": x[0].astype(jnp.int8)}, R))
holds(
    "PRNG keys",
    "pmap.test_typed_prng_key_sharded",
    lambda x: jax.random.key_data(lax.all_gather(jax.random.key(lax.axis_index(R)), R)),
)
holds(
    "its gradient",
    "pmap.testGradOf, batching.testAllGatherVjp",
    jax.grad(lambda x: jnp.sum(jnp.sin(lax.all_gather(x, R)) * me())),
)
holds(
    "its gradient, tiled along the last axis",
    "pmap.testGradOf",
    jax.grad(lambda x: jnp.sum(jnp.sin(lax.all_gather(x, R, axis=-1, tiled=True)) * me())),
)
refused(
    "over the ranks and an axis of vmap",
    "",
    over_lanes(lambda x: lax.all_gather(x, (R, "j"))),
    not_here(f"all_gather {LINE} is not supported"),
    "JAX has no rule. Gather over one axis, then over the other.",
)
holds(
    "`axis_index_groups` of one rank each, and of all in another order",
    "pmap.testGatherReplicaGroups, pmap.testGatherReplicaGroupsInterleaved, "
    "shard_map.test_all_gather_with_axis_index_groups",
    lambda x: (
        lax.all_gather(x, R, axis_index_groups=alone()),
        lax.all_gather(x, R, axis_index_groups=turned()),
    ),
    want=lambda n, x: (x[:, None], everyone(x[::-1], n)),
)

group("psum_scatter")
holds("an array", "pmap.testReduceScatter, pmap.testVsVmap", lambda x: lax.psum_scatter(x, R))
for axis in (1, 2):
    holds(
        f"scatter_dimension={axis}",
        "pmap.testReduceScatter",
        lambda x, axis=axis: lax.psum_scatter(x, R, scatter_dimension=axis),
        cube,
    )
for axis in (0, 1, 2):
    holds(
        f"tiled, scatter_dimension={axis}",
        "pmap.testReduceScatterTiled, shard_map.test_matmul_reduce_scatter",
        lambda x, axis=axis: lax.psum_scatter(x, R, scatter_dimension=axis, tiled=True),
        tall,
    )
holds(
    "integers and complex numbers",
    "",
    lambda x: (lax.psum_scatter((x * 100).astype(jnp.int32), R), lax.psum_scatter(x * 1j, R)),
)
holds(
    "bfloat16 is summed in float32 and rounded once",
    "",
    lambda x: lax.psum_scatter(x.astype(jnp.bfloat16), R),
    want=lambda n, x: (
        jnp.asarray(x).astype(jnp.bfloat16).astype(jnp.float32).sum(0).astype(jnp.bfloat16)
    ),
)
holds("a constant", "", lambda x: lax.psum_scatter(jnp.ones_like(x), R))
holds(
    "its gradient",
    "pmap.testGradOf, batching.testReduceScatterAutodiff",
    jax.grad(lambda x: jnp.sum(jnp.sin(lax.psum_scatter(x, R)) * me())),
)
holds(
    "under vmap along other axes",
    "pmap.testVmapOf, pmap.testWithVmap",
    jax.vmap(lambda x: lax.psum_scatter(x, R, scatter_dimension=1), in_axes=1, out_axes=-1),
    cube,
)
for axis in (-1, -2):
    refused(
        f"scatter_dimension={axis}",
        "pmap.testReduceScatterNegativeScatterDimension",
        lambda x, axis=axis: lax.psum_scatter(x, R, scatter_dimension=axis),
        not_here(rf"psum_scatter {LINE} has scatter_dimension={axis}, which this JAX misreads"),
        "JAX before 0.12 mistakes it for another axis under vmap. Count from 0.",
        args=cube,
        later=None,
    )
refused(
    "booleans",
    "",
    lambda x: lax.psum_scatter(x > 0, R),
    (TypeError, rf"psum_scatter {LINE} is of booleans"),
    "JAX refuses it under vmap, too. Convert them to integers.",
)
refused(
    "PRNG keys",
    "",
    lambda x: jax.random.key_data(lax.psum_scatter(jax.random.split(jax.random.key(0), size()), R)),
    (TypeError, rf"psum_scatter {LINE} is of PRNG keys"),
    "`all_to_all` moves keys.",
)
refused(
    "over the ranks and an axis of vmap",
    "",
    over_lanes(lambda x: lax.psum_scatter(x, (R, "j"), tiled=True)),
    not_here(f"psum_scatter {LINE} is not supported"),
    "JAX has no rule. Scatter over one axis, and sum over the other.",
    args=lanes,
)
holds(
    "`axis_index_groups` of one rank each, and of all in another order",
    "pmap.testReduceScatterReplicaGroupsTiled, "
    "shard_map.test_reduce_scatter_with_axis_index_groups",
    lambda x: (
        lax.psum_scatter(x[:1], R, axis_index_groups=alone()),
        lax.psum_scatter(x, R, axis_index_groups=turned()),
    ),
    want=lambda n, x: (x[:, 0], x.sum(0)[::-1]),
)

group("all_to_all")
for split, concat in ((0, 0), (0, 2), (1, 0), (2, 1)):
    holds(
        f"split_axis={split}, concat_axis={concat}",
        "pmap.testAllToAll, pmap.testAllToAllVsVmap, batching.testAllToAll",
        lambda x, a=split, b=concat: lax.all_to_all(x, R, a, b),
        cube,
    )
for split, concat in ((0, 0), (0, 1), (1, 2)):
    holds(
        f"tiled, split_axis={split}, concat_axis={concat}",
        "shard_map.test_all_to_all",
        lambda x, a=split, b=concat: lax.all_to_all(x, R, a, b, tiled=True),
        tall,
    )
holds(
    "booleans, keys and a tree",
    "pmap.testTrees",
    lambda x: (
        lax.all_to_all({"a": x > 0, "b": x.astype(jnp.int8)}, R, 0, 0),
        jax.random.key_data(
            lax.all_to_all(jax.random.split(jax.random.key(lax.axis_index(R)), size()), R, 0, 0)
        ),
    ),
)
holds(
    "a constant",
    "",
    lambda x: lax.all_to_all(jnp.ones_like(x), R, 0, 1),
    want=lambda n, x: np.ones((n, 3, n)),
)
holds(
    "its gradient along one axis, and tiled along two",
    "shard_map.test_all_to_all_grad",
    jax.grad(
        lambda x: jnp.sum(
            jnp.sin(lax.all_to_all(x, R, 0, 0)) * me()
            + jnp.sum(lax.all_to_all(x, R, 0, 1, tiled=True) ** 3 * me())
        )
    ),
)
for axis in (0, 2):
    holds(
        f"under vmap of axis {axis}",
        "pmap.testAllToAllInVmap",
        jax.vmap(lambda x: lax.all_to_all(x, R, 0, 1), in_axes=axis),
        cube,
    )
for names in ((R, "j"), ("j", R)):
    holds(
        f"tiled, over the ranks and an axis of vmap, {names}",
        "batching.testAllToAllSplitAxis",
        over_lanes(lambda x, names=names: lax.all_to_all(x, names, 0, 0, tiled=True)),
        lanes,
    )
holds(
    "pswapaxes and its gradient",
    "pmap.testPswapaxes, pmap.testGradOfPswapaxes",
    lambda x: (
        lax.pswapaxes(x, R, 1),
        jax.grad(lambda x: jnp.sum(lax.pswapaxes(x, R, 1) ** 2 * me()))(x),
    ),
    cube,
)
for split, concat in ((-1, 0), (0, -1), (-2, -1)):
    refused(
        f"split_axis={split}, concat_axis={concat}",
        "pmap.testAllToAllNegativeAxes",
        lambda x, a=split, b=concat: lax.all_to_all(x, R, a, b),
        not_here(f"all_to_all {LINE} has .*=-[12], which this JAX misreads"),
        "JAX before 0.12 mistakes it for another axis. Count from 0.",
        args=cube,
        later=None,
    )
refused(
    "the gradient of an untiled one along two axes",
    "",
    jax.grad(lambda x: jnp.sum(lax.all_to_all(x, R, 0, 1) ** 2)),
    (ValueError, "Expected cotangent type"),
    "JAX's own rule has the wrong shape. Use `tiled=True`.",
)
holds(
    "`axis_index_groups` of one rank each, and of all in another order",
    "pmap.testAllToAllReplicaGroups, pmap.testGradOfAllToAllReplicaGroups, "
    "shard_map.test_all_to_all_with_axis_index_groups",
    lambda x: (
        lax.all_to_all(x[:1], R, 0, 0, axis_index_groups=alone()),
        lax.all_to_all(x, R, 0, 0, axis_index_groups=turned()),
    ),
    want=lambda n, x: (x[:, :1], x[::-1, ::-1].swapaxes(0, 1)),
)

group("ppermute, pshuffle and pbroadcast")
holds(
    "a ring",
    "pmap.testCollectivePermute, pmap.testPPermuteAgreesWithVmap, batching.testPPermute, "
    "shard_map.test_collective_permute",
    lambda x: lax.ppermute(x, R, ring()) - 2 * lax.ppermute(x, (R,), ring(-1)),
)
holds(
    "a part of the ranks: the others get zeros",
    "pmap.testCollectivePermuteGrad",
    lambda x: lax.ppermute(x, R, ring()[:-1]),
    want=lambda n, x: np.concatenate([np.zeros_like(x[:1]), x[:-1]]),
)
holds("no pairs", "", lambda x: lax.ppermute(x, R, []), want=lambda n, x: np.zeros_like(x))
holds(
    "pairs from zip",
    "pmap.testPpermuteWithZipObject",
    lambda x: lax.ppermute(x, R, list(zip(range(size()), range(size()), strict=True))),
)
holds(
    "pairs of NumPy",
    "",
    lambda x: lax.ppermute(x, R, np.array(ring())),
    later=(TypeError, "must be a list or a tuple"),
)
holds(
    "constants, booleans and keys",
    "",
    lambda x: (
        lax.ppermute(jnp.ones(3), R, ring()),
        lax.ppermute({"a": x > 0, "b": 1.5}, R, ring()),
        jax.random.key_data(lax.ppermute(jax.random.key(lax.axis_index(R)), R, ring())),
    ),
)
holds(
    "the gradient of a ring",
    "pmap.testCollectivePermuteCyclicGrad, batching.testPpermuteBatcherTrivial",
    jax.grad(lambda x: jnp.sum(jnp.sin(lax.ppermute(x, R, ring())) * me())),
)
holds(
    "the gradient of a part of one",
    "pmap.testCollectivePermuteGrad",
    jax.grad(lambda x: jnp.sum(lax.ppermute(x, R, ring()[:-1]) * me())),
    want=lambda n, x: (
        np.where(np.arange(n)[:, None, None] < n - 1, np.arange(n)[:, None, None] + 2.0, 0) + 0 * x
    ),
)
holds(
    "under vmap",
    "pmap.testPPermuteWithVmap",
    jax.vmap(lambda x: x + lax.ppermute(x, R, ring()), in_axes=1, out_axes=1),
)


def rule_30(board):
    left, right = lax.ppermute(board[-1:], R, ring()), lax.ppermute(board[:1], R, ring(-1))
    whole = jnp.concatenate([left, board, right])
    return whole[:-2] ^ (whole[1:-1] | whole[2:])


def rule_30_of(n, board):
    left, centre, right = (np.roll(board.ravel(), shift) for shift in (1, 0, -1))
    return (left ^ (centre | right)).reshape(board.shape)


holds(
    "a halo exchange of rule 30",
    "pmap.testRule30",
    rule_30,
    lambda n: (np.arange(8 * n).reshape(n, 8) % 5 < 2,),
    rule_30_of,
)
holds(
    "pshuffle",
    "pmap.testCollectivePermuteCyclicWithPShuffle",
    lambda x: lax.pshuffle(x, R, [p for p, _ in ring(-1)][::-1]),
)
holds(
    "pbroadcast, the axis in a tuple",
    "pmap.testCollectiveBroadcast, shard_map.test_pbroadcast",
    lambda x: lax.pbroadcast(x, (R,), size() - 1),
    want=lambda n, x: everyone(x[-1], n),
)
refused(
    "pbroadcast, the axis as text",
    "pmap.testCollectiveBroadcastGrad",
    lambda x: lax.pbroadcast(x, R, 0),
    not_here(f"pbroadcast {LINE} is not supported"),
    "JAX takes each letter for an axis. Use `jaxmpi.tree_bcast(x, root)`.",
)
refused(
    "a pair twice",
    "pmap.testPShuffleWithBadPerm",
    lambda x: lax.ppermute(x, R, [(0, 0), (0, 0)]),
    (ValueError, rf"ppermute {LINE} has pairs"),
    "JAX refuses it, too.",
)
refused(
    "over the ranks and an axis of vmap",
    "shard_map.test_collective_permute_with_multiple_axis_names",
    over_lanes(lambda x: lax.ppermute(x, (R, "j"), ring(n=2 * size()))),
    (ValueError, rf"ppermute {LINE} has pairs"),
    "JAX's vmap drops the other axis. Permute over one axis at a time.",
    args=lanes,
)

group("axis_index and axis_size")
holds(
    "the index",
    "pmap.testAxisIndex, batching.testAxisIndex, shard_map.test_axis_index_basic",
    lambda x: x - lax.axis_index(R),
)
holds(
    "of the ranks and an axis of vmap",
    "shard_map.test_axis_index_twoaxes",
    over_lanes(lambda x: x + lax.axis_index((R, "j")) * lax.axis_size((R, "j"))),
    lanes,
    lambda n, x: x + 2 * n * np.arange(2 * n).reshape(n, 2, 1),
)
holds(
    "in a scan and under checkpoint",
    "pmap.testAxisIndexInInitialStyle, pmap.testAxisIndexRemat",
    lambda x: (
        lax.scan(lambda c, r: (c + r + lax.axis_index(R), None), jnp.zeros(3), x)[0],
        jax.checkpoint(lambda x: x * me())(x),
    ),
)
holds(
    "as a seed",
    "pmap.testAxisIndexRemat, shard_map.test_sharded_random_bits",
    lambda x: jax.random.bits(jax.random.fold_in(jax.random.key(3), lax.axis_index(R)), (4,)),
)
holds("as an index into what was gathered", "", lambda x: lax.all_gather(x, R)[me() % size()])
holds(
    "the size, as a number and as a shape",
    "pmap.testCollectiveConstant",
    lambda x: x * size() + jnp.zeros(size()).sum(),
)

loss = lambda x: jnp.sum(jnp.sin(lax.pmean(x, R)) * x)

group("derivatives")
holds(
    "grad of a mean, which is the local gradient",
    "pmap.testGradBasic, batching.testGradOfPsum",
    jax.grad(loss),
)
holds(
    "grad with respect to two arguments",
    "pmap.testTwoArgsGrad",
    lambda x: jax.grad(lambda x, y: lax.psum(jnp.sum(5.0 * jnp.cos(x) * jnp.sin(y)), R), (0, 1))(
        x, x + 4
    ),
)
holds(
    "value_and_grad, has_aux, then averaged",
    "",
    lambda x: lax.pmean(
        jax.value_and_grad(lambda x: (loss(x), lax.psum(x, R)), has_aux=True)(x), R
    ),
)
holds(
    "grad of a function of averaged gradients",
    "pmap.testPsumZeroCotangents",
    lambda x: jax.grad(
        lambda m: jnp.sum(
            (lambda g: g[1] * (x + g[0]))(
                lax.psum(jax.grad(lambda p: jnp.sum(m * p[0] * p[1]))((x, x + 1)), R)
            )
        )
    )(2.0),
)
holds(
    "grad where the sum is not used",
    "shard_map.test_psum_transpose_non_zero_cts",
    jax.grad(lambda x: (lambda y, _: jnp.sum(y**2))(x, lax.psum(x, R))),
)
holds(
    "jvp",
    "pmap.testGradOfJvp, shard_map.test_jvp_basic",
    lambda x: jax.jvp(loss, (x,), (jnp.cos(x),)),
)
holds(
    "jvp along a constant",
    "pmap.testJvpAndPartialEval",
    lambda x: jax.jvp(lambda x: lax.psum(x, R), (x,), (jnp.ones_like(x),)),
)
holds(
    "linearize",
    "pmap.testJvpAndPartialEval, shard_map.test_linearize_basic",
    lambda x: (lambda y, lin: (y, lin(jnp.cos(x))))(*jax.linearize(loss, x)),
)
holds(
    "vjp with cotangents of each rank's own",
    "batching.testAllGatherVjp",
    lambda x: jax.vjp(lambda x: lax.all_gather(x, R), x)[1](jnp.ones((size(), size(), 3)) * me()),
)
holds(
    "linear_transpose",
    "shard_map.test_shmap_linearize_and_linearize_transpose_error",
    lambda x: (
        jax.linear_transpose(lambda x: lax.psum(x, R), x)(x),
        jax.linear_transpose(lambda x: lax.all_gather(x, R), x)(lax.all_gather(x, R) * me()),
    ),
)
holds(
    "linear_transpose of linearize",
    "shard_map.test_shmap_linearize_and_linearize_transpose_error",
    lambda x: jax.linear_transpose(jax.linearize(loss, x)[1], x)(1.0),
)
holds(
    "hessian",
    "pmap.testGradOfPsum",
    lambda x: jax.hessian(lambda x: lax.psum(jnp.sum(x**3), R) ** 2)(x[0]),
)
holds("a product with the hessian", "", lambda x: jax.jvp(jax.grad(loss), (x,), (x,))[1])
holds(
    "jacfwd and jacrev",
    "batching.testJacobians",
    lambda x: [
        jac(lambda x: lax.psum(jnp.sin(x), R) * x)(x[0]) for jac in (jax.jacfwd, jax.jacrev)
    ],
)
holds(
    "a third derivative",
    "",
    lambda x: jax.grad(jax.grad(jax.grad(lambda x: lax.pmean(x, R) ** 4)))(x[0, 0]),
)
holds("grad of complex numbers", "", jax.grad(lambda x: jnp.abs(lax.psum(x * (1 + 1j), R)).sum()))
holds("stop_gradient", "", jax.grad(lambda x: jnp.sum(lax.stop_gradient(lax.psum(x, R)) * x)))
holds(
    "integers have none",
    "shard_map.test_transpose_float0",
    lambda x: jax.grad(lambda x, i: jnp.sum(lax.psum(x, R) * lax.psum(i, R)), allow_int=True)(
        x, jnp.arange(3)
    ),
)


@jax.custom_vjp
def sine(x):
    return jnp.sin(x)


sine.defvjp(lambda x: (lax.psum(jnp.sin(x), R), x), lambda x, g: (lax.pmean(g, R) * jnp.cos(x),))


@jax.custom_jvp
def total(x):
    return lax.psum(x, R)


total.defjvp(lambda primals, tangents: (total(*primals), lax.pmax(primals[0], R) * tangents[0]))

holds(
    "custom_vjp that communicates both ways",
    "shard_map.test_eager_custom_vjp_basic, shard_map.test_optimize_remat",
    jax.value_and_grad(lambda x: jnp.sum(sine(x) * x)),
)
holds(
    "custom_jvp that communicates both ways, and under vmap",
    "shard_map.test_eager_custom_jvp_basic",
    lambda x: (
        jax.grad(lambda x: jnp.sum(total(x) * x))(x),
        jax.vmap(jax.grad(lambda x: jnp.sum(total(x) * x)))(x),
    ),
)
holds(
    "custom_root",
    "",
    lambda x: lax.custom_root(
        lambda y: y - lax.psum(x[0, 0], R), 0.0, lambda f, y: y - f(y), lambda g, y: y / g(1.0)
    ),
    later=not_here(f"call_hi_primitive {LINE} communicates over 'ranks'"),
)
holds(
    "custom_linear_solve: cg, gmres and bicgstab",
    "shard_map.test_custom_linear_solve_rep_rules",
    lambda x: [
        solve(lambda v: lax.psum(v, R) + v, lax.pmean(x[0], R), tol=1e-14)[0]
        for solve in (sparse.cg, sparse.gmres, sparse.bicgstab)
    ],
    want=lambda n, x: [everyone(x[:, 0].mean(0) / (n + 1), n)] * 3,
)
holds(
    "the gradient of custom_linear_solve",
    "",
    jax.grad(
        lambda x: jnp.sum(
            sparse.cg(lambda v: lax.pmean(v, R) + v, lax.pmean(x[0], R), tol=1e-14)[0] ** 2
        )
    ),
)

group("checkpoint and jit")
holds(
    "checkpoint",
    "shard_map.test_remat_basic, shard_map.test_grad_remat",
    jax.grad(jax.checkpoint(loss)),
)
holds(
    "checkpoint with a policy",
    "shard_map.test_shmap_of_remat_basic, pmap.test_remat_of_pmap_policy",
    jax.grad(jax.checkpoint(loss, policy=jax.checkpoint_policies.everything_saveable)),
)
holds(
    "checkpoint of a collective that was named",
    "shard_map.test_remat_transform",
    jax.grad(
        jax.checkpoint(
            lambda x: jnp.sum(jnp.sin(checkpoint_name(lax.psum(x, R), "sum"))),
            policy=jax.checkpoint_policies.save_only_these_names("sum"),
        )
    ),
)
holds(
    "checkpoint of two gathers",
    "shard_map.test_collectives_not_saved",
    jax.grad(
        lambda x: jnp.sum(jax.checkpoint(lambda x: lax.all_gather(x, R) * lax.all_gather(x, R))(x))
    ),
)
holds(
    "checkpoint in a scan",
    "",
    jax.grad(
        lambda x: lax.scan(
            jax.checkpoint(lambda c, r: (jnp.sin(lax.psum(r * c, R)), None)), jnp.ones(3), x
        )[0].sum()
    ),
)
holds(
    "jit in jit, and in grad",
    "pmap.testCompositionWithJitTwice, pmap.testJitPmapComposition",
    lambda x: (
        jax.jit(lambda x: jax.jit(lambda x: lax.psum(x, R))(x) + x)(x),
        jax.grad(jax.jit(loss))(x),
    ),
)
holds("jaxmpi.jit under checkpoint", "", jax.grad(jax.checkpoint(jaxmpi.jit(loss))))


def scoped(x):
    with jax.named_scope("transpose(x)"):
        return lax.psum(jnp.full(3, 2.0), R) + lax.psum(x, R)


holds("a scope that is named like a derivative", "", scoped)

group("vmap inside")
holds("psum of the batch", "pmap.testVmapOf", jax.vmap(lambda x: lax.psum(x, R)))
holds(
    "psum of what is not batched, and of a constant",
    "",
    lambda x: jax.vmap(lambda r: lax.psum(x, R) + lax.psum(1.0, R) * r)(x),
)
holds(
    "other axes in and out",
    "pmap.testVmapOfPmapNonLeadingAxis",
    jax.vmap(
        lambda x: lax.pmax(x, R) + lax.all_gather(x, R, axis=-1).sum(-1), in_axes=1, out_axes=-1
    ),
)
holds(
    "vmap in vmap",
    "batching.testBatchedAllGather, batching.testBatchedAllGatherTiled",
    jax.vmap(jax.vmap(lambda x: (lax.psum(x, R), lax.all_gather(x, R)))),
)
holds(
    "an axis of the same name",
    "pmap.test_axis_name_shadowing_with_vmap, shard_map.test_vmap_basic_axis_name_reuse_mesh_name",
    jax.vmap(lambda x: x - lax.psum(x, R), axis_name=R),
)
holds(
    "vmap of grad, and grad of vmap",
    "batching.testPerExampleGradients",
    lambda x: (
        jax.vmap(jax.grad(lambda x: jnp.sum(lax.psum(x, R) ** 2)))(x),
        jax.grad(lambda x: jax.vmap(lambda x: jnp.sum(lax.pmean(x, R) ** 2))(x).sum())(x),
    ),
)

group("scan and other loops")
add = lambda c, r: (c + lax.psum(r, R), lax.pmean(c, R))
holds(
    "scan",
    "shard_map.test_scan_rep_rule, shard_map.test_rewrite_scan",
    lambda x: lax.scan(add, jnp.zeros(3), x),
)
holds(
    "scan backwards, and unrolled",
    "",
    lambda x: (
        lax.scan(add, jnp.zeros(3), x, reverse=True),
        lax.scan(add, jnp.zeros(3), x, unroll=2),
    ),
)
holds(
    "scan of length 0, and its gradient",
    "",
    lambda x: (
        lax.scan(add, jnp.ones(3), x[:0]),
        jax.grad(
            lambda x: lax.scan(lambda c, r: (c * lax.psum(r, R), None), x.sum(0), x[:0])[0].sum()
        )(x),
    ),
)
holds(
    "the gradient of a scan",
    "",
    jax.grad(
        lambda x: lax.scan(
            lambda c, r: (jnp.sin(c + lax.psum(r, R)), lax.pmean(c * r, R)), jnp.zeros(3), x
        )[0].sum()
    ),
)
holds(
    "scan in scan",
    "",
    lambda x: lax.scan(lambda c, r: lax.scan(lambda d, s: (d + lax.psum(s, R), d), c, r), 0.0, x),
)
holds(
    "scan whose carry moves on",
    "shard_map.test_scan_rep_rule",
    lambda x: lax.scan(lambda c, _: (lax.ppermute(c, R, ring()), c), x, None, length=3),
)
holds(
    "scan under vmap, of length 0, too",
    "",
    lambda x: [jax.vmap(lambda r: lax.scan(add, 1.0, r))(y) for y in (x, x[:, :0])],
)
holds(
    "scan of gradient steps",
    "",
    lambda x: lax.scan(
        lambda w, r: (w - 0.1 * jax.grad(lambda w: lax.pmean(jnp.sum((w * r) ** 2), R))(w), None),
        jnp.ones(3),
        x,
    )[0],
)
holds(
    "scan of sums that do not change",
    "",
    lambda x: lax.scan(lambda c, r: (c + lax.psum(x, R).sum(), None), 0.0, x)[0],
)
holds(
    "map, with a batch size, too",
    "pmap.testPmapMapVmapCombinations",
    lambda x: (
        lax.map(lambda r: lax.psum(r, R) * r, x),
        lax.map(lambda r: lax.psum(r, R) * r, x, batch_size=2),
    ),
)
holds(
    "fori_loop, and its gradient",
    "pmap.testIssue1065",
    lambda x: (
        lax.fori_loop(
            0, lax.pmax(lax.axis_index(R), R) + 2, lambda i, c: c + lax.psum(c, R) * 0.1, x
        ),
        jax.grad(lambda x: lax.fori_loop(0, 3, lambda i, c: jnp.sin(c + lax.psum(c, R)), x).sum())(
            x
        ),
    ),
)
holds(
    "associative_scan",
    "",
    lambda x: lax.associative_scan(lambda a, b: a + b + lax.psum(a * b, R), x),
)


def growing(x):
    """Loop for a number of turns that differs between the lanes of a vmap."""
    return lax.while_loop(
        lambda c: lax.psum(c, R) < 100, lambda c: lax.pmean(c * 2 + 1, R) + jnp.abs(x), jnp.abs(x)
    )


def tree_loop(x):
    init = {"a": x, "b": (jnp.arange(3.0), 0), "k": jax.random.key(0)}
    body = lambda c: {
        "a": c["a"] + lax.pmean(jnp.abs(x) + 0.1, R),
        "b": (c["b"][0] * 2, c["b"][1] + 1),
        "k": jax.random.split(c["k"], 1)[0],
    }
    out = lax.while_loop(lambda c: lax.pmax(c["a"], R) < 3, body, init)
    return out | {"k": jax.random.key_data(out["k"])}


group("while_loop")
holds("a condition that communicates", "shard_map.test_while_rep_rule", lambda x: growing(x[0, 0]))
holds(
    "the same under vmap: lanes that are done keep their state",
    "",
    lambda x: jax.vmap(growing)(x[0]),
)
holds(
    "under vmap of vmap, along other axes",
    "",
    lambda x: jax.vmap(jax.vmap(growing), in_axes=1, out_axes=1)(x),
)
holds("a tree with keys as its state, under vmap", "", lambda x: jax.vmap(tree_loop)(x[0]))
holds(
    "its jvp under vmap, and the other way round",
    "",
    lambda x: (
        jax.jvp(jax.vmap(growing), (x[0],), (x[-1],)),
        jax.vmap(lambda a, b: jax.jvp(growing, (a,), (b,)))(x[0], x[-1]),
    ),
)
holds(
    "under vmap in a scan, and a scan in it",
    "",
    lambda x: (
        lax.scan(lambda c, r: (jax.vmap(growing)(c * 0.5 + r), None), x[0], x)[0],
        jax.vmap(lambda r: lax.scan(lambda c, s: (growing(c + s), None), r, jnp.arange(2.0))[0])(
            x[0]
        ),
    ),
)
holds(
    "a loop in a loop, under vmap",
    "",
    lambda x: jax.vmap(
        lambda r: lax.while_loop(
            lambda c: lax.psum(c, R) < 100, lambda c: jnp.abs(growing(c)) + 10, jnp.abs(r)
        )
    )(x[0]),
)
holds(
    "lanes with numbers of turns that are known",
    "",
    lambda x: jax.vmap(
        lambda r, k: lax.while_loop(
            lambda c: c[1] < k, lambda c: (lax.psum(c[0], R), c[1] + 1), (r, 0)
        )[0]
    )(x[0], jnp.arange(3)),
)


def two_ways(x, positive=True):
    sign = lax.psum(jnp.sum(x), R) > -1e9 if positive else lax.psum(jnp.sum(x), R) > 1e9
    return lax.cond(
        sign, lambda x: lax.psum(x**2, R), lambda x: 2 * lax.pmax(lax.stop_gradient(x), R) * x, x
    )


ways = [lambda x: x, lambda x: lax.psum(x, R), lambda x: lax.pmax(x, R)]

group("cond and switch")
holds(
    "cond, both ways", "shard_map.test_cond_rep_rule", lambda x: (two_ways(x), two_ways(x, False))
)
holds(
    "the gradient of cond",
    "",
    lambda x: [jax.grad(lambda x, p=p: two_ways(x, p).sum())(x) for p in (True, False)],
)
holds("cond whose predicate is known", "", lambda x: lax.cond(True, ways[1], ways[0], x))
holds(
    "cond under vmap: a predicate for all lanes, for each, and of each rank's own",
    "pmap.test_num_replicas_with_switch",
    lambda x: (
        jax.vmap(lambda r: lax.cond(lax.psum(x[0, 0], R) > 0, ways[1], ways[2], r))(x),
        jax.vmap(lambda r: lax.cond(lax.psum(r[0], R) > 0, ways[1], ways[2], r))(x),
        jax.vmap(lambda r: lax.cond(r[0] > 0, ways[1], ways[2], r))(x),
    ),
)
holds(
    "switch",
    "shard_map.test_switch_rep_rule",
    lambda x: lax.switch(lax.pmax(lax.axis_index(R), R) % 3, ways, x),
)
holds(
    "switch under vmap",
    "",
    lambda x: jax.vmap(lambda i, r: lax.switch(i, ways, r))(jnp.arange(x.shape[0]) % 3, x),
)
holds(
    "the gradient of cond in a scan, without operands",
    "",
    jax.grad(
        lambda x: lax.scan(
            lambda c, r: (
                lax.cond(lax.psum(r[0], R) > 0, lambda: jnp.sin(lax.psum(c, R)), lambda: c * r),
                None,
            ),
            jnp.ones(3),
            x,
        )[0].sum()
    ),
)
refused(
    "cond whose predicate may differ between the ranks",
    "shard_map.test_eager_control_flow",
    lambda x: lax.cond(x[0, 0] > 0, ways[1], ways[0], x),
    (
        ValueError,
        rf"jaxmpi\.jit: cond {LINE} contains a collective \(psum {LINE}\), and which branch is "
        r"taken may differ",
    ),
    "Ranks would wait for each other for ever. Reduce the predicate over the ranks first.",
    rows=SEVERAL,
    want=lambda n, x: x,
)


def written(x):
    ref = jax.new_ref(x)
    first = lax.psum(ref[...], R)
    ref[...] = 2 * first
    ref[0] += lax.psum(ref[...], R)[0]
    return first, ref[...]


def in_loops(x):
    ref = jax.new_ref(jnp.zeros(3))

    def body(c, r):
        ref[...] += lax.psum(r, R)
        return c + ref[...], None

    def turn(i):
        ref[...] += lax.psum(x[0], R) * i
        return i + 1

    c, _ = lax.scan(body, jnp.zeros(3), x)
    lax.while_loop(lambda i: i < 3, turn, 0)
    return c, ref[...]


def in_jit(x):
    ref = jax.new_ref(jnp.zeros(3))

    @jax.jit
    def accumulate(ref, x):
        ref[...] += lax.psum(x, R)

    accumulate(ref, x[0])
    accumulate(ref, x[-1])
    return ref[...]


def in_branch(x):
    ref = jax.new_ref(jnp.zeros(3))

    def on():
        ref[...] += lax.psum(x[0], R)

    lax.cond(lax.psum(x[0, 0], R) > -1e9, on, lambda: None)
    return ref[...]


group("references, callbacks and others")
holds(
    "a reference that is read and written",
    "shard_map.test_mutable_array_internal_basic, shard_map.test_eager_shmap_new_ref",
    written,
)
holds("a reference in scan and while_loop", "", in_loops)
holds("a reference as an argument of jit inside", "shard_map.test_mutable_array_arg_basic", in_jit)
refused(
    "a reference in a branch",
    "",
    in_branch,
    not_here(f"A branch uses a reference {LINE}, which the simulate backend"),
    "JAX's vmap has no rule. Return the new value from the branch.",
    rows=("simulate",),
    want=lambda n, x: everyone(x[:, 0].sum(0), n),
)
holds(
    "debug.callback and pure_callback",
    "shard_map.test_debug_print_jit, shard_map.test_pure_callback_return_multiple_arrays",
    lambda x: (
        jax.debug.callback(lambda _: None, lax.psum(x, R)),
        lax.pmean(
            jax.pure_callback(
                lambda y: np.asarray(y) * 2,
                jax.ShapeDtypeStruct(x.shape, x.dtype),
                lax.psum(x, R),
                vmap_method="sequential",
            ),
            R,
        ),
    )[1],
)
holds(
    "platform_dependent",
    "",
    lambda x: lax.platform_dependent(
        x, cpu=lambda x: lax.psum(x, R), default=lambda x: lax.psum(x, R)
    ),
)
holds(
    "random numbers of each rank's own",
    "pmap.test_pmap_of_prng_key, shard_map.test_random_beta_vma",
    lambda x: lax.pmean(
        jax.random.uniform(jax.random.fold_in(jax.random.key(1), lax.axis_index(R)), (3,)), R
    ),
)
holds("many arrays", "pmap.testManyArgs", lambda x: lax.psum([x[0, 0] + k for k in range(24)], R))
refused(
    "the name of another axis",
    "pmap.testPmapAxisNameError",
    lambda x: lax.pmean(x, "batch"),
    (
        NameError,
        rf"pmean {LINE} is over the axis 'batch', which nothing binds\. "
        r".*jaxmpi\.AXIS",
    ),
    'Code for pmap often has "batch": give it `jaxmpi.AXIS`.',
)
refused(
    "pmap and shard_map inside",
    "pmap.testVmapOfPmap, pmap.testPmapInJit, shard_map.test_outer_jit_detects_shard_map_mesh",
    lambda x: jax.pmap(lambda y: lax.psum(y, "i"), axis_name="i")(x[None])[0],
    not_here("contains a pmap or shard_map at .*, and each rank has one"),
    "Use `jax.vmap`, or call its function directly.",
    rows=SEVERAL,
    want=lambda n, x: x,
)
refused(
    "pcast",
    "shard_map.test_pvary, shard_map.test_pcast_axis_name_is_not_set",
    lambda x: lax.pcast(x, R, to="varying"),
    not_here(f"pcast {LINE} is not supported"),
    "There are no replication types here. Leave it out.",
)
refused(
    "ragged_all_to_all",
    "",
    lambda x: lax.ragged_all_to_all(x, x, *[jnp.arange(size())] * 4, axis_name=R),
    not_here(f"ragged_all_to_all {LINE} communicates over 'ranks', which is not supported"),
    "Pad to equal parts, and use `all_to_all`.",
)
