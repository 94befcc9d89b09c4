"""Run a program that the ranks compare before each call: every transport but the native one."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial

import jax

from jaxmpi._consistency import compare
from jaxmpi._jit.compile_once import compile_alone, compile_once
from jaxmpi._jit.executor import Executor
from jaxmpi._jit.program import Program
from jaxmpi._leaves import PyTree

__all__ = ["ComparesBefore"]


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
