"""Time of a mean on 1, 2, 4 and 8 ranks, beside what the bytes alone would take.

    python benchmarks/scaling.py

With α the time of an empty message and β that of a byte, both from two ranks, a mean of B bytes
should take α + β · B · 2 (n-1)/n on n ranks with a core each. With more ranks than cores, the cores
do the work of all ranks: that is n/cores times as much. Exits with 1 where it takes over 3 times as
long.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from common import Report, parser, save

SIZES = {"1 KB": 256, "1 MB": 2**18, "16 MB": 2**22, "100 MB": 25 * 2**20}
LIMIT = 3.0
arguments = parser(__doc__)
arguments.add_argument(
    "--ranks", type=int, nargs="*", default=[1, 2, 4, 8], help="numbers of ranks"
)
arguments.add_argument("--worker", action="store_true", help="be one of the ranks")
args = arguments.parse_args()


def work():
    import peers  # which starts MPI

    report = Report("scaling", args)
    for case, count in SIZES.items():
        times = report.measure(
            case, {"jaxmpi": peers.jaxmpi_mean([(count,)], np.float32)}, seconds=2.0
        )
        report.rows[-1]["values"] = np.median(times["jaxmpi"], axis=1).tolist()
    report.finish()


def launch(ranks, folder):
    words = [
        sys.executable,
        "-m",
        "jaxmpi",
        "run",
        "-n",
        str(ranks),
        __file__,
        "--worker",
        "--out",
        folder,
    ]
    words += ["--quick"] * args.quick + ["--rounds", str(args.rounds)]
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
    return json.loads(Path(folder, "scaling.json").read_text())


def expected(median_us, case, ranks, cores):
    """Predict the µs for the bytes of all ranks on these cores from those of two ranks."""
    alpha, two = median_us[2]["1 KB"], median_us[2][case]
    crowd = max(1.0, ranks / cores) / max(1.0, 2 / cores)
    return (alpha + max(0.0, two - alpha) * 2 * (ranks - 1) / ranks) * crowd


def main():
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for ranks in sorted({2, *args.ranks}):
            found[ranks] = launch(ranks, folder)
            print(found[ranks]["machine"])
    median_us = {}  # {ranks: {case: µs}}
    for ranks, each in found.items():
        median_us[ranks] = {row["case"]: row["median_us"] for row in each["rows"]}
    cores, missed, rows = len(os.sched_getaffinity(0)), 0, []
    for ranks in args.ranks:
        for case, count in SIZES.items():
            sent = 4 * count * 2 * (ranks - 1) / ranks
            line = (
                f"{ranks} ranks  {case:8} sent per rank {sent / 1e6:8.3f} MB  "
                f"median {median_us[ranks][case]:11.1f} µs"
            )
            if ranks > 2:
                ratio = median_us[ranks][case] / expected(median_us, case, ranks, cores)
                judged = 4 * count >= 2**20  # below, the scheduler's turns are what takes the time
                holds = ratio <= LIMIT or not judged
                missed += not holds
                line += f"  {ratio:5.2f} times that of its bytes" + (
                    f", at most {LIMIT:g}: {'holds' if holds else 'MISSED'}" if judged else ""
                )
            rows.append(line)
    print("\n".join(rows))

    def draw(axes):
        for case in SIZES:
            (line,) = axes.plot(
                args.ranks, [median_us[n][case] for n in args.ranks], marker="o", label=case
            )
            many = [n for n in args.ranks if n > 1]
            axes.plot(
                many,
                [expected(median_us, case, n, cores) for n in many],
                "--",
                color=line.get_color(),
            )
        axes.set(
            xticks=args.ranks,
            yscale="log",
            xlabel=f"ranks on {cores} cores",
            ylabel="µs for the mean; dashed: what its bytes should take",
        )

    if args.out:
        save(
            args.out,
            "scaling",
            {str(n): each for n, each in found.items()},
            "the mean of one array",
            draw,
        )
    sys.exit(int(missed > 0 and not args.quick))


work() if args.worker else main()
