"""A classifier in the style of Flax's ImageNet example, for the devices of one host.

BatchNorm has running statistics of each device's own batches, averaged before the evaluation.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import jax_utils, linen
from flax.training import common_utils, train_state
from jax import lax

import jaxmpi
from jaxmpi import pmap

jaxmpi.init()

BATCH, STEPS, CLASSES = 12, 6, 3


class Net(linen.Module):
    @linen.compact
    def __call__(self, x, train):
        x = linen.Conv(4, (3, 3), use_bias=False)(x)
        x = linen.BatchNorm(use_running_average=not train, momentum=0.9)(x)
        return linen.Dense(CLASSES)(linen.relu(x).mean((1, 2)))


class TrainState(train_state.TrainState):
    batch_stats: dict


def compute_metrics(logits, labels):
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
    accuracy = jnp.mean(jnp.argmax(logits, -1) == labels)
    return lax.pmean({"loss": loss, "accuracy": accuracy}, axis_name="batch")


def train_step(state, batch):
    def loss_fn(params):
        variables = {"params": params, "batch_stats": state.batch_stats}
        logits, changed = state.apply_fn(variables, batch["image"], True, mutable=["batch_stats"])
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()
        return loss, (changed, logits)

    grads, (changed, logits) = jax.grad(loss_fn, has_aux=True)(state.params)
    grads = lax.pmean(grads, axis_name="batch")
    metrics = compute_metrics(logits, batch["label"])
    return state.apply_gradients(grads=grads, batch_stats=changed["batch_stats"]), metrics


def eval_step(state, batch):
    variables = {"params": state.params, "batch_stats": state.batch_stats}
    return compute_metrics(state.apply_fn(variables, batch["image"], False), batch["label"])


cross_replica_mean = pmap(lambda x: lax.pmean(x, "x"), "x")


def input_fn():
    rng = np.random.default_rng(0)
    for _ in range(STEPS):
        batch = {
            "image": rng.normal(size=(BATCH, 6, 6, 1)).astype(np.float32),
            "label": rng.integers(CLASSES, size=BATCH),
        }
        yield common_utils.shard(jaxmpi.shard(batch)[:])


def main():
    net = Net()
    variables = net.init(jax.random.key(0), jnp.ones((1, 6, 6, 1)), train=False)
    state = TrainState.create(apply_fn=net.apply, tx=optax.sgd(0.2, momentum=0.9), **variables)
    state = jax_utils.replicate(state)
    p_train_step = pmap(train_step, axis_name="batch")
    p_eval_step = pmap(eval_step, axis_name="batch")
    train_metrics = []
    for batch in jax_utils.prefetch_to_device(input_fn(), 2):
        state, metrics = p_train_step(state, batch)
        train_metrics.append(metrics)
    losses = common_utils.get_metrics(train_metrics)["loss"].tolist()
    state = state.replace(batch_stats=cross_replica_mean(state.batch_stats))
    metrics = jax_utils.unreplicate(p_eval_step(state, next(input_fn())))
    return [*losses, float(metrics["loss"]), float(metrics["accuracy"])]


if __name__ == "__main__":
    print(main())
