"""Make mistakes of data-parallel training in jaxmpi, torch DDP and plain JAX; show what happens.

    python benchmarks/mistakes.py               # all of them, and write docs/tables/mistakes.md
    python benchmarks/mistakes.py --check       # compare the table with this machine, but no number
    python benchmarks/mistakes.py --show sum    # the outcome of one mistake, and what it prints
    python benchmarks/mistakes.py --show none   # without a mistake the numbers are right

A program trains a linear model on 2 ranks, with one mistake on rank 1 or on both. Each runs in
processes of its own, with a time limit. Without torch its column keeps its old cells.
"""

import argparse
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import NamedTuple

import numpy as np

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "tables" / "mistakes.md"
BEGIN, END = "<!-- --8<-- [start:mistakes] -->\n", "<!-- --8<-- [end:mistakes] -->"

RANKS, LIMIT_SECONDS = 2, 60
SAMPLES, COLUMNS, WIDTH, ROWS = 64, 4, 3, 4  # the model uses WIDTH of the COLUMNS; ROWS a rank
STEPS, AT = 128, 10  # AT is the step at which a rank changes something
RATE, DECAY = 0.05, 0.9
SECONDS_TO_FAIL = 3  # between the report of an error and the end of its process
TEXT = 200  # characters of an error in the table

# what is wrong, by a short name
MISTAKES = {
    "start": "the parameters start unequal on the ranks",
    "order": "the ranks list the data in another order, or split them with another seed",
    "rate": "one rank lowers its learning rate later",
    "mean": "the mean of the gradients is forgotten",
    "average": "the mean is forgotten in an exponential average",
    "doubled": "the gradients are averaged twice",
    "sum": "the gradients are summed over the ranks, and not averaged",
    "skipped": "an update is skipped where a rank's own gradients are not finite",
    "if": "one rank skips a whole step, by an `if` on its own loss",
    "batches": "the ranks have another number of batches",
    "model": "one rank has another model",
}

# The same training for all systems


def data(mistake, rank):
    """Return the data set as this rank has it: x [SAMPLES, COLUMNS], y and row [SAMPLES]."""
    rng = np.random.default_rng(7)
    x = rng.normal(size=(SAMPLES, COLUMNS)).astype(np.float32)
    noise = 0.3 * rng.normal(size=SAMPLES)
    y = (x[:, :WIDTH] @ [1.0, -2.0, 3.0] + 0.5 + noise).astype(np.float32)
    order = np.arange(SAMPLES)
    if mistake == "order":
        order = np.random.default_rng(rank).permutation(SAMPLES)
    return {"x": x[order], "y": y[order], "row": order}


def start(mistake, rank):
    """Return the parameters with which this rank starts."""
    seed = rank if mistake == "start" else 0
    width = WIDTH + rank if mistake == "model" else WIDTH
    w = np.random.default_rng(seed).normal(size=width)
    return {"w": w.astype(np.float32), "b": np.zeros((), np.float32)}


def rate_at(mistake, rank, step):
    """Return this rank's learning rate."""
    return RATE / 5 if mistake == "rate" and rank and step >= AT else RATE


def steps_of(mistake, rank):
    """Return the number of batches that this rank has."""
    return STEPS - 1 if mistake == "batches" and rank else STEPS


def batch_of(mistake, rank, step, x):
    """Return the samples of a batch, with a NaN where a rank is to skip this step."""
    if mistake in ("skipped", "if") and rank and step == AT:
        x = np.array(x)
        x[0, 0] = np.nan
    return x


def expected(mistake):
    """Return the numbers of the program without the mistake, by NumPy on one rank."""
    whole, params = data("", 0), start("", 0)
    w, b = params["w"].astype(float), float(params["b"])
    average, rows = np.zeros(COLUMNS), RANKS * ROWS
    for step in range(STEPS):
        if mistake in ("skipped", "if") and step == AT:
            continue
        first = step * rows % SAMPLES
        x, y = (whole[name][first : first + rows] for name in ("x", "y"))
        error = x[:, :WIDTH] @ w + b - y
        w = w - RATE * 2 * x[:, :WIDTH].T @ error / rows
        b = b - RATE * 2 * error.mean()
        average = DECAY * average + (1 - DECAY) * x.mean(0)
    return average if mistake == "average" else np.array([*w, b])


# The programs, of which each makes one mistake. They return numbers and the rows that were read.


def in_jaxmpi(mistake, rank):
    """Train by `jaxmpi.distributed`."""
    import jax
    import jax.numpy as jnp
    import optax

    import jaxmpi

    jaxmpi.init()
    tx = jaxmpi.distributed(optax.sgd(1.0))
    if mistake == "doubled":
        tx = optax.chain(jaxmpi.average_gradients(), tx)
    if mistake == "skipped":
        tx = optax.apply_if_finite(tx, 5)

    def loss_of(params, x, y):
        return jnp.mean((x[:, : len(params["w"])] @ params["w"] + params["b"] - y) ** 2)

    @jaxmpi.jit
    def train(params, state, average, x, y, rate):
        loss, grads = jax.value_and_grad(loss_of)(params, x, y)
        if mistake == "mean":
            updates = jax.tree.map(jnp.negative, grads)
        elif mistake == "sum":
            updates = jax.tree.map(jnp.negative, jaxmpi.tree_allreduce(grads, "sum"))
        else:
            updates, state = tx.update(grads, state, params)
        params = jax.tree.map(lambda p, u: p + rate * u, params, updates)
        if mistake == "average":
            average = DECAY * average + (1 - DECAY) * x.mean(0)
        return params, state, average, jaxmpi.tree_allreduce(loss)

    params = jax.tree.map(jnp.asarray, start(mistake, rank))
    state, average, rows, step = tx.init(params), jnp.zeros(COLUMNS), [], 0
    batches = jaxmpi.batches(data(mistake, rank), RANKS * ROWS)
    while step < steps_of(mistake, rank):
        for batch in batches:
            if step < steps_of(mistake, rank):
                x = batch_of(mistake, rank, step, batch["x"])
                rows += batch["row"].tolist()
                step += 1
                if mistake == "if" and np.isnan(loss_of(params, x, batch["y"])):
                    continue
                rate = rate_at(mistake, rank, step - 1)
                params, state, average, loss = train(params, state, average, x, batch["y"], rate)
                loss.block_until_ready()
    jaxmpi.average_metrics(loss)
    return [*average] if mistake == "average" else [*params["w"], params["b"]], rows


def in_torch(mistake, rank):
    """Train by torch's DistributedDataParallel."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    params = start(mistake, rank)
    model = torch.nn.Linear(len(params["w"]), 1)
    with torch.no_grad():
        model.weight[0] = torch.from_numpy(params["w"])
        model.bias.zero_()
    parallel = DistributedDataParallel(model)
    if mistake == "sum":

        def add(_, bucket):
            sent = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
            return sent.then(lambda future: future.value()[0])

        parallel.register_comm_hook(None, add)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=RATE)
    samples = TensorDataset(*map(torch.from_numpy, data(mistake, rank).values()))
    batches = DataLoader(samples, ROWS, sampler=DistributedSampler(samples, shuffle=False))
    average, rows, step = torch.zeros(COLUMNS), [], 0
    while step < steps_of(mistake, rank):
        for x, y, row in batches:
            if step < steps_of(mistake, rank):
                x = torch.from_numpy(batch_of(mistake, rank, step, x.numpy()))
                rows += row.tolist()
                optimizer.param_groups[0]["lr"] = rate_at(mistake, rank, step)
                step += 1
                forward = parallel.module if mistake == "mean" else parallel
                loss = ((forward(x[:, : len(params["w"])])[:, 0] - y) ** 2).mean()
                if mistake == "if" and loss.isnan():
                    continue
                optimizer.zero_grad()
                loss.backward()
                if mistake == "doubled":
                    for p in model.parameters():
                        dist.all_reduce(p.grad)
                        p.grad /= RANKS
                if mistake != "skipped" or all(p.grad.isfinite().all() for p in model.parameters()):
                    optimizer.step()
                if mistake == "average":
                    average = DECAY * average + (1 - DECAY) * x.mean(0)
                loss = loss.detach()
                dist.all_reduce(loss)
    dist.all_reduce(loss)
    dist.destroy_process_group()
    numbers = [*model.weight[0].tolist(), model.bias.item()]
    return average.tolist() if mistake == "average" else numbers, rows


def in_jax(mistake, rank):
    """Train by `jax.shard_map` with its defaults, over one device of each process."""
    import jax
    import jax.numpy as jnp
    from jax import lax
    from jax.experimental import multihost_utils
    from jax.sharding import NamedSharding, PartitionSpec

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    jax.distributed.initialize(address, RANKS, rank)
    mesh = jax.make_mesh((RANKS,), ("ranks",))
    equal, split = PartitionSpec(), PartitionSpec("ranks")

    def loss_of(params, x, y):
        return jnp.mean((x[:, : len(params["w"])] @ params["w"] + params["b"] - y) ** 2)

    def reduced(loss):
        if mistake == "mean":
            return loss
        return lax.psum(loss, "ranks") if mistake == "sum" else lax.pmean(loss, "ranks")

    def update(params, x, y, rate):
        grads = jax.grad(lambda params: reduced(loss_of(params, x, y)))(params)
        if mistake == "doubled":
            grads = lax.pmean(grads, "ranks")
        return jax.tree.map(lambda p, g: p - rate * g, params, grads)

    def train(params, average, x, y, rate):
        loss = loss_of(params, x, y)
        if mistake == "skipped":
            params = lax.cond(
                jnp.isfinite(loss), update, lambda params, *_: params, params, x, y, rate
            )
        else:
            params = update(params, x, y, rate)
        if mistake == "average":
            average = DECAY * average + (1 - DECAY) * x.mean(0)
        return params, average, lax.pmean(loss, "ranks")

    specs = equal, equal, split, split, equal
    train = jax.jit(jax.shard_map(train, mesh=mesh, in_specs=specs, out_specs=(equal,) * 3))
    whole = {name: column[rank::RANKS] for name, column in data(mistake, rank).items()}
    here = start(mistake, rank), np.zeros(COLUMNS, np.float32)
    params, average = jax.device_put(here, NamedSharding(mesh, equal))
    rows = []
    for step in range(steps_of(mistake, rank)):
        first = step * ROWS % (SAMPLES // RANKS)
        x, y, row = (whole[name][first : first + ROWS] for name in ("x", "y", "row"))
        x = batch_of(mistake, rank, step, x)
        rows += row.tolist()
        if mistake == "if" and np.isnan(x).any():
            continue
        x, y = (
            jax.make_array_from_process_local_data(NamedSharding(mesh, split), z) for z in (x, y)
        )
        params, average, loss = train(params, average, x, y, rate_at(mistake, rank, step))
        loss.block_until_ready()
    multihost_utils.process_allgather(np.asarray(loss.addressable_data(0)))
    params, average = jax.tree.map(lambda x: np.asarray(x.addressable_data(0)), (params, average))
    return [*average] if mistake == "average" else [*params["w"], params["b"]], rows


SYSTEMS = {"jaxmpi": in_jaxmpi, "torch DDP": in_torch, "plain JAX": in_jax}


def train_here(system, mistake):
    """Train on this rank, and print what happened as a line of JSON; fail with its error."""
    rank = int(
        os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ.get("PMI_RANK") or os.environ["RANK"]
    )
    facts = {"rank": rank, "error": "", "warnings": [], "numbers": [], "rows": []}
    warnings.showwarning = lambda text, *_, **__: facts["warnings"].append(str(text))
    failure = None
    try:
        numbers, rows = SYSTEMS[system](mistake, rank)
        facts["rows"] = rows[: SAMPLES // RANKS]  # of one epoch
        facts["numbers"] = [float(x) for x in numbers]
    except Exception as error:
        failure = error
        facts["error"] = str(error) or type(error).__name__
    print("FACTS " + json.dumps(facts), flush=True)
    if failure is not None:
        time.sleep(SECONDS_TO_FAIL)  # the other rank may be about to report its own
        raise failure


# Running a program, and naming what happened


class Run(NamedTuple):
    """What the processes of a program left.

    Attributes:
      facts: by rank, what `train_here` printed, or only an error for a process that crashed. A
        rank that did not end in time has none.
      output: everything that they printed.
    """

    facts: dict
    output: str


def run(system, mistake):
    """Run a program on all ranks."""
    program = [sys.executable, __file__, "--rank-of", system, mistake]
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    common = {
        **os.environ,
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(RANKS),
        "JAX_PLATFORMS": "cpu",
        "JAXMPI_BACKEND": "mpi",
        "JAXMPI_TRANSPORT": "native",
        "JAXMPI_STALL_SECONDS": "20",
        "JAXMPI_STALL_END_SECONDS": "30",
    }
    if system == "jaxmpi":
        starts = [([sys.executable, "-m", "jaxmpi", "run", "-n", str(RANKS), *program[1:]], common)]
    else:
        starts = [(program, {**common, "RANK": str(rank)}) for rank in range(RANKS)]
    processes = []
    for command, environ in starts:
        processes.append(
            subprocess.Popen(
                command,
                env=environ,
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        )
    facts, outputs, deadline = {}, [], time.monotonic() + LIMIT_SECONDS
    for rank, process in enumerate(processes):
        try:
            output, _ = process.communicate(timeout=max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
        else:
            # what a rank itself has printed replaces this below
            for ended in [rank] if len(processes) == RANKS else range(RANKS):
                facts[ended] = {"rank": ended, "error": crash(output)}
        outputs.append(output)
    output = "\n".join(outputs)
    for line in re.findall(r"FACTS (\{.*\})", output):
        of_rank = json.loads(line)
        facts[of_rank["rank"]] = of_rank
    return Run(facts, output)


def crash(output):
    """Return the reason that a process gave when it ended without facts."""
    reason = re.search(r"what\(\): +(.*)", output)
    return reason[1] if reason else "the process is ended"


def first_sentence(texts):
    """Return the first sentence of the error that says most, without the places of this machine."""
    texts = sorted(texts, key=lambda text: "closed by peer" in text or "is ended" in text)
    text = re.sub(r"\s+", " ", texts[0])
    text = re.sub(r"^.*RankMismatchError: ", "", text)
    text = re.sub(r"\[enforce fail [^\]]*\]( \S+ <= \S+ \d+ vs \d+\.)? ", "", text)
    text = re.sub(r"\[\S+\.cc:\d+\] | \[[\d.]+\]:\d+", "", text)
    sentence = re.match(r".+?[.!?](?=\s|$)|.+", text)[0].rstrip(".")
    sentence = sentence.split(", {")[0].replace("`", "'")
    if len(sentence) > TEXT:
        sentence = sentence[:TEXT].rsplit(" ", 1)[0] + " ..."
    return f"`{sentence}`"


def outcome(mistake, done):
    """Name what happened in a few words."""
    errors = [facts["error"] for facts in done.facts.values() if facts["error"]]
    if len(errors) == RANKS:
        return f"error on all ranks: {first_sentence(errors)}"
    reports = re.findall(r"jaxmpi: \[rank \d/\d on \S+\] (.*)", done.output)
    if ends := [text for text in reports if text.endswith("The job ends.")]:
        return f"error on all ranks: {first_sentence(ends)}"
    if errors:
        other = "hangs" if len(done.facts) < RANKS else "ends as if all were well"
        return f"error on one rank: {first_sentence(errors)}; the other {other}"
    if len(done.facts) < RANKS:
        return "hangs"
    warned = [text for text in reports if not text.startswith("stalled")]  # on a busy machine
    for facts in done.facts.values():
        warned += facts["warnings"]
    if warned:
        return f"warning: {first_sentence(warned)}"
    numbers = [np.array(done.facts[rank]["numbers"]) for rank in range(RANKS)]
    differ = np.abs(numbers[0] - numbers[1]).max()
    if not differ < 1e-4:
        return f"silent: ranks differ by {differ:.1g}"
    if not np.allclose(numbers[0], expected(mistake), rtol=1e-3, atol=1e-4):
        if mistake == "order":
            rows = {row for facts in done.facts.values() for row in facts["rows"]}
            return f"silent: {SAMPLES - len(rows)} of {SAMPLES} samples come twice"
        return "silent: wrong numbers"
    return "mended: rank 0's values" if mistake == "start" else "right numbers"


# The table


def read_table():
    """Return the cells of the table, by mistake and system."""
    cells, of_title = {}, {title: name for name, title in MISTAKES.items()}
    for line in PAGE.read_text().split(BEGIN)[1].split(END)[0].splitlines()[2:]:
        title, *row = re.split(r"(?<!\\)\|", line.strip("|\n "))
        for system, cell in zip(SYSTEMS, row, strict=True):
            cells[of_title[title.strip()], system] = cell.strip().replace("\\|", "|")
    return cells


def write_table(cells):
    """Write the cells into the table."""
    lines = [f"| the mistake | {' | '.join(SYSTEMS)} |", "|---|" + "---|" * len(SYSTEMS)]
    for mistake, title in MISTAKES.items():
        row = [cells.get((mistake, system), "-").replace("|", "\\|") for system in SYSTEMS]
        lines.append(f"| {title} | {' | '.join(row)} |")
    head, rest = PAGE.read_text().split(BEGIN)
    PAGE.write_text(head + BEGIN + "\n".join(lines) + "\n" + END + rest.split(END)[1])


def without_numbers(cell):
    """Return a cell in which no number stands."""
    return re.sub(r"\d[\d.e+-]*", "N", cell)


def main():
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare, and write nothing")
    parser.add_argument(
        "--show", choices=["none", *MISTAKES], action="append", help="only print this one"
    )
    parser.add_argument("--system", choices=SYSTEMS, action="append", help="only in this one")
    parser.add_argument("--rank-of", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank_of:
        return train_here(*args.rank_of)
    cells, changed = read_table(), []
    for system in args.system or SYSTEMS:
        for mistake in args.show or MISTAKES:
            done = run(system, mistake)
            if "No module named 'torch'" in done.output:
                print(f"{system}: torch is not installed")
                break
            found = outcome(mistake, done)
            print(f"{system}, {mistake}: {found}", flush=True)
            if args.show:
                print(done.output)
            if mistake == "none":
                continue
            if without_numbers(found) != without_numbers(cells.get((mistake, system), "")):
                changed.append(f"{system}, {mistake}")
            cells[mistake, system] = found
        if not (args.check or args.show):
            found_now = {key: cell for key, cell in cells.items() if key[1] == system}
            write_table({**read_table(), **found_now})  # other systems may run beside this one
    if args.check and changed:
        sys.exit(f"docs/tables/mistakes.md is not up to date: {'; '.join(changed)}")


if __name__ == "__main__":
    main()
