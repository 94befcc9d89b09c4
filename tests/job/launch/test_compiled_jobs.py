"""The second of two jobs and a restart compile nothing; a failing cache or rank does not matter."""

import os
import re

import pytest
from test_launch import start

SCRIPT = """
import os, signal, sys, time
import jax, jax.numpy as jnp, jaxmpi
from collections import Counter
events = Counter()
jax.monitoring.register_event_listener(lambda name, **_: events.update([name.rpartition("/")[2]]))
jaxmpi.init()
rank, size = jaxmpi.rank(), jaxmpi.size()
fault = sys.argv[1] if len(sys.argv) > 1 else ""
if fault not in ("", "exit") and rank == 0 and os.environ["JAXMPI_RESTART"] == "0":
    from jaxmpi import _jaxcompat
    entry = _jaxcompat.compile_entry
    def faulty(lowered):
        if fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(float(fault))
        return entry(lowered)
    _jaxcompat.compile_entry = faulty
step = jaxmpi.jit(lambda x: jaxmpi.tree_allreduce(jnp.sin(x) + jaxmpi.rank(), op="sum"))
for length in (3, 4):
    x = jnp.ones(length)
    out = jaxmpi.local(step(x))
    assert jnp.allclose(out, size * jnp.sin(1.0) + size * (size - 1) / 2), out
compiled = events['compile_requests_use_cache'] - events['cache_hits']
print(f"rank {rank} compiled {compiled}", flush=True)
if fault == "exit" and os.environ["JAXMPI_RESTART"] == "0":
    sys.exit(3)
"""
BACKENDS = {"mpi": {"JAXMPI_BACKEND": "mpi"}, "xla": {"JAXMPI_BACKEND": "xla"}}


@pytest.fixture
def job(tmp_path, monkeypatch):
    """Return a function that runs the script with its own home.

    It returns the exit code, how many programs each rank compiled, and stderr.
    """
    for name in [name for name in os.environ if name.startswith("JAX_")]:
        monkeypatch.delenv(name)
    tmp_path.chmod(0o700)
    (tmp_path / "script.py").write_text(SCRIPT)

    def run(*arguments, fault="", ranks=2, **environ):
        environ = {"HOME": str(tmp_path), "XDG_CACHE_HOME": "", **environ}
        started = start(
            "-n", ranks, *arguments, tmp_path / "script.py", *([fault] if fault else []), **environ
        )
        try:
            output, errors = started.communicate(timeout=110)
        finally:
            started.kill()
        counts = re.findall(r"rank (\d+) compiled (\d+)", output)
        counts = sorted((int(rank), int(count)) for rank, count in counts)
        return started.returncode, [count for _, count in counts], errors

    run.folder = tmp_path / ".cache" / "jaxmpi" / "compiled"
    return run


def shared(errors):
    """Return whether modules are equal across ranks and jobs; mpi4jax's hold an address."""
    return os.environ.get("JAXMPI_TRANSPORT") != "mpi4jax" and "Traceback" not in errors


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_second_job_compiles_nothing_that_the_first_has(job, backend):
    code, first, errors = job(**BACKENDS[backend])
    assert code == 0, errors
    assert sum(first) >= 2 and job.folder.stat().st_mode & 0o777 == 0o700
    code, second, errors = job(**BACKENDS[backend])
    assert code == 0, errors
    if shared(errors):
        assert second[0] == 0 and (backend == "xla" or second == [0, 0])


@pytest.mark.slow
def test_a_restart_compiles_nothing(job):
    code, counts, errors = job("--restarts", 1, fault="exit", JAXMPI_BACKEND="mpi")
    assert code == 0 and len(counts) == 4, errors
    if shared(errors):
        assert counts.count(0) >= 2, counts  # both ranks, the second time


@pytest.mark.slow
def test_nothing_is_kept_where_that_is_asked_for(job):
    assert job(JAXMPI_CACHE_BYTES="0")[0] == 0 and not job.folder.exists()


@pytest.mark.slow
def test_a_folder_of_jax_s_own_overrides_it(job, tmp_path):
    theirs = {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "theirs"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    assert job(**theirs)[0] == 0
    assert not job.folder.exists() and [*(tmp_path / "theirs").iterdir()]


@pytest.mark.slow
def test_others_may_write_to_the_cache_folder(job):
    job.folder.mkdir(parents=True)
    job.folder.chmod(0o777)
    code, counts, errors = job()
    assert code == 0 and sum(counts) >= 2
    why = f"{job.folder} belongs to another user, or others may write to it."
    assert errors.count(f"jaxmpi: what is compiled is not kept in {job.folder}: {why}") == 1, errors
    assert not [*job.folder.iterdir()]


@pytest.mark.slow
def test_the_cache_folder_cannot_be_made(job):
    job.folder.parent.parent.write_text("a file")
    code, counts, errors = job()
    assert code == 0 and sum(counts) >= 2
    assert errors.count(f"jaxmpi: what is compiled is not kept in {job.folder}: ") == 1, errors


@pytest.mark.exhaustive
def test_damaged_entries_are_compiled_anew(job):
    assert job()[0] == 0
    for path in job.folder.iterdir():
        path.write_bytes(path.read_bytes()[:40])
    code, counts, errors = job()
    assert code == 0 and counts[0] >= 2, errors
    assert re.search(r"jaxmpi: \S+\.compiled is damaged, and is compiled anew\.", errors), errors
    code, counts, errors = job()
    assert code == 0 and (not shared(errors) or counts[0] == 0), errors


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_rank_that_is_killed_while_it_compiles_ends_the_job(job, backend):
    code, counts, errors = job(fault="kill", ranks=3, **BACKENDS[backend])
    if os.environ.get("JAXMPI_TRANSPORT") == "mpi4jax" and backend == "mpi":
        return
    assert code and not counts
    assert re.match(
        r"jaxmpi run: the job failed: rank 0 \(pid \d+ on \S+\) was killed by signal 9",
        errors.splitlines()[-1],
    )


@pytest.mark.exhaustive
def test_a_restart_after_a_kill_while_compiling_goes_on(job):
    code, counts, errors = job("--restarts", 1, fault="kill", ranks=3, JAXMPI_BACKEND="mpi")
    assert code == 0 and len(counts) == 3, errors


@pytest.mark.exhaustive
def test_the_watchdog_knows_why_the_others_wait(job):
    limits = {"JAXMPI_STALL_SECONDS": "1", "JAXMPI_STALL_END_SECONDS": "2"}
    code, counts, errors = job(fault="5", ranks=3, JAXMPI_BACKEND="mpi", **limits)
    assert code == 0 and len(counts) == 3, errors  # it is not ended
    if shared(errors):
        assert re.search(
            r"stalled: has waited \d+ s in the compilation of <lambda> on rank 0\n  arrived: ranks "
            r"1, 2",
            errors,
        )
        assert re.search(
            r"missing: rank 0 \(pid \d+ on \S+\) is compiling <lambda>, for ranks 1, 2, too\n",
            errors,
        ), errors
