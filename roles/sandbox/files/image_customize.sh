#!/bin/sh
# mmdebstrap's customize hook: turn the fresh root into the base of a stand-in node. $1 is the root.
set -eu
root=$1
rm -f "$root"/etc/machine-id "$root"/var/lib/dbus/machine-id "$root"/etc/ssh/ssh_host_*
: >"$root"/etc/machine-id
# The account that a DGX Spark's first-boot wizard makes. A locked ('!') account is refused by sshd when UsePAM is no.
chroot "$root" useradd -m -s /bin/bash -G sudo,docker spark
chroot "$root" usermod -p '*' spark
echo 'spark ALL=(ALL) NOPASSWD: ALL' >"$root"/etc/sudoers.d/spark
chmod 0440 "$root"/etc/sudoers.d/spark
install -d -m 700 "$root"/root/.ssh
# What makes no sense in a container, or would reach the host.
for unit in systemd-udevd.service systemd-udevd-kernel.socket systemd-udevd-control.socket systemd-udev-trigger.service \
  systemd-modules-load.service sys-kernel-config.mount sys-kernel-debug.mount sys-kernel-tracing.mount dev-hugepages.mount \
  dev-mqueue.mount systemd-remount-fs.service getty.target console-getty.service systemd-logind.service \
  systemd-networkd.service systemd-resolved.service apt-daily.timer apt-daily-upgrade.timer e2scrub_all.timer fstrim.timer \
  dpkg-db-backup.timer systemd-random-seed.service proc-sys-fs-binfmt_misc.automount docker-registry.service nftables.service; do
  ln -sf /dev/null "$root/etc/systemd/system/$unit"
done
# systemd-sysctl applies what a role persisted, and nothing of the distribution's: those would reach the shared kernel.
rm -f "$root"/usr/lib/sysctl.d/*.conf "$root"/etc/sysctl.d/*.conf
: >"$root"/etc/sysctl.conf
chroot "$root" systemctl disable ssh.socket >/dev/null 2>&1 || true
chroot "$root" systemctl enable ssh.service docker.service >/dev/null 2>&1
mkdir -p "$root"/etc/systemd/journald.conf.d "$root"/etc/docker/registry
printf '[Journal]\nStorage=volatile\nRuntimeMaxUse=32M\n' >"$root"/etc/systemd/journald.conf.d/gb10-sandbox.conf
rm -rf "$root"/var/lib/apt/lists/* "$root"/var/cache/apt/*.bin "$root"/var/log/*.log "$root"/usr/share/zoneinfo
