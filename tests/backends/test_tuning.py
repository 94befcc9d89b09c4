"""Settings that a probe of the network decides, and those that it must leave alone."""

import itertools
import re
from functools import partial

import numpy as np
import pytest
from test_native import run

from jaxmpi._backends import tuning
from jaxmpi._backends.tuning import Network
from jaxmpi._lowering.explain import Cost, Speed

ROOM = 1 << 30
tuned = partial(tuning.tuned, piece_bytes=60 << 10)


@pytest.mark.parametrize(
    ("network", "nodes", "room", "asked", "chunks"),
    [
        (None, 2, ROOM, {}, 16),
        (Network(1e-4, 1e8), 2, ROOM, {}, 8),
        # 1.6 · 10 ms · 125 MB/s / 60 KB = 32.6, and 4 more
        (Network(1e-2, 1.25e8), 2, ROOM, {}, 37),
        (Network(1e-2, 1.25e8), 3, ROOM, {}, 70),  # two messages after each other
        (Network(1e-2, 1.25e8), 2, ROOM, {"chunk_bytes": 1 << 18}, 12),
        (Network(1e-2, 1.25e8), 16, ROOM, {}, 37),  # 8 after each other, chunks of 480 KB
        (Network(1e-1, 1.25e9), 2, ROOM, {}, 546),  # 32 MB
        (Network(1e-1, 1.25e9), 2, 32 << 20, {}, 273),  # half of what there is
        (Network(1e-1, 1.25e9), 2, 0, {}, 8),
        (Network(1e-1, 1.25e9), 2, ROOM, {"chunks": 3}, 3),
    ],
)
def test_chunks_on_their_way_cover_the_latency(network, nodes, room, asked, chunks):
    assert tuned(network, nodes, 1, room, asked).chunks == chunks


@pytest.mark.parametrize(
    ("nodes", "local_size", "kilobytes"),
    [(2, 1, 60), (2, 4, 240), (3, 1, 60), (8, 1, 240), (1250, 8, 512)],
)
def test_chunks_follow_from_the_nodes_and_their_ranks(nodes, local_size, kilobytes):
    assert tuned(None, nodes, local_size, ROOM, {}).chunk_bytes == kilobytes << 10


def test_a_probe_decides_nothing_that_changes_the_bits_of_a_sum():
    for latency, rate, nodes in itertools.product((1e-6, 1e-3, 1.0), (1e6, 1e9, 1e12), (2, 8, 9)):
        found = tuned(Network(latency, rate), nodes, 4, ROOM, {})
        assert found._replace(chunks=16, bucket_bytes=4 << 20) == tuned(None, nodes, 4, ROOM, {})


@pytest.mark.parametrize(
    ("network", "asked", "size"),
    [
        (None, {}, 4 << 20),
        (Network(1e-5, 1e9), {}, 1 << 20),
        (Network(1e-3, 1.25e8), {}, 4 << 20),  # 20 · 1 ms · 125 MB/s = 2.5 MB
        (Network(1e-1, 1.25e9), {}, 16 << 20),
        (Network(1e-3, 1.25e8), {"bucket_bytes": 5}, 5),
    ],
)
def test_beginning_a_bucket_costs_a_twentieth_of_it(network, asked, size):
    assert tuned(network, 2, 1, ROOM, asked).bucket_bytes == size


def test_predictions_lie_on_the_lines_between_what_was_measured():
    speed = Speed([1e3, 1e6, 25e6], [1e-4, 2e-3, 50e-3], 1e-6)
    for sent, want in [
        (10, 1e-4),
        (1e3, 1e-4),
        (1e6, 2e-3),
        (13e6, 26e-3),
        (25e6, 50e-3),
        (49e6, 98e-3),
    ]:
        np.testing.assert_allclose(speed.seconds_of(Cost(1, sent)), want)
    np.testing.assert_allclose(speed.seconds_of(Cost(3, 3e6)), 6e-3)
    np.testing.assert_allclose(speed.seconds_of(Cost(1, 1e6, 501)), 2.5e-3)
    assert speed.seconds_of(Cost(0, 0.0)) == 0.0


SAYS = """
import jaxmpi
jaxmpi.init(verbose=True)
jaxmpi.print(float(jaxmpi.tree_allreduce(1.0, "sum")))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tune", "said"),
    [
        ("", r"between nodes: \d+ µs, \d+ MB/s; \d+ chunks of 60 KB at once"),
        ("0", r"between nodes: 16 chunks of 60 KB at once"),
        ("chunks=3,chunk_bytes=65536", r"between nodes: 3 chunks of 64 KB at once"),
    ],
)
def test_what_was_chosen_is_said_once(tune, said, tmp_path):
    done = run(2, SAYS, tmp_path, JAXMPI_NODE_RANKS="1", JAXMPI_TUNE=tune)
    assert done.returncode == 0 and done.stdout.count("2.0") == 2, done.stdout + done.stderr
    assert len(re.findall(said, done.stderr)) == 1, done.stderr
