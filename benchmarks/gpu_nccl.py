"""Ranks that share a GPU over NCCL, under CUDA MPS: right numbers, times, and ends after faults.

    make gpu PART=nccl NCCL=nvidia_nccl_cu13-2.30.7-py3-none-manylinux_2_18_x86_64.whl
    make gpu PART=nccl PARTS="a d-nccl"    # the parts that begin with a, and one more
    make gpu PART=nccl CPU=1               # the same on CPUs, with small arrays and without MPS

NCCL takes several ranks on a GPU from 2.30 on. --nccl names a wheel of it, a folder with
libnccl.so.2 somewhere in it, or a folder with the pieces of a wheel (NAME.whl.00, NAME.whl.01);
without it the installed one is used. `jaxmpi run --mps` starts an MPS daemon for each part, in a
folder of its own, and stops it.

Each part runs in processes of its own, for at most 100 s on a GPU. What it found is added to
OUT/nccl.json and the table OUT/nccl.md. Parts that have results are skipped; --again repeats them.
Exits with 1 where something was wrong, with 2 without a GPU, and with 3 where parts are left.
"""

import argparse
import json
import os
import shutil
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import gpu
from gpu import Part

LIBRARY = "libnccl.so.2"
FAULTS = Path(__file__).parents[1] / "tests/job/monitor/fault_script.py"
MAX_SECONDS = 100  # of a part on a GPU
# On CPUs each would take a minute, to compile what another part has compiled for other ranks.
LEFT_OUT_ON_CPUS = ("c-resnet50-staged", "c-resnet50-one", "c-gpt-one")
LAX_PARTS = 5  # of the 190 cases: each is compiled by itself
MODELS = ("digits", "gpt", "resnet50")

XLA = {"JAXMPI_BACKEND": "xla", "NCCL_DEBUG": "WARN"}
MPI = {"JAXMPI_BACKEND": "mpi"}
EXACT = XLA | {"JAX_DEFAULT_MATMUL_PRECISION": "highest"}  # no TF32
SOON = XLA | {"JAXMPI_STALL_SECONDS": "3", "JAXMPI_STALL_END_SECONDS": "8"}
SAME_BITS = XLA | {"XLA_FLAGS": "--xla_gpu_deterministic_ops=true"}


def all_parts():
    """Return {name: part}; a name begins with the letter of its kind."""

    def checks(title, arguments, environ=XLA, ranks=2, **other):
        arguments = f"gpu_nccl_checks.py {arguments}"
        return Part(title, arguments, ranks, environ, program="with_nccl.py", mps=True, **other)

    def other(title, arguments, environ, **more):
        return Part(title, arguments, 2, environ, program="with_nccl.py", mps=True, **more)

    parts = {
        "a-start": checks("2 ranks on one GPU start over NCCL", "start"),
        "a-start-3": checks("3 ranks on one GPU start over NCCL", "start", ranks=3),
        "a-collectives": other(
            "every collective, 2 ranks over NCCL", "gpu_checks.py collectives", XLA
        ),
    }
    for part in range(LAX_PARTS):
        parts[f"b-lax-{part + 1}"] = checks(
            f"JAX's cases of collectives, {part + 1} of {LAX_PARTS}",
            f"cases_of_lax {part} {LAX_PARTS}",
            EXACT,
        )
    for part in range(2):
        parts[f"b-axis-{part + 1}"] = checks(
            f"cases over an axis, {part + 1} of 2", f"cases_of_axis {part} 2", EXACT
        )
    parts |= {
        "b-laws": checks("n ranks train as one", "laws of adamw", EXACT),
        "b-fsdp": checks("n ranks train as one, fully_shard", "laws fully adamw", EXACT),
        "b-groups": checks("groups and axes of ranks", "groups", EXACT, needs="pytest"),
    }
    for model in MODELS:
        parts[f"c-{model}"] = checks(f"a step of {model}, 2 ranks over NCCL", f"steps {model}")
        parts[f"c-{model}-staged"] = checks(
            f"a step of {model}, the same 2 ranks staged", f"steps {model}", MPI
        )
        parts[f"c-{model}-one"] = checks(f"a step of {model}, one rank", f"steps {model}", {}, 1)
    parts |= {
        "d-nccl": checks("means over NCCL", "means"),
        "d-staged-mps": checks("means staged, under MPS", "means", MPI),
        "d-staged": replace(checks("means staged, without MPS", "means", MPI), mps=False),
    }
    for kind, ends_with in {
        "raise": "RuntimeError: a fault on purpose",
        "kill": "was killed by signal 9",
        "stop": "does not answer: it is stopped",
        "shape": "RankMismatchError",
    }.items():
        parts[f"e-{kind}"] = other(
            f"a fault of one of 2 ranks: {kind}",
            f"{FAULTS} jit {kind} {{out}}/saved",
            SOON,
            ends_with=ends_with,
        )
    parts |= {
        "f-bits": checks("deterministic kernels, 2 ranks over NCCL", "bits", SAME_BITS),
        "f-bits-again": checks("the same in another job", "bits", SAME_BITS),
    }
    return parts


def on_this_machine(part, cpu):
    """Return a part with what it needs here: MPS by `jaxmpi run` on a GPU, time on CPUs."""
    if cpu:
        return replace(part, mps=False, seconds=3 * MAX_SECONDS)
    # `jaxmpi run` starts MPS itself; below half of the multiprocessors for each of two ranks
    environ = dict(part.environ)
    if part.mps and part.ranks > 1:
        environ.setdefault("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", str(90 // part.ranks))
        return replace(part, mps=False, options="--mps", environ=environ, seconds=MAX_SECONDS)
    return replace(part, mps=False, seconds=MAX_SECONDS)


def library_in(given, out):
    """Return the path of the NCCL in a wheel, a folder, or a folder with pieces of a wheel."""
    if not given.exists():
        sys.exit(f"gpu_nccl.py: there is no {given}. Give --nccl a wheel of nvidia-nccl-cu13.")
    if given.is_dir():
        if found := sorted(given.rglob(LIBRARY)):
            return found[0].resolve()
        wheels = sorted(given.glob("*.whl"))
        if pieces := sorted(given.glob("*.whl.*")):
            joined = out / "nccl" / pieces[0].name.rpartition(".")[0]
            joined.parent.mkdir(parents=True, exist_ok=True)
            with open(joined, "wb") as whole:
                for piece in pieces:
                    with open(piece, "rb") as source:
                        shutil.copyfileobj(source, whole)
            wheels = [joined]
        if not wheels:
            sys.exit(f"gpu_nccl.py: neither {LIBRARY} nor a wheel is in {given}.")
        given = wheels[-1]
    with zipfile.ZipFile(given) as wheel:
        name = next((name for name in wheel.namelist() if name.endswith(f"/{LIBRARY}")), None)
        if name is None:
            sys.exit(f"gpu_nccl.py: {given} has no {LIBRARY}. Give --nccl one of nvidia-nccl-cu13.")
        folder = out.resolve() / "nccl" / given.name.removesuffix(".whl")
        path = folder / name
        if not path.exists() or path.stat().st_size != wheel.getinfo(name).file_size:
            wheel.extract(name, folder)
    return path


def comparisons(parts):
    """Compare the results of parts with each other; return results of the same form."""
    values = {}
    for name, part in parts.items():
        for result in part["results"]:
            values[name, result["what"].split(", ")[0], result["what"].rpartition(": ")[2]] = result
    found = []

    def compare(what, of, beside):
        if of in values and beside in values and values[beside]["value"]:
            ratio = values[of]["value"] / values[beside]["value"]
            note = f"{values[of]['value']} and {values[beside]['value']} {values[of]['unit']}"
            found.append((what, round(ratio, 3), "times", True, note))

    for model in MODELS:
        for other, words in (("staged", "staged"), ("one", "one rank")):
            step = (model, "jaxmpi")
            compare(
                f"a step of {model}: NCCL / {words}",
                (f"c-{model}", *step),
                (f"c-{model}-{other}", *step),
            )
    for what in ("1 KB", "100 MB", "ResNet-50"):
        mean = (f"mean of {what}",) * 2
        for other in ("staged", "staged-mps"):
            compare(f"mean of {what}: NCCL / {other}", ("d-nccl", *mean), (f"d-{other}", *mean))
    digests = []
    for name in ("f-bits", "f-bits-again"):
        if (name, "digest", "digest") in values:
            digests.append(values[name, "digest", "digest"]["value"])
    if len(digests) == 2:
        same = digests[0] == digests[1]
        found.append(("the same bits in two jobs", same, "", same, " ".join(digests)))
    keys = ("what", "value", "unit", "right", "note")
    return [dict(zip(keys, row, strict=True)) for row in found]


def main():
    """Run the parts that are asked for; exit as the docstring of this file says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("build/gpu"), help="folder of nccl.json")
    parser.add_argument("--parts", default="", help="letters or names, such as 'a b-laws'")
    parser.add_argument("--nccl", type=Path, help="a wheel or folder of NCCL 2.30 or later")
    parser.add_argument("--again", action="store_true", help="run what is there, too")
    parser.add_argument("--seconds", type=float, default=600, help="begin no part after so long")
    parser.add_argument("--cpu", action="store_true", help="on CPUs, with small arrays")
    options = parser.parse_args()
    known = all_parts()
    names = []
    if not options.parts:
        names = [name for name in known if not (options.cpu and name in LEFT_OUT_ON_CPUS)]
    for asked in options.parts.split():
        matching = [name for name in known if name == asked or name.partition("-")[0] == asked]
        if not matching:
            parser.error(f"no part is called {asked}; there are {', '.join(known)}")
        names += matching

    environ = {**os.environ, "PYTHONUNBUFFERED": "1"}
    options.out.mkdir(parents=True, exist_ok=True)
    if options.cpu:
        environ |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_backend_optimization_level=0"}
    elif options.nccl:
        path = library_in(options.nccl, options.out)
        before = environ.get("LD_LIBRARY_PATH")
        environ["GPU_NCCL_LIBRARY"] = str(path)
        environ["LD_LIBRARY_PATH"] = ":".join(filter(None, (str(path.parent), before)))
        print(f"NCCL: {path}", flush=True)
    device = gpu.card(environ)
    if device.startswith("cpu") and not options.cpu:
        print("gpu_nccl.py: JAX finds no GPU here. Try --cpu.", file=sys.stderr)
        sys.exit(2)
    path = options.out / "nccl.json"
    parts = json.loads(path.read_text()) if path.exists() else {}
    wanted = {name: on_this_machine(known[name], options.cpu) for name in names}
    here = {"device": device, "software": gpu.software()}
    gpu.run_parts(wanted, parts, path, environ, here, options)

    compared = comparisons(parts)
    lines = ["| compared | value | |", "|---|---|---|"]
    for result in compared:
        value = f"{result['value']} {result['unit']}"
        print(f"          {result['what']}: {value} ({result['note']})")
        lines.append(f"| {result['what']} | {value} | {result['note']} |")
    (options.out / "nccl.md").write_text(f"{gpu.table(parts)}\n" + "\n".join(lines) + "\n")
    left = [name for name in names if name not in parts and not known[name].needs]
    print(f"\n{len(parts)} parts in {path}" + (f"; not run yet: {', '.join(left)}" if left else ""))
    wrong = [name for name in names if parts.get(name, {}).get("status", "").startswith("wrong")]
    wrong += [result["what"] for result in compared if not result["right"]]
    if wrong:
        print(f"wrong: {', '.join(wrong)}")
    sys.exit(1 if wrong else 3 if left else 0)


if __name__ == "__main__":
    main()
