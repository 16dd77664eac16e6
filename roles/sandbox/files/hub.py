#!/usr/bin/env python3
# Copyright (c) The gb10.fleet maintainers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A small model hub that the real `hf` CLI downloads from: read-only, standard library only, with fault injection for tests.

    hub.py --root DIR [--files DIR] [--bind 127.0.0.1] [--port 8085] [--token T] [--ctl]

DIR/<owner>/<name>/…files… is one model repository with one revision ("main", and the commit that its content gives).

    GET  /api/models/<repo>[/revision/<rev>]         id, sha, siblings
    GET  /api/models/<repo>/tree/<rev>               path, size, oid, lfs {oid, size}
    HEAD, GET /<repo>/resolve/<rev>/<path>           ETag, X-Repo-Commit; one Range (206, 416)
    GET  /files/[<name>]                             the folder --files as a list of links (pip's find-links), and its files

With --ctl a test injects faults and reads what was asked for:

    POST /_ctl   a JSON list of rules, replaces the rules and empties the log. A rule applies to a request whose "METHOD path"
                 matches the regular expression "match", "times" times (default: always), unless the request carries the
                 bearer token "unless_token". One or more of
                   "delay": seconds before the answer        "status": code, with "headers", "msg"
                   "cut": bytes of the body, then close      "rate": bytes per second
                   "flip": offset of a byte to invert
                 e.g. [{"match": "GET /api/", "status": 429, "headers": {"Retry-After": "2"}, "times": 2}]
                      [{"match": "resolve/.*safetensors", "cut": 1000000, "times": 1}]
                      [{"match": "/gated/", "unless_token": "hf_x", "status": 401, "headers": {"X-Error-Code": "GatedRepo"}}]
    GET  /_ctl   {"rules": [...], "requests": [{"method", "path", "range", "status", "sent"}], "sent": body bytes of all}
             the newest 10,000 requests, those of /files/ left out
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import html
import json
import os
import re
import signal
import sys
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urlsplit

LFS_MINIMUM = 10 * 1024 * 1024
LFS_SUFFIXES = {".safetensors", ".bin", ".gguf", ".pt", ".pth", ".onnx"}
SKIPPED = {".cache", ".git"}
UNLIMITED = 1 << 30
CHUNK = 1 << 18
LOG_LENGTH = 10_000


@dataclass(frozen=True)
class Entry:
    """One file of a repository. `oid` is git's blob id (for an LFS file: of its pointer); `sha256` only for LFS files."""

    size: int
    oid: str
    sha256: str | None

    @property
    def etag(self) -> str:
        return self.sha256 or self.oid


@dataclass(frozen=True)
class Repo:
    base: Path
    commit: str
    entries: dict[str, Entry]


def git_blob(data: bytes) -> str:
    """Git's id of a file's content."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()  # noqa: S324 - git's own identity


def sha256_of(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def lfs_pointer(sha256: str, size: int) -> bytes:
    """What git stores in place of a large file."""
    return f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha256}\nsize {size}\n".encode()


class Store:
    """Repositories below a folder; hashes are kept per (path, size, mtime), so a changed file is seen at the next request."""

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        self.lock = threading.Lock()
        self.hashes: dict[tuple[str, int, int], Entry] = {}

    def entry(self, path: Path) -> Entry:
        found = path.stat()
        key = (str(path), found.st_size, found.st_mtime_ns)
        if key not in self.hashes:
            if found.st_size >= LFS_MINIMUM or path.suffix in LFS_SUFFIXES:
                digest = sha256_of(path)
                self.hashes[key] = Entry(found.st_size, git_blob(lfs_pointer(digest, found.st_size)), digest)
            else:
                self.hashes[key] = Entry(found.st_size, git_blob(path.read_bytes()), None)
        return self.hashes[key]

    def repo(self, name: str) -> Repo | None:
        base = (self.root / name).resolve()
        if self.root not in base.parents or not base.is_dir():
            return None
        entries: dict[str, Entry] = {}
        with self.lock:
            for path in sorted(base.rglob("*")):
                relative = path.relative_to(base)
                if path.is_file() and relative.parts[0] not in SKIPPED:
                    entries[relative.as_posix()] = self.entry(path)
        listed = json.dumps({name: [entry.size, entry.oid] for name, entry in entries.items()}, sort_keys=True)
        return Repo(base, hashlib.sha1(listed.encode()).hexdigest(), entries)  # noqa: S324 - shaped like a git commit


@dataclass
class Rule:
    """A fault, see the module's docstring."""

    match: str
    times: int = UNLIMITED
    unless_token: str | None = None
    delay: float = 0
    status: int | None = None
    headers: dict[str, str] = field(default_factory=dict)
    msg: str = "injected"
    cut: int | None = None
    rate: float | None = None
    flip: int | None = None

    @property
    def shapes_body(self) -> bool:
        return self.cut is not None or self.rate is not None or self.flip is not None

    def applies(self, request: str, authorization: str) -> bool:
        if self.times <= 0 or (self.unless_token and authorization == f"Bearer {self.unless_token}"):
            return False
        return re.search(self.match, request) is not None


class Hub(ThreadingHTTPServer):
    """The server with its store, rules and log."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, address: tuple[str, int], root: Path, files: Path | None, token: str | None, ctl: bool) -> None:
        super().__init__(address, Handler)
        self.store = Store(root)
        self.files = files
        self.token = token
        self.ctl = ctl
        self.guard = threading.Lock()
        self.rules: list[Rule] = []
        self.log: list[dict[str, Any]] = []

    def take_rule(self, request: str, authorization: str) -> Rule | None:
        with self.guard:
            for rule in self.rules:
                if rule.applies(request, authorization):
                    rule.times -= 1
                    return rule
        return None


class Handler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"
    server_version = "gb10-hub/1"
    wbufsize = -1
    disable_nagle_algorithm = True
    sent = 0
    status = 0

    def log_message(self, format: str, *args: Any) -> None:
        """The access log is ours: one line when the request ends."""

    def note(self) -> None:
        wanted = self.headers.get("Range")
        if self.path.startswith("/files/"):
            return
        request = {"method": self.command, "path": self.path, "range": wanted, "status": self.status, "sent": self.sent}
        with self.server.guard:
            self.server.log.append(request)
            del self.server.log[:-LOG_LENGTH]
        line = f"{self.client_address[0]} {self.command} {self.path} {wanted or '-'} {self.status} {self.sent}"
        print(time.strftime("%H:%M:%S"), line, file=sys.stderr)

    def reply(
        self, code: int, body: bytes, kind: str = "application/json", headers: dict[str, str] | None = None
    ) -> None:
        self.status = code
        self.send_response(code)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
            self.sent = len(body)

    def reply_json(self, value: Any, code: int = 200, headers: dict[str, str] | None = None) -> None:
        self.reply(code, json.dumps(value).encode(), headers=headers)

    def refuse(self, code: int, error: str, message: str) -> None:
        """As the real hub: the reason stands in headers, where the client looks."""
        self.reply_json({"error": message}, code, {"X-Error-Code": error, "X-Error-Message": message})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.path != "/_ctl" or not self.server.ctl:
            return self.refuse(404, "NotFound", "no such endpoint")
        try:
            rules = [Rule(**rule) for rule in json.loads(body or b"[]")]
        except (TypeError, ValueError) as error:
            return self.refuse(400, "BadRule", str(error))
        with self.server.guard:
            self.server.rules, self.server.log = rules, []
        return self.reply_json({"rules": len(rules)})

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        self.sent = self.status = 0
        if self.path == "/_ctl" and self.server.ctl:
            with self.server.guard:
                state = {"rules": [vars(rule) for rule in self.server.rules], "requests": list(self.server.log)}
            return self.reply_json(state | {"sent": sum(request["sent"] for request in state["requests"])})
        try:
            self.route()
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True
        finally:
            self.note()
        return None

    def route(self) -> None:
        path = unquote(urlsplit(self.path).path)
        authorization = self.headers.get("Authorization") or ""
        rule = self.server.take_rule(f"{self.command} {self.path}", authorization)
        if rule and rule.delay:
            time.sleep(rule.delay)
        if rule and rule.status:
            return self.reply_json({"error": rule.msg}, rule.status, rule.headers)
        if path.startswith("/files/") and self.server.files:
            return self.plain_file(self.server.files, path.removeprefix("/files/"))
        if self.server.token and authorization != f"Bearer {self.server.token}":
            return self.refuse(401, "RepoNotFound", "Invalid username or password.")
        if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/(revision|tree)/([^/]+)(/.*)?)?/?", path):
            return self.api(found[1], found[2], found[3])
        if found := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            return self.resolve(found[1], found[2], found[3], rule)
        return self.refuse(404, "NotFound", "no such endpoint")

    def plain_file(self, folder: Path, name: str) -> None:
        """pip's find-links folder; it reads the names from the links of the page."""
        if not name:
            names = sorted(path.name for path in folder.iterdir() if path.is_file() and not path.name.startswith("."))
            links = "".join(f'<a href="{quote(name)}">{html.escape(name)}</a><br>\n' for name in names)
            return self.reply(200, f"<!doctype html><html><body>\n{links}</body></html>\n".encode(), "text/html")
        path = folder / name
        if path.parent.resolve() != folder.resolve() or not path.is_file():
            return self.refuse(404, "NotFound", "no such file")
        return self.reply(200, path.read_bytes(), "application/octet-stream")

    def find(self, name: str, revision: str | None) -> Repo | None:
        """The repository, or None after the refusal was sent."""
        repo = self.server.store.repo(name)
        if repo is None:
            self.refuse(404, "RepoNotFound", "Repository not found")
        elif revision not in (None, "main", repo.commit):
            self.refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        else:
            return repo
        return None

    def api(self, name: str, kind: str | None, revision: str | None) -> None:
        repo = self.find(name, revision)
        if repo is None:
            return
        if kind == "tree":
            listed: list[dict[str, Any]] = []
            for path, entry in repo.entries.items():
                listed.append({"type": "file", "path": path, "size": entry.size, "oid": entry.oid})
                if entry.sha256:
                    pointer = len(lfs_pointer(entry.sha256, entry.size))
                    listed[-1]["lfs"] = {"oid": entry.sha256, "size": entry.size, "pointerSize": pointer}
            return self.reply_json(listed)
        about: dict[str, Any] = {
            "_id": repo.commit[:24],
            "id": name,
            "modelId": name,
            "sha": repo.commit,
            "private": False,
            "gated": False,
        }
        about |= {"disabled": False, "tags": [], "downloads": 0, "likes": 0}
        about["siblings"] = [{"rfilename": path} for path in repo.entries]
        return self.reply_json(about)

    def resolve(self, name: str, revision: str, path: str, rule: Rule | None) -> None:
        repo = self.find(name, revision)
        if repo is None:
            return
        entry = repo.entries.get(path)
        if entry is None:
            return self.refuse(404, "EntryNotFound", f"Entry not found: {path}")
        start, end, code = 0, entry.size - 1, 200
        if wanted := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or ""):
            start, code = int(wanted[1]), 206
            end = min(int(wanted[2] or end), end)
            if start >= entry.size:
                return self.reply(416, b"", headers={"Content-Range": f"bytes */{entry.size}"})
        self.status = code
        self.send_response(code)
        self.send_header("ETag", f'"{entry.etag}"')
        self.send_header("X-Repo-Commit", repo.commit)
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Type", "application/octet-stream")
        if entry.sha256:
            self.send_header("X-Linked-Size", str(entry.size))
            self.send_header("X-Linked-Etag", f'"{entry.etag}"')
        if code == 206:
            self.send_header("Content-Range", f"bytes {start}-{end}/{entry.size}")
        self.send_header("Content-Length", str(max(0, end - start + 1)))
        self.end_headers()
        self.wfile.flush()
        if self.command != "HEAD" and end >= start:
            self.body(repo.base / path, start, end - start + 1, rule)

    def body(self, path: Path, start: int, length: int, rule: Rule | None) -> None:
        with path.open("rb") as stream:
            if rule and rule.shapes_body:
                stream.seek(start)
                return self.faulty_body(stream.read(length), start, rule)
            while self.sent < length:
                count = os.sendfile(
                    self.connection.fileno(), stream.fileno(), start + self.sent, min(length - self.sent, 1 << 24)
                )
                if count == 0:  # the file shrank under us
                    self.close_connection = True
                    return None
                self.sent += count
        return None

    def faulty_body(self, content: bytes, start: int, rule: Rule) -> None:
        data = bytearray(content)
        if rule.flip is not None and start <= rule.flip < start + len(data):
            data[rule.flip - start] ^= 0xFF
        if rule.cut is not None and rule.cut < len(data):
            del data[rule.cut :]
            self.close_connection = True
        begun = time.monotonic()
        for offset in range(0, len(data), CHUNK):
            block = data[offset : offset + CHUNK]
            self.connection.sendall(block)
            self.sent += len(block)
            if rule.rate:
                time.sleep(max(0.0, self.sent / rule.rate - (time.monotonic() - begun)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", required=True, type=Path, help="folder of repositories, <owner>/<name>/")
    parser.add_argument("--files", type=Path, help="folder served as /files/")
    parser.add_argument("--bind", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8085)
    parser.add_argument("--token", help="bearer token that every request of a repository must carry")
    parser.add_argument("--ctl", action="store_true", help="allow fault injection by POST /_ctl")
    given = parser.parse_args()
    server = Hub((given.bind, given.port), given.root, given.files, given.token, given.ctl)
    signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=server.shutdown).start())
    with contextlib.suppress(KeyboardInterrupt):
        server.serve_forever()


if __name__ == "__main__":
    main()
