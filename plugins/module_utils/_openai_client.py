# Copyright (c) The gb10.fleet maintainers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A small client of an OpenAI-compatible endpoint: list the models, stream one chat completion and time it.

/health and /v1/models answer 200 with a dead worker (vllm-project/vllm#39863): only a completion proves that an engine serves.
Standard library only, and nothing of Ansible.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import time
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

PROMPT = "Say: ready"


class Deadline:
    """Seconds left of a budget; every read of a socket waits no longer than that."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.started = time.monotonic()

    def spent(self) -> float:
        return time.monotonic() - self.started

    def left(self) -> float:
        """Seconds left. Raises TimeoutError when there are none."""
        left = self.seconds - self.spent()
        if left <= 0:
            raise TimeoutError
        return left


def read_key(path: str | None) -> str | None:
    """The API key in a file (first line), None without a file. Raises OSError."""
    if not path:
        return None
    with open(path, encoding="utf-8") as file:  # noqa: PTH123
        return file.readline().strip() or None


class Endpoint:
    """``http://host:port`` of an engine, with its key."""

    def __init__(self, url: str, key: str | None = None) -> None:
        parts = urlsplit(url)
        self.host, self.port = parts.hostname or "127.0.0.1", parts.port or (443 if parts.scheme == "https" else 80)
        self.tls = parts.scheme == "https"
        self.base = parts.path.rstrip("/").removesuffix("/v1")
        self.key = key

    @contextlib.contextmanager
    def request(
        self, method: str, path: str, deadline: Deadline, body: Mapping[str, Any] | None = None
    ) -> Iterator[tuple[http.client.HTTPResponse, Any, float]]:
        """The open response, its socket (so that the caller can bound each read), and when the request began to leave."""
        kind = http.client.HTTPSConnection if self.tls else http.client.HTTPConnection
        connection = kind(self.host, self.port, timeout=deadline.left())
        data = None if body is None else json.dumps(body).encode()
        connection.putrequest(method, self.base + path)
        connection.putheader("Accept", "application/json")
        connection.putheader("Content-Type", "application/json")
        if data is not None:
            connection.putheader("Content-Length", str(len(data)))
        if self.key:
            connection.putheader("Authorization", f"Bearer {self.key}")
        begun = time.monotonic()
        try:
            connection.connect()
            sock = connection.sock
            connection.endheaders(data)
            sock.settimeout(deadline.left())
            yield connection.getresponse(), sock, begun
        finally:
            connection.close()

    def models(self, deadline: Deadline) -> tuple[int, list[str]]:
        """Status and the ids of /v1/models."""
        with self.request("GET", "/v1/models", deadline) as (response, dummy, dummy):
            body = response.read(1 << 20)
            if response.status != 200:
                return response.status, []
            return 200, [str(m.get("id")) for m in json.loads(body).get("data", [])]

    def text(
        self, method: str, path: str, deadline: Deadline, body: Mapping[str, Any] | None = None
    ) -> tuple[int, str]:
        """Status and body of any other request, such as /metrics or /tokenize."""
        with self.request(method, path, deadline, body) as (response, sock, dummy):
            pieces = []
            while piece := response.read1(1 << 20):
                pieces.append(piece)
                sock.settimeout(deadline.left())
            return response.status, b"".join(pieces).decode("utf-8", "replace")

    def chat(self, model: str, prompt: str, max_tokens: int, deadline: Deadline, **extra: Any) -> dict[str, Any]:
        """One streamed chat completion: ``{status, text, content, tool_calls, completion_tokens, prompt_tokens, cached_tokens,
        ttft_s, total_s, tokens_per_s, finish_reason, error}``. ``text`` is the thinking when there is no content;
        ``tool_calls`` are ``{name, arguments}`` as they came.
        """
        body = {
            "model": model,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **extra,
        }
        answer = _Answer()
        with self.request("POST", "/v1/chat/completions", deadline, body) as (response, sock, begun):
            if response.status != 200:
                text = response.read(4096).decode("utf-8", "replace")
                return answer.result(response.status, begun, _message(text) or f"HTTP {response.status}")
            while True:
                sock.settimeout(deadline.left())
                line = response.readline()
                at = time.monotonic() - begun
                if not line:
                    break
                if line.startswith(b"data:"):
                    data = line[5:].strip()
                    if data == b"[DONE]":
                        break
                    answer.event(json.loads(data), at)
            return answer.result(200, begun)


class _Answer:
    """What came over the stream so far."""

    def __init__(self) -> None:
        self.text: list[str] = []
        self.thinking: list[str] = []
        self.calls: dict[int, dict[str, str]] = {}
        self.first: float | None = None
        self.last: float = 0.0
        self.pieces = 0
        self.usage: dict[str, Any] = {}
        self.finish: str | None = None
        self.error: str | None = None

    def event(self, event: dict[str, Any], at: float) -> None:
        if event.get("error"):
            self.error = _message(json.dumps(event))
        self.usage = event.get("usage") or self.usage
        for choice in event.get("choices") or []:
            delta = choice.get("delta") or {}
            said = delta.get("content") or ""
            thought = delta.get("reasoning_content") or delta.get("reasoning") or ""
            self.finish = choice.get("finish_reason") or self.finish
            if said or thought or delta.get("tool_calls"):
                self.first = at if self.first is None else self.first
                self.last = at
                self.pieces += 1
                self.text.append(said)
                self.thinking.append(thought)
                for part in delta.get("tool_calls") or []:
                    call = self.calls.setdefault(part.get("index") or 0, {"name": "", "arguments": ""})
                    for name, piece in (part.get("function") or {}).items():
                        call[name] = call.get(name, "") + (piece or "")

    def result(self, status: int, begun: float, error: str | None = None) -> dict[str, Any]:
        tokens = self.usage.get("completion_tokens") or self.pieces
        span = self.last - (self.first or 0.0)
        details = self.usage.get("prompt_tokens_details") or {}
        if not error and not self.error and status == 200 and not self.pieces:
            error = "the answer is empty"
        return {
            "status": status,
            "text": "".join(self.text) or "".join(self.thinking),
            "content": "".join(self.text),
            "tool_calls": [self.calls[index] for index in sorted(self.calls)],
            "completion_tokens": tokens,
            "prompt_tokens": self.usage.get("prompt_tokens"),
            "cached_tokens": details.get("cached_tokens"),
            "ttft_s": round(self.first, 4) if self.first is not None else None,
            "total_s": round(time.monotonic() - begun, 4),
            "tokens_per_s": round((tokens - 1) / span, 2) if tokens > 1 and span > 0 else None,
            "finish_reason": self.finish,
            "error": error or self.error,
        }


def _message(text: str) -> str:
    """The words of an error body."""
    try:
        error = json.loads(text).get("error")
    except (ValueError, AttributeError):
        return " ".join(text.split())[:300]
    if isinstance(error, dict):
        return str(error.get("message") or error)[:300]
    return str(error)[:300] if error else " ".join(text.split())[:300]


def probe(
    url: str, model: str, key: str | None = None, prompt: str = PROMPT, max_tokens: int = 8, timeout_s: float = 30.0
) -> dict[str, Any]:
    """Is ``model`` served? ``{ok, status, model_listed, listed, key_needed, timed_out, error, ...chat}``. Raises nothing.

    ``timed_out``: the connection stands and the answer did not come; ``key_needed``: 401 or 403, so it is up.
    """
    deadline = Deadline(timeout_s)
    result: dict[str, Any] = {
        "ok": False, "status": None, "model_listed": None, "listed": [], "key_needed": False, "timed_out": False,
        "text": None, "completion_tokens": None, "ttft_s": None, "tokens_per_s": None, "total_s": None, "error": None,
    }  # fmt: skip
    endpoint = Endpoint(url, key)
    step = "GET /v1/models"
    try:
        result["status"], result["listed"] = endpoint.models(deadline)
        if result["status"] == 200:
            result["model_listed"] = model in result["listed"]
            if not result["model_listed"]:
                result["error"] = f"it serves {', '.join(result['listed']) or 'no model'}, not {model}"
                return result
            step = "POST /v1/chat/completions"
            result.update(endpoint.chat(model, prompt, max_tokens, deadline))
        result["key_needed"] = result["status"] in (401, 403)
        if result["key_needed"]:
            result["error"] = f"{step} answered {result['status']}: a key is needed"
        elif result["status"] != 200 and not result["error"]:
            result["error"] = f"{step} answered {result['status']}"
        result["ok"] = result["status"] == 200 and not result["error"]
    except TimeoutError:
        result.update(timed_out=True, error=f"{step} gave no answer within {timeout_s:g} s")
    except ConnectionRefusedError:
        result["error"] = f"nothing listens on {endpoint.host}:{endpoint.port}"
    except (OSError, http.client.HTTPException, ValueError) as exc:
        result["error"] = f"{step}: {exc.__class__.__name__} {exc}".strip()
    return result
