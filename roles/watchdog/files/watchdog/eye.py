# Copyright (c) The gb10.fleet maintainers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a node says of its rank: this file is sent to each node and runs there, with nothing but Python 3.10.

One JSON line per look on standard output. The watchdog appends a call of ``main`` and keeps standard input open: a line ``canary``
asks for one token, the end of the input ends the program, so that nothing stays behind on a node.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

# Seen beneath a rank while kernels are compiled: tokens stand still then and nothing is wrong (case wd-long-prefill).
COMPILERS = {"nvcc", "cicc", "ptxas", "ninja", "cc1plus", "gcc", "g++", "clang", "fatbinary", "nvlink"}
COUNTERS = {
    "iterations": ("vllm:iteration_tokens_total_count", "vllm:iteration_tokens_count"),
    "generated": ("vllm:generation_tokens_total", "vllm:generation_tokens"),
    "running": ("vllm:num_requests_running",),
    "waiting": ("vllm:num_requests_waiting",),
}
FIRST_LINES = 400


class UnixConnection(http.client.HTTPConnection):
    """HTTP over the Docker engine's socket."""

    def __init__(self, path: str, timeout: float) -> None:
        super().__init__("docker", timeout=timeout)
        self.path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self.path)


def docker(path: str, url: str) -> tuple[int, bytes]:
    connection = UnixConnection(path, 5)
    try:
        connection.request("GET", url)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def counters(page: str) -> dict[str, float]:
    """The sums of the counters by exact name; ``_created`` and the like are other names."""
    out: dict[str, float] = {}
    for line in page.splitlines():
        name = line.split("{", 1)[0].split(" ", 1)[0]
        for key, names in COUNTERS.items():
            if name in names:
                out[key] = out.get(key, 0.0) + float(line.rsplit(" ", 1)[-1])
    return out


def descendants(root: int) -> list[tuple[str, str]]:
    """``(state, name)`` of a process and all beneath it, from one pass over /proc."""
    children: dict[int, list[int]] = {}
    found: dict[int, tuple[str, str]] = {}
    for entry in os.listdir("/proc"):  # noqa: PTH208
        if not entry.isdigit():
            continue
        try:
            text = Path("/proc", entry, "stat").read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
        name, _, rest = text.partition("(")[2].rpartition(")")
        words = rest.split()
        found[int(entry)] = (words[0], name)
        children.setdefault(int(words[1]), []).append(int(entry))
    out, todo = [], [root]
    while todo:
        pid = todo.pop()
        if pid in found:
            out.append(found[pid])
        todo += children.get(pid, ())
    return out


def available_gib() -> float | None:
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return round(int(line.split()[1]) / 1048576, 2)
    return None


def record(path: Path) -> dict[str, Any] | None:
    """A JSON file that may be absent, empty or half written."""
    try:
        found = json.loads(path.read_bytes() or b"null")
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


class Eye:
    """Looks of one node."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings = settings
        self.fatal = re.compile("|".join(settings["fatal"])) if settings["fatal"] else None
        self.working = re.compile(settings["working"])
        self.read_until = time.time()
        self.rank_id = ""
        self.before: dict[str, float] = {}
        self.gpu: dict[str, Any] | None = None
        self.gpu_at = 0.0
        self.canary: dict[str, Any] | None = None
        self.asking = False
        self.ask = threading.Event()

    def look(self) -> dict[str, Any]:
        said: dict[str, Any] = {
            "at": time.time(),
            "boot": Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip(),
            "available_gib": available_gib(),
            "container": None,
            "docker": None,
            "stopped": False,
            "compiling": False,
            "fatal": [],
            "working": False,
            "launch": record(Path(self.settings["lock"])),
            "holds": {
                kind: record(Path(self.settings["holds"]) / kind) or {}
                for kind in ("stopped", "paused")
                if (Path(self.settings["holds"]) / kind).exists()
            },
        }
        try:
            self.rank(said)
        except (OSError, http.client.HTTPException, ValueError) as exc:
            said["docker"] = f"{type(exc).__name__} {exc}".strip()
        if self.settings["head"]:
            said["http"] = self.engine() if (said["container"] or {}).get("running") else None
            said["canary"] = self.canary
            said["gpu"] = self.gpu
        return said

    def rank(self, said: dict[str, Any]) -> None:
        path, name = self.settings["docker_socket"], self.settings["container"]
        status, body = docker(path, f"/containers/{name}/json")
        if status == 404:
            return
        if status != 200:
            said["docker"] = f"Docker answered {status}"
            return
        inspect = json.loads(body)
        state, labels = inspect["State"], inspect["Config"].get("Labels") or {}
        running = bool(state.get("Running")) and not state.get("Restarting")
        said["container"] = {
            "id": inspect["Id"][:12],
            "running": running,
            "status": state.get("Status"),
            "exit_code": None if running else state.get("ExitCode"),
            "oom_killed": bool(state.get("OOMKilled")),
            "started_at": state.get("StartedAt"),
            "restarts": inspect.get("RestartCount", 0),
            "spec": labels.get("gb10.fleet.spec"),
            "recipe": labels.get("gb10.fleet.recipe"),
        }
        if self.rank_id != inspect["Id"]:
            self.rank_id, self.canary, self.before = inspect["Id"], None, {}
        if not running:
            return
        below = descendants(int(state.get("Pid") or 0))
        said["stopped"] = bool(state.get("Paused")) or any(one in ("T", "t") for one, dummy in below)
        said["compiling"] = any(name in COMPILERS for dummy, name in below)
        self.lines(inspect["Id"], said)

    def lines(self, container: str, said: dict[str, Any]) -> None:
        since, self.read_until = self.read_until, said["at"]
        url = f"/containers/{container}/logs?stdout=1&stderr=1&since={since:.6f}&tail={FIRST_LINES}"
        status, body = docker(self.settings["docker_socket"], url)
        if status != 200 or not body:
            return
        lines = body.decode("utf-8", errors="replace").splitlines()
        said["working"] = any(self.working.search(line) for line in lines)
        if self.fatal:
            said["fatal"] = [line[-400:] for line in lines if self.fatal.search(line)][:5]

    def get(self, url: str) -> tuple[int | str, str]:
        connection = http.client.HTTPConnection(self.settings["address"], self.settings["port"], timeout=4)
        try:
            connection.request("GET", url)
            answer = connection.getresponse()
            return answer.status, answer.read().decode("utf-8", errors="replace")
        except ConnectionError:
            return "refused", ""
        except TimeoutError:
            return "timeout", ""
        except (OSError, http.client.HTTPException) as exc:
            return f"{type(exc).__name__}", ""
        finally:
            connection.close()

    def engine(self) -> dict[str, Any]:
        health = self.get("/health")[0]
        status, page = self.get("/metrics") if health == 200 else (None, "")
        seen = counters(page) if status == 200 else {}
        still = seen.get("iterations") == self.before.get("iterations")
        if still and seen.get("running") and time.time() - self.gpu_at >= self.settings["gpu_s"]:
            self.gpu_at = time.time()
            threading.Thread(target=self.ask_gpu, daemon=True).start()
        if not still:
            self.gpu = None
        self.before = seen
        return {"health": health, **seen}

    def ask_gpu(self) -> None:
        """nvidia-smi may hang on a wedged driver: aside, with a limit, and only while tokens stand still."""
        argv = ["nvidia-smi", "--query-gpu=power.draw,utilization.gpu", "--format=csv,noheader,nounits"]
        try:
            answer = subprocess.run(argv, capture_output=True, text=True, timeout=10, check=False).stdout
            power, util = (float(word) for word in answer.splitlines()[0].split(","))
            self.gpu = {"power_w": power, "util_percent": util, "at": time.time()}
        except (OSError, ValueError, IndexError, subprocess.TimeoutExpired):
            self.gpu = None

    def one_token(self) -> None:
        """One real completion: /health stays 200 with a dead worker."""
        limit = float(self.settings["canary_timeout_s"])
        body = {"model": self.settings["model"], "prompt": "1", "max_tokens": 1, "temperature": 0}
        headers = {"Content-Type": "application/json"}
        if self.settings["api_key_file"]:
            headers["Authorization"] = (
                "Bearer " + Path(self.settings["api_key_file"]).read_text(encoding="utf-8").split("\n")[0].strip()
            )
        connection = http.client.HTTPConnection(self.settings["address"], self.settings["port"], timeout=limit)
        error = None
        try:
            connection.request("POST", "/v1/completions", json.dumps(body), headers)
            answer = connection.getresponse()
            answer.read()
            # 4xx is an answer of a living engine, too: a key is missing, or it has no such route.
            error = None if answer.status < 500 else f"answered {answer.status}"
        except (OSError, http.client.HTTPException) as exc:
            error = f"{type(exc).__name__} {exc}".strip()
        finally:
            connection.close()
        self.canary = {"ok": error is None, "error": error, "at": time.time()}

    def canaries(self) -> None:
        while True:
            self.ask.wait()
            self.ask.clear()
            try:
                self.one_token()
            except OSError as exc:
                self.canary = {"ok": True, "error": f"not asked: {exc}", "at": time.time()}


def main(settings: dict[str, Any]) -> None:
    eye = Eye(settings)
    threading.Thread(target=eye.canaries, daemon=True).start()

    def obey() -> None:
        for line in sys.stdin.buffer:
            if line.strip() == b"canary":
                eye.ask.set()
        os._exit(0)

    threading.Thread(target=obey, daemon=True).start()
    while True:
        begun = time.monotonic()
        sys.stdout.write(json.dumps(eye.look()) + "\n")
        sys.stdout.flush()
        time.sleep(max(0.5, settings["interval_s"] - (time.monotonic() - begun)))
