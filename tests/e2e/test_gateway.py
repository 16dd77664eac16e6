"""The gateway before real vLLM: OpenAI's own client, an engine that dies under a stream, and what is seen from outside."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from fleet import HEAD, SANDBOX, Node, run_playbook, wait_until

ADDRESS, KEY = "198.18.0.11", "sk-e2e-0123456789abcdef"
BASE = f"http://{ADDRESS}:8080"
SETTINGS = {
    "gateway_enabled": True,
    "gateway_firewall": True,
    "gateway_keys": [{"name": "e2e", "key": KEY}],
    "recipe_overrides": {
        "args": {"max-num-seqs": 16, "enable-auto-tool-choice": True, "tool-call-parser": "hermes"},
        "lanes": {"chat": {"priority": 0}, "batch": {"priority": 10, "max_concurrent": 15}},
    },
}
VARS = ("-e", json.dumps(SETTINGS))
PROMPT = "What is the sea? "
SCHEMA = {"type": "object", "properties": {"sea": {"type": "boolean"}}, "required": ["sea"]}
TOOL = {"type": "function", "function": {"name": "sea", "parameters": SCHEMA}}
NAMED = {"type": "function", "function": {"name": "sea"}}


@pytest.fixture(scope="module")
def gateway(nodes) -> Iterator[Node]:
    for name in ("serve", "gateway"):
        done = run_playbook(name, SANDBOX, *VARS)
        assert done.returncode == 0, done.stdout[-4000:]
    yield nodes[HEAD]
    done = run_playbook("gateway", SANDBOX, *VARS, "-e", "gateway_state=absent")
    assert done.returncode == 0, done.stdout[-3000:]
    run_playbook("stop", SANDBOX)


def body(**more: Any) -> dict[str, Any]:
    return {
        "model": "tiny",
        "messages": [{"role": "user", "content": PROMPT}],
        "temperature": 0,
        "max_tokens": 24,
        **more,
    }


def directly(head: Node, asked: dict[str, Any]) -> str:
    """The answer of the engine itself, which listens on the head's loopback."""
    url = "http://127.0.0.1:8000/v1/chat/completions"
    return head.run("curl", "-s", "-H", "Content-Type: application/json", "-d", json.dumps(asked), url)


def choices(text: str) -> list[Any]:
    """What was chosen, without the ids and the time of one answer."""
    text = re.sub(r"chatcmpl-tool-\w+", "chatcmpl-tool", text)
    if text.startswith("data: "):
        pieces = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
        return [[piece["choices"], piece.get("usage")] for piece in pieces]
    return [json.loads(text)["choices"], json.loads(text)["usage"]]


def through(asked: dict[str, Any], key: str = KEY) -> tuple[int, str, Any]:
    request = urllib.request.Request(
        f"{BASE}/v1/chat/completions",
        json.dumps(asked).encode(),
        {"Content-Type": "application/json", "Authorization": f"Bearer {key}"},
    )
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            return answer.status, answer.read().decode(), answer.headers
    except urllib.error.HTTPError as e:
        return e.code, e.read().decode(), e.headers


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"stream": True, "stream_options": {"include_usage": True}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "sea", "schema": SCHEMA}}},
        {"tools": [TOOL], "tool_choice": NAMED},
        {"n": 2, "temperature": 0.7, "seed": 5, "logprobs": True},
    ],
    ids=["chat", "stream with usage", "json schema", "tool", "two answers"],
)
def test_the_answer_is_the_engines_own(gateway, more) -> None:
    status, text, _headers = through(body(**more))
    assert status == 200, text
    assert choices(text) == choices(directly(gateway, body(**more)))


def test_openais_client_lists_streams_and_leaves(gateway) -> None:
    async def scenario() -> None:
        async with openai.AsyncOpenAI(base_url=f"{BASE}/v1", api_key=KEY, max_retries=0) as client:
            assert [model.id async for model in client.models.list()] == ["tiny", "tiny-batch"]
            asked = body(stream=True, stream_options={"include_usage": True})

            async def one() -> str:
                stream = await client.chat.completions.create(**asked)
                return "".join([c.choices[0].delta.content or "" async for c in stream if c.choices])

            alone = await one()
            together = await asyncio.gather(*(one() for _n in range(50)))
            assert alone and len(together) == 50 and all(together)
            long = body(stream=True, max_tokens=1500, extra_body={"ignore_eos": True})
            stream = await client.chat.completions.create(**long)
            await anext(aiter(stream))
            await stream.close()

    asyncio.run(scenario())

    def idle() -> bool:
        page = gateway.run("curl", "-s", "http://127.0.0.1:8000/metrics").splitlines()
        return all(line.endswith(" 0.0") for line in page if line.startswith("vllm:num_requests_running"))

    wait_until("the engine lets go of what was cancelled", idle, 60, 1)


def test_no_key_another_lane_and_a_lie_about_priority(gateway) -> None:
    status, text, _headers = through(body(), "sk-of-nobody-at-all")
    assert (status, json.loads(text)["error"]["type"]) == (401, "invalid_request_error"), text
    assert through(body(model="nothing"))[0] == 404
    assert through(body(priority=-5, extra_body={"priority": -5}))[0] == 200


def test_from_outside_there_is_only_the_gateway(gateway) -> None:
    socket.create_connection((ADDRESS, 8080), 5).close()
    for port in (8000, 29521):
        with pytest.raises(OSError):
            socket.create_connection((ADDRESS, port), 3).close()


def test_no_key_and_no_prompt_where_others_read(gateway) -> None:
    assert through(body(messages=[{"role": "user", "content": "the secret of the sea"}]))[0] == 200
    seen = gateway.run("ps", "-eo", "args") + gateway.run("docker", "inspect", "gb10-tiny")
    seen += gateway.run("journalctl", "--no-pager", "-u", "gb10-gateway") + gateway.run("docker", "logs", "gb10-tiny")
    assert KEY not in seen and "secret of the sea" not in seen
    assert gateway.run("stat", "-c", "%a", "/etc/gb10-fleet/gateway-keys.json").strip() == "600"


def test_a_head_that_dies_under_a_stream(gateway) -> None:
    """The client hears of it, others are told when to come back, and the same gateway serves again after serve.yml."""
    process = gateway.run("systemctl", "show", "--property=MainPID,NRestarts", "gb10-gateway")
    client = openai.OpenAI(base_url=f"{BASE}/v1", api_key=KEY, max_retries=0, timeout=60)
    stream = client.chat.completions.create(**body(stream=True, max_tokens=1800, extra_body={"ignore_eos": True}))
    next(iter(stream))
    begin = time.monotonic()
    gateway.run("docker", "kill", "gb10-tiny")
    with pytest.raises(openai.APIError) as said:
        for _piece in stream:
            pass
    print(f"\nthe client hears of it after {time.monotonic() - begin:.1f} s: {said.value}")
    status, text, headers = through(body())
    assert status == 503 and int(headers["Retry-After"]) > 0, text
    print(f"then: {status}, Retry-After {headers['Retry-After']}, {json.loads(text)['error']['message']}")
    done = run_playbook("serve", SANDBOX, *VARS)
    assert done.returncode == 0, done.stdout[-4000:]
    assert through(body())[0] == 200
    assert gateway.run("systemctl", "show", "--property=MainPID,NRestarts", "gb10-gateway") == process
