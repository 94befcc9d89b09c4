"""What `jaxmpi.jit` returns: a function that finds, compares and runs the program for its arguments."""

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial, update_wrapper
from threading import current_thread, get_ident, main_thread
from types import MethodType
from typing import Any

import jax
import jax.numpy as jnp

from jaxmpi import _axis, _jaxcompat
from jaxmpi._consistency import compare, values
from jaxmpi._jit import first_call
from jaxmpi._jit.arguments import check_arguments
from jaxmpi._jit.build import build_program
from jaxmpi._jit.cache import Programs
from jaxmpi._jit.compile_once import compile_alone, compile_once, shares
from jaxmpi._jit.function import Function
from jaxmpi._jit.program import Program, refuse_nan_search
from jaxmpi._jit.stages import Lowered, Traced
from jaxmpi._lowering.costs import table
from jaxmpi._process import settings
from jaxmpi._world import session

__all__ = ["Step"]

EXPECTED = (jax.errors.JaxRuntimeError, ValueError, TypeError)  # where JAX meets an error of ours first


class _NewProgramError(Exception):
    """Raised in a trace, in the place of a program that is to be compiled outside of it."""

    def __init__(self, program: Program) -> None:
        super().__init__(program.function.title)
        self.program = program


class Step:
    """A function that `jaxmpi.jit` has wrapped."""

    def __init__(self, function: Function, options: dict[str, Any]) -> None:
        self._function, self._options = function, options
        self._backend: Any = None
        self._programs: Any = None
        self._traced: Program | None = None  # since the last call
        self._ready: Program | None = None  # for the trace that comes next
        update_wrapper(self, function.fun, updated=())  # not its attributes, which may be another Step's

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function on all ranks."""
        if session.current("jaxmpi.jit") is not self._backend:
            self._on()
        if not _jaxcompat.at_top_level():
            return self._inside()(*args, **kwargs)
        if self._alone:
            return self._jitted(*args, **kwargs)
        ready = None
        if self._new:
            program, run, leaves, _ = self._programs.find(args, kwargs)
            unseen = self._is_unseen(program)
            self._first(program, leaves)
            if not program.statement:  # what sends nothing may run on any rank alone
                return run(leaves)[1]
            ready = program
        check = self._compare_values(args, kwargs) if self._checks else None
        if not self._in_band:
            out = self._compared(args, kwargs)
        else:  # the program's own messages compare it; every call below is one that a step of 1 ms notices
            if (thread := get_ident()) != self._turn.thread:
                self._take_turn(args, kwargs)
            self._ready = ready  # for the trace of this call alone
            try:
                if ready and self._shares:
                    self._compile(ready, args, kwargs, unseen=unseen)
                new = None
                try:
                    end, out = self._with_end(*args, **kwargs)
                except _NewProgramError as found:
                    new = found.program
                if new:
                    self._compile(new, args, kwargs, unseen=self._is_unseen(new))
                    end, out = self._with_end(*args, **kwargs)
                self._ends[thread] = end
                if self._traced:  # an error is likelier in a first call than later, and raised here it has its own class
                    program, self._traced = self._traced, None
                    jax.block_until_ready(end)
                    self._note_run(program)
            except EXPECTED as error:
                self._explain(error, args, kwargs)
                raise
        if not self._concurrent:
            jax.block_until_ready(out)
        return out if check is None else check(out)

    def _take_turn(self, args: Any, kwargs: Any) -> None:
        """Take the turn to communicate for this thread; a program that sends nothing does not need it.

        The first turn of the main thread is taken without a look at the program, which would be traced for that alone.
        """
        first = not self._turn.thread and current_thread() is main_thread()
        if first or self._programs.find(args, kwargs)[0].statement:
            self._turn.take()

    def _first(self, program: Program, leaves: Sequence[Any]) -> None:
        """Before the first call of a program that communicates, and before each one that does not until then."""
        if program.statement and get_ident() != self._turn.thread:
            self._turn.take()
        first_call.compare(self._backend, program, leaves)
        program.carried = None  # which holds all of it
        self._new = not program.statement  # at last: what is above may raise

    def _compared(self, args: Any, kwargs: Any) -> Any:
        """Run the program for these arguments, after the ranks have compared theirs."""
        program, run, leaves, numbers = self._programs.find(args, kwargs)
        if not program.statement:  # what sends nothing may run on any rank alone
            return run(leaves)[1]
        signature, unseen = program.signature, self._is_unseen(program)
        compare.check_consistent(self._backend, signature.of_call(numbers), partial(signature.details, numbers))
        self._note_run(program)
        if unseen:
            compile_once(self._backend, self._function.title, partial(program.lower, leaves))
        elif self._shares and not program.compiled_once:
            compile_alone(self._backend, self._function.title, program.lower(leaves))
        program.compiled_once = True
        with self._backend.starting() as keep:
            end, out = run(leaves)
            keep(end)
        return out

    def _is_unseen(self, program: Program) -> bool:
        """Whether the ranks come to such a program for the first time, all of them, and share what is compiled."""
        return bool(self._shares and program.statement and not compare.has_run(self._backend, program.statement.fingerprint))

    def _compile(self, program: Program, args: Any, kwargs: Any, *, unseen: bool) -> None:
        """Compile a new program; the ranks agree before on one that they have not seen, as its own messages come too late."""
        self._ready, program.compiled_once = program, True  # for the trace of `lower`
        lower, title = partial(self._with_end.lower, *args, **kwargs), self._function.title
        if not unseen:
            compile_alone(self._backend, title, lower())
            return
        statement: Any = program.statement
        self._announce(program)
        compare.check_consistent(self._backend, statement, program.signature.details)
        compare.note_run(self._backend, statement.fingerprint)
        compile_once(self._backend, title, lower)

    def _compare_values(self, args: Any, kwargs: Any) -> Callable[[Any], Any] | None:
        """Compare what is to be equal on the ranks, before the program; return what does it after."""
        program, _, leaves, _ = self._programs.find(args, kwargs)
        if not program.statement:
            return None
        compare.check_consistent(self._backend, program.statement, program.signature.details)
        title, (before, after) = self._function.title, program.equal
        values.compare(self._backend, title, program.arguments, leaves, before)

        def check(out: Any) -> Any:
            values.compare(self._backend, title, program.outputs, jax.tree.leaves(out), after)
            return out

        return check

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else MethodType(self, instance)  # as a method, it takes `self`

    def lower(self, *args: Any, **kwargs: Any) -> Lowered:
        """As `jax.jit(fun).lower`: nothing is sent, neither here nor by `compile`."""
        self._on()
        return self.trace(*args, **kwargs).lower()

    def trace(self, *args: Any, **kwargs: Any) -> Traced:
        """As `jax.jit(fun).trace`, of the program that this backend runs."""
        self._on()
        args, kwargs = self._wrapped(args, kwargs)
        self._ready = program = self._build(args, kwargs)
        try:
            stage = self._jitted.trace(*args, **kwargs)
        finally:
            self._ready = None  # where JAX has traced it before
        return Traced(stage, partial(self._run_compiled, program), program.lowered_to)

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        """As `jax.jit(fun).eval_shape`."""
        self._on()
        return self._jitted.eval_shape(*args, **kwargs)

    def clear_cache(self) -> None:
        """Forget what was compiled."""
        self._backend = self._programs = None

    def program(self, *args: Any, **kwargs: Any) -> Program:
        """What a call with these arguments would do; nothing is sent or compiled."""
        self._on()
        return self._build(*self._wrapped(args, kwargs))

    # for the backend in use

    def _on(self) -> None:
        backend: Any = session.current("jaxmpi.jit")
        if backend is self._backend:
            return
        if backend.forked:
            backend.turn.take()  # raises
        self.clear_cache()  # where what follows raises, the next call raises, too
        self._alone = backend.place.size == 1 or backend.simulates
        if not self._alone:
            self._programs = Programs(self._function, backend, _flat_options(self._options), self._announce)
            self._in_band, self._concurrent = backend.compares_inline, backend.concurrent
            self._turn, self._ends = backend.turn, backend.ends
            self._checks, self._new, self._ready = values.wanted(), True, None
            self._shares = shares()
        self._jitted = jax.jit(self._body(hide=True), **self._options)
        self._with_end = jax.jit(self._body(hide=True, end=True), **self._options)
        self._open = jax.jit(self._body(hide=False), **self._options)
        self._backend = backend  # at last: another thread may be calling

    def _body(self, *, hide: bool, end: bool = False) -> Callable[..., Any]:
        """What `jax.jit` traces, with the name and the signature of the user's function.

        With `end`, it has another output before the function's: one that nobody can donate, to wait for.
        """

        def body(*args: Any, **kwargs: Any) -> Any:
            if not self._alone:
                refuse_nan_search(self._function.title)
            program = self._build(args, kwargs, hide=hide)
            if end and self._shares and program.statement and not program.compiled_once:
                raise _NewProgramError(program)
            self._announce(program, show=self._alone or end)
            self._traced = program if end else None
            outs = program(self._function.leaves(args, kwargs))
            return (jnp.zeros((), jnp.bool_), outs) if end else outs

        return update_wrapper(body, self._function.fun, updated=())

    def _inside(self) -> Callable[..., Any]:
        """What runs where the caller is traced, too."""
        if _axis.bound():  # by a jaxmpi.jit around this one, which treats the collectives
            return jax.jit(self._function.fun, **self._options)
        if self._backend.place.size == 1:
            return self._jitted
        if self._backend.nests:  # other programs may stand beside this one: the effect keeps the order
            return self._open
        raise RuntimeError(
            f"{self._function.title}, a jaxmpi.jit, was called inside of jax.jit, jax.grad or another transformation, which "
            f"the {self._backend.name} backend does not support. Put the transformation inside of the jaxmpi.jit."
        )

    def _build(self, args: Any, kwargs: Any, *, hide: bool = True) -> Program:
        ready, self._ready = self._ready, None
        return ready if ready and hide else build_program(self._function, args, kwargs, self._backend, hide=hide)

    def _wrapped(self, args: Any, kwargs: Any) -> Any:
        if not self._backend.global_arrays or self._backend.place.size == 1:
            return args, kwargs
        return tuple(map(self._wrap, args)), {name: self._wrap(arg) for name, arg in kwargs.items()}

    def _wrap(self, arg: Any) -> Any:
        leaves, treedef = jax.tree.flatten(arg)
        wrapped = self._backend.wrap(leaves)
        return arg if wrapped is leaves else treedef.unflatten(wrapped)

    def _explain(self, error: Exception, args: Any, kwargs: Any) -> None:
        """Raise our own error where JAX has met it first."""
        compare.raise_mismatch(self._backend, error)
        check_arguments(self._function, args, kwargs)

    def _run_compiled(self, program: Program, compiled: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run what was compiled ahead of time, of this program; the ranks compare it before."""
        args, kwargs = self._wrapped(args, kwargs)
        if self._alone:
            return compiled(*args, **kwargs)
        if program.statement and get_ident() != self._turn.thread:
            self._turn.take()
        if statement := None if self._in_band else program.statement:
            compare.check_consistent(self._backend, statement, program.signature.details)
        try:
            with self._backend.starting() if statement else nullcontext():
                out = compiled(*args, **kwargs)  # without an output of our own to wait for
            if self._in_band or not self._concurrent:
                jax.block_until_ready(out)
            self._note_run(program)
            return out
        except EXPECTED as error:
            self._explain(error, args, kwargs)
            raise

    def _note_run(self, program: Program) -> None:
        program.carried = None
        if program.statement:
            compare.note_run(self._backend, program.statement.fingerprint)

    def _announce(self, program: Program, *, show: bool = True) -> None:
        """Keep what a new program sends, for an error, and print it where that is asked for."""
        if program.announced:
            return
        program.announced = show
        if program.statement and not self._alone:
            compare.register_program(
                self._backend, program.statement, program.signature.sent, program.signature.details if self._in_band else dict
            )
        if show and settings.get("JAXMPI_EXPLAIN") and self._backend.place.rank == 0:
            sys.stderr.write(table(program.function.title, program.entries, self._backend))


def _flat_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of `jax.jit` that don't speak of arguments or outputs."""
    about_arguments = ("static_argnums", "static_argnames", "donate_argnums", "donate_argnames")
    if shardings := [name for name in options if name.endswith("shardings")]:
        raise NotImplementedError(
            f"jaxmpi.jit: {shardings[0]} is not supported on several ranks, where every array is on its rank's one device. "
            "Leave it out."
        )
    return {name: value for name, value in options.items() if name not in about_arguments}
