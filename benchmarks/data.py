"""Time that the comparison of a few samples adds to `batches` of a million samples.

    jaxmpi run -n 2 benchmarks/data.py

Exits with 1 when it adds over 1 ms to the first iteration of a loader.
"""

import os
import platform
import statistics
import sys
import time

import jax
import numpy as np

import jaxmpi

N, REPEATS = 1_000_000, 100
LIMIT_MS = 1.0

world = jaxmpi.init()
sources = {
    "an array [N]": np.arange(N),
    "two arrays, [N, 16] and [N]": {"x": np.zeros((N, 16), np.float32), "y": np.arange(N)},
    "a list of dicts": [{"id": i, "path": f"{i}.png"} for i in range(N)],
    "a list of texts": [f"folder/{i}.png" for i in range(N)],
}


def first_iteration(data, allow):
    """Return the milliseconds in which a new loader begins its first iteration."""
    loader = jaxmpi.batches(data, 64, allow=allow)
    start = time.perf_counter()
    loader.agree()
    return 1e3 * (time.perf_counter() - start)


extra = {}
for name, data in sources.items():
    times = {"": [], "data_order": []}
    for _ in range(REPEATS):  # interleaved, so that both see the same machine
        for allow, values in times.items():
            jaxmpi.barrier()
            values.append(first_iteration(data, allow or ()))
    with_samples, without = (statistics.median(values) for values in times.values())
    extra[name] = with_samples - without
    if world.rank == 0:
        print(
            f"{name:28} {without:6.3f} ms without samples, {with_samples:6.3f} ms with: "
            f"extra {extra[name]:6.3f} ms (limit {LIMIT_MS})"
        )
if world.rank == 0:
    print(
        f"{platform.machine()}, {os.cpu_count()} cores, jax {jax.__version__}, {world.size} ranks"
    )
sys.exit(int(jaxmpi.broadcast_object(max(extra.values())) > LIMIT_MS))
