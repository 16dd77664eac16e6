"""What reaches the engine: recorded at a stub, whatever a client sends (issue "One address, two lanes")."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import pytest
from gateway.body import ROUTES, Body, Rules, leaves, sequences
from gateway.refusal import Refusal
from hypothesis import given, settings
from hypothesis import strategies as st

CHAT = {"priority": 0, "reasoning_effort": "low"}
BATCH = {"priority": 10, "reasoning_effort": "high", "chat_template_kwargs": {"clear_thinking": False}}
RULED = [*leaves(CHAT), *leaves(BATCH)]


def sent(
    raw: bytes, forced: dict[str, Any], route: str = "chat", defaults: dict[str, Any] | None = None
) -> dict[str, Any]:
    out = json.loads(Rules(forced, defaults or {}, RULED).apply(Body(raw), route, "glm"))
    assert isinstance(out, dict)
    return out


ATTEMPTS: dict[str, bytes] = {
    "priority": b'{"model":"x","priority":-5}',
    "priority escaped": b'{"model":"x","\\u0070riority":-5}',
    "priority as text": b'{"model":"x","priority":"-5"}',
    "service tier": b'{"model":"x","service_tier":"priority"}',
    "effort": b'{"model":"x","reasoning_effort":"max"}',
    "effort as the Responses API spells it": b'{"model":"x","reasoning":{"effort":"max","summary":"auto"}}',
    "effort through the template": b'{"model":"x","chat_template_kwargs":{"reasoning_effort":"max","enable_thinking":true}}',
    "thinking through the template": b'{"model":"x","chat_template_kwargs":{"thinking":true,"custom":1}}',
    "extra_body not unfolded": b'{"model":"x","extra_body":{"priority":-5},"extra_headers":{"X-Vllm-Priority":"-5"}}',
    "template arguments that are no object": b'{"model":"x","chat_template_kwargs":"enable_thinking"}',
    "the other lane's template argument": b'{"model":"x","chat_template_kwargs":{"clear_thinking":true}}',
    "everything at once": b'{"priority":-5,"model":"x","reasoning_effort":null,"chat_template_kwargs":{"enable_thinking":true},'
    b'"service_tier":"flex","extra_body":{}}',
}


@pytest.mark.parametrize("attempt", ATTEMPTS)
@pytest.mark.parametrize("lane", [CHAT, BATCH], ids=["chat", "batch"])
def test_no_attempt_changes_the_lane(attempt: str, lane: dict[str, Any]) -> None:
    out = sent(ATTEMPTS[attempt], lane)
    assert out["model"] == "glm"
    assert out["priority"] == lane["priority"] and out["reasoning_effort"] == lane["reasoning_effort"]
    assert not {"service_tier", "extra_body", "extra_headers"} & set(out)
    assert "effort" not in out.get("reasoning", {})
    arguments = out.get("chat_template_kwargs", {})
    if isinstance(arguments, dict):
        assert not {"enable_thinking", "thinking", "reasoning_effort"} & set(arguments)
        assert arguments.get("clear_thinking") == lane.get("chat_template_kwargs", {}).get("clear_thinking")


def test_responses_get_their_own_spelling() -> None:
    out = sent(
        b'{"model":"x","reasoning":{"effort":"max","summary":"auto"},"reasoning_effort":"max"}', CHAT, "responses"
    )
    assert out == {"model": "glm", "priority": 0, "reasoning": {"effort": "low", "summary": "auto"}}


def test_tokenize_gets_no_parameters() -> None:
    assert sent(b'{"model":"x","prompt":"a","priority":1}', CHAT, "plain") == {"model": "glm", "prompt": "a"}


def test_forced_wins_below_a_mapping_and_the_rest_stays() -> None:
    out = sent(b'{"model":"x","chat_template_kwargs":{"clear_thinking":true,"language":"de"}}', BATCH)
    assert out["chat_template_kwargs"] == {"clear_thinking": False, "language": "de"}


def test_defaults_give_way_to_the_client() -> None:
    assert sent(b'{"model":"x"}', CHAT, defaults={"max_tokens": 64})["max_tokens"] == 64
    assert sent(b'{"model":"x","max_tokens":8}', CHAT, defaults={"max_tokens": 64})["max_tokens"] == 8
    # A default for what another lane forces says that the client of this lane may choose.
    free = sent(b'{"model":"x","reasoning_effort":"max"}', {"priority": 5}, defaults={"reasoning_effort": "low"})
    assert free["reasoning_effort"] == "max"
    assert "reasoning_effort" not in sent(b'{"model":"x","reasoning_effort":"max"}', {"priority": 5})


def test_a_forced_limit_has_no_other_spelling() -> None:
    forced = {"max_tokens": 16}
    rules = Rules(forced, {}, leaves(forced))
    raw = b'{"model":"x","max_completion_tokens":9999,"max_output_tokens":9999,"max_tokens":9999}'
    assert json.loads(rules.apply(Body(raw), "chat", "m")) == {"model": "m", "max_tokens": 16}
    assert json.loads(rules.apply(Body(raw), "responses", "m")) == {"model": "m", "max_output_tokens": 16}


def test_all_other_bytes_stay_as_they_came() -> None:
    raw = b'{"model":"x", "temperature":1.0e-0,"seed":12345678901234567890,'
    raw += b'"messages":[{"role":"user",  "content":"\\u00e4\xc3\xa4"}]}'
    out = Rules(CHAT, {}, RULED).apply(Body(raw), "chat", "glm")
    assert b'"temperature":1.0e-0' in out and b"12345678901234567890" in out
    assert b'"messages":[{"role":"user",  "content":"\\u00e4\xc3\xa4"}]' in out
    untouched = b' {"model" : "glm" , "n":1 } '
    assert Rules({}, {}, []).apply(Body(untouched), "chat", "glm") == untouched


BROKEN = [
    b"",
    b"[]",
    b"null",
    b"{",
    b'{"a":1',
    b'{"a" 1}',
    b'{"a":1,}',
    b'{"a":1}x',
    b"{'a':1}",
    b'{"a":NaN}',
    b'{"a":-Infinity}',
    b'{"a":01}',
    b'{"a":"\x01"}',
    b'{"model":"a","model":"b"}',
    b'{"model":"a","\\u006dodel":"b"}',
    b'{"chat_template_kwargs":{"a":1,"a":2}}',
    b'\xff\xfe{\x00"\x00a\x00"\x00:\x001\x00}\x00',
    b'\xef\xbb\xbf{"a":1}',
    b'{"a":"\xff"}',
    b'{"a":' + b"[" * 100_000,
    b'{"a":' + b"9" * 5000 + b"}",
]


@pytest.mark.parametrize("raw", BROKEN, ids=[str(raw[:24]) for raw in BROKEN])
def test_a_body_that_two_readers_could_read_differently_is_refused(raw: bytes) -> None:
    with pytest.raises(Refusal) as caught:
        Body(raw)
    assert caught.value.status == 400 and caught.value.code == "invalid_json"


@pytest.mark.parametrize(
    ("raw", "route", "wanted"),
    [
        (b'{"model":"x"}', "chat", 1),
        (b'{"n":4}', "chat", 4),
        (b'{"n":"4"}', "chat", 4),
        (b'{"n":4.0}', "chat", 4),
        (b'{"n":null}', "chat", 1),
        (b'{"n":"many"}', "chat", 1),
        (b'{"n":-3}', "chat", 1),
        (b'{"n":2,"best_of":5}', "completion", 5),
        (b'{"n":2,"prompt":["a","b","c"]}', "completion", 6),
        (b'{"prompt":[1,2,3]}', "completion", 1),
        (b'{"prompt":[[1,2],[3]]}', "completion", 2),
        (b'{"prompt":[]}', "completion", 1),
        (b'{"input":["a","b"]}', "embedding", 2),
    ],
)
def test_how_much_of_the_lane_a_body_takes(raw: bytes, route: str, wanted: int) -> None:
    assert sequences(Body(raw), route) == wanted


names = st.sampled_from(
    [
        "model",
        "priority",
        "reasoning_effort",
        "service_tier",
        "chat_template_kwargs",
        "reasoning",
        "effort",
        "extra_body",
        "enable_thinking",
        "thinking",
        "clear_thinking",
        "max_tokens",
        "messages",
        "temperature",
        "ä",
    ]
) | st.text(max_size=3)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=4),
    max_leaves=8,
)
objects = st.dictionaries(names, values, max_size=6)
nested = st.dictionaries(names.filter(lambda name: name != "model"), values, max_size=4)


@settings(max_examples=300, deadline=None)
@given(objects, nested, nested, nested, st.sampled_from(["chat", "completion"]), st.booleans())
def test_forced_parameters_always_win(
    client: dict[str, Any],
    forced: dict[str, Any],
    other: dict[str, Any],
    defaults: dict[str, Any],
    route: str,
    ascii_only: bool,
) -> None:
    """Whatever the client and the lanes say: what the lane forces is there, and what another lane forces is not the client's."""
    raw = json.dumps(client, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")
    ruled = [*leaves(forced), *leaves(other)]
    out = json.loads(Rules(forced, defaults, ruled).apply(Body(raw), route, "glm"))
    assert out["model"] == "glm"

    def at(tree: Any, path: tuple[str, ...]) -> Any:
        for key in path:
            if not isinstance(tree, dict) or key not in tree:
                return "absent"
            tree = tree[key]
        return tree

    for path in leaves(forced):
        wanted = at(forced, path)
        assert at(out, path) == wanted if wanted != {} else True
    for name in ("priority", "service_tier", "extra_body"):
        if name not in forced and name not in defaults:
            assert name not in out
    for path in leaves(other):
        # Neither forced nor proposed here, above or below: gone, whatever the client sent.
        if not any(p[: len(path)] == path or path[: len(p)] == p for p in (*leaves(forced), *leaves(defaults))):
            assert at(out, path) == "absent"
    touched = {
        "model",
        *forced,
        *other,
        *defaults,
        "priority",
        "service_tier",
        "extra_body",
        "extra_headers",
        "extra_query",
    }
    touched |= {"reasoning", "chat_template_kwargs", "max_tokens", "max_completion_tokens", "max_output_tokens"}
    for key in set(client) - touched:
        assert out[key] == client[key]


@settings(max_examples=300, deadline=None)
@given(st.text(max_size=60) | objects.map(json.dumps), st.integers(0, 60), st.binary(max_size=3))
def test_a_body_is_read_as_python_reads_it_or_refused(text: str, at: int, noise: bytes) -> None:
    """The scanner of the top level agrees with the standard library, byte for byte, on valid and on mangled text."""
    raw = text.encode("utf-8", "surrogatepass")
    raw = raw[:at] + noise + raw[at:]
    try:
        body = Body(raw)
    except Refusal:
        return
    found = json.loads(raw)
    assert found == body.values
    again = json.loads(body.changed({}))
    assert again == found or any(isinstance(v, float) and math.isnan(v) for v in found.values())
    assert json.loads(body.changed({"model": "m"})) == {**found, "model": "m"}


HEADERS: dict[str, dict[str, str]] = {
    "the engine's priority": {"X-Vllm-Priority": "-5"},
    "in capitals": {"X-VLLM-PRIORITY": "-5"},
    "with underscores": {"X_Vllm_Priority": "-5"},
    "data parallel rank": {"X-Data-Parallel-Rank": "1"},
    "lane": {"X-Gateway-Lane": "chat"},
    "cookie": {"Cookie": "a=b"},
    "forwarding": {"X-Forwarded-For": "127.0.0.1", "Forwarded": "for=127.0.0.1", "X-Original-URL": "/metrics"},
    "named hop by hop": {"Connection": "keep-alive, Content-Type"},
}


@pytest.mark.parametrize("case", HEADERS)
def test_headers_that_could_choose_stay_here(play: Callable[..., None], case: str) -> None:
    async def scenario(setup: Any) -> None:
        status, _headers, _body = await setup.ask({"model": "glm-batch", "priority": -5}, **HEADERS[case])
        assert status == 200
        (call,) = setup.engine.calls
        assert {name.lower() for name, _value in call.headers} <= {
            *("host", "content-type", "content-length", "accept", "user-agent", "accept-encoding"),
        }
        assert not any("Bearer" in value for _name, value in call.headers)
        assert call.json()["priority"] == 10

    play(scenario)


def test_another_alias_without_the_right_to_it(play: Callable[..., None]) -> None:
    async def scenario(setup: Any) -> None:
        status, _headers, body = await setup.ask({"model": "glm-batch"}, key="bob")
        assert status == 403 and "bob may not use the model glm-batch" in json.loads(body)["error"]["message"]
        status, _headers, _body = await setup.ask({"model": "glm"}, key="bob")
        assert status == 200
        assert [call.json()["priority"] for call in setup.engine.calls] == [0]

    play(scenario)


@pytest.mark.parametrize("path", [path for path in ROUTES if path != "/v1/embeddings"])
def test_every_route_keeps_to_the_lane(play: Callable[..., None], path: str) -> None:
    async def scenario(setup: Any) -> None:
        status, headers, _body = await setup.ask({"model": "glm-batch", "priority": -5, "prompt": "a"}, path)
        assert status == 200 and headers["x-gateway-lane"] == "batch"
        (call,) = setup.engine.calls
        assert call.path == path
        assert call.json()["model"] == "glm"
        assert call.json().get("priority") == (None if "tokenize" in path else 10)

    play(scenario)
