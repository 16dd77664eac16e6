# Copyright (c) The gb10.fleet maintainers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the watchdog does to the world: eyes on nodes, playbooks through ansible-runner, files, hooks, systemd."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

RETRY_S = 5.0
RETRY_MOST_S = 40.0
SSH = [
    *("ssh", "-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=5", "-o", "ServerAliveInterval=5"),
    *("-o", "ServerAliveCountMax=2", "-o", "StrictHostKeyChecking=yes", "-o", "GlobalKnownHostsFile=/dev/null"),
]


def write(path: Path, data: Mapping[str, Any]) -> None:
    """Whole or not at all, also when the power goes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        json.dump(data, file, indent=1, sort_keys=True)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    Path(name).chmod(0o644)
    Path(name).replace(path)


def read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def notify(text: str) -> None:
    """sd_notify; nothing without systemd."""
    path = os.environ.get("NOTIFY_SOCKET")
    if path:
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
            sock.sendto(text.encode(), f"\0{path[1:]}" if path.startswith("@") else path)


class NodeEye:
    """The eye of one node, over SSH or beside us. It is started again whenever it ends; nobody waits for it."""

    def __init__(self, argv: Sequence[str], source: str, settings: Mapping[str, Any]) -> None:
        code = f"{source}\nmain({dict(settings)!r})\n".encode()
        start = f'import sys;exec(compile(sys.stdin.buffer.read({len(code)}),"eye","exec"))'
        self.argv, self.code = [*argv, "python3", "-uc", f"'{start}'" if argv else start], code
        self.child: subprocess.Popen[bytes] | None = None
        self.started = -RETRY_S
        self.retry_s = RETRY_S
        self.rest = b""
        self.line: dict[str, Any] | None = None
        self.seen = 0.0

    def start(self) -> None:
        self.started = time.monotonic()
        # Whole lines only: what an eye said before it ended is no beginning of what the next one says.
        self.rest = b""
        self.child = subprocess.Popen(
            self.argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
        )
        if self.child.stdin is None or self.child.stdout is None:
            return
        os.set_blocking(self.child.stdout.fileno(), False)
        with contextlib.suppress(OSError):
            self.child.stdin.write(self.code)
            self.child.stdin.flush()

    def poll(self) -> None:
        """Take what came in; start the eye where none runs."""
        self.read()
        if (self.child is None or self.child.poll() is not None) and time.monotonic() - self.started >= self.retry_s:
            # A node that is off is not knocked at without end.
            self.retry_s = min(2 * self.retry_s, RETRY_MOST_S)
            self.start()

    def read(self) -> None:
        chunk = b""
        with contextlib.suppress(BlockingIOError):
            while (
                self.child is not None
                and self.child.stdout is not None
                and (piece := os.read(self.child.stdout.fileno(), 65536))
            ):
                chunk += piece
                if len(chunk) > 1 << 20:
                    break
        *lines, self.rest = (self.rest + chunk).split(b"\n")
        for line in lines:
            with contextlib.suppress(ValueError):
                before, self.line = self.line, json.loads(line)
                # A fatal line is said once: it must not be lost between two looks of the watchdog.
                if len(lines) > 1 and before and self.line is not None:
                    self.line["fatal"] = (before.get("fatal") or []) + self.line["fatal"]
                self.seen, self.retry_s = time.monotonic(), RETRY_S

    def tell(self, word: str) -> None:
        if self.child is not None and self.child.stdin is not None:
            with contextlib.suppress(OSError):
                self.child.stdin.write(f"{word}\n".encode())
                self.child.stdin.flush()

    def age_s(self) -> float:
        return time.monotonic() - self.seen

    def close(self) -> None:
        if self.child is not None:
            end(self.child)


def end(child: subprocess.Popen[Any], patience_s: float = 5) -> None:
    """End a child and all that it started."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(patience_s)
            return


def parents(pid: int) -> list[int]:
    """A process and those above it."""
    out: list[int] = []
    while pid > 1 and len(out) < 64:
        out.append(pid)
        try:
            text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        except OSError:
            break
        pid = int(text.rpartition(")")[2].split()[1])
    return out


class Run:
    """Playbooks of this collection, one after the other, each through ansible-runner. The last one's result is the run's."""

    def __init__(
        self, config: Mapping[str, Any], steps: Sequence[tuple[str, Mapping[str, Any]]], limit_s: float
    ) -> None:
        self.config = config
        self.steps = list(steps)
        self.stops = self.steps[-1][0] == "stop"
        self.deadline = time.monotonic() + limit_s
        self.child: subprocess.Popen[bytes] | None = None
        self.ident = ""
        self.next()

    def next(self) -> None:
        playbook, extra = self.steps.pop(0)
        self.ident = f"{playbook}-{time.strftime('%Y%m%dT%H%M%S')}"
        argv = [
            *(self.config["runner"], "run", self.config["private_dir"]),
            *("--playbook", f"{self.config['playbooks']}/{playbook}.yml", "--ident", self.ident),
            *("--rotate-artifacts", "20"),
            *("--cmdline", f"--extra-vars '{json.dumps({'watchdog_acts': True, **extra})}'"),
        ]
        self.child = subprocess.Popen(argv, stdin=subprocess.DEVNULL, start_new_session=True)

    def poll(self) -> dict[str, Any] | None:
        """``{rc, said, log}`` once it ended."""
        if self.child is None:
            return None
        code = self.child.poll()
        if code is None and time.monotonic() > self.deadline:
            self.cancel()
            return {"rc": 124, "said": "the playbook did not end in time", "log": self.log}
        if code is None:
            return None
        if self.steps:
            # Evidence that cannot be had is no reason to leave the cluster down.
            self.next()
            return None
        self.child = None
        return {"rc": code, "said": self.said() if code else "", "log": self.log}

    @property
    def log(self) -> str:
        return f"{self.config['private_dir']}/artifacts/{self.ident}/stdout"

    def said(self) -> str:
        """What the last failed task said."""
        events = Path(self.config["private_dir"], "artifacts", self.ident, "job_events")
        found = "no task said why"
        with contextlib.suppress(OSError):
            for path in sorted(events.glob("*.json"), key=lambda p: int(p.name.split("-", 1)[0])):
                event = read(path)
                if event.get("event") in ("runner_on_failed", "runner_on_unreachable"):
                    result = event.get("event_data", {}).get("res") or {}
                    found = str(result.get("msg") or found)
        return found

    def mine(self, pid: int) -> bool:
        return self.child is not None and self.child.pid in parents(pid)

    def cancel(self) -> None:
        """End it and all beneath it: ansible-runner gives its playbook a session of its own."""
        if self.child is None:
            return
        family = [int(p.name) for p in Path("/proc").iterdir() if p.name.isdigit() and self.mine(int(p.name))]
        for pid in sorted(family, reverse=True):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        end(self.child)
        for pid in family:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.child = None


class Alerts:
    """Hooks (executables that get JSON on standard input) and one webhook. None of them may hold the watchdog up."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = config
        self.children: list[tuple[float, subprocess.Popen[bytes]]] = []

    def send(self, event: Mapping[str, Any]) -> None:
        folder = Path(self.config["hooks_dir"])
        hooks = sorted(folder.iterdir()) if folder.is_dir() else []
        argvs = [[str(path)] for path in hooks if path.is_file() and os.access(path, os.X_OK)]
        if self.config["webhook"]:
            # In a child of its own: name resolution may hang for minutes.
            argvs.append([self.config["python"], "-m", "watchdog.webhook"])
        for argv in argvs:
            with contextlib.suppress(OSError):
                child = subprocess.Popen(argv, stdin=subprocess.PIPE, start_new_session=True)
                self.children.append((time.monotonic() + 30, child))
                if child.stdin is not None:
                    body = dict(event)
                    if argv[-1] == "watchdog.webhook":
                        body.update(url=self.config["webhook"], format=self.config["webhook_format"])
                    child.stdin.write(json.dumps(body).encode())
                    child.stdin.close()

    def reap(self) -> None:
        for limit, child in list(self.children):
            if child.poll() is None and time.monotonic() > limit:
                end(child, 1)
            if child.poll() is not None:
                self.children.remove((limit, child))


def post(event: Mapping[str, Any]) -> None:
    """To Slack's form (JSON with ``text``) or to ntfy's (the text itself, with a title)."""
    text, title = str(event["text"]), f"{event['cluster']}: {event['event']}"
    if event["format"] == "ntfy":
        body, headers = text.encode(), {"Title": title, "Content-Type": "text/plain; charset=utf-8"}
    else:
        body, headers = json.dumps({"text": f"{title}\n{text}"}).encode(), {"Content-Type": "application/json"}
    request = urllib.request.Request(str(event["url"]), data=body, headers=headers, method="POST")  # noqa: S310
    with urllib.request.urlopen(request, timeout=10):  # noqa: S310 - the address is the administrator's
        pass
