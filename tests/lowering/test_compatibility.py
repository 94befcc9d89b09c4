"""The table of docs/tables/compatibility.md holds on every backend, and refusals are refused.

`pytest --tables` with this file writes the page anew.
"""

import re
import warnings
from contextlib import nullcontext
from functools import cache
from pathlib import Path

import jax
import numpy as np
import pytest
import tables
from lax_cases import GROUPS, ROWS, R, cases_here
from other_transport import mpi4jax_pool

import jaxmpi
from jaxmpi._job.launch.pool import Task, pool
from jaxmpi.testing import IDLE_RANKS_SECONDS

PAGE = Path(__file__).parents[2] / "docs" / "tables" / "compatibility.md"
START, END = "<!-- made by tests/lowering/test_compatibility.py -->\n", "<!-- end -->\n"


QUICKLY = {"xla_backend_optimization_level": 0}  # is what these programs are to be compiled
RANKS = [("single", 1), ("simulate", 3), ("native", 3), ("mpi4jax", 2), ("xla", 2), ("xla", 3)]


# what the table says


def check_group(name, row, wanted):
    """Run a group: its working cases in one program, and each refused case by itself.

    They run on the ranks that this process is one of.
    """
    n, rank = jaxmpi.size(), jaxmpi.rank()
    pick = (
        (lambda tree: tree)
        if row == "simulate"
        else (lambda tree: jax.tree.map(lambda x: x[rank], tree))
    )
    mine = (lambda args: tuple(map(jaxmpi.PerRank, args))) if row == "simulate" else pick
    held = []
    for case, want in zip(cases_here(name), wanted, strict=True):
        if row not in case.rows:
            held.append((case, want))
    with jax.enable_x64(True), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"\S+: the value summed or averaged")
        program = lambda argss: [
            case.fun(*args) for (case, _), args in zip(held, argss, strict=True)
        ]
        got = jaxmpi.jit(program, compiler_options=QUICKLY)(
            [mine(case.args(n)) for case, _ in held]
        )
        for (case, want), y in zip(held, got, strict=True):
            compare(case.title, stacked(y, n) if row == "simulate" else y, pick(want))
        for case in cases_here(name):
            if row in case.rows:
                kind, text = case.error
                with pytest.raises(kind, match=text):
                    jaxmpi.jit(case.fun)(*mine(case.args(n)))


@cache
def reference(name, n):
    """Return the stacked results of all ranks, computed here, for each case that works anywhere."""
    with jax.enable_x64(True):
        held = [(case, case.args(n)) for case in cases_here(name) if set(case.rows) != set(ROWS)]
        by_vmap = [(case, args) for case, args in held if case.want is None]
        program = lambda argss: [
            jax.vmap(case.fun, axis_name=R)(*args)
            for (case, _), args in zip(by_vmap, argss, strict=True)
        ]
        made = jax.device_get(
            jax.jit(program, compiler_options=QUICKLY)([args for _, args in by_vmap])
        )
        by_title = {case.title: want for (case, _), want in zip(by_vmap, made, strict=True)}
        for case, args in held:
            if case.want is not None:
                by_title[case.title] = jax.device_get(case.want(n, *args))
    return [by_title.get(case.title) for case in GROUPS[name]]


def stacked(got, n):
    leaves, treedef = jax.tree.flatten(got, is_leaf=lambda x: isinstance(x, jaxmpi.PerRank))
    stacks = []
    for x in leaves:
        equal = not isinstance(x, jaxmpi.PerRank)
        stacks.append(np.stack([np.asarray(x)] * n) if equal else x.stack)
    return treedef.unflatten(stacks)


def compare(title, got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want), title
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        x, y = np.asarray(x), np.asarray(y)
        assert (x.dtype, x.shape) == (y.dtype, y.shape), title
        if x.dtype.kind == "V":  # a float or an integer of few bits, which is exact here
            x, y = x.astype(np.float32), y.astype(np.float32)
        np.testing.assert_allclose(
            x, y, 1e-5 if x.dtype == np.float32 else 1e-11, 1e-11, err_msg=title
        )


@pytest.fixture(scope="module")
def mpi4jax_ranks():
    """Ranks of the other transport."""
    ranks = mpi4jax_pool(dict(RANKS)["mpi4jax"])
    yield ranks
    ranks.end()


@pytest.mark.slow
@pytest.mark.parametrize("name", GROUPS)
@pytest.mark.parametrize(("row", "n"), RANKS)
def test_what_the_table_says(name, row, n, request):
    jaxmpi.init()
    wanted = reference(name, n)
    if row in ("single", "simulate"):
        with jaxmpi.simulate(n) if row == "simulate" else nullcontext():
            check_group(name, row, wanted)
        return
    ranks = (
        request.getfixturevalue("mpi4jax_ranks")
        if row == "mpi4jax"
        else pool(n, "xla" if row == "xla" else "auto", IDLE_RANKS_SECONDS)
    )
    ranks.run(Task(__file__, "check_group", {"name": name, "row": row, "wanted": wanted}, 120.0))


# the table


def table():
    lines = []
    for name, cases in GROUPS.items():
        lines += [
            f"\n### {name}\n",
            f"| case | {' | '.join(COLUMNS)} | JAX's tests |",
            "|---|" + ":-:|" * len(ROWS) + "---|",
        ]
        for case in cases:
            marks = ["refused" if row in case.rows else "yes" for row in ROWS]
            lines.append(f"| {cell(case.title)} | {' | '.join(marks)} | {subjects(case.tests)} |")
    lines += [
        "\n## What is refused, and what to do\n",
        "| | case | error | what to do |",
        "|---|---|---|---|",
    ]
    for name, cases in GROUPS.items():
        for case in cases:
            if case.rows:
                lines.append(f"| {name} | {cell(case.title)} | {error(case)} | {case.instead} |")
    return "\n".join(lines) + "\n"


COLUMNS = ("one rank", "simulated", "mpi, native", "mpi, mpi4jax", "xla")


def cell(title):
    return title.replace("|", "\\|")


def subjects(names):
    return ", ".join(f"`{name}`" for name in names.split(", ") if name)


def error(case):
    where = "" if set(case.rows) >= set(ROWS[1:]) else f" on {', '.join(case.rows)}"
    return f"{case.error[0].__name__}{where}"


def counts():
    cases = [case for group in GROUPS.values() for case in group]
    of_jax = {name for case in cases for name in case.tests.split(", ") if name}
    held = sum(not case.rows for case in cases)
    return (
        f"{len(cases)} cases, which share their subjects with {len(of_jax)} tests of JAX: "
        f"{held} hold on every way to run, and {len(cases) - held} are refused on some or all.\n"
    )


def written():
    page = PAGE.read_text()
    return page[: page.index(START) + len(START)] + counts() + table() + page[page.index(END) :]


def test_the_page_is_that_of_these_cases():
    if tables.wanted():
        PAGE.write_text(written())
    else:
        assert PAGE.read_text() == written(), f"{PAGE.name} is not up to date: test with --tables"


def test_there_are_cases_of_every_kind():
    cases = [case for group in GROUPS.values() for case in group]
    assert len(cases) >= 80
    for group in GROUPS.values():
        assert len({case.title for case in group}) == len(group)
    for name in re.findall(r"\S+", " ".join(case.tests.replace(",", " ") for case in cases)):
        assert re.fullmatch(r"(pmap|batching|shard_map)\.test\w+", name), name
    assert all(case.instead for case in cases if case.rows)
