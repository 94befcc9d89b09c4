"""One JAX primitive for all collectives, in eager, jitted, differentiated and batched code.

With ct the cotangents, and each collective linear in x (max, min and prod get their derivatives in
`_collectives`):

| collective | its transpose |
|---|---|
| allreduce sum | allreduce sum |
| bcast from root | allreduce sum on root, zero elsewhere |
| allgather | reduce_scatter sum |
| reduce_scatter sum | allgather |
| alltoall | alltoall |
| permute | permute, the other way |

The convention is that of `lax.psum` under `vmap`, `pmap` and `shard_map(check_vma=False)`: the
derivative is that of the sum of all ranks' outputs.
"""

from collections.abc import Hashable, Sequence

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jaxmpi._backends.base import Collective
from jaxmpi._backends.interface import Transport

__all__ = ["compare_fingerprint", "run"]

collective_p = Primitive("jaxmpi_collective")
collective_p.multiple_results = True

TRANSPOSED = {
    "allreduce": Collective("allreduce", op="sum"),
    "bcast": Collective("allreduce", op="sum"),
    "allgather": Collective("reduce_scatter", op="sum"),
    "reduce_scatter": Collective("allgather"),
    "alltoall": Collective("alltoall"),
    "permute": Collective("permute"),
}


def run(call: Collective, xs: Sequence[jax.Array], transport: Transport) -> list[jax.Array]:
    """Carry out one collective on a list of arrays; nothing is sent for an empty list."""
    return collective_p.bind(*xs, call=call, transport=transport) if xs else []


def compare_fingerprint(fingerprint: int, transport: Transport, *, later: bool) -> None:
    """Compare the fingerprint of a program with the other ranks', in the order of collectives.

    Args:
      fingerprint: that of the program.
      transport: whose messages compare programs.
      later: whether calls after the first are compared with the next message.
    """
    collective_p.bind(
        call=Collective("compare_later" if later else "compare", fingerprint=fingerprint),
        transport=transport,
    )


def _abstract(
    *xs: ShapedArray, call: Collective, transport: Transport
) -> tuple[list[ShapedArray], frozenset[Hashable]]:
    size = transport.size
    return [
        ShapedArray(call.out_shape(x.shape, size), x.dtype, weak_type=x.weak_type) for x in xs
    ], transport.effects


def _jvp(
    primals: Sequence[jax.Array],
    tangents: Sequence[jax.Array | ad.Zero],
    *,
    call: Collective,
    transport: Transport,
) -> tuple[list[jax.Array], list[jax.Array | ad.Zero]]:
    if call.op not in ("", "sum"):
        raise TypeError(
            f"jaxmpi: {call.kind} with op {call.op!r} is not linear. Call it through "
            "jaxmpi.tree_allreduce."
        )
    outs = collective_p.bind(*primals, call=call, transport=transport)
    live = [t for t in tangents if type(t) is not ad.Zero]
    moved = iter(run(call, live, transport))
    tangents_out = [
        next(moved) if type(t) is not ad.Zero else ad.Zero(t.aval.update(shape=out.shape))
        for t, out in zip(tangents, outs, strict=True)
    ]
    return outs, tangents_out


def _transpose(
    cts: Sequence[jax.Array | ad.Zero],
    *xs: ad.UndefinedPrimal,
    call: Collective,
    transport: Transport,
) -> list[jax.Array | ad.Zero]:
    live = [ct for ct in cts if type(ct) is not ad.Zero]
    back_call = TRANSPOSED[call.kind]._replace(
        pairs=tuple((q, p) for p, q in call.pairs), groups=call.groups
    )
    moved = iter(run(back_call, live, transport))
    roots = [group[call.root] for group in call.groups] or [call.root]
    keep = jnp.isin(transport.rank(), jnp.array(roots, jnp.int32)) if call.kind == "bcast" else True
    outs: list[jax.Array | ad.Zero] = []
    for ct, x in zip(cts, xs, strict=True):
        if type(ct) is ad.Zero:
            outs.append(ad.Zero(x.aval))
        else:
            back = next(moved)
            outs.append(jnp.where(keep, back, 0) if call.kind == "bcast" else back)
    return outs


def _batch(
    xs: Sequence[jax.Array], dims: Sequence[int | None], *, call: Collective, transport: Transport
) -> tuple[list[jax.Array], list[int | None]]:
    # the batch axis goes last, out of the way of the axis over ranks: one message for the whole
    # batch
    moved = [x if d is None else jnp.moveaxis(x, d, -1) for x, d in zip(xs, dims, strict=True)]
    outs = collective_p.bind(*moved, call=call, transport=transport)
    return outs, [d if d is None else out.ndim - 1 for d, out in zip(dims, outs, strict=True)]


_compiled = jax.jit(collective_p.bind, static_argnames=("call", "transport"))


def _eager(*xs: jax.Array, call: Collective, transport: Transport) -> list[jax.Array]:
    with jax.disable_jit(False):  # or, under jax.disable_jit, it would call itself
        return _compiled(*xs, call=call, transport=transport)


def _lower(*xs: jax.Array, call: Collective, transport: Transport) -> list[jax.Array]:
    return transport.run(call, xs)


collective_p.def_effectful_abstract_eval(_abstract)
collective_p.def_impl(_eager)
ad.primitive_jvps[collective_p] = _jvp
ad.primitive_transposes[collective_p] = _transpose
batching.primitive_batchers[collective_p] = _batch
mlir.register_lowering(collective_p, mlir.lower_fun(_lower, multiple_results=True))
