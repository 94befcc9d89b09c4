"""Faults on purpose: what becomes of a training loop when one rank fails in it.

step = jaxmpi.testing.faults.inject(step, "kill", rank=1, call=3)
"""

import os
import signal
import sys
import time
from collections.abc import Callable
from functools import wraps
from typing import Any, NoReturn, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxmpi._leaves import PyTree
from jaxmpi._world import session

__all__ = ["KINDS", "inject"]

P = ParamSpec("P")
T = TypeVar("T")


def inject(
    function: Callable[P, T],
    kind: str,
    *,
    rank: int = 0,
    call: int = 0,
    seconds: float = 1.0,
    argnum: int = -1,
) -> Callable[P, T]:
    """The function with a fault in one call of it, on one rank. It is for what `jaxmpi.jit` returns, not for what it takes.

    | kind | at this call, on this rank |
    |---|---|
    | "raise" | a RuntimeError is raised |
    | "exit" | `sys.exit(0)`, as of a script that ends too soon; "exit 3" exits with 3 |
    | "kill", "stop" | the process gets SIGKILL, SIGSTOP |
    | "delay" | it sleeps for `seconds` |
    | "nan" | the first number of the first float array in argument `argnum` is NaN |
    | "flip" | one bit of that number is another |
    | "shape", "dtype" | that array has a row less; is int32 |
    | "extra" | the function is called twice |
    | "missing" | it is not called; the result is that of the call before |
    | "recompile" | JAX forgets all that it has compiled |

    Args:
      function: a step, or any function that every rank calls.
      kind: one of the above.
      rank: on which rank.
      call: at which call, counted from 0.
      seconds: for "delay".
      argnum: the position of an argument; the last by default, often the batch.

    Returns:
      A function to call in its place, on every rank.

    Raises:
      ValueError: an unknown kind, or when called: no such argument, or one without a float array; a
        first call that is missing.

    >>> import jax.numpy as jnp
    >>> inject(lambda x: x, "nan", call=0)(jnp.ones(2))
    Array([nan,  1.], dtype=float32)
    """
    if kind not in KINDS:
        raise ValueError(f"inject: kind {kind!r} is unknown. Use one of {', '.join(KINDS)}.")
    calls = 0
    last: Any = None

    @wraps(function)
    def faulty(*args: Any, **kwargs: Any) -> T:
        nonlocal calls, last
        due = calls == call and session.current("inject").place.rank == rank
        calls += 1
        if due and kind == "missing":
            if not call:
                raise ValueError(
                    "inject: the first call cannot be missing, as it needs a result. Take a later "
                    "one."
                )
            return last
        if due and kind == "extra":
            function(*args, **kwargs)
        elif due and kind in _CHANGES:
            if not -len(args) <= argnum < len(args):
                raise ValueError(
                    f"inject: there are {len(args)} positional arguments, and argnum is {argnum}."
                )
            changed = list(args)
            changed[argnum] = _change(args[argnum], kind)
            args = tuple(changed)
        elif due:
            _EVENTS[kind](seconds)
        last = function(*args, **kwargs)
        return last

    return faulty


def _raise(_: float) -> NoReturn:
    raise RuntimeError("a fault on purpose")


def _kill(number: int) -> Callable[[float], None]:
    return lambda _: os.kill(os.getpid(), number)


_EVENTS: dict[str, Callable[[float], object]] = {
    "raise": _raise,
    "exit": lambda _: sys.exit(0),
    "exit 3": lambda _: sys.exit(3),
    "kill": _kill(signal.SIGKILL),
    "stop": _kill(signal.SIGSTOP),
    "delay": time.sleep,
    "recompile": lambda _: jax.clear_caches(),
}


def _flip(x: np.ndarray) -> np.ndarray:
    bits = x.reshape(-1).view(np.uint8).copy()
    bits[0] ^= 1
    return bits.view(x.dtype).reshape(x.shape)


def _nan(x: np.ndarray) -> np.ndarray:
    flat = x.reshape(-1).copy()
    flat[0] = np.nan
    return flat.reshape(x.shape)


_CHANGES: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "nan": _nan,
    "flip": _flip,
    "shape": lambda x: x[:-1],
    "dtype": lambda x: x.astype(np.int32),
}

KINDS = (*_EVENTS, *_CHANGES, "extra", "missing")


def _change(arg: PyTree, kind: str) -> PyTree:
    leaves, treedef = jax.tree.flatten(arg)
    for i, x in enumerate(leaves):
        isfloat = (
            isinstance(x, jax.Array | np.ndarray)
            and jnp.issubdtype(x.dtype, jnp.floating)
            and x.size
        )
        if isfloat and (x.ndim or kind != "shape"):
            changed = _CHANGES[kind](np.array(x))
            leaves[i] = changed if isinstance(x, np.ndarray) else jnp.asarray(changed)
            return treedef.unflatten(leaves)
    raise ValueError(
        "inject: the argument has no float array to change. Name another one with argnum."
    )
