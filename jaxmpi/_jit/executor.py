"""Executor: runs a program on several ranks, with one of two ways to compare it."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from threading import get_ident

import jax

from jaxmpi._backends.interface import Processes
from jaxmpi._consistency import compare, values
from jaxmpi._jit import first_call
from jaxmpi._jit.arguments import check_arguments
from jaxmpi._jit.cache import Programs
from jaxmpi._jit.function import Function, Leaf
from jaxmpi._jit.jitted import Jitted
from jaxmpi._jit.program import Program
from jaxmpi._leaves import PyTree

__all__ = ["EXPECTED", "Executor"]

# where JAX meets an error of ours first
EXPECTED = (jax.errors.JaxRuntimeError, ValueError, TypeError)


class Executor(ABC):
    """Runs the programs of one function."""

    def __init__(
        self,
        backend: Processes,
        *,
        function: Function,
        options: Mapping[str, object],
        jitted: Jitted,
    ) -> None:
        self._function, self._backend, self._jitted = function, backend, jitted
        self._programs = Programs(
            function, backend, _flat_options(function.api, options), jitted.announce
        )
        self._turn, self._ends, self._concurrent = backend.turn, backend.ends, backend.concurrent
        self._checks, self._new = values.wanted(), True
        self._calls = function.calls
        if self._calls is not None:
            self._calls.clear()  # those on another backend

    def __call__(self, args: Sequence[PyTree], kwargs: dict[str, PyTree]) -> PyTree:
        """Call the function on all ranks."""
        first = None
        if self._calls is not None:
            self._calls.begin(self._ends)
        if self._new:
            program, run, leaves, _ = self._programs.find(args, kwargs)
            first = program, self._is_unseen(program)
            self._first(program, leaves)
            if not program.statement:  # what sends nothing may run on any rank alone
                return run(leaves)[1]
        check = self._compare_values(args, kwargs) if self._checks else None
        out = self._run(args, kwargs, first)
        if not self._concurrent:
            jax.block_until_ready(out)
        return out if check is None else check(out)

    def run_compiled(
        self,
        program: Program,
        compiled: Callable[..., PyTree],
        args: Sequence[PyTree],
        kwargs: dict[str, PyTree],
    ) -> PyTree:
        """Run what was compiled ahead of time, of this program; the ranks compare it before, or while it runs."""
        if program.statement and get_ident() != self._turn.thread:
            self._turn.take()
        try:
            out = self._started(program, partial(compiled, *args, **kwargs))
            self._note_run(program)
            return out
        except EXPECTED as error:
            self._explain(error, args, kwargs)
            raise

    @abstractmethod
    def _run(
        self, args: Sequence[PyTree], kwargs: dict[str, PyTree], first: tuple[Program, bool] | None
    ) -> PyTree:
        """Run the program; `first` is it, at its first call, and whether the ranks see it for the first time."""

    @abstractmethod
    def _started(self, program: Program, call: Callable[[], PyTree]) -> PyTree:
        """Return the result of `call`, which starts the program without an output to wait for."""

    def _first(self, program: Program, leaves: Sequence[Leaf]) -> None:
        """Compare arguments before the first call of a communicating program.

        Until one comes, before every call.
        """
        if program.statement and get_ident() != self._turn.thread:
            self._turn.take()
        first_call.compare(self._backend, program, leaves)
        program.carried, program.fed = None, ()  # the first holds all of the program
        self._new = not program.statement  # at last: what is above may raise

    def _is_unseen(self, program: Program) -> bool:
        """Return whether ranks share executables and have not yet agreed on this fingerprint."""
        statement = program.statement
        return bool(
            self._jitted.shares
            and statement
            and not compare.has_run(self._backend, statement.fingerprint)
        )

    def _compare_values(
        self, args: Sequence[PyTree], kwargs: dict[str, PyTree]
    ) -> Callable[[PyTree], PyTree] | None:
        """Compare what is to be equal on the ranks, before the program; return what does it after."""
        program, _, leaves, _ = self._programs.find(args, kwargs)
        if not program.statement:
            return None
        compare.check_consistent(self._backend, program.statement, program.signature.details)
        title, (before, after) = self._function.title, program.equal
        values.compare(self._backend, title, program.arguments, leaves, before)

        def check(out: PyTree) -> PyTree:
            values.compare(self._backend, title, program.outputs, jax.tree.leaves(out), after)
            return out

        return check

    def _note_run(self, program: Program) -> None:
        program.carried = None
        if program.statement:
            compare.note_run(self._backend, program.statement.fingerprint)

    def _explain(self, error: Exception, args: Sequence[PyTree], kwargs: dict[str, PyTree]) -> None:
        """Raise our own error where JAX has met it first."""
        compare.raise_mismatch(self._backend, error)
        check_arguments(self._function, args, kwargs)


def _flat_options(api: str, options: Mapping[str, object]) -> dict[str, object]:
    """Return the options of `jax.jit` that are not about arguments or outputs."""
    about_arguments = ("static_argnums", "static_argnames", "donate_argnums", "donate_argnames")
    if shardings := [name for name in options if name.endswith("shardings")]:
        raise NotImplementedError(
            f"{api}: {shardings[0]} is not supported on several ranks, where each rank has one "
            "device. Leave it out."
        )
    return {name: value for name, value in options.items() if name not in about_arguments}
