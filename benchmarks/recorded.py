"""Run a training script and record the bits of its jitted steps and what `explain` says of them.

    jaxmpi run -n 2 benchmarks/recorded.py FOLDER examples/digits.py --epochs 3

Each rank writes FOLDER/rank<r>.json: for each jitted function, in the order of their first calls,
its name, explain's table without the column of seconds, and a hash of what each call returned. Only
public functions of jaxmpi are used, so that the same file records an older jaxmpi.
benchmarks/parity.py compares two such folders.
"""

import hashlib
import json
import os
import re
import runpy
import sys
from functools import partial
from pathlib import Path

import jax
import numpy as np
from flax import nnx

import jaxmpi

SECONDS_COLUMN = re.compile(r" +(seconds|\d\.\de[+-]\d\d)$", re.MULTILINE)


class RecordedStep:
    """A jitted function that is explained before its first call, and whose results are hashed."""

    def __init__(self, step, records):
        self._step, self._records, self._record = step, records, None

    def __call__(self, *args, **kwargs):
        if self._record is None:
            table = SECONDS_COLUMN.sub("", jaxmpi.explain(self._step, *args, **kwargs).text)
            name = getattr(self._step, "__name__", "step")
            self._record = {"name": name, "table": table, "calls": []}
            self._records.append(self._record)
        out = self._step(*args, **kwargs)
        # nn.jit changes its objects in place, so they are part of the result
        self._record["calls"].append(
            hashed((out, args, kwargs) if holds_objects((args, kwargs)) else out)
        )
        return out

    def __getattr__(self, name):
        return getattr(self._step, name)


def is_object(x):
    return isinstance(x, nnx.Object)


def holds_objects(tree):
    return any(map(is_object, jax.tree.leaves(tree, is_leaf=is_object)))


def hashed(tree):
    """Return 16 digits of SHA-256 over the dtypes, shapes and bytes of all arrays."""
    digest = hashlib.sha256()
    tree = jax.tree.map(lambda x: nnx.state(x) if is_object(x) else x, tree, is_leaf=is_object)
    for leaf in jax.tree.leaves(jaxmpi.local(tree)):
        if isinstance(leaf, jax.Array) and jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        array = np.asarray(leaf)
        digest.update(f"{array.dtype}{list(array.shape)}".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()[:16]


def recording(make, records):
    """Wrap `jaxmpi.jit` or `jaxmpi.nn.jit` so that it makes a RecordedStep."""

    def jit(fun=None, **options):
        if fun is None:
            return partial(jit, **options)
        return RecordedStep(make(fun, **options), records)

    return jit


def main():
    folder, script, *arguments = sys.argv[1:]
    records = []
    jaxmpi.jit = recording(jaxmpi.jit, records)
    jaxmpi.nn.jit = recording(jaxmpi.nn.jit, records)
    sys.argv = [script, *arguments]
    # as Python does for a script, which imports what is beside it
    sys.path[0] = os.path.dirname(script)
    runpy.run_path(script, run_name="__main__")
    Path(folder).mkdir(parents=True, exist_ok=True)
    Path(folder, f"rank{jaxmpi.rank()}.json").write_text(json.dumps(records))


if __name__ == "__main__":
    main()
