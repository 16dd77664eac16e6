"""The fake engine while it serves: liveness as probed on the real one, HTTP as recorded, counters, faults told at run time."""

from __future__ import annotations

import json
import re
import signal
import threading
import time
import urllib.error
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from .conftest import Cluster, normal_lines, recorded

Make = Callable[..., Cluster]
EXCHANGES: list[dict[str, Any]] = json.loads(recorded("http.json"))["exchanges"]
AS_RECORDED = (
    "--enable-prompt-tokens-details",
    "--enable-auto-tool-choice",
    "--tool-call-parser",
    "hermes",
    "--scheduling-policy",
    "priority",
)


def probed(name: str, what: str) -> tuple[int, str]:
    """Status and body of an answer in a probe's timeline."""
    found = re.search(rf"{what}: \((\d+), '(.*?)'\) after", recorded(name))
    assert found
    return int(found[1]), found[2]


def refused(ranks: Cluster) -> bool:
    try:
        ranks.ask("/health")
    except urllib.error.URLError as error:
        return isinstance(error.reason, (ConnectionRefusedError, ConnectionResetError))
    return False


def test_worker_killed_idle(cluster: Make) -> None:
    """mn2_probe_idle_worker_killed.txt: 200 until the next request, which gets 500; then the head is gone. Exit 0 (measured)."""
    ranks = cluster()
    head, worker = ranks.pair()
    worker.signal(signal.SIGKILL)
    worker.wait()
    assert [ranks.ask(path)[0] for path in ("/health", "/v1/models", "/metrics")] == [200, 200, 200]
    status, body = ranks.chat()
    assert (status, body) == probed("mn2_probe_idle_worker_killed.txt", "req-after")
    assert head.wait() == 0
    assert refused(ranks)
    mark = "WorkerProc hit an exception"
    assert normal_lines(head.text, mark) == normal_lines(recorded("headfirst_then_worker_killed_idle_head.log"), mark)


def test_worker_killed_in_flight(cluster: Make) -> None:
    """mn1_probe_worker_killed.txt: the request gets 500, the head goes."""
    ranks = cluster()
    head, worker = ranks.pair(FAKE_ENGINE_ITL_S="0.05")
    answers: list[tuple[int, str]] = []
    asker = threading.Thread(target=lambda: answers.append(ranks.chat(max_tokens=1500, ignore_eos=True)))
    asker.start()
    while ranks.metric("vllm:num_requests_running") < 1:
        time.sleep(0.02)
    worker.signal(signal.SIGKILL)
    asker.join(10)
    assert answers == [probed("mn1_probe_worker_killed.txt", "inflight-req")]
    assert head.wait() == 0


def test_worker_killed_in_flight_ends_a_stream_with_an_error(cluster: Make) -> None:
    ranks = cluster()
    head, worker = ranks.pair(FAKE_ENGINE_ITL_S="0.05")
    answers: list[tuple[int, str]] = []
    asker = threading.Thread(target=lambda: answers.append(ranks.chat(max_tokens=1500, ignore_eos=True, stream=True)))
    asker.start()
    while ranks.metric("vllm:generation_tokens_total") < 1:
        time.sleep(0.02)
    worker.signal(signal.SIGKILL)
    asker.join(10)
    assert head.wait() == 0
    assert answers[0][0] == 200
    assert '"type":"InternalServerError"' in answers[0][1].split("data: ")[-2]


def test_worker_frozen(cluster: Make) -> None:
    """mn5_probe_worker_sigstop.txt, worker_frozen_head.log: 200 all along; a request hangs (30 s there, 1 s here), then 500."""
    ranks = cluster()
    head, worker = ranks.pair(VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS="1")
    worker.signal(signal.SIGSTOP)
    assert ranks.ask("/health")[0] == 200
    begin = time.monotonic()
    assert ranks.chat() == probed("mn5_probe_worker_sigstop.txt", "req-after")
    assert 0.9 < time.monotonic() - begin < 5
    assert head.wait() == 0
    mark = "Dumping input data"
    assert normal_lines(head.text, mark) == normal_lines(recorded("worker_frozen_head.log"), mark)


# -- HTTP as recorded ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server() -> Iterator[Cluster]:
    """One node with the recorded options."""
    ranks = Cluster(*AS_RECORDED, nodes=1)
    ranks.start(FAKE_ENGINE_TTFT_S="0", FAKE_ENGINE_ITL_S="0").wait_line("Application startup complete")
    yield ranks
    ranks.end()


@pytest.fixture(scope="module")
def guarded() -> Iterator[Cluster]:
    """The same with --api-key secret."""
    ranks = Cluster("--api-key", "secret", nodes=1)
    ranks.start(FAKE_ENGINE_TTFT_S="0", FAKE_ENGINE_ITL_S="0").wait_line("Application startup complete")
    yield ranks
    ranks.end()


def request_of(exchange: dict[str, Any]) -> Any:
    body = exchange["request"]
    if isinstance(body, str):
        return body.encode()
    if "repeat" in exchange:
        text, times = exchange["repeat"]
        return body | {"messages": [{"role": "user", "content": text * times}]}
    return body


def structure(value: Any) -> Any:
    """Keys and kinds, without values. None may stand for anything."""
    if isinstance(value, dict):
        return {key: structure(part) for key, part in value.items() if part is not None}
    if isinstance(value, list):
        return [structure(value[0])] if value else []
    return type(value).__name__


def events(body: str) -> list[Any]:
    parts = [line.removeprefix("data: ") for line in body.splitlines() if line]
    assert parts[-1] == "[DONE]"
    return [json.loads(part) for part in parts[:-1]]


@pytest.mark.parametrize("exchange", EXCHANGES, ids=lambda exchange: exchange["name"])
def test_answers_as_recorded(exchange: dict[str, Any], server: Cluster, guarded: Cluster) -> None:
    """Status, and the body: errors word for word, answers key for key, streams chunk for chunk."""
    ranks = guarded if exchange["name"].startswith("with --api-key") else server
    status, body = ranks.ask(exchange["path"], request_of(exchange), method=exchange["method"], **exchange["headers"])
    assert status == exchange["status"], body
    real = exchange["body"]
    if status != 200:
        assert json.loads(body) == json.loads(real)
    elif real.startswith("data: "):
        # role, words, end, usage: three words were asked for.
        ours, theirs = [[structure(part) for part in events(text)] for text in (body, real)]
        assert ours == theirs
    elif exchange["name"] == "tools auto":
        assert json.loads(body)["choices"][0]["finish_reason"] == "tool_calls"
    elif real:
        assert structure(json.loads(body)) == structure(json.loads(real))
    else:
        assert body == ""


def test_ends_and_lengths_are_as_measured(server: Cluster) -> None:
    """20 words cost 21 tokens and end with "stop"; a limit ends with "length"."""
    ended = json.loads(server.chat(max_tokens=40)[1])
    words = len(ended["choices"][0]["message"]["content"].split())
    assert (ended["usage"]["completion_tokens"], ended["choices"][0]["finish_reason"]) == (words + 1, "stop")
    cut = json.loads(server.chat(max_tokens=3)[1])
    assert (cut["usage"]["completion_tokens"], cut["choices"][0]["finish_reason"]) == (3, "length")
    endless = json.loads(server.chat(max_tokens=30, ignore_eos=True)[1])
    assert (endless["usage"]["completion_tokens"], endless["choices"][0]["finish_reason"]) == (30, "length")


def test_prefix_cache_in_whole_blocks(server: Cluster) -> None:
    """A repeated prompt hits in blocks of 32, never the whole prompt; usage and counters agree."""
    body = {"model": "tiny", "messages": [{"role": "user", "content": "a lazy dog " * 60}], "max_tokens": 2}
    first, second = (json.loads(server.ask("/v1/chat/completions", body)[1])["usage"] for _time in range(2))
    assert first["prompt_tokens_details"]["cached_tokens"] == 0
    assert second["prompt_tokens_details"]["cached_tokens"] == (second["prompt_tokens"] - 1) // 32 * 32
    assert server.metric("vllm:prefix_cache_hits_total") >= second["prompt_tokens_details"]["cached_tokens"]


def test_tool_call(server: Cluster) -> None:
    tool = {
        "type": "function",
        "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
    }
    message = json.loads(server.chat(tools=[tool])[1])["choices"][0]["message"]
    assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {"city": "Paris"}
    parts = events(server.chat(tools=[tool], stream=True)[1])
    calls = [part["choices"][0]["delta"].get("tool_calls") for part in parts]
    text = "".join(call[0]["function"]["arguments"] for call in calls if call)
    assert json.loads(text) == {"city": "Paris"}
    assert parts[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_metrics_names_are_the_recorded_ones(cluster: Make) -> None:
    """metrics.prom: the same families and labels, in order, with a drafter."""
    ranks = cluster("--speculative-config", '{"method": "ngram", "num_speculative_tokens": 3}', nodes=1)
    ranks.start().wait_line("Application startup complete")

    def keys(page: str) -> list[str]:
        return [line.rsplit(" ", 1)[0] for line in page.splitlines() if line.startswith("vllm:")]

    assert keys(ranks.ask("/metrics")[1]) == keys(recorded("metrics.prom"))
    ranks.chat(max_tokens=10, ignore_eos=True)
    assert ranks.metric("vllm:generation_tokens_total") == 10
    assert ranks.metric("vllm:iteration_tokens_total_count") == 10
    assert ranks.metric("vllm:time_to_first_token_seconds_count") == 1
    assert ranks.metric("vllm:spec_decode_num_draft_tokens_total") == 30
    assert ranks.metric("vllm:spec_decode_num_accepted_tokens_total") == pytest.approx(27)


def test_priority_goes_first(cluster: Make) -> None:
    """Measured on the real engine: priority 0 is answered before a queue of 100s; under fcfs it waits its turn."""
    ended: dict[str, list[int]] = {}
    for policy in ("priority", "fcfs"):
        ranks = cluster("--scheduling-policy", policy, "--max-num-seqs", "1", nodes=1)
        ranks.start(FAKE_ENGINE_ITL_S="0.2", FAKE_ENGINE_TTFT_S="0").wait_line("Application startup complete")
        order = ended[policy] = []

        def ask(priority: int, ranks: Cluster = ranks, order: list[int] = order) -> None:
            ranks.chat(max_tokens=5, priority=priority)
            order.append(priority)

        askers = []
        for number, priority in enumerate((100, 101, 102, 0)):
            askers.append(threading.Thread(target=ask, args=(priority,)))
            askers[-1].start()
            while ranks.metric("vllm:num_requests_running") + ranks.metric(
                "vllm:num_requests_waiting"
            ) < number + 1 - len(order):
                time.sleep(0.005)
        for asker in askers:
            asker.join(60)
    assert ended["priority"].index(0) <= 1
    assert ended["fcfs"] == [100, 101, 102, 0]


# -- faults told while serving -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Cluster, Path]]:
    control = tmp_path_factory.mktemp("control") / "fake-engine"
    ranks = Cluster("--enable-auto-tool-choice", nodes=1)
    ranks.start(FAKE_ENGINE_CONTROL=str(control), FAKE_ENGINE_TTFT_S="0").wait_line("Application startup complete")
    yield ranks, control
    ranks.end()


def content(ranks: Cluster) -> Any:
    return json.loads(ranks.chat()[1])["choices"][0]["message"]["content"]


def test_hang_and_heal(told: tuple[Cluster, Path]) -> None:
    """Public case ready-health-200: 200, nothing running, requests waiting, no answer."""
    ranks, control = told
    control.write_text("hang")
    answers: list[tuple[int, str]] = []
    asker = threading.Thread(target=lambda: answers.append(ranks.chat()))
    asker.start()
    while ranks.metric("vllm:num_requests_waiting") < 1:
        assert asker.is_alive(), answers
        time.sleep(0.02)
    assert (ranks.ask("/health")[0], ranks.metric("vllm:num_requests_running"), answers) == (200, 0, [])
    control.write_text("")
    asker.join(5)
    assert answers[0][0] == 200


def test_bad_answers(told: tuple[Cluster, Path]) -> None:
    ranks, control = told
    control.write_text("fffd")
    assert "\ufffd" in content(ranks)
    control.write_text("empty")
    assert content(ranks) == ""
    control.write_text("error500")
    assert ranks.chat()[0] == 500
    control.write_text("unhealthy")
    assert ranks.ask("/health")[0] == 503
    control.write_text("slow_first_token=0.3")
    begin = time.monotonic()
    assert ranks.chat()[0] == 200
    assert time.monotonic() - begin > 0.3
    control.write_text("bad_tool_call")
    tool = {
        "type": "function",
        "function": {"name": "f", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
    }
    call = json.loads(ranks.chat(tools=[tool])[1])["choices"][0]["message"]["tool_calls"][0]
    with pytest.raises(json.JSONDecodeError):
        json.loads(call["function"]["arguments"])
    control.write_text("")
    assert "\ufffd" not in content(ranks) and ranks.ask("/health")[0] == 200


def test_counters_reset(told: tuple[Cluster, Path]) -> None:
    ranks, control = told
    control.write_text("")
    content(ranks)
    assert ranks.metric("vllm:generation_tokens_total") > 0
    control.write_text("reset")
    assert ranks.metric("vllm:generation_tokens_total") == 0
    content(ranks)
    assert ranks.metric("vllm:generation_tokens_total") > 0


def test_dead_engine_behind_a_healthy_api(cluster: Make) -> None:
    ranks = cluster(nodes=1)
    head = ranks.start(FAKE_ENGINE_FAULT="dead")
    head.wait_line("Application startup complete")
    assert ranks.ask("/health")[0] == 200
    assert ranks.chat()[0] == 500
    assert head.wait() == 0
