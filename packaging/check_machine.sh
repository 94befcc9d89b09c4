#!/bin/sh
# Check that this machine can build jaxmpi: a Python of 3.11 or later with venv, and a C++ compiler.
python=${PYTHON:-python3}
if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
  echo "jaxmpi needs Python 3.11 or later, and $python is not. Name another: make PYTHON=python3.12 ..." >&2
  exit 1
fi
if ! command -v c++ > /dev/null && ! command -v g++ > /dev/null; then
  echo "jaxmpi's transport needs a C++ compiler, and there is none. Install g++ (or load your cluster's compiler module)." >&2
  exit 1
fi
if ! "$python" -c 'import ensurepip, venv' 2> /dev/null; then
  echo "$python cannot make virtual environments. On Debian and Ubuntu: apt install python3-venv." >&2
  exit 1
fi
