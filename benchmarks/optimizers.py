"""Time of a step of the 10M MLP with Adam, and its state's bytes, for each way to communicate.

The ways are distributed, sharded, accumulated, and distributed with each codec.

    jaxmpi run -n 2 benchmarks/optimizers.py

Exits with 1 where the sharded step takes over 1.15 times as long as the distributed one, or its
state is more than 1/ranks.
"""

import jax
import jax.numpy as jnp
import optax
from common import Report, parser
from step_models import MODELS

import jaxmpi
from jaxmpi import codecs

TIME_LIMIT = 1.15  # sharded / distributed
PADDING_BYTES = 4096

ALWAYS = ("local", "distributed", "sharded")

options = parser(__doc__)
options.add_argument(
    "--transforms", nargs="*", metavar="NAME", help=f"beside {', '.join(ALWAYS)}; default: all"
)
args = options.parse_args()
report = Report("optimizers", args)
inner = optax.adam(1e-3)
TRANSFORMS = {
    "local": inner,
    "distributed": jaxmpi.distributed(inner),
    "sharded": jaxmpi.sharded(inner),
    "skip_nonfinite": jaxmpi.skip_nonfinite(jaxmpi.distributed(inner)),
    "accumulate, every 4": jaxmpi.accumulate(jaxmpi.distributed(inner), 4),
    "local_sgd, every 50": jaxmpi.local_sgd(inner, 50),
    "micro_batches=4": jaxmpi.distributed(inner, micro_batches=4),
    "adasum": jaxmpi.distributed(inner, op="adasum"),
    "codec bf16": jaxmpi.distributed(inner, codec=codecs.bf16()),
    "codec int8": jaxmpi.distributed(inner, codec=codecs.int8()),
    "codec powersgd(4)": jaxmpi.distributed(inner, codec=codecs.powersgd(4)),
    "codec topk(0.01)": jaxmpi.distributed(inner, codec=codecs.topk(0.01)),
}
if args.transforms is not None:
    if unknown := {*args.transforms} - {*TRANSFORMS}:
        options.error(
            f"--transforms: there is no {', '.join(unknown)}. There are {', '.join(TRANSFORMS)}."
        )
    for name in {*TRANSFORMS} - {*ALWAYS, *args.transforms}:
        del TRANSFORMS[name]
loss_of, params, batch = MODELS["MLP 10M"]()


class Trained:
    """Calls of a step, each on the state that the last one left."""

    def __init__(self, tx, gradient):
        def step(params, state, batch):
            updates, state = tx.update(gradient(params, batch), state, params)
            return optax.apply_updates(params, updates), state

        self.params = jax.tree.map(jnp.array, params)
        self.state = tx.init(self.params)
        self.bytes = sum(x.nbytes for x in jax.tree.leaves(self.state))
        self.step = jaxmpi.jit(step, donate_argnums=(0, 1))

    def __call__(self):
        self.params, self.state = self.step(self.params, self.state, batch)
        return self.params


gradient = jax.grad(loss_of)
micro = jaxmpi.micro_batch_grads(gradient, 4)
steps = {}
for name, tx in TRANSFORMS.items():
    steps[name] = Trained(tx, micro if name.startswith("micro") else gradient)
times = report.measure("MLP 10M", steps, seconds=6.0)
for name, step in steps.items():
    report.show(f"{name:22} state of a rank {step.bytes / 1e6:8.2f} MB")
report.ratio(
    "MLP 10M", "sharded / distributed", times["sharded"], times["distributed"], at_most=TIME_LIMIT
)
for name in steps:
    report.ratio("MLP 10M", f"{name} / local", times[name], times["local"])
share = steps["distributed"].bytes / report.world.size + PADDING_BYTES
if steps["sharded"].bytes > share:
    report.ratios.append(
        {
            "case": "MLP 10M",
            "ratio": "state",
            "value": steps["sharded"].bytes,
            "bound": share,
            "holds": False,
        }
    )
report.finish()
