"""Run a program with the NCCL that GPU_NCCL_LIBRARY names: with_nccl.py SCRIPT ARGUMENTS.

JAX's CUDA plugin loads the library of the installed package by its path, whatever LD_LIBRARY_PATH
says. Later lookups of libnccl.so.2 find the one that was loaded first, which is the one here.
Without the variable the program runs as it is.
"""

import ctypes
import os
import runpy
import sys
from pathlib import Path

if os.environ.get("GPU_NCCL_LIBRARY"):
    ctypes.CDLL(os.environ["GPU_NCCL_LIBRARY"], mode=ctypes.RTLD_GLOBAL)
sys.argv = [str(Path(__file__).parent / sys.argv[1]), *sys.argv[2:]]
sys.path[0] = str(Path(sys.argv[0]).parent)
runpy.run_path(sys.argv[0], run_name="__main__")
