#!/bin/bash
# Hosts of a lab in namespaces of one machine: own network, host name, processes, mounts, /dev/shm;
# shared disk. Process 1 of a host is its sshd: killing it is the end of all that runs there.
#   lab.sh FOLDER COUNT COMMAND...   runs a command beside COUNT hosts lab1..labN (10.99.0.1..N)
# FOLDER gets ssh_config and, for each host, run-labN (runs a command on it) and pid-labN (its
# process 1, as this script counts). All of it stands in namespaces of this process, and ends with it.
set -euo pipefail
if [ "${INSIDE_LAB:-}" = "" ]; then
    INSIDE_LAB=1 exec unshare --net --mount --uts --pid --fork --kill-child --mount-proc "$0" "$@"
fi
cd "$1"; count=$2; shift 2
mount -t tmpfs run /run; mkdir -p /run/sshd
ip link set lo up
ip link add lab0 type bridge
ip addr add 10.99.0.254/24 dev lab0
ip link set lab0 up
hostname labhead
{ echo "127.0.0.1 localhost"; echo "10.99.0.254 labhead"
  for i in $(seq "$count"); do echo "10.99.0.$i lab$i"; done; } > hosts
mount --bind hosts /etc/hosts
ssh-keygen -q -t ed25519 -N "" -f host_key
ssh-keygen -q -t ed25519 -N "" -f user_key
cp user_key.pub authorized_keys
for i in $(seq "$count"); do echo "lab$i $(cut -d' ' -f1,2 host_key.pub)"; done > known_hosts
cat > ssh_config <<CONFIG
IdentityFile $PWD/user_key
UserKnownHostsFile $PWD/known_hosts
GlobalKnownHostsFile /dev/null
StrictHostKeyChecking yes
CONFIG
for i in $(seq "$count"); do
    cp hosts "hosts-lab$i"
    cat > "sshd-lab$i" <<CONFIG
ListenAddress 10.99.0.$i
HostKey $PWD/host_key
AuthorizedKeysFile $PWD/authorized_keys
PermitRootLogin prohibit-password
StrictModes no
UsePAM no
PidFile none
CONFIG
    [ ! -e "more-lab$i" ] || cat "more-lab$i" >> "sshd-lab$i"
    mkfifo "go-lab$i"
    unshare --net --uts --ipc --pid --mount --fork --kill-child --mount-proc bash -c "
        read -r < go-lab$i
        hostname lab$i; ip link set lo up; ip link set eth0 up
        mount --bind hosts-lab$i /etc/hosts
        mount -t tmpfs -o size=512m shm /dev/shm
        exec /usr/sbin/sshd -D -f '$PWD/sshd-lab$i'" &
    pid=$!
    until ! [ /proc/$pid/ns/net -ef /proc/self/ns/net ]; do sleep 0.01; done
    until inner=$(cat /proc/$pid/task/$pid/children) && [ -n "$inner" ]; do sleep 0.01; done
    inner=${inner%% *}; echo "$inner" > "pid-lab$i"
    ip link add "ve$i" type veth peer name eth0 netns $pid
    nsenter -t $pid --net ip addr add 10.99.0.$i/24 dev eth0
    ip link set "ve$i" master lab0 up
    echo go > "go-lab$i"
    cat > "run-lab$i" <<SCRIPT
#!/bin/bash
[ "\$(hostname)" = labhead ] || { echo "\$0: process $inner is another one outside of the lab" >&2; exit 1; }
exec nsenter -t $inner --all -- "\$@"
SCRIPT
    chmod +x "run-lab$i"
done
for i in $(seq "$count"); do
    until (exec 3<> "/dev/tcp/10.99.0.$i/22") 2>/dev/null; do sleep 0.02; done
done
"$@"
