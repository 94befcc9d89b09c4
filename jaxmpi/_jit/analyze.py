"""Analyze a traced program of several ranks, before it is lowered (`analyze`).

1. Which outputs may differ between the ranks? An output that is declared replicated may not.
2. Does each shard depend only on its elements? Can a call show that a mean was forgotten?
3. Fuse means, and plan the rounds of communication: the entries are its collectives.
4. Which computations decide what is sent, and so must be equal on all ranks (`control`)?
"""

import hashlib
from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import KeyPath, PyTreeDef
from jax.typing import ArrayLike

from jaxmpi import _jaxcompat
from jaxmpi._analysis.carried import CarriedState, carried_state
from jaxmpi._analysis.classify import communicates
from jaxmpi._analysis.control_slice import Line, control_equations
from jaxmpi._analysis.forgotten_mean import DivergenceCheck, next_values
from jaxmpi._analysis.inner_jaxprs import constants as constants_of
from jaxmpi._analysis.inner_jaxprs import equations
from jaxmpi._analysis.primitives import Op, op_of
from jaxmpi._analysis.replication import check_replication, may_vary
from jaxmpi._analysis.shards import check_shards
from jaxmpi._analysis.traced_program import TracedProgram
from jaxmpi._backends.interface import Ranks
from jaxmpi._consistency.findings import is_checked
from jaxmpi._jit.function import Function, positions
from jaxmpi._leaves import leaf_name, output_name
from jaxmpi._lowering.plan import Entry, Plan, entries_of, plan_of
from jaxmpi._per_rank_state import STATISTIC, flatten_with_path, is_per_rank_leaf, path_marks_of

__all__ = ["ProgramFacts", "analyze", "declared_outputs", "paths_of"]

# for an output that may differ, by the function of jaxmpi
REMEDIES = {
    "jaxmpi.jit": "Average the gradients (jaxmpi.distributed, jaxmpi.tree_allreduce), and name "
    "in replicated_argnums the arguments that are equal on all ranks.",
    "jaxmpi.pmap": "Average it with lax.pmean, name the arguments that are equal on all ranks in "
    "replicated_argnums, or give it an axis in out_axes.",
}


class ProgramFacts(NamedTuple):
    """Facts about a program before it is lowered.

    Attributes:
      plan: the plan of the program; None on one rank.
      replicated: which arrays of the arguments are equal on all ranks, and compared at the first
        call.
      varies: which outputs may differ between the ranks.
      entries: its collectives.
      control: lines of text that must be equal on all ranks.
      forgotten_mean: as in `Program`.
      batch: as in `Program`.
      carried: inputs that must be equal on all ranks, arrays from outside first; None if there are
        none.
    """

    plan: Plan | None
    replicated: Sequence[bool]
    varies: Sequence[bool]
    entries: Sequence[Entry]
    control: Sequence[Line]
    forgotten_mean: DivergenceCheck | None = None
    batch: Sequence[int] = ()
    carried: CarriedState | None = None


def analyze(
    function: Function,
    traced: TracedProgram,
    replicated: Sequence[bool],
    backend: Ranks,
    *,
    hide_effects: bool,
) -> ProgramFacts:
    """Analyze a program of several ranks, and check it.

    Args:
      function: the function that was traced.
      traced: its program.
      replicated: which of the arguments' arrays are equal on all ranks.
      backend: the ranks.
      hide_effects: as in `lower.build`. If it is False, the program may be differentiated later, so
        no mean is fused and no message started early: these have no derivative.

    Raises:
      ValueError: an output that is declared equal on all ranks may differ; a shard depends on more
        than its own elements.
    """
    title, jaxpr = function.title, traced.jaxpr
    found: tuple[list[bool], list[str]] | None = None
    with suppress(ValueError):
        found = _varying_outputs(function, traced, replicated, backend)
    if found is None:
        # Try again with statistics that stay equal counted as replicated. If that is enough, the
        # first call compares them.
        replicated = _with_statistics(function, traced, replicated)
        found = _varying_outputs(function, traced, replicated, backend)
    varies, outside = found
    check_shards(traced, backend.axes, api=function.api, title=title)
    # Values can be compared at the first call of a function of the user on several processes.
    can_compare = function.calls is None and len(backend.ranks_here) < backend.place.size
    candidates = next_values(traced) if can_compare else ()
    forgotten_mean = None
    if can_compare and is_checked("forgotten_mean", function.allowed):
        forgotten_mean = DivergenceCheck.find(title, jaxpr, candidates)
    carried = None
    checks = [is_checked(name, function.allowed) for name in ("unequal_start", "unequal_number")]
    if can_compare and any(checks):
        carried = carried_state(traced, candidates, rows=function.feeds_rows)
    target = backend.transport.target()
    plan = plan_of(
        jaxpr,
        backend.place.size,
        combine=target.combine,
        divides=target.divides if hide_effects else None,
        rounds_once=target.rounds_once,
        overlap=target.overlap if hide_effects else None,
    )
    entries: list[Entry] = []
    for entry in entries_of(plan):
        # A collective inside of a function of jaxmpi has the line of the user's call.
        source = entry.source or (_jaxcompat.caller_line(),)
        entries.append(entry._replace(source=source))
    # If all ranks run one module, its constants must be equal, too.
    if entries and backend.transport.shared_module(jaxpr) is not None and not outside:
        outside = [*map(_from_outside, [*traced.captured, *constants_of(jaxpr)])]
    control = [
        *control_equations(jaxpr, traced.declared if entries else ()),
        *map(Line, outside),
    ]
    batch: Sequence[int] = ()
    if can_compare and function.feeds_rows and entries:
        state = {each.source - traced.captured_count for each in candidates}
        batch = _batch(traced, state)
    return ProgramFacts(plan, replicated, varies, entries, control, forgotten_mean, batch, carried)


def _batch(traced: TracedProgram, state: Collection[int]) -> Sequence[int]:
    """Return the indices of the inputs that a train step does not return as state: the batch.

    There are none if the program returns no state, or if it asks for its rank: then it may select
    its rows by that.
    """
    if any(op_of(eqn) is Op.AXIS_INDEX for eqn in equations(traced.jaxpr)):
        return ()
    return [i for i in range(len(traced.ins)) if i not in state] if state else ()


def paths_of(tree: PyTreeDef) -> list[KeyPath]:
    """Return the paths of the leaves of a structure."""
    return [path for path, _ in flatten_with_path(tree.unflatten(range(tree.num_leaves)))[0]]


def _varying_outputs(
    function: Function, traced: TracedProgram, replicated: Sequence[bool], backend: Ranks
) -> tuple[list[bool], list[str]]:
    """Return which outputs may differ, and descriptions of captured arrays that must be equal.

    Raises:
      ValueError: an output may differ that is declared replicated, with its name.
    """
    may_warn = is_checked("repeated_mean", function.allowed)
    warn = may_warn and backend.place.rank == 0
    captured, differ = traced.captured, [not same for same in replicated]
    try:
        varies = _varies(
            function, traced, [True] * len(captured) + differ, constants=True, warn=warn
        )
        return varies, []
    except ValueError as error:
        refusal = error  # Python would show it, too, if the next try raised inside of this block
    # Try again with captured arrays counted as replicated. If that is enough, their digests become
    # part of the signature. A program without collectives has no signature, so there it remains an
    # error.
    constants = [*captured, *constants_of(traced.jaxpr)]
    if not any(map(communicates, _jaxcompat.parts(traced.jaxpr)[0].eqns)) and constants:
        raise ValueError(
            f"{refusal} Or the function uses an array from outside, which counts as different "
            "on each rank: make it an argument."
        )
    if not constants or any(isinstance(x, jax.core.Tracer) for x in constants):
        raise refusal
    # A reference still counts as different: what a call writes into it may differ.
    are_references = [_is_reference(x) for x in captured]
    try:
        varies = _varies(function, traced, are_references + differ, constants=False, warn=False)
        return varies, [*map(_from_outside, constants)]
    except ValueError as error:
        refusal = error
    if any(are_references):
        raise ValueError(
            f"{refusal} Or the function uses a reference from outside, which counts as different "
            "on each rank: make its value, ref[...], an argument, and return the new one."
        )
    raise refusal


def _with_statistics(
    function: Function, traced: TracedProgram, replicated: Sequence[bool]
) -> list[bool]:
    """Return which inputs are equal on all ranks, statistics that stay equal included.

    An `nnx.BatchStat` counts as per-rank, because that of BatchNorm depends on the rank's batch.
    But `nnx.SpectralNorm` keeps the state of a power iteration in one, which depends on the
    parameters and on itself alone: by induction it is equal after each call if it is before the
    first.

    An output is the next value of an input if it has the same path within an output as the input
    has within an argument.
    """
    # the candidates: for each statistic of a replicated argument, the outputs with its next value
    assumed_equal: dict[int, list[int]] = {}
    for i, path in enumerate(traced.ins):
        if function.replicates(path) and path_marks_of(path) == [STATISTIC]:
            name = leaf_name(path[2:])
            assumed_equal[i] = [
                j for j, out in enumerate(traced.outs) if leaf_name(out[1:]) == name
            ]
    # Assume that all candidates are equal. Drop those whose next value may still differ, and
    # repeat until none is dropped.
    while True:
        differ = [not (same or i in assumed_equal) for i, same in enumerate(replicated)]
        varies = may_vary(traced.jaxpr, [True] * traced.captured_count + differ)
        left: dict[int, list[int]] = {}
        for i, outputs in assumed_equal.items():
            if outputs and not any(varies[j] for j in outputs):
                left[i] = outputs
        if left == assumed_equal:
            return [not differs for differs in differ]
        assumed_equal = left


def _varies(
    function: Function,
    traced: TracedProgram,
    differ: Sequence[bool],
    *,
    constants: bool,
    warn: bool,
) -> list[bool]:
    """Return which outputs may differ, given which inputs `differ`, and whether `constants` do.

    Raises:
      ValueError: an output that is declared replicated may differ, with its name.
    """
    varies = check_replication(
        traced.jaxpr,
        differ,
        constants=constants,
        warn=warn,
        api=function.api,
        title=function.title,
    )
    for path, is_declared, differs in zip(traced.outs, traced.declared, varies, strict=True):
        if differs and is_declared:
            remedy = REMEDIES.get(function.api, REMEDIES["jaxmpi.jit"])
            raise ValueError(
                f"{function.api}: {output_name(path)} of {function.title} is declared replicated "
                "but may differ across ranks. "
                f"{remedy}"
            )
    return varies


def declared_outputs(function: Function, tree: PyTreeDef) -> list[bool]:
    """Return which arrays of the outputs, of structure `tree`, are declared replicated.

    Raises:
      ValueError: `replicated_outnums` names a position that is not there.
    """
    # Positions count the elements of a tuple or list; any other result is position 0.
    node = tree.node_data()
    children = tree.children() if node is not None and issubclass(node[0], tuple | list) else [tree]
    outputs = positions(
        function.api,
        "replicated_outnums",
        function.outputs,
        len(children),
        f"{function.title} returns",
    )
    numbers: list[int] = []  # for each leaf, that of its output
    for i, child in enumerate(children):
        numbers += [i] * child.num_leaves
    return [
        (number in outputs or function.equal_output(path)) and not is_per_rank_leaf(path)
        for path, number in zip(paths_of(tree), numbers, strict=True)
    ]


def _is_reference(x: ArrayLike) -> bool:
    """Return whether a captured array is a reference to one, as `jax.new_ref` returns."""
    return _jaxcompat.is_reference(getattr(x, "aval", None))


def _from_outside(x: ArrayLike) -> str:
    """Describe a captured array by a text that is equal on two ranks if the arrays are.

    The array in a reference changes, so the text has its type alone.
    """
    if _is_reference(x):
        return f"a reference from outside: {x.dtype}{list(x.shape)}"
    host = np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x)
    digest = hashlib.blake2b(host.tobytes(), digest_size=6).hexdigest()
    return f"an array from outside: {x.dtype}{list(x.shape)} with digest {digest}"
