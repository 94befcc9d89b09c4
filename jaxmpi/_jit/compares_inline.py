"""Run a program whose messages compare it themselves: the native transport."""

from collections.abc import Callable, Sequence
from functools import partial
from threading import current_thread, get_ident, main_thread

import jax

from jaxmpi import _jaxcompat
from jaxmpi._consistency import compare
from jaxmpi._jit.compile_once import compile_alone, compile_once
from jaxmpi._jit.executor import EXPECTED, Executor
from jaxmpi._jit.jitted import NewProgramError
from jaxmpi._jit.program import Program
from jaxmpi._leaves import PyTree

__all__ = ["ComparesInline"]


class ComparesInline(Executor):
    """The program's own messages compare it. Each line of `_run` is one that a step of 1 ms notices."""

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
        """Take the turn to communicate for this thread; a program that sends nothing does not need it.

        The first turn of the main thread is taken without a look at the program, which would be
        traced for that alone.
        """
        first = not self._turn.thread and current_thread() is main_thread()
        if first or self._programs.find(args, kwargs)[0].statement:
            self._turn.take()

    def _compile(
        self, program: Program, unseen: bool, args: Sequence[PyTree], kwargs: dict[str, PyTree]
    ) -> None:
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
