"""Time that distribution adds to a train step, beside JAX's gloo, mpi4jax and torch DDP.

    jaxmpi run -n 2 benchmarks/train_step.py

Each contender trains the same model on the same shapes, with momentum; "local" is the step without
communication. Exits with 1 when a bound is missed. torch is a contender where it is installed.
"""

from functools import partial

import jax
import numpy as np
import peers
from common import Report, parser
from step_models import MODELS, torch_models
from trained import Trained, gloo_step, mpi4jax_step, step_of, torch_steps

import jaxmpi

arguments = parser(__doc__)
arguments.add_argument(
    "--models", nargs="*", default=list(MODELS), choices=MODELS, help="which to train"
)
args = arguments.parse_args()
peers.start_jax()
report = Report("train_step", args)
torch = peers.start_torch()
if torch is None:
    report.show("torch is not installed: that contender is left out")
NOISE = 0.02


def contenders_of(loss_of, params, batch):
    jit = partial(jax.jit, donate_argnums=0)
    return {
        "local": Trained(jit(step_of(loss_of, lambda grads: grads)), params, batch),
        "jaxmpi": Trained(
            jaxmpi.jit(step_of(loss_of, jaxmpi.tree_allreduce), donate_argnums=0), params, batch
        ),
        "mpi4jax per leaf": mpi4jax_step(loss_of, params, batch),
        "JAX gloo": gloo_step(loss_of, params, batch),
    }


def added(times, name, local):
    """Return the time of a contender's steps beyond the median local step of the same round."""
    return times[name] - np.median(times[local], axis=1, keepdims=True)


def show_added(case, times):
    ours = added(times, "jaxmpi", "local")
    report.ratio(case, "jaxmpi / local", times["jaxmpi"], times["local"])
    for name, local, bound in (
        ("mpi4jax per leaf", "local", None),
        ("JAX gloo", "local", 0.2),
        ("torch DDP", "torch local", 1.0),
    ):
        if name not in times:
            continue
        theirs = added(times, name, local)
        report.show(
            f"{case:22} added by jaxmpi {np.median(ours) / 1e3:.2f} ms, "
            f"by {name} {np.median(theirs) / 1e3:.2f} ms"
        )
        if np.median(theirs) < NOISE * np.median(times[local]):
            report.show(
                f"{case:22} {name} adds less than {NOISE:.0%} of a step: too little to compare"
            )
        else:
            bounded = bound if case != "ResNet-50" else None
            report.ratio(case, f"added by jaxmpi / by {name}", ours, theirs, at_most=bounded)


for case in report.progress(args.models):
    loss_of, params, batch = MODELS[case]()
    calls = contenders_of(loss_of, params, batch)
    if torch and case in torch_models(torch):
        calls |= torch_steps(torch, *torch_models(torch)[case])
    show_added(case, report.measure(case, calls, seconds=8.0))

report.finish()
