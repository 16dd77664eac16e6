# Copyright (c) The gb10.fleet maintainers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The HTTP side of a head: routes, validation and shapes as recorded in recorded/http.json."""

from __future__ import annotations

import json
import re
import secrets
import socket
import time
from collections.abc import Iterator, Mapping
from copy import deepcopy
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from .engine import DEAD, THOUGHT, Engine, EngineDead, Job, Refused, pieces
from .journal import exchanges

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
GET = ("/health", "/ping", "/version", "/load", "/metrics", "/v1/models")
POST = ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize", "/invocations", "/ping")
RECORDED = exchanges()
ANSWER = "This is the fake engine: every rank of this cluster took part in this answer."


class BadRequest(Exception):
    """An error answer: status and the recorded shape of its body."""

    def __init__(self, status: int, message: str, kind: str, param: str | None) -> None:
        super().__init__(message)
        self.status = status
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": status}}


def text_of(body: object) -> str:
    """JSON as the real engine writes it: no spaces, text as it is."""
    return json.dumps(body, ensure_ascii=False, separators=(",", ":"))


def shape(name: str) -> Any:
    """The recorded answer of that name, to be filled in."""
    return json.loads(RECORDED[name]["body"])


def chunk_shape(name: str, number: int) -> Any:
    """Chunk `number` of a recorded stream."""
    chunks = [line[6:] for line in RECORDED[name]["body"].splitlines() if line.startswith("data: {")]
    return json.loads(chunks[number])


def invalid(kind: str, where: str, message: str, given: object, **context: object) -> BadRequest:
    """A validation error as the API words it."""
    detail: dict[str, object] = {"type": kind, "loc": f"body.{where}", "msg": message, "input": given}
    text = repr(detail | ({"ctx": context} if context else {}))
    return BadRequest(400, f"1 validation error:\n  {text}", "Bad Request", f"body.{where}")


def rendered(messages: list[dict[str, Any]]) -> str:
    """The prompt that a chat template would make."""
    out = ""
    for message in messages:
        content = message.get("content") or ""
        if isinstance(content, list):
            content = "".join(str(part.get("text", "")) for part in content)
        out += f"<|im_start|>{message.get('role')}\n{content}<|im_end|>\n"
    return out + "<|im_start|>assistant\n"


SAMPLES: dict[str, object] = {
    "string": "Paris", "integer": 1, "number": 1.5, "boolean": True, "array": [], "object": {},
}  # fmt: skip


def sample(schema: Mapping[str, Any]) -> dict[str, object]:
    """An object that fits a flat JSON schema."""
    properties = schema.get("properties") or {}
    return {name: SAMPLES.get(kind.get("type"), "Paris") for name, kind in properties.items()}


def fitting(body: Mapping[str, Any]) -> str | None:
    """The answer that `response_format` asks for, on one line."""
    wanted = (body.get("response_format") or {}).get("json_schema")
    return text_of(sample(wanted.get("schema") or {})) if wanted else None


def found(prompt: str) -> str | None:
    """The answer to "What is the code of the X?" when the prompt says "The code of the X is Y." somewhere."""
    asked = re.search(r"What is the code of the (\w+)\?", prompt)
    said = re.search(rf"The code of the {asked[1]} is (\S+)\.", prompt) if asked else None
    return said[1] if said else None


class Api:
    """What the server knows: the engine, its names, keys, and the socket, bound long before it listens."""

    def __init__(self, engine: Engine, keys: list[str], environment: Mapping[str, str]) -> None:
        self.engine, self.keys, self.environment = engine, keys, environment
        given = engine.rank.given
        names = given.get("served_model_name") or [engine.rank.model]
        self.names: list[str] = [names] if isinstance(names, str) else list(names)
        self.details = bool(given.get("enable_prompt_tokens_details"))
        self.auto_tools = bool(given.get("enable_auto_tool_choice"))
        self.reasons = bool(given.get("reasoning_parser"))
        self.began = int(time.time())
        # What /health tells; vLLM's says nothing.
        self.health: dict[str, Any] | None = None

    def models(self) -> dict[str, Any]:
        page = shape("get /v1/models")
        model = page["data"][0]
        page["data"] = []
        for name in self.names:
            one = deepcopy(model) | {"id": name, "created": self.began, "root": self.engine.rank.model}
            one["max_model_len"] = self.engine.rank.max_model_len
            page["data"].append(one)
        return dict(page)

    def check(self, body: Mapping[str, Any], needed: str) -> None:
        """Refuse what the real API refuses, in its words."""
        if needed not in body:
            raise invalid("missing", needed, "Field required", f"<dict of {len(body)} items>")
        if body.get("model") not in (*self.names, None, ""):
            aliases = ", ".join(self.names)
            text = f"The model `{body['model']}` does not exist. Valid aliases: {aliases}."
            raise BadRequest(404, text, "NotFoundError", "model")
        effort = body.get("reasoning_effort")
        if effort is not None and effort not in EFFORTS:
            listed = ", ".join(f"'{name}'" for name in EFFORTS[:-1]) + f" or '{EFFORTS[-1]}'"
            raise invalid("literal_error", "reasoning_effort", f"Input should be {listed}", effort, expected=listed)
        priority = body.get("priority", 0)
        if not isinstance(priority, int):
            text = "Input should be a valid integer, unable to parse string as an integer"
            raise invalid("int_parsing", "priority", text, priority)
        if body.get("tools") and body.get("tool_choice", "auto") == "auto" and not self.auto_tools:
            text = '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set'
            raise BadRequest(400, text, "BadRequestError", None)

    def job(self, body: Mapping[str, Any], prompt: str) -> Job:
        limit = self.engine.rank.max_model_len
        wanted = body.get("max_completion_tokens") or body.get("max_tokens")
        if wanted is not None and wanted > limit:
            text = (
                f"max_tokens={wanted} cannot be greater than max_model_len={limit}. Please request fewer output tokens."
            )
            raise BadRequest(400, f"{text} (parameter=max_tokens, value={wanted})", "BadRequestError", "max_tokens")
        size = len(pieces(prompt))
        if size >= limit:
            text = f"This model's maximum context length is {limit} tokens. However, your prompt contains at least {limit + 1} "
            text += "input tokens, which exceeds this limit even without any output tokens. "
            text += f"Please reduce the length of the input prompt. (parameter=input_tokens, value={limit + 1})"
            raise BadRequest(400, text, "BadRequestError", "input_tokens")
        room = limit - size
        job = Job(prompt, min(room, wanted or room), int(body.get("priority", 0)), bool(body.get("ignore_eos")))
        answer = self.engine.settings.text("ANSWER", ANSWER)
        job.answer = answer
        if answer == "echo":
            said = [message for message in body.get("messages", []) if message.get("role") == "user"]
            job.answer = str(said[-1].get("content")) if said else str(body.get("prompt", ""))
        job.answer = fitting(body) or found(prompt) or job.answer
        return job

    def thinks(self, body: Mapping[str, Any]) -> bool:
        """Setting an effort turns thinking on, unless the template's own switch is sent (effort none: off)."""
        if not self.reasons:
            return False
        given = self.engine.rank.given.get("default_chat_template_kwargs") or {}
        own = body.get("chat_template_kwargs") or {}
        if "enable_thinking" in own:
            return bool(own["enable_thinking"])
        if body.get("reasoning_effort"):
            return body["reasoning_effort"] != "none"
        return bool(given.get("enable_thinking", True))

    def tool_call(self, body: Mapping[str, Any]) -> dict[str, Any] | None:
        """A call of the tool asked for (or the first), its arguments made from the schema. None: answer in words."""
        tools, choice = body.get("tools") or [], body.get("tool_choice", "auto")
        if not tools or choice == "none" or any(message.get("role") == "tool" for message in body.get("messages", [])):
            return None
        wanted = choice.get("function", {}).get("name") if isinstance(choice, dict) else None
        function = next(
            (tool["function"] for tool in tools if tool["function"]["name"] == wanted), tools[0]["function"]
        )
        arguments = json.dumps(sample(function.get("parameters") or {}))
        if "bad_tool_call" in self.engine.settings.serving():
            arguments = arguments[: max(1, len(arguments) // 2)]
        name = {"name": function["name"], "arguments": arguments}
        return {"id": f"chatcmpl-tool-{secrets.token_hex(8)}", "type": "function", "function": name}

    def usage(self, job: Job, base: dict[str, Any]) -> dict[str, Any]:
        total = job.prompt_tokens + job.tokens
        out = base | {"prompt_tokens": job.prompt_tokens, "total_tokens": total, "completion_tokens": job.tokens}
        details = base.get("prompt_tokens_details") or {}
        out["prompt_tokens_details"] = details | {"cached_tokens": job.cached} if self.details else None
        return out


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    server_version = "uvicorn"
    sys_version = ""
    timeout = 600
    api: Api

    def log_message(self, format: str, *args: object) -> None:
        """The access line is written by `said`, in uvicorn's form."""

    def said(self, status: int) -> None:
        client = f"{self.client_address[0].removeprefix('::ffff:')}:{self.client_address[1]}"
        phrase = HTTPStatus(status).phrase
        self.api.engine.journal.write(f'INFO:     {client} - "{self.requestline}" {status} {phrase}')

    def reply(self, status: int, body: object = None, kind: str = "application/json") -> None:
        data = b"" if body is None else body.encode() if isinstance(body, str) else text_of(body).encode()
        self.said(status)
        self.send_response(status)
        if data:
            self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def allowed(self) -> bool:
        """A key guards /v1 and nothing else, as in the real engine."""
        if not self.api.keys or not self.path.startswith("/v1"):
            return True
        given = self.headers.get("Authorization", "").removeprefix("Bearer ")
        return given in self.api.keys

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        api, engine = self.api, self.api.engine
        if not self.allowed():
            self.reply(401, {"error": "Unauthorized"})
        elif path in ("/health", "/ping"):
            sick = engine.dead.is_set() or "unhealthy" in engine.faults()
            self.reply(503 if sick else 200, api.health if path == "/health" else None)
        elif path == "/metrics":
            engine.faults()
            self.reply(200, engine.page.text(), "text/plain; version=0.0.4; charset=utf-8")
        elif path == "/v1/models":
            self.reply(200, api.models())
        elif path == "/version":
            self.reply(200, shape("get /version"))
        elif path == "/load":
            self.reply(200, {"server_load": int(engine.page.value("vllm:num_requests_running"))})
        elif path in POST:
            self.reply(405, {"detail": "Method Not Allowed"})
        else:
            self.reply(404, {"detail": "Not Found"})

    def do_POST(self) -> None:
        path = self.path.partition("?")[0]
        raw = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        try:
            if not self.allowed():
                self.reply(401, {"error": "Unauthorized"})
            elif path == "/ping":
                self.reply(200)
            elif path in POST:
                self.ask("/v1/chat/completions" if path == "/invocations" else path, self.parsed(raw))
            else:
                self.reply(
                    405 if path in GET else 404, {"detail": "Method Not Allowed" if path in GET else "Not Found"}
                )
        except BadRequest as error:
            self.reply(error.status, error.body)
        except (EngineDead, Refused):
            body = {"message": DEAD, "type": "InternalServerError", "param": None, "code": 500}
            self.reply(500, {"error": body})
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    def parsed(self, raw: bytes) -> dict[str, Any]:
        try:
            return dict(json.loads(raw))
        except ValueError as error:
            place = getattr(error, "pos", 0)
            message = getattr(error, "msg", str(error))
            raise invalid(
                "json_invalid", str(place), "JSON decode error", "<dict of 0 items>", error=message
            ) from error

    def ask(self, path: str, body: dict[str, Any]) -> None:
        api = self.api
        if path == "/tokenize":
            text = rendered(body["messages"]) if "messages" in body else str(body.get("prompt", ""))
            tokens = [sum(piece.encode()) % 512 for piece in pieces(text)]
            answer = {"count": len(tokens), "max_model_len": api.engine.rank.max_model_len, "tokens": tokens}
            self.reply(200, answer | {"token_strs": None})
        elif path == "/detokenize":
            self.reply(200, {"prompt": " ".join(map(str, body.get("tokens", [])))})
        elif path == "/v1/chat/completions":
            api.check(body, "messages")
            self.chat(body, api.job(body, rendered(body["messages"])))
        else:
            api.check(body, "prompt")
            self.complete(body, api.job(body, str(body["prompt"])))

    # -- answers ----------------------------------------------------------------------------------------------------------

    def head(self, body: Mapping[str, Any], prefix: str) -> dict[str, Any]:
        model = body.get("model") or self.api.names[0]
        return {"id": f"{prefix}-{secrets.token_hex(8)}", "created": int(time.time()), "model": model}

    def chat(self, body: dict[str, Any], job: Job) -> None:
        head, call = self.head(body, "chatcmpl"), self.api.tool_call(body)
        thought = THOUGHT if self.api.thinks(body) else None
        if body.get("stream"):
            self.chat_stream(body, job, head, call, thought)
            return
        words = list(self.api.engine.run(job))
        answer = shape("chat") | head
        choice = answer["choices"][0]
        choice["message"]["content"] = None if call else "".join(words)
        choice["message"]["reasoning"] = thought
        if call:
            choice["message"]["tool_calls"] = [call]
        choice["finish_reason"] = "tool_calls" if call else job.finish
        answer["usage"] = self.api.usage(job, answer["usage"])
        self.reply(200, answer)

    def chat_stream(
        self, body: dict[str, Any], job: Job, head: dict[str, Any], call: dict[str, Any] | None, thought: str | None
    ) -> None:
        counted = bool((body.get("stream_options") or {}).get("include_usage"))
        form, end = ("chat stream usage", -2) if counted else ("chat stream", -1)

        def chunk(number: int, delta: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
            out = chunk_shape(form, number) | head
            out["choices"][0] |= {"delta": delta, "finish_reason": finish}
            return dict(out)

        def chunks() -> Iterator[dict[str, Any]]:
            yield chunk(0, {"role": "assistant", "content": ""})
            if thought:
                yield chunk(1, {"reasoning": thought})
            words = self.api.engine.run(job)
            if call:
                for _word in words:
                    pass
                text = call["function"]["arguments"]
                name = {"name": call["function"]["name"], "arguments": ""}
                yield chunk(1, {"tool_calls": [{"id": call["id"], "type": "function", "index": 0, "function": name}]})
                for part in (text[: len(text) // 2], text[len(text) // 2 :]):
                    yield chunk(1, {"tool_calls": [{"index": 0, "function": {"arguments": part}}]})
                yield chunk(end, {"content": ""}, "tool_calls")
                return
            previous = None
            for word in words:
                if previous is not None:
                    yield chunk(1, {"content": previous})
                previous = word
            yield chunk(end, {"content": previous or ""}, job.finish)

        self.stream(body, job, head, chunks(), "chat stream usage")

    def complete(self, body: dict[str, Any], job: Job) -> None:
        head = self.head(body, "cmpl")
        if not body.get("stream"):
            words = list(self.api.engine.run(job))
            answer = shape("completions") | head
            answer["choices"][0] |= {"text": "".join(words), "finish_reason": job.finish}
            answer["usage"] = self.api.usage(job, answer["usage"])
            self.reply(200, answer)
            return

        counted = bool((body.get("stream_options") or {}).get("include_usage"))

        def chunks() -> Iterator[dict[str, Any]]:
            previous = None
            for word in self.api.engine.run(job):
                if previous is not None:
                    yield chunk(0, previous)
                previous = word
            yield chunk(-2 if counted else 0, previous or "", job.finish)

        def chunk(number: int, text: str, finish: str | None = None) -> dict[str, Any]:
            out = chunk_shape("completions stream", number) | head
            out["choices"][0] |= {"text": text, "finish_reason": finish}
            return dict(out)

        self.stream(body, job, head, chunks(), "completions stream")

    def stream(
        self, body: dict[str, Any], job: Job, head: dict[str, Any], chunks: Iterator[dict[str, Any]], usage: str
    ) -> None:
        """Server-sent events. An engine that dies on the way ends the stream with an error event."""
        options = body.get("stream_options") or {}
        self.said(200)
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        try:
            for number, one in enumerate(chunks):
                if options.get("continuous_usage_stats"):
                    counted = {"prompt_tokens": job.prompt_tokens, "completion_tokens": job.tokens if number else 0}
                    one["usage"] = counted | {"total_tokens": sum(counted.values()), "completion_tokens_details": None}
                self.event(text_of(one))
            if options.get("include_usage"):
                last = chunk_shape(usage, -1) | head
                last["usage"] = self.api.usage(job, last["usage"])
                self.event(text_of(last))
        except (EngineDead, Refused):
            error = {"message": DEAD, "type": "InternalServerError", "param": None, "code": 500}
            self.event(text_of({"error": error}))
        self.event("[DONE]")
        self.wfile.write(b"0\r\n\r\n")

    def event(self, text: str) -> None:
        data = f"data: {text}\n\n".encode()
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.flush()


class Server(ThreadingHTTPServer):
    """Listens on a socket that was bound at the start, as the real one: a taken port shows at once, an answer comes late."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, bound: socket.socket, api: Api) -> None:
        handler = type("BoundHandler", (Handler,), {"api": api})
        super().__init__(bound.getsockname()[:2], handler, bind_and_activate=False)
        self.socket.close()
        self.socket = bound
        self.server_activate()

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that went away is no news."""


def bind(host: str, port: int) -> socket.socket:
    """A bound socket that does not listen yet. OSError when the port is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
    except OSError:
        bound.close()
        raise
    return bound
