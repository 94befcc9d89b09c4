"""Mean of arrays over ranks on several hosts, beside the cable's limit and other libraries.

    python benchmarks/hosts.py [--only "2 hosts"] [--launches 3]

tests/network.sh makes the hosts of this one: network namespaces behind a switch with a delay, a
rate and a loss. It needs root, and the machine alone: the switch and the ranks share its cores.
With p hosts and B bytes, no algorithm is faster than the cable's limit, 2 (p-1)/p · B / rate. Each
number is the median of several launches. Exits with 1 when a bound is missed. torch is a contender
where it is installed.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import ml_dtypes
import numpy as np
from common import Report, bars, parser, save
from models import resnet50

import jaxmpi

HERE = Path(__file__).resolve().parent
COORDINATOR = "10.77.0.1"  # the first host


class Network(NamedTuple):
    """Hosts and the cables between them."""

    hosts: int
    ranks: int  # of each
    delay_ms: float
    mbit: float
    loss: float
    megabytes: float
    at_most: float | None = None  # times the cable's limit

    def __str__(self):
        lost = f", {self.loss:.1%} lost" if self.loss else ""
        return (
            f"{self.hosts} hosts x {self.ranks}, {self.delay_ms:g} ms, {self.mbit:g} Mbit/s{lost}"
        )

    def limit_us(self, megabytes):
        return 2 * (self.hosts - 1) / self.hosts * megabytes * 8e6 / self.mbit


NETWORKS = [
    Network(2, 1, 0.1, 1000, 0, 50, 1.25),
    Network(2, 1, 1, 1000, 0, 50, 1.3),
    Network(2, 1, 10, 1000, 0, 50, 1.7),
    Network(2, 1, 50, 1000, 0, 50),
    Network(2, 1, 1, 100, 0, 10, 1.3),
    Network(2, 1, 1, 1000, 0.005, 20),
    Network(2, 2, 1, 1000, 0, 50, 1.4),
    Network(3, 1, 1, 500, 0, 20, 1.4),
    Network(4, 1, 1, 500, 0, 20, 1.4),
    Network(2, 1, 0.1, 200, 0, 20, 1.2),
]
# where codecs are measured, and int8's time by that of the cable for its bytes
INT8_BOUNDS = {NETWORKS[0]: None, NETWORKS[-1]: 1.2}
# the bytes that are sent, by those of float32
SHARES = {
    "16 arrays": 1,
    "16 arrays bf16": 1 / 2,
    "16 arrays, codec bf16": 1 / 2,
    "16 arrays, codec int8": (1 + 4 / 256) / 4,
}
# jaxmpi's time by torch gloo's, on the first networks, by delay
TORCH_BOUNDS = {0.1: 1.05, 1: 1.0, 10: 0.8}

arguments = parser(__doc__)
arguments.add_argument("--only", default="", help="only networks whose name has this in it")
arguments.add_argument("--launches", type=int, default=3, help="of each network")
arguments.add_argument("--alone", action="store_true", help="only jaxmpi, without its peers")
arguments.add_argument("--worker", type=int, help="be one of the ranks of this network")
args = arguments.parse_args()


def work(network):
    """Measure the contenders in turns, in one launch."""
    import peers  # which starts MPI

    if not args.alone:
        peers.start_jax(COORDINATOR)
    report = Report("hosts", args)
    torch = None if args.alone else peers.start_torch(COORDINATOR)
    others = {"mpi4jax per leaf": peers.mpi4jax_per_leaf, "JAX gloo": peers.jax_gloo}
    flat = {"MPI_Allreduce, one array": peers.mpi4py_in_place}
    if torch:
        flat["torch gloo, one array"] = peers.torch_gloo(torch)

    def measure(case, shapes, dtype=np.float32, *, with_peers=True, more=()):
        calls = {"jaxmpi": peers.jaxmpi_mean(shapes, dtype)}
        total = sum(int(np.prod(shape)) for shape in shapes)
        if with_peers and not args.alone:
            calls |= {name: peer([(total,)], dtype) for name, peer in (flat | dict(more)).items()}
            calls |= {name: peer(shapes, dtype) for name, peer in others.items()}
        report.measure(case, calls, seconds=3.0)

    items = int(network.megabytes * 250_000)
    measure("1 KB", [(256,)], more={"jax.jit(x + 1), then MPI": peers.mpi4py_after_jit})
    measure("16 arrays", [(items // 16,)] * 16)
    measure("16 arrays bf16", [(items // 16,)] * 16, ml_dtypes.bfloat16, with_peers=False)
    if network in INT8_BOUNDS:
        for name, codec in {"bf16": jaxmpi.codecs.bf16(), "int8": jaxmpi.codecs.int8()}.items():
            mean = peers.codec_mean(codec, [(items // 16,)] * 16)
            report.measure(f"16 arrays, codec {name}", {"jaxmpi": mean}, seconds=3.0)
    if network == NETWORKS[1]:
        resnet = resnet50()
        measure("ResNet-50", resnet, with_peers=False)
        measure(
            "ResNet-50 as one array",
            [(sum(int(np.prod(shape)) for shape in resnet),)],
            with_peers=False,
        )
    report.finish()


def launch(number, folder):
    network = NETWORKS[number]
    words = [
        network.hosts,
        network.ranks,
        network.delay_ms,
        network.mbit,
        network.loss,
        __file__,
        "--worker",
        number,
    ]
    words += ["--out", folder, "--rounds", 3, *["--quick"] * args.quick, *["--alone"] * args.alone]
    environ = {"PYTHON": sys.executable, "JAXMPI_HOST": COORDINATOR, "MPLBACKEND": "Agg"}
    subprocess.run(
        [str(HERE.parent / "tests" / "network.sh"), *map(str, words)],
        check=True,
        env={**os.environ, **environ},
        stdout=None if os.environ.get("BENCH_VERBOSE") else subprocess.DEVNULL,
    )
    found = json.loads(Path(folder, "hosts.json").read_text())
    return found["machine"], {
        (row["case"], row["contender"]): row["median_us"] for row in found["rows"]
    }


def ratios(network, us):
    """Yield (case, contenders, ratio, bound) of a network."""
    for case, name in sorted(us):
        if name == "jaxmpi" and case in SHARES:
            limit_us = network.limit_us(network.megabytes * SHARES[case])
            bound = network.at_most if case == "16 arrays" else None
            if case == "16 arrays, codec int8":
                bound = INT8_BOUNDS[network]
            yield case, "jaxmpi / the cable's limit", us[case, name] / limit_us, bound
        elif name != "jaxmpi":
            bound = 1.2 if case == "1 KB" and name.startswith("MPI") else None
            if case == "16 arrays" and name.startswith("torch") and network in NETWORKS[:3]:
                bound = TORCH_BOUNDS[network.delay_ms]
            yield case, f"jaxmpi / {name}", us[case, "jaxmpi"] / us[case, name], bound
    yield (
        "16 arrays",
        "bf16 / float32",
        us["16 arrays bf16", "jaxmpi"] / us["16 arrays", "jaxmpi"],
        0.6,
    )
    if network in INT8_BOUNDS:
        bf16, int8 = (us[f"16 arrays, codec {name}", "jaxmpi"] for name in ("bf16", "int8"))
        yield "16 arrays", "codec int8 / codec bf16", int8 / bf16, 1.0
    if ("ResNet-50", "jaxmpi") in us:
        one = us["ResNet-50 as one array", "jaxmpi"]
        yield "ResNet-50", "161 arrays / one", us["ResNet-50", "jaxmpi"] / one, 1.05


def main():
    rows, missed = [], 0
    for number, network in enumerate(NETWORKS):
        if args.only not in str(network):
            continue
        times = defaultdict(list)
        with tempfile.TemporaryDirectory() as folder:
            for _ in range(1 if args.quick else args.launches):
                machine, found = launch(number, folder)
                for key, median_us in found.items():
                    times[key].append(median_us)
        us = {key: float(np.median(values)) for key, values in times.items()}
        print(f"{network}: {machine}")
        for (case, name), values in times.items():
            low, median, high = (f(values) / 1e3 for f in (min, np.median, max))
            print(f"  {case:24} {name:26} median {median:9.2f} ms, {low:.2f} to {high:.2f}")
            rows.append(
                {"case": f"{network}: {case}", "contender": name, "median_us": us[case, name]}
            )
        for case, name, value, at_most in ratios(network, us):
            late = at_most is not None and value > at_most
            missed += late
            bound = "no bound"
            if at_most is not None:
                bound = f"at most {at_most:g}: {'MISSED' if late else 'holds'}"
            print(f"  {case:24} {name:40} {value:6.2f}, {bound}", flush=True)
    if args.out:
        found = {"machine": machine, "rows": rows}
        save(args.out, "hosts", found, "hosts", lambda axes: bars(axes, rows))
    print(f"hosts: {missed} ratios missed their bound")
    sys.exit(int(bool(missed) and not args.quick))


if args.worker is None:
    main()
else:
    work(NETWORKS[args.worker])
