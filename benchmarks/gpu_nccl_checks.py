"""Checks that gpu_nccl.py runs: ranks that share a GPU over NCCL. Each result is a line of JSON.

    JAXMPI_BACKEND=xla jaxmpi run -n 2 --mps benchmarks/gpu_nccl_checks.py start

The tests' tables of cases are checked here without pytest, `groups` aside.
"""

import hashlib
import os
import sys
import time
import warnings
from pathlib import Path

import gpu_checks
import jax
import jax.numpy as jnp
import numpy as np
from gpu_checks import median_of, say
from jax import lax
from models import resnet50

import jaxmpi
from jaxmpi._backends import nccl
from jaxmpi._world.init import launched_ranks

AXIS = jaxmpi.AXIS
TESTS = Path(__file__).parents[1] / "tests"
QUICKLY = {"xla_backend_optimization_level": 0}  # is what programs of cases are to be compiled
EVERY = 4  # of the cases, on CPUs: the tests run all there


def some(cases):
    """Return all cases on a GPU, and a part of them on CPUs."""
    return [*cases][:: EVERY if jax.default_backend() == "cpu" else 1]


def start():
    """Show that the job starts: the device, NCCL and its variables, and one sum."""
    began = time.perf_counter()
    world = jaxmpi.init(verbose=True)
    took = time.perf_counter() - began
    device = f"{world.device.platform}, {world.device.device_kind}, backend {world.backend}"
    say("device", device, right=world.backend == "xla", note=f"{world.size} ranks")
    began = time.perf_counter()
    total = jaxmpi.jit(lambda x: lax.psum(x, AXIS))(jnp.full(1000, world.rank + 1.0))
    right = np.array_equal(total, np.full(1000, world.size * (world.size + 1) / 2))
    say("the first sum", round(time.perf_counter() - began, 2), "s", right=right)
    say("init", round(took, 2), "s")
    if world.device.platform == "cpu":
        say("collectives", "of XLA on CPUs, without NCCL")
        return
    loaded = nccl.find()
    say("NCCL", str(loaded), right=not nccl.why_not(loaded), note=loaded.source)
    names = ("NCCL_MULTI_RANK_GPU_ENABLE", "NCCL_NVLS_ENABLE", "NCCL_MAX_CTAS")
    found = {name: os.environ.get(name) for name in names}
    say("variables", found, right=world.size == 1 or None not in found.values())
    folder = nccl.mps_folder(os.environ)
    say("CUDA MPS", folder or "none", right=bool(folder))


def cases_of_lax(part, parts):
    """Check every `parts`-th group of tests/lax_cases.py from `part` on, working and refused."""
    import lax_cases

    jaxmpi.init()
    for name in [*lax_cases.GROUPS][int(part) :: int(parts)]:
        wrong, count = [], 0
        with jax.enable_x64(True), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for case in some(lax_cases.cases_here(name)):
                count += 1
                if why := _wrong_case(case):
                    wrong.append(f"{case.title}: {why}")
        say(f"lax cases, {name}", f"{count} cases", right=not wrong, note="; ".join(wrong)[:2000])


def _wrong_case(case):
    """Run one case; return what is wrong with it, or ""."""
    n, rank = jaxmpi.size(), jaxmpi.rank()
    args = case.args(n)
    mine = jax.tree.map(lambda x: x[rank], args)
    program = jaxmpi.jit(case.fun, compiler_options=QUICKLY)
    if "xla" in case.rows:
        try:
            jax.block_until_ready(program(*mine))
        except case.error[0]:
            return ""
        except Exception as error:
            return f"refused by {type(error).__name__}: {error}"[:300]
        return "is not refused"
    try:
        with jax.default_device(jax.local_devices(backend="cpu")[0]):
            by_vmap = jax.jit(jax.vmap(case.fun, axis_name=AXIS), compiler_options=QUICKLY)
            want = jax.device_get(case.want(n, *args) if case.want else by_vmap(*args))
        got = program(*mine)
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:300]
    return _difference(got, jax.tree.map(lambda x: np.asarray(x)[rank], want))


def _difference(got, want, dtypes=True):
    """Return the first difference between two trees, or ""; the dtypes count or not."""
    if jax.tree.structure(got) != jax.tree.structure(want):
        return f"{jax.tree.structure(got)} and not {jax.tree.structure(want)}"
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        x, y = np.asarray(x), np.asarray(y)
        if x.shape != y.shape or (dtypes and x.dtype != y.dtype):
            return f"{x.dtype}{list(x.shape)} and not {y.dtype}{list(y.shape)}"
        if x.dtype.kind == "V":
            x, y = x.astype(np.float32), y.astype(np.float32)
        tolerance = 1e-5 if x.dtype == np.float32 else 1e-11
        if not np.allclose(x, y, tolerance, 1e-11, equal_nan=True):
            return f"off by {np.max(np.abs(x - y))}"
    return ""


def cases_of_axis(part, parts):
    """Check every `parts`-th case of tests/axis_cases.py from `part` on."""
    import axis_cases

    jaxmpi.init()
    n, rank = jaxmpi.size(), jaxmpi.rank()
    wrong, names = [], some([*axis_cases.CASES][int(part) :: int(parts)])
    with jax.enable_x64(True):
        for name in names:
            fun, args, want = axis_cases.CASES[name](n)
            try:
                got = jaxmpi.jit(fun, compiler_options=QUICKLY)(*(x[rank] for x in args))
                mine = jax.tree.map(lambda x: np.asarray(x)[rank], want)
                why = _difference(got, mine, dtypes=False)
            except Exception as error:
                why = f"{type(error).__name__}: {error}"[:300]
            wrong += [f"{name}: {why}"] * bool(why)
    say("axis cases", f"{len(names)} cases", right=not wrong, note="; ".join(wrong)[:2000])


def laws(prefix, optimizer):
    """Check the laws of tests/optim_cases.py: n ranks train as plain optax on the whole batch.

    Args:
      prefix: "fully" for `fully_shard`, or "of" for the other transforms.
      optimizer: a name of `optim_cases.OPTIMIZERS`.
    """
    import optim_cases

    jaxmpi.init()
    variants = optim_cases.VARIANTS
    if prefix == "fully":
        variants = [f"fully {name}" for name in optim_cases.SHARDED_VARIANTS]
    for variant in some(variants):
        try:
            optim_cases.check(variant, optimizer)
            why = ""
        except Exception as error:
            why = f"{type(error).__name__}: {error}"[:500]
        say(
            f"law, {variant}, {optimizer}",
            "holds" if not why else "broken",
            right=not why,
            note=why,
        )


def groups():
    """Check every collective over named axes and groups of ranks, beside NumPy."""
    import test_groups

    axes = {"island": 1, "member": launched_ranks()}
    jaxmpi.init(axes=axes)
    weights, want = test_groups.expectations(axes)
    try:
        test_groups.check_on_ranks(axes, weights, want)
        why = ""
    except Exception as error:
        why = f"{type(error).__name__}: {error}"[:2000]
    say("groups and axes", f"{len(want)} cases", right=not why, note=why)


def whole(model):
    """Check that ranks with a part of a batch each train as one rank with all of it."""
    world = jaxmpi.init()
    n, rank = world.size, world.rank
    step_with, optimizer, params, batch = gpu_checks._step_of(model, world.device.platform == "cpu")
    mine = jax.tree.map(lambda x: jnp.split(x, n)[rank], batch)
    averaged = jaxmpi.distributed(optimizer)
    ours = jaxmpi.jit(step_with(averaged), replicated_argnums=(0, 1), replicated_outnums=(0, 1))
    plain = jax.jit(step_with(optimizer))
    losses = []
    for step, transform, part in ((ours, averaged, mine), (plain, optimizer, batch)):
        state = params, transform.init(params)
        for _ in range(5):
            *state, loss = step(*state, part)
        losses.append(float(np.mean(jaxmpi.allgather_object(float(loss)))))
    difference = abs(losses[0] / losses[1] - 1)
    say(
        f"{model}: the loss of {n} ranks after five steps, relative to one rank with all samples",
        difference,
        right=difference < (1e-4 if model == "digits" else 1e-2),
        note=str(losses),
    )


def steps(model):
    """Measure a train step beside plain JAX, and compare both with one rank."""
    gpu_checks.steps(model)
    if model != "resnet50" and jaxmpi.size() > 1:  # whose norms are of a rank's batch
        whole(model)


def means():
    """Measure the mean of 1 KB, of 100 MB and of ResNet-50's arrays on the device."""
    world = jaxmpi.init()
    on_gpu = world.device.platform != "cpu"
    mean = jaxmpi.jit(lambda tree: lax.pmean(tree, AXIS))
    trees = {
        "1 KB": [256],
        "100 MB": [25_600_000 if on_gpu else 250_000],
        "ResNet-50": [int(np.prod(s)) for s in resnet50()] if on_gpu else [1000] * 161,
    }
    for name, sizes in trees.items():
        tree = [jnp.full(k, world.rank + 1.0, jnp.float32) for k in sizes]
        low, median, high = median_of(lambda tree=tree: mean(tree))
        right = all(bool((x == (world.size + 1) / 2).all()) for x in mean(tree))
        say(
            f"mean of {name}",
            round(1e3 * median, 4),
            "ms",
            right=right,
            note=f"{len(sizes)} arrays, quartiles {1e3 * low:.3f} to {1e3 * high:.3f}; "
            f"{4 * sum(sizes) / median / 1e9:.2f} GB/s",
        )


def bits():
    """Train twice with XLA's deterministic kernels, compiled anew: the same bits, and a digest."""
    world = jaxmpi.init()
    digests = []
    for _ in range(2):
        cpu = world.device.platform == "cpu"
        step_with, optimizer, params, batch = gpu_checks._step_of("gpt", cpu)
        averaged = jaxmpi.distributed(optimizer)
        mine = jax.tree.map(lambda x: jnp.split(x, world.size)[world.rank], batch)
        step = jaxmpi.jit(step_with(averaged), replicated_argnums=(0, 1))
        state = params, averaged.init(params)
        for _ in range(3 if cpu else 10):
            *state, _ = step(*state, mine)
        digest = hashlib.sha256()
        for x in jax.tree.leaves(jax.device_get(state[0])):
            digest.update(np.asarray(x).tobytes())
        digests.append(digest.hexdigest()[:16])
        jax.clear_caches()
    everyone = {*map(tuple, jaxmpi.allgather_object(digests)), (digests[0], digests[0])}
    say("digest", digests[0], right=len(everyone) == 1, note=f"XLA_FLAGS={os.environ['XLA_FLAGS']}")


PARTS = (start, cases_of_lax, cases_of_axis, laws, groups, steps, means, bits)

if __name__ == "__main__":
    sys.path += [str(TESTS), str(TESTS / "collectives")]
    {part.__name__: part for part in PARTS}[sys.argv[1]](*sys.argv[2:])
