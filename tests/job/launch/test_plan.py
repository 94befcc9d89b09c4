"""Laws of the message plan, in plain Python."""

import itertools

import numpy as np

from jaxmpi._backends import wire


def test_messages_cover_every_column_once():
    generator = np.random.default_rng(3)
    for _ in range(300):
        columns = [int(n) for n in generator.integers(0, 60, generator.integers(0, 12))]
        itemsize, small_bytes, max_items = (
            int(generator.integers(1, high)) for high in (17, 80, 40)
        )
        plan = wire.messages(columns, itemsize, small_bytes=small_bytes, max_items=max_items)
        seen = []
        for p in itertools.chain(*plan):
            seen += [(p.leaf, column) for column in range(p.start, p.stop)]
        wanted = []
        for leaf, count in enumerate(columns):
            wanted += [(leaf, column) for column in range(count)]
        assert sorted(seen) == wanted
        for message in plan:
            length = sum(p.stop - p.start for p in message)
            assert length <= max_items or length * itemsize < small_bytes
            assert len(message) == 1 or length * itemsize <= small_bytes


def test_messages_packs_small_leaves_into_one():
    assert len(wire.messages([3] * 100, 4)) == 1


def test_messages_splits_beyond_the_count_of_mpi():
    plan = wire.messages([5 * 2**30 + 7], 4)
    assert [p.stop - p.start for (p,) in plan] == [2**30] * 5 + [7]
