"""The listener that stays behind, and connections to it."""

from __future__ import annotations

import socket
from typing import Any

from ansible_collections.gb10.fleet.plugins.module_utils._listener import leave_behind
from ansible_collections.gb10.fleet.plugins.modules.fabric_probe import connect


def target(port: int) -> dict[str, Any]:
    return {
        "peer": "spark-02",
        "rail": 1,
        "interface": "lo",
        "source": "127.0.0.1",
        "address": "127.0.0.1",
        "port": port,
    }


def test_the_listener_says_which_address_it_sees_and_ends() -> None:
    port = leave_behind(2)
    assert port >= 1024
    assert connect(target(port), 2.0) == {"ok": True, "port": port, "seen": "127.0.0.1", "error": None}


def test_a_port_that_nobody_listens_on() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    answer = connect(target(port), 2.0)
    assert (answer["ok"], answer["error"]) == (False, "connection refused")
    assert connect(target(0), 2.0)["error"] == "no listener"


def test_something_else_on_that_port() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        assert connect(target(port), 0.3)["error"] == "no answer within 0.3 s"
