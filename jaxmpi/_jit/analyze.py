"""Analyze a traced program of several ranks.

The analysis lists the messages of the program, the computations that control them and so must be
equal on all ranks, and the outputs that may differ.
"""

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr
from jax.tree_util import KeyPath, PyTreeDef
from jax.typing import ArrayLike

from jaxmpi import _jaxcompat
from jaxmpi._analysis.classify import communicates
from jaxmpi._analysis.control_slice import Line, control_equations
from jaxmpi._analysis.forgotten_mean import DivergenceCheck, pairs
from jaxmpi._analysis.inner_jaxprs import constants as constants_of
from jaxmpi._analysis.inner_jaxprs import equations
from jaxmpi._analysis.primitives import Op, op_of
from jaxmpi._analysis.replication import varying
from jaxmpi._analysis.shards import check_shards
from jaxmpi._backends.interface import Ranks
from jaxmpi._jit.function import Function, positions
from jaxmpi._leaves import leaf_name, output_name
from jaxmpi._lowering.means import fuse_means
from jaxmpi._lowering.plan import Entry, Plan, entries_of, plan_of
from jaxmpi._per_rank_state import STATISTIC, flatten_with_path, is_per_rank_leaf, marks_of

__all__ = ["Analysis", "analyze", "paths_of"]

# for an output that may differ, by the function of jaxmpi
REMEDIES = {
    "jaxmpi.jit": "Average the gradients (jaxmpi.distributed, jaxmpi.tree_allreduce), and name "
    "in replicated_argnums the arguments that are equal on all ranks.",
    "jaxmpi.pmap": "Average it with lax.pmean, name the arguments that are equal on all ranks in "
    "replicated_argnums, or give it an axis in out_axes.",
}


class Analysis(NamedTuple):
    """Facts about a program before it is lowered."""

    jaxpr: ClosedJaxpr  # with the means that the backend takes on the way
    plan: Plan | None  # of that; None on one rank
    # which inputs are equal on all ranks, and compared at the first call
    replicated: Sequence[bool]
    varies: Sequence[bool]  # which outputs may differ between the ranks
    entries: Sequence[Entry]  # what it sends
    control: Sequence[Line]  # what must be equal on all ranks for that
    divergence: DivergenceCheck | None = None  # finds a forgotten mean at the first call
    # arrays of the arguments that must not all be equal, as all ranks would do the same
    fed: Sequence[int] = ()


def analyze(
    function: Function,
    jaxpr: ClosedJaxpr,
    captured: Sequence[ArrayLike],
    ins: Sequence[KeyPath],
    replicated: Sequence[bool],
    tree: PyTreeDef,
    backend: Ranks,
    *,
    hide: bool,
) -> Analysis:
    """Analyze a program of several ranks, and check it.

    Args:
      function: that was traced.
      jaxpr: of `trace.trace`.
      captured: the arrays that the function has from outside, the first inputs of `jaxpr`.
      ins: the paths of the other inputs.
      replicated: which of those are equal on all ranks.
      tree: the structure of the outputs.
      backend: the ranks.
      hide: as in `lower.build`; what is not hidden may be differentiated yet.

    Raises:
      ValueError: an output that is declared equal on all ranks may differ; a shard depends on more
        than its own elements.
    """
    outs, title = paths_of(tree), function.title
    try:
        varies, outside = _varying_outputs(function, jaxpr, captured, replicated, tree, backend)
    except ValueError:
        # would it be right if statistics that stay equal were equal? They are compared, then
        replicated = _with_statistics(function, jaxpr, len(captured), ins, replicated, outs)
        varies, outside = _varying_outputs(function, jaxpr, captured, replicated, tree, backend)
    check_shards(title, jaxpr, ins, outs, len(captured), backend.axes, function.api)
    # the ranks of other processes may get other values; simulated ones are stacked
    looks = function.calls is None and len(backend.ranks_here) < backend.place.size
    divergence = DivergenceCheck.find(title, jaxpr, ins, outs, len(captured)) if looks else None
    constants, target = [*captured, *constants_of(jaxpr)], backend.transport.target()
    if hide:
        jaxpr = fuse_means(jaxpr, backend.place.size, fuses_mean=target.divides)
    plan = plan_of(
        jaxpr,
        backend.place.size,
        combine=target.combine,
        overlap=target.overlap if hide else None,
    )
    entries: list[Entry] = []
    for entry in entries_of(plan):
        source = entry.source or (_jaxcompat.caller_line(),)
        entries.append(entry._replace(source=source))
    if entries and backend.transport.shared_module(jaxpr) is not None and not outside:
        outside = [*map(_from_outside, constants)]
    control = [
        *control_equations(jaxpr, _declared(function, tree) if entries else ()),
        *map(Line, outside),
    ]
    fed = _fed(jaxpr, ins, outs, len(captured)) if looks and function.feeds_rows and entries else ()
    return Analysis(jaxpr, plan, replicated, varies, entries, control, divergence, fed)


def _fed(
    jaxpr: ClosedJaxpr, ins: Sequence[KeyPath], outs: Sequence[KeyPath], captured: int
) -> Sequence[int]:
    """Return the arguments' arrays that a train step does not return as state, such as the batch.

    There are none if it is no train step, or asks for its rank's number: it may select its rows by
    that.
    """
    if any(op_of(eqn) is Op.AXIS_INDEX for eqn in equations(jaxpr)):
        return ()
    kept = {pair.source - captured for pair in pairs(jaxpr, ins, outs, captured)}
    return [i for i in range(len(ins)) if i not in kept] if kept else ()


def paths_of(tree: PyTreeDef) -> list[KeyPath]:
    """Return the paths of the leaves of a structure."""
    return [path for path, _ in flatten_with_path(tree.unflatten(range(tree.num_leaves)))[0]]


def _varying_outputs(
    function: Function,
    jaxpr: ClosedJaxpr,
    captured: Sequence[ArrayLike],
    replicated: Sequence[bool],
    tree: PyTreeDef,
    backend: Ranks,
) -> tuple[list[bool], list[str]]:
    """Return which outputs may differ, and descriptions of arrays from outside that must be equal.

    Raises:
      ValueError: an output may differ that is declared replicated, with its name.
    """
    try:
        return _varies(
            function, jaxpr, True, len(captured), replicated, tree, warn=backend.place.rank == 0
        ), []
    except ValueError as error:
        # Would it be right if the arrays from outside were equal on all ranks? They are compared
        # with what is sent.
        constants = [*captured, *constants_of(jaxpr)]
        if not any(map(communicates, _jaxcompat.parts(jaxpr)[0].eqns)) and constants:
            raise ValueError(
                f"{error} Or the function uses an array from outside, which counts as different "
                "on each rank: make it an argument."
            ) from None
        if not constants or any(isinstance(x, jax.core.Tracer) for x in constants):
            raise
        varies = _varies(function, jaxpr, False, len(captured), replicated, tree, warn=False)
        return varies, [*map(_from_outside, constants)]


def _with_statistics(
    function: Function,
    jaxpr: ClosedJaxpr,
    captured: int,
    ins: Sequence[KeyPath],
    replicated: Sequence[bool],
    outs: Sequence[KeyPath],
) -> list[bool]:
    """Return which inputs are equal on all ranks, statistics that stay equal included.

    An `nnx.BatchStat` is each rank's own, as that of BatchNorm depends on the rank's batch.
    `nnx.SpectralNorm` has the state of a power iteration in one, which depends on the parameters
    and on itself alone: by induction it is equal after each call if it is before the first. An
    output is the next value of each input with its path in an argument.
    """
    following: dict[int, list[int]] = {}
    for i, path in enumerate(ins):
        if function.replicates(path) and marks_of(path) == [STATISTIC]:
            name = leaf_name(path[2:])
            following[i] = [j for j, out in enumerate(outs) if leaf_name(out[1:]) == name]
    while True:
        differ = [not (same or i in following) for i, same in enumerate(replicated)]
        varies = varying(jaxpr, [True] * captured + differ, constants=True, warn=False)
        left = {
            i: after
            for i, after in following.items()
            if after and not any(varies[j] for j in after)
        }
        if left == following:
            return [not differs for differs in differ]
        following = left


def _varies(
    function: Function,
    jaxpr: ClosedJaxpr,
    outside: bool,
    captured: int,
    replicated: Sequence[bool],
    tree: PyTreeDef,
    *,
    warn: bool,
) -> list[bool]:
    """Return which outputs may differ; `outside` is whether arrays from outside may.

    Raises a ValueError if an output that is declared replicated may differ, with its name.
    """
    varies = varying(
        jaxpr,
        [outside] * captured + [not same for same in replicated],
        constants=outside,
        warn=warn,
        api=function.api,
    )
    paths, _ = jax.tree_util.tree_flatten_with_path(tree.unflatten(varies))
    for declared, (path, differs) in zip(_declared(function, tree), paths, strict=True):
        if differs and declared:
            remedy = REMEDIES.get(function.api, REMEDIES["jaxmpi.jit"])
            raise ValueError(
                f"{function.api}: {output_name(path)} of {function.title} is declared replicated "
                "but may differ across ranks. "
                f"{remedy}"
            )
    return varies


def _declared(function: Function, tree: PyTreeDef) -> list[bool]:
    """Return which arrays of the outputs are declared replicated."""
    node = tree.node_data()
    children = tree.children() if node is not None and issubclass(node[0], tuple | list) else [tree]
    outputs = positions(
        function.api,
        "replicated_outnums",
        function.outputs,
        len(children),
        f"{function.title} returns",
    )
    numbers = [i for i, child in enumerate(children) for _ in range(child.num_leaves)]
    paths, _ = flatten_with_path(tree.unflatten(numbers))
    return [
        (number in outputs or function.equal_output(path)) and not is_per_rank_leaf(path)
        for path, number in paths
    ]


def _from_outside(x: ArrayLike) -> str:
    """Describe an array from outside: the text is equal if the arrays are."""
    host = np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x)
    digest = hashlib.blake2b(host.tobytes(), digest_size=6).hexdigest()
    return f"an array from outside: {x.dtype}{list(x.shape)} with digest {digest}"
