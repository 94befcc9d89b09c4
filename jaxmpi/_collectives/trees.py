"""Collectives on pytrees.

All are pure functions: eagerly, under `jit`, `grad`, `vmap`, `scan`, `cond` and `while_loop`. A
leaf is a JAX or NumPy array or a Python number and comes back as a JAX array of the same dtype;
PRNG keys move but cannot be reduced. `None` and empty containers are structure and send nothing.
"""

from jaxmpi._axis import AXIS, Axis
from jaxmpi._backends.base import Collective
from jaxmpi._collectives import arrays
from jaxmpi._collectives.tree_calls import Operation, call_on_tree
from jaxmpi._leaves import PyTree

__all__ = [
    "Caller",
    "tree_allgather",
    "tree_allreduce",
    "tree_alltoall",
    "tree_bcast",
    "tree_reduce",
    "tree_reduce_scatter",
]


def tree_allreduce(tree: PyTree, op: str = "mean", *, axis: Axis = AXIS) -> PyTree:
    """Reduce a pytree over all ranks; every rank gets the result.

    out = (1/p) · Σ_r tree_r for "mean", leaf by leaf; p = size. The mean of integers is their sum
    divided by p and rounded down (`//`). Floats below 32 bits, and for the mean integers, too, are
    summed in 32 bits and rounded once; wider integers wrap as NumPy's do. One case rounds more
    often: between nodes of several ranks, or more than 8 nodes, the native transport sends the
    parts of a mean of 16-bit floats in 16 bits. Sums and means of integers of Python and NumPy are
    exact, called eagerly, or raise; a leaf is such an integer on all ranks or on none.

    **Collective:** every rank calls it, with the same structure, shapes, dtypes and op.
    **Communication:** about 2 (p-1)/p · bytes sent per rank. On the native transport all leaves
    share one message; on mpi4jax small leaves of one dtype share a message, large ones go alone.

    Args:
      tree: any pytree of arrays and numbers.
      op: "mean", "sum", "max", "min" or "prod". Booleans take "max" (or) and "min" (and) only.
      axis: the name of an axis of `init(axes=...)`, or a tuple of several: the ranks of each group
        along it reduce theirs. All ranks, `jaxmpi.AXIS`, by default. Shards of `fully_shard` may be
        reduced over other axes than their own.

    Returns:
      A pytree of JAX arrays, equal on all ranks, or on all of a group.

    Raises:
      ValueError: an unknown op, or axis.
      TypeError: a leaf that cannot be reduced so, with its path.
      OverflowError: a number of Python or NumPy, or a sum of such integers, that does not fit the
        dtype of JAX, with its path; without `jax_enable_x64` that has 32 bits.

    >>> tree_allreduce({"loss": 2.0}, op="sum")
    {'loss': Array(2., dtype=float32, weak_type=True)}
    """
    return Caller("tree_allreduce").allreduce(tree, op, axis=axis)


def tree_bcast(tree: PyTree, root: int = 0, *, axis: Axis = AXIS) -> PyTree:
    """Give every rank the pytree of rank `root`.

    out = tree_root. For parameters and optimizer states `synchronize` is the safe way: it checks
    the structure first.

    **Collective:** every rank calls it, with the same structure, shapes, dtypes and root.
    **Communication:** that of a sum of as many bytes, `tree_allreduce(tree, "sum")`: the other
    ranks add zeros. Under plain `jax.jit`, mpi4jax sends each leaf's bytes once, from root.

    Args:
      tree: any pytree of arrays, numbers and PRNG keys.
      root: the rank whose values count. With `axis`, its number within each group, from 0.
      axis: the axis of the ranks, as in `tree_allreduce`.

    Returns:
      A pytree of JAX arrays, equal on all ranks, or on all of a group.

    Raises:
      ValueError: root is not a rank, or of no group; an unknown axis.
      TypeError: a leaf that is no array, with its path; a root that is no Python int.

    >>> tree_bcast({"w": jnp.ones(2)}, root=0)
    {'w': Array([1., 1.], dtype=float32)}
    """
    bcast = Collective("bcast", root=root)
    operation = Operation("tree_bcast", arrays.move, (("call", bcast),), axis, root=root)
    return call_on_tree(operation, tree)


def tree_reduce(tree: PyTree, op: str = "mean", root: int = 0, *, axis: Axis = AXIS) -> PyTree:
    """Reduce a pytree over all ranks onto rank `root`; the other ranks get their own tree back.

    out_root = (1/p) · Σ_r tree_r for "mean"; out_r = tree_r for r ≠ root.

    **Collective:** every rank calls it, with the same structure, shapes, dtypes, op and root.
    **Communication:** that of `tree_allreduce`.

    Args:
      tree: any pytree of arrays and numbers.
      op: the reduction, as in `tree_allreduce`.
      root: the rank that gets the result. With `axis`, its number within each group, from 0.
      axis: the axis of the ranks, as in `tree_allreduce`.

    Returns:
      A pytree of JAX arrays: the result on root, and `tree` elsewhere.

    Raises:
      ValueError: an unknown op or axis, or root is not a rank.
      TypeError: a leaf that cannot be reduced so, with its path; a root that is no Python int.
      OverflowError: as `tree_allreduce`.

    >>> tree_reduce(jnp.array([1.0, 2.0]), "max")
    Array([1., 2.], dtype=float32)
    """
    options = (("op", op), ("root", root))
    operation = Operation("tree_reduce", arrays.reduce, options, axis, op, root)
    return call_on_tree(operation, tree)


def tree_allgather(tree: PyTree, *, axis: Axis = AXIS, tiled: bool = False) -> PyTree:
    """Stack all ranks' pytrees: each leaf `[...]` becomes `[size, ...]`, in the order of the ranks.

    out[r] = tree_r.

    **Collective:** every rank calls it, with the same structure, shapes and dtypes.
    **Communication:** about (p-1) · bytes received per rank.

    Args:
      tree: any pytree of arrays, numbers and PRNG keys.
      axis: the axis of the ranks, as in `tree_allreduce`; then size is that of a group, and r
        counts its ranks.
      tiled: as in `jax.lax.all_gather`: the ranks' arrays are joined along their first axis, so
        that a leaf `[n, ...]` becomes `[size · n, ...]`, without a new axis.

    Returns:
      A pytree of JAX arrays, equal on all ranks, or on all of a group.

    Raises:
      ValueError: an unknown axis; a leaf without an axis, where they are to be joined, with its
        path.
      TypeError: a leaf that is no array, with its path.

    >>> tree_allgather(jnp.array([1.0, 2.0]), tiled=True)
    Array([1., 2.], dtype=float32)
    """
    caller = Caller("tree_allgather")
    return caller.allgather_tiled(tree, axis=axis) if tiled else caller.allgather(tree, axis=axis)


def tree_reduce_scatter(tree: PyTree, op: str = "mean", *, axis: Axis = AXIS) -> PyTree:
    """Reduce over all ranks and keep this rank's part: each leaf `[size, ...]` becomes `[...]`.

    out_q = (1/p) · Σ_r tree_r[q] for "mean". `tree_allgather` of the result is `tree_allreduce` of
    the input.

    **Collective:** every rank calls it, with the same structure, shapes, dtypes and op.
    **Communication:** about (p-1)/p · bytes sent per rank.

    Args:
      tree: a pytree of arrays whose first axis is the ranks.
      op: the reduction, as in `tree_allreduce`.
      axis: the axis of the ranks, as in `tree_allgather`.

    Returns:
      A pytree of JAX arrays, row q on rank q.

    Raises:
      ValueError: an unknown op or axis, or a leaf whose first axis is not size, with its path.
      TypeError: a leaf that cannot be reduced so, with its path.
      OverflowError: as `tree_allreduce`.

    >>> tree_reduce_scatter(jnp.ones((jaxmpi.size(), 2)), "sum")
    Array([1., 1.], dtype=float32)
    """
    return Caller("tree_reduce_scatter").reduce_scatter(tree, op, axis=axis)


def tree_alltoall(tree: PyTree, *, axis: Axis = AXIS) -> PyTree:
    """Send row q of every leaf to rank q: `[size, ...]` stays `[size, ...]`.

    out_q[r] = tree_r[q], a transposition of ranks and rows.

    **Collective:** every rank calls it, with the same structure, shapes and dtypes.
    **Communication:** (p-1)/p · bytes sent per rank.

    Args:
      tree: a pytree of arrays whose first axis is the ranks.
      axis: the axis of the ranks, as in `tree_allgather`.

    Returns:
      A pytree of JAX arrays, row r from rank r.

    Raises:
      ValueError: an unknown axis, or a leaf whose first axis is not size, with its path.
      TypeError: a leaf that is no array, with its path.

    >>> tree_alltoall(jnp.ones((jaxmpi.size(), 2)))
    Array([[1., 1.]], dtype=float32)
    """
    return Caller("tree_alltoall").alltoall(tree, axis=axis)


class Caller:
    """Collectives on pytrees on behalf of another function of jaxmpi.

    Errors and the comparison of the ranks name that function, so that a rank that calls it is not
    taken for one that calls `tree_allreduce` with arrays of the same shapes.

    Attributes:
      function: its name, such as "local_sgd".
    """

    def __init__(self, function: str) -> None:
        self.function = function

    def allreduce(self, tree: PyTree, op: str = "mean", *, axis: Axis = AXIS) -> PyTree:
        """Reduce a pytree as `tree_allreduce` does."""
        operation = Operation(self.function, arrays.allreduce, (("op", op),), axis, op)
        return call_on_tree(operation, tree)

    def allgather(self, tree: PyTree, *, axis: Axis = AXIS) -> PyTree:
        """Stack the ranks' pytrees as `tree_allgather` does."""
        options = (("call", Collective("allgather")),)
        return call_on_tree(Operation(self.function, arrays.move, options, axis), tree)

    def allgather_tiled(self, tree: PyTree, *, axis: Axis = AXIS) -> PyTree:
        """Join the ranks' pytrees as `tree_allgather(tiled=True)` does."""
        return call_on_tree(Operation(self.function, arrays.join, axis=axis), tree)

    def alltoall(self, tree: PyTree, *, axis: Axis = AXIS) -> PyTree:
        """Send rows to the ranks as `tree_alltoall` does."""
        options = (("call", Collective("alltoall")),)
        return call_on_tree(Operation(self.function, arrays.move, options, axis, rows=True), tree)

    def reduce_scatter(self, tree: PyTree, op: str = "mean", *, axis: Axis = AXIS) -> PyTree:
        """Reduce a pytree and keep a part as `tree_reduce_scatter` does."""
        options = (("op", op),)
        operation = Operation(self.function, arrays.reduce_scatter, options, axis, op, rows=True)
        return call_on_tree(operation, tree)
