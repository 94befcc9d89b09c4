"""Checkpoints in the host's memory: a restart resumes from the newest, and the end removes them."""

import os
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import jaxmpi
from jaxmpi._checkpoint import folders, memory
from jaxmpi.testing import run_ranks


@pytest.fixture(autouse=True)
def initialized():
    jaxmpi.init()


@pytest.fixture
def directory(tmp_path):
    yield tmp_path / "run"
    shutil.rmtree(memory.existing(tmp_path / "run") or tmp_path / "none", ignore_errors=True)


def saved(directory, step, value=None, **options):
    jaxmpi.save(
        directory,
        step,
        {"x": jnp.full(3, step if value is None else value)},
        background=False,
        **options,
    )


def restored(directory, step=None):
    return int(jaxmpi.restore(directory, {"x": jnp.zeros(3, int)}, step)["x"][0])


def steps_in(folder):
    return sorted(folders.step_of(path) for path in folders.found(folder))


@run_ranks(1, 2)
def test_the_newer_of_both_is_restored_and_the_disk_empties_the_memory():
    directory = Path(jaxmpi.broadcast_object(tempfile.mkdtemp()))
    own = jaxmpi.PerRankState(jnp.full(2, jaxmpi.rank()))
    run = lambda step: {"x": jnp.full(3, step), "own": own}
    jaxmpi.save(directory, 10, run(10))
    for step in (11, 12, 13):
        jaxmpi.save(directory, step, run(step), in_memory=True)
    assert jaxmpi.latest(directory) == 13
    got = jaxmpi.restore(directory, run(0))
    np.testing.assert_array_equal(got["x"], np.full(3, 13))
    np.testing.assert_array_equal(got["own"].per_rank, np.full(2, jaxmpi.rank()))
    there = memory.existing(directory)
    assert there is not None and steps_in(there) == [13] and steps_in(directory) == [10]
    assert os.stat(there).st_mode & 0o777 == 0o700
    jaxmpi.barrier()
    jaxmpi.save(directory, 20, run(20))
    assert jaxmpi.latest(directory) == 20 and int(jaxmpi.restore(directory, run(0))["x"][0]) == 20
    assert memory.existing(directory) is None and not there.exists()
    jaxmpi.save(directory, 21, run(21), in_memory=True, background=False)
    assert jaxmpi.latest(directory) == 21
    jaxmpi.save(directory, 22, run(22), background=False)
    assert not there.exists() and steps_in(directory) == [10, 20, 22]


def test_where_the_disk_has_the_newer_one_it_is_restored(directory):
    saved(directory, 5, in_memory=True)
    kept = memory.existing(directory)
    aside = kept.with_name(f"{kept.name}-aside")
    kept.rename(aside)  # as on a host that had the job before
    saved(directory, 9)
    aside.rename(kept)
    assert (
        jaxmpi.latest(directory) == 9 and restored(directory) == 9 and restored(directory, 5) == 5
    )
    saved(directory, 10)
    assert memory.existing(directory) is None


def test_after_the_host_was_started_again_the_disk_has_the_newest(directory):
    saved(directory, 5)
    saved(directory, 6, in_memory=True)
    shutil.rmtree(memory.existing(directory))
    assert jaxmpi.latest(directory) == 5 and restored(directory) == 5
    saved(directory, 7, in_memory=True)
    assert jaxmpi.latest(directory) == 7 and restored(directory) == 7


def test_a_damaged_one_in_memory_is_passed_over(directory):
    saved(directory, 5)
    saved(directory, 6, in_memory=True)
    (file,) = memory.existing(directory).glob("step-*/rank-0.npz")
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.warns(
        UserWarning, match="a checkpoint is passed over: /dev/shm/checkpoints-.*rank-0.npz"
    ):
        assert jaxmpi.latest(directory) == 5
    with pytest.warns(UserWarning, match="a checkpoint is passed over"):
        assert restored(directory) == 5
    saved(directory, 7)
    assert memory.existing(directory) is None


def test_runs_do_not_mix(tmp_path, directory):
    """Nor does one with a folder that was removed, copied or moved."""
    saved(directory, 5, in_memory=True)
    saved(tmp_path / "other", 3, in_memory=True)
    assert jaxmpi.latest(directory) == 5 and jaxmpi.latest(tmp_path / "other") == 3
    first = memory.existing(directory)
    shutil.copytree(directory, tmp_path / "copy")
    assert jaxmpi.latest(tmp_path / "copy") is None
    shutil.rmtree(directory)
    assert jaxmpi.latest(directory) is None
    saved(directory, 1, in_memory=True)
    assert jaxmpi.latest(directory) == 1 and memory.existing(directory) != first
    # another container may have such a path; until nobody has written for an hour
    assert first.exists()
    os.utime(first, (1, 1))
    saved(directory, 2, in_memory=True)
    assert not first.exists()
    for name in ("run", "other"):
        saved(tmp_path / name, 9)
    assert not [*memory.MEMORY.glob(f"{memory._prefix(directory)}*")]


@pytest.mark.parametrize("later_in_memory", [False, True])
def test_no_job_goes_on_from_an_abandoned_run_in_the_other_folder(later_in_memory, directory):
    saved(directory, 10)
    saved(directory, 20)
    saved(directory, 25, in_memory=True)
    assert restored(directory, 10) == 10
    saved(directory, 12, -12, in_memory=later_in_memory)
    assert jaxmpi.latest(directory) == 12 and restored(directory) == -12
    assert steps_in(directory) == [10, 12][: 2 - later_in_memory]
    saved(directory, 13, -13, in_memory=not later_in_memory)
    assert jaxmpi.latest(directory) == 13 and restored(directory) == -13


def test_a_name_that_is_not_ours_is_not_followed(directory, tmp_path):
    saved(directory, 5)
    saved(tmp_path / "other", 9)
    prefix, kept, other = (
        memory._prefix(directory),
        memory.begin(directory),
        f"../..{tmp_path}/other",
    )
    for name in (
        other[5:],
        other,
        f"{kept.name}/../{other}",
        f"{prefix}{'0' * 16}/..",
        "",
        "\0",
        "x" * 10**6,
    ):
        (directory / "in-memory").write_text(name)
        assert jaxmpi.latest(directory) == 5
    link = memory.MEMORY / f"{prefix}{secrets.token_hex(8)}"
    link.symlink_to(tmp_path / "other")
    (directory / "in-memory").write_text(link.name)
    try:
        assert jaxmpi.latest(directory) == 5
        with pytest.raises(
            jaxmpi.CheckpointError,
            match=r"there can be no folder in /dev/shm .*Save without in_memory=True",
        ):
            saved(directory, 6, in_memory=True)
    finally:
        link.unlink()
        kept.rmdir()
    assert restored(tmp_path / "other") == 9


def test_without_shared_memory_the_error_says_so(directory, monkeypatch):
    missing = directory.parent / "no-memory"
    monkeypatch.setattr(memory, "MEMORY", missing)
    with pytest.raises(
        jaxmpi.CheckpointError,
        match=rf"there can be no folder in {missing} for .*Save without in_memory=True",
    ):
        saved(directory, 1, in_memory=True)
    saved(directory, 1)
    assert jaxmpi.latest(directory) == 1


@run_ranks(2)
def test_ranks_of_other_hosts_do_not_see_it():
    """Rank 1 has another /dev/shm, which is how one machine can show two hosts."""
    directory = Path(jaxmpi.broadcast_object(tempfile.mkdtemp()))
    elsewhere = Path(tempfile.mkdtemp())
    run = {"x": jnp.ones(3)}
    jaxmpi.save(directory, 1, run)
    jaxmpi.save(directory, 2, run, in_memory=True)
    assert jaxmpi.latest(directory) == 2
    here, real = memory.existing(directory), memory.MEMORY
    try:
        if jaxmpi.rank() == 1:
            memory.MEMORY = elsewhere
        assert jaxmpi.latest(directory) == 1  # on all ranks
        assert jaxmpi.restore(directory, run)["x"].shape == (3,)
    finally:
        memory.MEMORY = real
    jaxmpi.barrier()
    jaxmpi.save(directory, 3, run, background=False)
    jaxmpi.barrier()
    assert not here.exists()
    with pytest.raises(jaxmpi.RankMismatchError, match="in memory"):
        jaxmpi.save(directory, 4, run, in_memory=jaxmpi.rank() == 0)


@run_ranks(1, 2, 3)
def test_a_relative_folder_is_one_of_rank_0s_working_directory():
    mine, before = tempfile.mkdtemp(), os.getcwd()
    run = lambda step: {"x": step}
    os.chdir(mine)
    try:
        for step, in_memory in ((1, False), (2, True), (3, False)):
            jaxmpi.save("run", step, run(step), in_memory=in_memory)
            assert jaxmpi.latest("run") == step
            assert jaxmpi.restore("run", run(0)) == run(step)
        jaxmpi.barrier()
        assert Path("run").exists() == (jaxmpi.rank() == 0)
    finally:
        os.chdir(before)


SCRIPT = """
import os, signal, sys
import jax, jax.numpy as jnp, optax
import jaxmpi

world, (directory, ending) = jaxmpi.init(), sys.argv[1:]
tx = jaxmpi.sharded(optax.adam(0.1))
params = {"w": jnp.linspace(-1, 1, 6)}
run = {"params": params, "state": tx.init(params), "step": 0}
if jaxmpi.latest(directory) is not None:
    run = jaxmpi.restore(directory, run)
print("from step", run["step"], flush=True)

@jaxmpi.jit
def step(params, state, x):
    grads = jax.grad(lambda p: jnp.mean((p["w"] * x) ** 2))(params)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state

for i in range(run["step"], 30):
    params, state = step(run["params"], run["state"], jnp.float32(i + world.rank))
    run = {"params": params, "state": state, "step": i + 1}
    jaxmpi.save(directory, i + 1, run, in_memory=(i + 1) % 10 != 0)
    if i + 1 == 17 and ending == "kill" and os.environ["JAXMPI_RESTART"] == "0":
        jaxmpi.latest(directory)  # it is written
        if world.rank == world.size - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        jaxmpi.barrier()
    if i + 1 == 25 and ending == "stop":
        sys.exit(3)
print("weights", params["w"].tolist(), flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_job_that_is_killed_goes_on_from_memory_and_leaves_nothing(ranks, tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)

    def job(name, ending, *options):
        words = [
            sys.executable,
            "-m",
            "jaxmpi",
            "run",
            "-n",
            str(ranks),
            *options,
            str(tmp_path / "script.py"),
        ]
        done = subprocess.run(
            [*words, str(tmp_path / name), ending], capture_output=True, text=True, timeout=200
        )
        return done.returncode, done.stdout + done.stderr

    code, output = job("killed", "kill", "--restarts", "1")
    assert code == 0 and set(re.findall("from step (.*)", output)) == {"0", "17"}, output
    assert memory.existing(tmp_path / "killed") is None
    code, whole = job("whole", "end")
    assert code == 0 and memory.existing(tmp_path / "whole") is None, whole
    assert not [*memory.MEMORY.glob(f"{memory._prefix(tmp_path / 'killed')}*")]
    assert len({*re.findall("weights (.*)", output), *re.findall("weights (.*)", whole)}) == 1, (
        output + whole
    )
    # one that ends with an error leaves what the next one needs
    code, output = job("stopped", "stop")
    assert code == 3 and steps_in(memory.existing(tmp_path / "stopped")) == [25], output
    code, output = job("stopped", "end")
    assert code == 0 and set(re.findall("from step (.*)", output)) == {"25"}, output
    assert memory.existing(tmp_path / "stopped") is None
