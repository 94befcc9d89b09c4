"""`jaxmpi doctor` says what is wrong, and what to do, in environments with one fault each."""

import os
import re
import subprocess
import sys

import pytest

from jaxmpi import _devices
from jaxmpi._job.launch.machine import Machine
from jaxmpi._job.process import jax_collectives
from jaxmpi._job.tools import doctor, probes


def report(*args, **environ):
    done = subprocess.run(
        [sys.executable, "-m", "jaxmpi", "doctor", *args],
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, **environ},
    )
    assert not done.stderr, done.stderr
    return done.returncode, done.stdout


def lines(output):
    """Verdict and text by topic; the advice belongs to the text."""
    found = re.findall(r"^  (ok|slow|broken) +([\w ]+): (.*(?:\n {10}.*)*)", output, re.MULTILINE)
    return {topic: (verdict, " ".join(text.split())) for verdict, topic, text in found}


def path_of(tmp_path, name, text):
    (tmp_path / f"{name}.py").write_text(text)
    return os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])


def fake_launcher(tmp_path, text):
    path = tmp_path / "mpirun"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.slow
def test_where_all_is_well():
    code, output = report()
    said = lines(output)
    assert code == 0 and "jaxmpi works here." in output, output
    assert list(said) == [
        "Python",
        "system",
        "jaxmpi",
        "jax",
        "dtypes",
        "cores",
        "shared memory",
        "compiled programs",
        "plain JAX programs",
        "devices",
        "mpi4py",
        "launcher",
        "mpi4jax",
        "CUDA in MPI",
        "transport",
        "a job",
        "latency",
        "bandwidth",
    ]
    for topic in ("mpi4py", "launcher", "mpi4jax", "a job", "devices"):
        assert said[topic][0] == "ok"
    assert re.search(r"[\d.]+ times a memcpy", said["bandwidth"][1])


@pytest.mark.exhaustive
def test_a_report_says_what_is_installed(monkeypatch, tmp_path):
    _, output = report("--report", "-n", "1", JAX_COMPILATION_CACHE_DIR=str(tmp_path / "cache"))
    said = lines(output)
    assert output.startswith("<details><summary>jaxmpi doctor</summary><pre>\n")
    assert output.endswith("</pre></details>\n")
    assert re.search(
        r"(editable|built here from source|a binary wheel) \(cp3\w+-", said["jaxmpi"][1]
    )
    assert re.search(r"the extension by \S.* XLA FFI 0\.\d", said["jaxmpi"][1])
    assert (
        said["dtypes"] == ("ok", "14 dtypes, float64 among them")
        and str(tmp_path / "cache") in said["compiled programs"][1]
    )
    assert re.match(r"(yes|no); ", said["CUDA in MPI"][1])


def test_a_cache_that_cannot_be_written(monkeypatch, tmp_path):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "/proc/nowhere/cache")
    assert doctor.compiled().verdict == ("ok" if os.access("/proc", os.W_OK) else "slow")
    monkeypatch.setattr(doctor.os, "access", lambda path, mode: False)
    assert (
        doctor.compiled().verdict == "slow"
        and "JAX_COMPILATION_CACHE_DIR" in doctor.compiled().advice
    )


@pytest.mark.skipif(bool(jax_collectives.why_not()), reason="no library for JAX's collectives")
def test_plain_jax_prints_variables_that_a_shell_exports(monkeypatch):
    """A shell reads what is pasted line by line: a line break after `export` would export none."""
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    printed = str(doctor.plain_jax())
    pasted = printed[printed.index("export") :] + "\nenv"
    environ = {"PATH": os.environ["PATH"]}
    done = subprocess.run(["sh"], input=pasted, env=environ, text=True, capture_output=True)
    assert "JAX_CPU_COLLECTIVES_IMPLEMENTATION=mpi\n" in done.stdout
    assert f"MPITRAMPOLINE_LIB={jax_collectives.find_library()}\n" in done.stdout


@pytest.mark.exhaustive
def test_where_the_working_directory_holds_others_of_the_same_name(tmp_path):
    """The doctor asks the installed jaxmpi, not the sources in the working directory."""
    for name in ("jaxmpi", "mpi4jax"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise ImportError('the sources')")
    command = [os.path.join(os.path.dirname(sys.executable), "jaxmpi"), "doctor"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, cwd=tmp_path)
    assert (
        done.returncode == 0
        and "jaxmpi works here." in done.stdout
        and "the sources" not in done.stdout
    ), done.stdout


@pytest.mark.slow
def test_without_mpi4py(tmp_path):
    code, output = report(
        PYTHONPATH=path_of(tmp_path, "mpi4py", "raise ImportError(\"No module named 'mpi4py'\")")
    )
    assert code == 1 and "Something is broken" in output
    verdict, text = lines(output)["mpi4py"]
    assert (
        verdict == "broken" and "mpi4py is not installed" in text and "pip install mpi4py" in text
    )
    assert "a job" not in lines(output)


@pytest.mark.exhaustive
def test_with_the_launcher_of_another_mpi(tmp_path):
    code, output = report(
        JAXMPI_MPIEXEC=fake_launcher(tmp_path, "echo 'HYDRA build details, Version: 4.2'")
    )
    verdict, text = lines(output)["launcher"]
    if "Open MPI" in lines(output)["mpi4py"][1]:
        assert (
            code == 1
            and verdict == "broken"
            and "is MPICH's, but mpi4py loads Open MPI" in text
            and "-> Give --mpiexec" in text
        )


@pytest.mark.exhaustive
def test_without_a_launcher():
    code, output = report(JAXMPI_MPIEXEC="/nowhere/mpirun")
    verdict, text = lines(output)["launcher"]
    assert (
        code == 1
        and verdict == "broken"
        and "/nowhere/mpirun is not a program" in text
        and "-> Give --mpiexec" in text
    )


OLD = """
import sys, types
sys.modules["jaxmpi._native"] = types.SimpleNamespace(interface=0, __file__="/old/_native.so")
"""


@pytest.mark.exhaustive
def test_with_the_extension_of_another_version(tmp_path):
    code, output = report(
        "-n", "1", PYTHONPATH=path_of(tmp_path, "sitecustomize", OLD), JAXMPI_TRANSPORT="auto"
    )
    verdict, text = lines(output)["transport"]
    assert code == 1 and verdict == "broken", output
    assert (
        "/old/_native.so has interface 0" in text and "-> Install jaxmpi again: pip install" in text
    )


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("transport", "error", "code", "verdict"),
    [
        ("auto", "ImportError('libmpi.so.12: cannot open')", 0, "slow"),
        ("mpi4jax", "ImportError('libmpi.so.12: cannot open')", 1, "broken"),
        ("auto", "ModuleNotFoundError('no mpi4jax', name='mpi4jax')", 0, "ok"),
    ],
)
def test_with_an_mpi4jax_that_does_not_load(tmp_path, transport, error, code, verdict):
    """An mpi4jax that does not load ends a job only where the native transport is not used."""
    path = path_of(tmp_path, "mpi4jax", f"raise {error}")
    ended, output = report(PYTHONPATH=path, JAXMPI_TRANSPORT=transport)
    said, text = lines(output)["mpi4jax"]
    assert (ended, said) == (code, verdict), output
    assert (
        ("The native transport does without it" in text)
        == ("a job" in lines(output))
        == (code == 0)
    )
    if verdict != "ok":
        assert (
            "libmpi.so.12: cannot open" in text
            and "-> Build mpi4jax" in text
            and "pip install --no-build" in text
        )


WITHOUT_NATIVE = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name == "jaxmpi._native":
            raise ModuleNotFoundError("No module named 'jaxmpi._native'")

sys.meta_path.insert(0, Missing())
"""


@pytest.mark.slow
@pytest.mark.mpi4jax
def test_without_the_extension(tmp_path):
    site = path_of(tmp_path, "sitecustomize", WITHOUT_NATIVE)
    code, output = report("-n", "1", PYTHONPATH=site, JAXMPI_TRANSPORT="auto")
    verdict, text = lines(output)["transport"]
    assert code == 0 and verdict == "slow" and "the extension is not built" in text
    assert "-> Build it with a C++ compiler" in text


@pytest.mark.slow
def test_without_the_extension_and_without_mpi4jax(tmp_path):
    """The doctor points at the build where pip silently installed jaxmpi without the extension."""
    site = path_of(tmp_path, "sitecustomize", WITHOUT_NATIVE + "sys.modules['mpi4jax'] = None\n")
    code, output = report("-n", "2", PYTHONPATH=site, JAXMPI_TRANSPORT="auto")
    said = lines(output)
    assert (
        code == 1 and said["transport"][0] == said["mpi4jax"][0] == "broken" and "a job" not in said
    ), output
    assert (
        "neither the native one nor mpi4jax can be used: the extension is not built"
        in said["transport"][1]
    )
    assert (
        "-> Build it with a C++ compiler" in said["transport"][1]
        and "pip install -v --no-deps" in said["transport"][1]
    )
    assert (
        "-> Best mend the native transport, which does without it: see below." in said["mpi4jax"][1]
    )


@pytest.mark.exhaustive
def test_with_ranks_that_do_not_start(tmp_path):
    text = (
        "case $1 in --version) echo 'mpirun (Open MPI) 5.0';; *) echo 'no slots' >&2; exit 7;; esac"
    )
    code, output = report(JAXMPI_MPIEXEC=fake_launcher(tmp_path, text))
    if "Open MPI" in lines(output)["mpi4py"][1]:
        verdict, text = lines(output)["a job"]
        assert code == 1 and verdict == "broken" and "code 7" in text and "-> Try: " in text


def test_with_one_gpu_for_four_ranks(monkeypatch, tmp_path):
    monkeypatch.setattr(_devices, "visible", lambda devices=None, dev=None: ["0"])
    finding = doctor.devices(4, tmp_path)
    assert (
        finding.verdict == "slow"
        and "1 for 4 ranks" in finding.facts
        and "Start 1 ranks" in finding.advice
    )


def test_with_gpus_that_jax_does_not_use(tmp_path):
    (tmp_path / "nvidia0").touch()
    finding = doctor.devices(1, tmp_path)
    assert (
        finding.verdict == "slow"
        and "1 NVIDIA devices" in finding.facts
        and "jax[cuda" in finding.advice
    )


@pytest.mark.parametrize("name", ["CUDA_VISIBLE_DEVICES", "JAX_PLATFORMS"])
def test_with_gpus_that_are_hidden(monkeypatch, tmp_path, name):
    (tmp_path / "nvidia0").touch()
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    monkeypatch.setenv(name, {"CUDA_VISIBLE_DEVICES": "-1", "JAX_PLATFORMS": "cpu"}[name])
    monkeypatch.setattr(_devices, "find_spec", lambda name: object())
    finding = doctor.devices(1, tmp_path)
    assert finding.verdict == "ok" and f"1 NVIDIA devices, hidden by {name}=" in finding.facts, (
        finding
    )


@pytest.mark.parametrize(
    ("quota", "ranks", "words"),
    [(1.5, 2, "a quota of 1.5"), (None, 4, "for 4 ranks"), (None, 2, "ranks are bound")],
)
def test_of_the_cores(monkeypatch, quota, ranks, words):
    monkeypatch.setattr(doctor.processor, "quota", lambda: quota)
    machine = Machine(cores=2, bindable=True, root=False, huge_pages=False)
    finding = doctor.cores(ranks, machine)
    assert words in str(finding) and (finding.verdict == "ok") == (words == "ranks are bound")


WORKS, VERSION = probes.Answer(), probes.Answer({"version": "0.9"})
NO_NATIVE = probes.Answer({"what": "the extension is not built.", "advice": "Build it."})
OLD_NATIVE = probes.Answer(what="the extension is old.", advice="Install jaxmpi again.")
NO_MPI4JAX = probes.Answer({"version": None, "what": "no mpi4jax.", "advice": "Install it."})
BAD_MPI4JAX = probes.Answer(what="libmpi is missing.", advice="Build mpi4jax.")


@pytest.mark.parametrize(
    ("asked", "native", "mpi4jax", "of_mpi4jax", "of_transport"),
    [
        ("auto", WORKS, VERSION, ("ok", "0.9", ""), ("ok", "native", "")),
        ("auto", WORKS, NO_MPI4JAX, ("ok", "not installed. The native", ""), ("ok", "native", "")),
        ("auto", WORKS, BAD_MPI4JAX, ("slow", "libmpi is", "Build mpi"), ("ok", "native", "")),
        ("auto", NO_NATIVE, VERSION, ("ok", "0.9", ""), ("slow", "mpi4jax, as the", "Build it.")),
        (
            *("auto", NO_NATIVE, NO_MPI4JAX),
            *(("broken", "no mpi4jax.", "Best mend"), ("broken", "none: neither", "Build it.")),
        ),
        ("auto", OLD_NATIVE, VERSION, ("ok", "0.9", ""), ("broken", "the extension", "Install")),
        ("native", NO_NATIVE, VERSION, ("ok", "0.9", ""), ("broken", "none: JAXMPI_TRA", "Build")),
        ("mpi4jax", WORKS, VERSION, ("ok", "0.9", ""), ("slow", "mpi4jax, as JAXMPI", "Unset")),
        ("mpi4jax", NO_NATIVE, VERSION, ("ok", "0.9", ""), ("slow", "mpi4jax, as JAXMPI", "")),
        (
            *("mpi4jax", WORKS, BAD_MPI4JAX),
            *(("broken", "libmpi is", "Build mpi"), ("slow", "mpi4jax, as JAXMPI", "Unset")),
        ),
    ],
)
def test_each_transport_is_judged_by_whether_the_job_needs_it(
    monkeypatch, asked, native, mpi4jax, of_mpi4jax, of_transport
):
    monkeypatch.setenv("JAXMPI_TRANSPORT", asked)
    for finding, (verdict, facts, advice) in (
        (doctor._mpi4jax(native, mpi4jax), of_mpi4jax),
        (doctor._transport(native, mpi4jax), of_transport),
    ):
        assert finding.verdict == verdict and finding.facts.startswith(facts), finding
        assert finding.advice.startswith(advice) and bool(finding.advice) == bool(advice), finding
