"""Plot the losses and the speed of runs of examples/imagenet.py from their tables.

python examples/plot_logs.py runs/imagenet runs/other --out curves.png
"""

import argparse
from pathlib import Path

import matplotlib
import numpy as np

matplotlib.use("Agg")  # no screen
import matplotlib.pyplot as plt

parser = argparse.ArgumentParser(
    description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
)
parser.add_argument("runs", type=Path, nargs="+", metavar="DIR", help="the --out of a run")
parser.add_argument(
    "--out", type=Path, default=Path("curves.png"), help="the picture, .png, .svg or .pdf"
)
args = parser.parse_args()


def table(path):
    """Read the columns of a CSV file by name; NaN where a field is empty."""
    if not path.exists():
        raise SystemExit(
            f"There is no {path}. A run of examples/imagenet.py leaves it in its --out."
        )
    return np.atleast_1d(np.genfromtxt(path, delimiter=",", names=True))


figure, (losses, speed, share) = plt.subplots(
    3, 1, figsize=(8, 9), sharex=True, layout="constrained"
)
for run in args.runs:
    train, held_out = table(run / "train.csv"), table(run / "eval.csv")
    (line,) = losses.plot(
        train["step"], train["loss"], alpha=0.6, label=f"{run.name}, training, smoothed labels"
    )
    losses.plot(
        held_out["step"],
        held_out["loss"],
        "o-",
        color=line.get_color(),
        label=f"{run.name}, evaluation",
    )
    speed.plot(train["step"], train["per_second"], label=run.name)
    share.plot(train["step"], 100 * train["communication"], label=run.name)
losses.set_ylabel("loss")
losses.legend()
speed.set(ylabel="images per second", ylim=(0, None))
share.set(xlabel="step", ylabel="% of the time in collectives", ylim=(0, 100))
figure.savefig(args.out, dpi=150)
print(f"{args.out}: {len(args.runs)} runs")
