"""What was asked for, after a run and after a reboot."""

from __future__ import annotations

from typing import Any


def test_tune_reboot_lost(host: Any) -> None:
    """tonyd2wild OPEN-PROBLEMS §4: swappiness was lost at every reboot because nobody had written it down."""
    assert host.check_output("cat /proc/sys/vm/swappiness") == "10"
    assert host.check_output("cat /proc/sys/net/ipv4/tcp_keepalive_time") == "600"
    lines = host.file("/etc/sysctl.d/99-zz-gb10-fleet.conf").content_string.splitlines()
    assert lines[1:] == ["net.ipv4.tcp_keepalive_time = 600", "vm.swappiness = 10"]


def test_the_kernels_reserve_is_left_alone(host: Any) -> None:
    assert "min_free_kbytes" not in host.check_output("cat /etc/sysctl.d/99-zz-gb10-fleet.conf")


def test_swap_is_in_fstab_beside_the_nodes_own(host: Any) -> None:
    swap = [
        line.split()[0]
        for line in host.check_output("cat /etc/fstab").splitlines()
        if " swap " in line.replace("\t", " ")
    ]
    assert swap == ["/swap.img", "/swapfile.gb10-fleet"]
    file = host.file("/swapfile.gb10-fleet")
    assert (file.size, oct(file.mode), file.user) == (67108864, "0o600", "root")


def test_the_desktop_is_stopped_and_cannot_come_back(host: Any) -> None:
    show = host.check_output("systemctl show molecule-desktop.service -p ActiveState -p LoadState").splitlines()
    assert sorted(show) == ["ActiveState=inactive", "LoadState=masked"]


def test_drop_ins(host: Any) -> None:
    for unit, lines in (
        ("docker.service", ["OOMScoreAdjust=-900", "MemoryMin=134217728"]),
        ("systemd-journald.service", ["OOMScoreAdjust=-900", "MemoryMin=33554432"]),
        ("ssh.service", ["MemoryMin=33554432", "OOMScoreAdjust=0"]),
        ("system.slice", ["MemoryMin=201326592"]),
    ):
        shown = host.check_output(f"systemctl show {unit} -p OOMScoreAdjust -p MemoryMin").splitlines()
        assert set(lines) <= set(shown), unit
