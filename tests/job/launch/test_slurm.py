"""Ranks that Slurm's srun starts on one node train, end after a death, and stop in order."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from jaxmpi._job.launch import mpiexec

HERE = Path(__file__).parent
# How srun starts the ranks of an MPI.
PLUGINS = {"Open MPI": "pmix", "MPICH": "pmi2"}

# Trains a line y = w x with each rank's own rows, and then does as it is told.
TRAINS = """
import os, signal, sys, time
import jax, jax.numpy as jnp, optax
import jaxmpi
world, what = jaxmpi.init(), sys.argv[1]
x = jnp.arange(1.0, 5.0) * (world.rank + 1)
y = 3.0 * x
tx = jaxmpi.distributed(optax.sgd(0.01))
w, state = jnp.zeros(()), tx.init(jnp.zeros(()))

@jaxmpi.jit
def step(w, state):
    grad = jax.grad(lambda w: jnp.mean((w * x - y) ** 2))(w)
    updates, state = tx.update(grad, state, w)
    return optax.apply_updates(w, updates), state

for i in range(20 if what == "train" else 100_000):
    w, state = step(w, state)
    if what != "train":
        time.sleep(0.005 * (world.rank + 1))
    if what == "kill" and i == 20 and world.rank == 1:
        print(f"dies at {time.time()}", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "stop" and i == 20 and world.rank == 0:
        print("trains", flush=True)
    if what == "stop" and jaxmpi.preempted():
        print(f"rank {world.rank} stops at {i}", flush=True)
        sys.exit(0)
print(f"rank {world.rank} of {world.size}: {float(w)!r}", flush=True)
"""

# A program of plain JAX: a mean over the ranks, and a product with rows of each.
PLAIN = """
import sys
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

jax.distributed.initialize()
n, rank = jax.process_count(), jax.process_index()
mesh = jax.make_mesh((n,), ("d",), axis_types=(AxisType.Auto,))
rows, everywhere = NamedSharding(mesh, P("d")), NamedSharding(mesh, P())
x = jax.make_array_from_process_local_data(rows, np.full((1, 3), rank + 1.0, np.float32))
mean = jax.jit(lambda x: jnp.mean(x), out_shardings=everywhere)(x)
product = jax.jit(lambda x: x @ x.T, out_shardings=everywhere)(x)
print(f"rank {rank} of {n}: {float(mean)} {np.asarray(product).tolist()}", flush=True)
"""

# What runs on the node: srun, and the signal once the ranks train, which goes to them and not to
# srun.
COMMANDS = """
set -u
srun --mpi={plugin} --ntasks={ranks} --overcommit {python} {script} {what} > {folder}/out 2>&1 &
srun=$!
if [ {what} = stop ]; then
  until grep -q trains {folder}/out; do kill -0 $srun || break; sleep 0.1; done
  scancel --signal=TERM "$(squeue --noheader --steps --format=%i)"
fi
wait $srun
echo "srun ended with $? at $(date +%s.%N)" >> {folder}/out
"""

pytestmark = [
    pytest.mark.launcher,
    pytest.mark.slow,
    pytest.mark.skipif(
        bool(os.geteuid()) or not all(map(shutil.which, ("slurmctld", "slurmd", "munged", "srun"))),
        reason="needs root and Slurm: apt-get install slurm-wlm munge",
    ),
]


@pytest.fixture
def srun(tmp_path):
    """Run a script, TRAINS by default, under srun; return exit code, time of the end, and output.

    The time is in seconds since the epoch.
    """
    vendor, _, _ = mpiexec.library()
    if vendor not in PLUGINS:
        pytest.skip(f"Slurm's plugins do not start the ranks of {vendor}")

    def run(what, ranks, script=TRAINS, **environ):
        (tmp_path / "script.py").write_text(script)
        fields = {
            "plugin": PLUGINS[vendor],
            "ranks": ranks,
            "python": sys.executable,
            "script": tmp_path / "script.py",
            "what": what or "nothing",
            "folder": tmp_path,
        }
        command = [HERE / "slurm.sh", tmp_path / "slurm", "bash", "-c", COMMANDS.format(**fields)]
        done = subprocess.run(
            [*map(str, command)],
            capture_output=True,
            text=True,
            timeout=150,
            env={**os.environ, **environ},
        )
        said = (tmp_path / "out").read_text() if (tmp_path / "out").exists() else ""
        ended = re.search(r"srun ended with (\d+) at (\S+)", said)
        assert ended, f"{said}\n{done.stdout}\n{done.stderr}"
        return int(ended[1]), float(ended[2]), said

    return run


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_of_srun_train(srun, ranks):
    code, _, said = srun("train", ranks)
    assert code == 0, said
    # mean over ranks and rows of d/dw (w x - 3 x)^2 = 2 (w - 3) x^2, so that w - 3 shrinks by 1 -
    # 0.02 mean(x^2) a step
    squares = [(row * (rank + 1)) ** 2 for rank in range(ranks) for row in range(1, 5)]
    expected = 3.0 * (1.0 - (1.0 - 0.02 * sum(squares) / len(squares)) ** 20)
    found = re.findall(rf"rank (\d) of {ranks}: (\S+)", said)
    assert sorted(int(rank) for rank, _ in found) == list(range(ranks)), said
    for _, value in found:
        assert float(value) == pytest.approx(expected, rel=1e-5), said


def test_plain_jax_finds_the_ranks_of_srun(srun):
    """With the two variables that `jaxmpi doctor` prints."""
    doctor = [sys.executable, "-m", "jaxmpi", "doctor"]
    printed = subprocess.run(doctor, capture_output=True, text=True, timeout=120).stdout
    variables = dict(re.findall(r"export ((?:JAX_CPU_COLL|MPITRAMP)\w+)=(\S+);", printed))
    assert len(variables) == 2, printed
    code, _, said = srun("", 3, script=PLAIN, **variables)
    assert code == 0, said
    product = [[3.0 * i * j for j in (1, 2, 3)] for i in (1, 2, 3)]
    for rank in range(3):
        assert f"rank {rank} of 3: 2.0 {product}" in said, said


def test_a_rank_of_srun_that_is_killed_ends_the_job(srun):
    code, ended, said = srun("kill", 2)
    assert code != 0, said
    assert ended - float(re.search(r"dies at (\S+)", said)[1]) < 20, said


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_of_srun_stop_at_one_step_on_sigterm(srun, ranks):
    code, _, said = srun("stop", ranks)
    assert code == 0, said
    stops = re.findall(r"rank (\d) stops at (\d+)", said)
    assert len(stops) == ranks and len({step for _, step in stops}) == 1, said
