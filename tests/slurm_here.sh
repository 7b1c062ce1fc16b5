#!/usr/bin/env bash
# A SLURM of one node, this machine, for the srun test of test_variables.py (Debian, as root):
#   apt-get install slurm-wlm munge && tests/slurm_here.sh && SLURM_CONF=/run/slurm_here/slurm.conf srun -n 2 hostname
# Does nothing where a SLURM already serves this machine.  To end it: kill $(cat /run/slurm_here/*.pid) && rm /run/slurm_here/*.pid
set -eu
[ "$(id -u)" = 0 ] || { echo "$0: only root can start SLURM" >&2; exit 1; }
host=${HOSTNAME%%.*}
up() { timeout 3 sinfo -h -n "$host" -o %t 2>/dev/null | grep -qxE 'idle|mix|alloc'; }
up && exit
dir=/run/slurm_here
export SLURM_CONF=$dir/slurm.conf
up && exit

if ! munge -n >/dev/null 2>&1; then
    mkdir -p /run/munge /etc/munge
    [ -s /etc/munge/munge.key ] || (umask 077 && head -c 1024 /dev/urandom >/etc/munge/munge.key)
    chown -R munge: /run/munge /etc/munge
    runuser -u munge -- munged --force </dev/null >/dev/null 2>&1
    mkdir -p $dir && cp /run/munge/munged.pid $dir
fi
mkdir -p $dir
# Ports of its own: a configuration in /etc may want the usual ones.  config_overrides: two tasks on one core, too.
cat >$SLURM_CONF <<END
ClusterName=here
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=17817
SlurmdPort=17818
AuthType=auth/munge
SlurmUser=root
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
StateSaveLocation=$dir
SlurmdSpoolDir=$dir
SlurmctldPidFile=$dir/slurmctld.pid
SlurmdPidFile=$dir/slurmd.pid
SlurmctldLogFile=$dir/slurmctld.log
SlurmdLogFile=$dir/slurmd.log
NodeName=$host NodeAddr=127.0.0.1 CPUs=2
PartitionName=here Nodes=ALL Default=YES
END
trap 'kill $(cat $dir/*.pid) 2>/dev/null' EXIT # unless it comes up
for daemon in slurmctld slurmd; do # without this script's output, or whoever reads it would wait for them
    kill -0 "$(cat $dir/$daemon.pid 2>/dev/null)" 2>/dev/null || $daemon </dev/null >/dev/null 2>&1
done
for _ in {1..40}; do
    up && trap - EXIT && exit
    sleep 0.5
done
echo "$0: SLURM did not come up: see $dir/*.log" >&2
exit 1
