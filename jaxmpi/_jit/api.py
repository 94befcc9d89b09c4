"""`jaxmpi.jit`: a function of a rank's arrays, for one rank, many or simulated ones."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias, TypeVar

import jax
import numpy as np
from jax.tree_util import PyTreeDef

from jaxmpi import _jaxcompat
from jaxmpi._consistency.compare import raising_on_all
from jaxmpi._consistency.eager_calls import EagerCalls
from jaxmpi._consistency.findings import allowed_names
from jaxmpi._jit.function import Function, Leaf, choose_arguments, is_per_rank
from jaxmpi._jit.step import Step
from jaxmpi._leaves import PyTree
from jaxmpi._world import session

__all__ = ["anywhere", "compiled", "describe", "eager", "jit", "local"]

T = TypeVar("T")
# of a tree: its structure, which leaves are arrays, and the other leaves (None for arrays)
Structure: TypeAlias = tuple[PyTreeDef, tuple[bool, ...], tuple[object, ...]]


def jit(
    fun: Callable[..., PyTree] | None = None,
    *,
    replicated_argnums: int | Sequence[int] = (),
    replicated_outnums: int | Sequence[int] = (),
    allow: str | Sequence[str] = (),
    **jit_kwargs: Any,
) -> Any:
    """Compile a function of one rank's arrays, with the ranks as the named axis `jaxmpi.AXIS`.

    Inside, `jaxmpi.tree_*`, `lax.psum`, `pmean`, `pmax`, `pmin`, `psum_scatter`, `all_gather`,
    `all_to_all`, `ppermute` and `axis_index` over the axis, and code that takes an axis name, such
    as Flax's BatchNorm, communicate: in branches, loops, `vmap`, `jax.checkpoint` and custom
    derivatives, too. Collectives that don't depend on each other travel together. On one rank it is
    `jax.jit`.

    **Collective:** every rank calls the function, with arguments that lead to the same collectives,
    in one order; each collective runs whether its result is used or not. The ranks compare their
    programs. On the xla backend all ranks run one program: shapes, constants and arrays from
    outside must be equal, too. **Communication:** the messages that `jaxmpi.explain` lists, and the
    comparison. On the native transport the comparison travels with the program's first message; if
    all messages are in branches, it is a message of 16 bytes at the first call, and later travels
    with the next message. On the other transports, and for a program with messages within groups
    that may not begin with a message to all ranks, it is a message of 16 bytes at every call.
    The first call of each program also compares the state that must be equal on all ranks, by a
    message of 16 bytes, unless JAXMPI_CHECK is 0.

    Args:
      fun: the function; a decorator is returned without it.
      replicated_argnums: positions of arguments that are equal on all ranks, such as parameters and
        optimizer state. All other arguments count as different.
      replicated_outnums: positions in the returned tuple that must be equal on all ranks; 0 for a
        result that is no tuple. The ranks compare the computation from the last reduction to these
        outputs, such as a learning rate.
      allow: names of checks to turn off for this function, such as "forgotten_mean"; the text of a
        finding tells its name.
      **jit_kwargs: keyword arguments of `jax.jit`.

    Returns:
      The jitted function, with `lower`, `trace` and `eval_shape` as in `jax.jit`.

    Raises:
      RankMismatchError: when called, on every rank, if the ranks would send different messages; if
        state that a mean updates differs before the first call of a program, or a number such as a
        learning rate while they train, with the path and the ranks.
      ValueError: when traced, if an output of `replicated_outnums` may differ between the ranks,
        with its path; if a branch or loop with a collective depends on a value that may differ,
        with its source line; if the function changes an nnx object in place and does not return
        it: use `jaxmpi.nn.jit` for that.
      NotImplementedError: when traced, for a collective that is not supported where it is, with its
        source line.

    >>> import jax, jaxmpi
    >>> step = jaxmpi.jit(lambda x: jax.lax.pmean(x, jaxmpi.AXIS))
    >>> float(step(3.0))
    3.0
    """
    if fun is None:
        return partial(
            jit,
            replicated_argnums=replicated_argnums,
            replicated_outnums=replicated_outnums,
            allow=allow,
            **jit_kwargs,
        )
    function = describe(fun, replicated_argnums, replicated_outnums, jit_kwargs)
    return Step(replace(function, allowed=allowed_names("jaxmpi.jit", allow)), jit_kwargs)


def describe(
    fun: Callable[..., PyTree],
    argnums: int | Sequence[int],
    outnums: int | Sequence[int],
    jit_kwargs: Mapping[str, Any],
) -> Function:
    """Return a function with its static, donated and replicated arguments and outputs.

    Args:
      fun: the function.
      argnums: `replicated_argnums` of `jit`.
      outnums: `replicated_outnums` of `jit`.
      jit_kwargs: keyword arguments of `jax.jit`, with the static and donated arguments.
    """
    static = choose_arguments(
        fun, jit_kwargs.get("static_argnums"), jit_kwargs.get("static_argnames")
    )
    donated = choose_arguments(
        fun, jit_kwargs.get("donate_argnums"), jit_kwargs.get("donate_argnames")
    )
    outputs = (outnums,) if isinstance(outnums, int) else tuple(outnums)
    return Function(fun, static, donated, choose_arguments(fun, argnums, ()), outputs)


def local(tree: PyTree) -> PyTree:
    """Return this rank's shards of global arrays, for use outside of `jaxmpi.jit`.

    On the xla backend `jaxmpi.jit` returns global arrays. They can be printed, converted and passed
    to it again; but JAX refuses to add them to an array that is committed to a device, and plain
    `jax.jit` would run on all ranks with them. On the other backends the tree is returned as it is.
    Nothing is copied.

    Args:
      tree: any pytree.

    Returns:
      The same pytree, of arrays on this rank's device.
    """
    return session.current("local").transport.arrays.local(tree)


def eager(
    fun: Callable[..., T], name: str, *, sends: bool = False, **jit_kwargs: object
) -> Callable[..., T]:
    """Return a function of jaxmpi as a step, for eager calls.

    **Collective:** if the function communicates.

    Args:
      fun: the function.
      name: the name in errors.
      sends: whether it always communicates. Then an error on one rank, such as for its arguments,
        is raised on all ranks.
      **jit_kwargs: keyword arguments of `jax.jit`.

    Returns:
      The function; it returns arrays of this rank, on every backend.
    """
    fun.__name__ = name
    step = Step(replace(describe(fun, (), (), jit_kwargs), calls=EagerCalls()), jit_kwargs)

    def call(*args: PyTree) -> T:
        backend = session.current(name)  # for an error that names the function
        if not sends:
            return local(step(*args))
        with raising_on_all(backend, name):
            return local(step(*args))

    return call


def anywhere(fun: Callable[..., T], name: str, *, sends: bool = False) -> Callable[..., T]:
    """Return a function that may be called in a traced step, or eagerly as a step by itself.

    Call this once for each function: the result holds the compiled programs. On one rank, an eager
    call is a plain call of `fun`.

    Args:
      fun: the function.
      name: the name in errors.
      sends: as in `eager`.
    """
    step = eager(fun, name, sends=sends)

    def call(*args: PyTree) -> T:
        backend = session.current(name)
        if _jaxcompat.tracing():
            return fun(*args)
        return backend.eager(alone=fun, stacked=step, parallel=step)(*args)

    return call


def compiled(fun: Callable[..., T], name: str) -> Callable[..., T]:
    """Return a function like that of `anywhere`, which is compiled on one rank, too.

    That is for functions with loops and branches, which are slow without compilation. Leaves of the
    arguments that are no arrays are constants of the step; they must be hashable.

    Args:
      fun: the function.
      name: the name in errors.
    """
    step = eager(lambda structure, arrays: fun(*_joined(structure, arrays)), name, static_argnums=0)

    def call(*args: PyTree) -> T:
        if _jaxcompat.tracing():
            return fun(*args)
        leaves, treedef = jax.tree.flatten(args, is_leaf=is_per_rank)
        arrays = [
            isinstance(x, jax.Array | np.ndarray | np.generic) or is_per_rank(x) for x in leaves
        ]
        constants = tuple(
            None if is_array else x for x, is_array in zip(leaves, arrays, strict=True)
        )
        array_leaves = [x for x, is_array in zip(leaves, arrays, strict=True) if is_array]
        return step((treedef, tuple(arrays), constants), array_leaves)

    return call


def _joined(structure: Structure, array_leaves: Sequence[Leaf]) -> tuple[PyTree, ...]:
    """Return the arguments whose arrays are `array_leaves`."""
    treedef, arrays, constants = structure
    left = iter(array_leaves)
    return treedef.unflatten(
        [next(left) if is_array else x for is_array, x in zip(arrays, constants, strict=True)]
    )
