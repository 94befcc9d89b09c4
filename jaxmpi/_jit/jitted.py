"""A function under `jax.jit`: whenever JAX traces it, its program for these arguments is built."""

import sys
from collections.abc import Callable, Sequence
from functools import update_wrapper

import jax
import jax.numpy as jnp

from jaxmpi import _jaxcompat
from jaxmpi._backends.interface import Ranks
from jaxmpi._consistency import compare
from jaxmpi._jit.compile_once import shares
from jaxmpi._jit.function import Function, checked
from jaxmpi._jit.program import Program, build_program, refuse_nan_search, watched
from jaxmpi._job.process import settings
from jaxmpi._leaves import PyTree
from jaxmpi._lowering.explain import table
from jaxmpi._lowering.refuse import explained
from jaxmpi._lowering.trace import is_local

__all__ = ["Jitted", "NewProgramError"]


class NewProgramError(Exception):
    """Raised in a trace, in the place of a program that is to be compiled outside of it."""

    def __init__(self, program: Program) -> None:
        super().__init__(program.function.title)
        self.program = program


def _none(args: Sequence[PyTree], kwargs: dict[str, PyTree]) -> None:
    """Return None: the program of several ranks is never what `jax.jit` traces."""


class Jitted:
    """A function with these options of `jax.jit`, on one backend.

    Attributes:
      plain: what `jax.jit` returns for it.
      with_end: the same with another output before the function's: one that nobody can donate, to
        wait for.
      nested: the same as `plain`, for callers that are traced: they see the effects of its
        collectives.
      shares: whether the ranks share what they compile.
      ready: a program that the trace that comes next takes.
      traced: that of the last trace of `with_end`.
    """

    def __init__(self, function: Function, options: dict[str, object], backend: Ranks) -> None:
        self._function, self._backend = function, backend
        self._alone = len(backend.ranks_here) == backend.place.size
        self.shares = not self._alone and shares(backend)
        self.ready: Program | None = None
        self.traced: Program | None = None
        self.plain = jax.jit(self._body(hide=True), **options)
        self.with_end = jax.jit(self._body(hide=True, end=True), **options)
        self.nested = jax.jit(self._body(hide=False), **options)
        self._local = jax.jit(explained(watched(function), backend.axes), **options)

    def build(
        self, args: Sequence[PyTree], kwargs: dict[str, PyTree], *, hide: bool = True
    ) -> Program:
        """Return the program for these arguments."""
        ready, self.ready = self.ready, None
        return (
            ready
            if ready and hide
            else build_program(self._function, args, kwargs, self._backend, hide=hide)
        )

    def trace_local(
        self, args: Sequence[PyTree], kwargs: dict[str, PyTree]
    ) -> jax.stages.Traced | None:
        """Return the function as `jax.jit` traces it, where that is its program; else None.

        It is on one rank, if nothing in it has to do with ranks. Otherwise `build` takes what was
        traced.
        """
        trace = self._backend.eager(alone=self._trace_alone, stacked=_none, parallel=_none)
        return trace(args, kwargs)

    def _trace_alone(
        self, args: Sequence[PyTree], kwargs: dict[str, PyTree]
    ) -> jax.stages.Traced | None:
        function, backend = self._function, self._backend
        axes = _jaxcompat.binding_axes(backend.axes)
        if axes is None or settings.get("JAXMPI_EXPLAIN"):
            return None
        checked(function, args, kwargs, backend)
        with axes:
            stage = self._local.trace(*args, **kwargs)
        jaxpr = _jaxcompat.closed(stage)
        if jaxpr is not None and is_local(jaxpr):
            return stage
        if jaxpr is not None:
            self.ready = build_program(
                function, args, kwargs, backend, hide=True, traced=(jaxpr, stage.out_tree)
            )
        return None

    def announce(self, program: Program, *, show: bool = True) -> None:
        """Keep what a new program sends, for an error, and print it where that is asked for."""
        if program.announced:
            return
        program.announced = show
        if program.statement and not self._alone:
            compare.register_program(
                self._backend,
                program.statement,
                program.signature.sent,
                program.signature.details,
            )
        if show and settings.get("JAXMPI_EXPLAIN") and self._backend.place.rank == 0:
            sys.stderr.write(table(program.function.title, program.entries, self._backend))

    def _body(self, *, hide: bool, end: bool = False) -> Callable[..., PyTree]:
        """Return the function that `jax.jit` traces, with the user's name and signature."""

        def body(*args: PyTree, **kwargs: PyTree) -> PyTree:
            if not self._alone:
                refuse_nan_search(self._function.title)
            program = self.build(args, kwargs, hide=hide)
            new = self.shares and program.statement and not program.compiled_once
            # jax.disable_jit compiles nothing, and runs this body at every call
            if end and new and not jax.config.jax_disable_jit:
                raise NewProgramError(program)
            self.announce(program, show=self._alone or end)
            self.traced = program if end else None
            outs = program(self._function.leaves(args, kwargs))
            return (jnp.zeros((), jnp.bool_), outs) if end else outs

        return update_wrapper(body, self._function.fun, updated=())
