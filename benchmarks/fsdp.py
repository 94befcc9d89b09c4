"""Memory, bytes sent and time of a step with replicated parameters, ZeRO-1 and FSDP.

The model is a GPT of 24 layers in a scan, trained with Adam.

    jaxmpi run -n 2 benchmarks/fsdp.py

Each layer is computed again in the backward pass. "memory" is the peak of the compiled step, by
XLA. Exits with 1 where FSDP's is over 1.1 times (parameters + gradients + Adam's state) / ranks + 2
layers + activations, where it sends more than three times the parameters, or where its step takes
over 1.3 times as long as that of ZeRO-1.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
from common import Report, parser
from step_models import stacked_gpt

import jaxmpi

TIME_LIMIT = 1.3  # FSDP / ZeRO-1
MEMORY_LIMIT = 1.1
BYTES_LIMIT = 1.01  # the padding

options = parser(__doc__)
options.add_argument("--layers", type=int, default=24)
options.add_argument("--width", type=int, default=256)
options.add_argument("--memory-only", action="store_true", help="without the time")
args = options.parse_args()
report = Report("fsdp", args)
loss_of, params, batch = stacked_gpt(args.layers, args.width)
case = f"GPT, {args.layers} layers"
adam = optax.adam(1e-3)
size_of = lambda tree: sum(x.nbytes for x in jax.tree.leaves(tree))


def peak_bytes(compiled):
    found = compiled.memory_analysis()
    arguments = (
        found.argument_size_in_bytes + found.output_size_in_bytes - found.alias_size_in_bytes
    )
    return arguments + found.temp_size_in_bytes


class Trained:
    """Calls of a step, each on the state that the last one left."""

    def __init__(self, optimizer, params, whole):
        def step(params, state, batch):
            grads = jax.grad(partial(loss_of, whole=whole))(params, batch)
            updates, state = optimizer.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        self.params = jax.tree.map(jnp.array, params)
        self.state = optimizer.init(self.params)
        self.step = jaxmpi.jit(step, donate_argnums=(0, 1))
        self.plan = jaxmpi.explain(self.step, self.params, self.state, batch)
        self.peak_bytes = peak_bytes(self.step.lower(self.params, self.state, batch).compile())

    def __call__(self):
        self.params, self.state = self.step(self.params, self.state, batch)
        return self.params


shards = jaxmpi.fully_shard(params, stacked={name: name == "blocks" for name in params})
steps = {
    "distributed": Trained(jaxmpi.distributed(adam), params, lambda tree: tree),
    "ZeRO-1": Trained(jaxmpi.sharded(adam), params, lambda tree: tree),
    "FSDP": Trained(adam, shards, jaxmpi.unshard),
}
size, whole = report.world.size, size_of(params)
activations = (
    jax.jit(jax.grad(loss_of)).lower(params, batch).compile().memory_analysis().temp_size_in_bytes
)
for name, step in steps.items():
    held = size_of((step.params, step.state))
    sent = step.plan.sent_bytes
    report.show(
        f"{name:12} MB of a rank: peak {step.peak_bytes / 1e6:7.1f}, "
        f"held {held / 1e6:7.1f}, sent {sent / 1e6:7.1f}"
    )
layer = size_of(params["blocks"]) / args.layers
report.show(
    f"MB: parameters {whole / 1e6:.1f}, a layer {layer / 1e6:.2f}, "
    f"activations {activations / 1e6:.1f}"
)
fsdp, number = steps["FSDP"], lambda x: np.full((1, 1), x)
expected = 4 * whole / size + 2 * layer + activations
report.ratio(
    case, "memory / expected", number(fsdp.peak_bytes), number(expected), at_most=MEMORY_LIMIT
)
if size > 1:
    most = 3 * (size - 1) / size * whole
    report.ratio(
        case,
        "bytes / 3 parameters",
        number(fsdp.plan.sent_bytes),
        number(most),
        at_most=BYTES_LIMIT,
    )
if not args.memory_only:
    times = report.measure(case, steps, seconds=8.0)
    report.ratio(case, "FSDP / ZeRO-1", times["FSDP"], times["ZeRO-1"], at_most=TIME_LIMIT)
    report.ratio(case, "FSDP / distributed", times["FSDP"], times["distributed"])
report.finish()
