#!/usr/bin/env bash
# hosts.py on two hosts that are made on this machine:   PYTHON=.venv/bin/python benchmarks/hosts.sh [options of hosts.py]
here=$(cd "$(dirname "$0")" && pwd)
exec "$here/../tests/backends/two_hosts.sh" "$here/hosts.py" "$@"
