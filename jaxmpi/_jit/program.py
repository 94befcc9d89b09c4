"""The program of a function, for one kind of arguments and one backend."""

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmpi import _jaxcompat
from jaxmpi._backends.base import Backend
from jaxmpi._consistency import compare
from jaxmpi._jit.function import Function, is_per_rank
from jaxmpi._jit.lost_nnx_changes import watch_changes
from jaxmpi._leaves import PyTree, is_own, leaf_name
from jaxmpi._lowering import lower
from jaxmpi._lowering.across_elements import check_shards
from jaxmpi._lowering.classify import communicates, held
from jaxmpi._lowering.control_slice import Line, control_equations
from jaxmpi._lowering.forgotten_mean import Carried
from jaxmpi._lowering.fuse_mean import fold
from jaxmpi._lowering.replication import varying
from jaxmpi._lowering.signature import Signature
from jaxmpi._lowering.summary import Entry, summary
from jaxmpi._lowering.trace import trace

__all__ = ["Program", "build_program", "check_arguments", "refuse_nan_search"]


@dataclass(eq=False)
class Program:
    """What a function does for one kind of arguments."""

    function: Function
    call: Callable[[Sequence[Any]], list[Any]]  # of the arguments' arrays to the outputs', for `jax.jit`
    tree: PyTree  # of the outputs
    entries: list[Entry]  # what it sends
    signature: Signature  # what the ranks compare
    same_module: Any  # the traced program, where all ranks must run one compiled program; or None
    arguments: list[str]  # in words
    donated: list[bool]  # for each array of the arguments
    outputs: list[str]  # in words
    equal: tuple[list[bool], list[bool]]  # which arrays of the arguments, and of the outputs, are the same on all ranks
    scalars: list[int]  # the arrays of the arguments that `replicated_argnums` names and that are one number
    captured: Sequence[Any] = ()  # the arrays that the function has from outside
    carried: Carried | None = None  # of which a call may show that a mean is forgotten
    structure: Any = None  # of the arguments
    key: Any = None
    announced: bool = False
    compiled_once: bool = False  # or left to JAX, as the ranks don't share it
    lower: Any = None  # of the arguments' arrays, to the `jax.stages.Lowered` of what `compiled` has returned

    @property
    def statement(self) -> compare.Statement | None:
        """What this rank is about to do; None where the ranks have nothing to agree on."""
        return self.signature.statement

    def numbers(self, leaves: Sequence[Any]) -> list[str]:
        """What Python and NumPy know of the arguments that must be equal on all ranks, such as the number of a step.

        Those that are numbers of JAX may not be known yet.
        """
        known = [i for i in self.scalars if not isinstance(leaves[i], jax.Array)]
        return [f"{self.arguments[i]} is {np.asarray(leaves[i]).item()}" for i in known]

    def lowered_to(self, lowered: Any) -> None:
        """Have the ranks compare what XLA compiles, a `jax.stages.Lowered`, where all must run the same."""
        if self.same_module is not None:
            self.signature.lowered_to(lowered, self.same_module)

    def __call__(self, leaves: Sequence[Any]) -> Any:
        """Trace it, inside of a `jax.jit`."""
        return self.tree.unflatten(self.call(leaves))

    def compiled(self, options: Mapping[str, Any], leaves: Sequence[Any]) -> Callable[[Sequence[Any]], Any]:
        """A function of the arguments' arrays that runs it, with these options of `jax.jit`.

        It returns an array that is ready when the program has ended, and that nobody donates, and the outputs. `leaves` are
        arrays of its first call; nothing is sent.
        """
        given, kept = ([i for i, d in enumerate(self.donated) if d == which] for which in (True, False))
        order = np.argsort([*given, *kept]).tolist()

        def flat(given: Sequence[Any], kept: Sequence[Any]) -> tuple[jax.Array, list[Any]]:
            refuse_nan_search(self.function.title)
            leaves = (*given, *kept)
            return jnp.zeros((), jnp.bool_), self.call([leaves[i] for i in order])

        def run(leaves: Sequence[Any]) -> Any:
            end, outs = jitted(take_given(leaves), take_kept(leaves))
            return end, self.tree.unflatten(outs)

        flat.__name__ = self.function.title
        jitted = jax.jit(flat, donate_argnums=0, **options)
        take_given, take_kept = _taker(given), _taker(kept)
        self.lower = lambda leaves: jitted.lower(take_given(leaves), take_kept(leaves))
        if self.same_module is not None and self.statement:
            self.lowered_to(self.lower(leaves))  # which the first call does not do again
        return run


def _taker(indices: Sequence[int]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """What takes these out of a list; mostly they are its first or its last."""
    if list(indices) == list(range(min(indices, default=0), max(indices, default=-1) + 1)):
        return itemgetter(slice(min(indices, default=0), max(indices, default=-1) + 1))
    return itemgetter(*indices)


def build_program(function: Function, args: Sequence[Any], kwargs: dict[str, Any], backend: Backend, *, hide: bool) -> Program:
    """Trace a function for arguments like these, check it and make it a program of `backend`."""
    paths, treedef, avals = _kinds(function, args, kwargs)
    if not backend.simulates and (stray := [path for path, leaf in paths if is_per_rank(leaf)]):
        raise TypeError(
            f"jaxmpi.jit: {_argument(stray[0])} of {function.title} is a PerRank, the values of simulated ranks, and this is "
            "no `with jaxmpi.simulate(n)`. Pass this rank's own array."
        )
    tree: PyTree = None

    def flat(*xs: Any) -> list[Any]:
        nonlocal tree
        some_args, some_kwargs = treedef.unflatten(xs)
        static = function.static
        some_args = [arg if i in static.nums else new for i, (arg, new) in enumerate(zip(args, some_args, strict=True))]
        some_kwargs = {name: kwargs[name] if name in static.names else new for name, new in some_kwargs.items()}
        check = watch_changes(function.title, (some_args, some_kwargs))
        outs, tree = jax.tree.flatten(function.fun(*some_args, **some_kwargs))
        check(outs)
        return outs

    _positions(
        "replicated_argnums", function.replicated.nums, max(len(args), 1), f"the positional arguments of {function.title} are"
    )
    size = backend.place.size
    jaxpr, captured, parameters = trace(flat, backend.axes, avals)
    replicated = [function.replicated.hold(path) and not is_own(path) for path, _ in paths]
    varies: list[bool] = []
    outside: list[str] = []
    constants = [*captured, *held(jaxpr)]
    if size > 1:
        try:
            varies = _varies(function, jaxpr, True, len(captured), replicated, tree, warn=backend.place.rank == 0)
        except ValueError as error:
            # Would it be right if the arrays from outside were equal on all ranks? They are compared with what is sent.
            if not any(map(communicates, _jaxcompat.parts(jaxpr)[0].eqns)) and constants:
                raise ValueError(
                    f"{error} It has an array from outside, which counts as different: make it an argument."
                ) from None
            if not constants or any(isinstance(x, jax.core.Tracer) for x in constants):
                raise
            varies = _varies(function, jaxpr, False, len(captured), replicated, tree, warn=False)
            outside = [_from_outside(x) for x in constants]
    outs, _ = jax.tree_util.tree_flatten_with_path(tree.unflatten(range(tree.num_leaves)))
    carried = None
    if size > 1:
        check_shards(function.title, jaxpr, [path for path, _ in paths], [path for path, _ in outs], len(captured))
    if size > 1 and function.of_user and not backend.simulates:
        carried = Carried.find(function.title, jaxpr, [path for path, _ in paths], [path for path, _ in outs], len(captured))
    if hide and size > 1:  # what is not hidden may be differentiated yet
        jaxpr = fold(jaxpr, size, fuses_mean=backend.fuses_mean)
    stacked = [False] * len(captured) + [is_per_rank(leaf) for _, leaf in paths]
    entries = list(summary(jaxpr, size, combine=backend.combines)) if size > 1 else []
    entries = [entry if entry.source else entry._replace(source=(_jaxcompat.caller_line(),)) for entry in entries]
    if entries and backend.same_module and not outside:
        outside = [_from_outside(x) for x in constants]
    arguments = [f"{_argument(path)}: {a.dtype.name}{list(a.shape)}" for (path, _), a in zip(paths, avals, strict=True)]
    decides = control_equations(jaxpr, _declared(function, tree) if entries else ()) if size > 1 else []
    decides += map(Line, outside)
    if names := [argument for argument, same in zip(arguments, replicated, strict=True) if same]:
        parameters = [*parameters, (f"{function.title} replicates {', '.join(names)}", "")]
    signature = Signature(function.title, entries, decides, parameters=parameters, arguments=arguments)
    traced = jaxpr if backend.same_module else None
    fingerprint = signature.statement.fingerprint if signature.statement else 0
    first = entries[0].call if entries and entries[0].times else None
    program, finish = lower.build(jaxpr, backend, stacked, first, fingerprint, hide=hide)

    def call(leaves: Sequence[Any]) -> list[Any]:
        arrays = [leaf.stack if is_per_rank(leaf) else leaf for leaf in leaves]
        return finish(program(*captured, *arrays))

    scalars = [i for i, (same, a) in enumerate(zip(replicated, avals, strict=True)) if same and a.shape == ()]
    donated = [function.donated.hold(path) for path, _ in paths]
    outputs = [f"output {leaf_name(path)}" for path, _ in outs]
    equal = replicated, [not differs and not is_own(path) for (path, _), differs in zip(outs, varies, strict=bool(varies))]
    return Program(
        function, call, tree, entries, signature, traced, arguments, donated, outputs, equal, scalars, captured, carried
    )


def refuse_nan_search(title: str) -> None:
    """Raise a FloatingPointError where JAX, having found a NaN, runs a program again, equation by equation, on this rank alone.

    That is what `jax_debug_nans` and `jax_debug_infs` do outside of traced code; the other ranks would not take part.
    """
    looked_for = jax.config.jax_debug_nans or jax.config.jax_debug_infs
    if looked_for and _jaxcompat.at_top_level() and not jax.config.jax_disable_jit:
        raise FloatingPointError(
            f"{title}: an output on this rank has a NaN (jax_debug_nans) or an infinity (jax_debug_infs). To find where it "
            "comes from, run the script on one rank, where JAX looks for the operation."
        )


def check_arguments(function: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Raise a TypeError or a ValueError that names an argument which no program can have."""
    _kinds(function, args, kwargs)
    function.key(function.leaves(args, kwargs), args, kwargs)


def _kinds(
    function: Function, args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[list[Any], Any, list[jax.ShapeDtypeStruct]]:
    """The arrays among the arguments with their paths, the structure, and shape and dtype of each."""
    paths, treedef = jax.tree_util.tree_flatten_with_path(function.dynamic(args, kwargs), is_leaf=is_per_rank)
    return paths, treedef, [_struct(function, path, leaf) for path, leaf in paths]


def _argument(path: Any) -> str:
    """The path of a leaf of (args, kwargs) in words."""
    (_, first, *rest) = path
    name = f"argument {first.idx}" if hasattr(first, "idx") else f"argument {first.key}"
    return name + jax.tree_util.keystr(tuple(rest))


def _struct(function: Function, path: Any, leaf: Any) -> jax.ShapeDtypeStruct:
    """Shape and dtype of one rank's array."""
    try:
        aval = jax.typeof(leaf.stack if is_per_rank(leaf) else leaf)
        shape = aval.shape[1:] if is_per_rank(leaf) else aval.shape
    except (TypeError, AttributeError) as error:
        raise TypeError(
            f"jaxmpi.jit: {_argument(path)} of {function.title} is a {type(leaf).__name__}, and no array or number. "
            "Name the argument in static_argnames, or take it out."
        ) from error
    if _jaxcompat.is_reference(aval):
        raise TypeError(
            f"jaxmpi.jit: {_argument(path)} of {function.title} is a reference, which cannot be an argument. "
            "Pass its value, ref[...], and return the new one."
        )
    return jax.ShapeDtypeStruct(shape, aval.dtype, weak_type=getattr(aval, "weak_type", False))


def _varies(
    function: Function, jaxpr: Any, outside: bool, captured: int, replicated: Sequence[bool], tree: PyTree, *, warn: bool
) -> list[bool]:
    """Which outputs may differ between the ranks, and whether the arrays from outside do is `outside`.

    Raises a ValueError where one may that is to be equal on all ranks, with its name.
    """
    varies = varying(jaxpr, [outside] * captured + [not same for same in replicated], constants=outside, warn=warn)
    paths, _ = jax.tree_util.tree_flatten_with_path(tree.unflatten(varies))
    for declared, (path, differs) in zip(_declared(function, tree), paths, strict=True):
        if differs and declared:
            raise ValueError(
                f"jaxmpi.jit: output {leaf_name(path)} of {function.title} is to be equal on all ranks, and it may differ "
                "between them. Average the gradients (jaxmpi.distributed, jaxmpi.tree_allreduce), and name in "
                "replicated_argnums the arguments that are equal on all ranks."
            )
    return varies


def _declared(function: Function, tree: PyTree) -> list[bool]:
    """Which arrays of the outputs `replicated_outnums` names."""
    node = tree.node_data()
    children = tree.children() if node is not None and issubclass(node[0], tuple | list) else [tree]
    outputs = _positions("replicated_outnums", function.outputs, len(children), f"{function.title} returns")
    positions = [i for i, child in enumerate(children) for _ in range(child.num_leaves)]
    paths, _ = jax.tree_util.tree_flatten_with_path(tree.unflatten(positions))
    return [position in outputs and not is_own(path) for path, position in paths]


def _from_outside(x: Any) -> str:
    """An array that the function has from outside, in words: equal ones in the same."""
    host = np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x)
    digest = hashlib.blake2b(host.tobytes(), digest_size=6).hexdigest()
    return f"an array from outside: {x.dtype}{list(x.shape)} with digest {digest}"


def _positions(option: str, numbers: Iterable[int], count: int, what: str) -> set[int]:
    """Positions below `count`, counted from the end where they are negative."""
    for i in numbers:
        if not -count <= i < count:
            raise ValueError(f"jaxmpi.jit: {option} has {i}, and {what} {count}. Name positions from 0 to {count - 1}.")
    return {i % count for i in numbers}
