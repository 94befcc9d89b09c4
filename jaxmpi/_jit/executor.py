"""Executors: run a program on several ranks, with one of two ways to compare it.

On the native transport the program's own messages compare it (`ComparesInline`); on any other one
the ranks compare a program before each call (`ComparesBefore`). Both find it among the programs of
the function by the shapes and dtypes of the arguments (`Programs`).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from threading import current_thread, get_ident, main_thread
from typing import TypeAlias

import jax
from jax.tree_util import PyTreeDef

from jaxmpi import _jaxcompat
from jaxmpi._backends.interface import Processes, Ranks
from jaxmpi._consistency import compare, values
from jaxmpi._jit import first_call
from jaxmpi._jit.compile_once import compile_alone, compile_once
from jaxmpi._jit.function import Function, Leaf, check_arguments, wrapped
from jaxmpi._jit.jitted import Jitted, NewProgramError
from jaxmpi._jit.program import Program, Run, build_program
from jaxmpi._leaves import PyTree

__all__ = ["EXPECTED", "ComparesBefore", "ComparesInline", "Executor", "Programs"]


# The programs of a function


Found = tuple[Program, Run, list[Leaf], list[str]]  # what runs it, and the arguments as below
# the structure and the key of the calls that it is for
Known: TypeAlias = tuple[Program, Run, PyTreeDef, tuple[object, ...]]


class Programs:
    """Programs of a function on one backend, of which the last used is tried first."""

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
        """Return the program for these arguments, what runs it, its arrays, and `Program.numbers`.

        Nothing is sent.
        """
        return self._last(args, kwargs) or self._any(args, kwargs)

    def _last(self, args: Sequence[PyTree], kwargs: dict[str, PyTree]) -> Found | None:
        """Return the program of the last call, if it is that of these arguments, too."""
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


# What both executors do


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
        """Run a program that was compiled ahead of time, and compare it before or meanwhile."""
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
        """Run the program of a call.

        At its first call, `first` is the program, and whether the ranks have not run it before.
        """

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
        program.divergence, program.fed = None, ()  # the first holds all of the program
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
        """Compare arguments that must be equal, and return what compares the outputs."""
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
        program.divergence = None
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


# Messages that compare their program


class ComparesInline(Executor):
    """Runs programs whose own messages compare them.

    A step of 1 ms notices each line of `_run`.
    """

    def _run(
        self, args: Sequence[PyTree], kwargs: dict[str, PyTree], first: tuple[Program, bool] | None
    ) -> PyTree:
        jitted = self._jitted
        if (thread := get_ident()) != self._turn.thread:
            self._take_turn(args, kwargs)
        jitted.ready = first and first[0]  # for the trace of this call alone
        try:
            if first and jitted.shares:
                self._compile(*first, args, kwargs)
            new = None
            try:
                end, out = jitted.with_end(*args, **kwargs)
            except NewProgramError as found:
                new = found.program
            if new:
                self._compile(new, self._is_unseen(new), args, kwargs)
                _jaxcompat.dispatch_in_c(jitted.with_end)
                end, out = jitted.with_end(*args, **kwargs)
            self._ends[thread] = end
            # an error is likelier in a first call than later, and raised here it has its own class
            if jitted.traced:
                program, jitted.traced = jitted.traced, None
                jax.block_until_ready(end)
                self._note_run(program)
        except EXPECTED as error:
            self._explain(error, args, kwargs)
            raise
        return out

    def _started(self, program: Program, call: Callable[[], PyTree]) -> PyTree:
        return jax.block_until_ready(call())

    def _take_turn(self, args: Sequence[PyTree], kwargs: dict[str, PyTree]) -> None:
        """Take the turn to communicate for this thread, if the program sends anything.

        The first turn of the main thread is taken without a look at the program, which would be
        traced for that alone.
        """
        first = not self._turn.thread and current_thread() is main_thread()
        if first or self._programs.find(args, kwargs)[0].statement:
            self._turn.take()

    def _compile(
        self, program: Program, unseen: bool, args: Sequence[PyTree], kwargs: dict[str, PyTree]
    ) -> None:
        """Compile a new program.

        The ranks agree before on one that they have not seen: its own messages come too late.
        """
        self._jitted.ready, program.compiled_once = program, True  # for the trace of `lower`
        lower, title = partial(self._jitted.with_end.lower, *args, **kwargs), self._function.title
        if not unseen:
            compile_alone(self._backend, title, lower())
            return
        statement = program.statement
        assert statement is not None
        self._jitted.announce(program)
        compare.check_consistent(self._backend, statement, program.signature.details)
        compare.note_run(self._backend, statement.fingerprint)
        compile_once(self._backend, title, lower)


# A comparison before each call


class ComparesBefore(Executor):
    """The ranks compare their programs before each call."""

    def _run(
        self, args: Sequence[PyTree], kwargs: dict[str, PyTree], first: tuple[Program, bool] | None
    ) -> PyTree:
        program, run, leaves, numbers = self._programs.find(args, kwargs)
        if not program.statement:  # what sends nothing may run on any rank alone
            return run(leaves)[1]
        signature, unseen = program.signature, self._is_unseen(program)
        compare.check_consistent(
            self._backend, signature.of_call(numbers), partial(signature.details, numbers)
        )
        self._note_run(program)
        if unseen:
            compile_once(self._backend, self._function.title, partial(program.lower, leaves))
        elif self._jitted.shares and not program.compiled_once:
            compile_alone(self._backend, self._function.title, program.lower(leaves))
        program.compiled_once = True
        with self._backend.starting() as keep:
            end, out = run(leaves)
            keep(end)
        return out

    def _started(self, program: Program, call: Callable[[], PyTree]) -> PyTree:
        if program.statement:
            compare.check_consistent(self._backend, program.statement, program.signature.details)
        with self._backend.starting() if program.statement else nullcontext():
            out = call()
        return out if self._concurrent else jax.block_until_ready(out)
