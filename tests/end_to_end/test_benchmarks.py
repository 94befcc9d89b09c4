"""The benchmarks run to their end and print their rows; what the times are is not tested here."""

import itertools
import json
import re
import sys
import zipfile

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


def test_gpu_nccl_goes_on_where_it_stopped(tmp_path):
    """gpu_nccl.py resumes on CPUs; CI runs all of its parts."""
    start = [sys.executable, "benchmarks/gpu_nccl.py", "--cpu", "--out", str(tmp_path), "--parts"]
    first = run([*start, "a-start d-nccl"])
    assert "a-start: right" in first and "mean of 1 KB" in first
    second = run([*start, "a-start d-nccl d-staged"])
    assert "a-start: right" not in second and "d-staged: right" in second
    assert "mean of 1 KB: NCCL / staged" in second
    found = json.loads((tmp_path / "nccl.json").read_text())
    assert list(found) == ["a-start", "d-nccl", "d-staged"]
    assert "| mean of ResNet-50: NCCL / staged |" in (tmp_path / "nccl.md").read_text()


@pytest.mark.parametrize("form", ["wheel", "unpacked", "folder of a wheel", "pieces"])
def test_gpu_nccl_finds_the_library(form, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend("benchmarks")
    import gpu_nccl

    content, name = bytes(range(256)) * 40, "nvidia/nccl/lib/libnccl.so.2"
    given = tmp_path / "given"
    given.mkdir()
    wheel = given / "nvidia_nccl_cu13-2.30.7-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as file:
        file.writestr(name, content)
    if form == "unpacked":
        with zipfile.ZipFile(wheel) as file:
            file.extractall(given)
    elif form == "pieces":
        data = wheel.read_bytes()
        for i in range(3):
            wheel.with_suffix(f".whl.{i:02}").write_bytes(data[4000 * i : 4000 * (i + 1)])
        wheel.unlink()
    path = gpu_nccl.library_in(wheel if form == "wheel" else given, tmp_path / "out")
    assert str(path).endswith(name) and path.read_bytes() == content


def test_gpu_nccl_runs_each_part_on_a_gpu_under_mps_for_100_s(monkeypatch):
    monkeypatch.syspath_prepend("benchmarks")
    import gpu_nccl

    parts = gpu_nccl.all_parts()
    assert {name[0] for name in parts} == set("abcdef")
    for name, part in parts.items():
        on_gpu = gpu_nccl.on_this_machine(part, cpu=False)
        wanted = "" if name == "d-staged" or part.ranks == 1 else "--mps"
        assert on_gpu.options == wanted and on_gpu.seconds == 100 and not on_gpu.mps
        share = on_gpu.environ.get("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE")
        assert share == (str(90 // part.ranks) if wanted else None)
        assert gpu_nccl.on_this_machine(part, cpu=True).options == ""


def test_gpu_nccl_compares_parts(monkeypatch):
    monkeypatch.syspath_prepend("benchmarks")
    import gpu_nccl

    def results(*values):
        keys = ("what", "value", "unit")
        return {"results": [dict(zip(keys, value, strict=True)) for value in values]}

    parts = {
        "c-gpt": results(("gpt, xla, 2 ranks: jaxmpi", 30.0, "ms a step")),
        "c-gpt-staged": results(("gpt, mpi, 2 ranks: jaxmpi", 40.0, "ms a step")),
        "c-gpt-one": results(("gpt, single, 1 ranks: jaxmpi", 20.0, "ms a step")),
        "d-nccl": results(("mean of 1 KB", 0.1, "ms")),
        "d-staged": results(("mean of 1 KB", 0.4, "ms")),
        "f-bits": results(("digest", "abc", "")),
        "f-bits-again": results(("digest", "abd", "")),
    }
    found = {row["what"]: (row["value"], row["right"]) for row in gpu_nccl.comparisons(parts)}
    assert found == {
        "a step of gpt: NCCL / staged": (0.75, True),
        "a step of gpt: NCCL / one rank": (1.5, True),
        "mean of 1 KB: NCCL / staged": (0.25, True),
        "the same bits in two jobs": (False, False),
    }


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
