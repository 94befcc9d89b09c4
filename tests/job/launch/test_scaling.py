"""`jaxmpi run --scaling`: efficiency follows from the throughput of each number of ranks."""

import pytest
from test_launch import end, start

from jaxmpi._job.launch import scaling
from jaxmpi._job.launch.mpiexec import LaunchError
from jaxmpi._job.launch.options import parse
from jaxmpi._job.launch.scaling import Point

SCRIPT = """
import sys, time
import jaxmpi
world = jaxmpi.init()
for seconds in (1.0, 0.1, 0.1, 0.1):
    meter = jaxmpi.Throughput()
    meter.add(10)
    time.sleep(seconds)
    if "silent" not in sys.argv:
        meter.read()
"""


def test_efficiency_is_the_rate_of_a_rank_against_the_smallest_number():
    points = [Point(2, (1.0, 100.0, 110.0, 120.0), False), Point(4, (5.0, 176.0), True)]
    assert scaling.efficiencies(points) == pytest.approx([1, 0.8])
    head, two, four = scaling.table(points).splitlines()
    assert head.split() == ["ranks", "samples/s", "spread", "speedup", "efficiency"]
    assert two.split() == ["2", "110", "100", "to", "120", "1.00", "100%"]
    assert four.endswith("80%  more ranks than cores")


@pytest.mark.parametrize("options", [["-n", "2", "--scaling", "1,2"], []])
def test_either_a_number_or_numbers(options):
    with pytest.raises(LaunchError, match="give either -n"):
        parse([*options, "-m", "train"])


@pytest.mark.parametrize("numbers", ["0,1", "", "1,x", "-1"])
def test_numbers_that_are_none(numbers):
    with pytest.raises(LaunchError, match="--scaling"):
        parse([f"--scaling={numbers}", "-m", "train"])


@pytest.mark.exhaustive
def test_a_program_on_one_and_two_ranks(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").write_text(SCRIPT)
    code, output, _ = end(start("--scaling", "2,1", "script.py"), timeout=120)
    rows = [line.split() for line in output.splitlines()]
    assert code == 0 and [row[0] for row in rows[:3]] == ["ranks", "1", "2"], output
    assert (
        40 < float(rows[1][1]) <= 100 and rows[1][-1] == "100%" and "%" in output.splitlines()[2]
    ), output
    assert (tmp_path / "scaling.svg").read_text().count("<svg") == 1
    code, _, last = end(start("--scaling", "1", "script.py", "silent"), timeout=120)
    assert code == 1 and "has noted no throughput" in last
