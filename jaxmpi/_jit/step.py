"""`Step`: the callable that `jaxmpi.jit` returns, and its stages `trace`, `lower`, `compile`."""

from collections.abc import Callable
from functools import partial, update_wrapper
from types import MethodType
from typing import Any, TypeAlias

import jax

from jaxmpi import _axis, _jaxcompat
from jaxmpi._backends.interface import Processes, Ranks
from jaxmpi._jit.executor import ComparesBefore, ComparesInline, Executor
from jaxmpi._jit.function import Function, check_arguments
from jaxmpi._jit.jitted import Jitted
from jaxmpi._jit.program import Program
from jaxmpi._job.process.garbage import collection_paused
from jaxmpi._leaves import PyTree
from jaxmpi._world import session

__all__ = ["Compiled", "Lowered", "Step", "Traced"]


# Stages like those of `jax.stages`; the ranks compare a `Compiled` at each call


Run: TypeAlias = Callable[[Callable[..., PyTree], tuple[PyTree, ...], dict[str, PyTree]], PyTree]


class _Stage:
    """A stage of `jax.stages`, with all attributes of JAX's stage.

    Args:
      stage: the stage of JAX.
      run: calls a compiled program, as `run(compiled, args, kwargs)`.
    """

    def __init__(
        self, stage: jax.stages.Traced | jax.stages.Lowered | jax.stages.Compiled, run: Run
    ) -> None:
        self._stage, self._run = stage, run

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stage, name)


class Traced(_Stage):
    """Result of `Step.trace`: a `jax.stages.Traced` whose `lower` returns a `Lowered`.

    Args:
      stage: the stage of JAX.
      run: as in `_Stage`.
      lowered_to: is called with the `jax.stages.Lowered` before it is compiled.
    """

    def __init__(
        self, stage: jax.stages.Traced, run: Run, lowered_to: Callable[[jax.stages.Lowered], None]
    ) -> None:
        super().__init__(stage, run)
        self._lowered_to = lowered_to

    def lower(self, *args: object, **kwargs: object) -> "Lowered":
        """Lower it; nothing is sent."""
        with collection_paused():
            lowered = self._stage.lower(*args, **kwargs)
        return Lowered(lowered, self._run, self._lowered_to)


class Lowered(_Stage):
    """Result of `Step.lower`: a `jax.stages.Lowered` whose `compile` returns a `Compiled`.

    The arguments are those of `Traced`.
    """

    def __init__(
        self, stage: jax.stages.Lowered, run: Run, lowered_to: Callable[[jax.stages.Lowered], None]
    ) -> None:
        super().__init__(stage, run)
        self._lowered_to = lowered_to

    def compile(self, *args: object, **kwargs: object) -> "Compiled":
        """Compile it; nothing is sent."""
        self._lowered_to(self._stage)
        return Compiled(self._stage.compile(*args, **kwargs), self._run)


class Compiled(_Stage):
    """Result of `Lowered.compile`: a `jax.stages.Compiled` that the ranks compare at each call."""

    def __call__(self, *args: PyTree, **kwargs: PyTree) -> PyTree:
        """Run the program; the ranks compare it before or meanwhile.

        Raises:
          RankMismatchError: the ranks would send different messages.
        """
        return self._run(self._stage, args, kwargs)


# The callable


class Step:
    """A function that `jaxmpi.jit` has wrapped."""

    def __init__(self, function: Function, options: dict[str, object]) -> None:
        self._function, self._options = function, options
        self._backend: Ranks | None = None
        self._executor: Executor | None = None  # None if this process holds all ranks
        # Copy the name and signature, but not the attributes: `fun` may be another Step.
        update_wrapper(self, function.fun, updated=())

    def __call__(self, *args: PyTree, **kwargs: PyTree) -> PyTree:
        """Call the function on all ranks."""
        if session.current("jaxmpi.jit") is not self._backend:
            self._rebuild()
        if not _jaxcompat.at_top_level():
            return self._nested()(*args, **kwargs)
        if self._executor is None:
            return self._plain(*args, **kwargs)
        return self._executor(args, kwargs)

    def __get__(self, instance: object, owner: object = None) -> "Step | MethodType":
        # A Step in a class is a method: it gets `self`.
        return self if instance is None else MethodType(self, instance)

    def lower(self, *args: PyTree, **kwargs: PyTree) -> Lowered:
        """Lower the function, as `jax.jit(fun).lower`; neither this nor `compile` communicates."""
        return self.trace(*args, **kwargs).lower()

    def trace(self, *args: PyTree, **kwargs: PyTree) -> Traced:
        """Trace the program that this backend runs, as `jax.jit(fun).trace`."""
        self._rebuild()
        with collection_paused():
            if (stage := self._jitted.trace_local(args, kwargs)) is not None:
                return Traced(stage, partial(self._run_compiled, None), lambda _: None)
            args, kwargs = self._wrapped(args, kwargs)
            # `build` may take the program that `trace_local` has left in `next_program`. Hand the
            # same one on to the trace below.
            self._jitted.next_program = program = self._jitted.build(args, kwargs)
            try:
                stage = self._plain.trace(*args, **kwargs)
            finally:
                self._jitted.next_program = None  # unused if JAX has the trace in its cache
        return Traced(stage, partial(self._run_compiled, program), program.lowered_to)

    def eval_shape(self, *args: PyTree, **kwargs: PyTree) -> PyTree:
        """Return shapes and dtypes of the outputs, as `jax.jit(fun).eval_shape`."""
        self._rebuild()
        return self._plain.eval_shape(*args, **kwargs)

    def clear_cache(self) -> None:
        """Drop all compiled programs."""
        self._backend = self._executor = None

    def program(self, *args: PyTree, **kwargs: PyTree) -> Program:
        """Return the program of a call with these arguments; nothing is sent or compiled."""
        self._rebuild()
        return self._jitted.build(*self._wrapped(args, kwargs))

    def _rebuild(self) -> None:
        """Rebuild the jitted function if the active backend changed."""
        backend = session.current("jaxmpi.jit")
        if backend is self._backend:
            return
        backend.check_process()
        self.clear_cache()  # so that after an error below, the next call tries again
        self._jitted = Jitted(self._function, self._options, backend)
        self._plain = self._jitted.plain
        self._executor = backend.executor(
            inline=partial(self._executor_of, ComparesInline),
            before=partial(self._executor_of, ComparesBefore),
        )
        self._backend = backend  # last, because another thread may be in `__call__`

    def _executor_of(self, executor: type[Executor], ranks: Processes) -> Executor:
        return executor(ranks, function=self._function, options=self._options, jitted=self._jitted)

    def _nested(self) -> Callable[..., PyTree]:
        """Return the function for a caller that is traced itself."""
        if _axis.bound():  # inside of another jaxmpi.jit, which lowers the collectives of both
            return jax.jit(self._function.fun, **self._options)
        backend = self._backend
        assert backend is not None
        if backend.place.size == 1:
            return self._jitted.nested  # with derivatives
        # The caller may contain other programs. Their effects keep the messages in order, on
        # transports that have effects; others refuse.
        return backend.transport.nested(
            self._jitted.nested, self._function.api, self._function.title
        )

    def _run_compiled(
        self,
        program: Program | None,
        compiled: Callable[..., PyTree],
        args: tuple[PyTree, ...],
        kwargs: dict[str, PyTree],
    ) -> PyTree:
        """Run a compiled program of `trace`, on one process or several."""
        args, kwargs = self._wrapped(args, kwargs)
        if self._executor is None or program is None:
            return compiled(*args, **kwargs)
        return self._executor.run_compiled(program, compiled, args, kwargs)

    def _wrapped(
        self, args: tuple[PyTree, ...], kwargs: dict[str, PyTree]
    ) -> tuple[tuple[PyTree, ...], dict[str, PyTree]]:
        """Return the arguments with arrays as programs of the backend take them.

        Raises:
          TypeError, ValueError: an argument that no program can have, with its name.
        """
        backend = self._backend
        assert backend is not None
        arrays = self._function.dynamic(args, kwargs)
        try:
            wrapped = backend.transport.arrays.wrap_tree(arrays)
        except (TypeError, ValueError):
            check_arguments(self._function, args, kwargs)  # raises an error with the name
            raise
        if wrapped is arrays:
            return args, kwargs
        return self._function.with_arrays(wrapped, args, kwargs)
