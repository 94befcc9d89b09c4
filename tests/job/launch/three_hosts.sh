#!/usr/bin/env bash
# Three hosts on this machine, network namespaces on a bridge, with TCP between them. Needs root, ip, and Open MPI or MPICH:
#
#     PYTHON=.venv/bin/python tests/job/launch/three_hosts.sh FOLDER [options of jaxmpi run] script.py [its arguments]
#
# When FOLDER/kill appears, it is removed and all processes of the third host are killed. FOLDER/hosts is a file of the hosts,
# with a slot each.
set -euo pipefail
python=$(realpath -s "$(command -v "${PYTHON:-python3}")")
folder=$1; shift
name=jx$$
clean_up() {
  kill "${killer:-}" 2>/dev/null || true
  for i in 1 2 3; do
    ip netns pids "$name-$i" 2>/dev/null | xargs -r kill -9 2>/dev/null || true
    ip netns del "$name-$i" 2>/dev/null || true
    rm -rf "/etc/netns/$name-$i"
  done
  ip link del "$name" 2>/dev/null || true
}
trap clean_up EXIT
trap 'exit 143' TERM

ip link add "$name" type bridge
ip link set "$name" up
for i in 1 2 3; do
  ip netns add "$name-$i"
  mkdir -p "/etc/netns/$name-$i"  # its files are seen in place of those of /etc
  printf '127.0.0.1 localhost\n10.78.0.1 jaxmpi-1\n10.78.0.2 jaxmpi-2\n10.78.0.3 jaxmpi-3\n' > "/etc/netns/$name-$i/hosts"
  ip -n "$name-$i" link set lo up
  ip link add "$name-$i" type veth peer name cable netns "$name-$i"
  ip link set "$name-$i" master "$name" up
  ip -n "$name-$i" addr add "10.78.0.$i/24" dev cable
  ip -n "$name-$i" link set cable up
done
if "$(dirname "$python")/mpirun" --version | grep -q "Open MPI"; then
  slots=" slots=1"
  options=(--prtemca plm_ssh_agent "$folder/ssh" --hostfile "$folder/hosts" --bind-to none -x PATH)
else
  export UCX_TLS=tcp,self  # UCX sees one machine, whatever the hosts are called
  slots=:1
  options=(-launcher ssh -launcher-exec "$folder/ssh" -f "$folder/hosts" -iface cable -bind-to none)
fi
printf "10.78.0.%s$slots\\n" 1 2 3 > "$folder/hosts"
cat > "$folder/ssh" <<SSH
#!/usr/bin/env bash
while [[ \$1 == -* ]]; do shift; done
i=\${1##*.}; shift
exec env -i HOME="$HOME" PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin ip netns exec $name-\$i unshare -u bash -c "hostname jaxmpi-\$i; \$*"
SSH
chmod +x "$folder/ssh"
(
  while true; do
    until [[ -e $folder/kill ]]; do sleep 0.1; done
    rm -f "$folder/kill"
    ip netns pids "$name-3" | xargs -r kill -9 || true
  done
) &
killer=$!

export PATH=$(dirname "$python"):$PATH
ip netns exec "$name-1" unshare -u bash -c "hostname jaxmpi-1; exec \"\$@\"" - "$python" -m jaxmpi run -n 3 \
  "${options[@]}" "$@"
