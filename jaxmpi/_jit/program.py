"""Program of a function, for arguments of certain shapes and dtypes and one backend.

The function is traced, analyzed and lowered (`build_program`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial, update_wrapper
from operator import itemgetter
from typing import NamedTuple, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr
from jax.stages import Lowered
from jax.tree_util import PyTreeDef
from jax.typing import ArrayLike

from jaxmpi import _jaxcompat
from jaxmpi._analysis.carried import CarriedState
from jaxmpi._analysis.forgotten_mean import DivergenceCheck
from jaxmpi._analysis.traced_program import TracedProgram
from jaxmpi._backends.interface import Ranks
from jaxmpi._consistency.findings import is_checked
from jaxmpi._consistency.mismatch import Call
from jaxmpi._jit.analyze import ProgramFacts, analyze, declared_outputs, paths_of
from jaxmpi._jit.function import Function, Leaf, argument_name, checked, is_per_rank
from jaxmpi._jit.lost_nnx_changes import watch_changes
from jaxmpi._jit.numbers import Numbers
from jaxmpi._job.process.garbage import collection_paused
from jaxmpi._leaves import PyTree, output_name
from jaxmpi._lowering import lower
from jaxmpi._lowering.plan import Entry
from jaxmpi._lowering.refuse import Refusals
from jaxmpi._lowering.signature import Signature
from jaxmpi._lowering.trace import inline_traced, trace
from jaxmpi._per_rank_state import is_per_rank_leaf

__all__ = [
    "Argument",
    "ComparedState",
    "Program",
    "Run",
    "build_program",
    "refuse_nan_search",
    "watched",
]


T = TypeVar("T")
# run(leaves of the arguments) -> (end, outputs); see `Program.compiled`
Run: TypeAlias = Callable[[Sequence[Leaf]], tuple[jax.Array, PyTree]]


class Argument(NamedTuple):
    """An array that a program takes.

    Attributes:
      name: for users, such as "argument 0['w']".
      dtype: the name of its dtype; "" for an array from outside, whose text is its name alone.
      shape: its shape; () for an array from outside.
    """

    name: str
    dtype: str = ""
    shape: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"{self.name}: {self.dtype}{list(self.shape)}" if self.dtype else self.name


class ComparedState(NamedTuple):
    """Inputs that must be equal on all ranks before a program runs.

    The ranks may have other inputs each, as their programs may differ in what is local.

    Attributes:
      state: the inputs.
      keys: PRNG keys.
      with_equal_keys: the inputs that must be equal, too, if all these keys are.
    """

    state: tuple[Argument, ...] = ()
    keys: tuple[Argument, ...] = ()
    with_equal_keys: tuple[Argument, ...] = ()

    @property
    def texts(self) -> tuple[str, ...]:
        """Return the texts of all of these inputs: the keys of their checksums."""
        return tuple(map(str, (*self.state, *self.keys, *self.with_equal_keys)))


@dataclass(eq=False)
class Program:
    """Program of a function for arguments of certain shapes and dtypes.

    "Leaves" are the arrays among the arguments, in the order of the flattened `(args, kwargs)`.

    Attributes:
      function: the function.
      call: maps the leaves to the leaves of the outputs; for `jax.jit` to trace.
      tree: the structure of the outputs.
      entries: its collectives.
      signature: what the ranks compare.
      same_module: the traced program, if all ranks must run one compiled module; else None.
      arguments: the leaves.
      donated: for each leaf, whether the outputs may reuse its memory.
      outputs: for each leaf of the outputs, its name.
      equal: which leaves are equal on all ranks, and which leaves of the outputs.
      scalars: the indices of scalar leaves that are equal on all ranks.
      captured: arrays that the function captured from outside.
      forgotten_mean: outputs that may differ after a call with equal inputs; None if there are none
        or the first call has looked at them.
      compared_state: the state whose values the ranks compare before they run the program, besides
        the replicated arguments; None if they compare no values.
      numbers: the numbers that the ranks compare while they train; None if they compare none.
      batch: the indices of leaves that are a rank's rows; if these are equal on all ranks at the
        first call, all compute the same, and a warning says so.
      announced: whether `Jitted.announce` has registered it.
      compiled_once: whether `compile_once` or `compile_alone` has compiled it, so that JAX compiles
        nothing at its call.
      lower: lowers it for arguments like the leaves; `compiled` sets it.
    """

    function: Function
    call: Callable[[Sequence[Leaf]], list[Leaf]]
    tree: PyTreeDef
    entries: Sequence[Entry]
    signature: Signature
    same_module: ClosedJaxpr | None
    arguments: list[Argument]
    donated: list[bool]
    outputs: list[str]
    equal: tuple[list[bool], list[bool]]
    scalars: list[int]
    captured: Sequence[ArrayLike] = ()
    forgotten_mean: DivergenceCheck | None = None
    compared_state: ComparedState | None = None
    numbers: Numbers | None = None
    batch: Sequence[int] = ()
    announced: bool = False
    compiled_once: bool = False
    lower: Callable[[Sequence[Leaf]], Lowered] = field(init=False, repr=False)

    @property
    def compared_call(self) -> Call | None:
        """Call that the ranks compare; None if the program has no collective.

        Then ranks may run it at any time, or one of them alone.
        """
        return self.signature.compared_call

    def host_scalars(self, leaves: Sequence[Leaf]) -> list[str]:
        """Describe the Python and NumPy scalars that must be equal on all ranks, such as a count.

        JAX scalars are left out, because they may not be computed yet.
        """
        known = [i for i in self.scalars if not isinstance(leaves[i], jax.Array)]
        return [f"{self.arguments[i]} is {np.asarray(leaves[i]).item()}" for i in known]

    def lowered_to(self, lowered: Lowered) -> None:
        """Add the module that XLA compiles to the signature, if all ranks must run the same one."""
        if self.same_module is not None:
            self.signature.lowered_to(lowered, self.same_module)

    def end(self, leaves: Sequence[Leaf]) -> jax.Array:
        """Return an array that is ready when the program has ended, in traced code.

        It has the numbers that the ranks compare, if the program has collectives.
        """
        if self.numbers is None:
            return jnp.zeros((), jnp.bool_)
        return self.numbers.pack(leaves)

    def inputs(self, leaves: Sequence[Leaf]) -> dict[str, Leaf]:
        """Return all inputs by their text: arrays from outside, and the leaves of a call."""
        arguments = [*map(_outside, range(len(self.captured))), *self.arguments]
        return dict(zip(map(str, arguments), [*self.captured, *leaves], strict=True))

    def __call__(self, leaves: Sequence[Leaf]) -> PyTree:
        """Return the outputs for the leaves, inside of a `jax.jit` that traces this."""
        return self.tree.unflatten(self.call(leaves))

    def compiled(self, options: Mapping[str, object], leaves: Sequence[Leaf]) -> Run:
        """Return a function of the leaves that runs the program.

        Nothing is sent or compiled here, but on xla the program is lowered.

        Args:
          options: keyword arguments for `jax.jit`.
          leaves: the leaves of the first call.

        Returns:
          A function from leaves to (end, outputs). `end` is an array that is ready when the program
          has ended; nobody donates it.
        """
        # `jax.jit` donates whole arguments, so the program has two: the donated leaves, and the
        # others.
        donated = [i for i, is_donated in enumerate(self.donated) if is_donated]
        kept = [i for i, is_donated in enumerate(self.donated) if not is_donated]
        order = np.argsort([*donated, *kept]).tolist()
        select_donated, select_kept = _selector(donated), _selector(kept)

        def flat(
            donated_leaves: Sequence[Leaf], kept_leaves: Sequence[Leaf]
        ) -> tuple[jax.Array, list[Leaf]]:
            refuse_nan_search(self.function.title)
            both = (*donated_leaves, *kept_leaves)
            leaves = [both[i] for i in order]
            return self.end(leaves), self.call(leaves)

        def run(leaves: Sequence[Leaf]) -> tuple[jax.Array, PyTree]:
            end, outs = jitted(select_donated(leaves), select_kept(leaves))
            return end, self.tree.unflatten(outs)

        flat.__name__ = self.function.title
        jitted = jax.jit(flat, donate_argnums=0, **options)
        self.lower = lambda leaves: jitted.lower(select_donated(leaves), select_kept(leaves))
        if self.same_module is not None and self.compared_call:
            with collection_paused():
                self.lowered_to(self.lower(leaves))  # JAX keeps this for the first call
        return run


def _outside(i: int) -> Argument:
    return Argument(f"array {i} from outside")


def _selector(indices: Sequence[int]) -> Callable[[Sequence[T]], Sequence[T]]:
    """Return a function that selects the elements at these indices, in ascending order."""
    first, end = min(indices, default=0), max(indices, default=-1) + 1
    if list(indices) == list(range(first, end)):  # the usual case, where a slice is quicker
        return itemgetter(slice(first, end))
    return itemgetter(*indices)


def refuse_nan_search(title: str) -> None:
    """Raise a FloatingPointError where JAX searches for the operation that has made a NaN.

    With `jax_debug_nans` or `jax_debug_infs`, JAX runs a program with a NaN again, equation by
    equation. It would do so on this rank alone, and the collectives would wait for the other ranks.
    A body that is called at the top level, without a trace, is such a second run.
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
    """Return the function, with an error if it changes nnx objects and the change would be lost."""

    @partial(update_wrapper, wrapped=function.fun, updated=())
    def traced(*args: PyTree, **kwargs: PyTree) -> PyTree:
        check = watch_changes(function.api, function.title, (args, kwargs))
        outs = function.fun(*args, **kwargs)
        check(jax.tree.leaves(outs))
        return outs

    return traced


class _Flat:
    """A function with flat arrays as arguments and outputs, which is called once.

    Attributes:
      tree: the structure of the outputs, after the call.
    """

    tree: PyTreeDef

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
    hide_effects: bool,
    traced: tuple[ClosedJaxpr, PyTreeDef] | None = None,
) -> Program:
    """Trace a function for arguments like these, check it and make it a program of `backend`.

    Nothing is sent or compiled.

    Args:
      function: the function.
      args: the positional arguments.
      kwargs: the keyword arguments.
      backend: the ranks.
      hide_effects: as in `lower.build`.
      traced: if the function was traced before, its jaxpr, and the structure of its outputs.

    Raises:
      NotImplementedError, TypeError, ValueError: for arguments that no program can have, a
        collective that is not supported, and what `analyze` raises.
    """
    with collection_paused():
        return _build(function, args, kwargs, backend, hide_effects, traced)


def _build(
    function: Function,
    args: Sequence[PyTree],
    kwargs: dict[str, PyTree],
    backend: Ranks,
    hide_effects: bool,
    traced: tuple[ClosedJaxpr, PyTreeDef] | None,
) -> Program:
    """Do what `build_program` does."""
    # trace
    paths, treedef, avals = checked(function, args, kwargs, backend)
    function = replace(
        function,
        replicated=function.replicated.of_call(len(args)),
        donated=function.donated.of_call(len(args)),
    )
    ins, per_rank = [path for path, _ in paths], [is_per_rank(leaf) for _, leaf in paths]
    size = backend.place.size
    if traced is not None:
        found_in_trace, tree = inline_traced(traced[0], backend.axes), traced[1]
    else:
        flat = _Flat(function, args, kwargs, treedef)
        found_in_trace = trace(flat, backend.axes, avals)
        tree = flat.tree
    jaxpr, captured, parameters, _ = found_in_trace
    # analyze
    outs, declared = paths_of(tree), declared_outputs(function, tree)
    replicated = [function.replicates(path) and not is_per_rank_leaf(path) for path in ins]
    arguments = [
        Argument(argument_name(path), a.dtype.name, a.shape)
        for path, a in zip(ins, avals, strict=True)
    ]
    found = ProgramFacts(None, replicated, [False] * len(outs), [], [])
    if size > 1:
        backend.transport.check(Refusals(jaxpr, backend.name))
        found = analyze(
            function,
            TracedProgram(jaxpr, captured, ins, outs, declared),
            replicated,
            backend,
            hide_effects=hide_effects,
        )
        replicated = [*found.replicated]
        # The ranks compare which arguments are replicated, too.
        names = [str(x) for x, same in zip(arguments, replicated, strict=True) if same]
        if names:
            parameters = [*parameters, (f"{function.title} replicates {', '.join(names)}", "")]
    signature = Signature(
        function.title,
        found.entries,
        found.control,
        parameters=parameters,
        arguments=[*map(str, arguments)],
        weak=[a.weak_type for a in avals],
        calls=function.calls,
    )
    # lower
    stacked = [False] * len(captured) + per_rank
    program, finish = lower.build(
        found_in_trace,
        found.plan,
        backend,
        stacked,
        found.entries,
        signature.fingerprint,
        title=function.title,
        hide_effects=hide_effects,
    )

    def call(leaves: Sequence[Leaf]) -> list[Leaf]:
        arrays = [leaf.stack if is_per_rank(leaf) else leaf for leaf in leaves]
        return finish(program(*captured, *arrays))

    compared_state, numbers = _compared_inputs(function, found, len(captured), arguments, backend)
    if not signature.compared_call:
        compared_state = numbers = None
    return Program(
        function=function,
        call=call,
        tree=tree,
        entries=found.entries,
        signature=signature,
        same_module=backend.transport.shared_module(jaxpr) if size > 1 else None,
        arguments=arguments,
        donated=[function.donated.contain(path) for path in ins],
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
        forgotten_mean=found.forgotten_mean,
        compared_state=compared_state,
        numbers=numbers,
        batch=found.batch,
    )


def _compared_inputs(
    function: Function,
    found: ProgramFacts,
    captured: int,
    arguments: Sequence[Argument],
    backend: Ranks,
) -> tuple[ComparedState | None, Numbers | None]:
    """Return the inputs whose values the ranks compare before and while they run a program.

    Whether they compare any follows from the function and from which arguments it replicates, so
    that all ranks do the same: their programs may differ in what is local.
    """
    if function.calls is not None or len(backend.ranks_here) == backend.place.size:
        return None, None
    carried = found.carried or CarriedState((), (), (), ())
    inputs = [*map(_outside, range(captured)), *arguments]
    compared_state = None
    if not is_checked("unequal_start", function.allowed):
        # What the user has declared is compared all the same (`first_call.compare_arguments`).
        compared_state = ComparedState() if any(found.replicated) else None
    else:
        compared_state = ComparedState(
            tuple(inputs[i] for i in carried.state),
            tuple(inputs[i] for i in carried.keys),
            tuple(inputs[i] for i in carried.with_equal_keys),
        )
    # Without numbers, `end` still tells that the call counts.
    checked = carried.numbers if is_checked("unequal_number", function.allowed) else ()
    indices = tuple(i - captured for i in checked)
    numbers = Numbers(
        function.title,
        indices,
        tuple(arguments[i].name for i in indices),
        tuple(arguments[i].dtype for i in indices),
    )
    return compared_state, numbers
