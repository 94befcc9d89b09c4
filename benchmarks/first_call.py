"""Seconds before the first step: to trace, lower and compile it, and to call it, beside plain JAX.

    python benchmarks/first_call.py
    python benchmarks/first_call.py --simulate 2
    python benchmarks/first_call.py --transforms
    jaxmpi run -n 2 benchmarks/first_call.py
    JAXMPI_BACKEND=xla jaxmpi run -n 2 benchmarks/first_call.py

Plain JAX is `jax.jit` of the same step with plain optax, on each rank for itself; for simulated
ranks it is `jax.vmap` with a mean. --transforms compiles every optimizer transform for 100, 200 and
400 arrays, beside the chain of optax that is nearest. Exits with 1 where a bound is missed.
"""

import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from common import Report, parser
from jax import lax
from traced_models import MODELS, small_arrays

import jaxmpi

LOWER_LIMIT = {1: 1.15, 2: 1.5}  # lower() of GPT 24, jaxmpi / plain, on 1 rank and on more
LAYERS_LIMIT = 2.3  # GPT 24 / GPT 12
LEAVES_LIMIT = 2.4  # compile time, twice as many leaves
COMPILE_LIMIT = 1.3  # of a transform / the nearest chain of optax, at the most leaves
LEAVES = (100, 200, 400)
STAGES = ("trace", "lower", "compile", "first call")

options = parser(__doc__)
options.add_argument(
    "--simulate", type=int, metavar="N", help="simulated ranks, in place of real ones"
)
options.add_argument(
    "--transforms", action="store_true", help="optimizer transforms, in place of models"
)
options.add_argument("--stages", nargs="*", choices=STAGES, default=STAGES, help="what to time")
options.add_argument("--cases", nargs="*", default=(), help="these models or transforms only")
options.set_defaults(rounds=5)
args = options.parse_args()


def mean_over_ranks():
    """Average gradients as one would write it for `jax.vmap`."""
    return optax.stateless(lambda updates, params: lax.pmean(updates, jaxmpi.AXIS))


def make_step(loss_of, tx):
    def step(params, state, batch):
        loss, gradients = jax.value_and_grad(loss_of)(params, batch)
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    return step


def ours(step):
    return jaxmpi.jit(step, replicated_argnums=(0, 1), replicated_outnums=(0, 1))


def simulated(step):
    return jax.jit(jax.vmap(step, in_axes=(None, None, 0), axis_name=jaxmpi.AXIS))


def seconds_of(jit, loss_of, tx, arguments, stage):
    """Return the seconds of one stage for a function that JAX has not seen before."""
    jitted = jit(make_step(loss_of, tx))
    traced = jitted.trace(*arguments) if stage == "compile" else None
    prepared = traced.lower() if traced else None
    jaxmpi.barrier()
    start = time.perf_counter()
    if stage == "trace":
        jitted.trace(*arguments)
    elif stage == "lower":
        jitted.lower(*arguments)
    elif stage == "compile":
        prepared.compile()
    else:
        jax.block_until_ready(jitted(*arguments))
    return time.perf_counter() - start


def compare(report, case, stage, contenders):
    """Measure the contenders in turns; return {name: µs [rounds, ranks]}."""
    rounds = (
        2 if args.quick else args.rounds if stage in ("trace", "lower") else min(args.rounds, 3)
    )
    for contender in contenders.values():
        if stage in ("trace", "lower"):
            seconds_of(*contender, stage)  # what JAX and Flax keep from the first time
    names = list(contenders)
    found = {name: [] for name in names}
    for k in range(rounds):
        for name in names[:: -1 if k % 2 else 1]:
            found[name].append(1e6 * seconds_of(*contenders[name], stage))
    everyone = jaxmpi.allgather_object(found)
    times = {name: np.array([one[name] for one in everyone]).T for name in names}
    for name, values in times.items():
        low, median, high = np.percentile(values, [25, 50, 75])
        row = {
            "case": f"{case}: {stage}",
            "contender": name,
            "median_us": median,
            "low_us": low,
            "high_us": high,
        }
        report.rows.append(row)
        report.show(
            f"{row['case']:36} {name:10} median {median / 1e6:7.3f} s, "
            f"quartiles {low / 1e6:7.3f} to {high / 1e6:7.3f}"
        )
    return times


def models(report):
    limit = LOWER_LIMIT[1 if report.world.size == 1 else 2]
    lowered = {}
    for case in report.progress([case for case in MODELS if not args.cases or case in args.cases]):
        loss_of, params, batch = MODELS[case]()
        tx = optax.adam(1e-3)
        plain_tx, batches, given = tx, batch, batch
        if args.simulate:
            plain_tx = optax.chain(mean_over_ranks(), tx)
            batches = jax.tree.map(lambda x: np.stack([x] * args.simulate), batch)
            given = jax.tree.map(lambda x: jaxmpi.PerRank(jnp.asarray(x)), batches)
        distributed = jaxmpi.distributed(tx)
        contenders = {
            "plain": (
                simulated if args.simulate else jax.jit,
                loss_of,
                plain_tx,
                (params, plain_tx.init(params), batches),
            ),
            "jaxmpi": (ours, loss_of, distributed, (params, distributed.init(params), given)),
        }
        for stage in args.stages:
            times = compare(report, case, stage, contenders)
            bounded = stage == "lower" and case == "GPT 24"
            report.ratio(
                case,
                f"{stage}, jaxmpi / plain",
                times["jaxmpi"],
                times["plain"],
                at_most=limit if bounded else None,
            )
            if stage == "lower":
                lowered[case] = times["jaxmpi"]
    if {"GPT 12", "GPT 24"} <= set(lowered):
        report.ratio(
            "GPT 24 / GPT 12", "lower", lowered["GPT 24"], lowered["GPT 12"], at_most=LAYERS_LIMIT
        )


def transforms():
    """Pair each transform with the nearest chain of optax for one rank."""
    adam, mean, codecs = optax.adam(1e-3), jaxmpi.distributed, jaxmpi.codecs
    if_finite, every_four = (
        optax.apply_if_finite(adam, 10**6),
        optax.MultiSteps(adam, 4).gradient_transformation(),
    )
    clipped = optax.chain(optax.clip_by_global_norm(1.0), adam)
    ours_clipped = optax.chain(jaxmpi.clip_by_global_norm(1.0), adam)
    found = {
        "distributed": (mean(adam), adam),
        "sharded": (jaxmpi.sharded(adam), adam),
        "accumulate": (jaxmpi.accumulate(mean(adam), 4), every_four),
        "local_sgd": (jaxmpi.local_sgd(adam, 4), every_four),
        "diloco": (
            jaxmpi.local_sgd(adam, 4, optax.sgd(0.7, momentum=0.9, nesterov=True)),
            every_four,
        ),
        "skip_nonfinite": (jaxmpi.skip_nonfinite(mean(adam)), if_finite),
        "dynamic_loss_scale": (jaxmpi.dynamic_loss_scale(mean(adam)), if_finite),
        "clip_by_global_norm": (mean(ours_clipped), clipped),
        "clip on shards": (jaxmpi.sharded(ours_clipped), clipped),
        "measure_noise_scale": (
            optax.chain(jaxmpi.measure_noise_scale(), jaxmpi.average_gradients(), adam),
            clipped,
        ),
        "watch_replicas": (jaxmpi.watch_replicas(mean(adam), 4), adam),
    }
    for name, codec in {
        "int8": codecs.int8(),
        "topk": codecs.topk(0.1),
        "powersgd": codecs.powersgd(2),
    }.items():
        found[name] = (mean(adam, codec=codec), adam)
    return found


def compile_times(report):
    counts = LEAVES[:2] if args.quick else LEAVES
    for case, (tx, nearest) in report.progress(transforms().items()):
        if args.cases and case not in args.cases:
            continue
        found = []
        for count in counts:
            loss_of, params, batch = small_arrays(count)
            contenders = {
                "jaxmpi": (ours, loss_of, tx, (params, tx.init(params), batch)),
                "optax": (jax.jit, loss_of, nearest, (params, nearest.init(params), batch)),
            }
            found.append(compare(report, f"{case}, {count} arrays", "compile", contenders))
        for fewer, more, count in zip(found, found[1:], counts[1:], strict=False):
            name = f"compile, {count} arrays / {count // 2}"
            report.ratio(case, name, more["jaxmpi"], fewer["jaxmpi"], at_most=LEAVES_LIMIT)
        report.ratio(
            case,
            f"compile, jaxmpi / optax, {counts[-1]} arrays",
            found[-1]["jaxmpi"],
            found[-1]["optax"],
            at_most=COMPILE_LIMIT,
        )


def slopes(axes, rows):
    """Plot the seconds to compile against the number of arrays."""
    for case in dict.fromkeys(row["case"].partition(", ")[0] for row in rows):
        mine = []
        for row in rows:
            if row["case"].startswith(f"{case}, ") and row["contender"] == "jaxmpi":
                mine.append(row)
        axes.plot(
            [int(row["case"].split()[-3]) for row in mine],
            [row["median_us"] / 1e6 for row in mine],
            "o-",
            label=case,
        )
    axes.set(xscale="log", yscale="log", xlabel="arrays", ylabel="s to compile")


def stacked(axes, rows):
    """Plot the seconds of each stage of each model, beside plain JAX."""
    cases = list(dict.fromkeys(row["case"] for row in rows))
    for i, name in enumerate(("plain", "jaxmpi")):
        mine = {row["case"]: row["median_us"] / 1e6 for row in rows if row["contender"] == name}
        axes.barh(
            [k + 0.4 * i for k in range(len(cases))],
            [mine[case] for case in cases],
            0.4,
            label=name,
        )
    axes.set(
        xscale="log", xlabel="s", yticks=[k + 0.2 for k in range(len(cases))], yticklabels=cases
    )


report = Report("first_call", args)
ranks = (
    f"simulated-{args.simulate}" if args.simulate else f"{report.world.backend}-{report.world.size}"
)
report.name = f"first_call-{'transforms' if args.transforms else ranks}"
if args.transforms:
    compile_times(report)
    report.finish(slopes)
if args.simulate:
    with jaxmpi.simulate(args.simulate) as report.world:
        models(report)
else:
    models(report)
report.finish(stacked)
