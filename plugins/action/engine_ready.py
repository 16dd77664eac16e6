# Copyright (c) The gb10.fleet maintainers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Watch all ranks of each cluster until they serve, or say why not. See the module of the same name.

Every host of the play runs this task at the same time, each in a process of its own (a fork). Each watches its own rank over its
own connection and puts what it sees on a board, a folder that the forks share; each reads the whole board and judges it with the
same pure functions. Whoever judges first writes the verdict, and all of the cluster follow it.
"""

from __future__ import annotations

import hashlib
import json
import os
import queue
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ansible import constants as C
from ansible.errors import AnsibleActionFail, AnsibleConnectionFailure, AnsibleError
from ansible.plugins.action import ActionBase
from ansible.utils.display import Display

from ansible_collections.gb10.fleet.plugins.module_utils import _findings
from ansible_collections.gb10.fleet.plugins.module_utils._engine_log import ORDER, later
from ansible_collections.gb10.fleet.plugins.module_utils._rank_findings import merged, of_cluster, of_rank, proposal
from ansible_collections.gb10.fleet.plugins.module_utils._rank_spec import LABEL_ENGINE
from ansible_collections.gb10.fleet.plugins.module_utils._rank_state import (
    BUDGET_OF,
    BUDGETS,
    Trouble,
    diagnosis,
    duration,
    first_cause,
    group_since,
    message,
    mismatch,
    progress_data,
    progress_key,
    progress_line,
    rendezvous_since,
    stage_of,
    trouble,
)

display = Display()

# A look costs a node half a second of CPU, which a start is short of: the wait on the node sees an end at once, and the two stages
# that something depends on. A rank's last line before the server's is that of its KV cache. What another rank found ends the wait.
LONG_POLL_S = 5.0
LISTEN_S = 2.0
BOARD_S = 0.1
# How often an engine is asked whose log says nothing of its stages.
ASK_S = 5.0
# After the first sign of trouble every rank is looked at once more, so that the first error by time is known, not the loudest.
SETTLE_S = 0.8
SETTLE_LIMIT_S = 2.0
ALARM_LASTS_S = 30.0
PROBE_S = 10.0
HEARTBEAT_S = 60.0
CPU_STILL = 0.03
START_LIMIT_S = 60.0

ARGUMENTS: dict[str, Any] = {
    "container": {"type": "str", "required": True},
    "container_id": {"type": "str"},
    "url": {"type": "str", "required": True},
    "model": {"type": "str", "required": True},
    "api_key_file": {"type": "str"},
    "master": {"type": "str"},
    "budgets": {"type": "dict", "default": {}},
    "prompt": {"type": "str", "default": "Say: ready"},
    "max_tokens": {"type": "int", "default": 16},
    "gpu": {"type": "bool", "default": False},
    "transport": {"type": "str", "choices": ["roce", "socket"], "default": "roce"},
    "log_lines": {"type": "int", "default": 20},
    "output": {"type": "str", "choices": ["plain", "json", "quiet"], "default": "plain"},
    "docker_socket": {"type": "str", "default": "/var/run/docker.sock"},
}


class Board:
    """What the forks of one task know of each other: small JSON files, replaced atomically."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def put(self, name: str, content: Mapping[str, Any]) -> None:
        """Replace a file."""
        self._replace(self._temporary(name, content), name)

    def put_first(self, name: str, content: Mapping[str, Any]) -> None:
        """Write a file unless another fork already did."""
        temporary = self._temporary(name, content)
        try:
            os.link(temporary, self.folder / name)
        except FileExistsError:
            pass
        finally:
            temporary.unlink()

    def get(self, name: str) -> dict[str, Any] | None:
        """The content of a file, None when there is none."""
        try:
            return dict(json.loads((self.folder / name).read_text(encoding="utf-8")))
        except (FileNotFoundError, ValueError):
            return None

    def _temporary(self, name: str, content: Mapping[str, Any]) -> Path:
        temporary = self.folder / f".{name}.{os.urandom(8).hex()}"
        temporary.write_text(json.dumps(content), encoding="utf-8")
        return temporary

    def _replace(self, temporary: Path, name: str) -> None:
        temporary.replace(self.folder / name)


class ActionModule(ActionBase):
    """One fork: watches one rank, and on the head asks the endpoint and prints what happens."""

    TRANSFERS_FILES = False
    _supports_check_mode = True

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        super().run(tmp, task_vars)
        self.vars = task_vars or {}
        dummy, self.args = self.validate_argument_spec(argument_spec=ARGUMENTS)
        self.host: str = self.vars["inventory_hostname"]
        self.cluster: str = self.vars["topology_cluster"]
        self.members: list[str] = list(self.vars["topology_members"])
        self.rank: int = self.vars["topology_rank"]
        if self._task.check_mode:
            return {
                "changed": False,
                "skipped": True,
                "msg": "Nothing was started in check mode; nothing is waited for.",
            }
        self._check_play()
        self.settings = self._settings()
        self.started = time.time()
        self.board = Board(self._folder())
        self.report: dict[str, Any] = {"host": self.host, "rank": self.rank, "at": 0.0}
        self.asked_at = 0.0
        self.printed: tuple[Any, ...] = ()
        self.printed_at = 0.0
        return self._watch()

    # --- before the wait ----------------------------------------------------------------------------------------------
    def _check_play(self) -> None:
        hosts, forks = self.vars["ansible_play_batch"], int(self.vars.get("ansible_forks") or C.DEFAULT_FORKS)
        absent = [m for m in self.members if m not in hosts]
        if absent:
            raise AnsibleActionFail(
                f"cluster {self.cluster}: {', '.join(absent)} is not in this play (or its serial batch), so it cannot be watched. "
                f"Run all ranks together, with --limit cluster_{self.cluster} if need be."
            )
        if forks < len(hosts):
            raise AnsibleActionFail(
                f"{len(hosts)} ranks are watched at the same time and Ansible has {forks} forks. Run with --forks {len(hosts)} "
                "or set forks in ansible.cfg."
            )

    def _settings(self) -> dict[str, Any]:
        unknown = sorted(set(self.args["budgets"]) - set(BUDGETS))
        if unknown:
            raise AnsibleActionFail(f"budgets: there is no {unknown[0]}; known are {', '.join(BUDGETS)}.")
        budgets = {**BUDGETS, **{name: float(value) for name, value in self.args["budgets"].items()}}
        return {"budgets": budgets, "container": self.args["container"], "master": self.args["master"], "waiting": True}

    def _folder(self) -> Path:
        key = hashlib.sha256(f"{self._task._uuid} {self.cluster}".encode()).hexdigest()[:16]
        return Path(C.DEFAULT_LOCAL_TMP) / f"gb10-ready-{key}"

    # --- the wait -------------------------------------------------------------------------------------------------------
    def _watch(self) -> dict[str, Any]:
        while True:
            self._look()
            self.board.put(f"{self.host}.json", self.report)
            reports = self._reports()
            self._judge(reports)
            if verdict := self.board.get("verdict"):
                return self._fail(verdict)
            if ready := self.board.get("ready"):
                return self._ready(ready, reports)
            self._progress(reports)

    def _reports(self) -> dict[str, dict[str, Any]]:
        reports = {m: self.board.get(f"{m}.json") for m in self.members}
        return {m: r for m, r in reports.items() if r is not None}

    def _look(self) -> None:
        """One call of rank_info on the node, and what follows from comparing it with the last one."""
        answer = self.report.get("answer")
        if answer and not self._alarmed() and time.time() - answer["at"] < LISTEN_S:
            # It answered just now; what is missing is a look at the other ranks.
            time.sleep(BOARD_S)
            return
        wanted, begun = self._rank_info_arguments(), time.time()
        came: queue.SimpleQueue[tuple[str | None, dict[str, Any] | None]] = queue.SimpleQueue()
        threading.Thread(target=lambda: came.put(self._ask(wanted)), daemon=True).start()
        while True:
            try:
                failure, rank = came.get(timeout=BOARD_S)
                break
            except queue.Empty:
                if self._overtaken(begun, "wait_for" in wanted):
                    return  # the wait on the node ends by itself, and nobody hears it
                if self.rank == 0:
                    # What the other ranks reach is said when they reach it, not after this look.
                    self._progress(self._reports())
        now = time.time()
        if rank is None:
            self.report.setdefault("failing_since", begun)
            self.report.update(failure=failure, at=now)
            time.sleep(1)
            return
        self._compare(rank, now)

    def _ask(self, wanted: dict[str, Any]) -> tuple[str | None, dict[str, Any] | None]:
        """``(why not, the rank)`` of one call of rank_info."""
        try:
            result = self._execute_module("gb10.fleet.rank_info", wanted, task_vars=self.vars)
        except AnsibleConnectionFailure as exc:
            return " ".join(str(exc.message).split()), None
        except AnsibleError as exc:
            return " ".join(str(exc).split()), None
        if result.get("failed"):
            return str(result.get("msg") or "rank_info failed").strip(), None
        return None, dict(result["rank"])

    def _overtaken(self, begun: float, waits: bool) -> bool:
        """Whether it is decided already, or a look that waits has to be a look at once."""
        if self.board.get("verdict") or self.board.get("ready"):
            return True
        news = [self.board.get("alarm"), self._answer()]
        return waits and any(found is not None and found["at"] > begun for found in news)

    def _answer(self) -> dict[str, Any] | None:
        """The head's answer, as its report says."""
        return (self.board.get(f"{self.members[0]}.json") or {}).get("answer")

    def _rank_info_arguments(self) -> dict[str, Any]:
        last = self.report
        wanted: dict[str, Any] = {
            "container": self.args["container"],
            "log": True,
            "log_lines": self.args["log_lines"],
            "activity": True,
            "docker_socket": self.args["docker_socket"],
        }
        if last.get("cursor"):
            wanted["cursor"] = last["cursor"]
        if self._alarmed():
            wanted["kernel"] = True
        elif self._may_answer():
            wanted["gpu"] = self.args["gpu"]
            wanted["probe"] = {
                "url": self.args["url"],
                "model": self.args["model"],
                "prompt": self.args["prompt"],
                "max_tokens": self.args["max_tokens"],
                "timeout_s": PROBE_S,
                **({"api_key_file": self.args["api_key_file"]} if self.args["api_key_file"] else {}),
            }
            # Asked once its log says that it serves, or after the wait: some never say so.
            if self._speaks():
                wanted.update(wait_for=["ready"], timeout_s=self._patience_s())
        elif self._seen_since_answer():
            # Wait on the node, where an end shows within a quarter of a second.
            turn = "kv_cache" if later("kv_cache", last.get("stage")) else "ready"
            wanted.update(wait_for=[turn], timeout_s=self._patience_s())
            quiet = last.get("still_since")
            wanted["gpu"] = bool(
                self.args["gpu"] and quiet and time.time() - quiet > self.settings["budgets"]["still_s"] / 2
            )
        return wanted

    def _may_answer(self) -> bool:
        if self.rank != 0 or self.report.get("answer"):
            return False
        if not self._speaks() and time.time() - self.asked_at >= ASK_S:
            # An engine whose log says nothing of its stages is asked from time to time.
            self.asked_at = time.time()
            return True
        return ORDER[stage_of(self.report)] >= ORDER["kv_cache"]

    def _speaks(self) -> bool:
        """Whether the engine's log tells its stages."""
        return str((self.report.get("labels") or {}).get(LABEL_ENGINE, "vllm")).startswith("vllm")

    def _seen_since_answer(self) -> bool:
        """Whether the head's answer, if it came, waits for no look at this rank."""
        answer = self._answer()
        return answer is None or float(self.report["at"]) >= answer["at"]

    def _patience_s(self) -> float:
        """How long a look may wait on the node."""
        return LISTEN_S if ORDER[stage_of(self.report)] >= ORDER["server"] else LONG_POLL_S

    def _alarmed(self) -> bool:
        alarm = self.board.get("alarm")
        return alarm is not None and time.time() - alarm["at"] < ALARM_LASTS_S

    def _compare(self, rank: dict[str, Any], now: float) -> None:
        last = self.report
        report = {**rank, "host": self.host, "rank": self.rank, "at": now, "offset_s": now - rank["node_time"]}
        report["first_id"] = last.get("first_id") or self.args["container_id"] or rank["container_id"]
        report["first_started_at"] = last.get("first_started_at") or rank["started_at"]
        group = BUDGET_OF[stage_of(rank)]
        same = last.get("group") == group
        report.update(group=group, group_since=last["group_since"] if same else group_since(report, now))
        report["stopped_since"] = (last.get("stopped_since") or now) if rank.get("processes_stopped") else None
        report["still_since"] = (last.get("still_since") or last.get("at") or now) if self._still(rank, now) else None
        if (rank.get("probe") or {}).get("ok"):
            report["answer"] = {"at": now, "probe": rank["probe"], "gpu": rank.get("gpu")}
        elif last.get("answer"):
            report["answer"] = last["answer"]
        report["refusing_since"] = self._refusing_since(rank)
        report["probe"] = rank.get("probe") or last.get("probe")
        self.report = report

    def _refusing_since(self, rank: Mapping[str, Any]) -> float | None:
        """Since when each question was answered with an error of the engine; None when it was not, or was not asked."""
        said, since = rank.get("probe"), self.report.get("refusing_since")
        if said is None:
            return float(since) if since else None
        refused = bool(said["error"]) and not said["timed_out"] and (said["status"] or 0) in (200, *range(500, 600))
        return (float(since) if since else time.time()) if refused else None

    def _still(self, rank: Mapping[str, Any], now: float) -> bool:
        """Whether nothing moved since the last look: no log, no bytes read, no CPU time, no GPU."""
        last = self.report
        before, after = last.get("activity") or {}, rank.get("activity") or {}
        if not last.get("at") or not before or not after:
            return False
        if rank.get("log_bytes") != last.get("log_bytes") or after.get("read_bytes") != before.get("read_bytes"):
            return False
        span = max(now - float(last["at"]), 0.1)
        if (after["cpu_s"] - before["cpu_s"]) / span > CPU_STILL:
            return False
        return ((rank.get("gpu") or {}).get("utilization_percent") or 0) <= 5

    # --- the verdict ------------------------------------------------------------------------------------------------------
    def _judge(self, reports: dict[str, dict[str, Any]]) -> None:
        now = time.time()
        ordered = [reports[m] for m in self.members if m in reports]
        settings = {**self.settings, "rendezvous_since": rendezvous_since(ordered)}
        found = [t for r in ordered if (t := trouble(r, settings, now))]
        found += self._silent(reports, now)
        if not found and len(ordered) == len(self.members) and (other := mismatch(ordered)):
            found = [other]
        if found:
            self.board.put_first("alarm", {"at": now})
            alarm = self.board.get("alarm") or {"at": now}
            if now - alarm["at"] > ALARM_LASTS_S:
                # An earlier trouble that went away again.
                alarm = {"at": now}
                self.board.put("alarm", alarm)
            looked_again = len(ordered) == len(self.members) and all(
                r["at"] >= alarm["at"] + SETTLE_S for r in ordered if r.get("failing_since") is None
            )
            if looked_again or now - alarm["at"] > SETTLE_LIMIT_S:
                first = first_cause(found, self.vars["topology_addresses"])
                self.board.put_first("verdict", self._diagnosis(reports, first, found))
            else:
                time.sleep(SETTLE_S / 4)
        elif self.rank == 0 and len(reports) == len(self.members):
            self._judge_ready(reports)

    def _silent(self, reports: dict[str, dict[str, Any]], now: float) -> list[Trouble]:
        """Ranks whose own watcher says nothing: it hangs in a connection that is dead without knowing, or never began."""
        silent = []
        limit = self.settings["budgets"]["unreachable_s"] + PROBE_S
        for member in self.members:
            report = reports.get(member)
            since = float(report["at"]) if report else self.started
            if now - since > (limit if report else START_LIMIT_S):
                detail = "its connection hangs" if report else "its watcher never began"
                reports.setdefault(member, {"host": member, "rank": self.members.index(member), "at": since})
                values = {"detail": f"for {int(now - since)} s: {detail}"}
                silent.append(Trouble(member, "rank-unreachable", since, 0, "", values))
        return silent

    def _judge_ready(self, reports: dict[str, dict[str, Any]]) -> None:
        said = self.report.get("probe") or {}
        answer = self.report.get("answer")
        if said.get("key_needed"):
            self._end_with("endpoint-key", {})
        elif said.get("model_listed") is False:
            self._end_with(
                "endpoint-model", {"listed": ", ".join(said["listed"]) or "no model", "model": self.args["model"]}
            )
        elif answer:
            # The answer proves the moment in which it came; every other rank has to be seen alive after it.
            others = [r for r in reports.values() if r["host"] != self.host]
            if all(r["at"] >= answer["at"] for r in others) and all(r.get("engine_alive") for r in reports.values()):
                self.board.put_first("ready", {**answer, "at": time.time()})

    def _end_with(self, name: str, groups: dict[str, Any]) -> None:
        found = Trouble(self.host, name, float(self.report["at"]), 0, "", groups)
        self.board.put_first("verdict", self._diagnosis(self._reports(), found, [found]))

    def _diagnosis(self, reports: dict[str, dict[str, Any]], first: Trouble, found: list[Trouble]) -> dict[str, Any]:
        known = {"port": self.args["url"].rstrip("/").rsplit(":", 1)[-1]}
        return diagnosis(self.cluster, reports, first, found, time.time() - self.started, known)

    # --- what comes out -----------------------------------------------------------------------------------------------------
    def _progress(self, reports: dict[str, dict[str, Any]]) -> None:
        if self.rank != 0 or self.args["output"] == "quiet" or len(reports) < len(self.members):
            return
        ordered = [reports[m] for m in self.members]
        key, now = progress_key(ordered), time.time()
        if key == self.printed and now - self.printed_at < HEARTBEAT_S:
            return
        self.printed, self.printed_at = key, now
        self._say(
            progress_line(self.cluster, now - self.started, ordered),
            progress_data(self.cluster, now - self.started, ordered),
        )

    def _say(self, text: str, data: Mapping[str, Any]) -> None:
        if self.args["output"] != "quiet":
            display.display(json.dumps(data) if self.args["output"] == "json" else text)

    def _fail(self, verdict: dict[str, Any]) -> dict[str, Any]:
        """The rank that it began with says all of it (the head does, when that rank cannot speak); the others point at it."""
        speaker = self.members[0] if verdict["id"] == "rank-unreachable" else verdict["node"]
        found = {name: value for name, value in verdict.items() if name != "last_lines"}
        if self.host == speaker:
            text = message(verdict)
        else:
            found = {name: verdict[name] for name in ("cluster", "node", "rank", "id")}
            text = (
                f"cluster {self.cluster} did not become ready, because of {verdict['node']} (rank {verdict['rank']}): "
                f"{verdict['cause']}."
            )
        return {"changed": False, "failed": True, "msg": text, "diagnosis": found}

    def _ready(self, ready: dict[str, Any], reports: dict[str, dict[str, Any]]) -> dict[str, Any]:
        took = ready["at"] - self.started
        probe = ready["probe"]
        result = {"changed": False, "seconds": round(took, 1), "probe": probe, "gpu": ready["gpu"], "rank": self._own()}
        if self.rank == 0:
            ordered = [reports[m] for m in self.members]
            speed = f", {probe['tokens_per_s']:.1f} tokens/s" if probe.get("tokens_per_s") else ""
            text = (
                f"{self.cluster}  {duration(took)}  ready: {self.args['model']} answers, {len(self.members)} of "
                f"{len(self.members)} ranks alive, first token after {probe['ttft_s']:.2f} s{speed}"
            )
            self._say(text, {"cluster": self.cluster, "elapsed_s": round(took, 1), "ready": True, "probe": probe})
            result.update(findings=self._findings(ordered), kv_cache=proposal(ordered))
        return result

    def _findings(self, ordered: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """What is worth a look although it serves; printed once, by the head."""
        start_s = self.settings["budgets"]["load_s"] if len(ordered) > 1 else 0
        each = [f for r in ordered for f in of_rank(r, len(ordered), self.args["transport"], start_s)]
        # What RDMA needs of the container is judged by the role fabric, right after this.
        found = merged([f for f in each if f.code != "pre-memlock"]) + of_cluster(ordered)
        if found and self.args["output"] == "plain":
            display.display("\n".join(_findings.lines(found)))
        return [f.as_dict() for f in found]

    def _own(self) -> dict[str, Any]:
        return {name: value for name, value in self.report.items() if name != "cursor"}
