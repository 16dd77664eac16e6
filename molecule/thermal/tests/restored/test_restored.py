"""After the restore: every byte as before the first run (not as after a boot), and nothing left of the role."""

from __future__ import annotations

from typing import Any


def test_every_file_is_as_before_byte_for_byte(host: Any) -> None:
    assert "policy5/scaling_governor" in host.check_output("cat /root/before.sha256")
    result = host.run("sha256sum --check --quiet /root/before.sha256")
    # Whoever limited policy0 did so until the reboot; it was never ours to put back.
    failed = [line.partition(":")[0].rpartition("cpufreq/")[2] for line in result.stdout.splitlines()]
    assert failed in ([], ["policy0/scaling_max_freq"])


def test_nothing_is_left(host: Any) -> None:
    for path in (
        "/etc/systemd/system/gb10-tuning.service",
        "/etc/systemd/system/gb10-tuning.timer",
        "/opt/gb10-fleet/tuning",
        "/etc/gb10-fleet/tuning.json",
        "/var/lib/gb10-fleet/tuning.json",
        "/var/lib/gb10-fleet/tuning-drift.jsonl",
        "/run/fake-gpu/lgc",
    ):
        assert not host.file(path).exists, path
    assert "gb10-tuning" not in host.check_output("systemctl list-timers --all --no-legend")
