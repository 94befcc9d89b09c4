"""Random programs with one rank that deviates: right numbers, or an error on all ranks.

A program is a list of calls: eager functions on trees, functions on objects, and steps of
`jaxmpi.jit` that are lists of operations in loops, branches and `vmap`. What it must give is found
by running all ranks' programs side by side in NumPy, with MPI's meaning: the first collective of
one rank goes with the first of each other rank. Where these are not the same, there must be an
error.

    jaxmpi run -n 2 tests/disagreements.py 0 300
"""

import collections
import sys
import time
import warnings
from copy import deepcopy

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jaxmpi
from jaxmpi import RankMismatchError

R = jaxmpi.AXIS
LIMIT_SECONDS = 30.0
BOUND = 16  # all numbers stay below it, so that they are exact in any order
REDUCE = {"sum": np.sum, "max": np.max, "min": np.min, "prod": np.prod}


# programs


def make(seed, size):
    """Make each rank's program from the seed, with a deviation on one of them."""
    rng = np.random.default_rng(seed)
    program = [a_call(rng, size, i) for i in range(rng.integers(2, 5))]
    programs = [deepcopy(program) for _ in range(size)]
    rank = rng.integers(size)
    while True:
        what, deviate = list(DEVIATIONS.items())[rng.integers(len(DEVIATIONS))]
        deviate(rng, programs[rank], size)
        if what == "none" or programs[rank] != program:
            return what, programs


def a_call(rng, size, number):
    name = str(rng.choice([*EAGER, *OBJECTS, *["step"] * 7]))
    call = {
        "name": name,
        "number": number,
        "root": int(rng.integers(size)),
        "op": str(rng.choice(list(REDUCE))),
    }
    call |= {
        "shape": (int(rng.integers(1, 4)),),
        "dtype": str(rng.choice(["float32", "int32"])),
        "leaves": int(rng.integers(1, 4)),
    }
    if name == "step":
        call |= {"ops": some_ops(rng, size, 2), "times": int(rng.integers(1, 3))}
    return call


def some_ops(rng, size, depth):
    return [an_op(rng, size, depth) for _ in range(rng.integers(1, 4))]


def an_op(rng, size, depth):
    kinds = [
        "add",
        "mul",
        "flip",
        *["psum"] * 3,
        "pmax",
        "pmin",
        "gather",
        "permute",
        "bcast",
        "reduce",
        "scatter",
        "alltoall",
        "dead",
    ]
    kind = str(
        rng.choice([*kinds, *(["both", "both", "scan", "cond", "vmap", "remat"] if depth else [])])
    )
    match kind:
        case "add" | "mul":
            return [kind, int(rng.integers(1, 4))]
        case "permute":
            return [kind, some_pairs(rng, size)]
        case "bcast" | "reduce":
            return [kind, int(rng.integers(size))]
        case "both":  # two collectives; the second may depend on the first
            return [
                kind,
                bool(rng.integers(2)),
                *(str(rng.choice(["psum", "pmax", "gather"])) for _ in range(2)),
            ]
        case "scan":
            return [kind, int(rng.integers(1, 4)), some_ops(rng, size, depth - 1)]
        case "cond":
            return [kind, int(rng.integers(2)), some_ops(rng, size, depth - 1)]
        case "vmap" | "remat":
            return [kind, some_ops(rng, size, depth - 1)]
    return [kind]


def some_pairs(rng, size):
    """Make a part of a permutation."""
    return [(p, int(q)) for p, q in enumerate(rng.permutation(size)) if rng.integers(4)]


# deviations, each of one rank's program in place


def change(key, values):
    def deviate(rng, program, size):
        takes_it = PARAMETERS.get(key, [*EAGER, "step"])
        calls = [call for call in program if call["name"] in takes_it]
        if calls:
            calls[rng.integers(len(calls))][key] = values(rng, size)

    return deviate


def swap(rng, program, size):
    i = rng.integers(len(program) - 1)
    program[i : i + 2] = program[i + 1], program[i]


def one_more(rng, program, size):
    program.insert(rng.integers(len(program) + 1), a_call(rng, size, 9))


def one_fewer(rng, program, size):
    del program[rng.integers(len(program))]


def in_a_step(edit):
    """Make a deviation that edits the list of operations of a random step."""

    def deviate(rng, program, size):
        steps = [call for call in program if call["name"] == "step"]
        if not steps:
            return
        ops = steps[rng.integers(len(steps))]["ops"]
        while (
            inner := [op[-1] for op in ops if isinstance(op[-1], list) and op[0] != "permute"]
        ) and rng.integers(2):
            ops = inner[rng.integers(len(inner))]
        edit(rng, ops, size)

    return deviate


def another_branch(rng, ops, size):
    ops[rng.integers(len(ops))] = an_op(rng, size, 1)


def another_constant(rng, ops, size):
    ops.insert(rng.integers(len(ops) + 1), ["add", int(rng.integers(1, 4))])


def another_number(rng, ops, size):
    """Change the root, pairs, number of turns, predicate or dependence of an operation."""
    i = rng.integers(len(ops))
    for _ in range(20):
        if (new := an_op(rng, size, 1))[0] == ops[i][0] and len(new) > 1:
            if isinstance(ops[i][-1], list) and new[0] != "permute":
                new = [*new[:-1], ops[i][-1]]
            ops[i] = new


def unused_result(rng, ops, size):
    sums = [i for i, op in enumerate(ops) if op == ["psum"]]
    ops[sums[0] if sums else rng.integers(len(ops))] = ["dead"]


def one_op_more(rng, ops, size):
    ops.insert(rng.integers(len(ops) + 1), an_op(rng, size, 1))


def one_op_fewer(rng, ops, size):
    del ops[rng.integers(len(ops))]


def other_order(rng, ops, size):
    rng.shuffle(ops)


DEVIATIONS = {
    "none": lambda rng, program, size: None,
    "shape": change("shape", lambda rng, size: (int(rng.integers(1, 5)),)),
    "dtype": change("dtype", lambda rng, size: str(rng.choice(["float32", "int32", "float16"]))),
    "op": change("op", lambda rng, size: str(rng.choice(list(REDUCE)))),
    "root": change("root", lambda rng, size: int(rng.integers(size))),
    "leaves": change("leaves", lambda rng, size: int(rng.integers(1, 5))),
    "order of calls": swap,
    "one call more": one_more,
    "one call fewer": one_fewer,
    "another branch": in_a_step(another_branch),
    "another constant": in_a_step(another_constant),
    "another number": in_a_step(another_number),
    "an unused result": in_a_step(unused_result),
    "one operation more": in_a_step(one_op_more),
    "one operation fewer": in_a_step(one_op_fewer),
    "order of operations": in_a_step(other_order),
}


# in JAX


def given(call, rank):
    """Return the arguments of a call on a rank."""
    rng = np.random.default_rng([call["number"], rank])
    return [
        rng.integers(1, 5, (i + 1, *call["shape"])).astype(call["dtype"])
        for i in range(call["leaves"])
    ]


def rows(x, size):
    return [x * (q + 1) for q in range(size)]


def run(program):
    """Run the program on this rank; return its results."""
    outs = []
    for call in program:
        outs += CALLS[call["name"]](call, given(call, jaxmpi.rank()))
    jaxmpi.tree_allreduce(0)  # the end: no program has a call like it
    return outs


def step(call, leaves):
    size = jaxmpi.size()
    jitted = jaxmpi.jit(lambda x, k: traced(call["ops"], x, k, size), replicated_argnums=1)
    return [jitted(leaves[0] + i, np.int32(1)) for i in range(call["times"])]


def traced(ops, x, k, size):
    for op in ops:
        x = jnp.mod(one_traced(op, x, k, size), BOUND)
    return x


def one_traced(op, x, k, size):
    match op:
        case ["add", c]:
            return x + c
        case ["mul", c]:
            return x * c
        case ["flip"]:
            return x[..., ::-1]
        case ["psum" | "pmax" | "pmin" as name]:
            return getattr(lax, name)(x, R)
        case ["gather"]:
            return jnp.sum(lax.all_gather(x, R), axis=0, dtype=x.dtype)
        case ["permute", pairs]:
            return lax.ppermute(x, R, pairs)
        case ["bcast", root]:
            return jaxmpi.tree_bcast(x, root)
        case ["reduce", root]:
            return jaxmpi.tree_reduce(x, "sum", root)
        case ["scatter"]:
            # untiled, jax 0.10's vmap is wrong
            return lax.psum_scatter(jnp.concatenate(rows(x, size)), R, tiled=True)
        case ["alltoall"]:
            return jnp.sum(lax.all_to_all(jnp.stack(rows(x, size)), R, 0, 0), axis=0, dtype=x.dtype)
        case ["dead"]:
            lax.psum(x, R)
            return x
        case ["both", depends, first, second]:
            a = one_traced([first], x, k, size)
            return a + one_traced([second], a if depends else x + 1, k, size)
        case ["scan", n, ops]:
            return lax.scan(lambda c, _: (traced(ops, c, k, size), None), x, None, length=n)[0]
        case ["cond", least, ops]:
            return lax.cond(k > least, lambda x: traced(ops, x, k, size), lambda x: x, x)
        case ["vmap", ops]:
            return jnp.sum(
                jax.vmap(lambda x: traced(ops, x, k, size))(jnp.stack([x, x + 1])),
                axis=0,
                dtype=x.dtype,
            )
        case ["remat", ops]:
            return jax.checkpoint(lambda x: traced(ops, x, k, size))(x)


EAGER = {
    "allreduce": lambda call, xs: jaxmpi.tree_allreduce(xs, call["op"]),
    "bcast": lambda call, xs: jaxmpi.tree_bcast(xs, call["root"]),
    "reduce": lambda call, xs: jaxmpi.tree_reduce(xs, call["op"], call["root"]),
    "allgather": lambda call, xs: jaxmpi.tree_allgather(xs),
    "reduce_scatter": lambda call, xs: jaxmpi.tree_reduce_scatter(
        [np.stack(rows(x, jaxmpi.size())) for x in xs], call["op"]
    ),
    "alltoall": lambda call, xs: jaxmpi.tree_alltoall(
        [np.stack(rows(x, jaxmpi.size())) for x in xs]
    ),
}
OBJECTS = {
    "allgather_object": lambda call, xs: jaxmpi.allgather_object(xs[0].sum()),
    "broadcast_object": lambda call, xs: [jaxmpi.broadcast_object(xs[0].sum(), call["root"])],
    "barrier": lambda call, xs: [jaxmpi.barrier()][1:],
    "latest": lambda call, xs: [jaxmpi.latest("no such folder")][1:],
    "synchronize": lambda call, xs: jaxmpi.synchronize(xs, call["root"]),
    "average_metrics": lambda call, xs: [jaxmpi.average_metrics(x) for x in xs[:1]],
}
CALLS = {**EAGER, **OBJECTS, "step": step}
PARAMETERS = {
    "op": ("allreduce", "reduce", "reduce_scatter"),
    "root": ("bcast", "reduce", "synchronize", "broadcast_object"),
    "leaves": (*EAGER, "synchronize"),
}


# In NumPy: generators of one rank's collectives. Each yields (description, array), and receives the
# result.


def expected(programs):
    """Return all ranks' results; None where their collectives differ."""
    size = len(programs)
    ranks = [simulated(program, rank, size) for rank, program in enumerate(programs)]
    answers, outs = [None] * size, [None] * size
    while True:
        asked = []
        for rank, generator in enumerate(ranks):
            try:
                asked.append(generator.send(answers[rank]))
            except StopIteration as end:
                outs[rank] = end.value
        if not asked:
            return outs
        if (
            len(asked) < size
            or len({repr((what, [(x.shape, x.dtype) for x in xs])) for what, xs in asked}) > 1
        ):
            return None
        what = asked[0][0]
        # [ranks, ...] for each leaf
        together = [np.stack(xs) for xs in zip(*(xs for _, xs in asked), strict=True)]
        answers = [[collective(what, x, rank, size) for x in together] for rank in range(size)]


def collective(what, x, rank, size):
    match what[0].removeprefix("tree_"):
        case "allreduce":
            return REDUCE[what[1]](x, axis=0).astype(x.dtype)
        case "bcast" | "synchronize" | "broadcast_object":
            return x[what[1]]
        case "reduce":
            return REDUCE[what[1]](x, axis=0).astype(x.dtype) if rank == what[2] else x[rank]
        case "allgather" | "allgather_object":
            return x
        case "reduce_scatter":
            return REDUCE[what[1]](x, axis=0).astype(x.dtype)[rank]
        case "alltoall":
            return x[:, rank]
        case "permute":
            source = [p for p, q in what[1] if q == rank]
            return x[source[0]] if source else np.zeros_like(x[rank])
        case "average_metrics":
            return x.mean(0)
    return x[rank]


def simulated(program, rank, size):
    outs = []
    for call in program:
        xs, name = given(call, rank), call["name"]
        if name == "step":
            for i in range(call["times"]):
                outs.append((yield from simulated_ops(call["ops"], xs[0] + i, 1, size)))
            continue
        if name in ("reduce_scatter", "alltoall"):
            xs = [np.stack(rows(x, size)) for x in xs]
        if name in ("allgather_object", "broadcast_object"):
            xs = [np.asarray(xs[0].sum()).astype(float)]
        xs = {"barrier": [], "latest": [], "average_metrics": xs[:1]}.get(name, xs)
        parameters = [call[key] for key in ("op", "root") if name in PARAMETERS[key]]
        got = yield (f"tree_{name}" if name in EAGER else name, *parameters), xs
        outs += [*got[0]] if name == "allgather_object" else got
    yield ("end",), []
    return outs


def simulated_ops(ops, x, k, size):
    for op in ops:
        x = np.mod((yield from one_simulated(op, x, k, size)), np.asarray(BOUND, x.dtype))
    return x


def one_simulated(op, x, k, size):
    dtype = x.dtype
    match op:
        case ["add", c]:
            return x + np.asarray(c, dtype)
        case ["mul", c]:
            return x * np.asarray(c, dtype)
        case ["flip"]:
            return x[..., ::-1]
        case ["psum" | "pmax" | "pmin" as name]:
            return (yield ("allreduce", name[1:]), [x])[0]
        case ["gather"]:
            return (yield ("allgather",), [x])[0].sum(0).astype(dtype)
        case ["permute", pairs]:
            return (yield ("permute", pairs), [x])[0]
        case ["bcast", root]:
            return (yield ("tree_bcast", root), [x])[0]
        case ["reduce", root]:
            return (yield ("tree_reduce", "sum", root), [x])[0]
        case ["scatter"]:
            return (yield ("reduce_scatter", "sum"), [np.stack(rows(x, size)).astype(dtype)])[0]
        case ["alltoall"]:
            return (
                (yield ("alltoall",), [np.stack(rows(x, size)).astype(dtype)])[0]
                .sum(0)
                .astype(dtype)
            )
        case ["dead"]:
            yield ("allreduce", "sum"), [x]
            return x
        case ["both", depends, first, second]:
            a = yield from one_simulated([first], x, k, size)
            return a + (
                yield from one_simulated(
                    [second], a if depends else x + np.asarray(1, dtype), k, size
                )
            )
        case ["scan", n, ops]:
            for _ in range(n):
                x = yield from simulated_ops(ops, x, k, size)
            return x
        case ["cond", least, ops]:
            return (yield from simulated_ops(ops, x, k, size)) if k > least else x
        case ["vmap", ops]:
            both = yield from simulated_ops(ops, np.stack([x, x + np.asarray(1, dtype)]), k, size)
            return both.sum(0).astype(dtype)
        case ["remat", ops]:
            return (yield from simulated_ops(ops, x, k, size))


# both


def check(seeds):
    """Run the programs of the seeds on all ranks; count each (deviation, outcome)."""
    counts = collections.Counter()
    warnings.filterwarnings("ignore", "jaxmpi.jit: what is summed")
    for seed in seeds:
        what, programs = make(seed, jaxmpi.size())
        want = expected(programs)
        outcome = check_one(seed, what, programs[jaxmpi.rank()], want and want[jaxmpi.rank()])
        everyone = jaxmpi.allgather_object(outcome)
        assert len(set(everyone)) == 1, f"seed {seed}, {what}: {everyone}"
        assert outcome == "refused" or want is not None, (
            f"seed {seed}, {what}: the ranks differ, and none was refused"
        )
        assert outcome == "right" or what != "none", (
            f"seed {seed}: refused, though all ranks do the same"
        )
        counts[what, outcome] += 1
        if seed % 50 == 49:
            jax.clear_caches()
    return counts


def check_one(seed, what, program, want):
    start = time.monotonic()
    try:
        got = run(program)
    except (RankMismatchError, jax.errors.JaxRuntimeError) as error:
        assert "RankMismatchError" in f"{type(error).__name__}: {error}", (
            f"seed {seed}, {what}: {error}"
        )
        return "refused"
    finally:
        assert time.monotonic() - start < LIMIT_SECONDS, f"seed {seed}, {what}: it took too long"
    if want is not None:
        for i, (x, y) in enumerate(zip(got, want, strict=True)):
            np.testing.assert_allclose(
                np.asarray(jaxmpi.local(x)),
                y,
                rtol=1e-6,
                err_msg=f"seed {seed}, {what}, result {i}",
            )
    return "right"


if __name__ == "__main__":
    jaxmpi.init()
    found = check(range(*map(int, sys.argv[1:])))
    if jaxmpi.rank() == 0:
        print(dict(sorted(found.items())), flush=True)
