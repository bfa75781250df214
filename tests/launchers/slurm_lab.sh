#!/bin/bash
# A cluster of Slurm within the lab of tests/lab.sh: slurmctld on its head, slurmd on each host.
#   lab.sh FOLDER COUNT slurm_lab.sh COUNT     writes FOLDER/ready once all nodes are idle
set -euo pipefail
folder=$PWD; count=$1
export PATH=$PATH:/usr/sbin:/sbin
mkdir -p state log
head -c 1024 /dev/urandom > munge.key; chmod 600 munge.key
cat > slurm.conf <<CONF
ClusterName=lab
SlurmctldHost=labhead(10.99.0.254)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=$folder/munge.sock,cred_expire=8
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool.%n
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/slurmd.%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=sched_interval=1,bf_interval=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
KillWait=4
MinJobAge=3600
SlurmdTimeout=15
JobRequeue=1
$(for i in $(seq "$count"); do echo "NodeName=lab$i NodeAddr=10.99.0.$i CPUs=2 RealMemory=4000"; done)
PartitionName=low Nodes=ALL Default=YES State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime=120
PartitionName=high Nodes=ALL MaxTime=60 State=UP PriorityTier=10 PreemptMode=OFF
CONF
munged --force --key-file="$folder/munge.key" --socket="$folder/munge.sock" \
    --log-file="$folder/log/munged" --pid-file="$folder/munged.pid" --seed-file="$folder/munged.seed"
export SLURM_CONF=$folder/slurm.conf
slurmctld -D > log/slurmctld 2>&1 &
for i in $(seq "$count"); do
    mkdir -p "spool.lab$i"
    "./run-lab$i" slurmd -D -N "lab$i" > "log/slurmd$i" 2>&1 &
    echo $! > "slurmd-lab$i"
done
until [ "$(sinfo -h -N -p low -t idle -o %N 2>/dev/null | wc -l)" = "$count" ]; do sleep 0.1; done
touch ready
sleep infinity
