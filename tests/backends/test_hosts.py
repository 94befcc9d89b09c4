"""Several hosts, as network namespaces: a cable that is cut, packets that are lost."""

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.exhaustive
TWO_HOSTS = Path(__file__).parent / "two_hosts.sh"
NETWORK = Path(__file__).parents[1] / "network.sh"
TRAINS = """
import os, sys, time
from pathlib import Path
import numpy as np
import jaxmpi

if __name__ == "__main__":
    world = jaxmpi.init()
    assert os.environ["JAX_OF_THE_USER"] == "here"  # on the other host, too
    step = jaxmpi.jit(lambda x, y: (jaxmpi.tree_allreduce(x, "sum"), y @ y))
    x, y = np.ones(300_000, np.float32) * (world.rank + 1), np.ones((200, 200), np.float32)
    seconds = []
    starts = "jaxmpi_start" in step.lower(x, y).as_text()
    assert starts == (world.backend == "mpi" and os.environ.get("JAXMPI_OVERLAP") != "0")
    for i in range(int(sys.argv[2])):
        start = time.monotonic()
        total, _ = step(x * i, y)
        want = world.size * (world.size + 1) // 2 * i
        assert float(total[7]) == float(total[-1]) == want, (i, total)
        seconds.append(time.monotonic() - start)
        time.sleep(0.02)
        if i == 20 and world.rank == 0:
            Path(sys.argv[1]).touch()
    if world.rank == 0:
        print(f"done, the longest step took {max(seconds[1:]):.1f} s")
"""


@pytest.fixture(scope="module", autouse=True)
def _hosts_can_be_made():
    """Root, ip netns and unshare, and an MPI's launcher."""
    space = f"jaxmpi-try-{os.getpid()}"
    if (
        os.geteuid()
        or not shutil.which("ip")
        or not Path(sys.executable).with_name("mpirun").exists()
    ):
        pytest.skip("needs root, ip and an mpirun, to make hosts")
    works = []
    for command in (["add", space], ["exec", space, "unshare", "-u", "true"]):
        done = subprocess.run(["ip", "netns", *command], capture_output=True)
        works.append(done.returncode == 0)
    subprocess.run(["ip", "netns", "del", space], capture_output=True)
    if not all(works):
        pytest.skip("network namespaces are forbidden here")


def run(tmp_path, cut, steps, **environ):
    """Code, output and seconds of a job whose cable is cut in the 20th step."""
    return run_on([TWO_HOSTS, "--cut", tmp_path / "go", cut], tmp_path, steps, **environ)


def run_on(hosts, tmp_path, steps, **environ):
    """Code, output and seconds of a job on hosts that a script makes."""
    script, go = tmp_path / "trains.py", tmp_path / "go"
    script.write_text(TRAINS)
    start = time.monotonic()
    command = [*map(str, hosts), str(script), str(go), str(steps)]
    environ = {**os.environ, "PYTHON": sys.executable, "JAX_OF_THE_USER": "here", **environ}
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, env=environ, **streams) as job:
        try:
            output, _ = job.communicate(timeout=110)
        except subprocess.TimeoutExpired:
            job.terminate()  # it removes its hosts
            pytest.fail(f"it did not end:\n{job.communicate()[0]}")
    return job.returncode, output, time.monotonic() - start


@pytest.mark.parametrize("overlap", ["auto", "0"])
def test_a_cable_that_is_cut_for_five_seconds(overlap, tmp_path):
    """TCP resends what was lost, the watch names who is missing meanwhile, and the job goes on."""
    limits = {"JAXMPI_STALL_SECONDS": "2", "JAXMPI_STALL_END_SECONDS": "60"}
    code, output, _ = run(tmp_path, 5, 100, JAXMPI_OVERLAP=overlap, **limits)
    longest = re.search(r"done, the longest step took ([\d.]+) s", output)
    assert code == 0 and longest and float(longest[1]) > 4, output
    assert re.search(r"stalled: has waited \d+ s in (<lambda> \()?allreduce", output), output


@pytest.mark.parametrize("overlap", ["auto", "0"])
def test_a_cable_that_is_cut_for_ever(overlap, tmp_path):
    """The job ends, and the other host is named."""
    limits = {"JAXMPI_STALL_SECONDS": "2", "JAXMPI_STALL_END_SECONDS": "8"}
    code, output, seconds = run(tmp_path, "forever", 10_000, JAXMPI_OVERLAP=overlap, **limits)
    assert code and seconds < 60, output
    assert re.search(r"missing: rank [23] \(pid \d+ on jaxmpi-b\)", output), output
    assert re.search(
        r"\[rank [01]/4 on jaxmpi-a\] stalled for \d+ s: .*on jaxmpi-b did not come\. The job "
        r"ends\.",
        output,
    ), output


@pytest.mark.parametrize("named", ["", "10.77.0.1"])
def test_xla_between_hosts(named, tmp_path):
    """The ranks find an address of rank 0's: no name resolves to it, and there's no default route.

    Each rank listens at the address of its host that leads to rank 0.
    """
    script = tmp_path / "trains.py"
    script.write_text(TRAINS)
    environ = {
        "PYTHON": sys.executable,
        "JAX_OF_THE_USER": "here",
        "JAXMPI_BACKEND": "xla",
        "JAXMPI_HOST": named,
    }
    command = [str(TWO_HOSTS), str(script), str(tmp_path / "go"), "5"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=110, env={**os.environ, **environ}
    )
    assert done.returncode == 0 and "done, the longest step" in done.stdout, (
        done.stdout + done.stderr
    )


@pytest.fixture
def _switch_can_be_made():
    """A TUN device and a compiler."""
    if not os.path.exists("/dev/net/tun") or not shutil.which("c++"):
        pytest.skip("needs /dev/net/tun and c++, to make a switch")


@pytest.mark.usefixtures("_switch_can_be_made")
@pytest.mark.parametrize(("hosts", "ranks"), [(2, 2), (3, 1)])
def test_a_cable_that_loses_packets(hosts, ranks, tmp_path):
    """The sums are right; TCP sends again what was lost."""
    code, output, _ = run_on([NETWORK, hosts, ranks, 1, 1000, 0.005], tmp_path, 40)
    assert code == 0 and "done, the longest step" in output, output


@pytest.mark.usefixtures("_switch_can_be_made")
def test_one_of_three_hosts_is_cut_off(tmp_path):
    """The job ends, and that host is named."""
    limits = {"JAXMPI_STALL_SECONDS": "2", "JAXMPI_STALL_END_SECONDS": "8"}
    code, output, seconds = run_on(
        [NETWORK, 3, 1, 1, 1000, 0, "--cut", tmp_path / "go"], tmp_path, 10_000, **limits
    )
    assert code and seconds < 90, output
    assert re.search(r"missing: rank 2 \(pid \d+ on host-3\)", output), output
    assert re.search(
        r"\[rank [01]/3 on host-[12]\] stalled for \d+ s: .*on host-3 did not come\. The job "
        r"ends\.",
        output,
    ), output
