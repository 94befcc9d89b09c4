#!/usr/bin/env bash
# A job over several hosts that are made on this machine: network namespaces behind a switch in user space (network.cc).
# Needs root, ip, a C++ compiler and the Open MPI or MPICH of PYTHON's environment:
#
#     PYTHON=.venv/bin/python tests/network.sh HOSTS RANKS_PER_HOST DELAY_MS MBIT_PER_S LOSS [--cut FILE] script.py [its arguments]
#
# DELAY_MS: one way. LOSS: the probability that a packet is lost. --cut: when FILE appears, the last host is cut off.
# Variables whose names begin with JAXMPI_ go to all hosts.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
python=$(realpath -s "$(command -v "${PYTHON:-python3}")")
count=$1 per_host=$2 delay=$3 rate=$4 loss=$5 file=''
shift 5
if [[ $1 == --cut ]]; then file=$2; shift 2; fi
folder=$(mktemp -d)
spaces=()

clean_up() {
  kill "${switch:-}" "${cutter:-}" 2>/dev/null || true
  for space in "${spaces[@]}"; do
    ip netns pids "$space" 2>/dev/null | xargs -r kill -9 2>/dev/null || true
    ip netns del "$space" 2>/dev/null || true
  done
  rm -rf "$folder"
}
trap clean_up EXIT
trap 'exit 143' TERM

"${CXX:-c++}" -O2 -std=c++20 -Wall -o "$folder/network" "$here/network.cc"
for ((i = 1; i <= count; ++i)); do
  spaces+=("jaxmpi-$$-$i")
  ip netns add "jaxmpi-$$-$i"
  ip -n "jaxmpi-$$-$i" link set lo up
done
"$folder/network" "$delay" "$rate" "$loss" "${spaces[@]}" > "$folder/said" &
switch=$!
until grep -q ready "$folder/said"; do
  kill -0 "$switch" || exit 1
  sleep 0.05
done
hosts=''
for ((i = 1; i <= count; ++i)); do
  space=${spaces[i - 1]}
  ip -n "$space" addr add "10.77.0.$i/24" dev cable
  ip -n "$space" link set cable mtu 9000 txqueuelen 10000 up
  # a window of the bandwidth times the delay, and more; not every kernel lets a namespace have one of its own
  ip netns exec "$space" sysctl -qw net.ipv4.tcp_rmem="4096 4194304 67108864" net.ipv4.tcp_wmem="4096 4194304 67108864" \
    2>/dev/null || true
  hosts+=",10.77.0.$i:$per_host"
done
hosts=${hosts#,}

# What the launcher takes for ssh: it enters the namespace of the host, under a host name of its own. No variable goes along.
cat > "$folder/ssh" <<SSH
#!/usr/bin/env bash
while [[ \$1 == -* ]]; do shift; done
i=\${1##*.}
shift
exec env -i HOME="$HOME" PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
  ip netns exec jaxmpi-$$-\$i unshare -u bash -c "hostname host-\$i; \$*"
SSH
chmod +x "$folder/ssh"

if [[ $file ]]; then
  (
    until [[ -e $file ]]; do sleep 0.1; done
    ip -n "${spaces[-1]}" link set cable down
  ) &
  cutter=$!
fi

if "$(dirname "$python")/mpirun" --version | grep -q "Open MPI"; then
  options=(--prtemca plm_ssh_agent "$folder/ssh" --host "$hosts" --map-by slot:OVERSUBSCRIBE --bind-to none -x PYTHONPATH -x PATH)
  for name in "${!JAXMPI_@}"; do options+=(-x "$name"); done
else
  export UCX_TLS=tcp,self  # UCX sees one machine, whatever the hosts are called
  options=(-launcher ssh -launcher-exec "$folder/ssh" -hosts "$hosts" -iface cable)
fi

export PYTHONPATH=$here/..${PYTHONPATH:+:$PYTHONPATH} PATH=$(dirname "$python"):$PATH
ip netns exec "${spaces[0]}" unshare -u bash -c "hostname host-1; exec \"\$@\"" - \
  "$python" -m jaxmpi run -n $((count * per_host)) "${options[@]}" "$@"
