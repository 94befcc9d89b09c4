"""`jaxmpi.jit`: one function of a rank's arrays, for one rank, many processes or simulated ranks."""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial, update_wrapper
from typing import Any

import jax

from jaxmpi import _agreement, _axis, _jaxcompat, _world
from jaxmpi._program.costs import table
from jaxmpi._program.program import Function, Program, build_program, choose_arguments

__all__ = ["Step", "eager", "jit", "local"]


def jit(
    fun: Callable[..., Any] | None = None,
    *,
    replicated_argnums: int | Sequence[int] = (),
    replicated_outnums: int | Sequence[int] = (),
    **jit_kwargs: Any,
) -> Any:
    """`jax.jit` for a function of one rank's arrays, in which the ranks are the named axis `jaxmpi.AXIS`.

    Inside, `jaxmpi.tree_*`, `lax.psum`, `pmean`, `pmax`, `pmin`, `psum_scatter`, `all_gather`, `all_to_all`, `ppermute` and
    `axis_index` over the axis, and code that takes an axis name, such as Flax's BatchNorm, communicate: in branches, loops,
    `vmap`, `jax.checkpoint` and custom derivatives, too. Collectives that don't depend on each other travel together.
    On one rank it is `jax.jit`.

    **Collective:** every rank calls the function, with arguments that lead to the same collectives. Before a program runs,
    the ranks compare theirs.
    **Communication:** what `jaxmpi.explain` lists, and 16 bytes a call for the comparison.

    Args:
      fun: the function; a decorator is returned without it.
      replicated_argnums: positions of arguments that are equal on all ranks, such as parameters and optimizer state. All
        others count as different.
      replicated_outnums: positions in the returned tuple that must be equal on all ranks; 0 for a result that is no tuple.
      **jit_kwargs: those of `jax.jit`.

    Returns:
      The jitted function, with `lower`, `trace` and `eval_shape` as that of `jax.jit`.

    Raises:
      RankMismatchError: when called, on every rank, if the ranks would not send the same.
      ValueError: when traced, if an output of `replicated_outnums` may differ between the ranks, with its path; if a branch
        or loop with a collective depends on what may differ, with its source line.
      NotImplementedError: when traced, a collective in a place that is not supported, with its source line.

    >>> import jax, jaxmpi
    >>> step = jaxmpi.jit(lambda x: jax.lax.pmean(x, jaxmpi.AXIS))
    >>> float(step(3.0))
    3.0
    """
    if fun is None:
        return partial(jit, replicated_argnums=replicated_argnums, replicated_outnums=replicated_outnums, **jit_kwargs)
    static = choose_arguments(fun, jit_kwargs.get("static_argnums"), jit_kwargs.get("static_argnames"))
    donated = choose_arguments(fun, jit_kwargs.get("donate_argnums"), jit_kwargs.get("donate_argnames"))
    replicated = choose_arguments(fun, replicated_argnums, ())
    outputs = (replicated_outnums,) if isinstance(replicated_outnums, int) else tuple(replicated_outnums)
    return Step(Function(fun, static, donated, replicated, outputs), jit_kwargs)


def local(tree: Any) -> Any:
    """This rank's own arrays, to be mixed with others outside of `jaxmpi.jit`.

    What `jaxmpi.jit` returns on the xla backend are global arrays. They print, convert and go back in as they are; but JAX
    refuses to add them to an array that is committed to a device, and plain `jax.jit` would run them on all ranks. On the
    other backends nothing changes. Nothing is copied.

    Args:
      tree: any pytree.

    Returns:
      The same pytree, of arrays on this rank's device.
    """
    backend: Any = _world.current("local")
    return jax.tree.map(backend.unwrap, tree) if backend.name == "xla" else tree


def eager(fun: Callable[..., Any], name: str) -> Callable[..., Any]:
    """A function of this module's callers as a step of its own: compiled once for each kind of arguments.

    What it returns are arrays of this rank alone, on every backend.
    """
    fun.__name__ = name
    step = jit(fun)

    def call(*args: Any) -> Any:
        _world.current(name)  # for an error that names the function
        return local(step(*args))

    return call


class Step:
    """A function that `jaxmpi.jit` has wrapped."""

    def __init__(self, function: Function, options: dict[str, Any]) -> None:
        self._function, self._options = function, options
        self._backend: Any = None
        self._programs: list[tuple[Program, Callable[[Sequence[Any]], Any]]] = []  # and what runs them; the last used first
        update_wrapper(self, function.fun)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        backend = self._on()
        if _jaxcompat.tracing():
            return self._inside(backend)(*args, **kwargs)
        if self._alone:
            return self._jitted(*args, **kwargs)
        leaves, treedef = jax.tree.flatten(self._function.dynamic(args, kwargs))
        if backend.name == "xla":
            leaves = backend.wrap(leaves)
        program, run = self._program(leaves, treedef, args, kwargs)
        self._meet(program)
        out = run(leaves)
        return out if backend.concurrent else jax.block_until_ready(out)  # only one thread may be inside MPI

    def lower(self, *args: Any, **kwargs: Any) -> "Lowered":
        """As `jax.jit(fun).lower`: nothing is sent, neither here nor by `compile`."""
        self._on()
        args, kwargs = self._wrapped(args, kwargs)
        return Lowered(self, self._build(args, kwargs), self._jitted.lower(*args, **kwargs))

    def trace(self, *args: Any, **kwargs: Any) -> Any:
        """As `jax.jit(fun).trace`, of the program that this backend runs."""
        self._on()
        args, kwargs = self._wrapped(args, kwargs)
        return self._jitted.trace(*args, **kwargs)

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        """As `jax.jit(fun).eval_shape`."""
        self._on()
        return self._jitted.eval_shape(*args, **kwargs)

    def clear_cache(self) -> None:
        """Forget what was compiled."""
        self._backend, self._programs = None, []

    def program(self, *args: Any, **kwargs: Any) -> Program:
        """What a call with these arguments would do; nothing is sent or compiled."""
        self._on()
        return self._build(*self._wrapped(args, kwargs))

    # for the backend in use

    def _on(self) -> Any:
        backend = _world.current("jaxmpi.jit")
        if backend is not self._backend:
            self._backend, self._programs = backend, []
            self._alone = backend.place.size == 1 or backend.name == "simulate"
            self._jitted = jax.jit(self._named(self._body), **self._options)
        return backend

    def _named(self, body: Callable[..., Any]) -> Callable[..., Any]:
        return update_wrapper(lambda *args, **kwargs: body(*args, **kwargs), self._function.fun)

    def _body(self, *args: Any, **kwargs: Any) -> Any:
        return self._build(args, kwargs)(self._function.leaves(args, kwargs))

    def _inside(self, backend: Any) -> Callable[..., Any]:
        """What runs where the caller is traced, too."""
        if _axis.bound():  # by a jaxmpi.jit around this one, which treats the collectives
            return jax.jit(self._function.fun, **self._options)
        if backend.place.size == 1:
            return self._jitted
        if backend.name == "mpi":  # other programs may stand beside this one: the effect keeps the order
            return jax.jit(
                self._named(lambda *args, **kwargs: self._build(args, kwargs, hide=False)(self._function.leaves(args, kwargs))),
                **self._options,
            )
        raise RuntimeError(
            f"{self._function.title}, a jaxmpi.jit, was called inside of jax.jit, jax.grad or another transformation, which "
            f"the {backend.name} backend does not support. Put the transformation inside of the jaxmpi.jit."
        )

    def _build(self, args: Any, kwargs: Any, *, hide: bool = True) -> Program:
        return build_program(self._function, args, kwargs, self._backend, hide=hide)

    def _wrapped(self, args: Any, kwargs: Any) -> Any:
        if self._backend.name != "xla" or self._backend.place.size == 1:
            return args, kwargs
        return tuple(map(self._wrap, args)), {name: self._wrap(arg) for name, arg in kwargs.items()}

    def _wrap(self, arg: Any) -> Any:
        leaves, treedef = jax.tree.flatten(arg)
        wrapped = self._backend.wrap(leaves)
        return arg if wrapped is leaves else treedef.unflatten(wrapped)

    # what the ranks agree on

    def _program(self, leaves: Sequence[Any], treedef: Any, args: Any, kwargs: Any) -> tuple[Program, Callable[[Any], Any]]:
        """The program for these arguments, and what runs it; traced where there is none yet."""
        key = self._function.key(leaves, treedef, args, kwargs)
        for i, known in enumerate(self._programs):
            if known[0].key == key:
                if i:
                    self._programs.insert(0, self._programs.pop(i))
                return known
        try:
            program = self._build(args, kwargs)
        except Exception as error:
            failure = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            _agreement.meet(self._backend, _agreement.Statement(_agreement.FAILED, self._function.title, failure))
            raise
        program.key = key
        self._programs.insert(0, (program, program.compiled(_flat_options(self._options))))
        return self._programs[0]

    def _meet(self, program: Program) -> None:
        if program.entries:  # what sends nothing may run on any rank alone
            _agreement.meet(self._backend, program.statement, program.sides)
            if not program.shown and os.environ.get("JAXMPI_EXPLAIN") == "1" and self._backend.place.rank == 0:
                sys.stderr.write(table(program.function.title, program.entries, self._backend))
            program.shown = True


class Lowered:
    """What `Step.lower` returns: a `jax.stages.Lowered` whose compiled program compares itself with the other ranks'."""

    def __init__(self, step: Step, program: Program, lowered: Any) -> None:
        self._step, self._program, self._lowered = step, program, lowered

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lowered, name)

    def compile(self, *args: Any, **kwargs: Any) -> "Compiled":
        """Compile it; nothing is sent."""
        return Compiled(self._step, self._program, self._lowered.compile(*args, **kwargs))


class Compiled:
    """What `Lowered.compile` returns, in the place of a `jax.stages.Compiled`."""

    def __init__(self, step: Step, program: Program, compiled: Any) -> None:
        self._step, self._program, self._compiled = step, program, compiled

    def __getattr__(self, name: str) -> Any:
        return getattr(self._compiled, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = self._step._wrapped(args, kwargs)
        if self._step._backend.place.size > 1 and self._step._backend.name != "simulate":
            self._step._meet(self._program)
        return self._compiled(*args, **kwargs)


def _flat_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of `jax.jit` that don't speak of arguments or outputs."""
    about_arguments = ("static_argnums", "static_argnames", "donate_argnums", "donate_argnames")
    if shardings := [name for name in options if name.endswith("shardings")]:
        raise NotImplementedError(
            f"jaxmpi.jit: {shardings[0]} is not supported on several ranks, where every array is on its rank's one device. "
            "Leave it out."
        )
    return {name: value for name, value in options.items() if name not in about_arguments}
