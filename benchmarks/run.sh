#!/usr/bin/env bash
# Run all benchmarks of a node, or all between hosts (which are made of this one: that takes root):
#
#     benchmarks/run.sh node|hosts [--out FOLDER]
#
# BIN is the folder of the environment's programs, .venv/bin by default. `pip install torch` into it
# adds torch's gloo and DDP to the peers. Exits with 1 where one of them missed a bound.
set -uo pipefail
cd "$(dirname "$0")/.."
bin=${BIN:-.venv/bin}
which=$1
shift
failed=0

run() {  # a command, with the options that this script was given
  echo "== $*"
  "$@" || failed=1
}

if [[ $which == hosts ]]; then
  run "$bin/python" benchmarks/hosts.py "$@"
  run "$bin/python" benchmarks/overlap.py "$@"
  run "$bin/python" benchmarks/diloco.py
  run "$bin/python" benchmarks/prediction.py --mbit 1000
  run env PYTHON="$bin/python" tests/network.sh 2 1 1 1000 0 "$PWD/benchmarks/sharded.py" --mbit 1000 "$@"
  exit $failed
fi
for name in dispatch allreduce train_step overhead prediction optimizers codec_times first_call fsdp assumptions data; do
  run "$bin/jaxmpi" run -n 2 "benchmarks/$name.py" "$@"
done
run "$bin/jaxmpi" run -n 4 benchmarks/first_call.py "$@"
run env JAXMPI_BACKEND=xla "$bin/jaxmpi" run -n 2 benchmarks/overhead.py "$@"
run env JAXMPI_BACKEND=xla "$bin/jaxmpi" run -n 2 benchmarks/first_call.py "$@"
run "$bin/jaxmpi" run -n 2 benchmarks/sharded.py "$@"
run env JAXMPI_XLA=gloo "$bin/jaxmpi" run -n 2 benchmarks/sharded.py "$@"
run "$bin/python" benchmarks/first_call.py "$@"
run "$bin/python" benchmarks/first_call.py --simulate 2 "$@"
run "$bin/python" benchmarks/first_call.py --transforms "$@"
run "$bin/python" benchmarks/scaling.py "$@"
run "$bin/python" benchmarks/restart.py "$@"
exit $failed
