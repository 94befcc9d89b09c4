"""The programs of one function that were compiled so far, found by the kinds of their arguments."""

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import jax
from jax.tree_util import PyTreeDef

from jaxmpi._backends.interface import Ranks
from jaxmpi._jit.arguments import wrapped
from jaxmpi._jit.build import build_program
from jaxmpi._jit.function import Function, Leaf
from jaxmpi._jit.program import Program, Run
from jaxmpi._leaves import PyTree

__all__ = ["Programs"]

Found = tuple[Program, Run, list[Leaf], list[str]]  # what runs it, and the arguments as below
# the structure and the key of the calls that it is for
Known: TypeAlias = tuple[Program, Run, PyTreeDef, tuple[object, ...]]


class Programs:
    """The programs of a function on one backend, compiled with these options of `jax.jit`; the last used is tried first."""

    def __init__(
        self,
        function: Function,
        backend: Ranks,
        options: Mapping[str, object],
        announce: Callable[[Program], None],
    ) -> None:
        self._function, self._backend, self._options = function, backend, options
        self._announce = announce  # called with each new one
        self._all: list[Known] = []

    def find(self, args: Sequence[PyTree], kwargs: dict[str, PyTree]) -> Found:
        """The program for these arguments, what runs it, the arrays for it, and `Program.numbers`; nothing is sent."""
        return self._last(args, kwargs) or self._any(args, kwargs)

    def _last(self, args: Sequence[PyTree], kwargs: dict[str, PyTree]) -> Found | None:
        """The program of the last call, if it is that of these arguments, too."""
        if not self._all:
            return None
        program, run, structure, key = self._all[0]
        try:  # quicker than to flatten anything
            given = structure.flatten_up_to(self._function.dynamic(args, kwargs))
            leaves = self._backend.transport.arrays.wrap(given)
        except (ValueError, TypeError, AttributeError):
            return None
        if key != self._function.key(leaves, args, kwargs):
            return None
        return program, run, leaves, program.numbers(given)

    def _any(self, args: Sequence[PyTree], kwargs: dict[str, PyTree]) -> Found:
        """Find the program for any arguments, tracing it if it is new, and make it the last one."""
        given, structure = jax.tree.flatten(self._function.dynamic(args, kwargs))
        leaves = wrapped(self._function, args, kwargs, given, self._backend)
        key = self._function.key(leaves, args, kwargs)
        for i, (program, run, its_structure, its_key) in enumerate(self._all):
            if its_structure == structure and its_key == key:
                self._all.insert(0, self._all.pop(i))
                return program, run, leaves, program.numbers(given)
        program = build_program(self._function, args, kwargs, self._backend, hide=True)
        run = program.compiled(self._options, leaves)
        self._announce(program)
        self._all.insert(0, (program, run, structure, key))
        return program, run, leaves, program.numbers(given)
