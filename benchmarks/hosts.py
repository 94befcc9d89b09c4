"""The mean of ResNet-50's parameters over ranks of several hosts, beside mpi4jax.

benchmarks/hosts.sh makes two hosts of this one. Exits with 1 if jaxmpi is not faster.
"""

import jax.numpy as jnp
import numpy as np
import peers
from common import Report, parser
from models import resnet50

import jaxmpi

report = Report("hosts", parser(__doc__).parse_args())
world = report.world
if world.local_size == world.size:
    report.show("all ranks are on one host: see benchmarks/hosts.sh")

for dtype in (jnp.float32, jnp.bfloat16):
    mine = jnp.arange(3_000_001.0).astype(dtype) * (world.rank + 1)
    total = jaxmpi.jit(jaxmpi.tree_allreduce)(mine)
    want = np.arange(3_000_001.0) * (world.size + 1) / 2
    np.testing.assert_allclose(np.float64(total), want, rtol=1e-5 if dtype == jnp.float32 else 2e-2)
report.show(f"{world.size} ranks, {world.local_size} on this host: the mean is right")

calls = {"jaxmpi": peers.jaxmpi_mean, "mpi4jax per leaf": peers.mpi4jax_per_leaf}
for case, shapes in {"1 KB": [(256,)], "ResNet-50": resnet50()}.items():
    times = report.measure(case, {name: peer(shapes, np.float32) for name, peer in calls.items()}, seconds=6.0)
    bound = {"at_least": 1.0} if case == "ResNet-50" else {}
    report.ratio(case, "mpi4jax per leaf / jaxmpi", times["mpi4jax per leaf"], times["jaxmpi"], **bound)
report.finish()
