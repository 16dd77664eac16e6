"""What the role leaves on the nodes."""

from __future__ import annotations

import json
from typing import Any

FOLDER = "/var/lib/gb10-fleet/watchdog/alpha"


def head(host: Any) -> bool:
    return bool(host.check_output("hostname").endswith("1"))


def test_service_on_the_head_only(host: Any) -> None:
    service = host.service("gb10-watchdog@alpha")
    assert service.is_running == head(host)
    assert host.file("/opt/gb10-fleet/watchdog").exists == head(host)


def test_its_key_is_restricted_on_the_worker(host: Any) -> None:
    keys = host.file("/home/spark/.ssh/authorized_keys").content_string
    line = [one for one in keys.splitlines() if one.endswith("gb10-watchdog-alpha")]
    assert len(line) == (0 if head(host) else 1)
    if line:
        assert line[0].startswith('restrict,from="198.18.0.101,198.51.100.101" ssh-ed25519 ')


def test_it_sees_both_ranks_and_is_small(host: Any) -> None:
    if not head(host):
        return
    state = json.loads(host.file(f"{FOLDER}/state.json").content_string)["state"]
    assert (state["name"], state["armed"]) == ("serving", True)
    assert host.file("/var/lib/gb10-watchdog").mode == 0o700
    pid = host.check_output("systemctl show --property MainPID --value gb10-watchdog@alpha")
    rss = host.check_output(f"ps -o rss= --pid {pid} --ppid {pid} | awk '{{ s += $1 }} END {{ print s }}'")
    assert int(rss) <= 80 * 1024
