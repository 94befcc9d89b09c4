"""The loops of native/ give the same bits on every processor; ARM's run by emulation."""

import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "tests/backends/loops_bits.cc"
LEVELS = {  # as in native/CMakeLists.txt
    "v1": ("", ()),
    "v3": ("avx2", ("-mavx2", "-mf16c")),
    "v4": (
        "avx512bw",
        ("-mavx2", "-mf16c", *(f"-mavx512{part}" for part in ("f", "bw", "vl", "dq", "cd"))),
    ),
}
# Debian's qemu-user-static, libc6-arm64-cross
QEMU, LIBRARIES = "qemu-aarch64-static", Path("/usr/aarch64-linux-gnu")
COMPILER = [os.environ.get("CXX", "c++")]
ZIG = [sys.executable, "-m", "ziglang", "c++", "-target", "aarch64-linux-gnu.2.28"]


def digests(tmp_path, compiler, level, flags, run=()):
    program = tmp_path / level
    strict = ("-std=c++17", "-O3", "-fopenmp-simd", "-ffp-contract=off")
    strict += (f"-I{ROOT}/native", f"-DLEVEL={level}")
    objects = []
    for name in ("reduce_loops", "int8_loops"):
        objects.append(f"{program}-{name}.o")
        source = ROOT / f"native/{name}.cc"
        subprocess.run([*compiler, *strict, *flags, "-c", source, "-o", objects[-1]], check=True)
    subprocess.run([*compiler, *strict, SOURCE, *objects, "-o", program], check=True)
    return subprocess.run(
        [*run, program], capture_output=True, text=True, check=True
    ).stdout.splitlines()


@pytest.mark.slow
@pytest.mark.skipif(os.uname().machine != "x86_64", reason="there is one kind of loops elsewhere")
def test_every_level_makes_the_same_bits(tmp_path):
    processor = Path("/proc/cpuinfo").read_text().split()
    by_level = {}
    for level, (needs, flags) in LEVELS.items():
        if not needs or needs in processor:
            by_level[level] = digests(tmp_path, COMPILER, level, flags)
    assert len(by_level["v1"]) == 4 * 7 + 12 * 4 * 5 + 2 * 5
    sums = [line.split()[3] for line in by_level["v1"] if line.split()[2] != "1"]
    assert len(set(sums)) == len(sums)
    assert all(found == by_level["v1"] for found in by_level.values())


@pytest.mark.skipif(
    not (find_spec("ziglang") and shutil.which(QEMU) and LIBRARIES.exists()),
    reason=f"needs ziglang, {QEMU} and {LIBRARIES}",
)
@pytest.mark.exhaustive
def test_an_emulated_aarch64_makes_the_same_bits(tmp_path):
    there = digests(tmp_path, ZIG, "v1", (), run=[QEMU, "-L", LIBRARIES])
    assert there == digests(tmp_path, COMPILER, "v1", ())
