"""Executors: run the programs of a function on several processes, and compare them.

On the native transport the messages of a program carry its fingerprint (`ComparesInline`). On any
other transport the ranks compare the fingerprints before each call (`ComparesBefore`). A call:

    program = one of `Programs`, by the structure, shapes and dtypes of the arguments
    first call alone: compare arguments (`first_call`)
    new fingerprint: compare it, and compile the program once for all ranks (`compile_once`)
    ComparesInline: start the program; its messages compare fingerprints
    ComparesBefore: allreduce 16 bytes, the fingerprint; start the program
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from threading import current_thread, get_ident, main_thread
from typing import TypeAlias

import jax
from jax.stages import Lowered
from jax.tree_util import PyTreeDef

from jaxmpi import _jaxcompat
from jaxmpi._backends.interface import Processes, Ranks
from jaxmpi._consistency import compare, values
from jaxmpi._consistency.findings import Finding, is_checked
from jaxmpi._errors import RankMismatchError
from jaxmpi._jit import first_call
from jaxmpi._jit.compile_once import compile_alone, compile_once
from jaxmpi._jit.function import Function, Leaf, check_arguments, wrapped
from jaxmpi._jit.jitted import Jitted, NewProgramError
from jaxmpi._jit.numbers import NumberWatch
from jaxmpi._jit.program import Program, Run, build_program
from jaxmpi._leaves import PyTree
from jaxmpi._world import session

__all__ = ["ComparesBefore", "ComparesInline", "Executor", "Programs"]


# The programs of a function


# the program, what runs it, the leaves of the call, and `Program.host_scalars` of these
Found = tuple[Program, Run, list[Leaf], list[str]]
# the program, what runs it, and the structure and `Function.key` of its calls
Known: TypeAlias = tuple[Program, Run, PyTreeDef, tuple[object, ...]]


class Programs:
    """Programs of a function on one backend, the last used one first."""

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
        """Return the program for these arguments, tracing it if it is new; nothing is sent.

        Returns:
          The program, what runs it, the leaves of the call, and `Program.host_scalars` of these.
        """
        return self._find_last(args, kwargs) or self._find_any(args, kwargs)

    def _find_last(self, args: Sequence[PyTree], kwargs: dict[str, PyTree]) -> Found | None:
        """Return the program of the last call, if these arguments lead to it, too."""
        if not self._all:
            return None
        program, run, structure, key = self._all[0]
        try:  # with a known structure, this is quicker than `jax.tree.flatten`
            given = structure.flatten_up_to(self._function.dynamic(args, kwargs))
            leaves = self._backend.transport.arrays.wrap(given)
        except (ValueError, TypeError, AttributeError):
            return None
        if key != self._function.key(leaves, args, kwargs):
            return None
        return program, run, leaves, program.host_scalars(given)

    def _find_any(self, args: Sequence[PyTree], kwargs: dict[str, PyTree]) -> Found:
        """Find the program for any arguments, tracing it if it is new, and make it the last one."""
        given, structure = jax.tree.flatten(self._function.dynamic(args, kwargs))
        leaves = wrapped(self._function, args, kwargs, given, self._backend)
        key = self._function.key(leaves, args, kwargs)
        for i, (program, run, its_structure, its_key) in enumerate(self._all):
            if its_structure == structure and its_key == key:
                self._all.insert(0, self._all.pop(i))
                return program, run, leaves, program.host_scalars(given)
        program = build_program(self._function, args, kwargs, self._backend, hide_effects=True)
        run = program.compiled(self._options, leaves)
        self._announce(program)
        self._all.insert(0, (program, run, structure, key))
        return program, run, leaves, program.host_scalars(given)


# Steps of both executors


WATCHED_OUTPUTS = 8  # of a program that was compiled ahead of time, to see when it ends
# Errors of JAX behind which there may be an error of jaxmpi.
ERRORS_OF_JAX = (jax.errors.JaxRuntimeError, ValueError, TypeError)


class Executor(ABC):
    """Runs the programs of one function on several processes.

    `ComparesBefore` runs those of its `Programs`. `ComparesInline` runs `jitted.with_end`, which
    JAX dispatches in C++; it asks `Programs` only where it needs the program before it runs: at the
    first call, where the thread changes, and to compare values.

    Args:
      backend: the ranks.
      function: the function.
      options: keyword arguments of `jax.jit`.
      jitted: the function under `jax.jit`.
    """

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
        self._checks_values = values.wanted()
        self._is_first_call = True  # until a call has run a program with collectives
        self._restores = backend.registry.restores  # after which arguments were compared
        self._numbers: NumberWatch | None = None
        self._found: Sequence[tuple[int, Finding]] = ()  # and not raised yet
        exchange = session.neighbors()
        is_wanted = any(
            is_checked(name, function.allowed) for name in ("unequal_start", "unequal_number")
        )
        if exchange is not None and function.calls is None and is_wanted:
            self._numbers = NumberWatch(backend, function.title, exchange)
            self._found = exchange.found
        self._calls = function.calls
        if self._calls is not None:
            self._calls.clear()  # calls on another backend

    def __call__(self, args: Sequence[PyTree], kwargs: dict[str, PyTree]) -> PyTree:
        """Call the function on all ranks."""
        first = None
        if self._calls is not None:
            self._calls.begin(self._ends)
        if self._found and self._numbers is not None:
            self._raise_found(self._numbers, args, kwargs)
        if self._is_first_call:
            program, run, leaves, _ = self._programs.find(args, kwargs)
            first = program, self._must_compile_together(program)
            self._compare_arguments(program, leaves)
            if not program.compared_call:  # it sends nothing, so it may run on one rank alone
                return run(leaves)[1]
        elif self._restores != self._backend.registry.restores:
            self._compare_restored(args, kwargs)
        check = self._compare_values(args, kwargs) if self._checks_values else None
        try:
            out = self._run(args, kwargs, first)
        except RankMismatchError:
            if self._numbers is not None:
                self._numbers.note_error()
            raise
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
        """Run a program that was compiled ahead of time; the ranks compare it as any other.

        Args:
          program: the program.
          compiled: what JAX has compiled.
          args: the positional arguments of the call.
          kwargs: the keyword arguments of the call.
        """
        if program.compared_call:
            self._turn.ensure()
        if program.compared_state is not None:
            leaves = self._function.leaves(args, kwargs)
            first_call.compare_arguments(self._backend, program, leaves)
        try:
            out = self._run_ahead_of_time(program, partial(compiled, *args, **kwargs))
            self._note_agreed(program)
            return out
        except ERRORS_OF_JAX as error:
            self._raise_clearer(error, args, kwargs)
            raise

    @abstractmethod
    def _run(
        self, args: Sequence[PyTree], kwargs: dict[str, PyTree], first: tuple[Program, bool] | None
    ) -> PyTree:
        """Run the program of a call.

        At its first call, `first` is the program, and whether the ranks have not run it before.
        """

    @abstractmethod
    def _run_ahead_of_time(self, program: Program, call: Callable[[], PyTree]) -> PyTree:
        """Compare the program, and return the outputs of `call`, which starts it.

        Here the program has no extra output to wait for.
        """

    def _compare_arguments(self, program: Program, leaves: Sequence[Leaf]) -> None:
        """Compare the arguments of a first call.

        Every call is one until a call has run a program with collectives.
        """
        self._restores = self._backend.registry.restores
        if program.compared_call:
            self._turn.ensure()
        first_call.compare_first_call(self._backend, program, leaves)
        # These keep the traced program alive, and are of no use after the first call.
        program.forgotten_mean, program.batch = None, ()
        # last, because the comparison may raise
        self._is_first_call = not program.compared_call

    def _raise_found(
        self, numbers: NumberWatch, args: Sequence[PyTree], kwargs: dict[str, PyTree]
    ) -> None:
        """Raise what the monitors have found, on all ranks.

        Another rank may have raised it while a program of this rank was under way. Then that
        program has failed, and its error is raised here.
        """
        self._turn.ensure()
        try:
            jax.block_until_ready(self._ends.get(get_ident()))
        except jax.errors.JaxRuntimeError as error:
            numbers.note_error()
            self._raise_clearer(error, args, kwargs)
            raise
        numbers.raise_found()

    def _compare_restored(self, args: Sequence[PyTree], kwargs: dict[str, PyTree]) -> None:
        """Compare the arguments of the first call after a restore."""
        program, _, leaves, _ = self._programs.find(args, kwargs)
        self._restores = self._backend.registry.restores
        if program.compared_state is not None:
            self._turn.ensure()
            first_call.compare_again(self._backend, program, leaves)

    def _must_compile_together(self, program: Program) -> bool:
        """Return whether ranks share executables and have not yet agreed on this fingerprint."""
        call = program.compared_call
        return bool(
            self._jitted.shares and call and not compare.has_agreed(self._backend, call.fingerprint)
        )

    def _compare_values(
        self, args: Sequence[PyTree], kwargs: dict[str, PyTree]
    ) -> Callable[[PyTree], PyTree] | None:
        """Compare the arguments that must be equal, and return a function for the outputs.

        The function compares the outputs that must be equal, and returns them. None if the program
        has no collective.
        """
        program, _, leaves, _ = self._programs.find(args, kwargs)
        if not program.compared_call:
            return None
        compare.check_consistent(self._backend, program.compared_call, program.signature.details)
        title, (before, after) = self._function.title, program.equal
        arguments = [*map(str, program.arguments)]
        values.check_equal_values(self._backend, title, arguments, leaves, before)

        def check(out: PyTree) -> PyTree:
            values.check_equal_values(
                self._backend, title, program.outputs, jax.tree.leaves(out), after
            )
            return out

        return check

    def _note_agreed(self, program: Program) -> None:
        """Note that the ranks have agreed on the program.

        Drop its check for a forgotten mean, too: only a first call makes it, and it keeps the
        traced program alive.
        """
        program.forgotten_mean = None
        if program.compared_call:
            compare.note_agreed(self._backend, program.compared_call.fingerprint)

    def _raise_clearer(
        self, error: Exception, args: Sequence[PyTree], kwargs: dict[str, PyTree]
    ) -> None:
        """Raise the error of jaxmpi behind an error of JAX, if there is one.

        Raises:
          RankMismatchError: XLA carries its text in a JaxRuntimeError.
          TypeError, ValueError: an argument that no program can have, with its name.
        """
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
    """Runs programs whose messages carry their fingerprint.

    The lines of `_run` are on the critical path: each is noticeable in a step of 1 ms.
    """

    def _run(
        self, args: Sequence[PyTree], kwargs: dict[str, PyTree], first: tuple[Program, bool] | None
    ) -> PyTree:
        jitted = self._jitted
        if (thread := get_ident()) != self._turn.unchecked:  # as `Turn.ensure`, without a call
            self._take_turn_if_it_communicates(args, kwargs)
        try:
            # The program that was found for the first call, so that the trace does not build it
            # again.
            if first:
                jitted.next_program = first[0]
            if first and jitted.shares:
                self._compile(*first, args, kwargs)
            # Usually JAX has an executable for these arguments, and runs it. If it has to trace and
            # the ranks share executables, the trace is left with the new program.
            new = None
            try:
                end, out = jitted.with_end(*args, **kwargs)
            except NewProgramError as found:
                new = found.program
            if new:
                self._prepare(new, args, kwargs)
                _jaxcompat.dispatch_in_c(jitted.with_end)
                end, out = jitted.with_end(*args, **kwargs)
            self._ends[thread] = end
            if self._numbers is not None:
                self._numbers.note(end)
            # Wait after a trace: an error is likelier in a first call, and is made clearer if it is
            # raised here.
            if jitted.traced_program:
                program, jitted.traced_program = jitted.traced_program, None
                jax.block_until_ready(end)
                self._note_agreed(program)
        except ERRORS_OF_JAX as error:
            self._raise_clearer(error, args, kwargs)
            raise
        finally:
            # No trace has taken it if JAX had one of these arguments, as after `_compile`. It is of
            # no use to `lower` or `eval_shape` of other arguments.
            jitted.next_program = None
        return out

    def _run_ahead_of_time(self, program: Program, call: Callable[[], PyTree]) -> PyTree:
        return jax.block_until_ready(call())

    def _take_turn_if_it_communicates(
        self, args: Sequence[PyTree], kwargs: dict[str, PyTree]
    ) -> None:
        """Make this thread the one that communicates, if the program has collectives.

        If no thread is yet, the main thread becomes it without a look at the program, which would
        have to be traced for that alone.
        """
        is_first = not self._turn.thread and current_thread() is main_thread()
        if is_first or self._programs.find(args, kwargs)[0].compared_call:
            self._turn.take()

    def _prepare(self, program: Program, args: Sequence[PyTree], kwargs: dict[str, PyTree]) -> None:
        """Compare the arguments of a new program, and compile it if ranks share executables."""
        unseen = self._must_compile_together(program)
        self._jitted.announce(program)
        if program.compared_state is not None:
            self._turn.ensure()
            leaves = self._backend.transport.arrays.wrap(self._function.leaves(args, kwargs))
            first_call.compare_arguments(self._backend, program, leaves)
        if self._jitted.shares:
            self._compile(program, unseen, args, kwargs)
        self._jitted.next_program = program

    def _compile(
        self, program: Program, unseen: bool, args: Sequence[PyTree], kwargs: dict[str, PyTree]
    ) -> None:
        """Compile a new program.

        If its fingerprint is new, too, the ranks compare it first, because only ranks with the same
        program can compile it together; its messages would compare it only later.
        """
        title = self._function.title

        def lower() -> Lowered:
            # With these, the trace builds no program and raises no NewProgramError.
            self._jitted.next_program, program.compiled_once = program, True
            return self._jitted.with_end.lower(*args, **kwargs)

        if not unseen:
            compile_alone(self._backend, title, lower())
            return
        call = program.compared_call
        assert call is not None
        self._jitted.announce(program)
        compare.check_consistent(self._backend, call, program.signature.details)
        compare.note_agreed(self._backend, call.fingerprint)
        compile_once(self._backend, title, lower)


# A comparison before each call


class ComparesBefore(Executor):
    """Runs programs after the ranks have compared their fingerprints, at each call."""

    def _run(
        self, args: Sequence[PyTree], kwargs: dict[str, PyTree], first: tuple[Program, bool] | None
    ) -> PyTree:
        program, run, leaves, scalars = self._programs.find(args, kwargs)
        if not program.compared_call:  # it sends nothing, so it may run on one rank alone
            return run(leaves)[1]
        unseen = self._must_compile_together(program)
        if program.compared_state is not None:
            first_call.compare_arguments(self._backend, program, leaves)
        signature = program.signature
        compare.check_consistent(
            self._backend, signature.call_with(scalars), partial(signature.details, scalars)
        )
        self._note_agreed(program)
        if unseen:
            compile_once(self._backend, self._function.title, partial(program.lower, leaves))
        elif self._jitted.shares and not program.compiled_once:
            compile_alone(self._backend, self._function.title, program.lower(leaves))
        program.compiled_once = True
        with self._backend.starting(program.compared_call.fingerprint) as log:
            end, out = run(leaves)
            self._ends[get_ident()] = end  # XLA keeps the order of a thread's programs
            log.keep(end)
        if self._numbers is not None:
            self._numbers.note(end)
        return out

    def _run_ahead_of_time(self, program: Program, call: Callable[[], PyTree]) -> PyTree:
        if not program.compared_call:
            out = call()
        else:
            compare.check_consistent(
                self._backend, program.compared_call, program.signature.details
            )
            with self._backend.starting(program.compared_call.fingerprint) as log:
                out = call()
                # From the last one: a loss or the like, and rarely an argument that is returned.
                arrays = [x for x in jax.tree.leaves(out) if isinstance(x, jax.Array)]
                log.watch(arrays[: -WATCHED_OUTPUTS - 1 : -1])
        return out if self._concurrent else jax.block_until_ready(out)
