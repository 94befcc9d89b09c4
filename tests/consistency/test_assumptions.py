"""Random training programs in which one rank breaks an assumption: it is named, and no other is.

See assumptions.py.
"""

import re

import pytest
from programs import on_ranks, run

SOME, ALL, AT_ONCE = 25, 300, 50
LEAST = 0.95  # of the broken programs that must be named
LINE = re.compile(r"(program_\d+) \| (.*) \| ([\w,]*) \| (\w.*)")
WARNING = re.compile(r'(program_\d+): .*allow="(\w+)" turns this check off')


def outcomes(ranks, way, which, seeds):
    """Run programs in a job; return what is expected and what was found, by program."""
    backend, transport = ("xla", "auto") if way == "xla" else ("mpi", way)
    command = on_ranks(ranks, "tests/assumptions.py", which, str(seeds.start), str(seeds.stop))
    output = run(command, seconds=900, JAXMPI_TRANSPORT=transport, JAXMPI_BACKEND=backend)
    found = {}
    for title, what, expected, name in LINE.findall(output):
        raised = name.split()[0]
        names = set() if raised == "nothing" else {raised}
        found[title] = (f"{title}: {what}: {name}", set(filter(None, expected.split(","))), names)
    for title, name in WARNING.findall(output):
        found[title][2].add(name)
    assert len(found) == len(seeds), output
    return found.values()


def check_broken(ranks, way, programs):
    """Check that nearly all are named, each by its own name."""
    missed = []
    for seeds in jobs_of(programs):
        for line, expected, names in outcomes(ranks, way, "broken", seeds):
            if not names & expected:
                missed.append(f"{line}, expected {expected}, found {names}")
    print(*missed, sep="\n")
    assert len(missed) <= (1 - LEAST) * programs, "\n".join(missed)


def check_right(ranks, way, programs):
    """Check that no program gets a report."""
    for seeds in jobs_of(programs):
        reported = [line for line, _, names in outcomes(ranks, way, "right", seeds) if names]
        assert not reported, "\n".join(reported)


def jobs_of(programs):
    """Return the seeds of the programs of each job."""
    for first in range(0, programs, AT_ONCE):
        yield range(first, min(first + AT_ONCE, programs))


@pytest.mark.slow
@pytest.mark.parametrize("check", [check_broken, check_right])
def test_some_programs(check):
    check(2, "native", SOME)


@pytest.mark.disagreements
@pytest.mark.parametrize("check", [check_broken, check_right])
@pytest.mark.parametrize("way", ["native", "mpi4jax", "xla"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_all_programs(check, ranks, way):
    check(ranks, way, ALL)
