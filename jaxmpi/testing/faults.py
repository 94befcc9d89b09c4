"""Fault injection: make one rank fail in one call, to test how a training loop ends.

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
    """Return a function that fails in one call on one rank, and else calls `function`.

    Apply it to the result of `jaxmpi.jit`, not to the function that `jaxmpi.jit` wraps.

    | kind | at this call, on this rank |
    |---|---|
    | "raise" | a RuntimeError is raised |
    | "exit" | `sys.exit(0)`, like a script that ends too soon; "exit 3" exits with 3 |
    | "kill", "stop" | the process gets SIGKILL, SIGSTOP |
    | "delay" | the rank sleeps for `seconds` |
    | "nan" | the first number of the first float array in argument `argnum` is NaN |
    | "flip" | one bit of that number is flipped |
    | "shape", "dtype" | that array has one row less; is int32 |
    | "extra" | the function is called twice |
    | "missing" | the function is not called; the result is that of the previous call |
    | "recompile" | JAX drops all compiled programs |

    Args:
      function: a step, or any function that every rank calls.
      kind: one of the above.
      rank: the rank that fails.
      call: the call in which it fails, counted from 0.
      seconds: for "delay".
      argnum: the position of an argument; by default the last one, often the batch.

    Returns:
      A function to call instead of `function`, on every rank.

    Raises:
      ValueError: the kind is unknown. When called: there is no such argument, it has no float
        array, or the first call is to be missing.

    >>> import jax.numpy as jnp
    >>> inject(lambda x: x, "nan", call=0)(jnp.ones(2))
    Array([nan,  1.], dtype=float32)
    """
    if kind not in KINDS:
        raise ValueError(f"inject: kind {kind!r} is unknown. Use one of {', '.join(KINDS)}.")
    calls = 0
    previous: Any = None  # the result of the previous call

    @wraps(function)
    def faulty(*args: Any, **kwargs: Any) -> T:
        nonlocal calls, previous
        due = calls == call and session.current("inject").place.rank == rank
        calls += 1
        if due and kind == "missing":
            if not call:
                raise ValueError(
                    "inject: the first call cannot be missing, as it needs a result. Take a later "
                    "one."
                )
            return previous
        if due and kind == "extra":
            function(*args, **kwargs)
        elif due and kind in _CHANGES:
            if not -len(args) <= argnum < len(args):
                advice = "Pass it by its position."
                if args:
                    advice = f"Name one from 0 to {len(args) - 1}."
                raise ValueError(
                    f"inject: there are {len(args)} positional arguments, and argnum is {argnum}. "
                    f"{advice}"
                )
            changed = list(args)
            changed[argnum] = _change(args[argnum], kind)
            args = tuple(changed)
        elif due:
            _EVENTS[kind](seconds)
        previous = function(*args, **kwargs)
        return previous

    return faulty


def _raise(_: float) -> NoReturn:
    raise RuntimeError("a fault on purpose")


def _signal(number: int) -> Callable[[float], None]:
    return lambda _: os.kill(os.getpid(), number)


# Faults of the rank, called with `seconds`.
_EVENTS: dict[str, Callable[[float], object]] = {
    "raise": _raise,
    "exit": lambda _: sys.exit(0),
    "exit 3": lambda _: sys.exit(3),
    "kill": _signal(signal.SIGKILL),
    "stop": _signal(signal.SIGSTOP),
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


# Faults of an argument: the float array that is passed instead.
_CHANGES: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "nan": _nan,
    "flip": _flip,
    "shape": lambda x: x[:-1],
    "dtype": lambda x: x.astype(np.int32),
}

KINDS = (*_EVENTS, *_CHANGES, "extra", "missing")


def _change(arg: PyTree, kind: str) -> PyTree:
    """Change the first float array of an argument."""
    leaves, treedef = jax.tree.flatten(arg)
    for i, x in enumerate(leaves):
        if not isinstance(x, jax.Array | np.ndarray) or not x.size:
            continue
        if not jnp.issubdtype(x.dtype, jnp.floating):
            continue
        if kind == "shape" and not x.ndim:  # a scalar has no rows
            continue
        changed = _CHANGES[kind](np.array(x))
        leaves[i] = changed if isinstance(x, np.ndarray) else jnp.asarray(changed)
        return treedef.unflatten(leaves)
    raise ValueError(
        "inject: the argument has no float array to change. Name another one with argnum."
    )
