#!/usr/bin/env bash
# Make sure that a Docker engine answers: install Debian's or Ubuntu's docker.io when there is none, start it, with or
# without systemd. Says what it is about to do first; a missing piece ends with one sentence and the command to run.
set -euo pipefail

say() { printf 'engine: %s\n' "$*"; }
give_up() { printf 'engine: %s\n' "$*" >&2; exit 1; }
answers() { timeout 10 docker version --format '{{.Server.Version}}' 2>/dev/null; }

if version=$(answers); then say "Docker $version answers"; exit 0; fi
root=(); [ "$(id -u)" = 0 ] || root=(sudo -n)
"${root[@]}" true 2>/dev/null || give_up "no Docker engine answers, and starting one needs root. Run: sudo scripts/engine.sh"

if ! command -v dockerd >/dev/null; then
  command -v apt-get >/dev/null || give_up "no Docker engine, and no apt-get to install one. Install Docker 20.10 or newer, then run make again."
  packages=(docker.io iptables)
  # Debian 13 split the client off.
  say "no Docker engine on this machine: installing Debian packages ${packages[*]}"
  "${root[@]}" apt-get update -qq || give_up "apt-get update failed. Run: apt-get update"
  if apt-cache show docker-cli >/dev/null 2>&1; then packages+=(docker-cli); fi
  "${root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${packages[@]}" >/dev/null ||
    give_up "the installation failed. Run: apt-get install ${packages[*]}"
fi

if [ -d /run/systemd/system ]; then
  "${root[@]}" systemctl start docker || give_up "docker.service does not start. Run: journalctl -u docker"
else
  # No systemd: the engine needs the cgroup controllers mounted, and dockerd is started by hand (the init script fails on ulimit).
  log=/var/log/gb10-fleet-dockerd.log
  say "no systemd: starting dockerd, log in $log"
  "${root[@]}" bash -s "$log" <<'ROOT'
set -eu
mountpoint -q /sys/fs/cgroup || mount -t tmpfs -o mode=755 cgroup /sys/fs/cgroup
if ! [ -e /sys/fs/cgroup/cgroup.controllers ]; then
  for c in $(awk '!/^#/ && $4 == 1 {print $1}' /proc/cgroups); do
    mkdir -p "/sys/fs/cgroup/$c"
    mountpoint -q "/sys/fs/cgroup/$c" || mount -t cgroup -o "$c" cgroup "/sys/fs/cgroup/$c" || rmdir "/sys/fs/cgroup/$c"
  done
  mkdir -p /sys/fs/cgroup/systemd
  mountpoint -q /sys/fs/cgroup/systemd || mount -t cgroup -o none,name=systemd cgroup /sys/fs/cgroup/systemd || true
fi
pid=$(cat /var/run/docker.pid 2>/dev/null || true)
if [ -z "$pid" ] || ! [ -e "/proc/$pid" ]; then rm -f /var/run/docker.pid; fi
nohup setsid dockerd >>"$1" 2>&1 </dev/null &
ROOT
fi
# Wait for the answer, not for a time: the limit only ends a start that will never succeed.
for _ in $(seq 600); do
  if version=$(answers); then say "Docker $version answers"; exit 0; fi
  sleep 0.2
done
give_up "dockerd was started and does not answer within 120 s. Read: /var/log/gb10-fleet-dockerd.log or journalctl -u docker"
