"""Seconds from the SIGKILL of a rank to the next training step under `jaxmpi run --restarts`.

    python benchmarks/restart.py
    python benchmarks/restart.py --ranks 2 --folder /dev/shm

A job with 100 MB of state (parameters, and the two moments of Adam) has a checkpoint; one rank
after the other kills itself with SIGKILL, and each restart goes on from the checkpoint. The parts
of a restart, each until the slowest rank has done it:

    end       the launcher notices the kill, and ends the job
    init      processes start, import JAX, and find each other
    restore   the checkpoint is found, verified and read
    step      the step is traced, its executable is read from the cache, and it runs once

A start is the same from the command line on, with the checkpoint and the compiled programs there: a
restart is one, but for the end of the job before. Exits with 1 where a bound is missed: the end of
the job or a restart takes too long, or a restart takes longer than a start. Where the ranks share
cores, a restart may take as many times as long: 4 ranks on 2 cores twice.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from common import bars, parser, save

import jaxmpi

END_LIMIT = 2.0  # seconds from the kill to the end of the job
RESTART_LIMIT = 4.0  # seconds from the kill to the next step, with a core for each rank
RATIO_LIMIT = 1.3  # restart / start
PARTS = ("end", "init", "restore", "step")
LAYERS, WIDTH = 8, 1020  # 33 MB in float32, 100 MB with Adam's moments

arguments = parser(__doc__)
arguments.set_defaults(rounds=5)
arguments.add_argument("--ranks", type=int, nargs="*", default=[2, 4], help="numbers of ranks")
arguments.add_argument(
    "--folder", type=Path, help="where the checkpoints are: a folder for temporary files by default"
)
arguments.add_argument(
    "--worker", type=Path, help="be one of the ranks, with its files in this folder"
)
args = arguments.parse_args()


# a rank


def note(folder, event):
    """Record the time at which this rank reaches an event."""
    line = {
        "start": os.environ["JAXMPI_RESTART"],
        "rank": jaxmpi.rank(),
        "event": event,
        "time": time.time(),
    }
    with open(folder / "events.jsonl", "a") as file:
        file.write(json.dumps(line) + "\n")


def work(folder, kills):
    """Resume from the checkpoint, and train until it is this rank's turn to be killed."""
    world, restart = jaxmpi.init(), int(os.environ["JAXMPI_RESTART"])
    note(folder, "init")
    tx = jaxmpi.distributed(optax.adam(1e-4))

    def loss(params, x):
        for w in params:
            x = x + jnp.tanh(x @ w)
        return jnp.mean(x**2)

    @jaxmpi.jit
    def step(run, x):
        grads = jax.grad(loss)(run["params"], x)
        updates, state = tx.update(grads, run["state"], run["params"])
        return {"params": optax.apply_updates(run["params"], updates), "state": state}

    params = [np.full((WIDTH, WIDTH), 1e-3, np.float32) for _ in range(LAYERS)]
    run = {"params": params, "state": jax.eval_shape(tx.init, params)}
    if jaxmpi.latest(folder / "checkpoints") is None:
        run["state"] = tx.init(params)
    else:
        run = jaxmpi.restore(folder / "checkpoints", run)
    jax.block_until_ready(run)
    note(folder, "restore")
    x = np.ones((8, WIDTH), np.float32) * (1 + world.rank)
    run = jax.block_until_ready(step(run, x))
    note(folder, "step")
    jaxmpi.save(folder / "checkpoints", restart, run, background=False)
    for _ in range(3):
        run = jax.block_until_ready(step(run, x))
    jaxmpi.barrier()
    if restart < kills:
        if world.rank == restart % world.size:
            note(folder, "kill")
            os.kill(os.getpid(), signal.SIGKILL)
        jaxmpi.barrier()  # which the rank that was killed does not reach


# the launcher of the jobs


def launch(ranks, folder, kills):
    """Run a job; return the time of its start, and those at which `jaxmpi run` restarted it."""
    words = [
        sys.executable,
        "-m",
        "jaxmpi",
        "run",
        "-n",
        str(ranks),
        "--restarts",
        str(kills),
        __file__,
    ]
    words += ["--worker", str(folder), "--rounds", str(kills)]
    environ = {**os.environ, "XDG_CACHE_HOME": str(folder)}
    (folder / "events.jsonl").unlink(missing_ok=True)
    began, again, lines = time.time(), [], []
    streams = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(words, env=environ, **streams) as job:
        for line in job.stderr:
            lines.append(line)
            if f" of {kills}" in line and "restart " in line:
                again.append(time.time())
    if job.returncode or len(again) != kills:
        sys.exit(
            f"the job of {ranks} ranks ended with {job.returncode} "
            f"after {len(again)} restarts:\n{''.join(lines)}"
        )
    return began, again


def events(folder, start):
    """Return the time at which the slowest rank reached each event of a start."""
    found = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    mine = [one for one in found if one["start"] == str(start)]
    return {one["event"]: one["time"] for one in sorted(mine, key=lambda one: one["time"])}


def measure(ranks, folder, kills):
    """Return the seconds of each part of each restart, and of as many starts."""
    _, again = launch(ranks, folder, kills)
    restarts = {part: [] for part in (*PARTS, "restart")}
    for number in range(1, kills + 1):
        killed, now = events(folder, number - 1)["kill"], events(folder, number)
        times = [killed, again[number - 1], *(now[part] for part in PARTS[1:])]
        for part, before, after in zip(PARTS, times, times[1:], strict=False):
            restarts[part].append(after - before)
        restarts["restart"].append(times[-1] - killed)
    restarts["start"] = []
    for _ in range(kills):
        began, _ = launch(ranks, folder, 0)
        restarts["start"].append(events(folder, 0)["step"] - began)
    return restarts


def main():
    kills = 2 if args.quick else args.rounds
    cores, rows, ratios = len(os.sched_getaffinity(0)), [], []
    print(
        f"restart: {cores} cores, jax {jax.__version__}, {kills} kills, {time.strftime('%Y-%m-%d')}"
    )
    for ranks in args.ranks:
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            seconds = measure(ranks, Path(folder), kills)
        for name, values in seconds.items():
            low, median, high = np.percentile(values, [25, 50, 75])
            print(
                f"{ranks} ranks  {name:10} median {median:6.2f} s, "
                f"quartiles {low:6.2f} to {high:6.2f}",
                flush=True,
            )
            row = {"case": f"{ranks} ranks", "contender": name}
            rows.append(
                {**row, "median_us": 1e6 * median, "low_us": 1e6 * low, "high_us": 1e6 * high}
            )
        bounds = {
            "seconds to the end of the job": (np.median(seconds["end"]), END_LIMIT),
            "seconds to the next step": (
                np.median(seconds["restart"]),
                RESTART_LIMIT * max(1, ranks / cores),
            ),
            "restart / start": (
                np.median(seconds["restart"]) / np.median(seconds["start"]),
                RATIO_LIMIT,
            ),
        }
        for name, (value, limit) in bounds.items():
            holds = bool(value <= limit)
            ratios.append(
                {
                    "case": f"{ranks} ranks",
                    "ratio": name,
                    "value": float(value),
                    "bound": limit,
                    "holds": holds,
                }
            )
            print(
                f"{ranks} ranks  {name:30} {value:5.2f}, at most {limit:g}: "
                f"{'holds' if holds else 'MISSED'}",
                flush=True,
            )
    if args.out:
        found = {"rows": rows, "ratios": ratios, "cores": cores, "date": time.strftime("%Y-%m-%d")}
        save(args.out, "restart", found, "seconds of a restart", lambda axes: bars(axes, rows))
    missed = sum(not one["holds"] for one in ratios)
    print(f"\nrestart: {len(ratios)} bounds, {missed} missed")
    sys.exit(int(missed > 0 and not args.quick))


work(args.worker, args.rounds) if args.worker else main()
