"""A function under `jax.jit`, whose body builds the program for its arguments while JAX traces.

`jax.jit` traces the body, and so builds a program, once for each set of argument types.
"""

import sys
from collections.abc import Callable, Sequence
from functools import update_wrapper

import jax

from jaxmpi import _jaxcompat
from jaxmpi._backends.interface import Ranks
from jaxmpi._consistency import compare
from jaxmpi._jit.analyze import declared_outputs
from jaxmpi._jit.compile_once import shares
from jaxmpi._jit.first_call import must_compare_arguments
from jaxmpi._jit.function import Function, checked
from jaxmpi._jit.program import Program, build_program, refuse_nan_search, watched
from jaxmpi._job.process import settings
from jaxmpi._leaves import PyTree
from jaxmpi._lowering.explain import table
from jaxmpi._lowering.refuse import with_clear_errors
from jaxmpi._lowering.trace import is_local

__all__ = ["Jitted", "NewProgramError"]


class NewProgramError(Exception):
    """Raised to leave a trace with a program that the ranks must first compile, or compare."""

    def __init__(self, program: Program) -> None:
        super().__init__(program.function.title)
        self.program = program


def _none(args: Sequence[PyTree], kwargs: dict[str, PyTree]) -> None:
    """Return None: the program of several ranks is never what `jax.jit` traces."""


class Jitted:
    """A function with these options of `jax.jit`, on one backend.

    Attributes:
      plain: the function under `jax.jit`.
      with_end: returns `(end, outputs)`; `end` is an array to wait for, which no caller donates.
      nested: like `plain`, for callers that are traced; they see the effects of its collectives.
      shares: whether the ranks share what they compile.
      next_program: a program that is already built, for the next trace; used once.
      traced_program: the program of the last trace of `with_end`.
    """

    def __init__(self, function: Function, options: dict[str, object], backend: Ranks) -> None:
        self._function, self._backend = function, backend
        self._alone = len(backend.ranks_here) == backend.place.size
        self.shares = not self._alone and shares(backend)
        self.next_program: Program | None = None
        self.traced_program: Program | None = None
        self.plain = jax.jit(self._body(hide_effects=True), **options)
        self.with_end = jax.jit(self._body(hide_effects=True, end=True), **options)
        self.nested = jax.jit(self._body(hide_effects=False), **options)
        self._local = jax.jit(with_clear_errors(watched(function), backend.axes), **options)

    def build(
        self, args: Sequence[PyTree], kwargs: dict[str, PyTree], *, hide_effects: bool = True
    ) -> Program:
        """Return the program for these arguments: `next_program` if there is one."""
        program, self.next_program = self.next_program, None
        if program and hide_effects:
            return program
        return build_program(self._function, args, kwargs, self._backend, hide_effects=hide_effects)

    def trace_local(
        self, args: Sequence[PyTree], kwargs: dict[str, PyTree]
    ) -> jax.stages.Traced | None:
        """Return the function as plain `jax.jit` traces it, if that is its program; else None.

        That is so on one rank, if nothing in the function has to do with ranks. Otherwise the next
        `build` uses the jaxpr that was traced here.
        """
        trace = self._backend.eager(alone=self._trace_alone, stacked=_none, parallel=_none)
        return trace(args, kwargs)

    def _trace_alone(
        self, args: Sequence[PyTree], kwargs: dict[str, PyTree]
    ) -> jax.stages.Traced | None:
        """Do what `trace_local` does, on one rank."""
        function, backend = self._function, self._backend
        axes = _jaxcompat.binding_axes(backend.axes)
        if axes is None or settings.get("JAXMPI_EXPLAIN"):
            return None
        checked(function, args, kwargs, backend)
        with axes:
            stage = self._local.trace(*args, **kwargs)
        declared_outputs(function, stage.out_tree)  # raises what it raises on several ranks
        jaxpr = _jaxcompat.closed(stage)
        if jaxpr is not None and is_local(jaxpr):
            return stage
        if jaxpr is not None:
            self.next_program = build_program(
                function, args, kwargs, backend, hide_effects=True, traced=(jaxpr, stage.out_tree)
            )
        return None

    def announce(self, program: Program, *, show: bool = True) -> None:
        """Register a new program for errors and the monitor, and print its table.

        The table is printed on rank 0 if JAXMPI_EXPLAIN is set. With `show` False it is not
        printed, and a later call announces the program again.
        """
        if program.announced:
            return
        program.announced = show
        if program.compared_call and not self._alone:
            compare.register_program(
                self._backend,
                program.compared_call,
                program.signature.sent,
                program.signature.details,
            )
            if program.numbers is not None:
                self._backend.registry.numbers[program.numbers.tag] = program.numbers
        if show and settings.get("JAXMPI_EXPLAIN") and self._backend.place.rank == 0:
            sys.stderr.write(table(program.function.title, program.entries, self._backend))

    def _body(self, *, hide_effects: bool, end: bool = False) -> Callable[..., PyTree]:
        """Return the function that `jax.jit` traces, with the user's name and signature.

        Args:
          hide_effects: as in `lower.build`.
          end: whether it returns `(end, outputs)`.
        """

        def body(*args: PyTree, **kwargs: PyTree) -> PyTree:
            if not self._alone:
                refuse_nan_search(self._function.title)
            program = self.build(args, kwargs, hide_effects=hide_effects)
            must_compile = self.shares and program.compared_call and not program.compiled_once
            must_compare = not self._alone and must_compare_arguments(self._backend, program)
            # `jax.disable_jit` compiles nothing, and runs this body at every call.
            if end and (must_compile or must_compare) and not jax.config.jax_disable_jit:
                raise NewProgramError(program)
            self.announce(program, show=self._alone or end)
            self.traced_program = None
            leaves = self._function.leaves(args, kwargs)
            outs = program(leaves)
            self.traced_program = program if end else None
            return (program.end(leaves), outs) if end else outs

        return update_wrapper(body, self._function.fun, updated=())
