"""From a call to its program: the function is traced for the kinds of its arguments, checked, and made one of the backend."""

from collections.abc import Callable, Sequence
from functools import partial, update_wrapper

import jax
from jax.extend.core import ClosedJaxpr
from jax.tree_util import PyTreeDef

from jaxmpi._backends.interface import Ranks
from jaxmpi._jit.analyze import Analysis, analyze, paths_of
from jaxmpi._jit.arguments import argument_name, checked
from jaxmpi._jit.function import Function, Leaf, is_per_rank
from jaxmpi._jit.lost_nnx_changes import watch_changes
from jaxmpi._jit.program import Program
from jaxmpi._job.process.garbage import collection_paused
from jaxmpi._leaves import PyTree, output_name
from jaxmpi._lowering import lower
from jaxmpi._lowering.refuse import Refusals
from jaxmpi._lowering.signature import Signature
from jaxmpi._lowering.trace import prepared, trace
from jaxmpi._per_rank_state import is_per_rank_leaf

__all__ = ["build_program", "watched"]


def watched(function: Function) -> Callable[..., PyTree]:
    """The function, with an error where it changes nnx objects and the change would be lost."""

    @partial(update_wrapper, wrapped=function.fun, updated=())
    def traced(*args: PyTree, **kwargs: PyTree) -> PyTree:
        check = watch_changes(function.api, function.title, (args, kwargs))
        outs = function.fun(*args, **kwargs)
        check(jax.tree.leaves(outs))
        return outs

    return traced


class _Flat:
    """A function of the arrays of its arguments, which returns those of its outputs; it is called once."""

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
        carried=found.carried,
        fed=found.fed,
    )
