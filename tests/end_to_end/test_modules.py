"""The examples' programs are equal on all ranks, byte for byte, so one rank compiles for all."""

import re

import numpy as np
import pytest
from PIL import Image
from programs import on_ranks, run

RANKS = 4
# Runs a script, and notes what identifies each program that the ranks compile, with all that XLA
# gets of it; of one that calls Python, and that each rank compiles, its module.
DIGESTS = """
import hashlib, os, runpy, sys
from jaxmpi import _jaxcompat
digest_of = _jaxcompat.module_digest
def noted(lowered):
    digest = digest_of(lowered)
    text = lowered.as_text().encode()
    digests.append(digest or hashlib.blake2b(text, digest_size=16).hexdigest())
    return digest
digests, _jaxcompat.module_digest = [], noted
sys.argv = sys.argv[1:]
sys.path.insert(0, os.path.dirname(sys.argv[0]))
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
finally:
    import jaxmpi
    with open(f"{FOLDER}/{jaxmpi.rank()}", "w") as file:
        file.write(" ".join(digests))
"""
HALO = """
import jax, jax.numpy as jnp, numpy as np
from jax import lax
import jaxmpi
n = jaxmpi.init().size

@jaxmpi.jit
def step(x):
    rank = lax.axis_index(jaxmpi.AXIS)
    up, down = [(p, p + 1) for p in range(n - 1)], [(p + 1, p) for p in range(n - 1)]
    above, below = lax.ppermute(x[-1:], jaxmpi.AXIS, up), lax.ppermute(x[:1], jaxmpi.AXIS, down)
    above, below = jnp.where(rank > 0, above, x[:1]), jnp.where(rank < n - 1, below, x[-1:])
    padded = jnp.concatenate([above, x, below])
    return 0.5 * x + 0.25 * (padded[:-2] + padded[2:]), rank

x = jnp.full((4, 3), float(jaxmpi.rank()))
for _ in range(3):
    x, rank = step(x)
assert int(rank) == jaxmpi.rank()
total = jaxmpi.tree_allreduce(x.sum(), "sum")
np.testing.assert_allclose(total, 12 * n * (n - 1) / 2)
"""
EXAMPLES = {
    "digits": ["examples/digits.py", "--epochs", "1"],
    "gpt": [
        "examples/gpt.py",
        "--steps",
        "3",
        "--layers",
        "2",
        "--width",
        "32",
        "--length",
        "32",
        "--megabytes",
        "0.1",
    ],
    "deq": ["examples/deq.py", "--epochs", "1", "--width", "16"],
    "imagenet": [
        *(
            "examples/imagenet.py",
            "PHOTOS",
            "--out",
            "OUT",
            "--model",
            "resnet18",
            "--width",
            "4",
            "--pixels",
            "32",
        ),
        *("--batch-size", "16", "--epochs", "1", "--warmup", "0"),
    ],
    "halo": ["HALO"],
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_all_ranks_have_one_module(name, tmp_path):
    rng = np.random.default_rng(0)
    for part in ("train", "val"):
        for kind in "ab":
            (tmp_path / "photos" / part / kind).mkdir(parents=True)
            for i in range(16):
                image = Image.fromarray(rng.integers(0, 255, (40, 40, 3), np.uint8))
                image.save(tmp_path / "photos" / part / kind / f"{i}.jpg")
    (tmp_path / "halo.py").write_text(HALO)
    (tmp_path / "run.py").write_text(DIGESTS.replace("{FOLDER}", str(tmp_path)))
    places = {"PHOTOS": tmp_path / "photos", "OUT": tmp_path / "out", "HALO": tmp_path / "halo.py"}
    arguments = [str(places.get(argument, argument)) for argument in EXAMPLES[name]]
    run(on_ranks(RANKS, str(tmp_path / "run.py"), *arguments))
    found = [(tmp_path / str(rank)).read_text().split(" ") for rank in range(RANKS)]
    assert found[0] and all(re.fullmatch("[0-9a-f]{32}", digest) for digest in found[0]), found[0]
    assert found == [found[0]] * RANKS
