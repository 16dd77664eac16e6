#!/usr/bin/python
# Copyright (c) The gb10.fleet maintainers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: cpu_frequency
short_description: Set the CPU frequency governor and cap the fast cores
version_added: "0.1.0"
description:
  - Sets governor and highest frequency per cpufreq policy, from what each policy says it can do, and reads every value back.
  - A GB10 has ten fast cores and ten slow ones, and C(cpu0) is a slow one. O(cap_mhz) applies only to policies whose hardware goes
    above it, so the slow cores stay as they are.
  - What a file held before this module first wrote it is kept in O(journal), and O(state=absent) puts it back byte for byte.
  - CPPC autonomous selection is never touched.
author:
  - The gb10.fleet maintainers (@gb10-fleet)
extends_documentation_fragment:
  - gb10.fleet.attributes
  - gb10.fleet.attributes.full
options:
  state:
    description:
      - V(present) sets what is asked. A value that an earlier run set and that is no longer asked for is put back.
      - V(absent) puts back everything that the journal holds.
    type: str
    choices: [present, absent]
    default: present
  governor:
    description:
      - Name of a governor that every policy has, or V(auto).
      - V(auto) is C(schedutil) for the policies that have it; the others keep theirs, with a warning.
      - When not set the governors are left alone.
    type: str
  cap_mhz:
    description:
      - Highest frequency, in MHz, of the policies whose hardware maximum is above it. V(0) or not set for no cap.
    type: int
  journal:
    description: File on the node that keeps the previous values.
    type: path
    default: /var/lib/gb10-fleet/tuning.json
  root:
    description: Folder that stands for V(/), for a container that has the node's root mounted.
    type: path
    default: /
notes:
  - The kernel forgets these settings at a reboot. The role P(gb10.fleet.thermal#role) installs a unit that sets them again.
seealso:
  - module: gb10.fleet.gpu_clock
  - module: gb10.fleet.thermal_info
"""

EXAMPLES = r"""
- name: Let idle cores rest and cap the 3.9 GHz cores at 3.3 GHz
  gb10.fleet.cpu_frequency:
    governor: schedutil
    cap_mhz: 3300
  become: true

- name: Put the previous values back
  gb10.fleet.cpu_frequency:
    state: absent
  become: true
"""

RETURN = r"""
policies:
  description: Every policy after the run (in check mode, as it would be).
  returned: success
  type: list
  elements: dict
  contains:
    name:
      description: Name of the policy.
      type: str
      sample: policy5
    cpus:
      description: CPUs that it governs.
      type: str
      sample: "5-9"
    governor:
      description: Its governor.
      type: str
      sample: schedutil
    max_mhz:
      description: Highest frequency that it is allowed, in MHz.
      type: int
      sample: 3300
    hardware_max_mhz:
      description: Highest frequency that its hardware can do, in MHz.
      type: int
      sample: 3900
actions:
  description: What was written, or would be in check mode.
  returned: success
  type: list
  elements: str
  sample: ["policy5/scaling_max_freq: 3900000 -> 3300000"]
"""

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.gb10.fleet.plugins.module_utils import _cpufreq
from ansible_collections.gb10.fleet.plugins.module_utils._journal import Journal, JournalError, locked


class CpuFrequencyManager:
    def __init__(self, module: AnsibleModule) -> None:
        self.module = module
        self.params = module.params
        self.nothing = self.params["state"] == "absent" and not self._journal().before
        self.policies = [] if self.nothing else _cpufreq.read_policies(self.params["root"])

    def run(self) -> None:
        if self.module.check_mode or self.nothing:
            changes = self._changes(self._journal())
        else:
            with locked(self.params["journal"].removesuffix(".json") + ".lock"):
                journal = self._journal()
                changes = self._changes(journal)
                _cpufreq.carry_out(changes, self._wanted(), journal)
        self.module.exit_json(
            changed=bool(changes),
            actions=[f"{_cpufreq.short(c.path)}: {c.before.strip()} -> {c.after.strip()}" for c in changes],
            policies=self._policies(changes),
            diff={
                "before": _lines([(c.path, c.before) for c in changes]),
                "after": _lines([(c.path, c.after) for c in changes]),
            },
        )

    def _journal(self) -> Journal:
        return Journal(self.params["journal"], self.params["root"])

    def _wanted(self) -> dict[str, str]:
        if self.params["state"] == "absent":
            return {}
        return _cpufreq.wanted_values(self.policies, self.params["governor"], self.params["cap_mhz"] or None)

    def _changes(self, journal: Journal) -> list[_cpufreq.Change]:
        lacking = [p for p in self.policies if _cpufreq.AUTO_GOVERNOR not in p.governors]
        if self.params["state"] == "present" and self.params["governor"] == "auto" and lacking:
            first = lacking[0]
            self.module.warn(
                f"{first.where} has no {_cpufreq.AUTO_GOVERNOR} governor (available: {', '.join(first.governors) or 'none'}): "
                f"{len(lacking)} of {len(self.policies)} policies keep {first.governor}."
            )
        return _cpufreq.plan(self.policies, self._wanted(), journal)

    def _policies(self, changes: list[_cpufreq.Change]) -> list[dict[str, object]]:
        after = {change.path: change.after.strip() for change in changes}
        return [
            {
                "name": policy.name,
                "cpus": _cpufreq.ranges(policy.cpus),
                "governor": after.get(policy.path(_cpufreq.GOVERNOR), policy.governor),
                "max_mhz": int(after.get(policy.path(_cpufreq.MAX_FREQ), policy.scaling_max_khz)) // 1000,
                "hardware_max_mhz": policy.hardware_max_khz // 1000,
            }
            for policy in self.policies
        ]


def _lines(values: list[tuple[str, str]]) -> str:
    return "".join(f"{_cpufreq.short(path)}: {content.strip()}\n" for path, content in values)


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
            "governor": {"type": "str"},
            "cap_mhz": {"type": "int"},
            "journal": {"type": "path", "default": "/var/lib/gb10-fleet/tuning.json"},
            "root": {"type": "path", "default": "/"},
        },
        supports_check_mode=True,
    )
    try:
        CpuFrequencyManager(module).run()
    except (_cpufreq.CpuFrequencyError, JournalError) as exc:
        module.fail_json(msg=str(exc))
    except OSError as exc:
        module.fail_json(msg=f"{exc.filename}: {exc.strerror}. Run this task as root on the node.")


if __name__ == "__main__":
    main()
