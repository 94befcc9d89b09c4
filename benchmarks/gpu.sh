#!/usr/bin/env bash
# What a train step costs on one GPU with the backend xla at size 1, beside the backend single: each in its own process.
#
#     benchmarks/gpu.sh [--batch-size N]    # on a machine with a GPU; N images per step of the ResNet, 256 by default
#     benchmarks/gpu.sh --cpu               # small sizes on the CPU, to see that it works
#
# PYTHON names the interpreter, python3 by default; it needs mpi4py and an MPI for the backend xla. Exits with 1 when the losses
# of the two differ, and with 2 without a GPU.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
python=${PYTHON:-python3}
export PYTHONPATH="$(dirname "$here")${PYTHONPATH:+:$PYTHONPATH}"

cpu= batch_size=
while [ $# -gt 0 ]; do
    case $1 in
    --cpu) cpu=yes ;;
    --batch-size) batch_size=${2:?"gpu.sh: --batch-size needs a number"} && shift ;;
    *) echo "usage: gpu.sh [--cpu] [--batch-size N]" >&2 && exit 64 ;;
    esac
    shift
done

if [ -n "$cpu" ]; then
    export JAX_PLATFORMS=cpu XLA_FLAGS="${XLA_FLAGS:-} --xla_backend_optimization_level=0" # compiles twice as fast
    order="single xla"
    digits=(--steps 20 --warmup 2)
    resnet=(--steps 6 --warmup 1 --batch-size "${batch_size:-8}" --image-size 32 --width 8 --blocks 1)
else
    platform=$("$python" -c 'import jax; print(jax.default_backend())')
    if [ "$platform" != gpu ]; then
        echo "gpu.sh: JAX finds no GPU here, only: $platform. Install jax[cuda13] where there is one, or try gpu.sh --cpu." >&2
        exit 2
    fi
    order="single xla xla single" # a drift of the machine falls on both
    digits=(--steps 500 --warmup 20)
    resnet=(--steps 100 --warmup 10 --batch-size "${batch_size:-256}")
fi

results=$(mktemp)
trap 'rm -f "$results"' EXIT
for backend in $order; do
    JAXMPI_BACKEND=$backend "$python" "$here/steps.py" digits "${digits[@]}" >>"$results"
done
for backend in $order; do
    JAXMPI_BACKEND=$backend "$python" "$here/steps.py" resnet "${resnet[@]}" >>"$results"
done
"$python" "$here/steps.py" compare <"$results"
