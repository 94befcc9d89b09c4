"""Warning about a `jax.pmap` on several ranks, whose collectives reach no other rank."""

import warnings

from jaxmpi import _axis, _jaxcompat
from jaxmpi._world import session

__all__ = ["notice_pmaps"]


def notice_pmaps() -> None:
    """Warn about calls of `jax.pmap` from now on, once for each line that makes one."""
    _jaxcompat.watch_pmap(_warn)


def _warn() -> None:
    """Warn on rank 0 about the call that runs now, if JAX does not know the other ranks."""
    # `jaxmpi.jit` refuses it itself
    if _axis.bound() or (here := session.ranks_unknown_to_jax()) is None:
        return
    frame = _jaxcompat.caller()
    file, line = frame.f_code.co_filename, frame.f_lineno
    if here.place.rank or not session.is_first_pmap(f"{file}:{line}"):
        return
    warnings.warn_explicit(
        f"jax.pmap, called at {_jaxcompat.caller_line()}, maps over the device of this rank "
        f"alone: its collectives do not reach the others of {here.place.size} ranks. Use "
        "jaxmpi.pmap, or, where that is meant, warnings.filterwarnings('ignore', 'jax.pmap').",
        UserWarning,
        file,
        line,
        module=frame.f_globals.get("__name__"),
    )
