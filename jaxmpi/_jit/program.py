"""Program of a function, for arguments of certain shapes and dtypes and one backend.

The function is traced, analyzed and lowered (`build_program`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial, update_wrapper
from operator import itemgetter
from typing import TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr
from jax.stages import Lowered
from jax.tree_util import PyTreeDef
from jax.typing import ArrayLike

from jaxmpi import _jaxcompat
from jaxmpi._analysis.forgotten_mean import DivergenceCheck
from jaxmpi._backends.interface import Ranks
from jaxmpi._consistency.mismatch import Call
from jaxmpi._jit.analyze import Analysis, analyze, paths_of
from jaxmpi._jit.function import Function, Leaf, argument_name, checked, is_per_rank
from jaxmpi._jit.lost_nnx_changes import watch_changes
from jaxmpi._job.process.garbage import collection_paused
from jaxmpi._leaves import PyTree, output_name
from jaxmpi._lowering import lower
from jaxmpi._lowering.plan import Entry
from jaxmpi._lowering.refuse import Refusals
from jaxmpi._lowering.signature import Signature
from jaxmpi._lowering.trace import prepared, trace
from jaxmpi._per_rank_state import is_per_rank_leaf

__all__ = ["Program", "Run", "build_program", "refuse_nan_search", "watched"]


T = TypeVar("T")
# of the arguments' arrays; see `Program.compiled`
Run: TypeAlias = Callable[[Sequence[Leaf]], tuple[jax.Array, PyTree]]


@dataclass(eq=False)
class Program:
    """Program of a function for arguments of certain shapes and dtypes."""

    function: Function
    # of the arguments' arrays to the outputs', for `jax.jit`
    call: Callable[[Sequence[Leaf]], list[Leaf]]
    tree: PyTreeDef  # of the outputs
    entries: Sequence[Entry]  # what it sends
    signature: Signature  # what the ranks compare
    # the traced program, where all ranks must run one compiled program; or None
    same_module: ClosedJaxpr | None
    arguments: list[str]  # in words
    donated: list[bool]  # for each array of the arguments
    outputs: list[str]  # in words
    # which arrays of the arguments, and of the outputs, are the same on all ranks
    equal: tuple[list[bool], list[bool]]
    # the arrays of the arguments that `replicated_argnums` names and that are one number
    scalars: list[int]
    captured: Sequence[ArrayLike] = ()  # the arrays that the function has from outside
    divergence: DivergenceCheck | None = None  # finds a forgotten mean at the first call
    # arrays of the arguments that must not all be equal, as all ranks would do the same
    fed: Sequence[int] = ()
    announced: bool = False
    # whether `compile_once` or `compile_alone` has handled it, and JAX compiles nothing at its call
    compiled_once: bool = False
    # of the arguments' arrays; `compiled` sets it
    lower: Callable[[Sequence[Leaf]], Lowered] = field(init=False, repr=False)

    @property
    def statement(self) -> Call | None:
        """Call that the ranks compare; None if the program sends nothing."""
        return self.signature.statement

    def numbers(self, leaves: Sequence[Leaf]) -> list[str]:
        """Return Python and NumPy numbers that must be equal on all ranks, such as a step count.

        Those that are numbers of JAX may not be known yet.
        """
        known = [i for i in self.scalars if not isinstance(leaves[i], jax.Array)]
        return [f"{self.arguments[i]} is {np.asarray(leaves[i]).item()}" for i in known]

    def lowered_to(self, lowered: Lowered) -> None:
        """Have the ranks compare what XLA compiles, where all must run the same."""
        if self.same_module is not None:
            self.signature.lowered_to(lowered, self.same_module)

    def __call__(self, leaves: Sequence[Leaf]) -> PyTree:
        """Trace it, inside of a `jax.jit`."""
        return self.tree.unflatten(self.call(leaves))

    def compiled(self, options: Mapping[str, object], leaves: Sequence[Leaf]) -> Run:
        """Return a function of the arguments' arrays that runs it, with options of `jax.jit`.

        It returns an array that is ready when the program has ended, and that nobody donates, and
        the outputs. `leaves` are arrays of its first call; nothing is sent.
        """
        given, kept = (
            [i for i, d in enumerate(self.donated) if d == which] for which in (True, False)
        )
        order = np.argsort([*given, *kept]).tolist()

        def flat(given: Sequence[Leaf], kept: Sequence[Leaf]) -> tuple[jax.Array, list[Leaf]]:
            refuse_nan_search(self.function.title)
            leaves = (*given, *kept)
            return jnp.zeros((), jnp.bool_), self.call([leaves[i] for i in order])

        def run(leaves: Sequence[Leaf]) -> tuple[jax.Array, PyTree]:
            end, outs = jitted(take_given(leaves), take_kept(leaves))
            return end, self.tree.unflatten(outs)

        flat.__name__ = self.function.title
        jitted = jax.jit(flat, donate_argnums=0, **options)
        take_given, take_kept = _taker(given), _taker(kept)
        self.lower = lambda leaves: jitted.lower(take_given(leaves), take_kept(leaves))
        if self.same_module is not None and self.statement:
            self.lowered_to(self.lower(leaves))  # which the first call does not do again
        return run


def _taker(indices: Sequence[int]) -> Callable[[Sequence[T]], Sequence[T]]:
    """Return a function that selects these from a list; mostly its first or last ones."""
    if list(indices) == list(range(min(indices, default=0), max(indices, default=-1) + 1)):
        return itemgetter(slice(min(indices, default=0), max(indices, default=-1) + 1))
    return itemgetter(*indices)


def refuse_nan_search(title: str) -> None:
    """Raise a FloatingPointError where JAX looks for the operation that has made a NaN.

    With `jax_debug_nans` and `jax_debug_infs` it then runs the program again, equation by equation,
    on this rank alone; the other ranks would not take part.
    """
    looked_for = jax.config.jax_debug_nans or jax.config.jax_debug_infs
    if looked_for and _jaxcompat.at_top_level() and not jax.config.jax_disable_jit:
        raise FloatingPointError(
            f"{title}: an output on this rank has a NaN (jax_debug_nans) or an infinity "
            "(jax_debug_infs). To find where it "
            "comes from, run the script on one rank, where JAX looks for the operation."
        )


# From a call to its program


def watched(function: Function) -> Callable[..., PyTree]:
    """Return the function, with an error where it changes nnx objects and the change is lost."""

    @partial(update_wrapper, wrapped=function.fun, updated=())
    def traced(*args: PyTree, **kwargs: PyTree) -> PyTree:
        check = watch_changes(function.api, function.title, (args, kwargs))
        outs = function.fun(*args, **kwargs)
        check(jax.tree.leaves(outs))
        return outs

    return traced


class _Flat:
    """Function of the arrays of its arguments that returns those of its outputs, called once."""

    tree: PyTreeDef  # of the outputs, once it was called

    def __init__(
        self,
        function: Function,
        args: Sequence[PyTree],
        kwargs: dict[str, PyTree],
        treedef: PyTreeDef,
    ) -> None:
        self._function, self._args, self._kwargs, self._treedef = function, args, kwargs, treedef

    def __call__(self, *xs: Leaf) -> list[Leaf]:
        args, kwargs = self._function.with_arrays(
            self._treedef.unflatten(xs), self._args, self._kwargs
        )
        outs, self.tree = jax.tree.flatten(watched(self._function)(*args, **kwargs))
        return outs


def build_program(
    function: Function,
    args: Sequence[PyTree],
    kwargs: dict[str, PyTree],
    backend: Ranks,
    *,
    hide: bool,
    traced: tuple[ClosedJaxpr, PyTreeDef] | None = None,
) -> Program:
    """Trace a function for arguments like these, check it and make it a program of `backend`.

    `hide` is as in `lower.build`. `traced` is the function where it was traced before, and the
    structure of its outputs.
    """
    paths, treedef, avals = checked(function, args, kwargs, backend)
    ins, per_rank = [path for path, _ in paths], [is_per_rank(leaf) for _, leaf in paths]
    size = backend.place.size
    if traced is not None:
        (jaxpr, captured, parameters), tree = prepared(traced[0], backend.axes), traced[1]
    else:
        flat = _Flat(function, args, kwargs, treedef)
        jaxpr, captured, parameters = trace(flat, backend.axes, avals)
        tree = flat.tree
    outs = paths_of(tree)
    replicated = [function.replicates(path) and not is_per_rank_leaf(path) for path in ins]
    arguments = [
        f"{argument_name(path)}: {a.dtype.name}{list(a.shape)}"
        for path, a in zip(ins, avals, strict=True)
    ]
    found = Analysis(jaxpr, None, replicated, [False] * len(outs), [], [])
    if size > 1:
        backend.transport.check(Refusals(jaxpr, backend.name))
        with collection_paused():
            found = analyze(function, jaxpr, captured, ins, replicated, tree, backend, hide=hide)
        replicated = [*found.replicated]
        if names := [
            argument for argument, same in zip(arguments, replicated, strict=True) if same
        ]:
            parameters = [*parameters, (f"{function.title} replicates {', '.join(names)}", "")]
    entries = found.entries
    signature = Signature(
        function.title,
        entries,
        found.control,
        parameters=parameters,
        arguments=arguments,
        weak=[a.weak_type for a in avals],
        calls=function.calls,
    )
    stacked = [False] * len(captured) + per_rank
    with collection_paused():
        program, finish = lower.build(
            found.jaxpr,
            found.plan,
            backend,
            stacked,
            entries,
            signature.fingerprint,
            hide=hide,
        )

    def call(leaves: Sequence[Leaf]) -> list[Leaf]:
        arrays = [leaf.stack if is_per_rank(leaf) else leaf for leaf in leaves]
        return finish(program(*captured, *arrays))

    return Program(
        function=function,
        call=call,
        tree=tree,
        entries=entries,
        signature=signature,
        same_module=backend.transport.shared_module(found.jaxpr) if size > 1 else None,
        arguments=arguments,
        donated=[function.donated.hold(path) for path in ins],
        outputs=[output_name(path) for path in outs],
        equal=(
            replicated,
            [
                not differs and not is_per_rank_leaf(path)
                for path, differs in zip(outs, found.varies, strict=True)
            ],
        ),
        scalars=[
            i
            for i, (same, a) in enumerate(zip(replicated, avals, strict=True))
            if same and a.shape == ()
        ],
        captured=captured,
        divergence=found.divergence,
        fed=found.fed,
    )
