"""Large arrays on backend xla: they travel in pieces, which make the same numbers."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmpi._axis import AXIS
from jaxmpi._backends import lax_collectives, wire
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
    # with arrays that are too large to be packed with others
    shapes = [(RANKS, 2, 50_000), (RANKS, 1), (RANKS, 0)]
    random = np.random.default_rng(0)
    stacks = [
        jnp.asarray(random.integers(-3, 3, (RANKS, *shape))).astype(dtype) for shape in shapes
    ]

    @partial(jax.vmap, axis_name=AXIS)
    def run(*xs):
        return lax_collectives.run_packed(call, xs)

    whole = run(*stacks)
    sent = [jax.ShapeDtypeStruct(shape, stacks[0].dtype) for shape in shapes]
    whole_bytes = lax_collectives.packed_messages(call, sent, RANKS)
    largest = 80_000
    monkeypatch.setattr(lax_collectives, "LARGEST_BYTES", largest)
    for got, want in zip(run(*stacks), whole, strict=True):
        assert got.dtype == want.dtype
        np.testing.assert_array_equal(np.asarray(got), np.asarray(want))
    bytes_of_messages = lax_collectives.packed_messages(call, sent, RANKS)
    assert sum(bytes_of_messages) == sum(whole_bytes)
    if call.kind != "allreduce":  # one collective of several arrays
        assert max(bytes_of_messages) <= RANKS * wire.SMALL_BYTES < max(whole_bytes)
