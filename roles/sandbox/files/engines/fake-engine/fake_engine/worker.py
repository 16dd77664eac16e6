# Copyright (c) The gb10.fleet maintainers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A rank above 0."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn

from . import failures
from .faults import Settings
from .journal import Rank
from .peers import PeerLost, connect
from .runner import Runner, Stopped, frozen


class Worker(Runner):
    """A rank above 0, headless: no HTTP, no ready line, and no word when its head is gone."""

    def __init__(self, rank: Rank, settings: Settings, environment: dict[str, str]) -> None:
        super().__init__(rank, settings, environment)
        self.stop_or_done = threading.Event()

    def told(self) -> None:
        """SIGTERM or SIGINT."""
        self.stop.set()
        self.stop_or_done.set()

    def run(self) -> int:
        try:
            self.serve()
        except Stopped:
            self.end()
        return 0

    def serve(self) -> None:
        timeout_s = float(self.rank.given.get("distributed_timeout_seconds", 1800))
        for name in ("start", "config", "engine", "worker"):
            self.stage(name)
        self.journal.stage("rendezvous")
        for fault in self.settings.at("rendezvous"):
            self.strike(fault)
        self.peer = connect(self.rank, self.journal, timeout_s, self.wait)
        if self.peer is None:
            raise Stopped
        if self.hear("go") is None:
            self.lost()
        self.check_interface()
        self.network_lines()
        self.stage("assigned")
        self.load()
        self.say_peer({"loaded": self.rank.number})
        if self.hear("loaded") is None:
            self.lost()
        self.compile()
        self.say_kv()
        self.say_peer({"kv": self.kv_gib})
        self.stage("kv")
        if self.hear("kv") is None:
            self.forever()
        self.graphs()
        self.say_peer({"ready": self.rank.number})
        self.steps()

    def say_peer(self, message: dict[str, Any]) -> None:
        assert self.peer
        try:
            self.peer.send(message)
        except PeerLost:
            return  # shows where it next listens

    def hear(self, key: str) -> Any:
        """The head's next word, or None when it is gone. Listening ends when told to stop."""
        assert self.peer
        try:
            return self.until_stopped(lambda: self.peer.expect(key) if self.peer else None)
        except PeerLost:
            return None

    def until_stopped(self, call: Callable[[], Any]) -> Any:
        """Run a blocking call in a thread, so that a signal ends the wait."""
        box: dict[str, Any] = {}
        done = threading.Event()

        def target() -> None:
            try:
                box["value"] = call()
            except PeerLost as error:
                box["error"] = error
            done.set()
            self.stop_or_done.set()

        self.stop_or_done.clear()
        threading.Thread(target=target, daemon=True).start()
        while not done.is_set():
            self.stop_or_done.wait()
            if self.stop.is_set():
                raise Stopped
        if "error" in box:
            raise box["error"]
        return box.get("value")

    def steps(self) -> None:
        """Take part in every step; when the head is gone, stay and say nothing."""
        assert self.peer
        first = True
        for fault in self.settings.at("serving"):
            if fault.kind in ("die", "exit"):
                self.strike(fault)
        while True:
            number = self.hear("step")
            if number is None:
                self.forever()
            if any(fault.kind == "freeze" for fault in self.settings.at("serving")):
                frozen()
            if first:
                self.journal.stage("serving")
                first = False
            self.say_peer({"step": number})

    def lost(self) -> NoReturn:
        """The head is gone while this rank still needs it to start: dies as a head does that lost a worker."""
        where = self.peer.where if self.peer else ""
        self.fail("worker", failures.PEER_GONE.format(where=where))

    def end(self) -> None:
        """SIGTERM: grace, SIGTERM and SIGKILL of its child; exit code 0, as measured."""
        seconds = self.settings.number("WORKER_STOP_S", 0.5)
        lines = self.journal.sections.get("stop", [])
        steps = [lines[:2], lines[2:3], lines[3:]] if self.peer else [lines[:1], lines[2:3], lines[3:4]]
        for number, step in enumerate(steps):
            if number:
                time.sleep(seconds / 2)
            self.journal.lines(step)
