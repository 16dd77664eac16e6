"""The watchdog's program among stand-ins: a Docker socket, an engine and an ansible-runner, for its tests and its benchmark."""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import signal
import socketserver
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
FILES = ROOT / "roles/watchdog/files"

# What ansible-runner is to the watchdog: it leaves events behind, and a launch makes the ranks run.
RUNNER = """#!{python}
import json, pathlib, sys, time
words = sys.argv
private, playbook = pathlib.Path(words[2]), pathlib.Path(words[words.index("--playbook") + 1]).stem
events = private / "artifacts" / words[words.index("--ident") + 1] / "job_events"
events.mkdir(parents=True)
log = private / "runs"
log.write_text((log.read_text() if log.exists() else "") + playbook + " " + words[words.index("--cmdline") + 1] + "\\n")
if playbook == "serve":
    time.sleep(0.6)
    broken = private / "broken"
    if broken.exists():
        said = {{"event": "runner_on_failed", "event_data": {{"res": {{"msg": broken.read_text()}}}}}}
        (events / "2-x.json").write_text(json.dumps(said))
        sys.exit(2)
    (private / "up").write_text("")
"""


class Rank:
    """A container: a process of ours stands for its first one."""

    def __init__(self) -> None:
        self.number = 0
        self.start()

    def start(self) -> None:
        self.number += 1
        self.process = subprocess.Popen(["sleep", "600"])

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def inspect(self) -> dict[str, Any]:
        code = self.process.poll()
        return {
            "Id": f"{self.number:064x}",
            "RestartCount": 0,
            "State": {
                "Running": code is None,
                "Pid": self.process.pid,
                "Status": "running" if code is None else "exited",
                "ExitCode": 137,
                "StartedAt": f"2026-11-29T12:00:{self.number:02d}Z",
            },
            "Config": {"Labels": {"gb10.fleet.spec": "aaa", "gb10.fleet.recipe": "fake"}},
        }


class Docker(http.server.BaseHTTPRequestHandler):
    ranks: dict[str, Rank]

    def do_GET(self) -> None:
        rank = self.ranks.get(self.path.split("/")[2])
        body = json.dumps(rank.inspect()).encode() if rank and self.path.endswith("/json") else b""
        self.send_response(200 if rank or "/logs" in self.path else 404)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        with contextlib.suppress(BrokenPipeError):
            self.wfile.write(body)

    def log_message(self, *words: object) -> None:
        pass

    def address_string(self) -> str:
        return "docker"


class Engine(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        page = (ROOT / "tests/fixtures/metrics/vllm-single.prom").read_bytes() if self.path == "/metrics" else b""
        self.send_response(200)
        self.send_header("Content-Length", str(len(page)))
        self.end_headers()
        self.wfile.write(page)

    def log_message(self, *words: object) -> None:
        pass


class UnixServer(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True


class World:
    def __init__(self, folder: Path, interval_s: float = 0.5, canary_s: float = 600) -> None:
        self.folder = folder
        self.ranks = {"rank0": Rank(), "rank1": Rank()}
        docker = type("Ranks", (Docker,), {"ranks": self.ranks})
        self.servers = [
            UnixServer(str(folder / "docker.sock"), docker),
            http.server.ThreadingHTTPServer(("127.0.0.1", 0), Engine),
        ]
        for server in self.servers:
            threading.Thread(target=server.serve_forever, daemon=True).start()
        self.private = folder / "runner"
        self.private.mkdir()
        runner = folder / "ansible-runner"
        runner.write_text(RUNNER.format(python=sys.executable))
        runner.chmod(0o755)
        (folder / "hooks").mkdir()
        hook = folder / "hooks" / "note"
        hook.write_text(f"#!/bin/sh\ncat >> {folder}/alerts; echo >> {folder}/alerts\n")
        hook.chmod(0o755)
        self.config = folder / "config.json"
        nodes = {
            f"spark-0{rank + 1}": {"rank": rank, "container": f"rank{rank}", "spec": "aaa", "local": True, "port": 22}
            for rank in (0, 1)
        }
        self.config.write_text(json.dumps({
            "cluster": "alpha", "nodes": nodes, "fatal": ["EngineDeadError"], "settings": {"interval_s": interval_s},
            "canary_s": canary_s, "launch_limit_s": 60, "state_dir": str(folder), "evidence_dir": "e", "key": "", "known_hosts": "",
            "private_dir": str(self.private), "runner": str(runner), "python": sys.executable, "playbooks": "/playbooks",
            "hooks_dir": str(folder / "hooks"), "webhook": "", "webhook_format": "slack",
            "eye": {
                "address": "127.0.0.1", "port": self.servers[1].server_address[1], "model": "fake", "api_key_file": None,
                "canary_timeout_s": 5, "gpu_s": 15, "docker_socket": str(folder / "docker.sock"),
                "lock": str(folder / "lock"), "holds": str(folder / "hold"),
            },
        }))  # fmt: skip
        self.watchdog: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self.watchdog = subprocess.Popen(
            [sys.executable, "-m", "watchdog", str(self.config)],
            env={**os.environ, "PYTHONPATH": f"{FILES}:{ROOT}/collections"},
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )

    def kill(self) -> None:
        """As systemd does with KillMode=control-group after the watchdog was killed."""
        if self.watchdog is not None:
            os.killpg(self.watchdog.pid, signal.SIGKILL)
            self.watchdog.wait()

    def state(self) -> dict[str, Any]:
        with contextlib.suppress(OSError, ValueError):
            return dict(json.loads((self.folder / "state.json").read_bytes())["state"])
        return {"name": None}

    def until(self, done: Callable[[dict[str, Any]], bool], seconds: float = 120) -> dict[str, Any]:
        """Wait for a state; a launch brings the ranks up meanwhile, as serve.yml does."""
        limit = time.monotonic() + seconds
        while time.monotonic() < limit:
            if (self.private / "up").exists():
                (self.private / "up").unlink()
                for rank in self.ranks.values():
                    rank.kill()
                    rank.start()
            state = self.state()
            if done(state):
                return state
            time.sleep(0.05)
        raise AssertionError(f"never came: {self.state()}")

    def runs(self) -> list[str]:
        path = self.private / "runs"
        return path.read_text().splitlines() if path.exists() else []

    def close(self) -> None:
        if self.watchdog is not None and self.watchdog.poll() is None:
            self.kill()
        for server in self.servers:
            server.shutdown()
        for rank in self.ranks.values():
            rank.kill()
