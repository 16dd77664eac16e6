"""The guard on a node with systemd: it runs as asked, and whatever ends it is told."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

UNIT = "gb10-memory-guard@alpha.service"
CONFIG = "/etc/gb10-fleet/memory-guard-alpha.json"
RECEIPT = "/var/lib/gb10-fleet/memory_guard/alpha.json"


def show(host: Any) -> dict[str, str]:
    said = host.check_output(f"systemctl show {UNIT} --property ActiveState,MainPID,NRestarts,Result,ExecMainStatus")
    return dict(line.split("=", 1) for line in said.splitlines())


def receipt(host: Any) -> dict[str, Any]:
    return dict(json.loads(host.file(RECEIPT).content_string))


def wait(host: Any, what: str, value: str, seconds: float = 20) -> dict[str, str]:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if show(host).get(what) == value:
            break
        time.sleep(0.3)
    found = show(host)
    assert found[what] == value, found
    return found


@pytest.fixture
def configured(host: Any) -> Any:
    """Run with other settings for one test, then as before."""
    before = host.file(CONFIG).content_string

    def change(**settings: Any) -> None:
        text = json.dumps({**json.loads(before), "run": f"test-{time.time()}", **settings})
        host.run_expect([0], f"cat > {CONFIG} <<'END'\n{text}\nEND")
        host.run_expect([0], f"systemctl reset-failed {UNIT} || true; systemctl restart {UNIT}")

    yield change
    host.run_expect([0], f"cat > {CONFIG} <<'END'\n{before}\nEND")
    host.run_expect([0], f"systemctl reset-failed {UNIT} || true; systemctl restart {UNIT}")


def test_it_runs_and_is_ready(host: Any) -> None:
    found = show(host)
    assert found["ActiveState"] == "active" and found["NRestarts"] == "0"
    said = host.check_output(f"journalctl --unit {UNIT} --output cat --no-pager")
    assert "floor 0.2 GiB" in said or "floor 256 MiB" in said


def test_it_is_small_and_locked(host: Any) -> None:
    pid = show(host)["MainPID"]
    status = dict(line.split(":", 1) for line in host.file(f"/proc/{pid}/status").content_string.splitlines())
    assert int(status["VmHWM"].split()[0]) <= 20 * 1024
    assert receipt(host)["abilities"]["memory_locked"] is True


def test_it_sees_checkpoints_under_var_tmp(host: Any, configured: Any) -> None:
    """With PrivateTmp it would have a /var/tmp of its own and guard nothing."""
    path = "/var/tmp/models/guard-test/model-00001-of-00001.safetensors"
    host.run_expect([0], f"mkdir -p $(dirname {path}) && truncate -s 32M {path}")
    configured(files=["/var/tmp/models/guard-test"])
    found = receipt(host)["checkpoint"]
    host.run_expect([0], "rm -r /var/tmp/models/guard-test")
    assert (found["files"], found["size_kib"]) == (1, 32 * 1024)


def test_killed_it_comes_back_and_says_so(host: Any, configured: Any) -> None:
    configured()
    pid = show(host)["MainPID"]
    host.run_expect([0], f"kill -9 {pid}")
    wait(host, "NRestarts", "1")
    found = wait(host, "ActiveState", "active")
    assert found["MainPID"] != pid
    cuts = receipt(host)["interruptions"]
    assert [cut["pid"] for cut in cuts] == [int(pid)]
    assert cuts[0]["unseen_s"] < 15
    said = host.check_output(f"journalctl --unit {UNIT} --output cat --no-pager")
    assert f"(pid {pid}) ended without a word" in said


def test_deadline_is_status_3_and_final(host: Any, configured: Any) -> None:
    configured(deadline_s=1)
    found = wait(host, "ActiveState", "failed")
    assert found["ExecMainStatus"] == "3" and found["NRestarts"] == "0"
    time.sleep(2)
    assert show(host)["ActiveState"] == "failed"
    assert receipt(host)["stopped_by"] == "deadline"


def test_stopped_by_hand_is_said(host: Any, configured: Any) -> None:
    configured()
    began = time.monotonic()
    host.run_expect([0], f"systemctl stop {UNIT}")
    assert time.monotonic() - began < 5
    found = receipt(host)
    assert (found["stopped_by"], found["exit_code"], found["state"]) == ("signal", 0, "ended")


def test_hung_it_is_killed_by_the_watchdog_and_comes_back(host: Any, configured: Any) -> None:
    configured()
    pid = show(host)["MainPID"]
    host.run_expect([0], f"kill -STOP {pid}")
    wait(host, "NRestarts", "1", seconds=40)
    found = wait(host, "ActiveState", "active")
    assert found["MainPID"] != pid
    assert receipt(host)["interruptions"]


def test_settings_of_the_machine_are_as_before(host: Any) -> None:
    """The guard writes drop_caches and compact_memory, which keep nothing; no sysctl is its own."""
    assert host.run("ls /etc/sysctl.d").stdout.count("guard") == 0
