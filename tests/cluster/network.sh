#!/usr/bin/env bash
# network.sh HOSTS RATE MTU BURST LIMIT   (a number, bit/s, then bytes) builds the hosts and keeps them until stdin ends
#
# emulated.py starts this as process 1 of its own pid, mount, network and IPC namespaces, and all that is made here lies
# in them: when this process ends, by itself or killed, the kernel ends every process on the hosts and removes the rest.
# Says "ready" when done; answers "end" on stdin with "ended", when no process is left on any host.
set -euo pipefail
folder="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
hosts="$1" mtu="$3"
shape=(tbf rate "${2}bit" burst "$4" limit "$5")
if [[ $$ != 1 ]]; then
    echo "network.sh: is process $$, expected process 1 of a new pid namespace; use emulated.py" >&2
    exit 78
fi

mount -t tmpfs -o mode=755 hpczero /run      # `ip netns` keeps its names there
mount -t tmpfs -o mode=1777 hpczero /dev/shm # MPI's shared memory and session folders: gone with us, even after a kill
ln -s "$folder/enter" /run/enter             # Open MPI splits the path of its agent at spaces
echo "127.0.0.1 localhost" >/run/hosts

ip link add switch mtu "$mtu" type bridge
ip link set switch up
for ((i = 0; i < hosts; i++)); do
    host="host$i" address="10.0.0.$((i + 1))"
    ip netns add "$host"
    ip link add "port$i" mtu "$mtu" type veth peer name eth0 mtu "$mtu" netns "$host"
    # Set, not inherited: the machine's own tuning must not show. Links lose nothing, so buffers may be deep and an
    # idle spell is no reason to start slowly. No IPv6: its announcements would be counted as traffic.
    ip netns exec "$host" bash -c '
        cd /proc/sys/net
        echo reno >ipv4/tcp_congestion_control
        echo 4096 131072 6291456 >ipv4/tcp_rmem
        echo 4096 16384 4194304 >ipv4/tcp_wmem
        echo 0 >ipv4/tcp_slow_start_after_idle
        if [[ -e ipv6 ]]; then echo 1 >ipv6/conf/all/disable_ipv6; fi'
    tc qdisc add dev "port$i" root "${shape[@]}" # towards the host
    tc -n "$host" qdisc add dev eth0 root "${shape[@]}"
    ip -n "$host" address add "$address/24" dev eth0
    ip -n "$host" link set lo up
    ip -n "$host" link set eth0 up
    ip link set "port$i" master switch up
    echo "$address $host" >>/run/hosts
done
mount --bind /run/hosts /etc/hosts
echo ready

while read -r request; do
    [[ "$request" == end ]] || continue
    # Only what lives in this pid namespace can be reached, and not this process itself.
    answer=stuck
    for ((attempt = 0; attempt < 500; attempt++)); do
        if ! kill -KILL -- -1 2>/dev/null; then
            answer=ended # there was nothing to kill
            break
        fi
        sleep 0.01
    done
    echo "$answer"
done
