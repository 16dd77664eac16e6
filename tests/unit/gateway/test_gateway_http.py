"""What a client sees: every refusal with its status and sentence, streams as the engine sends them, an end to everything."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from collections.abc import Callable
from typing import Any

import aiohttp
import pytest
from gateway.settings import Keys, Settings, SettingsError

GOOD: dict[str, Any] = {"model": "glm", "messages": [{"role": "user", "content": "secret-prompt"}]}
STREAM = {**GOOD, "stream": True}


def error(body: bytes) -> dict[str, Any]:
    found = json.loads(body)["error"]
    assert set(found) == {"message", "type", "param", "code"} and found["message"].endswith(".")
    return dict(found)


REFUSED: dict[str, tuple[dict[str, Any], int, str, str]] = {
    "no key": ({"key": None}, 401, "invalid_api_key", "The key is missing"),
    "wrong key": ({"key": "sk-nobody"}, 401, "invalid_api_key", "not known here"),
    "empty key": ({"key": ""}, 401, "invalid_api_key", "The key is missing"),
    "lane not allowed": ({"key": "bob", "body": {"model": "glm-batch"}}, 403, "lane_not_allowed", "may not use"),
    "unknown model": ({"body": {"model": "gpt-4"}}, 404, "model_not_found", "'gpt-4'"),
    "no model": ({"body": {"messages": []}}, 400, "model_missing", "no model"),
    "model that is no text": ({"body": {"model": ["glm"]}}, 400, "model_missing", "no model"),
    "malformed JSON": ({"body": b'{"model": "glm"'}, 400, "invalid_json", "not one JSON object"),
    "no JSON object": ({"body": b'["glm"]'}, 400, "invalid_json", "not one JSON object"),
    "a key twice": ({"body": b'{"model":"glm","model":"glm-batch"}'}, 400, "invalid_json", "twice"),
    "oversized": ({"body": b'{"a":"' + b"x" * (1 << 20) + b'"}'}, 413, "body_too_large", "larger than 1 MiB"),
    "compressed": ({"Content-Encoding": "gzip"}, 415, "encoding_refused", "Compressed"),
    "background response": (
        {"path": "/v1/responses", "body": {"model": "glm", "background": True}},
        400,
        "background_refused",
        "background: false",
    ),
    "more sequences than the lane": (
        {"body": {"model": "glm-batch", "n": 3}},
        400,
        "too_many_sequences",
        "3 sequences at once, 2",
    ),
    "path that is not listed": ({"path": "/v1/load_lora_adapter"}, 404, "not_found", "no such path"),
    "the engine's metrics": ({"path": "/v1/metrics"}, 404, "not_found", "no such path"),
    "invocations": ({"path": "/invocations"}, 404, "not_found", "no such path"),
    "embeddings that are not served": ({"path": "/v1/embeddings"}, 404, "not_found", "no such path"),
    "wrong method": ({"path": "/v1/models"}, 405, "method_not_allowed", "takes GET"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_with_status_and_sentence(play: Callable[..., None], case: str) -> None:
    given, status, code, words = REFUSED[case]

    async def scenario(setup: Any) -> None:
        found, _headers, body = await setup.ask(**{"body": GOOD, **given})
        said = error(body)
        assert (found, said["code"]) == (status, code) and words in said["message"]
        assert setup.engine.calls == []

    play(scenario, body_mib=1)


HEAD = b"Host: x\r\nAuthorization: Bearer sk-alice-Zq81\r\nContent-Type: application/json\r\n"
BODY = b'{"model":"glm"}'
CHAT = b"POST /v1/chat/completions HTTP/1.1\r\n" + HEAD
RAW: dict[str, tuple[bytes, bytes]] = {
    "path traversal": (b"GET /v1/../metrics HTTP/1.1\r\n" + HEAD + b"\r\n", b" 404 "),
    "encoded traversal": (b"GET /v1/%2e%2e/metrics HTTP/1.1\r\n" + HEAD + b"\r\n", b" 404 "),
    "encoded slash": (b"POST /v1%2fchat/completions HTTP/1.1\r\n" + HEAD + b"Content-Length: 0\r\n\r\n", b" 404 "),
    "double slash": (b"POST //v1/chat/completions HTTP/1.1\r\n" + HEAD + b"Content-Length: 0\r\n\r\n", b" 404 "),
    "absolute target": (b"GET http://127.0.0.1/v1/models HTTP/1.1\r\n" + HEAD + b"\r\n", b" 404 "),
    "both lengths": (CHAT + b"Content-Length: 15\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + BODY, b" 400 "),
    "two lengths": (CHAT + b"Content-Length: 15\r\nContent-Length: 0\r\n\r\n" + BODY, b" 400 "),
    "signed length": (CHAT + b"Content-Length: +15\r\n\r\n" + BODY, b" 400 "),
    "chunked said twice": (CHAT + b"Transfer-Encoding: chunked, chunked\r\n\r\n0\r\n\r\n", b" 400 "),
    "chunked not last": (CHAT + b"Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n", b" 400 "),
    "unknown coding": (CHAT + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n", b" 400 "),
    "space before the colon": (CHAT + b"Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n", b" 400 "),
    "folded header": (CHAT + b"X-A: b\r\n Transfer-Encoding: chunked\r\nContent-Length: 15\r\n\r\n" + BODY, b" 400 "),
    "chunk size that is no number": (
        CHAT + b"Transfer-Encoding: chunked\r\n\r\n0x0f\r\n" + BODY + b"\r\n0\r\n\r\n",
        b" 400 ",
    ),
    "chunk that is longer than it says": (
        CHAT + b"Transfer-Encoding: chunked\r\n\r\n5\r\n" + BODY + b"\r\n0\r\n\r\n",
        b" 400 ",
    ),
    "null in a header": (CHAT + b"X-A: a\x00b\r\nContent-Length: 15\r\n\r\n" + BODY, b" 400 "),
    "two keys": (CHAT + b"Authorization: Bearer other\r\nContent-Length: 15\r\n\r\n" + BODY, b" 401 "),
    "header that is too long": (CHAT + b"X-A: " + b"a" * 20000 + b"\r\nContent-Length: 15\r\n\r\n" + BODY, b" 400 "),
    "announced too large": (CHAT + b"Content-Length: 9999999999\r\n\r\n", b" 413 "),
}


@pytest.mark.parametrize("case", RAW)
def test_tricks_with_framing_are_refused(play: Callable[..., None], case: str) -> None:
    request, wanted = RAW[case]

    async def scenario(setup: Any) -> None:
        answer = await setup.raw(request)
        assert wanted in answer.partition(b"\r\n")[0], answer[:200]
        assert b'{"error": {"message": "' in answer
        assert setup.engine.calls == []

    play(scenario, body_mib=1)


def test_a_chunked_body_is_taken(play: Callable[..., None]) -> None:
    async def scenario(setup: Any) -> None:
        answer = await setup.raw(
            CHAT
            + b"Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n6\r\n"
            + BODY[:6]
            + b"\r\n9\r\n"
            + BODY[6:]
            + b"\r\n0\r\n\r\n"
        )
        assert b" 200 " in answer[:20]
        (call,) = setup.engine.calls
        assert ("Content-Length", str(len(call.body))) in call.headers and call.json()["model"] == "glm"

    play(scenario)


def test_continue_is_said_before_a_large_body(play: Callable[..., None]) -> None:
    async def scenario(setup: Any) -> None:
        answer = await setup.raw(
            CHAT + b"Expect: 100-continue\r\nConnection: close\r\nContent-Length: 15\r\n\r\n" + BODY, to_end=True
        )
        assert answer.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 ")
        refused = await setup.raw(
            CHAT.replace(b"Zq81", b"none") + b"Expect: 100-continue\r\nContent-Length: 15\r\n\r\n"
        )
        assert refused.startswith(b"HTTP/1.1 401 ")

    play(scenario)


def test_answers_pass_through_byte_for_byte(play: Callable[..., None]) -> None:
    async def scenario(setup: Any) -> None:
        for body in (GOOD, STREAM):
            url = f"http://127.0.0.1:{setup.engine_port}/v1/chat/completions"
            async with setup.client.post(url, json=body) as direct:
                wanted = await direct.read()
            status, headers, found = await setup.ask(body)
            assert (status, found) == (200, wanted)
            assert headers["content-type"] == direct.headers["Content-Type"]
            assert headers["x-gateway-lane"] == "chat" and int(headers["x-gateway-wait-ms"]) < 1000
        setup.engine.status = 400
        assert (await setup.ask(GOOD))[::2] == (400, b'{"error": {"message": "from the engine"}}')

    play(scenario)


def test_models_are_the_aliases_that_the_key_may_use(play: Callable[..., None]) -> None:
    async def scenario(setup: Any) -> None:
        for secret, wanted in (("sk-alice-Zq81", ["glm", "glm-batch"]), ("sk-bob-77ab", ["glm"])):
            headers = {"Authorization": f"Bearer {secret}"}
            async with setup.client.get(setup.url("/v1/models"), headers=headers) as answer:
                found = await answer.json()
            assert [card["id"] for card in found["data"]] == wanted
            assert found["data"][0]["max_model_len"] == 2048

    play(scenario, max_model_len=2048)


def test_a_client_that_goes_away_ends_the_engines_work(play: Callable[..., None]) -> None:
    async def scenario(setup: Any) -> None:
        setup.engine.gate = asyncio.Event()
        gone = [setup.later(setup.ask({"model": "glm-batch"})) for _n in range(3)]
        await setup.until(lambda: setup.engine.running == 2 and setup.gateway.queue.lanes["batch"].queued == 1)
        for task in gone:
            task.cancel()
        await setup.until(lambda: setup.engine.cancelled == 2 and setup.engine.running == 0)
        lane = setup.gateway.queue.lanes["batch"]
        await setup.until(lambda: (lane.running, lane.queued) == (0, 0))
        assert len(setup.engine.calls) == 2
        assert setup.gateway.buffered == 0

    play(scenario)


def test_a_client_that_stops_mid_stream_ends_the_engines_work(play: Callable[..., None]) -> None:
    async def scenario(setup: Any) -> None:
        setup.engine.chunks, setup.engine.delay_s = 1000, 0.02
        headers = {"Authorization": "Bearer sk-alice-Zq81"}
        async with setup.client.post(setup.url("/v1/chat/completions"), json=STREAM, headers=headers) as answer:
            await answer.content.readany()
        await setup.until(lambda: setup.engine.running == 0 and setup.gateway.queue.running == 0)
        assert setup.engine.cancelled == 1

    play(scenario)


def test_the_batch_lane_is_capped_and_queues(play: Callable[..., None]) -> None:
    async def scenario(setup: Any) -> None:
        setup.engine.gate = asyncio.Event()
        tasks = [setup.later(setup.ask({"model": "glm-batch"})) for _n in range(7)]
        await setup.until(lambda: sum(task.done() for task in tasks) == 1)
        refused = next(task.result() for task in tasks if task.done())
        assert refused[0] == 429 and int(refused[1]["retry-after"]) >= 1
        assert error(refused[2])["type"] == "rate_limit_error"
        await setup.until(lambda: setup.engine.running == 2)
        # Urgent work does not see that queue.
        urgent = setup.later(setup.ask(GOOD))
        await setup.until(lambda: setup.engine.running == 3)
        setup.engine.gate.set()
        await asyncio.gather(*tasks, urgent)
        assert urgent.result()[0] == 200 and sorted(task.result()[0] for task in tasks) == [200] * 6 + [429]
        priorities = [call.json()["priority"] for call in setup.engine.calls]
        assert priorities.count(10) == 6 and priorities.count(0) == 1
        waits = [int(task.result()[1]["x-gateway-wait-ms"]) for task in tasks if task.result()[0] == 200]
        assert max(waits) > 0

    play(scenario)


def test_a_slow_client_is_waited_for_without_memory(play: Callable[..., None]) -> None:
    """The engine's stream stops: 64 MiB are on offer, and only what sockets and buffers hold is taken."""

    async def scenario(setup: Any) -> None:
        setup.engine.chunks, setup.engine.big = 64, 1 << 20
        reader, writer = await asyncio.open_connection("127.0.0.1", setup.port, limit=1024)
        body = json.dumps(STREAM).encode()
        writer.write(CHAT + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        await setup.until(lambda: setup.engine.sent > 0)
        before = -1
        while setup.engine.sent != before:
            before = setup.engine.sent
            await asyncio.sleep(0.3)
        assert setup.engine.sent < 32 << 20
        rest = await reader.read(100)
        assert rest.startswith(b"HTTP/1.1 200 OK")
        writer.transport.abort()
        await setup.until(lambda: setup.engine.running == 0)

    play(scenario)


def test_a_client_that_never_reads_is_let_go(play: Callable[..., None]) -> None:
    async def scenario(setup: Any) -> None:
        setup.engine.chunks, setup.engine.big = 64, 1 << 20
        _reader, writer = await asyncio.open_connection("127.0.0.1", setup.port, limit=1024)
        body = json.dumps(STREAM).encode()
        writer.write(CHAT + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        await setup.until(lambda: setup.engine.running == 1)
        await setup.until(lambda: setup.engine.running == 0 and setup.gateway.queue.running == 0)
        writer.close()

    play(scenario, stall_s=0.5)


def test_a_body_that_never_comes_is_given_up(play: Callable[..., None]) -> None:
    async def scenario(setup: Any) -> None:
        answer = await setup.raw(CHAT + b"Content-Length: 15\r\n\r\n" + BODY[:5])
        assert b" 408 " in answer[:20] and b"moved no byte for 0.3 s" in answer

    play(scenario, stall_s=0.3)


def test_timeouts_of_engine_and_request(play: Callable[..., None]) -> None:
    async def scenario(setup: Any) -> None:
        setup.engine.gate = asyncio.Event()
        status, _headers, body = await setup.ask(GOOD)
        assert (status, error(body)["code"]) == (504, "engine_silent")
        setup.engine.gate = None
        setup.engine.chunks, setup.engine.delay_s = 1000, 0.05
        with pytest.raises(aiohttp.ClientPayloadError):
            await setup.ask(STREAM)
        await setup.until(lambda: setup.engine.running == 0)

    play(scenario, idle_s=0.3, total_s=0.8)


def test_engine_down_then_back(play: Callable[..., None]) -> None:
    """No restart of the gateway in between, and the watchdog's reason in the sentence."""

    async def scenario(setup: Any) -> None:
        assert (await setup.ask(GOOD))[0] == 200
        port = setup.engine_port
        await setup.engine.stop()
        (setup.folder / "watchdog.json").write_text(
            '{"cluster": "alpha", "state": {"name": "recovering", "why": "spark-02: the rank is gone"}}'
        )
        status, headers, body = await setup.ask(GOOD)
        assert (status, headers["retry-after"]) == (503, "10")
        assert "recovering (spark-02: the rank is gone)" in error(body)["message"]
        async with setup.client.get(setup.url("/readyz")) as answer:
            assert answer.status == 503 and "spark-02" in (await answer.json())["status"]
        (setup.folder / "watchdog.json").write_text('{"state": {"name": "serving", "why": ""}}')
        assert "starting, restarting or down" in error((await setup.ask(GOOD))[2])["message"]
        await setup.engine.start(port)
        assert (await setup.ask(GOOD))[0] == 200
        await asyncio.sleep(1)
        async with setup.client.get(setup.url("/readyz")) as answer:
            assert answer.status == 200

    play(scenario)


def test_engine_killed_mid_stream(play: Callable[..., None]) -> None:
    """The client gets an event with an error, then an end that is none of a good stream; the next one 503."""

    async def scenario(setup: Any) -> None:
        setup.engine.chunks, setup.engine.delay_s = 1000, 0.02
        headers = {"Authorization": "Bearer sk-alice-Zq81"}
        async with setup.client.post(setup.url("/v1/chat/completions"), json=STREAM, headers=headers) as answer:
            got = await answer.content.readany()
            await setup.engine.stop()
            with pytest.raises(aiohttp.ClientPayloadError):
                while True:
                    chunk = await asyncio.wait_for(answer.content.readany(), 5)
                    assert chunk
                    got += chunk
        last = got.decode().strip().split("\n\n")[-1]
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "engine_broke_off"
        assert (await setup.ask(GOOD))[0] == 503

    play(scenario)


def test_held_back_while_the_engine_restarts(play: Callable[..., None]) -> None:
    async def scenario(setup: Any) -> None:
        setup.engine.gate = asyncio.Event()
        running = [setup.later(setup.ask({"model": "glm-batch"})) for _n in range(3)]
        await setup.until(lambda: setup.engine.running == 2)
        (setup.folder / "hold").write_text("serve.yml restarts the engine")
        status, headers, body = await setup.ask(GOOD)
        assert (status, headers["retry-after"]) == (503, "10")
        assert "serve.yml restarts the engine" in error(body)["message"]
        setup.engine.gate.set()
        await asyncio.gather(*running)
        # Those at the engine finish; the one that waited for them does not start.
        assert sorted(task.result()[0] for task in running) == [200, 200, 503]
        (setup.folder / "hold").unlink()
        assert (await setup.ask(GOOD))[0] == 200

    play(scenario)


def test_stopping_lets_streams_finish(play: Callable[..., None]) -> None:
    async def scenario(setup: Any) -> None:
        setup.engine.gate = asyncio.Event()
        tasks = [setup.later(setup.ask({"model": "glm-batch"})) for _n in range(3)]
        await setup.until(lambda: setup.engine.running == 2 and setup.gateway.queue.lanes["batch"].queued == 1)
        setup.gateway.stop()
        await setup.until(lambda: sum(task.done() for task in tasks) == 1)
        assert (await setup.ask(GOOD))[0] == 503
        setup.engine.gate.set()
        await asyncio.gather(*tasks)
        assert sorted(task.result()[0] for task in tasks) == [200, 200, 503]

    play(scenario)


def test_keys_are_replaced_without_dropping_streams(play: Callable[..., None]) -> None:
    async def scenario(setup: Any) -> None:
        setup.engine.chunks, setup.engine.delay_s = 10, 0.03
        stream = setup.later(setup.ask(STREAM))
        await setup.until(lambda: setup.engine.running == 1)
        file = setup.folder / "keys.json"
        file.write_text(json.dumps([{"name": "carol", "sha256": hashlib.sha256(b"new").hexdigest()}]))
        setup.gateway.keys.reload()
        assert (await setup.ask(GOOD, key="alice"))[0] == 401
        assert (await setup.ask(GOOD, key="new"))[0] == 200
        file.write_text("[{]")
        with pytest.raises(SettingsError, match="not JSON"):
            setup.gateway.keys.reload()
        assert (await setup.ask(GOOD, key="new"))[0] == 200
        status, _headers, body = await stream
        assert status == 200 and body.endswith(b"data: [DONE]\n\n")

    play(scenario)


def test_a_key_has_its_own_limit(play: Callable[..., None]) -> None:
    async def scenario(setup: Any) -> None:
        setup.engine.gate = asyncio.Event()
        tasks = [setup.later(setup.ask(GOOD, key="bob")) for _n in range(4)] + [setup.later(setup.ask(GOOD))]
        await setup.until(lambda: setup.engine.running == 3)
        await asyncio.sleep(0.05)
        assert setup.engine.running == 3
        setup.engine.gate.set()
        await asyncio.gather(*tasks)

    play(scenario)


def test_no_prompt_and_no_key_in_log_or_metrics(play: Callable[..., None], caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(setup: Any) -> None:
        await setup.ask({**GOOD, "user": "secret-user"})
        await setup.ask(GOOD, key="sk-wrong-key")
        await setup.ask(GOOD, path="/v1/secret-path?api_key=sk-alice-Zq81")
        await setup.ask({"model": "secret-model"})
        await setup.ask(b'{"model": "glm", "messages": secret-prompt')
        await setup.raw(b"GET /v1/models?sk-alice-Zq81 HTTP/1.1\r\nBroken secret-header\r\n\r\n")
        async with setup.client.get(setup.url("/metrics")) as answer:
            page = await answer.text()
        assert 'gb10_gateway_requests_total{lane="chat",outcome="ok"} 1.0' in page
        assert 'gb10_gateway_requests_total{lane="none",outcome="invalid_api_key"} 1.0' in page
        assert 'gb10_gateway_wait_seconds_count{lane="chat"} 1.0' in page
        assert 'gb10_gateway_in_flight{lane="chat"} 0.0' in page
        for text in (caplog.text, page):
            for secret in ("secret", "sk-"):
                assert secret not in text
        assert "route=/v1/chat/completions lane=chat key=alice status=200 outcome=ok" in caplog.text

    caplog.set_level(logging.DEBUG, "gateway")
    play(scenario)


def test_bodies_that_wait_have_a_budget(play: Callable[..., None]) -> None:
    async def scenario(setup: Any) -> None:
        setup.engine.gate = asyncio.Event()
        large = {"model": "glm-batch", "prompt": "x" * 700_000}
        first = setup.later(setup.ask(large))
        await setup.until(lambda: setup.engine.running == 1)
        status, headers, body = await setup.ask(large)
        assert (status, error(body)["code"]) == (503, "bodies_full") and "retry-after" in headers
        setup.engine.gate.set()
        assert (await first)[0] == 200

    play(scenario, buffer_mib=1)


def test_without_keys_only_loopback_or_said_so(tmp_path: Any) -> None:
    plain: dict[str, Any] = {"upstream": "http://127.0.0.1:1", "model": "m", "lanes": {}}
    Keys(Settings(**plain))
    Keys(Settings(**plain, host="0.0.0.0", open=True))
    with pytest.raises(SettingsError, match="No key is set and the gateway would listen on 0"):
        Keys(Settings(**plain, host="0.0.0.0"))
    file = tmp_path / "keys.json"
    file.write_text("[]")
    file.chmod(0o644)
    with pytest.raises(SettingsError, match="mode 0644, wanted 0600"):
        Keys(Settings(**plain, keys_file=str(file)))


def test_open_needs_no_key(play: Callable[..., None]) -> None:
    async def scenario(setup: Any) -> None:
        assert (await setup.ask(GOOD, key=None))[0] == 200
        assert (await setup.ask({"model": "glm-batch"}, key="anything"))[0] == 200

    play(scenario, keys=[], open=True)
