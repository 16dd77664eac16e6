# Copyright (c) The gb10.fleet maintainers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Rewriting a request body: what the lane forces is written, what chooses a lane is dropped, all other bytes stay as they came.

Pure functions. The body is never re-serialised as a whole, so numbers, escapes and the order of keys reach the engine as sent.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from json.decoder import scanstring  # type: ignore[attr-defined]
from typing import Any, NoReturn

from .refusal import Refusal

Path = tuple[str, ...]

CHAT, COMPLETION, RESPONSES, EMBEDDING, PLAIN = "chat", "completion", "responses", "embedding", "plain"
ROUTES: dict[str, str] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": COMPLETION,
    "/v1/responses": RESPONSES,
    "/v1/embeddings": EMBEDDING,
    "/tokenize": PLAIN,
    "/detokenize": PLAIN,
}

# A client never sends these: they choose a lane, or would if some layer unfolded them.
NEVER: tuple[Path, ...] = (("priority",), ("service_tier",), ("extra_body",), ("extra_headers",), ("extra_query",))
# Other spellings of a parameter. A lane that rules the first rules all of them (vLLM's chat template reads the keyword arguments).
TWINS: dict[Path, tuple[Path, ...]] = {
    ("reasoning_effort",): (
        ("reasoning", "effort"),
        ("chat_template_kwargs", "reasoning_effort"),
        ("chat_template_kwargs", "enable_thinking"),
        ("chat_template_kwargs", "thinking"),
    ),
    ("max_tokens",): (("max_completion_tokens",), ("max_output_tokens",)),
    ("max_completion_tokens",): (("max_tokens",), ("max_output_tokens",)),
}
# How /v1/responses spells what chat completions call otherwise.
IN_RESPONSES: dict[str, Path] = {
    "reasoning_effort": ("reasoning", "effort"),
    "max_tokens": ("max_output_tokens",),
    "max_completion_tokens": ("max_output_tokens",),
}

_SPACE = " \t\n\r"
_ABSENT: Any = object()


def _malformed(sentence: str) -> Refusal:
    return Refusal(400, "invalid_json", sentence)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        raise _malformed("A key occurs twice in one JSON object. Send each key once.")
    return out


def _no_constant(_name: str) -> NoReturn:
    raise ValueError("NaN and Infinity are not JSON")


_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_no_constant)


class Body:
    """A JSON object as text: its members by key, each with its value and the text that it came as."""

    def __init__(self, raw: bytes) -> None:
        try:
            self._text = raw.decode("utf-8")
            self.values, self._spans = self._scan()
        except (ValueError, IndexError, RecursionError) as exc:
            why = f": {exc}" if isinstance(exc, json.JSONDecodeError) else ""
            raise _malformed(f"The body is not one JSON object in UTF-8{why}.") from None

    def _skip(self, at: int) -> int:
        text = self._text
        while text[at : at + 1] in _SPACE and at < len(text):
            at += 1
        return at

    def _expect(self, at: int, wanted: str) -> str:
        found = self._text[at : at + 1]
        if not found or found not in wanted:
            raise json.JSONDecodeError(f"expecting {' or '.join(wanted)}", "", at)
        return found

    def _scan(self) -> tuple[dict[str, Any], dict[str, tuple[int, int]]]:
        pairs: list[tuple[str, Any]] = []
        spans: dict[str, tuple[int, int]] = {}
        at = self._skip(0)
        self._expect(at, "{")
        at = self._skip(at + 1)
        more = self._expect(at, '"}') == '"'
        while more:
            first = at
            self._expect(at, '"')
            key, at = scanstring(self._text, at + 1, True)
            at = self._skip(at)
            self._expect(at, ":")
            value, at = _DECODER.raw_decode(self._text, self._skip(at + 1))
            pairs.append((key, value))
            spans[key] = (first, at)
            at = self._skip(at)
            more = self._expect(at, ",}") == ","
            at = self._skip(at + 1) if more else at
        if self._skip(at + 1) != len(self._text):
            raise json.JSONDecodeError("extra data", "", at + 1)
        return _unique(pairs), spans

    def changed(self, changes: Mapping[str, Any]) -> bytes:
        """The object with these members replaced or added (``_ABSENT``: removed), every other one as it came."""
        if not changes:
            return self._text.encode()
        parts = []
        for key in {**self._spans, **changes}:
            if key not in changes:
                start, end = self._spans[key]
                parts.append(self._text[start:end].encode())
            elif changes[key] is not _ABSENT:
                parts.append(json.dumps({key: changes[key]})[1:-1].encode())
        return b"{" + b",".join(parts) + b"}"


def leaves(tree: Mapping[str, Any], above: Path = ()) -> list[Path]:
    """The paths of all values of nested mappings; an empty mapping is a value."""
    out: list[Path] = []
    for key, value in tree.items():
        out += leaves(value, (*above, key)) if isinstance(value, Mapping) and value else [(*above, key)]
    return out


def deep_merge(under: Any, over: Mapping[str, Any]) -> dict[str, Any]:
    """``over`` laid over ``under``: mappings merge, of anything else ``over`` wins."""
    out = dict(under) if isinstance(under, Mapping) else {}
    for key, value in over.items():
        out[key] = deep_merge(out.get(key), value) if isinstance(value, Mapping) and value else value
    return out


def _without(value: Any, path: Path) -> Any:
    """The value without what lies at the path below it; the very same object when nothing does."""
    if not path:
        return _ABSENT
    if not isinstance(value, Mapping) or path[0] not in value:
        return value
    inner = _without(value[path[0]], path[1:])
    if inner is value[path[0]]:
        return value
    rest = {key: item for key, item in value.items() if key != path[0]}
    return rest if inner is _ABSENT else {**rest, path[0]: inner}


def _nested(path: Path, value: Any) -> dict[str, Any]:
    return {path[0]: value if len(path) == 1 else _nested(path[1:], value)}


def _for_route(parameters: Mapping[str, Any], route: str) -> dict[str, Any]:
    """Parameters as a route spells them; only the priority means something beyond text generation."""
    if route == PLAIN:
        return {}
    if route == EMBEDDING:
        return {key: value for key, value in parameters.items() if key == "priority"}
    if route != RESPONSES:
        return dict(parameters)
    out: dict[str, Any] = {}
    for key, value in parameters.items():
        out = deep_merge(out, _nested(IN_RESPONSES.get(key, (key,)), value))
    return out


class Rules:
    """What one lane does to a body, per route.

    :param ruled: the paths that any lane of this engine forces. Here they are forced too, or dropped: no client sends them, unless
        this lane proposes a default for one, which is to say that the client may choose.
    """

    def __init__(self, forced: Mapping[str, Any], defaults: Mapping[str, Any], ruled: Sequence[Path]) -> None:
        dropped = list(NEVER)
        for path in set(ruled) - set(leaves(defaults)):
            dropped += [path, IN_RESPONSES.get(path[0], path) if len(path) == 1 else path, *TWINS.get(path, ())]
        self.dropped = tuple(dict.fromkeys(dropped))
        self.forced = {route: _for_route(forced, route) for route in set(ROUTES.values())}
        self.defaults = {route: _for_route(defaults, route) for route in set(ROUTES.values())}

    def apply(self, body: Body, route: str, model: str) -> bytes:
        """The body as the engine gets it."""
        forced, defaults = self.forced[route], self.defaults[route]
        changes: dict[str, Any] = {}
        for path in self.dropped:
            if path[0] in body.values:
                before = changes.get(path[0], body.values[path[0]])
                after = _ABSENT if before is _ABSENT else _without(before, path[1:])
                if after is not before:
                    changes[path[0]] = after
        for key, value in defaults.items():
            now = changes.get(key, body.values.get(key, _ABSENT))
            if now is _ABSENT:
                changes[key] = value
            elif isinstance(value, Mapping) and isinstance(now, Mapping):
                changes[key] = deep_merge(value, now)
        for key, value in forced.items():
            now = changes.get(key, body.values.get(key, _ABSENT))
            changes[key] = deep_merge(now, value) if isinstance(value, Mapping) and value else value
        if body.values.get("model") != model:
            changes["model"] = model
        return body.changed(changes)


def _count(value: Any) -> int:
    """A number as the engine's own reader takes it: 4, 4.0 and "4" are the same to it."""
    try:
        return max(1, int(value))
    except (TypeError, ValueError, OverflowError):
        return 1


def _prompts(value: Any) -> int:
    """How many prompts a completion holds: a list of token numbers is one."""
    return len(value) if isinstance(value, list) and value and isinstance(value[0], (str, list)) else 1


def sequences(body: Body, route: str) -> int:
    """How many sequences the engine runs at once for this body: what it takes of its lane."""
    values = body.values
    if route == EMBEDDING:
        return _prompts(values.get("input"))
    count = max(_count(values.get("n")), _count(values.get("best_of")))
    if route == COMPLETION:
        count *= max(_prompts(values.get("prompt")), _prompts(values.get("prompt_embeds")))
    return count


def check(body: Body, route: str) -> str:
    """The model alias that the body names. Raises Refusal for a body that could run outside its lane."""
    model = body.values.get("model")
    if not isinstance(model, str):
        raise Refusal(400, "model_missing", "The body has no model. Name one of those that /v1/models lists.")
    if route == RESPONSES and body.values.get("background"):
        # It would return at once and go on generating outside of the lane's limit.
        raise Refusal(
            400, "background_refused", "Background responses cannot be queued in a lane. Send background: false."
        )
    return model
