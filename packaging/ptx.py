"""Write native/gather_ptx.h: nvcc's PTX of native/gather.cu, compiled by the driver at run time.

    python packaging/ptx.py            # needs nvcc; --check only compares

The kernel uses nothing new, so the text is labelled for drivers and GPUs that are older than what
nvcc itself would ask for.
"""

import argparse
import re
import subprocess
import sys
from pathlib import Path

NATIVE = Path(__file__).parents[1] / "native"
VERSION, TARGET = "8.0", "sm_70"  # CUDA 12.0; Volta

HEADER = """// What nvcc {release} makes of gather.cu, by packaging/ptx.py.
#pragma once

namespace jaxmpi {{

constexpr char kGatherPtx[] = R"ptx({ptx})ptx";

}}  // namespace jaxmpi
"""


def header() -> str:
    """Return the text of native/gather_ptx.h."""
    command = [
        "nvcc",
        "--ptx",
        "-arch=compute_75",
        "-std=c++17",
        "-Werror",
        "all-warnings",
        "-o",
        "-",
        str(NATIVE / "gather.cu"),
    ]
    ptx = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    lines = []
    for line in ptx.splitlines():
        if line.strip() and not line.lstrip().startswith("//"):
            lines.append(line.rstrip())
    text = "\n".join(lines)
    text = re.sub(r"^\.version .*$", f".version {VERSION}", text, flags=re.MULTILINE)
    text = re.sub(r"^\.target .*$", f".target {TARGET}", text, flags=re.MULTILINE)
    return HEADER.format(release=release(), ptx="\n" + text + "\n")


def release() -> str:
    """Return nvcc's version, since another one may make other PTX of the same source."""
    said = subprocess.run(["nvcc", "--version"], check=True, capture_output=True, text=True).stdout
    return re.search(r"release \S+, V(\S+)", said)[1]


parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument(
    "--check",
    action="store_true",
    help="end with 1 if the file is not what nvcc makes, if it is the same nvcc",
)
options = parser.parse_args()
path = NATIVE / "gather_ptx.h"
if options.check:
    text = path.read_text()
    sys.exit(int(f"nvcc {release()} " in text and text != header()))
path.write_text(header())
