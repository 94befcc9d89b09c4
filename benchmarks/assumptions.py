"""Cost of comparing the start of a training, and its numbers while it runs, each by itself.

    jaxmpi run -n 2 benchmarks/assumptions.py

The step has 400 arrays of state, of 100 KB each, and 10 more that are one number.

  first call   checksums of all state, and the message that compares them
  analysis     finding the state and the numbers in the traced program, once for a program
  step         the numbers that a program returns, and what happens with them after a call

Exits with 1 when a bound is missed.
"""

import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from common import Report, parser

import jaxmpi
from jaxmpi._analysis.carried import carried_state
from jaxmpi._backends.interface import Ranks
from jaxmpi._consistency.compare import compare_values_again
from jaxmpi._jit import analyze, first_call
from jaxmpi._jit.numbers import NumberWatch
from jaxmpi._world import session

ARRAYS, BYTES, NUMBERS = 400, 100_000, 10
FIRST_CALL_MS = 20.0
STEP_US = 5.0
CALLS = 2000  # of a step, in a round

report = Report("assumptions", parser(__doc__).parse_args())
if report.world.size < 2:
    sys.exit("assumptions.py: one rank compares nothing. Start it with `jaxmpi run -n 2`.")
backend: Ranks = session.current("benchmark")
rounds = 2 if report.args.quick else report.args.rounds
calls = 50 if report.args.quick else CALLS


def seconds(call):
    """Return the median seconds of a call over the rounds, of the slowest rank."""
    took = []
    for _ in range(rounds + 1):
        jaxmpi.barrier()
        start = time.perf_counter()
        call()
        took.append(max(jaxmpi.allgather_object(time.perf_counter() - start)))
    return float(np.median(took[1:]))


def bounded(name, value, unit, limit):
    """Show a figure with its bound, and note whether it holds."""
    holds = value <= limit
    report.ratios.append({"case": name, "ratio": unit, "value": value, "holds": holds})
    verdict = "holds" if holds else "MISSED"
    report.show(f"{name:12} {value:8.2f} {unit}, at most {limit:g}: {verdict}")


state = {
    "arrays": [jnp.full(BYTES // 4, i, jnp.float32) for i in range(ARRAYS)],
    "numbers": [jnp.float32(0.1) for _ in range(NUMBERS)],
}


def train(state, x):
    mean = jax.lax.pmean(x, jaxmpi.AXIS).sum()  # an array, because gradients are arrays, too
    rate = sum(state["numbers"])
    return {
        "arrays": [p - rate * mean for p in state["arrays"]],
        "numbers": state["numbers"],
    }


step = jaxmpi.jit(train)
x = jnp.ones(8) * report.world.rank
analyses = []


def timed(*args, **kwargs):
    start = time.perf_counter()
    found = carried_state(*args, **kwargs)
    analyses.append(time.perf_counter() - start)
    return found


analyze.carried_state = timed
program = step.program(state, x)
leaves = jax.tree.leaves((state, x))
state_of_call = program.compared_state
assert state_of_call is not None and len(state_of_call.state) == ARRAYS + NUMBERS
assert program.numbers is not None and len(program.numbers.indices) == NUMBERS
step(state, x)

# first call


def compare():
    compare_values_again(backend)
    first_call.compare_arguments(backend, program, leaves)


bounded("first call", 1e3 * seconds(compare), "ms", FIRST_CALL_MS)
report.show(f"{'analysis':12} {1e3 * analyses[0]:8.2f} ms, once for a program, no bound")

# step: the program with and without its numbers, and the note of a call

numbers = leaves[ARRAYS : ARRAYS + NUMBERS]
indices = tuple(range(NUMBERS))
pack = program.numbers._replace(indices=indices).pack
# Both compute a sum and return an `end`: a real step does so with and without numbers.
packs = jax.jit(lambda leaves: (sum(leaves), pack(leaves)))
nothing = jax.jit(lambda leaves: (sum(leaves), jnp.zeros((), jnp.bool_)))
exchange = session.neighbors()
assert exchange is not None
watch = NumberWatch(backend, "benchmark", exchange)
_, end = jax.block_until_ready(packs(numbers))


def repeated(call):
    def run():
        for _ in range(calls):
            call()

    return seconds(run) / calls


returned = repeated(lambda: jax.block_until_ready(packs(numbers)))
empty = repeated(lambda: jax.block_until_ready(nothing(numbers)))
noted = repeated(lambda: watch.note(end))
idle = repeated(lambda: None)
report.show(
    f"{'':12} in the program {1e6 * (returned - empty):.2f} µs, "
    f"after the call {1e6 * (noted - idle):.2f} µs"
)
bounded("step", 1e6 * (returned - empty + noted - idle), "µs", STEP_US)
missed = [row for row in report.ratios if not row["holds"]]
jaxmpi.barrier()
sys.exit(int(bool(missed) and not report.args.quick))
