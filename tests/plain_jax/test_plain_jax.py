"""Programs of plain JAX under `jaxmpi run`: their numbers, and how they end."""

import ctypes
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from plain_jax import sharded_cases

import jaxmpi
from jaxmpi._backends import jax_processes
from jaxmpi._job.launch import plain_jax as launch_plain_jax
from jaxmpi._job.launch.mpiexec import Mpiexec
from jaxmpi._job.process import jax_collectives, launchers
from jaxmpi.testing import run_ranks

HERE = Path(__file__).parent
NATIVE = HERE.parents[1] / "native"
# jaxlib has no name of MPI for the type
REFUSED = re.compile(r"(psum|pmax|pmin|all_gather|psum_scatter) float16")


def started(ranks, script, *arguments, **environ):
    command = [sys.executable, "-m", "jaxmpi", "run", "-n", str(ranks), HERE / script, *arguments]
    return subprocess.run(
        [*map(str, command)],
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@cache
def found(ranks, node_ranks, folder):
    """Return what each rank has found wrong in each case."""
    path = f"{folder}/results{ranks}.npz"
    subprocess.run(
        [sys.executable, HERE / "sharded_cases.py", str(ranks), "save", path],
        env={**os.environ, "XLA_FLAGS": f"--xla_force_host_platform_device_count={ranks}"},
        timeout=300,
        check=True,
    )
    done = started(
        *(ranks, "sharded_cases.py", str(ranks), "compare", path),
        JAXMPI_NODE_RANKS=node_ranks,
        JAXMPI_STALL_SECONDS="60",
        JAXMPI_STALL_END_SECONDS="120",
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(Path(f"{path}.{rank}").read_text()) for rank in range(ranks)]


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return str(tmp_path_factory.mktemp("plain_jax"))


# (ranks, ranks of a node); "" for all on one node
JOBS = [(4, ""), (3, "1")]
MORE_JOBS = [(2, ""), (3, ""), (4, "2")]


def cells(jobs, *marks):
    """Return a test case for each case of each job."""
    found = []
    for ranks, node_ranks in jobs:
        for name, (numbers, _) in sharded_cases.CASES.items():
            if ranks in numbers:
                found.append(pytest.param(ranks, node_ranks, name, marks=marks))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "node_ranks", "name"),
    [*cells(JOBS), *cells(MORE_JOBS, pytest.mark.exhaustive)],
)
def test_ranks_give_what_virtual_devices_give(ranks, node_ranks, name, folder):
    for wrong in found(ranks, node_ranks, folder):
        if REFUSED.fullmatch(name):
            assert "Unsupported primitive type for reduction: f16" in wrong[name]
        else:
            assert wrong[name] == ""


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_scatters_of_ranks_that_come_late_are_right(ranks):
    done = started(ranks, "program_of_scatters.py", 60)
    assert done.stdout.count("wrong: 0") == ranks, done.stdout + done.stderr


@pytest.mark.slow
def test_threads_have_meshes_of_their_own():
    check_threads(calls=300)


@pytest.mark.soak
@pytest.mark.parametrize("which", range(20))
def test_threads_have_meshes_of_their_own_in_500_runs(which):
    for _ in range(25):
        check_threads(calls=20)


def check_threads(calls):
    """Run three threads on each of 4 ranks, with a mesh each: no wrong number, no hang."""
    done = started(4, "program_of_threads.py", calls, NPROC="8", JAXMPI_STALL_END_SECONDS="100")
    assert done.stdout.count("wrong: []") == 4, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("how", "code", "texts"),
    [
        ("none", 0, ["done"]),
        ("raise", 1, ["ValueError: of rank 1", "the job failed: rank 1 "]),
        ("before devices", 1, ["ValueError: of rank 1", "the job failed: "]),
        ("exit", 3, ["rank 1 ends the job, with code 3", "the job failed: rank 1 "]),
        ("exit in try", 3, ["cleans up", "rank 1 ends the job, with code 3"]),
        ("exit()", 3, ["rank 1 ends the job, with code 3", "the job failed: rank 1 "]),
        ("raise beside mpi4py", 1, ["ValueError: of rank 1", "the job failed: rank 1 "]),
        (
            "leave permute",
            1,
            [
                *("rank 1 has ended, while this rank was in a permute ", " rank 1, of 16 bytes"),
                "the job failed: rank 1 (pid ",
            ],
        ),
        ("text", 1, ["rank 1 gives up", "the job failed: rank 1 "]),
        ("kill", None, ["the job failed: rank 1 "]),
        (
            "leave",
            1,
            [
                "local rank 1 of this node has ended, while this rank was in an all-reduce of 4 "
                "float32 (sum), 16 bytes, with ranks 0, 1",
                "the job failed: rank 1 (pid ",
            ],
        ),
        ("stop", 1, ["it waits for rank 1. It ends the job.", "the job failed: rank 1 (pid "]),
        (
            "other",
            1,
            # of the rank that finds it first: it ends the job, and with it the other one
            ["of them in another collective. All ranks must run the same programs in the same"],
        ),
    ],
)
def test_a_rank_that_fails_ends_the_job(how, code, texts):
    done = started(
        2,
        "program_that_fails.py",
        how,
        JAXMPI_STALL_SECONDS="2",
        JAXMPI_STALL_END_SECONDS="5",
    )
    said = done.stdout + done.stderr
    for text in texts:
        assert text in said, said
    assert done.returncode == code if code is not None else done.returncode > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "how",
    [
        *("caught", "caught at the end", "caught, and exit 0", "thread exits"),
        *("child raises", "child exits", "none beside mpi4py"),
    ],
)
def test_what_does_not_end_a_rank_does_not_end_the_job(how):
    done = started(2, "program_that_fails.py", how)
    said = done.stdout + done.stderr
    assert done.returncode == 0 and said.count("done") == 2, said
    assert "ends the job" not in said and "failed" not in said, said


@pytest.mark.slow
@pytest.mark.parametrize("how", ["plain", "ours"])
def test_the_library_ends_a_job_but_for_a_wait_that_the_monitor_sees(how):
    limits = {"JAXMPI_STALL_SECONDS": "2", "JAXMPI_STALL_END_SECONDS": "5"}
    done = started(2, "program_beside_jaxmpi.py", how, **limits)
    said = done.stdout + done.stderr
    if how == "ours":
        assert not done.returncode and said.count("mean") == 2, said
    else:
        assert done.returncode == 1 and "it waits for rank 1. It ends the job." in said, said


@pytest.mark.slow
def test_the_example_has_the_same_losses_on_virtual_devices_and_ranks():
    """Its steps wait: those that are queued hang on virtual devices, in about half of the runs."""
    example = HERE.parents[1] / "examples" / "sharded.py"
    flags = "--xla_force_host_platform_device_count="
    losses = []
    for count in (1, 4, 4):
        losses.append(losses_in(output_of(sys.executable, example, XLA_FLAGS=f"{flags}{count}")))
    for ranks in (2, 3):
        done = started(ranks, example)
        assert done.returncode == 0, done.stderr
        losses.append(losses_in(done.stdout.splitlines()))
    assert len(losses[0]) == 3 and losses[0][-1] < 0.5 * losses[0][0]
    np.testing.assert_allclose(losses, [losses[0]] * len(losses), atol=2e-4)


def losses_in(lines):
    return [float(found[1]) for line in lines if (found := re.search(r": loss (\S+)", line))]


@pytest.mark.launcher
@pytest.mark.slow
def test_initialize_finds_the_ranks_of_each_launcher():
    done = started(3, "program_of_all_devices.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("[[3. 3. 3.]]") == 3, done.stdout


def test_several_devices_of_a_process_are_refused():
    done = started(
        *(2, "program_of_all_devices.py"),
        XLA_FLAGS="--xla_force_host_platform_device_count=2",
    )
    assert done.returncode != 0
    assert "has more than one CPU device" in done.stderr


def test_an_mpi_that_cannot_be_opened_is_one_sentence():
    done = started(2, "program_that_fails.py", "none", JAXMPI_LIBMPI="/nowhere/libmpi.so")
    assert done.returncode != 0
    assert "no MPI library can be opened (/nowhere/libmpi.so" in done.stderr


def test_a_rank_that_comes_late_is_reported_and_does_not_end_the_job():
    """Nothing is known of what it does: by default, a wait of any length ends no job."""
    done = started(2, "program_that_fails.py", "late", JAXMPI_STALL_SECONDS="0.3")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("done") == 2
    assert "with ranks 0, 1; it waits for rank 1." in done.stderr
    assert "It ends the job" not in done.stderr


def test_a_rank_that_does_not_start_is_reported():
    done = started(2, "program_that_fails.py", "start", JAXMPI_STALL_SECONDS="1")
    assert done.returncode == 0, done.stderr
    assert re.search(
        r"rank 0 has waited \d+ s in the start of JAX's collectives over MPI; all ranks",
        done.stderr,
    )


# Parts of the library


@pytest.fixture(scope="session")
def compiled(tmp_path_factory):
    """Return a function that compiles a program with a source of the library."""
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None:
        pytest.skip("no C++ compiler")
    folder = tmp_path_factory.mktemp("compiled")

    @cache
    def compile_with(program, source):
        flags = ["-std=c++17", "-O1", "-Wall", "-Werror", f"-I{NATIVE}", "-pthread"]
        sources = [HERE / program, NATIVE / source]
        path = folder / Path(program).stem
        subprocess.run([compiler, *flags, *sources, "-o", path, "-ldl"], timeout=120, check=True)
        return path

    return compile_with


def output_of(program, *arguments, **environ):
    return subprocess.run(
        [program, *arguments],
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    ).stdout.splitlines()


@pytest.mark.parametrize(
    ("what", "lines"),
    [
        ("one", ["found 0 2", "chosen 0 2"]),
        # a slot that still points to {0, 1}, which has its communicator
        ("leftover", ["found 0 1", "found 0 2", "chosen 0 2"]),
        ("unknown", ["found 0 1", "found 0 2", "not chosen"]),
        ("pipe", ["found 0 1", "found 0 2", "chosen 0 2"]),
    ],
)
def test_find_cliques_finds_all_that_fit(what, lines, compiled):
    found = output_of(compiled("check_cliques.cc", "clique.cc"), what)
    assert sorted(found) == sorted(lines)


def test_find_cliques_says_that_memory_cannot_be_read(compiled):
    [text] = output_of(compiled("check_cliques.cc", "clique.cc"), "unreadable")
    assert text.startswith("process_vm_readv is forbidden here (Operation not permitted), and a")
    assert text.endswith("set JAX_CPU_COLLECTIVES_IMPLEMENTATION=gloo.")


def test_watch_waits_reports_each_wait_once(compiled):
    waits = compiled("check_waits.cc", "mpi_waits.cc")
    said = output_of(waits, "0.1", "1.2", JAXMPI_STALL_SECONDS="0.5", JAXMPI_STALL_END_SECONDS="")
    texts = sorted(re.sub(r"\d+", "N", line.removeprefix("has waited ")) for line in said)
    assert texts == [
        *["N s in the first."] * 2,
        "N s in the second.",
        "N s in the second; it waits for rank N.",
    ]


def test_watch_waits_ends_for_those_that_take_too_long(compiled):
    """The later waits, wherever they stand in the order, do not end the job."""
    waits = compiled("check_waits.cc", "mpi_waits.cc")
    said = output_of(waits, "2", "9", JAXMPI_STALL_SECONDS="0", JAXMPI_STALL_END_SECONDS="3")
    assert said == [
        *["has waited 3 s in the first. It ends the job."] * 2,
        "end for 0 that have left",
    ]


def test_watch_waits_ends_for_ranks_that_have_left(compiled):
    waits = compiled("check_waits.cc", "mpi_waits.cc")
    said = output_of(waits, "1", "9", "left", JAXMPI_STALL_SECONDS="0")
    assert said == [
        "has waited 4 s in the second; rank 1 has left, and does not come. It ends the job.",
        "end for 1 that have left",
    ]


def test_watch_waits_leaves_the_end_to_the_monitor_where_there_is_one(compiled):
    waits = compiled("check_waits.cc", "mpi_waits.cc")
    limits = {"JAXMPI_STALL_SECONDS": "0.5", "JAXMPI_STALL_END_SECONDS": "1"}
    said = output_of(waits, "0.1", "2.5", "monitored", **limits)
    assert len(said) == 4 and not any("end" in line for line in said), said


def test_the_library_has_what_the_monitor_calls():
    library = ctypes.CDLL(str(jax_collectives.find_library()))
    library.jaxmpi_leave_end_to_monitor(1)
    library.jaxmpi_leave_end_to_monitor(0)
    assert library.jaxmpi_begin_to_leave


def test_unknown_symbols_of_this_jaxlib():
    import jaxlib

    [folder] = jaxlib.__path__
    library = jax_collectives.find_library()
    assert jax_collectives.unknown_symbols(Path(folder), library) == []
    assert jax_collectives.why_not() == ""


def test_unknown_symbols_names_those_that_the_library_lacks(tmp_path):
    library = jax_collectives.find_library()
    assert jax_collectives.unknown_symbols(tmp_path, library) is None
    (tmp_path / "libjax.so").write_bytes(b"x\0MPIABI_Send\0MPIABI_Never_heard\0MPIABI_COMM_WORLD\0")
    assert jax_collectives.unknown_symbols(tmp_path, library) == ["MPIABI_Never_heard"]


@pytest.mark.parametrize(
    ("version", "symbols", "text"),
    [
        ("99.0", b"\0MPIABI_Never_heard\0", "jaxlib 99.0 asks for MPIABI_Never_heard"),
        ("99.0", b"", "jaxlib 99.0 has no collectives over MPI"),
        ("99.0", b"\0MPIABI_Send\0", ""),
    ],
)
def test_why_not_of_another_jaxlib(version, symbols, text, tmp_path, monkeypatch):
    package = tmp_path / "jaxlib"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "libjax.so").write_bytes(symbols or b"nothing")
    spec = type("Spec", (), {"submodule_search_locations": [str(package)], "origin": None})
    find = jax_collectives.find_spec
    monkeypatch.setattr(
        jax_collectives, "find_spec", lambda name: spec if name == "jaxlib" else find(name)
    )
    monkeypatch.setattr(jax_collectives.metadata, "version", lambda name: version)
    why = jax_collectives.why_not()
    assert why.startswith(text) if text else why == ""


# Variables

OPEN_MPI = Mpiexec("/mpirun", launchers.OPEN_MPI_5, "5.0.8")
LIBRARY = {jax_collectives.LIBRARY_VARIABLE, jax_collectives.IMPLEMENTATION}
CPUS = {"JAX_PLATFORMS": "cpu"}
PRINT = """
import os, sys
for name in ("RANK", "SIZE", "LOCAL_RANK"):
    print(os.environ["OMPI_COMM_WORLD_" + name])
print(sys.argv[1])
"""


def variables(environ, options=()):
    return launch_plain_jax.variables(OPEN_MPI, "/lib/libmpi.so", options, environ)


def test_variables_have_the_coordinator_on_gpus_too():
    assert set(variables({"JAX_PLATFORMS": "cuda"})) == {launch_plain_jax.ORTE_URI}
    everything = {launch_plain_jax.ORTE_URI, *LIBRARY, jax_collectives.MPI_VARIABLE}
    assert set(variables(CPUS)) == everything


@pytest.mark.parametrize(
    ("name", "value"),
    [
        (jax_collectives.LIBRARY_VARIABLE, "/mine/libmpiwrapper.so"),
        (jax_collectives.IMPLEMENTATION, "gloo"),
    ],
)
def test_variables_of_the_library_are_all_or_none(name, value):
    assert set(variables({**CPUS, name: value})) == {launch_plain_jax.ORTE_URI}


@pytest.mark.parametrize("launcher", [launchers.MPICH, launchers.INTEL_MPI])
def test_ranks_of_other_launchers_have_the_names_that_jax_knows(launcher):
    environ = dict(
        zip((launcher.rank[0], launcher.size[0], launcher.local_rank[0]), "451", strict=True)
    )
    words = [*launch_plain_jax.names_for_jax(launcher), sys.executable, "-c", PRINT, "a b; $c"]
    done = subprocess.run(words, env=environ, capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:4] == ["4", "5", "1", "a b; $c"]
    there = Mpiexec("/mpiexec", launcher, "4")
    assert launch_plain_jax.ORTE_URI in launch_plain_jax.variables(
        there, "/lib/libmpi.so", (), CPUS
    )


@pytest.mark.parametrize("launcher", [launchers.OPEN_MPI_4, launchers.OPEN_MPI_5])
def test_ranks_of_open_mpi_have_their_names_already(launcher):
    assert launch_plain_jax.names_for_jax(launcher) == []


def test_variables_complete_what_the_user_has_set_alike():
    added = variables({**CPUS, jax_collectives.IMPLEMENTATION: "mpi"})
    assert added[jax_collectives.LIBRARY_VARIABLE] == str(jax_collectives.find_library())


def test_two_jobs_never_have_the_same_port():
    """Not even those that start at one moment, before a coordinator listens."""
    order = [*launch_plain_jax.PORTS][::-1]
    program = (
        "import sys; from jaxmpi._job.launch import plain_jax;"
        f"plain_jax.PORTS = {order};"
        "plain_jax.random.SystemRandom.sample = lambda self, ports, count: ports;"
        "print(plain_jax._free_port(), flush=True); sys.stdin.read()"
    )
    jobs, pipe = [], subprocess.PIPE
    for _ in range(3):
        command = [sys.executable, "-c", program]
        jobs.append(subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True))
    ports = {job.stdout.readline() for job in jobs}
    for job in jobs:
        job.communicate()
    assert len(ports) == 3


# what each name and each route stands for on a host of Debian called "me"
NAMES = {"me": "127.0.1.1", "localhost": "127.0.0.1", "node2": "10.0.0.2", "node3": "10.0.0.3"}
ROUTES = {"10.0.0.2": "10.0.0.1", "10.0.0.3": "10.0.0.1", "192.0.2.1": "172.16.0.9"}


@pytest.mark.parametrize(
    ("options", "allocated", "address"),
    [
        ([], "", "127.0.0.1"),
        (["--host", "localhost:4"], "", "127.0.0.1"),
        (["--host", "me:1,node2:1"], "", "10.0.0.1"),
        (["--host", "localhost:1,node2:1"], "", "10.0.0.1"),
        (["--host", "unknown:1,node2:1"], "", None),
        (["--host", "node3:1,me:1"], "", "10.0.0.3"),
        ([], "1(x2)", "172.16.0.9"),
    ],
)
def test_variables_name_an_address_that_other_hosts_reach(options, allocated, address, monkeypatch):
    probed = []
    monkeypatch.setattr(socket, "gethostname", lambda: "me")
    monkeypatch.setattr(launch_plain_jax, "_resolve", lambda name: NAMES.get(name, ""))
    monkeypatch.setattr(launch_plain_jax, "_route_source", lambda to: ROUTES.get(to, ""))
    monkeypatch.setattr(launch_plain_jax, "_free_port", lambda: probed.append(1) or 63000)
    monkeypatch.setattr(
        launch_plain_jax,
        "same_host",
        lambda one, other: one == other or NAMES.get(one, one) == NAMES.get(other),
    )
    found = variables({**CPUS, "SLURM_TASKS_PER_NODE": allocated}, options)
    if address is None:
        assert launch_plain_jax.ORTE_URI not in found
        return
    uri = found[launch_plain_jax.ORTE_URI]
    assert f";tcp://{address}:" in uri
    # a port is tested where rank 0 runs here
    assert bool(probed) == (address != "10.0.0.3")
    assert int(uri.rpartition(":")[2]) in launch_plain_jax.PORTS


def test_variables_name_the_first_host_of_a_file_without_numbers(tmp_path, monkeypatch):
    monkeypatch.setattr(launch_plain_jax, "_resolve", lambda name: NAMES.get(name, ""))
    (tmp_path / "hosts").write_text("node3\n# a comment\nnode2\n")
    found = variables(CPUS, ["--hostfile", str(tmp_path / "hosts")])
    assert ";tcp://10.0.0.3:" in found[launch_plain_jax.ORTE_URI]


def test_route_source_is_an_address_of_this_host():
    assert launch_plain_jax._route_source("127.0.0.1") == "127.0.0.1"
    assert launch_plain_jax._route_source("") == ""
    assert launch_plain_jax._route_source("not an address") == ""


def test_only_cpus_by_platforms():
    assert jax_collectives.only_cpus({"JAX_PLATFORMS": "cpu"})
    assert not jax_collectives.only_cpus({"JAX_PLATFORMS": "cuda,cpu"})


@run_ranks(2, backend="xla")
def test_backend_xla_gathers_every_type_over_mpi():
    """float16 travels as bits: XLA does not know it in collectives over MPI."""
    assert jax.config.jax_cpu_collectives_implementation == "mpi"
    for dtype in ("float16", "bfloat16", "float32", "int8", "bool"):
        x = (np.arange(4) + jaxmpi.rank()).astype(jnp.dtype(dtype))
        got = jaxmpi.jit(lambda x: lax.all_gather(x, jaxmpi.AXIS))(x)
        want = np.stack([(np.arange(4) + rank).astype(jnp.dtype(dtype)) for rank in range(2)])
        assert got.dtype == want.dtype and (np.asarray(got) == want).all()


def test_gloo_carries_backend_xla_where_the_setting_says_so():
    done = started(2, "program_of_backend_xla.py", JAXMPI_XLA="gloo")
    assert done.stdout.count("gloo [0.5 0.5]") == 2, done.stderr


def test_mpi_for_backend_xla_needs_the_library(monkeypatch):
    monkeypatch.setenv("JAXMPI_XLA", "mpi")
    monkeypatch.delenv(jax_collectives.LIBRARY_VARIABLE, raising=False)
    monkeypatch.setattr(jax_processes._jaxcompat, "backends_started", lambda: False)
    assert "JAXMPI_XLA is mpi, and jaxlib has not loaded" in jax_processes._obstacle(0, 2)
