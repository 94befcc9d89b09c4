"""The benchmarks run to their end and print their rows; what the times are is not tested here."""

import itertools
import json
import re
import sys

import pytest
from programs import on_ranks, run


def test_gpu_goes_on_where_it_stopped(tmp_path):
    """gpu.py resumes on CPUs; CI runs all of its parts."""
    start = [sys.executable, "benchmarks/gpu.py", "--cpu", "--out", str(tmp_path), "--only"]
    first = run([*start, "killed"])
    assert "killed: ended as expected" in first
    second = run([*start, "killed,checkpoint"])
    assert "killed: ended" not in second and "checkpoint: right" in second
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert list(found) == ["killed", "checkpoint"]
    assert all(part["device"].startswith("cpu") for part in found.values())
    assert "| **a checkpoint of 2 ranks** | right |" in (tmp_path / "gpu.md").read_text()


@pytest.mark.parametrize("backend", ["mpi", "xla"])
def test_dispatch_prints_every_row(backend, tmp_path):
    output = run(
        on_ranks(2, "benchmarks/dispatch.py", "--quick", "--out", str(tmp_path)),
        JAXMPI_BACKEND=backend,
    )
    theirs = ["mpi4jax under jax.jit"] * (backend == "mpi")
    ours = ["jax.jit, no communication", "jaxmpi.jit", "no communication, one wait"]
    rows = {f"k = {k}": [*ours, *theirs] for k in (10, 300, 1500)}
    rows["1 KB"] = ["mpi4py Allreduce", "jit(x + 1)", "jaxmpi.jit", *theirs]
    printed = re.findall(
        r"^(k = \d+|1 KB) +(\S.*?) +median +[\d.]+ µs, quartiles", output, re.MULTILINE
    )
    wanted = []
    for case, names in rows.items():
        wanted += [(case, name) for name in names]
    assert printed == wanted

    compared = (
        "jaxmpi.jit / no communication",
        "no communication, one wait / no communication",
        "jaxmpi.jit / no communication, one wait",
    )
    ratios = [*itertools.product(compared, (10, 300, 1500))]
    ratios += [("jaxmpi.jit / (mpi4py Allreduce + jit(x + 1))", 0)]
    ratios += [("mpi4jax / jaxmpi.jit", k) for k in (10, 300, 1500, 0) if theirs]
    printed = re.findall(
        r"^(k = \d+|1 KB) +(\S.*?) +[\d.]+, rounds [\d.]+ to [\d.]+, (at most|at least|no bound)",
        output,
        re.MULTILINE,
    )
    labels = [(f"k = {k}" if k else "1 KB", name) for name, k in ratios]
    assert sorted((case, name) for case, name, _ in printed) == sorted(labels)
    assert sum(bound != "no bound" for _, _, bound in printed) == (6 if theirs else 0)

    found = json.loads((tmp_path / "dispatch.json").read_text())
    assert [(row["case"], row["contender"]) for row in found["rows"]] == wanted
    assert len(found["ratios"]) == len(ratios)
    assert (tmp_path / "dispatch.png").read_bytes().startswith(b"\x89PNG")


def test_allreduce_compares_the_peers(tmp_path):
    output = run(
        on_ranks(2, "benchmarks/allreduce.py", "--quick", "--cases", "4 KB", "--out", str(tmp_path))
    )
    found = json.loads((tmp_path / "allreduce.json").read_text())
    contenders = {
        row["contender"]
        for row in found["rows"]
        if row["low_us"] <= row["median_us"] <= row["high_us"]
    }
    assert contenders >= {"memcpy", "jaxmpi", "mpi4py in place", "mpi4jax per leaf", "JAX gloo"}
    assert {ratio["ratio"] for ratio in found["ratios"]} >= {
        "jaxmpi / memcpy",
        "mpi4jax per leaf / jaxmpi",
        "JAX gloo / jaxmpi",
    }
    assert found["machine"] in output and "2 ranks" in output
    assert (tmp_path / "allreduce.png").read_bytes().startswith(b"\x89PNG")


def test_train_step_compares_the_peers():
    output = run(on_ranks(2, "benchmarks/train_step.py", "--quick", "--models", "CNN"))
    assert re.search(r"^CNN +jaxmpi / local +[\d.]+, rounds", output, re.MULTILINE)
    assert re.search(
        r"^CNN +added by jaxmpi -?[\d.]+ ms, by JAX gloo -?[\d.]+ ms", output, re.MULTILINE
    )


def test_scaling_runs_on_every_number_of_ranks(tmp_path):
    output = run(
        on_ranks(1, "benchmarks/scaling.py", "--quick", "--ranks", "1", "3", "--out", str(tmp_path))
    )
    assert len(re.findall(r"^1 ranks .* median", output, re.MULTILINE)) == 4
    assert len(re.findall(r"^3 ranks .* times that of its bytes", output, re.MULTILINE)) == 4
    assert json.loads((tmp_path / "scaling.json").read_text()).keys() == {"1", "2", "3"}
    assert (tmp_path / "scaling.png").read_bytes().startswith(b"\x89PNG")


def test_restart_times_each_part_of_a_restart(tmp_path):
    output = run(
        on_ranks(1, "benchmarks/restart.py", "--quick", "--ranks", "2", "--out", str(tmp_path))
    )
    found = json.loads((tmp_path / "restart.json").read_text())
    seconds = {row["contender"]: row["median_us"] / 1e6 for row in found["rows"]}
    assert list(seconds) == ["end", "init", "restore", "step", "restart", "start"]
    assert all(
        0 < seconds[part] < seconds["restart"] for part in ("end", "init", "restore", "step")
    )
    assert (
        len(re.findall(r"^2 ranks .*, at most [\d.]+: (?:holds|MISSED)", output, re.MULTILINE)) == 3
    )
    assert (tmp_path / "restart.png").read_bytes().startswith(b"\x89PNG")


def test_optimizers_compares_the_transforms():
    output = run(on_ranks(2, "benchmarks/optimizers.py", "--quick", "--transforms", "codec int8"))
    assert re.search(r"^MLP 10M +sharded / distributed +[\d.]+, rounds", output, re.MULTILINE)
    assert re.search(r"^MLP 10M +codec int8 / local +[\d.]+, rounds", output, re.MULTILINE)
    sizes = dict(re.findall(r"^(\S.*?) +state of a rank +([\d.]+) MB", output, re.MULTILINE))
    assert float(sizes["sharded"]) == pytest.approx(float(sizes["distributed"]) / 2, rel=1e-3)


def test_codec_times_has_the_milliseconds_of_each_codec():
    output = run(on_ranks(2, "benchmarks/codec_times.py", "--quick"))
    found = re.findall(r"^20 MB +codec (\w+), ms +([\d.]+), .*at most", output, re.MULTILINE)
    assert [name for name, _ in found] == ["bf16", "f16", "int8"]
    assert all(0 < float(milliseconds) < 10_000 for _, milliseconds in found)


def test_fsdp_holds_less_than_zero_1():
    output = run(on_ranks(2, "benchmarks/fsdp.py", "--quick", "--layers", "3", "--width", "64"))
    printed = re.findall(r"^(\S+) +MB of a rank: peak +([\d.]+)", output, re.MULTILINE)
    peaks = {name: float(peak) for name, peak in printed}
    assert peaks["FSDP"] < peaks["ZeRO-1"] < peaks["distributed"]
    assert re.search(r"bytes / 3 parameters +(0\.\d+|1\.00), .*: holds", output)
    assert re.search(r"FSDP / ZeRO-1 +[\d.]+, rounds", output)


@pytest.mark.parametrize("backend", ["mpi", "xla"])
def test_overhead_adds_up_what_watching_and_agreeing_take(backend):
    output = run(on_ranks(2, "benchmarks/overhead.py", "--quick"), JAXMPI_BACKEND=backend)
    found = re.findall(
        r"^step of 10 ms +(\S+ / \S+|with both / without|seen by jaxmpi top / not) +[\d.]+, rounds",
        output,
        re.MULTILINE,
    )
    assert found == [
        "watched / unwatched",
        "agreement / unwatched",
        "with both / without",
        "seen by jaxmpi top / not",
    ]


def test_predictions_stand_beside_what_is_measured():
    output = run(on_ranks(2, "benchmarks/prediction.py", "--quick"))
    found = re.findall(
        r"^(\d[\w ]+?) +predicted / measured +([\d.]+), rounds", output, re.MULTILINE
    )
    assert [case for case, _ in found[::2]] == [
        "1 KB",
        "1 MB",
        "25 MB",
        "100 MB",
        "300 arrays of 1 KB",
    ]
    assert all(float(ratio) > 0 for _, ratio in found)
