"""What rank_stop reads to confirm that a rank is gone."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from ansible_collections.gb10.fleet.plugins.modules.rank_stop import RankStop, listening_ports, process_starts

# /proc/net/tcp of a node: a listener on 8000 and one on 22, an established connection from 8000.
TCP = """  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 00000000:1F40 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 4711 1 0000000000000000 100 0 0 10 0
   1: 0100007F:0016 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 4712 1 0000000000000000 100 0 0 10 0
   2: 0B6433C6:7351 0C6433C6:9C40 01 00000000:00000000 00:00000000 00000000     0        0 4713 1 0000000000000000 100 0 0 10 0
"""


def test_launch_port_in_use_counts_listeners_only() -> None:
    assert listening_ports([TCP]) == {8000, 22}


def test_a_process_is_known_by_pid_and_start_time(tmp_path: Path) -> None:
    """A command name may hold spaces and parentheses (`VLLM::Worker (TP0)`), the fields behind it count."""
    own = process_starts([os.getpid(), 2**22 + 1])
    assert list(own) == [os.getpid()]
    (tmp_path / "77").mkdir()
    fields = " ".join(["S", *map(str, range(4, 22)), "4242", "0"])
    (tmp_path / "77/stat").write_text(f"77 (VLLM::Worker (TP0)) {fields}\n")
    assert process_starts([77], tmp_path) == {77: "4242"}


def test_a_process_that_outlives_its_container_is_killed_by_number_and_start_time() -> None:
    """Ray's processes outlive a container with the node's process numbers; a number that another process has now is left alone."""
    with subprocess.Popen(["sleep", "60"]) as orphan:
        start = process_starts([orphan.pid])[orphan.pid]
        RankStop.kill({orphan.pid: "1"})
        assert orphan.poll() is None
        RankStop.kill({orphan.pid: start, 2**22 + 1: "5"})
        assert orphan.wait(10) == -9
