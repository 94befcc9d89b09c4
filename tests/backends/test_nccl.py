"""NCCL's version, and its variables where ranks share a GPU: with stand-ins for the library."""

import os
import subprocess
import sys
import time
import warnings
from functools import partial

import pytest
from test_native import run

import jaxmpi
from jaxmpi import _devices
from jaxmpi._backends import nccl, start
from jaxmpi._backends.nccl import Nccl
from jaxmpi._job.tools import doctor, probes
from jaxmpi.testing import run_ranks

OLD, NEW = Nccl((2, 27, 7), "old"), Nccl((2, 30, 7), "new")
SET = ("NCCL_MULTI_RANK_GPU_ENABLE", "NCCL_NVLS_ENABLE", "NCCL_MAX_CTAS")


def library(folder, version):
    """Compile a library whose ncclGetVersion says `version`; return its path."""
    folder.mkdir(parents=True)
    source = folder / "nccl.c"
    source.write_text(f"int ncclGetVersion(int *v) {{ *v = {version}; return 0; }}\n")
    path = folder / nccl.LIBRARY
    flags = ["-shared", "-fPIC", f"-Wl,-soname,{nccl.LIBRARY}"]
    subprocess.run(["cc", *flags, "-o", path, source], check=True)
    return path


def find(before="", **environ):
    """Return what `nccl.find` finds in a process of its own."""
    code = f"{before}\nfrom jaxmpi._backends import nccl\nprint(*nccl.find(), sep='|')"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, **environ},
    )
    return done.stdout.strip()


@pytest.mark.slow
def test_find_follows_the_order_in_which_jax_loads(tmp_path):
    """The package comes before LD_LIBRARY_PATH, and what is loaded before both."""
    assert find() == "()|"
    of_loader = library(tmp_path / "loader", 23102)
    loader = {"LD_LIBRARY_PATH": str(of_loader.parent)}
    assert find(**loader) == f"(2, 31, 2)|{nccl.LIBRARY}"
    packaged = library(tmp_path / "packages/nvidia/nccl/lib", 22707)
    package = {"PYTHONPATH": str(tmp_path / "packages")}
    assert find(**loader, **package) == f"(2, 27, 7)|{packaged}"
    load = f"import ctypes; ctypes.CDLL({str(of_loader)!r})"
    assert find(load, **package) == f"(2, 31, 2)|loaded {nccl.LIBRARY}"
    # one distribution owns the file: its metadata are enough, and the library is not loaded
    info = tmp_path / "packages/nvidia_nccl_cu13-2.30.7.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Name: nvidia-nccl-cu13\nVersion: 2.30.7\n")
    assert find(**loader, **package) == "(2, 30, 7)|nvidia-nccl-cu13"


@pytest.mark.parametrize(
    ("text", "numbers"), [("2.30.7", (2, 30, 7)), ("2.30.7.post1", (2, 30, 7)), ("rc", ())]
)
def test_numbers_of_a_version(text, numbers):
    assert nccl._numbers(text) == numbers


@pytest.mark.parametrize(
    ("version", "why"),
    [
        ((), "no NCCL was found"),
        ((2, 27, 7), "NCCL 2.27.7 takes one rank on a GPU"),
        ((2, 29, 9), "NCCL 2.29.9 takes one rank on a GPU"),
        ((2, 30), ""),
        ((2, 31, 2), ""),
        ((3, 0, 0), ""),
    ],
)
def test_versions_that_ranks_can_share_a_gpu_over(version, why):
    assert nccl.why_not(Nccl(version)) == why


@pytest.mark.parametrize(
    ("on_gpu", "ctas"),
    [
        ([[0, 1], [0, 1]], "4"),
        ([[0, 1, 2]] * 3, "2"),
        ([[0, 2], [1], [0, 2]], "4"),
        ([[*range(12)]] * 12, "1"),
    ],
)
def test_variables_of_ranks_that_share_a_gpu(on_gpu, ctas, tmp_path):
    for rank in range(len(on_gpu)):
        environ = {nccl.MPS_PIPES: str(tmp_path)}
        line = nccl.allow_sharing([NEW] * len(on_gpu), on_gpu, rank, environ)
        assert [environ[name] for name in SET] == ["1", "0", ctas]
        assert line == (
            f"NCCL 2.30.7 with NCCL_MAX_CTAS={ctas}, no CUDA MPS: `jaxmpi run --mps` starts it"
        )


def test_variables_of_the_user_are_left_alone(tmp_path):
    (tmp_path / "control").touch()
    environ = {"NCCL_MAX_CTAS": "2", "NCCL_NVLS_ENABLE": "1", nccl.MPS_PIPES: str(tmp_path)}
    line = nccl.allow_sharing([NEW] * 2, [[0, 1]] * 2, 0, environ)
    assert [environ[name] for name in SET] == ["1", "1", "2"]
    assert line == f"NCCL 2.30.7 with NCCL_MAX_CTAS=2, CUDA MPS in {tmp_path}"


def test_ranks_with_a_gpu_of_their_own_set_nothing():
    environ = {}
    assert nccl.allow_sharing([OLD] * 2, [[0], [1]], 0, environ) == "" and not environ


@pytest.mark.parametrize(
    ("everyone", "text"),
    [
        (
            [OLD, OLD],
            r"init: ranks \[0, 1\] share a GPU on backend xla, and NCCL 2.27.7 takes one rank on a "
            r"GPU \(on rank 0\). Install NCCL 2.30 or later on every host "
            r"\(pip install --upgrade nvidia-nccl-cu1[23]\), start one rank per GPU, or set "
            "JAXMPI_BACKEND=mpi.",
        ),
        ([NEW, Nccl()], r"and no NCCL was found \(on rank 1\)"),
    ],
)
def test_sharing_is_refused(everyone, text):
    for rank in range(2):
        environ = {}
        with pytest.raises(jaxmpi.MPIError, match=text):
            nccl.allow_sharing(everyone, [[0, 1]] * 2, rank, environ)
        assert not environ


def test_versions_that_differ_are_refused():
    nccl.check_versions([NEW, Nccl(), NEW])
    with pytest.raises(
        jaxmpi.MPIError,
        match=r"rank 0 has NCCL 2.30.7 \(new\), and rank 2 has NCCL 2.27.7 \(old\)\. Install the "
        "same version on every host, or set JAXMPI_BACKEND=mpi",
    ):
        nccl.check_versions([NEW, Nccl(), OLD])


# {case: (GPU of each of 2 ranks, NCCL of each, what init says or raises)}
STARTS = {
    "shared": (("7", "7"), (NEW, NEW), "; NCCL 2.30.7 with NCCL_MAX_CTAS=4"),
    "each its own": (("0", "1"), (OLD, OLD), ""),
    "shared, old": (("7", "7"), (OLD, OLD), "NCCL 2.27.7 takes one rank on a GPU"),
    "different": (("0", "1"), (OLD, NEW), "rank 1 has NCCL 2.30.7"),
    "none": ((None, None), (Nccl(), Nccl()), ""),
    "AMD, shared": (("7", "7"), (Nccl(), Nccl()), ""),
    "one rank without a GPU": (("7", None), (NEW, Nccl()), ""),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", STARTS)
@run_ranks(2)
def test_start_on_xla(case):
    """The GPUs and NCCL are stand-ins; every rank gets the same error."""
    gpus, versions, text = STARTS[case]
    rank = jaxmpi.rank()
    take = partial(start.take_device, 2, None, over_xla=True)
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the GPU is shared
        patch.setattr(_devices, "choose", lambda *_: gpus[rank])
        patch.setattr(_devices, "unique", lambda name: name)
        patch.setattr(nccl, "find", lambda: versions[rank])
        # of another vendor, or on one host only: no rank waits for another
        patch.setattr(_devices, "uses_nccl", lambda: versions[rank] != Nccl())
        for name in (*SET, "XLA_CLIENT_MEM_FRACTION"):
            patch.setenv(name, "")
        if case in ("shared, old", "different"):
            with pytest.raises(jaxmpi.MPIError, match=text):
                take()
        else:
            line = take()
            assert text in line and ("NCCL 2" in line) == ("NCCL 2" in text)
        shared = case == "shared"
        assert os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] == ("1" if shared else "")


JOB = """
import ctypes, os
from jaxmpi._job.process import joining
ctypes.CDLL(os.environ["LIBRARIES"].split(":")[joining.rank_here()])
from jaxmpi import _devices
_devices.find_spec = lambda name: object() if "cuda" in name else None
os.environ["CUDA_VISIBLE_DEVICES"] = "0"
os.environ.pop("JAX_PLATFORMS", None)
import jaxmpi
jaxmpi.init("xla", verbose=True)
print("NCCL_MAX_CTAS is", os.environ["NCCL_MAX_CTAS"], flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ((23007, 23007), ""),
        ((22707, 22707), "NCCL 2.27.7 takes one rank on a GPU (on rank 0). Install NCCL 2.30 "),
        (
            (23007, 23102),
            f"rank 0 has NCCL 2.30.7 (loaded {nccl.LIBRARY}), and rank 1 has NCCL 2.3",
        ),
    ],
)
def test_a_job_on_one_gpu(numbers, text, tmp_path):
    """Every rank raises within seconds, or has the variables."""
    paths = [library(tmp_path / str(rank), number) for rank, number in enumerate(numbers)]
    start = time.monotonic()
    done = run(2, JOB, tmp_path, LIBRARIES=":".join(map(str, paths)))
    output = done.stdout + done.stderr
    if text:
        assert done.returncode and output.count("MPIError: init: ") >= 2 and text in output, output
        assert time.monotonic() - start < 30
    else:
        assert done.returncode == 0 and output.count("NCCL_MAX_CTAS is 4") == 2, output
        assert output.count("; NCCL 2.30.7 with NCCL_MAX_CTAS=4") == 1, output


# `jaxmpi doctor`


@pytest.mark.parametrize(
    ("has_plugin", "version", "backend", "text"),
    [
        (False, OLD, "", "(backend mpi), as JAX's plugin for NVIDIA's GPUs is not installed"),
        (True, OLD, "", "(backend mpi), as NCCL 2.27.7 takes one rank on a GPU"),
        (True, OLD, "xla", "JAXMPI_BACKEND is xla, which is refused, as NCCL 2.27.7 takes one"),
        (True, NEW, "", "(backend mpi); NCCL 2.30.7 could carry them (JAXMPI_BACKEND=xla under"),
        (True, NEW, "xla", "they use NCCL 2.30.7, as JAXMPI_BACKEND is xla"),
    ],
)
def test_doctor_says_how_ranks_share_a_gpu(monkeypatch, has_plugin, version, backend, text):
    monkeypatch.setattr(_devices, "uses_nccl", lambda: has_plugin)
    monkeypatch.setattr(nccl, "find", lambda: version)
    monkeypatch.setattr(probes, "ask", lambda name: probes.Answer(probes._PROBES[name]()))
    monkeypatch.setattr(_devices, "visible", lambda devices=None, dev=None: ["0"])
    monkeypatch.setenv("JAXMPI_BACKEND", backend)
    finding = doctor.devices(2)
    assert finding.verdict == "slow" and text in finding.facts, finding
