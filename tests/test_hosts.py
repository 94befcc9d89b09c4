"""Two hosts, as network namespaces, and a cable between them that is cut."""

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

TWO_HOSTS = Path(__file__).parent / "two_hosts.sh"
TRAINS = """
import sys, time
from pathlib import Path
import numpy as np
import jaxmpi

if __name__ == "__main__":
    world = jaxmpi.init()
    step = jaxmpi.jit(lambda x: jaxmpi.tree_allreduce(x, "sum"))
    x, seconds = np.ones(300_000, np.float32) * (world.rank + 1), []
    for i in range(int(sys.argv[2])):
        start = time.monotonic()
        total = step(x * i)
        assert float(total[7]) == 10 * i, (i, total[7])
        seconds.append(time.monotonic() - start)
        time.sleep(0.02)
        if i == 20 and world.rank == 0:
            Path(sys.argv[1]).touch()
    if world.rank == 0:
        print(f"done, the longest step took {max(seconds[1:]):.1f} s")
"""


def can_make_hosts():
    if os.geteuid() or not shutil.which("ip") or not Path(sys.executable).with_name("mpirun").exists():
        return False
    made = subprocess.run(["ip", "netns", "add", "jaxmpi-try"], capture_output=True).returncode == 0
    subprocess.run(["ip", "netns", "del", "jaxmpi-try"], capture_output=True)
    return made


pytestmark = pytest.mark.skipif(not can_make_hosts(), reason="needs root, ip netns and Open MPI, to make hosts")


def run(tmp_path, cut, steps, **environ):
    """Code, output and seconds of a job whose cable is cut in the 20th step."""
    script, go = tmp_path / "trains.py", tmp_path / "go"
    script.write_text(TRAINS)
    start = time.monotonic()
    done = subprocess.run(
        [str(TWO_HOSTS), "--cut", str(go), str(cut), str(script), str(go), str(steps)],
        text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=110,
        env={**os.environ, "PYTHON": sys.executable, **environ},
    )  # fmt: skip
    return done.returncode, done.stdout, time.monotonic() - start


def test_a_cable_that_is_cut_for_five_seconds(tmp_path):
    """TCP sends again what was lost, the watch says who is missing meanwhile, and the job goes on."""
    code, output, _ = run(tmp_path, 5, 100, JAXMPI_STALL_SECONDS="2", JAXMPI_STALL_END_SECONDS="60")
    longest = re.search(r"done, the longest step took ([\d.]+) s", output)
    assert code == 0 and longest and float(longest[1]) > 4, output
    assert re.search(r"stalled: has waited \d+ s in allreduce", output), output


def test_a_cable_that_is_cut_for_ever(tmp_path):
    """The job ends, and the other host is named."""
    code, output, seconds = run(tmp_path, "forever", 10_000, JAXMPI_STALL_SECONDS="2", JAXMPI_STALL_END_SECONDS="8")
    assert code and seconds < 60, output
    assert re.search(r"missing: rank [23] \(pid \d+ on jaxmpi-b\)", output), output
    assert re.search(r"\[rank [01]/4 on jaxmpi-a\] stalled for \d+ s: .*on jaxmpi-b did not come\. The job ends\.", output), (
        output
    )
