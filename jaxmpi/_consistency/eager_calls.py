"""Source lines of the eager calls of a function of jaxmpi, for reports.

One compiled program serves all calls with arguments of one kind, and JAX knows only the line of
the first of them.
"""

import os
from collections import deque
from itertools import pairwise
from threading import get_ident
from types import CodeType
from typing import Any

from jaxmpi import _jaxcompat

__all__ = ["EagerCalls"]

CALLS = 64  # more than JAX runs at once


class EagerCalls:
    """Last calls of one function, with the user's line of each."""

    def __init__(self) -> None:
        # for each call: an output of the program that its thread had started before it, the user's
        # code, and the position in the code
        self._calls: deque[tuple[Any, CodeType, int]] = deque(maxlen=CALLS)

    def begin(self, ends: dict[int, Any]) -> None:
        """Note a call that begins.

        Args:
          ends: an output of the last program that each thread has started.
        """
        frame = _jaxcompat.caller()
        # Finding the line takes as long as the rest of this, and it is rarely needed.
        self._calls.append((ends.get(get_ident()), frame.f_code, frame.f_lasti))

    def clear(self) -> None:
        """Forget the calls."""
        self._calls.clear()

    def line(self) -> str:
        """Return "file:line" of the call whose program runs; "" if there is none.

        That may be an earlier call than the last one.
        """
        calls = [*self._calls]  # at once: another thread may add to it
        # Programs run in the order of the calls: a call's has ended if a program has that was
        # started before the next call.
        for call, (end, _, _) in pairwise(calls):
            if end is not None and not end.is_ready():
                return _shown(call)
        return _shown(calls[-1]) if calls else ""

    def lines(self) -> list[str]:
        """Return the lines of the last calls, each once, the latest first."""
        return [*dict.fromkeys(map(_shown, reversed([*self._calls])))]


def _shown(call: tuple[Any, CodeType, int]) -> str:
    _, code, instruction = call
    line = next(line for begin, end, line in code.co_lines() if begin <= instruction < end)
    return f"{os.path.basename(code.co_filename)}:{line}"
