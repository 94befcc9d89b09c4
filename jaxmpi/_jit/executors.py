"""How several ranks run a program: they compare what they are about to do before it, or its own messages do."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from threading import current_thread, get_ident, main_thread

import jax

from jaxmpi._backends.base import ProcessGroup
from jaxmpi._consistency import compare, values
from jaxmpi._jit import first_call
from jaxmpi._jit.arguments import check_arguments
from jaxmpi._jit.cache import Programs
from jaxmpi._jit.compile_once import compile_alone, compile_once
from jaxmpi._jit.function import Function, Leaf
from jaxmpi._jit.jitted import Jitted, NewProgramError
from jaxmpi._jit.program import Program
from jaxmpi._leaves import PyTree

__all__ = ["ComparesBefore", "ComparesInline", "Executor"]

EXPECTED = (jax.errors.JaxRuntimeError, ValueError, TypeError)  # where JAX meets an error of ours first


class Executor(ABC):
    """Runs the programs of one function."""

    def __init__(self, function: Function, options: Mapping[str, object], backend: ProcessGroup, jitted: Jitted) -> None:
        self._function, self._backend, self._jitted = function, backend, jitted
        self._programs = Programs(function, backend, _flat_options(options), jitted.announce)
        self._turn, self._ends, self._concurrent = backend.turn, backend.ends, backend.concurrent
        self._checks, self._new = values.wanted(), True

    def __call__(self, args: Sequence[PyTree], kwargs: dict[str, PyTree]) -> PyTree:
        """Call the function on all ranks."""
        first = None
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
        self, program: Program, compiled: Callable[..., PyTree], args: Sequence[PyTree], kwargs: dict[str, PyTree]
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
    def _run(self, args: Sequence[PyTree], kwargs: dict[str, PyTree], first: tuple[Program, bool] | None) -> PyTree:
        """Run the program; `first` is it, at its first call, and whether the ranks see it for the first time."""

    @abstractmethod
    def _started(self, program: Program, call: Callable[[], PyTree]) -> PyTree:
        """What `call` returns, which starts the program without an output of ours to wait for."""

    def _first(self, program: Program, leaves: Sequence[Leaf]) -> None:
        """Before the first call of a program that communicates, and before each one that does not until then."""
        if program.statement and get_ident() != self._turn.thread:
            self._turn.take()
        first_call.compare(self._backend, program, leaves)
        program.carried = None  # which holds all of it
        self._new = not program.statement  # at last: what is above may raise

    def _is_unseen(self, program: Program) -> bool:
        """Whether the ranks come to such a program for the first time, all of them, and share what is compiled."""
        statement = program.statement
        return bool(self._jitted.shares and statement and not compare.has_run(self._backend, statement.fingerprint))

    def _compare_values(self, args: Sequence[PyTree], kwargs: dict[str, PyTree]) -> Callable[[PyTree], PyTree] | None:
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


class ComparesInline(Executor):
    """The program's own messages compare it. Each line of `_run` is one that a step of 1 ms notices."""

    def _run(self, args: Sequence[PyTree], kwargs: dict[str, PyTree], first: tuple[Program, bool] | None) -> PyTree:
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
                end, out = jitted.with_end(*args, **kwargs)
            self._ends[thread] = end
            if jitted.traced:  # an error is likelier in a first call than later, and raised here it has its own class
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
        """Take the turn to communicate for this thread; a program that sends nothing does not need it.

        The first turn of the main thread is taken without a look at the program, which would be traced for that alone.
        """
        first = not self._turn.thread and current_thread() is main_thread()
        if first or self._programs.find(args, kwargs)[0].statement:
            self._turn.take()

    def _compile(self, program: Program, unseen: bool, args: Sequence[PyTree], kwargs: dict[str, PyTree]) -> None:
        """Compile a new program; the ranks agree before on one that they have not seen, as its own messages come too late."""
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


class ComparesBefore(Executor):
    """The ranks compare their programs before each call."""

    def _run(self, args: Sequence[PyTree], kwargs: dict[str, PyTree], first: tuple[Program, bool] | None) -> PyTree:
        program, run, leaves, numbers = self._programs.find(args, kwargs)
        if not program.statement:  # what sends nothing may run on any rank alone
            return run(leaves)[1]
        signature, unseen = program.signature, self._is_unseen(program)
        compare.check_consistent(self._backend, signature.of_call(numbers), partial(signature.details, numbers))
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


def _flat_options(options: Mapping[str, object]) -> dict[str, object]:
    """The options of `jax.jit` that don't speak of arguments or outputs."""
    about_arguments = ("static_argnums", "static_argnames", "donate_argnums", "donate_argnames")
    if shardings := [name for name in options if name.endswith("shardings")]:
        raise NotImplementedError(
            f"jaxmpi.jit: {shardings[0]} is not supported on several ranks, where every array is on its rank's one device. "
            "Leave it out."
        )
    return {name: value for name, value in options.items() if name not in about_arguments}
