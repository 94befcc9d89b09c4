"""Large arrays on backend xla: they travel in pieces, which make the same numbers."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmpi._axis import AXIS
from jaxmpi._backends import lax_collectives
from jaxmpi._backends.base import Collective

RANKS = 4
CALLS = [
    Collective("allreduce", op="sum"),
    Collective("allreduce", op="mean"),
    Collective("allreduce", op="max"),
    Collective("allgather"),
    Collective("alltoall"),
    Collective("reduce_scatter", op="sum"),
    Collective("permute", pairs=((0, 1), (1, 2), (2, 0))),
    Collective("bcast", root=2),
]


@pytest.mark.parametrize("call", CALLS, ids=lambda call: f"{call.kind} {call.op}".strip())
@pytest.mark.parametrize("dtype", ["float32", "int4"])
def test_pieces_make_the_same_numbers(monkeypatch, call, dtype):
    shapes = [(RANKS, 3, 4), (RANKS, 1), (RANKS, 0)]
    random = np.random.default_rng(0)
    stacks = [
        jnp.asarray(random.integers(-3, 3, (RANKS, *shape))).astype(dtype) for shape in shapes
    ]

    @partial(jax.vmap, axis_name=AXIS)
    def run(*xs):
        return lax_collectives.run_packed(call, xs)

    whole = run(*stacks)
    sent = [jax.ShapeDtypeStruct(shape, stacks[0].dtype) for shape in shapes]
    bytes_of_whole = lax_collectives.packed_messages(call, sent, RANKS)
    monkeypatch.setattr(lax_collectives, "LARGEST_BYTES", 16)
    for got, want in zip(run(*stacks), whole, strict=True):
        assert got.dtype == want.dtype
        np.testing.assert_array_equal(np.asarray(got), np.asarray(want))
    pieces = lax_collectives.packed_messages(call, sent, RANKS)
    assert sum(pieces) == sum(bytes_of_whole)
    assert str(jax.make_jaxpr(run)(*stacks)).count("concatenate") > 0
