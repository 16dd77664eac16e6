"""OpenAI's own Python client: what it sends reaches the engine as if there were no gateway, but for what the lane forces."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import openai
import pytest

MESSAGES: Any = [{"role": "user", "content": "Wie heißt die Hauptstadt? \u00e4\U0001f30a"}]
TOOLS: Any = [
    {
        "type": "function",
        "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "number"}}}},
    }
]
SCHEMA: Any = {"type": "json_schema", "json_schema": {"name": "city", "schema": {"type": "object"}}}
CALLS: dict[str, dict[str, Any]] = {
    "chat": {"temperature": 0.1, "seed": 2**60},
    "streaming with usage": {"stream": True, "stream_options": {"include_usage": True}},
    "tools": {"tools": TOOLS, "tool_choice": "auto"},
    "response format": {"response_format": SCHEMA},
    "extra body": {
        "extra_body": {"top_k": 5, "priority": -5, "reasoning_effort": "max"},
        "extra_headers": {"X-Vllm-Priority": "-5"},
    },
    "service tier": {"service_tier": "priority", "reasoning_effort": "high"},
}


async def call(base_url: str, key: str, model: str, **parameters: Any) -> None:
    async with openai.AsyncOpenAI(base_url=base_url, api_key=key, max_retries=0) as client:
        answer = await client.chat.completions.create(model=model, messages=MESSAGES, **parameters)
        if parameters.get("stream"):
            async for _chunk in answer:
                pass


def members(body: bytes) -> dict[str, str]:
    """Each member of the body as the text that it is, so that 1.0 and 1 differ."""
    return {key: json.dumps(value) for key, value in json.loads(body).items()}


@pytest.mark.parametrize("case", CALLS)
def test_the_engine_gets_the_same_but_for_the_lane(play: Callable[..., None], case: str) -> None:
    async def scenario(setup: Any) -> None:
        await call(f"http://127.0.0.1:{setup.engine_port}/v1", "x", "glm", **CALLS[case])
        await call(setup.url("/v1"), "sk-alice-Zq81", "glm-batch", **CALLS[case])
        direct, lane = (members(one.body) for one in setup.engine.calls)
        ruled = {"priority": "10", "reasoning_effort": '"high"'}
        wanted = {
            key: value for key, value in direct.items() if key not in ("priority", "reasoning_effort", "service_tier")
        }
        assert lane == {**wanted, **ruled, "max_tokens": "4096"}
        # Not only equal: the very bytes of what nobody changes.
        start = setup.engine.calls[0].body.index(b'"messages":')
        messages = setup.engine.calls[0].body[start : setup.engine.calls[0].body.index(b"]", start) + 1]
        assert messages in setup.engine.calls[1].body

    play(scenario)


def test_models_errors_and_leaving_mid_stream(play: Callable[..., None]) -> None:
    async def scenario(setup: Any) -> None:
        async with openai.AsyncOpenAI(base_url=setup.url("/v1"), api_key="sk-bob-77ab", max_retries=0) as client:
            assert [model.id async for model in client.models.list()] == ["glm"]
            with pytest.raises(openai.PermissionDeniedError, match="may not use the model glm-batch"):
                await client.chat.completions.create(model="glm-batch", messages=MESSAGES)
            with pytest.raises(openai.NotFoundError, match="There is no model"):
                await client.chat.completions.create(model="gpt-4", messages=MESSAGES)
            setup.engine.chunks, setup.engine.delay_s = 1000, 0.02
            stream = await client.chat.completions.create(model="glm", messages=MESSAGES, stream=True)
            await anext(aiter(stream))
            await stream.close()
            await setup.until(lambda: setup.engine.running == 0 and setup.gateway.queue.running == 0)
            assert setup.engine.cancelled == 1
            stream = await client.chat.completions.create(model="glm", messages=MESSAGES, stream=True)
            with pytest.raises(openai.APIError, match="broke off"):
                async for _chunk in stream:
                    if setup.engine.runner is not None:
                        await setup.engine.stop()
                        setup.engine.runner = None
            await setup.engine.start(setup.engine_port)

    play(scenario)


def test_fifty_streams_at_once_are_the_engines_bytes(play: Callable[..., None]) -> None:
    async def scenario(setup: Any) -> None:
        setup.engine.chunks, setup.engine.delay_s = 5, 0.01
        body = {"model": "glm", "stream": True, "messages": MESSAGES}
        async with setup.client.post(f"http://127.0.0.1:{setup.engine_port}/v1/chat/completions", json=body) as direct:
            wanted = await direct.read()
        answers = await asyncio.gather(*(setup.ask(body) for _n in range(50)))
        assert {(status, found) for status, _headers, found in answers} == {(200, wanted)}
        assert setup.engine.peak <= 6

    play(scenario)
