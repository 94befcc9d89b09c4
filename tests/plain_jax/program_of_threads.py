"""Several threads of each rank run programs on meshes of their own, in no common order.

The communicators of the meshes differ, so the programs do not meet; XLA needs a thread for each
program that waits in a collective (NPROC).
"""

import sys
import threading

import jax
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

jax.distributed.initialize()
devices, rank, times = jax.devices(), jax.process_index(), int(sys.argv[1])
n = len(devices)
meshes = [
    Mesh(np.array(devices).reshape(shape), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    for shape in ((n, 1), (n // 2, 2))
]
meshes.append(Mesh(np.array(devices[::-1]).reshape(1, n), ("a", "b")))
wrong = []


def work(i):
    mesh, axis = meshes[i], ("a", "b", "b")[i]
    spec = P(("a", "b"))
    program = jax.jit(
        jax.shard_map(
            lambda x: (lax.psum(x, axis), lax.all_gather(x, axis)),
            mesh=mesh,
            in_specs=spec,
            out_specs=spec,
            check_vma=False,
        )
    )
    place = [device.process_index for device in mesh.devices.flat].index(rank)
    size = mesh.shape[axis]
    first = place // size * size  # of the places that are summed
    total = sum(100 * place + i for place in range(first, first + size))
    for k in range(times):
        whole = np.repeat(100.0 * np.arange(n) + i, 300).reshape(n, 300) + k
        x = jax.make_array_from_callback(
            whole.shape, NamedSharding(mesh, spec), lambda index, whole=whole: whole[index]
        )
        sums, rows = program(x)
        rows = np.asarray(rows.addressable_data(0)).reshape(size, 300)
        if not (np.asarray(sums.addressable_data(0)) == total + size * k).all():
            wrong.append((i, k, "sum"))
        if not (rows == whole[first : first + size]).all():
            wrong.append((i, k, "rows"))


threads = [threading.Thread(target=work, args=(i,)) for i in range(len(meshes))]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(f"wrong: {wrong}", flush=True)
