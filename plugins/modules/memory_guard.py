#!/usr/bin/python
# Copyright (c) The gb10.fleet maintainers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

DOCUMENTATION = r"""
module: memory_guard
short_description: Guard free memory on a node while a model loads
version_added: "0.1.0"
description:
  - Installs, starts and stops the memory guard - a program that keeps MemFree above a floor while a checkpoint streams through the
    page cache of a unified-memory node. It evicts the checkpoint's own pages before the floor is reached, drops caches and compacts
    memory only where that is not enough, and leaves a receipt.
  - Its life is tied to one load. O(state=started) begins one, O(state=stopped) ends it and returns the receipt. It ends by itself
    at O(deadline_s), and systemd starts it again when it is killed, which the receipt then says.
  - Where the node does not permit something (writing C(drop_caches), locking memory, C(cachestat) before Linux 6.5), the guard
    works with what is left, and RV(shortcomings) says what that is.
author:
  - The gb10.fleet maintainers (@gb10-fleet)
extends_documentation_fragment:
  - gb10.fleet.attributes
  - gb10.fleet.attributes.full
options:
  cluster:
    description: Name of the cluster, and instance of the unit C(gb10-memory-guard@.service).
    type: str
    required: true
  state:
    description:
      - V(present) installs program, unit and configuration.
      - V(started) does that too, and has the guard running; one that runs with the same settings is left alone.
      - V(stopped) ends it and returns its receipt; one that does not run is left alone and its last receipt is returned.
      - V(absent) ends it and removes all of it, receipt included. Program and unit stay while another cluster's guard needs them.
    type: str
    choices: [present, started, stopped, absent]
    default: started
  reason:
    description: Why it is stopped. The receipt repeats it.
    type: str
    choices: [ready, failed, stopped]
    default: stopped
  checkpoint_globs:
    description: Patterns or folders of checkpoint files. Links are followed, files that appear later are found.
    type: list
    elements: str
    default: []
  floor_gib:
    description: MemFree is kept above this. It must exceed the largest shard - what a process has mapped cannot be evicted.
    type: float
    default: 8.0
  order9_mib:
    description: Free memory in blocks of 2 MiB and more that is to be there; memory is compacted when there is less.
    type: int
    default: 512
  trail:
    description: Also evict checkpoint pages behind the reader, before the floor is near. Ends by itself when pages are read again.
    type: bool
    default: true
  deadline_s:
    description: The guard ends by itself after this time, counted from its first start (0 - never).
    type: int
    default: 2700
  hard_floor_gib:
    description: Stop O(container) when MemAvailable stays under this for O(hard_floor_s), before the node wedges (0 - never).
    type: float
    default: 0.0
  hard_floor_s:
    description: See O(hard_floor_gib).
    type: float
    default: 3.0
  container:
    description: The rank's container, for O(hard_floor_gib).
    type: str
  docker_socket:
    description: Where the Docker engine listens, for O(hard_floor_gib).
    type: path
    default: /var/run/docker.sock
  settings:
    description: More options of the guard program (C(memory_guard.py --help) lists them, here with underscores).
    type: dict
    default: {}
  program:
    description: Text of the guard program. The action plugin fills in the one that the role C(memory_guard) ships.
    type: str
  python:
    description: Interpreter of the guard on the node, 3.10 or newer.
    type: path
    default: /usr/bin/python3
  program_dir:
    description: Folder of the program.
    type: path
    default: /opt/gb10-fleet
  config_dir:
    description: Folder of its configuration.
    type: path
    default: /etc/gb10-fleet
  state_dir:
    description: Folder of the receipts.
    type: path
    default: /var/lib/gb10-fleet/memory_guard
  runtime_dir:
    description: Folder of the marker that ends it.
    type: path
    default: /run/gb10-fleet
  unit_dir:
    description: Folder of the systemd unit.
    type: path
    default: /etc/systemd/system
  timeout_s:
    description: Longest time that one start or stop may take.
    type: int
    default: 40
"""

EXAMPLES = r"""
- name: Guard the load of a checkpoint
  gb10.fleet.memory_guard:
    cluster: alpha
    checkpoint_globs: [/var/tmp/models/GLM-5.3-Flash-NVFP4-redhat]
  become: true

- name: End it, since the head is ready
  gb10.fleet.memory_guard:
    cluster: alpha
    state: stopped
    reason: ready
  become: true
  register: guard

- name: Say how the load went
  ansible.builtin.debug:
    msg: "{{ guard.summary }}"
"""

RETURN = r"""
guard:
  description: State of the guard after the run (in check mode, before it).
  returned: success
  type: dict
  contains:
    unit:
      description: Its unit.
      type: str
      sample: gb10-memory-guard@alpha.service
    active:
      description: What systemd says.
      type: str
      sample: active
    pid:
      description: Process, 0 when it does not run.
      type: int
      sample: 4211
    restarts:
      description: How often systemd had to start it again.
      type: int
      sample: 0
receipt:
  description: The receipt of this or the last run. Empty when there is none.
  returned: success
  type: dict
  sample:
    {state: ended, stopped_by: ready, seconds: 412.3, min_free_kib: 9101312, below_floor_s: 0.0, ineffective_actions: 0}
summary:
  description: The receipt in one line.
  returned: success
  type: str
  sample: lowest free 8.7 GiB (floor 8.0 GiB), never under the floor, 61.2 GiB of checkpoint pages let go, 1.9 s of CPU in 412 s
shortcomings:
  description: What the node does not permit, and what works all the same.
  returned: success
  type: list
  elements: str
  sample: []
"""

import contextlib
import json
import os
import platform
import tempfile
import uuid
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.gb10.fleet.plugins.module_utils import _memory_guard
from ansible_collections.gb10.fleet.plugins.module_utils._command import run

SHOW = "Id,ActiveState,SubState,MainPID,NRestarts,Result,StatusText"


class MemoryGuard:
    def __init__(self, module: AnsibleModule) -> None:
        self.module = module
        self.params: dict[str, Any] = module.params
        self.cluster: str = self.params["cluster"]
        try:
            self.unit = _memory_guard.unit_name(self.cluster)
        except _memory_guard.GuardError as error:
            module.fail_json(msg=str(error))
        self.program = Path(self.params["program_dir"], _memory_guard.PROGRAM)
        self.unit_file = Path(self.params["unit_dir"], f"{_memory_guard.UNIT}.service")
        self.config_file = Path(self.params["config_dir"], f"memory-guard-{self.cluster}.json")
        self.receipt_file = Path(self.params["state_dir"], f"{self.cluster}.json")
        self.marker = Path(self.params["runtime_dir"], f"memory-guard-{self.cluster}.end")
        self.changed = False
        self.before: dict[str, str] = {}
        self.after: dict[str, str] = {}

    # --- the node ---
    def systemctl(self, *words: str) -> str:
        answer = run(["systemctl", *words], float(self.params["timeout_s"]))
        if answer.missing:
            self.module.fail_json(msg="There is no systemctl on this node: the memory guard is a systemd unit.")
        if answer.timed_out:
            self.module.fail_json(
                msg=f"`systemctl {' '.join(words)}` gave no answer within {self.params['timeout_s']} s. "
                f"See: systemctl status {self.unit}"
            )
        if not answer.ok:
            self.module.fail_json(
                msg=f"`systemctl {' '.join(words)}` failed: {answer.err.strip() or answer.out.strip()} {self.journal()}"
            )
        return answer.out

    def show(self) -> dict[str, str]:
        return _memory_guard.parse_show(self.systemctl("show", self.unit, "--property", SHOW))

    def journal(self) -> str:
        """The guard's last words, for an error message."""
        answer = run(["journalctl", "--unit", self.unit, "--lines", "5", "--output", "cat", "--no-pager"], 10.0)
        lines = [line.strip() for line in answer.out.splitlines() if line.strip()]
        return f"Its last words: {' / '.join(lines)}" if lines else ""

    @staticmethod
    def read(path: Path) -> str:
        try:
            return path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return ""

    def receipt(self) -> dict[str, Any]:
        try:
            found = json.loads(self.read(self.receipt_file))
        except ValueError:
            return {}
        return found if isinstance(found, dict) else {}

    def write(self, path: Path, text: str) -> None:
        """Whole or not at all."""
        path.parent.mkdir(parents=True, exist_ok=True)
        fd, partial = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(fd, "w", encoding="utf-8") as handle:
            handle.write(text)
            handle.flush()
            os.fsync(handle.fileno())
        Path(partial).chmod(0o644)
        self.module.atomic_move(partial, str(path))

    def remove(self, path: Path) -> None:
        if path.exists():
            self.note(str(path), self.read(path) if path != self.receipt_file else "(receipt)\n", "")
            if not self.module.check_mode:
                path.unlink()

    def note(self, name: str, before: str, after: str) -> None:
        """A change: for the diff, and made before anything is done."""
        self.changed = True
        self.before[name], self.after[name] = before, after

    # --- states ---
    def install(self) -> bool:
        """Program and unit. True when either differed."""
        if not self.params["program"]:
            self.module.fail_json(
                msg="program is empty: call the module by its full name, so that its action plugin runs."
            )
        unit = _memory_guard.unit_text(self.params["python"], str(self.program), self.params["config_dir"])
        wanted = {self.program: self.params["program"], self.unit_file: unit}
        differing = {path: text for path, text in wanted.items() if self.read(path) != text}
        for path, text in differing.items():
            self.note(str(path), self.read(path), text)
            if not self.module.check_mode:
                self.write(path, text)
        if self.unit_file in differing and not self.module.check_mode:
            self.systemctl("daemon-reload")
        return bool(differing)

    def configure(self) -> tuple[bool, dict[str, Any]]:
        """(whether the settings differ, settings). They are written by whoever begins a run."""
        settings = _memory_guard.config(self.params, str(self.receipt_file), str(self.marker))
        found, _run = _memory_guard.split_config(self.read(self.config_file))
        if found == settings:
            return False, settings
        old = _memory_guard.config_text(found, "") if found else ""
        self.note(str(self.config_file), old, _memory_guard.config_text(settings, ""))
        return True, settings

    def present(self) -> dict[str, Any]:
        self.install()
        differs, settings = self.configure()
        if differs and not self.module.check_mode:
            self.write(self.config_file, _memory_guard.config_text(settings, ""))
        return self.result(self.check())

    def check(self) -> list[str]:
        """What this node does not permit, asked of the installed program."""
        if not self.program.exists():
            return []
        answer = run([self.params["python"], "-I", "-S", str(self.program), "--check"], 20.0)
        if not answer.ok:
            self.module.warn(f"{self.params['python']} {self.program} --check failed: {answer.err.strip()[-300:]}")
            return []
        return list(json.loads(answer.out)["shortcomings"])

    def started(self) -> dict[str, Any]:
        installed = self.install()
        differs, settings = self.configure()
        active = _memory_guard.is_active(self.show())
        if active and not installed and not differs:
            return self.result()
        self.note(self.unit, "started\n" if active else "stopped\n", "restarted\n" if active else "started\n")
        if self.module.check_mode:
            return self.result()
        self.write(self.config_file, _memory_guard.config_text(settings, uuid.uuid4().hex))
        for folder in (self.receipt_file.parent, self.marker.parent):
            folder.mkdir(parents=True, exist_ok=True)
        self.marker.unlink(missing_ok=True)
        run(["systemctl", "reset-failed", self.unit], 20.0)  # fails where there is nothing to reset
        self.systemctl("restart", self.unit)  # Type=notify: comes back when the guard says READY
        return self.result()

    def stopped(self) -> dict[str, Any]:
        show = self.show()
        if _memory_guard.is_active(show):
            self.note(self.unit, "started\n", "stopped\n")
            if not self.module.check_mode:
                self.stop()
        result = self.result()
        for warning in (
            _memory_guard.warnings(result["receipt"], self.show()) if self.changed or self.died(show) else []
        ):
            self.module.warn(f"{platform.node()}: {warning}")
        return result

    def died(self, show: dict[str, str]) -> bool:
        """It ended before it was told to: at its deadline, at the hard floor, or for no reason that it could name."""
        return show.get("ActiveState") == "failed"

    def stop(self) -> None:
        """The marker says why, the signal makes it quick."""
        self.write(self.marker, self.params["reason"])
        self.systemctl("stop", self.unit)
        with contextlib.suppress(FileNotFoundError):
            self.marker.unlink()

    def absent(self) -> dict[str, Any]:
        if self.unit_file.exists() and _memory_guard.is_active(self.show()):
            self.note(self.unit, "started\n", "stopped\n")
            if not self.module.check_mode:
                self.stop()
        if not self.module.check_mode and self.unit_file.exists():
            run(["systemctl", "reset-failed", self.unit], 20.0)
        for path in (self.config_file, self.receipt_file, self.marker):
            self.remove(path)
        others = set(Path(self.params["config_dir"]).glob("memory-guard-*.json")) - {self.config_file}
        if not others:
            had_unit = self.unit_file.exists()
            for path in (self.unit_file, self.program):
                self.remove(path)
            if had_unit and not self.module.check_mode:
                self.systemctl("daemon-reload")
        return self.result()

    def result(self, shortcomings: list[str] | None = None) -> dict[str, Any]:
        receipt, show = self.receipt(), self.show()
        guard = _memory_guard.facts(self.cluster, show, receipt)
        text = {name: "".join(f"{path}:\n{content}" for path, content in side.items())
                for name, side in (("before", self.before), ("after", self.after))}  # fmt: skip
        return {
            "changed": self.changed,
            "diff": text,
            "guard": guard,
            "receipt": receipt,
            "summary": guard["summary"],
            "shortcomings": receipt.get("shortcomings", []) if shortcomings is None else shortcomings,
        }


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "cluster": {"type": "str", "required": True},
            "state": {"type": "str", "choices": ["present", "started", "stopped", "absent"], "default": "started"},
            "reason": {"type": "str", "choices": ["ready", "failed", "stopped"], "default": "stopped"},
            "checkpoint_globs": {"type": "list", "elements": "str", "default": []},
            "floor_gib": {"type": "float", "default": 8.0},
            "order9_mib": {"type": "int", "default": 512},
            "trail": {"type": "bool", "default": True},
            "deadline_s": {"type": "int", "default": 2700},
            "hard_floor_gib": {"type": "float", "default": 0.0},
            "hard_floor_s": {"type": "float", "default": 3.0},
            "container": {"type": "str"},
            "docker_socket": {"type": "path", "default": "/var/run/docker.sock"},
            "settings": {"type": "dict", "default": {}},
            "program": {"type": "str"},
            "python": {"type": "path", "default": "/usr/bin/python3"},
            "program_dir": {"type": "path", "default": "/opt/gb10-fleet"},
            "config_dir": {"type": "path", "default": "/etc/gb10-fleet"},
            "state_dir": {"type": "path", "default": "/var/lib/gb10-fleet/memory_guard"},
            "runtime_dir": {"type": "path", "default": "/run/gb10-fleet"},
            "unit_dir": {"type": "path", "default": "/etc/systemd/system"},
            "timeout_s": {"type": "int", "default": 40},
        },
        supports_check_mode=True,
    )
    manager = MemoryGuard(module)
    if os.geteuid() != 0:
        module.fail_json(msg="The memory guard is a system unit: set become: true, or log in as root.")
    module.exit_json(**getattr(manager, module.params["state"])())


if __name__ == "__main__":
    main()
