"""The gateway on its node: what the network sees, what a key may do, and that no key is anywhere."""

from __future__ import annotations

import contextlib
import socket
from typing import Any

import pytest
import requests

HEAD, URL = "198.18.0.101", "http://198.18.0.101:8080"
ALICE, BOBBY = "sk-molecule-alice-0123", "sk-molecule-bobby-0123"
BODY = {"max_tokens": 4, "messages": [{"role": "user", "content": "a-secret-prompt"}]}


def rank_of(host: Any) -> int:
    return int(host.check_output("hostname").removeprefix("molecule-")) - 1


@pytest.fixture(autouse=True)
def on_the_head_only(host: Any, request: pytest.FixtureRequest) -> None:
    if rank_of(host) != 0 and "every_rank" not in request.node.name:
        pytest.skip("looks at the head")


def ask(model: str, key: str, **more: Any) -> requests.Response:
    return requests.post(
        f"{URL}/v1/chat/completions",
        json={**BODY, "model": model, **more},
        headers={"Authorization": f"Bearer {key}"},
        timeout=20,
    )


def reached(address: str, port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((address, port), 1.5):
        return True
    return False


def test_it_runs_as_its_own_user(host: Any) -> None:
    service = host.service("gb10-gateway.service")
    assert service.is_running and service.is_enabled
    pid = host.check_output("systemctl show --property MainPID --value gb10-gateway.service")
    assert host.check_output(f"ps -o user:20= -p {pid}").strip() == "gb10-gateway"


def test_lanes_by_model_and_key(host: Any) -> None:
    models = requests.get(f"{URL}/v1/models", headers={"Authorization": f"Bearer {ALICE}"}, timeout=10).json()
    assert [card["id"] for card in models["data"]] == ["fake", "fake-batch"]
    for model, key, status in (
        *(("fake", ALICE, 200), ("fake-batch", ALICE, 200), ("fake", BOBBY, 200)),
        *(("fake-batch", BOBBY, 403), ("fake", "nobody", 401), ("other", ALICE, 404)),
    ):
        assert ask(model, key).status_code == status, (model, key)
    assert ask("fake-batch", ALICE).headers["X-Gateway-Lane"] == "batch"


def test_a_stream_arrives_whole(host: Any) -> None:
    answer = ask("fake", ALICE, stream=True)
    assert answer.headers["Content-Type"].startswith("text/event-stream")
    assert answer.text.endswith("data: [DONE]\n\n")


def test_the_engine_listens_on_loopback(host: Any) -> None:
    assert "127.0.0.1:8000" in host.check_output("ss -Hltn sport = :8000")
    assert "0.0.0.0:8000" not in host.check_output("ss -Hltn sport = :8000")


def test_from_outside_only_the_gateway(host: Any) -> None:
    """Whatever listens on the head: only the gateway (and sshd) can be reached from the management network."""
    lines = host.check_output("ss -Hltn").splitlines()
    ports = {int(line.split()[3].rpartition(":")[2]) for line in lines}
    assert {8000, 8080} <= ports
    assert {port for port in ports | {29521} if reached(HEAD, port)} <= {8080, 22}


def test_every_rank_closes_ephemeral_ports_to_all_but_peers(host: Any) -> None:
    """A listener as Gloo opens one: the other rank reaches it over the fabric, this machine does not."""
    rank = rank_of(host)
    host.run("(setsid python3 -m http.server 45678 >/dev/null 2>&1 </dev/null & echo $! >/tmp/listener.pid)")
    try:
        host.check_output("for n in $(seq 50); do ss -Hltn sport = :45678 | grep -q . && break; sleep 0.1; done")
        assert not reached(f"198.18.0.{101 + rank}", 45678)
        peer = host.get_host(f"ssh://molecule-{2 - rank}", ssh_config=host.backend.ssh_config, sudo=True)
        assert peer.run(f"timeout 5 bash -c '</dev/tcp/198.51.100.{101 + rank}/45678'").rc == 0
        assert reached(f"198.18.0.{101 + rank}", 22)
    finally:
        host.run("kill $(cat /tmp/listener.pid)")


def test_no_key_and_no_prompt_anywhere(host: Any) -> None:
    ask("fake", ALICE)
    assert host.file("/etc/gb10-fleet/gateway-keys.json").mode == 0o600
    for command in (
        "journalctl --no-pager --unit gb10-gateway.service",
        "ps -eo args",
        "docker inspect gb10-fake",
        "cat /etc/gb10-fleet/gateway.json /etc/gb10-fleet/gateway-keys.json /etc/systemd/system/gb10-gateway.service",
    ):
        said = host.check_output(command)
        for secret in ("sk-molecule", "a-secret-prompt"):
            assert secret not in said.replace(command, ""), command
    log = host.check_output("journalctl --no-pager --unit gb10-gateway.service --output cat")
    assert "lane=chat key=alice status=200 outcome=ok" in log


def test_metrics_want_a_key_from_outside(host: Any) -> None:
    assert requests.get(f"{URL}/metrics", timeout=10).status_code == 401
    assert "gb10_gateway_requests_total" in host.check_output("curl -sf http://127.0.0.1:8080/metrics")
    assert requests.get(f"{URL}/readyz", timeout=10).status_code == 200
