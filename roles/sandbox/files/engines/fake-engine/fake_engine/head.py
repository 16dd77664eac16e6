# Copyright (c) The gb10.fleet maintainers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Rank 0: meets the workers, starts with them, serves HTTP."""

from __future__ import annotations

import socket
import threading
import time
from typing import Any, NoReturn

from . import failures, ray_job
from .api import Api, Server, bind
from .engine import Engine
from .faults import Settings
from .journal import TOKENS_PER_GIB, Rank
from .peers import Hub, PeerLost, PortTaken, StoreTimeout, connect
from .runner import Failed, Runner, shm_free_mib

# The log's averages come this often, while there is something to average.
AVERAGES_S = 10.0


class Head(Runner):
    """Rank 0, or a rank that was started like one."""

    def __init__(self, rank: Rank, settings: Settings, environment: dict[str, str]) -> None:
        super().__init__(rank, settings, environment)
        self.server: Server | None = None
        self.ended = threading.Event()

    def told(self) -> None:
        """SIGTERM or SIGINT; a head that does not serve yet takes no notice (measured for 40 s)."""
        if self.server:
            self.stop.set()
            self.ended.set()

    def run(self) -> int:
        self.stage("start")
        self.stage("arguments")
        bound = self.take_port()
        for name in ("config", "engine"):
            self.stage(name)
        self.check_shm()
        self.stage("worker")
        if self.rank.number:
            self.without_headless()
        self.rendezvous()
        self.check_interface()
        self.network_lines()
        self.stage("assigned")
        self.load()
        self.meet("loaded", r"Error ignored in is_in_the_same_node")
        self.compile()
        self.kv()
        self.graphs()
        if self.hub:
            self.gather("ready")
        self.stage("warm")
        self.listen(bound)
        return 0

    def take_port(self) -> socket.socket:
        rank = self.rank
        if not any(fault.kind == "port_in_use" for fault in self.settings.faults):
            try:
                return bind(rank.host, rank.port)
            except OSError:
                pass
        self.journal.tail("port_in_use.log", r"^Traceback")
        raise Failed(1)

    def check_shm(self) -> None:
        wanted = self.settings.number("SHM_MIB", 0)
        if wanted and shm_free_mib() < wanted:
            self.fail("core", failures.shm(shm_free_mib()))

    def without_headless(self) -> NoReturn:
        """A rank above 0 without --headless: it joins, loads, and asks for what only a head may; its head hangs."""
        timeout_s = float(self.rank.given.get("distributed_timeout_seconds", 1800))
        self.journal.stage("rendezvous")
        peer = connect(self.rank, self.journal, timeout_s, self.wait)
        if peer:
            peer.expect("go")
            self.stage("assigned")
            self.load()
            peer.send({"loaded": self.rank.number})
            peer.expect("loaded")
        self.journal.tail("worker_without_headless_worker.log", "EngineCore failed to start")
        raise Failed(1)

    def rendezvous(self) -> None:
        timeout_s = float(self.rank.given.get("distributed_timeout_seconds", 1800))
        self.journal.stage("rendezvous")
        for fault in self.settings.at("rendezvous"):
            self.strike(fault)
        if self.rank.given.get("distributed_executor_backend") == "ray":
            ray_job.run(self.rank, self.journal)
            return
        if not self.rank.multi:
            return
        try:
            self.hub = Hub(self.rank)
        except PortTaken:
            self.fail("worker", failures.PORT_TAKEN.format(port=self.rank.master_port))
        try:
            self.hub.join(timeout_s)
        except StoreTimeout as error:
            text = f"Timed out after {int(timeout_s) + 1} seconds waiting for clients. "
            text += f"{error.joined}/{self.rank.world} clients joined."
            change = (r"Timed out after .*", text)
            self.journal.tail("head_alone_bounded_timeout_head.log", "WorkerProc failed to start", change)
            raise Failed(1) from error

    def meet(self, key: str, begin: str) -> None:
        """All ranks at the same point. One that is gone ends this rank, seconds after its own load (recorded)."""
        if not self.hub:
            return
        try:
            self.hub.gather(key)
            self.hub.tell({key: 0})
        except PeerLost as error:
            peer = (r"(?<=Connection closed by peer )\[[\d.]+\]:\d+", error.where)
            self.journal.tail("worker_killed_loading_head.log", begin, peer)
            raise Failed(1) from error

    def gather(self, key: str) -> list[Any]:
        """What every worker says. One that is gone is waited for without end and without a line (recorded)."""
        assert self.hub
        try:
            return self.hub.gather(key)
        except PeerLost:
            self.forever()
            raise

    def kv(self) -> None:
        """The size of the cache needs every rank: the pool is the smallest rank's."""
        rank, journal = self.rank, self.journal
        self.say_kv()
        if self.hub:
            self.kv_gib = min([self.kv_gib, *map(float, self.gather("kv"))])
        if any(fault.kind == "bad_block_size" for fault in self.settings.faults):
            change = (r"(?<=No common block size for )\d+", str(rank.block_size))
            journal.tail("bad_block_size.log", "WorkerProc hit an exception", change)
            raise Failed(1)
        self.stage("kv")
        if self.hub:
            self.hub.tell({"kv": self.kv_gib})
        if rank.platform == "gb10":
            tokens, length = int(self.kv_gib * TOKENS_PER_GIB), rank.max_model_len
            size = f"GPU KV cache size: {tokens:,} tokens, "
            text = f"{size}Maximum concurrency for {length:,} tokens per request: {tokens / length:.2f}x"
            if self.settings.number("BLOCK_SIZE", 0):
                block = f"Setting attention block size to {rank.block_size} tokens "
                block += "to ensure that attention page size is >= mamba page size."
                journal.say("EngineCore", "INFO", "interface.py:1096", block)
            journal.say("EngineCore", "INFO", "kv_cache_utils.py:2327", text)

    def listen(self, bound: socket.socket) -> None:
        engine = Engine(self.rank, self.settings, self.journal, self.hub, self.environment, self.kv_gib)
        keys = self.rank.given.get("api_key") or [self.environment.get("VLLM_API_KEY", "")]
        names = [keys] if isinstance(keys, str) else list(keys)
        ended = engine.on_death = self.ended
        self.pass_time(self.settings.delay_s("server"))
        api = Api(engine, [name for name in names if name], self.environment)
        self.dress(api)
        self.server = Server(bound, api)
        threading.Thread(target=self.server.serve_forever, args=(0.1,), daemon=True).start()
        self.journal.stage("server")
        threading.Thread(target=self.averages, args=(engine, ended), daemon=True).start()
        for fault in self.settings.at("serving"):
            if fault.kind in ("die", "freeze", "exit"):
                self.strike(fault)
        ended.wait()
        if self.stop.is_set():
            self.server.server_close()
            self.journal.stage("stop")
        else:
            # Requests that wait get their 500 before the server goes; the real one takes 0.2 to 0.5 s.
            time.sleep(0.25)
            self.server.server_close()
            self.journal.tail("headfirst_then_worker_killed_idle_head.log", r"^INFO:     Shutting down")

    def dress(self, api: Api) -> None:
        """What another engine's API tells besides."""

    def averages(self, engine: Engine, ended: threading.Event) -> None:
        """The log's line of throughput, while tokens come and once more after."""
        before, busy = (0.0, 0.0), False
        while not ended.wait(AVERAGES_S):
            page = engine.page
            now = (page.value("vllm:prompt_tokens_total"), page.value("vllm:generation_tokens_total"))
            running, waiting = page.value("vllm:num_requests_running"), page.value("vllm:num_requests_waiting")
            active = now != before or running + waiting > 0
            if active or busy:
                prompt, generation = ((new - old) / AVERAGES_S for new, old in zip(now, before, strict=True))
                queried = page.value("vllm:prefix_cache_queries_total")
                hits = 100 * page.value("vllm:prefix_cache_hits_total") / queried if queried else 0.0
                unit = "CPU" if self.rank.platform == "cpu" else "GPU"
                text = f"Engine 000: Avg prompt throughput: {prompt:.1f} tokens/s, "
                text += f"Avg generation throughput: {generation:.1f} tokens/s, "
                text += f"Running: {running:.0f} reqs, Waiting: {waiting:.0f} reqs, {unit} KV cache usage: 0.0%, "
                self.journal.say("APIServer", "INFO", "loggers.py:335", text + f"Prefix cache hit rate: {hits:.1f}%")
            before, busy = now, active
