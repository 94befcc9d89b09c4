"""Streaming DiLoCo between hosts: its loss beside a mean in every step, and the time spent waiting.

    python benchmarks/diloco.py [--mbit 100] [--delay-ms 50] [--launches 3]

examples/gpt.py on two ranks of this machine, with a mean in every step; then on two hosts that
tests/network.sh makes of it, which needs root, with a fragment of the parameters at a time, in 8
bits. Both train on the same samples. Exits with 1 when a bound is missed.
"""

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
MODEL = ["--layers", "2", "--width", "64", "--length", "64", "--megabytes", "4", "--sample", "0"]
STREAMED = ["--local-every", "50", "--diloco", "--fragments", "3", "--delay", "20", "--int8"]
LOSS, WAITING = 1.05, 0.05  # of that of every step together, and of the time, at most

arguments = argparse.ArgumentParser(
    description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
)
arguments.add_argument("--steps", type=int, default=6000, help="of 32 windows")
arguments.add_argument("--mbit", type=float, default=100, help="rate of each cable, in Mbit/s")
arguments.add_argument("--delay-ms", type=float, default=50, help="one way")
arguments.add_argument("--launches", type=int, default=3, help="between hosts")
args = arguments.parse_args()


def trained(*command):
    """Run examples/gpt.py; return held-out loss, bytes per second, share of time in collectives.

    The numbers come from the last lines that the example prints.
    """
    example = [HERE.parent / "examples" / "gpt.py", *MODEL, "--steps", args.steps]
    environ = {**os.environ, "PYTHON": sys.executable}
    before, after = command
    done = subprocess.run(
        [*map(str, (*before, *example, *after))],
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    found = re.findall(
        r"held out (\S+) nats/byte  bytes: (\S+) per second, .*?, (\d+)% of the time", done.stdout
    )
    if done.returncode or not found:
        sys.exit(f"diloco: the example failed\n{done.stdout}")
    speed = [float(rate) for _, rate, _ in found[1:]]  # the first is that of compiling, too
    share = [float(percent) / 100 for *_, percent in found[1:]]
    return float(found[-1][0]), sum(speed) / len(speed), sum(share) / len(share)


def main():
    together, speed, _ = trained([Path(sys.executable).with_name("jaxmpi"), "run", "-n", 2], [])
    found = f"{together:.4f} nats/byte held out, {speed:.0f} bytes/s"
    print(f"a mean in every step, on one host: {found}", flush=True)
    missed = 0
    for launch in range(args.launches):
        network = [HERE.parent / "tests" / "network.sh", 2, 1, args.delay_ms, args.mbit, 0]
        loss, speed, waiting = trained(network, STREAMED)
        ok = loss <= LOSS * together and waiting <= WAITING
        missed += not ok
        where = f"{' '.join(STREAMED)}, on two hosts, {args.mbit:g} Mbit/s, {args.delay_ms:g} ms"
        found = f"{loss:.4f} nats/byte ({loss / together:.3f} of that, bound {LOSS})"
        rate = f"{speed:.0f} bytes/s"
        waited = f"{waiting:.1%} of the time in collectives (bound {WAITING:.0%})"
        missed_mark = "" if ok else "  MISSED"
        print(f"launch {launch}: {where}: {found}, {rate}, {waited}{missed_mark}", flush=True)
    print(f"diloco: {missed} of {args.launches} launches missed a bound")
    sys.exit(bool(missed))


main()
