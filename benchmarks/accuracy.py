"""Test accuracy of examples/digits.py, and bytes sent, for each way to communicate less.

This makes the table of docs/performance.md.

    python benchmarks/accuracy.py

Trains on 2 ranks with each option and seed. Exits with 1 where the mean accuracy falls short of the
plain one by more than half a percent. It takes about 12 seconds a run.
"""

import argparse
import re
import subprocess
import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parent.parent
LIMIT = 0.5  # percent
OPTIONS = (
    "",
    "--codec bf16",
    "--codec f16",
    "--codec int8",
    "--codec powersgd",
    "--codec topk",
    "--sharded",
    "--accumulate 2",
    "--local-every 8",
    "--local-every 4 --diloco",
    "--local-every 8 --diloco",
)

parser = argparse.ArgumentParser(
    description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
)
note = "options to compare, the baseline first; write a single one as --options=--sharded"
parser.add_argument("--options", nargs="+", default=OPTIONS, help=note)
parser.add_argument("--seeds", type=int, default=5, help="of each, from 0")
parser.add_argument("--ranks", type=int, default=2)
args = parser.parse_args()


def train(options: str, seed: int) -> tuple[float, float]:
    """Return the test accuracy in percent, and the bytes that a rank sends for a batch."""
    program = ["examples/digits.py", "--seed", str(seed), "--explain", *options.split()]
    command = [sys.executable, "-m", "jaxmpi", "run", "-n", str(args.ranks), *program]
    done = subprocess.run(
        command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    if done.returncode:
        sys.exit(f"accuracy.py: {' '.join(command)} ended with {done.returncode}:\n{done.stdout}")
    output = done.stdout
    (accuracy,) = re.findall(r"^test accuracy (\S+) %", output, re.MULTILINE)
    every = int((re.findall(r"--(?:local-every|accumulate) (\d+)", options) or [1])[0])
    sent = 0.0
    for line in re.findall(r"^  (?:all|reduce).*", output, re.MULTILINE):  # the table of `explain`
        number, unit = re.findall(r"([\d.]+) (B|KB|MB)\b", line)[0]
        sent += (
            float(number) * {"B": 1, "KB": 1e3, "MB": 1e6}[unit] / (every if "cond" in line else 1)
        )
    return float(accuracy), sent


plain, missed = None, 0
for options in args.options:
    accuracies, sent = zip(*(train(options, seed) for seed in range(args.seeds)), strict=True)
    mean = np.mean(accuracies)
    plain = mean if plain is None else plain
    missed += mean < plain - LIMIT
    each = " ".join(f"{x:.2f}" for x in accuracies)
    print(
        f"{options or 'plain':26} {mean:6.2f} % {mean - plain:+5.2f}  {sent[0] / 1e3:5.0f} KB   "
        f"({each})",
        flush=True,
    )
sys.exit(int(missed > 0))
