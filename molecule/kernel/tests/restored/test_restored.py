"""After the restore everything is as before the first run."""

from __future__ import annotations

from typing import Any


def test_parameters(host: Any) -> None:
    assert host.check_output("cat /proc/sys/vm/swappiness") == "60"
    assert host.check_output("cat /proc/sys/net/ipv4/tcp_keepalive_time") == "7200"
    assert not host.file("/etc/sysctl.d/99-zz-gb10-fleet.conf").exists


def test_swap(host: Any) -> None:
    assert host.file("/etc/fstab").content == host.file("/root/fstab.before").content
    assert "gb10-fleet" not in host.check_output("cat /proc/swaps")
    assert not host.file("/swapfile.gb10-fleet").exists


def test_the_desktop_is_back(host: Any) -> None:
    assert host.service("molecule-desktop.service").is_running
    assert host.service("molecule-desktop.service").is_enabled


def test_drop_ins(host: Any) -> None:
    assert host.check_output("find /etc/systemd/system -name 50-gb10-fleet.conf") == ""
    assert "OOMScoreAdjust=0" in host.check_output("systemctl show docker.service -p OOMScoreAdjust")
    assert not host.file("/var/lib/gb10-fleet/sysctl.json").exists
