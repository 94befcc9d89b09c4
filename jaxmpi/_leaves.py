"""What may stand at the leaves of a tree, and the errors that name the leaf that may not."""

import sys
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import KeyEntry, KeyPath, PyTreeDef

from jaxmpi._errors import RankCountError

__all__ = [
    "PER_RANK",
    "STATISTIC",
    "Mark",
    "MarkKey",
    "PerRankState",
    "PyTree",
    "as_array",
    "check_fits",
    "check_rows",
    "flatten_with_path",
    "in_shard",
    "is_key",
    "is_own",
    "is_variable",
    "leaf_name",
    "mark_of",
    "marks_of",
    "output_name",
    "per_rank_variables",
    "shard_axis",
    "widest",
]


# of arrays and numbers, as `jax.tree` takes them apart; mypy has no type for it
PyTree: TypeAlias = Any


class HasDtype(Protocol):
    """An array, or what stands for one, such as a `jax.ShapeDtypeStruct`."""

    @property
    def dtype(self) -> np.dtype: ...


class Mark(str):
    """A name in the path of a leaf that says which ranks have the leaf.

    The fields of `PerRankState`, `ShardedArray` and `ShardedState` have such names.
    `jax.tree_util` keeps the type of a key, and `flax.nnx` does not: `nnx.state` and `nnx.split`
    make dicts of all pytree nodes, with the names of the fields as keys. So the name carries the
    facts. It is a text of a type of its own, which nnx passes on as it is and no field of a user's
    class has.

    Its characters say all that its attributes do. JAX and nnx cache structures, and return one of
    two whose keys are equal, so equal marks must mean the same.

    Attributes:
      field: the name of the field, for the names of leaves; "" where it does not show in them.
      per_rank: whether the ranks have different values below it.
      of: the shape of the array, or of one of a stack, that the leaves below are shards of; None
        where they are no shards.
      state: whether the leaves below are those of a `ShardedState`.
      ranks: the number of shards.
      axis: of the ranks that have them.
    """

    field: str = ""
    per_rank: bool = True
    of: tuple[int, ...] | None = None
    state: bool = False
    ranks: int = 1
    axis: str | tuple[str, ...] = ()

    @classmethod
    def of_shard(cls, of: tuple[int, ...], ranks: int, axis: str | tuple[str, ...]) -> "Mark":
        """The name of `ShardedArray.shard`."""
        mark = cls(f"ShardedArray(of={of}, ranks={ranks}, axis={axis!r}).shard")
        mark.field, mark.of, mark.ranks, mark.axis = "shard", of, ranks, axis
        return mark

    @classmethod
    def of_state(cls, field: str, ranks: int, axis: str | tuple[str, ...]) -> "Mark":
        """The name of a field of `ShardedState`. The state that one rank would have is equal on all of them."""
        mark = cls(f"ShardedState(ranks={ranks}, axis={axis!r}).{field}")
        mark.field, mark.per_rank, mark.state, mark.ranks, mark.axis = (
            field,
            ranks > 1,
            True,
            ranks,
            axis,
        )
        return mark


PER_RANK = Mark("PerRankState.per_rank")
PER_RANK.field = "per_rank"
# before ".value" in a path of `flatten_with_path`
VARIABLE = Mark("nnx variable of each rank")
STATISTIC = Mark("nnx batch statistic of each rank")


class MarkKey(jax.tree_util.GetAttrKey):  # type: ignore[misc]
    """The key of a field whose name is a `Mark`."""

    def __str__(self) -> str:
        return f".{self.name.field}" if self.name.field else ""


@jax.tree_util.register_pytree_with_keys_class
class PerRankState:
    """Mark a part of a pytree as each rank's own: per-rank keys, environments, BatchNorm statistics of local batches.

    All other leaves of a train state are equal on all ranks. In a `PerRankState`,

    - `save` writes every rank's values, and `restore` gives each rank its own back. On another
      number of ranks it raises unless all ranks had the same; `PerRankState(None)` in `like` leaves
      the part out;
    - `synchronize` keeps each rank's values; `watch_replicas` and JAXMPI_CHECK do not compare them;
    - `jaxmpi.jit` lets them differ in the arguments and outputs that are named as replicated.

    It is a pytree node with one child, and goes through `jax.jit`, `jax.grad` and optimizers as a
    tuple would. Structure, shapes and dtypes are the same on all ranks. (`PerRank` is something
    else: the stacked arrays of simulated ranks.)

    Attributes:
      per_rank: any pytree.

    >>> import jax, jaxmpi
    >>> run = {"step": 0, "key": PerRankState(jaxmpi.rank_key(jax.random.key(0)))}
    >>> key, noise_key = jax.random.split(run["key"].per_rank)
    >>> run["key"] = PerRankState(key)
    """

    def __init__(self, per_rank: PyTree) -> None:
        self.per_rank = per_rank

    def __repr__(self) -> str:
        return f"PerRankState({self.per_rank!r})"

    def tree_flatten_with_keys(self) -> tuple[tuple[tuple[MarkKey, PyTree]], None]:
        return ((MarkKey(PER_RANK), self.per_rank),), None

    def tree_flatten(self) -> tuple[tuple[PyTree], None]:
        return (self.per_rank,), None

    @classmethod
    def tree_unflatten(cls, _: None, children: Sequence[PyTree]) -> "PerRankState":
        return cls(*children)


def per_rank_variables() -> tuple[type, ...]:
    """The types of nnx variables that are per rank: batch statistics first, metrics, PRNG keys."""
    nnx = sys.modules.get("flax.nnx")  # who has a variable has imported it
    return (nnx.BatchStat, nnx.metrics.MetricState, nnx.RngState) if nnx is not None else ()


def is_variable(x: object) -> bool:
    """Whether this is a variable of `flax.nnx`, which is a pytree node with one child, and a leaf for nnx."""
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(x, nnx.Variable)


def flatten_with_path(
    tree: PyTree, is_leaf: Callable[[PyTree], bool] | None = None
) -> tuple[list[tuple[KeyPath, Any]], PyTreeDef]:
    """`jax.tree_util.tree_flatten_with_path`, with a mark in the paths of nnx variables that are each rank's own.

    Whatever asks which ranks have a leaf takes the paths from here: those of `jax.tree_util` do
    not tell the type of a variable.
    """
    paths, treedef = jax.tree_util.tree_flatten_with_path(tree, is_leaf)
    kinds = per_rank_variables()
    if not kinds:
        return paths, treedef
    found = []
    nodes, _ = jax.tree_util.tree_flatten_with_path(
        tree, lambda x: isinstance(x, kinds) or (is_leaf is not None and is_leaf(x))
    )
    for path, node in nodes:
        if not isinstance(node, kinds):
            found.append((path, node))
            continue
        mark = STATISTIC if isinstance(node, kinds[0]) else VARIABLE
        for rest, leaf in jax.tree_util.tree_leaves_with_path(node, is_leaf):
            found.append(((*path, MarkKey(mark), *rest), leaf))
    return found, treedef


def mark_of(key: KeyEntry) -> Mark | None:
    """The mark in a key: of a field, or of what nnx has made of a field."""
    name = (
        getattr(key, "name", None)
        if isinstance(key, jax.tree_util.GetAttrKey)
        else getattr(key, "key", None)
    )
    return name if isinstance(name, Mark) else None


def marks_of(path: KeyPath) -> list[Mark]:
    """The marks in the path of a leaf, from the outside to the inside."""
    return [mark for mark in map(mark_of, path) if mark is not None]


def is_own(path: KeyPath) -> bool:
    """Whether each rank has its own value of the leaf at this path of `flatten_with_path`."""
    marks = marks_of(path)
    in_state = any(mark.state for mark in marks)  # then the state says it, of its shards too
    return any(mark.per_rank for mark in marks if not (in_state and mark.of is not None))


def in_shard(path: KeyPath) -> bool:
    """Whether the leaf at this path is the shard of a `ShardedArray` of the user's."""
    return shard_axis(path) is not None


def shard_axis(path: KeyPath) -> str | tuple[str, ...] | None:
    """The axis over which the user's `ShardedArray` at this path is cut; None where there is none.

    Those in a `ShardedState` are none of the user's: `sharded` may do with them what looks at whole
    arrays.
    """
    marks = marks_of(path)
    if any(mark.state for mark in marks):
        return None
    return next((mark.axis for mark in marks if mark.of is not None), None)


def leaf_name(path: KeyPath) -> str:
    """The name of the leaf at this path, for errors."""
    keys = tuple(key if (mark := mark_of(key)) is None else MarkKey(mark) for key in path)
    return jax.tree_util.keystr(keys) or "the argument"


def output_name(path: KeyPath) -> str:
    """Name the leaf at this path of what a function returns, for errors: "output ['x']", or "the output"."""
    return f"output {leaf_name(path)}" if path else "the output"


def is_key(x: HasDtype) -> bool:
    """Whether an array holds PRNG keys."""
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def as_array(function: str, path: KeyPath, leaf: object, op: str | None) -> jax.Array:
    """The leaf as a JAX array, or a TypeError that names it.

    Args:
      function: the caller, for the error.
      path: of the leaf, from `tree_flatten_with_path`.
      leaf: anything.
      op: the reduction that it is for; None where it only moves.

    Raises:
      TypeError: it is no array of numbers, or has no such reduction.
      OverflowError: as `check_fits`.
    """
    name = leaf_name(path)
    check_fits(function, path, leaf)
    if not isinstance(leaf, jax.Array | np.ndarray | np.generic | bool | int | float | complex):
        raise TypeError(
            f"{function}: leaf {name} is a {type(leaf).__name__}, not an array. Take it out of the "
            "tree."
        )
    dtype = leaf.dtype if isinstance(leaf, jax.Array) else np.asarray(leaf).dtype
    if dtype == jax.dtypes.float0:  # the gradients of integers: they hold nothing
        return leaf  # type: ignore[return-value]
    if (
        not isinstance(leaf, jax.Array)
        and dtype != np.bool_
        and not jnp.issubdtype(dtype, jnp.number)
    ):
        raise TypeError(
            f"{function}: leaf {name} has dtype {dtype}, which JAX does not know. Convert it to "
            "numbers."
        )
    if str(dtype) in ("int1", "uint1"):
        raise TypeError(
            f"{function}: leaf {name} has dtype {dtype}, which XLA takes for booleans. Cast it to "
            "int2 or to bool."
        )
    try:
        # `jnp.asarray` would return an array as it is, after checks that take a third of an eager
        # call; of what is traced, it makes an array where the number behind it is none (`jax.grad`
        # of a Python float)
        if isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer):
            x = leaf
        else:
            x = jnp.asarray(
                leaf
                if getattr(dtype, "isnative", True)
                else np.asarray(leaf, dtype.newbyteorder("="))
            )
    except (TypeError, ValueError, OverflowError, jax.errors.JaxRuntimeError) as error:
        raise TypeError(
            f"{function}: leaf {name} is {dtype}, which JAX cannot hold: {error}"
        ) from error
    if op is not None and is_key(x):
        raise TypeError(
            f"{function}: leaf {name} is a PRNG key, which cannot be reduced. Use tree_bcast or "
            "tree_allgather."
        )
    if op not in (None, "max", "min") and dtype == jnp.bool_:
        raise TypeError(
            f"{function}: leaf {name} is bool, which has no {op}. Cast it to a number, or use op "
            "'max' or 'min'."
        )
    if op in ("max", "min") and jnp.issubdtype(dtype, jnp.complexfloating):
        raise TypeError(
            f"{function}: leaf {name} is {dtype}, which has no order. Reduce its real and "
            "imaginary parts."
        )
    return x


def check_fits(function: str, path: KeyPath, leaf: object) -> None:
    """Raise an OverflowError if a number of Python or NumPy is too large for the dtype that JAX gives it.

    Without `jax_enable_x64`, JAX makes 32 bits of 64, and an integer beyond 2³¹ another number
    without a word.
    """
    if not isinstance(leaf, np.ndarray | np.generic | int | float | complex):
        return
    host = np.asarray(leaf)
    if isinstance(leaf, int) and host.dtype == object:  # beyond 64 bits
        kind, wrong = jax.dtypes.canonicalize_dtype(int), leaf
    elif host.dtype.kind in "iufc" and host.size:
        kind = jax.dtypes.canonicalize_dtype(
            int if isinstance(leaf, int) and host.dtype.kind in "iu" else host.dtype
        )
        if kind == host.dtype:
            return
        if host.dtype.kind in "iu":
            limits = np.iinfo(kind)
            outside = (host < limits.min) | (host > limits.max)
        else:
            with np.errstate(over="ignore"):
                outside = np.isfinite(host) & ~np.isfinite(host.astype(kind))
        if not outside.any():
            return
        wrong = host[outside].reshape(-1)[0].item()
    else:
        return
    remedy = "pass a float, or " if np.issubdtype(kind, np.integer) else ""
    raise OverflowError(
        f"{function}: leaf {leaf_name(path)} is {wrong}, which {kind} cannot hold. To keep it, "
        f"{remedy}set the option "
        "jax_enable_x64 (JAX_ENABLE_X64=1) on every rank."
    )


def widest(*values: Any) -> np.dtype:
    """Return the dtype for sums of arrays, numbers or dtypes: that of the widest, 32 bits at least.

    The choice is made here, so it does not depend on `jax_numpy_dtype_promotion`, which is for the
    arithmetic of the user.
    """
    with jax.numpy_dtype_promotion("standard"):
        return np.dtype(jnp.result_type(jnp.float32, *values))


def check_rows(function: str, path: KeyPath, x: jax.Array, size: int) -> None:
    """Raise a ValueError that names the leaf unless its first axis is the ranks."""
    if x.ndim == 0 or x.shape[0] != size:
        raise (RankCountError if x.ndim else ValueError)(
            f"{function}: leaf {leaf_name(path)} has shape {list(x.shape)}, and its first axis "
            f"must be the {size} ranks. "
            f"Reshape it to [{size}, ...]."
        )
