#!/usr/bin/python
# Copyright (c) The gb10.fleet maintainers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

DOCUMENTATION = r"""
module: memory_ritual
short_description: Make room for a rank before it starts, and wait until there is room
version_added: "0.1.0"
description:
  - A rank takes O(utilization) of all memory at once, and on unified memory it is granted MemFree only, which the page cache of the
    last load may hold. This module brings MemFree to O(utilization) x MemTotal + O(margin_gib), gentlest means first, and does
    nothing at all where it is there already.
  - First the checkpoint's own pages are evicted. Then, if that was not enough, the page cache is dropped (C(drop_caches=1)). Then,
    if free blocks of 2 MiB and more are short, memory is compacted.
  - Then it waits up to O(timeout_s) - a driver may need minutes to give back the memory of a container that has ended (3 were not
    enough once, 4 were) - and fails with what holds the memory, by name, if it does not come.
author:
  - The gb10.fleet maintainers (@gb10-fleet)
extends_documentation_fragment:
  - gb10.fleet.attributes
attributes:
  check_mode:
    support: full
    details: Says what would be done, and does not wait.
  diff_mode:
    support: none
    details: Memory has no text to compare; RV(actions) says what was done.
  idempotent:
    support: full
options:
  utilization:
    description: Share of all memory that the rank will take (C(gpu-memory-utilization)).
    type: float
    default: 0.0
  least_gib:
    description: Free memory that the rank needs where it names no share. The larger of the two counts.
    type: float
    default: 0.0
  margin_gib:
    description: What is to be free beside it.
    type: float
    default: 1.5
  checkpoint_globs:
    description: Patterns or folders of checkpoint files, whose page cache goes first.
    type: list
    elements: str
    default: []
  smallest_mib:
    description: Leave files smaller than this alone.
    type: int
    default: 16
  order9_mib:
    description: Free memory in blocks of 2 MiB and more that is wanted.
    type: int
    default: 512
  timeout_s:
    description: How long to wait for memory to come back.
    type: int
    default: 300
"""

EXAMPLES = r"""
- name: Make room for a rank that takes 0.85 of all memory
  gb10.fleet.memory_ritual:
    utilization: 0.85
    checkpoint_globs: [/var/tmp/models/GLM-5.3-Flash-NVFP4-redhat]
  become: true

- name: Say what would be done
  gb10.fleet.memory_ritual:
    least_gib: 4
  become: true
  check_mode: true
"""

RETURN = r"""
actions:
  description: What was done, or would be in check mode. Empty when there was room.
  returned: success
  type: list
  elements: str
  sample: ["evict 61.2 GiB of checkpoint pages", "compact memory, 96 MiB are free in blocks of 2 MiB and more"]
enough:
  description: Whether there is room now. Only in check mode it can be false, otherwise the module fails.
  returned: success
  type: bool
  sample: true
free_gib:
  description: MemFree at the end.
  returned: always
  type: float
  sample: 112.4
wanted_gib:
  description: MemFree that is wanted.
  returned: always
  type: float
  sample: 104.9
waited_s:
  description: Seconds spent waiting.
  returned: always
  type: float
  sample: 0.0
holders:
  description: What holds memory, as clauses of a sentence, when there is not enough.
  returned: always
  type: list
  elements: str
  sample: ["python3 (pid 4211) holds 3.4 GiB"]
"""

import time
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.gb10.fleet.plugins.module_utils import _meminfo, _nvidia_smi, _pagecache
from ansible_collections.gb10.fleet.plugins.module_utils._meminfo import gib
from ansible_collections.gb10.fleet.plugins.module_utils._node import meminfo

POLL_S = 0.5
AGAIN_S = 10.0  # how often eviction is tried again while waiting
NOTHING_KIB = 64 * 1024


class Ritual:
    def __init__(self, module: AnsibleModule) -> None:
        self.module = module
        self.params: dict[str, Any] = module.params
        self.actions: list[str] = []
        self.changed = False
        self.waited_s = 0.0
        self.checkpoint_kib = 0
        self.memory = self.read()
        numbers = (self.memory["MemTotal"], *(self.params[k] for k in ("utilization", "margin_gib", "least_gib")))
        self.wanted = _meminfo.wanted_kib(*numbers)
        self.wanted_words = _meminfo.wanted_words(*numbers)

    def read(self) -> dict[str, int]:
        self.memory = meminfo(Path("/proc/meminfo").read_text())
        return self.memory

    def big(self) -> int:
        return _meminfo.parse_buddyinfo(Path("/proc/buddyinfo").read_text(), _pagecache.PAGE_KIB)

    @property
    def missing(self) -> int:
        return max(0, self.wanted - self.memory["MemFree"])

    # --- steps ---
    def evict(self) -> None:
        """The checkpoint's pages. Without cachestat nobody knows how many there are: then all files are evicted."""
        with _pagecache.opened(self.params["checkpoint_globs"], self.params["smallest_mib"] * 1024) as fds:
            cached = [(fd, _pagecache.cached_kib(fd)) for fd in fds]
            self.checkpoint_kib = sum(kib or 0 for dummy, kib in cached)
            if self.checkpoint_kib < NOTHING_KIB and None not in (kib for dummy, kib in cached):
                return
            self.note(f"evict {gib(self.checkpoint_kib)} of checkpoint pages")
            self.changed = True
            if not self.module.check_mode:
                for fd, kib in cached:
                    if kib is None or kib:
                        _pagecache.evict(fd)
                self.checkpoint_kib = sum(_pagecache.cached_kib(fd) or 0 for fd in fds)

    def drop(self) -> None:
        cache = _meminfo.reclaimable_cache(self.memory) - (self.checkpoint_kib if self.module.check_mode else 0)
        if cache >= NOTHING_KIB:
            self.note(f"drop the page cache ({gib(cache)})")
            self.changed = True
            self.write("drop_caches")

    def compact(self) -> None:
        big, wanted = self.big(), self.params["order9_mib"] * 1024
        if big < wanted:
            self.note(f"compact memory, {gib(big)} are free in blocks of 2 MiB and more")
            self.write("compact_memory")
            # Compacting what cannot be compacted any further changes nothing.
            self.changed = self.changed or self.module.check_mode or self.big() - big >= wanted // 8

    def note(self, action: str) -> None:
        kind = action.split()[0]
        if not any(earlier.split()[0] == kind for earlier in self.actions):  # tried again while waiting: said once
            self.actions.append(action)

    def write(self, name: str) -> None:
        if self.module.check_mode:
            return
        try:
            Path("/proc/sys/vm", name).write_text("1")
        except OSError as error:
            self.module.warn(f"vm.{name} could not be written ({error.strerror}). Set become: true, or run as root.")

    def make_room(self) -> None:
        if self.missing:
            self.evict()
            self.read()
        if self.missing > (self.checkpoint_kib if self.module.check_mode else 0):
            self.drop()
            self.read()

    def run(self) -> dict[str, Any]:
        self.make_room()
        self.compact()
        if self.module.check_mode:
            return self.result(enough=not self.missing)
        began = tried = time.monotonic()
        while self.missing and time.monotonic() - began < self.params["timeout_s"]:
            time.sleep(POLL_S)
            self.read()
            if self.missing and time.monotonic() - tried > AGAIN_S:
                tried = time.monotonic()
                self.make_room()
        self.waited_s = time.monotonic() - began
        if self.missing:
            self.module.fail_json(msg=self.complaint(), **self.result(enough=False))
        return self.result(enough=True)

    # --- words ---
    def processes(self) -> list[dict[str, Any]]:
        """Who holds memory of his own, GPU memory included where the driver tells."""
        found: dict[int, dict[str, Any]] = {}
        for path in Path("/proc").glob("[0-9]*/status"):
            try:
                said = _meminfo.own_kib(path.read_text())
            except OSError:
                continue
            if said:
                found[int(path.parent.name)] = {"pid": int(path.parent.name), "name": said[0], "kib": said[1]}
        try:
            on_gpu = _nvidia_smi.query_processes()
        except _nvidia_smi.NvidiaSmiError:
            on_gpu = []
        for process in on_gpu:
            entry = found.setdefault(process.pid, {"pid": process.pid, "name": process.name, "kib": 0})
            entry["kib"] += int((process.used_mib or 0) * 1024)
        return list(found.values())

    def holders(self) -> list[str]:
        return _meminfo.holders(self.memory, self.processes(), self.checkpoint_kib) if self.missing else []

    def complaint(self) -> str:
        held = "; ".join(self.holders())
        advice = "Free memory"
        if self.params["utilization"]:
            fits = _meminfo.largest_utilization(
                self.memory["MemTotal"], self.memory["MemFree"], self.params["margin_gib"]
            )
            advice = f"Lower gpu-memory-utilization to {fits:.2f}, or free memory"
        return (
            f"{gib(self.memory['MemFree'])} free after {self.waited_s:.0f} s, {self.wanted_words} wanted. "
            f"{advice}{': ' + held if held else ''}."
        )

    def result(self, enough: bool) -> dict[str, Any]:
        return {
            "changed": self.changed,
            "actions": self.actions,
            "enough": enough,
            "free_gib": round(self.memory["MemFree"] / _meminfo.GIB_KIB, 2),
            "wanted_gib": round(self.wanted / _meminfo.GIB_KIB, 2),
            "waited_s": round(self.waited_s, 1),
            "holders": self.holders(),
        }


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "utilization": {"type": "float", "default": 0.0},
            "least_gib": {"type": "float", "default": 0.0},
            "margin_gib": {"type": "float", "default": 1.5},
            "checkpoint_globs": {"type": "list", "elements": "str", "default": []},
            "smallest_mib": {"type": "int", "default": 16},
            "order9_mib": {"type": "int", "default": 512},
            "timeout_s": {"type": "int", "default": 300},
        },
        supports_check_mode=True,
    )
    module.exit_json(**Ritual(module).run())


if __name__ == "__main__":
    main()
