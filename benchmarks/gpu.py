"""Run all checks and benchmarks on a GPU: correctness, time, and behavior on failure.

    make gpu                 # on a machine with a GPU
    make gpu CPU=1           # the same on CPUs, with small arrays, to see that all of it runs
    python benchmarks/gpu.py --only collectives,staging --out build/gpu

Each part runs in processes of its own and takes some minutes at most; what it found is added to
OUT/gpu.json, and to the table OUT/gpu.md. Parts that have results are skipped; --again repeats
them. Exits with 1 where something was wrong, with 2 without a GPU, and with 3 where parts are left.
"""

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

HERE = Path(__file__).parent
PACKAGES = ("jax", "jaxlib", "flax", "optax", "mpi4py", "mpi4jax")
NO_GRAPHS = "--xla_gpu_enable_command_buffer="


@dataclass(frozen=True)
class Part:
    """A program of checks: what it shows, and how it is started."""

    title: str
    arguments: str
    ranks: int = 1
    environ: dict[str, str] = field(default_factory=dict)
    seconds: int = 120  # after which it is ended
    ends_with: str = ""  # what the job says as it fails, where it is to fail
    needs: str = ""  # what has to be installed
    mps: bool = False  # under NVIDIA's Multi-Process Service, where it is installed
    program: str = "gpu_checks.py"
    options: str = ""  # of `jaxmpi run`

    def command(self, folder):
        arguments = [str(HERE / self.program), *self.arguments.format(out=folder).split()]
        if self.ranks == 1:
            return [sys.executable, *arguments]
        run = [sys.executable, "-m", "jaxmpi", "run", "-n", str(self.ranks), *self.options.split()]
        return [*run, *arguments]


MPS = "nvidia-cuda-mps-control"
XLA = {"JAXMPI_BACKEND": "xla"}
SOON = {"JAXMPI_STALL_SECONDS": "3", "JAXMPI_STALL_END_SECONDS": "8"}
PARTS = {
    "collectives": Part("every collective, 2 ranks on one GPU", "collectives", 2),
    "collectives-3": Part("every collective, 3 ranks on one GPU", "collectives", 3),
    "collectives-xla": Part("every collective, XLA's at size 1", "collectives", environ=XLA),
    "steps-digits": Part("a small step, one rank", "steps digits"),
    "steps-gpt": Part("a GPT's step, one rank", "steps gpt"),
    "steps-resnet50": Part("ResNet-50's step in bfloat16, one rank", "steps resnet50", seconds=300),
    "xla-digits": Part("a small step, XLA's collectives at size 1", "steps digits", environ=XLA),
    "xla-gpt": Part("a GPT's step, XLA's collectives at size 1", "steps gpt", environ=XLA),
    "xla-resnet50": Part(
        "ResNet-50's step, XLA's collectives at size 1", "steps resnet50", environ=XLA, seconds=300
    ),
    "staging": Part("means over 2 ranks on one GPU", "staging", 2),
    "staging-4": Part("means over 4 ranks on one GPU", "staging", 4),
    "staging-mps": Part("the same 2 ranks under CUDA MPS", "staging", 2, needs=MPS, mps=True),
    "staging-one-thread": Part(
        "the same 2 ranks, one thread each", "staging", 2, {"JAXMPI_TUNE": "threads=1"}
    ),
    "shared-gpt-mps": Part(
        "a GPT's step, 2 ranks on one GPU under CUDA MPS", "steps gpt", 2, needs=MPS, mps=True
    ),
    "staging-mpi4jax": Part(
        "means over 2 ranks on one GPU, on mpi4jax",
        "staging",
        2,
        {"JAXMPI_TRANSPORT": "mpi4jax"},
        needs="mpi4jax",
    ),
    "shared-gpt": Part("a GPT's step, 2 ranks on one GPU", "steps gpt", 2),
    "shared-gpt-no-graphs": Part(
        "the same without command buffers", "steps gpt", 2, {"XLA_FLAGS": NO_GRAPHS}
    ),
    "no-graphs": Part(
        "a small step without command buffers, one rank",
        "steps digits",
        environ={"XLA_FLAGS": NO_GRAPHS},
    ),
    "overlap": Part("messages beside the GPU's computation, 2 ranks", "overlap", 2),
    "checkpoint": Part("a checkpoint of 2 ranks", "checkpoint {out}", 2),
    "killed": Part("a rank is killed", "killed", 2, seconds=60, ends_with="signal 9"),
    "stalled": Part("a rank stops", "stalled", 2, SOON, seconds=90, ends_with="missing: rank 1"),
    "out-of-memory": Part(
        "a rank has too little memory",
        "out_of_memory",
        2,
        seconds=90,
        ends_with="RESOURCE_EXHAUSTED",
    ),
    "profile": Part("where the time of a mean goes", "profile {out}", 2),
}


def carry_out(part, environ):
    """Run a part of the checks; return its results."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        flags = " ".join(filter(None, (environ.get("XLA_FLAGS"), part.environ.get("XLA_FLAGS"))))
        own = environ | part.environ | ({"XLA_FLAGS": flags} if flags else {})
        if part.mps:
            own |= {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
            subprocess.run([MPS, "-d"], env=own)
        try:
            code, output = _run(part.command(folder), part.seconds, own)
        finally:
            if part.mps:
                subprocess.run(
                    [MPS], env=own, input="quit\n", text=True, capture_output=True, timeout=30
                )
    seconds, ended = round(time.monotonic() - start, 1), time.time()
    results = []
    for line in output.splitlines():
        if "RESULT {" in line:
            results.append(json.loads(line.split("RESULT ", 1)[1]))
    if code is None:
        status = f"wrong: it had not ended after {part.seconds} s"
    elif part.ends_with:
        as_expected = code != 0 and part.ends_with in output
        said = f"wrong: exit code {code}, and the expected message is missing"
        status = f"ended as expected after {seconds:g} s" if as_expected else said
        # where the program says when its fault came
        if faults := re.findall(r"now (\d+\.\d+)", output):
            since = round(ended - max(map(float, faults)), 1)
            results.append(
                {
                    "what": "from the fault to the end of the job",
                    "value": since,
                    "unit": "s",
                    "right": as_expected,
                    "note": part.ends_with,
                }
            )
    elif code != 0:
        status = f"wrong: exit code {code}"
    else:
        wrong = [result["what"] for result in results if not result["right"]]
        status = (
            f"wrong: {', '.join(wrong)}" if wrong else "right" if results else "wrong: no results"
        )
    said = output[-4000:] if status.startswith("wrong") else ""
    return {
        "title": part.title,
        "status": status,
        "seconds": seconds,
        "results": results,
        "said": said,
    }


def _installed(name):
    return (
        subprocess.run([sys.executable, "-c", f"import {name}"], capture_output=True).returncode
        == 0
    )


def _run(command, seconds, environ):
    """Run a command; return its exit code, None if it took too long, and its output.

    It is then asked to end first: `jaxmpi run` ends its ranks and its MPS daemon.
    """
    with subprocess.Popen(
        command,
        env=environ,
        text=True,
        errors="replace",
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    ) as process:
        try:
            output, _ = process.communicate(timeout=seconds)
            return process.returncode, output
        except subprocess.TimeoutExpired:
            process.terminate()
        try:
            output, _ = process.communicate(timeout=30)
        except subprocess.TimeoutExpired:
            process.kill()
            output, _ = process.communicate()
        return None, output


def table(parts):
    """Format all results as a Markdown table."""
    lines = []
    for about in dict.fromkeys(
        (part["device"], part["software"], part["date"]) for part in parts.values()
    ):
        lines += [f"{about[0]}; {about[1]}; {about[2]}.", "", "| what | value | |", "|---|---|---|"]
        for part in parts.values():
            if (part["device"], part["software"], part["date"]) != about:
                continue
            lines.append(f"| **{part['title']}** | {part['status']} | {part['seconds']:g} s |")
            for result in part["results"]:
                value = f"{result['value']} {result['unit']}"
                lines.append(f"| {result['what']} | {value} | {result['note']} |")
        lines.append("")
    return "\n".join(lines)


def card(environ):
    """Return the name of JAX's GPU, or of the CPU."""
    code = "import jax; d = jax.devices()[0]; print(d.platform, d.device_kind, sep=', ')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environ)
    said = done.stdout.strip().splitlines()
    if not said:
        sys.exit(f"gpu.py: JAX does not start here: {done.stderr.strip().splitlines()[-1]}")
    driver = (
        shutil.which("nvidia-smi")
        and subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
            capture_output=True,
            text=True,
        ).stdout.strip()
    )
    return said[-1] + (f", driver {driver}" if driver and not said[-1].startswith("cpu") else "")


def software():
    versions = []
    for name in PACKAGES:
        try:
            versions.append(f"{name} {version(name)}")
        except ImportError:
            continue
    return f"Python {platform.python_version()}, {', '.join(versions)}, {os.cpu_count()} cores"


def run_parts(wanted, parts, path, environ, here, options):
    """Run the parts that have no results yet, and write the results after each.

    Args:
      wanted: {name: part}.
      parts: {name: results}, to which those of the parts are added.
      path: the JSON file of `parts`.
      environ: the environment of every part.
      here: the device and the software, which are noted with the results.
      options: `again` repeats parts that have results; `seconds` is when no more are begun.
    """
    until = time.monotonic() + options.seconds
    for name, part in wanted.items():
        if (name in parts and not options.again) or time.monotonic() > until:
            continue
        if part.needs and not shutil.which(part.needs) and not _installed(part.needs):
            print(f"   0.0 s  {name}: not run, as {part.needs} is not installed", flush=True)
            continue
        found = parts[name] = carry_out(part, environ) | here | {"date": time.strftime("%Y-%m-%d")}
        path.write_text(json.dumps(parts, indent=1) + "\n")
        print(f"{found['seconds']:6.1f} s  {name}: {found['status']}", flush=True)
        for result in found["results"]:
            print(
                f"          {result['what']}: {result['value']} {result['unit']} {result['note']}",
                flush=True,
            )
        if found["said"]:
            print(found["said"], flush=True)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, default=Path("build/gpu"), help="the folder of gpu.json and gpu.md"
    )
    parser.add_argument("--only", help="parts, with commas between: " + ", ".join(PARTS))
    parser.add_argument("--again", action="store_true", help="run what is there, too")
    parser.add_argument("--seconds", type=float, default=600, help="begin no part after so long")
    parser.add_argument("--cpu", action="store_true", help="on CPUs, with small arrays")
    options = parser.parse_args()
    names = options.only.split(",") if options.only else list(PARTS)
    if unknown := [name for name in names if name not in PARTS]:
        parser.error(f"no part is called {unknown[0]}; there are {', '.join(PARTS)}")

    environ = {**os.environ, "PYTHONUNBUFFERED": "1"}
    if options.cpu:
        # compiles twice as fast
        environ |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_backend_optimization_level=0"}
    device = card(environ)
    if device.startswith("cpu") and not options.cpu:
        print(
            "gpu.py: JAX finds no GPU here. Install jax[cuda13] where there is one, or try --cpu.",
            file=sys.stderr,
        )
        sys.exit(2)
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "gpu.json"
    parts = json.loads(path.read_text()) if path.exists() else {}
    here = {"device": device, "software": software()}
    run_parts({name: PARTS[name] for name in names}, parts, path, environ, here, options)
    (options.out / "gpu.md").write_text(table(parts) + "\n")
    left = [name for name in names if name not in parts and not PARTS[name].needs]
    print(f"\n{len(parts)} parts in {path}" + (f"; not run yet: {', '.join(left)}" if left else ""))
    wrong = any(parts[name]["status"].startswith("wrong") for name in names if name in parts)
    sys.exit(1 if wrong else 3 if left else 0)


if __name__ == "__main__":
    main()
