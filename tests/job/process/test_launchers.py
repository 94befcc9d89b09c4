"""The table of launchers: a row is all that a launcher takes."""

import os
import subprocess
import sys

import pytest

from jaxmpi._job.launch import mpiexec
from jaxmpi._job.process import joining, launchers
from jaxmpi._job.process.launchers import FLUX, Launched, Launcher, find_for_library, launched

ZEPHYR = Launcher(  # there is no such launcher
    name="Zephyr",
    rank=("ZEPHYR_RANK",),
    size=("ZEPHYR_SIZE",),
    local_rank=("ZEPHYR_LOCAL_RANK",),
    local_size=("ZEPHYR_LOCAL_SIZE",),
    marks=("ZEPHYR_RANK",),
    identity=("ZEPHYR_JOB", "ZEPHYR_RANK"),
    banner=r"^zephyr \d",
)
ENVIRONMENTS = {
    FLUX: {
        "FLUX_JOB_ID": "f1",
        "FLUX_TASK_RANK": "5",
        "FLUX_JOB_SIZE": "8",
        "FLUX_TASK_LOCAL_ID": "1",
        "PMI_RANK": "5",
        "PMI_SIZE": "8",
    },
    ZEPHYR: {
        "ZEPHYR_JOB": "z1",
        "ZEPHYR_RANK": "5",
        "ZEPHYR_SIZE": "8",
        "ZEPHYR_LOCAL_RANK": "1",
        "ZEPHYR_LOCAL_SIZE": "4",
    },
}


@pytest.fixture(params=[FLUX, ZEPHYR], ids=lambda row: row.name)
def row(request, monkeypatch):
    """A row of the table, which has a new one at its end for this."""
    if request.param not in launchers.LAUNCHERS:
        monkeypatch.setattr(launchers, "LAUNCHERS", (*launchers.LAUNCHERS, request.param))
    for variables in (row.rank + row.size + row.marks for row in launchers.LAUNCHERS):
        for name in variables:
            monkeypatch.delenv(name, raising=False)
    return request.param


def test_a_row_is_enough_to_find_rank_and_size(row):
    local_size = 4 if row.local_size else None
    found = launched(ENVIRONMENTS[row])
    assert found == Launched(row, rank=5, size=8, local_rank=1, local_size=local_size)
    assert found.by == f" by {row.name}"
    assert launched({}) == (None, None, 1, None, None) and launched({}).by == ""


def test_a_row_is_enough_to_know_the_ranks_of_a_launcher(row, monkeypatch):
    for name, value in ENVIRONMENTS[row].items():
        monkeypatch.setenv(name, value)
    assert joining.rank_here() == 5
    monkeypatch.setenv(joining._RANK_VARIABLE, "")
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: 1)
        joining.note_rank(local_rank=1, size=8)
    # this process has the variables of process 1, and another number
    assert joining.parent() == (1, 1, 8)
    monkeypatch.setenv(row.rank[0], "6")
    assert joining.parent() is None  # the launcher has started it


def test_a_row_is_enough_to_identify_a_launcher(row, tmp_path):
    path = tmp_path / "mpiexec"
    path.write_text("#!/bin/sh\necho zephyr 1.2\n")
    path.chmod(0o755)
    if row is ZEPHYR:
        assert mpiexec.identify(str(path)) == mpiexec.Mpiexec(str(path), ZEPHYR, "1.2")
    else:
        with pytest.raises(mpiexec.LaunchError, match="which is neither"):
            mpiexec.identify(str(path))


def test_ranks_of_flux_see_each_other():
    """By the variables of their processes, in /proc."""
    code = "from jaxmpi._job.process.joining import peers; print(*peers())"
    starts = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {code!r}], check=True)"
    kept = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    environ = {**kept, **ENVIRONMENTS[FLUX], "JAXMPI_RUN_DIR": "/nowhere/of-flux"}
    done = subprocess.run(
        [sys.executable, "-c", starts], env=environ, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.split() == ["5"], done.stderr


OMPI_RANK = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}


@pytest.mark.parametrize(
    ("environ", "name", "rank", "size"),
    [
        (OMPI_RANK, "Open MPI", 1, 2),
        ({"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALNRANKS": "2"}, "Intel MPI", 1, 2),
        # with the names that `launch/plain_jax` gives for JAX, of the job that has started this one
        (
            {
                "PMI_RANK": "1",
                "PMI_SIZE": "2",
                "MPI_LOCALNRANKS": "2",
                "OMPI_COMM_WORLD_RANK": "0",
                "OMPI_COMM_WORLD_SIZE": "2",
            },
            *("Intel MPI", 1, 2),
        ),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, None, 1, 2),  # that of many
        ({"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}, "Slurm", 1, 2),
        # mpirun in a batch script
        (
            {"SLURM_PROCID": "0", **OMPI_RANK},
            "Open MPI",
            1,
            2,
        ),
        ({"SLURM_PROCID": "0"}, None, 0, 1),  # the batch script
        ({"PBS_NODEFILE": "/x"}, None, None, 1),
        ({"PMI_SIZE": "x"}, None, None, 1),
    ],
)
def test_launched_reads_the_variables_of_the_nearest_launcher(environ, name, rank, size):
    found = launched(environ)
    assert (found.launcher and found.launcher.name, found.rank, found.size) == (name, rank, size)


def test_a_library_without_a_row_is_started_by_the_launcher_of_mpich():
    assert [find_for_library(name) for name in ("Open MPI", "Intel MPI", "Cray MPICH")] == [
        launchers.OPEN_MPI_5,
        launchers.INTEL_MPI,
        launchers.MPICH,
    ]
