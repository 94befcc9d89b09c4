"""What a probe of the network decides, and what it may not decide."""

import itertools
import re

import numpy as np
import pytest
from test_native import run

from jaxmpi._backends.tuning import CHUNKS, Network, Tuning, tuned
from jaxmpi._lowering.costs import Cost, Speed

ROOM = 1 << 30


@pytest.mark.parametrize(
    ("network", "room", "asked", "chunks"),
    [
        (None, ROOM, {}, 16),
        (Network(1e-4, 1e8), ROOM, {}, 16),
        (Network(1e-2, 1.25e8), ROOM, {}, 20),  # 8 · 10 ms · 125 MB/s = 10 MB
        (Network(1e-2, 1.25e8), ROOM, {"chunk_bytes": 1 << 18}, 39),
        (Network(1e-1, 1.25e9), ROOM, {}, 64),
        (Network(1e-1, 1.25e9), 32 << 20, {}, 32),  # half of what there is
        (Network(1e-1, 1.25e9), 0, {}, 16),
        (Network(1e-1, 1.25e9), ROOM, {"chunks": 3}, 3),
    ],
)
def test_chunks_on_their_way_cover_the_latency(network, room, asked, chunks):
    assert tuned(network, 2, room, asked).chunks == chunks


def test_a_probe_decides_nothing_that_changes_the_bits_of_a_sum():
    for latency, rate in itertools.product((1e-6, 1e-3, 1.0), (1e6, 1e9, 1e12)):
        assert tuned(Network(latency, rate), 9, ROOM, {})._replace(chunks=CHUNKS[0]) == Tuning()
        assert tuned(Network(latency, rate), 8, ROOM, {})._replace(chunks=CHUNKS[0], bucket_bytes=4 << 20) == Tuning()


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
    assert tuned(network, 2, ROOM, asked).bucket_bytes == size


def test_predictions_lie_on_the_lines_between_what_was_measured():
    speed = Speed([1e3, 1e6, 25e6], [1e-4, 2e-3, 50e-3], 1e-6)
    for sent, want in [(10, 1e-4), (1e3, 1e-4), (1e6, 2e-3), (13e6, 26e-3), (25e6, 50e-3), (49e6, 98e-3)]:
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
        ("", r"between nodes: \d+ µs, \d+ MB/s; \d+ chunks of 512 KB at once"),
        ("0", r"between nodes: 16 chunks of 512 KB at once"),
        ("chunks=3,chunk_bytes=65536", r"between nodes: 3 chunks of 64 KB at once"),
    ],
)
def test_what_was_chosen_is_said_once(tune, said, tmp_path):
    done = run(2, SAYS, tmp_path, JAXMPI_NODE_RANKS="1", JAXMPI_TUNE=tune)
    assert done.returncode == 0 and done.stdout.count("2.0") == 2, done.stdout + done.stderr
    assert len(re.findall(said, done.stderr)) == 1, done.stderr
