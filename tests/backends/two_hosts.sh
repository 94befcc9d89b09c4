#!/usr/bin/env bash
# Two hosts on this machine, network namespaces with a virtual cable between them, and a job of 2 ranks on each, over TCP.
# Needs root, ip and the Open MPI or MPICH of PYTHON's environment:
#
#     PYTHON=.venv/bin/python tests/backends/two_hosts.sh [--cut FILE SECONDS] script.py [its arguments]
#
# --cut: when FILE appears the cable is cut, for some seconds or `forever`.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
python=$(realpath -s "$(command -v "${PYTHON:-python3}")")
folder=$(mktemp -d)
a=jaxmpi-a-$$ b=jaxmpi-b-$$
file='' seconds=0
if [[ $1 == --cut ]]; then file=$2 seconds=$3; shift 3; fi

clean_up() {
  kill "${cutter:-}" 2>/dev/null || true
  for name in "$a" "$b"; do
    ip netns pids "$name" 2>/dev/null | xargs -r kill -9 2>/dev/null || true
    ip netns del "$name" 2>/dev/null || true
  done
  rm -rf "$folder"
}
trap clean_up EXIT
trap 'exit 143' TERM

for name in "$a" "$b"; do
  ip netns add "$name"
  ip -n "$name" link set lo up
done
ip link add cable netns "$a" type veth peer name cable netns "$b"
ip -n "$a" addr add 10.77.0.1/24 dev cable
ip -n "$b" addr add 10.77.0.2/24 dev cable
ip -n "$a" link set cable up
ip -n "$b" link set cable up

# What the launcher takes for ssh: it enters the namespace of the host, under a host name of its own. No variable goes along.
cat > "$folder/ssh" <<SSH
#!/usr/bin/env bash
while [[ \$1 == -* ]]; do shift; done
[ "\$1" = 10.77.0.1 ] && host=jaxmpi-a space=$a || host=jaxmpi-b space=$b
shift
exec env -i HOME="$HOME" PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin ip netns exec \$space unshare -u bash -c "hostname \$host; \$*"
SSH
chmod +x "$folder/ssh"

if [[ $file ]]; then
  (
    until [[ -e $file ]]; do sleep 0.1; done
    ip -n "$b" link set cable down
    if [[ $seconds != forever ]]; then
      sleep "$seconds"
      ip -n "$b" link set cable up
    fi
  ) &
  cutter=$!
fi

hosts=10.77.0.1:2,10.77.0.2:2
if "$(dirname "$python")/mpirun" --version | grep -q "Open MPI"; then
  options=(--prtemca plm_ssh_agent "$folder/ssh" --host "$hosts" --map-by slot:OVERSUBSCRIBE --bind-to none -x PYTHONPATH -x PATH)
else
  # It would tell the other host its name, which nobody there knows; and UCX sees one machine, whatever the hosts are called.
  export UCX_TLS=tcp,self
  options=(-launcher ssh -launcher-exec "$folder/ssh" -hosts "$hosts" -iface cable)
fi

export PYTHONPATH=$here/..${PYTHONPATH:+:$PYTHONPATH} PATH=$(dirname "$python"):$PATH
ip netns exec "$a" unshare -u bash -c "hostname jaxmpi-a; exec \"\$@\"" - "$python" -m jaxmpi run -n 4 "${options[@]}" "$@"
