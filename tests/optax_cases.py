"""Every optimizer, transform and wrapper in optax's public namespace, and what its `update` needs.

`check` trains with all of them on the ranks that there are, and compares with plain optax on the
whole batch.
"""

import inspect
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
from optax import contrib

import jaxmpi

STEPS, SAMPLES = 6, 12  # 1, 2, 3 and 4 ranks divide the samples
RATE = 0.05
# take the gradients of single samples
SINGLE_SAMPLES = ("contrib.differentially_private_aggregate", "contrib.dpsgd")

WRAPPERS = (  # send what the transforms or functions that they are made of need
    *(
        "chain",
        "named_chain",
        "masked",
        "partition",
        "multi_transform",
        "selective_transform",
        "with_extra_args_support",
    ),
    *(
        "conditionally_mask",
        "conditionally_transform",
        "MultiSteps",
        "lookahead",
        "contrib.sam",
        "contrib.schedule_free",
    ),
    *(
        "inject_hyperparams",
        "inject_stateful_hyperparams",
        "contrib.mechanize",
        "contrib.split_real_and_imaginary",
    ),
    *("monitor", "measure_with_ema", "snapshot", "stateless", "stateless_with_tree_map"),
)


# further arguments of `update`, after gradients and parameters


def nothing(loss, value, grads):
    return {}


def value_only(loss, value, grads):
    return {"value": value}


def search(loss, value, grads):
    return {"value": value, "grad": grads, "value_fn": loss}


def objective(loss, value, grads):
    return {"obj_fn": loss}


def gradient(loss, value, grads):
    return {"grad_fn": lambda params, i: jax.grad(loss)(params)}


# parameters


def real():
    """Make a small network; no number of ranks divides all of its arrays."""
    rng = np.random.default_rng(7)
    shapes = {"w": (5, 4), "b": (3,), "scale": ()}
    return {
        name: jnp.asarray(0.4 * rng.normal(size=shape) + (shape == ()))
        for name, shape in shapes.items()
    }


def without_scalar():
    return {name: x for name, x in real().items() if x.ndim}


def matrices():
    return {name: x for name, x in real().items() if x.ndim > 1}


def complex_numbers():
    return {name: x + 0.5j * jnp.flip(x) for name, x in real().items()}


def fast_and_slow():
    return optax.LookaheadParams.init_synced(real())


def loss_of(params, batch):
    """Return the mean over the samples of a batch `[samples, 2]`.

    L = mean_s a_s² · Σ_i k_i |x_i - b_s·k_i|² + Σ_i |x_i|⁴ / 9.
    """
    total = 0.0
    for x in jax.tree.leaves(params.fast if isinstance(params, optax.LookaheadParams) else params):
        k = 1 + np.arange(x.size).reshape(x.shape) / 7
        a, b = batch.T.reshape(2, -1, *[1] * x.ndim)
        total += jnp.mean(
            jnp.sum(
                a**2 * k * jnp.abs(x - b * k) ** 2 + jnp.abs(x) ** 4 / 9,
                axis=tuple(range(1, 1 + x.ndim)),
            )
        )
    return total


# transforms


class Case(NamedTuple):
    make: Callable[[], Any]
    extra: Callable[..., dict[str, Any]] = nothing
    params: Callable[[], Any] = real


def down(transform):
    """Make an optimizer from a transform that only scales gradients."""
    return optax.chain(transform, optax.scale(-RATE))


def large(tree):
    """Make a mask that depends on sizes."""
    return jax.tree.map(lambda x: x.size > 4, tree)


def is_large(updates, step, params):
    skip = optax.tree.norm(updates) > 0.5
    return skip, {"skip": skip}


def late(step, **extra_args):
    return step >= 3


def cases_of(module, words, *args):
    return {name: Case(lambda name=name: getattr(module, name)(*args)) for name in words.split()}


def scales_of(module, words):
    return {
        f"scale_by_{name}": Case(lambda name=name: down(getattr(module, f"scale_by_{name}")()))
        for name in words.split()
    }


OPTAX = {
    **cases_of(
        optax,
        "adabelief adadelta adagrad adam adamax adamaxw adan amsgrad fromage lamb lars lion nadam "
        "nadamw novograd "
        "optimistic_adam optimistic_gradient_descent optimistic_adam_v2 radam rmsprop rprop sgd "
        "sign_sgd signum yogi",
        RATE,
    ),
    **scales_of(
        optax,
        "adadelta adam adamax adan amsgrad belief lion novograd optimistic_gradient "
        "param_block_norm param_block_rms radam rms "
        "rss sign stddev trust_ratio yogi",
    ),
    "adafactor": Case(lambda: optax.adafactor(RATE, min_dim_size_to_factor=4)),
    "adamw": Case(lambda: optax.adamw(RATE, weight_decay=0.1, mask=large)),
    "adaptive_grad_clip": Case(lambda: optax.chain(optax.adaptive_grad_clip(0.1), optax.sgd(RATE))),
    "add_decayed_weights": Case(lambda: down(optax.add_decayed_weights(0.1, mask=large))),
    "add_noise": Case(lambda: down(optax.add_noise(0.1, 0.5, key=jax.random.key(3)))),
    "apply_every": Case(lambda: optax.chain(optax.apply_every(2), optax.adam(RATE))),
    "apply_if_finite": Case(lambda: optax.apply_if_finite(optax.adam(RATE), 2)),
    "centralize": Case(lambda: down(optax.centralize())),
    "chain": Case(lambda: optax.chain(optax.clip_by_global_norm(0.3), optax.adam(RATE))),
    "clip": Case(lambda: down(optax.clip(0.1))),
    "clip_by_block_rms": Case(lambda: down(optax.clip_by_block_rms(0.1))),
    "clip_by_global_norm": Case(lambda: down(optax.clip_by_global_norm(0.3))),
    "conditionally_mask": Case(lambda: optax.conditionally_mask(optax.lamb(RATE), late)),
    "conditionally_transform": Case(
        lambda: down(optax.conditionally_transform(optax.clip_by_global_norm(0.2), late))
    ),
    "ema": Case(lambda: down(optax.ema(0.9))),
    "flatten": Case(lambda: optax.flatten(optax.adam(RATE))),
    "freeze": Case(
        lambda: optax.chain(optax.adam(RATE), optax.freeze({"w": True, "b": False, "scale": False}))
    ),
    "identity": Case(lambda: down(optax.identity())),
    "inject_hyperparams": Case(
        lambda: optax.inject_hyperparams(optax.adam)(optax.linear_schedule(RATE, 0.0, STEPS)),
    ),
    "inject_stateful_hyperparams": Case(
        lambda: optax.inject_stateful_hyperparams(optax.adam)(RATE)
    ),
    "keep_params_nonnegative": Case(
        lambda: optax.chain(optax.sgd(RATE), optax.keep_params_nonnegative())
    ),
    "lbfgs": Case(lambda: optax.lbfgs(memory_size=3), search),
    "lookahead": Case(lambda: optax.lookahead(optax.adam(RATE), 2, 0.5), params=fast_and_slow),
    "masked": Case(lambda: optax.chain(optax.masked(optax.adam(RATE), large), optax.scale(0.1))),
    "measure_with_ema": Case(
        lambda: optax.chain(
            optax.adam(RATE), optax.monitor({"norm": optax.measure_with_ema(optax.tree.norm, 0.9)})
        )
    ),
    "monitor": Case(
        lambda: optax.chain(
            optax.monitor({"mean": lambda tree: jnp.mean(tree["w"])}), optax.adam(RATE)
        )
    ),
    "multi_transform": Case(
        lambda: optax.multi_transform({True: optax.adam(RATE), False: optax.sgd(RATE)}, large),
    ),
    "MultiSteps": Case(
        lambda: optax.MultiSteps(
            optax.lamb(RATE), 2, should_skip_update_fn=is_large
        ).gradient_transformation(),
    ),
    "named_chain": Case(
        lambda: optax.named_chain(("clip", optax.clip(0.3)), ("adam", optax.adam(RATE)))
    ),
    "noisy_sgd": Case(lambda: optax.noisy_sgd(RATE, key=jax.random.key(3))),
    "normalize_by_update_norm": Case(lambda: down(optax.normalize_by_update_norm())),
    "partition": Case(
        lambda: optax.partition({True: optax.lamb(RATE), False: optax.sgd(RATE)}, large)
    ),
    "polyak_sgd": Case(lambda: optax.polyak_sgd(1.0), value_only),
    "scale": Case(lambda: optax.scale(-RATE)),
    "scale_by_backtracking_linesearch": Case(
        lambda: optax.chain(
            optax.sgd(1.0), optax.scale_by_backtracking_linesearch(8, store_grad=True)
        ),
        search,
    ),
    "scale_by_distance_over_gradients": Case(
        lambda: optax.scale_by_distance_over_gradients(param_dtype=jnp.float64, global_scale=-1.0)
    ),
    "scale_by_factored_rms": Case(
        lambda: down(optax.scale_by_factored_rms(min_dim_size_to_factor=4))
    ),
    "scale_by_lbfgs": Case(lambda: down(optax.scale_by_lbfgs(memory_size=3))),
    "scale_by_learning_rate": Case(lambda: optax.scale_by_learning_rate(RATE)),
    "scale_by_polyak": Case(
        lambda: optax.chain(optax.scale_by_polyak(), optax.scale(-1.0)), value_only
    ),
    "scale_by_rprop": Case(lambda: optax.chain(optax.scale_by_rprop(RATE), optax.scale(-1.0))),
    "scale_by_schedule": Case(lambda: optax.scale_by_schedule(lambda step: -RATE / (1 + step))),
    "scale_by_zoom_linesearch": Case(
        lambda: optax.chain(optax.sgd(1.0), optax.scale_by_zoom_linesearch(8)), search
    ),
    "selective_transform": Case(
        lambda: optax.selective_transform(optax.adam(RATE), freeze_mask=large(real()))
    ),
    "set_to_zero": Case(optax.set_to_zero),
    "snapshot": Case(
        lambda: optax.chain(
            optax.snapshot("max", lambda tree: jnp.max(tree["b"])), optax.adam(RATE)
        )
    ),
    "sm3": Case(lambda: optax.sm3(RATE), params=without_scalar),
    "scale_by_sm3": Case(lambda: down(optax.scale_by_sm3()), params=without_scalar),
    "stateless": Case(
        lambda: optax.stateless(
            lambda updates, params: jax.tree.map(lambda u: -RATE * u / u.size, updates)
        )
    ),
    "stateless_with_tree_map": Case(
        lambda: optax.stateless_with_tree_map(lambda u, p: -RATE * u * jnp.mean(p))
    ),
    "trace": Case(lambda: down(optax.trace(0.9, nesterov=True))),
    "with_extra_args_support": Case(
        lambda: optax.with_extra_args_support(optax.adam(RATE)), search
    ),
    "zero_nans": Case(lambda: optax.chain(optax.zero_nans(), optax.adam(RATE))),
}
CONTRIB = {
    **cases_of(
        contrib,
        "acprop ademamix adopt cocob dadapt_adamw dog dowg madgrad muon prodigy "
        "schedule_free_adamw schedule_free_sgd "
        "simplified_ademamix",
        RATE,
    ),
    **scales_of(contrib, "acprop ademamix adopt simplified_ademamix"),
    "galore": Case(lambda: contrib.galore(RATE, rank=2, update_proj_gap=2)),
    "hutchinson_estimator_diag_hessian": Case(
        lambda: down(contrib.hutchinson_estimator_diag_hessian()), objective
    ),
    "mechanize": Case(lambda: contrib.mechanize(optax.adam(RATE))),
    "momo": Case(lambda: contrib.momo(RATE), value_only),
    "momo_adam": Case(lambda: contrib.momo_adam(RATE), value_only),
    "normalize": Case(lambda: down(contrib.normalize())),
    "reduce_on_plateau": Case(
        lambda: optax.chain(optax.adam(RATE), contrib.reduce_on_plateau(0.5, patience=1, rtol=0.2)),
        value_only,
    ),
    "sam": Case(lambda: contrib.sam(optax.sgd(RATE), optax.sgd(0.1), opaque_mode=True), gradient),
    "scale_by_cocob": Case(contrib.scale_by_cocob),
    "scale_by_galore": Case(lambda: down(contrib.scale_by_galore(rank=2, update_proj_gap=2))),
    "scale_by_madgrad": Case(lambda: contrib.scale_by_madgrad(RATE)),
    "scale_by_muon": Case(
        lambda: down(
            contrib.scale_by_muon(weight_dimension_numbers={"w": contrib.MuonDimensionNumbers()})
        ),
        params=matrices,
    ),
    "schedule_free": Case(lambda: contrib.schedule_free(optax.adam(RATE), RATE)),
    "sophia": Case(lambda: contrib.sophia(RATE, update_interval=2), objective),
    "split_real_and_imaginary": Case(
        lambda: contrib.split_real_and_imaginary(optax.adam(RATE)), params=complex_numbers
    ),
}
CASES = OPTAX | {f"contrib.{name}": case for name, case in CONTRIB.items()}


def names():
    """List what makes a transform in optax: functions whose source names one, and `MultiSteps`."""
    found = {"MultiSteps"}
    for prefix, module in (("", optax), ("contrib.", contrib)):
        for name, f in inspect.getmembers(module):
            if not name.startswith("_") and "GradientTransformation" in _source(f):
                found.add(prefix + name)
    return found - {"apply_updates", "init_empty_state"}


def trained():
    """List the cases to train with: all but those that another one calls."""
    short = {name: name.removeprefix("contrib.") for name in CASES}
    modules = {name: optax if name == short[name] else contrib for name in CASES}
    text = ""
    for name in CASES:
        if "scale_by" not in name:
            text += _source(getattr(modules[name], short[name]))
    return [name for name in CASES if "scale_by" not in name or f"{short[name]}(" not in text]


def groups(count):
    """Split the cases to train with into `count` groups, each of which is one program."""
    return [tuple(trained()[i::count]) for i in range(count)]


def _source(f):
    f = getattr(f, "func", f)  # of a `partial`
    return inspect.getsource(f) if inspect.isfunction(f) else ""


# training


def batches():
    return list(np.random.default_rng(5).normal(size=(STEPS, SAMPLES, 2)))


def train(transforms, jit, part):
    """Train with each (case, transform) in one program; return parameters and states."""

    def start():
        params = {name: CASES[case].params() for name, (case, _) in transforms.items()}
        return params, {name: tx.init(params[name]) for name, (_, tx) in transforms.items()}

    def step(params, states, batch):
        new_params, new_states = {}, {}
        for name, (case, tx) in transforms.items():
            loss, p = partial(loss_of, batch=part(batch)), params[name]
            value, grads = jax.value_and_grad(loss)(p)
            if isinstance(p, optax.LookaheadParams):
                grads = grads.fast
            else:
                grads = jax.tree.map(jnp.conj, grads)
            updates, new_states[name] = tx.update(
                grads, states[name], p, **CASES[case].extra(loss, value, grads)
            )
            new_params[name] = optax.apply_updates(p, updates)
        return new_params, new_states

    def end(params, states):
        inner = {}
        for name, state in states.items():
            sharded = hasattr(state, "layout")
            inner[name] = jaxmpi.unshard(state).inner if sharded else state
        return params, inner

    params, states = jit(start)()
    step = jit(step)
    for batch in batches():
        params, states = step(params, states, batch)
    return jit(end)(params, states)


def check(chosen, wraps=("distributed", "sharded")):
    """Assert that the chosen cases train on these ranks as plain optax does on the whole batch.

    Parameters and states are compared.
    """
    with jax.enable_x64(True), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of optax's own
        inner = {name: optax.with_extra_args_support(CASES[name].make()) for name in chosen}
        want = _arrays(
            train({name: (name, tx) for name, tx in inner.items()}, jax.jit, lambda x: x)
        )
        transforms = {}
        for wrap in wraps:
            for name, tx in inner.items():
                transforms[wrap, name] = name, getattr(jaxmpi, wrap)(tx)
        got = _arrays(
            train(transforms, jaxmpi.jit, lambda x: x.reshape(jaxmpi.size(), -1, 2)[jaxmpi.rank()])
        )
    wrong = {}
    for wrap in wraps:
        for kind, name, path in want:
            a, b = got[kind, (wrap, name), path], want[kind, name, path]
            if not np.allclose(a, b, 1e-10, 1e-10, equal_nan=True):
                wrong[f"{wrap} {name} {kind}{path}"] = np.abs(a - b).max()
    assert not wrong, wrong


def _arrays(params_and_states):
    """Return each leaf as a NumPy array, by kind, name and path."""
    arrays = {}
    for kind, trees in zip(("params", "state"), params_and_states, strict=True):
        for name, tree in trees.items():
            for path, x in jax.tree_util.tree_leaves_with_path(tree):
                key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
                arrays[kind, name, jax.tree_util.keystr(path)] = np.asarray(
                    jax.random.key_data(x) if key else x
                )
    return arrays


def sends_more(name, ranks=3):
    """Return what `sharded` sends beyond shards of gradients and updates.

    Either "nothing", "numbers" or "arrays".
    """
    case = CASES[name]
    plain = optax.sgd(RATE)
    if case.params is fast_and_slow:
        plain = optax.lookahead(plain, 2, 0.5)
    with jax.enable_x64(True), jaxmpi.simulate(ranks), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        params = case.params()
        fast = params.fast if isinstance(params, optax.LookaheadParams) else params

        def sent(wrap, inner):
            tx, loss = (
                wrap(optax.with_extra_args_support(inner)),
                partial(loss_of, batch=batches()[0]),
            )
            step = lambda p, g: tx.update(g, tx.init(p), p, **case.extra(loss, loss(p), g))[0]
            return np.array(
                _collectives(jax.make_jaxpr(step, axis_env=[(jaxmpi.AXIS, ranks)])(params, fast))
            )

        def more(inner):
            return sent(jaxmpi.sharded, inner) - sent(jaxmpi.distributed, inner)

        numbers, gathered = more(case.make()) - more(plain)
    return "arrays" if gathered > 0 else "numbers" if numbers > 0 else "nothing"


def _collectives(jaxpr):
    """Count the numbers that are summed, and those gathered, in a jaxpr and its inner ones."""
    sums = gathered = 0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in ("psum", "pmax", "pmin"):
            sums += sum(v.aval.size for v in eqn.outvars)
        elif eqn.primitive.name == "all_gather":
            gathered += sum(v.aval.size for v in eqn.outvars)
        for value in eqn.params.values():
            for inner in value if isinstance(value, tuple) else (value,):
                if hasattr(inner, "eqns"):
                    more = _collectives(inner)
                    sums, gathered = sums + more[0], gathered + more[1]
    return sums, gathered
