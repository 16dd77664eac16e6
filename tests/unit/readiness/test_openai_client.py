"""Only a completion proves that an engine serves."""

from __future__ import annotations

import socket
import threading
from pathlib import Path
from typing import Any

import pytest

from ansible_collections.gb10.fleet.plugins.module_utils import _openai_client as client


def test_a_completion(engine: Any) -> None:
    engine.delay_s = 0.02
    said = client.probe(engine.url, "tiny")
    assert (said["ok"], said["text"], said["completion_tokens"], said["model_listed"]) == (
        True,
        "Hello there you",
        3,
        True,
    )
    assert said["ttft_s"] >= 0.02
    assert 10 < said["tokens_per_s"] < 100
    body = engine.bodies[0]
    assert (body["model"], body["stream"], body["max_tokens"]) == ("tiny", True, 8)


def test_thinking_is_an_answer(engine: Any) -> None:
    engine.field = "reasoning_content"
    assert client.probe(engine.url, "tiny")["text"] == "Hello there you"


def test_the_base_url_may_end_with_v1(engine: Any) -> None:
    assert client.probe(f"{engine.url}/v1", "tiny")["ok"]


def test_ready_health_200_is_not_asked(engine: Any) -> None:
    """/health and /v1/models answer 200, the request 500 (mn2_probe_idle_worker_killed: a dead worker)."""
    engine.status = 500
    said = client.probe(engine.url, "tiny")
    assert (said["ok"], said["status"], said["error"]) == (False, 500, "EngineCore encountered an issue.")


def test_a_request_that_hangs(engine: Any) -> None:
    """A frozen worker (mn5_probe_worker_sigstop): connected, and no answer."""
    engine.delay_s = 30
    said = client.probe(engine.url, "tiny", timeout_s=0.5)
    assert (said["ok"], said["timed_out"]) == (False, True)
    assert said["error"] == "POST /v1/chat/completions gave no answer within 0.5 s"
    assert said["status"] == 200, "the list was there"


def test_a_key_is_needed(engine: Any) -> None:
    """401 means that it is up."""
    engine.key = "k1"
    said = client.probe(engine.url, "tiny")
    assert (said["ok"], said["key_needed"], said["status"]) == (False, True, 401)
    assert client.probe(engine.url, "tiny", key="k1")["ok"]


def test_another_model(engine: Any) -> None:
    engine.models = ["other", "third"]
    said = client.probe(engine.url, "tiny")
    assert (said["ok"], said["model_listed"], said["error"]) == (False, False, "it serves other, third, not tiny")
    assert not engine.bodies


def test_an_empty_answer_is_none(engine: Any) -> None:
    engine.words = []
    assert client.probe(engine.url, "tiny")["error"] == "the answer is empty"


def test_nothing_listens() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    said = client.probe(f"http://127.0.0.1:{port}", "tiny")
    assert (said["ok"], said["error"]) == (False, f"nothing listens on 127.0.0.1:{port}")


def test_an_engine_that_goes_in_the_middle_of_an_answer() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()

        def once() -> None:
            connection, _ = server.accept()
            connection.recv(4096)
            connection.close()

        threading.Thread(target=once, daemon=True).start()
        said = client.probe(f"http://127.0.0.1:{server.getsockname()[1]}", "tiny", timeout_s=5)
    assert not said["ok"]
    assert said["error"].startswith("GET /v1/models: ")


def test_key_file(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("abc\nsecond\n")
    assert client.read_key(str(tmp_path / "key")) == "abc"
    assert client.read_key(None) is None
    with pytest.raises(OSError):
        client.read_key(str(tmp_path / "none"))
