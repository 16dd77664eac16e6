#!/usr/bin/python
# Copyright (c) The gb10.fleet maintainers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: gpu_clock
short_description: Lock the GPU clock to a range
version_added: "0.1.0"
description:
  - Runs C(nvidia-smi -lgc) or C(nvidia-smi -rgc) and believes the tool's reply only when it names the range that was asked for.
  - The driver does not report a lock. The state is therefore what this module recorded since the node started, together with
    whether the driver was loaded again since, and whether the SM clock is above the lock.
  - A cap snaps down to one of the GPU's steps. On a GB10 a cap of 2200 MHz reads 2184 or 2190 MHz under load.
author:
  - The gb10.fleet maintainers (@gb10-fleet)
extends_documentation_fragment:
  - gb10.fleet.attributes
attributes:
  check_mode:
    support: full
  diff_mode:
    support: partial
    details: The driver does not report a lock, so the state before is what this module recorded itself.
  idempotent:
    support: full
options:
  state:
    description: V(present) locks the clock, V(absent) takes a lock of this module off.
    type: str
    choices: [present, absent]
    default: present
  min_mhz:
    description: Lowest clock, in MHz.
    type: int
    default: 300
  max_mhz:
    description:
      - Highest clock, in MHz. Must not be above C(clocks.max.gr) (3003 on a GB10).
      - Required with O(state=present).
    type: int
  record:
    description:
      - File on the node that records the lock. It has to lie on a file system that a reboot empties, because a reboot takes the
        lock off.
    type: path
    default: /run/gb10-fleet/tuning.json
  nvidia_smi:
    description: The tool, by name or path.
    type: str
    default: nvidia-smi
  timeout_s:
    description: Seconds after which nvidia-smi counts as hanging in a wedged driver.
    type: float
    default: 10
notes:
  - After a crash or a power event a GB10 can be stuck at 500 to 850 MHz and about 19 W although it is busy and names no reason.
    C(nvidia-smi -lgc) is accepted in this state and has no effect. The module says so with the cure and does not claim to have
    fixed it.
seealso:
  - module: gb10.fleet.cpu_frequency
  - module: gb10.fleet.thermal_info
"""

EXAMPLES = r"""
- name: Cap the GPU clock (78 W became 47 to 50 W at the same decode speed)
  gb10.fleet.gpu_clock:
    min_mhz: 300
    max_mhz: 2200
  become: true

- name: Take the cap off
  gb10.fleet.gpu_clock:
    state: absent
  become: true
"""

RETURN = r"""
reason:
  description: Why the lock was set or taken off. V(null) when nothing had to be done.
  returned: success
  type: str
  sample: no lock is recorded since this node started
reply:
  description: What nvidia-smi answered when the lock was last set.
  returned: when a lock is recorded
  type: str
  sample: 'GPU clocks set to "(gpuClkMin 300, gpuClkMax 2200)"'
verified:
  description:
    - V(true) when the GPU is busy and its SM clock is within the lock.
    - V(null) when the GPU is idle or in check mode, because then nothing is proved.
  returned: success
  type: bool
low_power:
  description: Whether the GPU is stuck in its low-power state.
  returned: success
  type: bool
clocks:
  description:
    - What the GPU did after the run. A value that the driver does not give is V(null).
    - Empty with O(state=absent) when no lock is recorded, because nothing is asked then.
  returned: success
  type: dict
  contains:
    sm_mhz:
      description: SM clock in MHz.
      type: float
      sample: 2184
    gr_max_mhz:
      description: Highest clock that the GPU can be set to, in MHz.
      type: float
      sample: 3003
    power_w:
      description: Power draw in watts.
      type: float
      sample: 47.5
    utilization_percent:
      description: Utilization in percent.
      type: float
      sample: 96
    reasons:
      description: Active reasons for the present clock.
      type: list
      elements: str
      sample: []
"""

import time
from typing import Any

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.gb10.fleet.plugins.module_utils import _nvidia_smi
from ansible_collections.gb10.fleet.plugins.module_utils._journal import JournalError, read_json, write_json

SETTLE_READINGS = 3


class GpuClockManager:
    def __init__(self, module: AnsibleModule) -> None:
        self.module = module
        self.params = module.params
        self.smi = {"command": self.params["nvidia_smi"], "timeout_s": self.params["timeout_s"]}
        self.run_state: dict[str, Any] = read_json(self.params["record"], None) or {}

    def run(self) -> None:
        record = self.run_state.get("gpu")
        if self.params["state"] == "absent" and record is None:
            self.module.exit_json(changed=False, reason=None, reply=None, verified=None, low_power=False, clocks={})
        clocks = _nvidia_smi.read_clocks(**self.smi)
        before = f"{record['min_mhz']}-{record['max_mhz']} MHz" if record else "no lock of ours"
        if self.params["state"] == "present":
            why: str | None = self._present(record, clocks)
            after = f"{self.params['min_mhz']}-{self.params['max_mhz']} MHz"
        else:
            why = self._absent()
            after = "no lock"
        if why is not None and not self.module.check_mode:
            clocks = self._settled()
        self._exit(why, clocks, before, after)

    def _settled(self) -> _nvidia_smi.Clocks:
        """The clocks after a change: a busy GPU takes a moment to come down to its cap."""
        for dummy in range(SETTLE_READINGS):
            clocks = _nvidia_smi.read_clocks(**self.smi)
            if self.params["state"] == "absent" or not self._above(clocks):
                break
            time.sleep(1)
        return clocks

    def _above(self, clocks: _nvidia_smi.Clocks) -> bool:
        return (clocks.sm_mhz or 0) > self.params["max_mhz"] + _nvidia_smi.SM_STEP_MHZ

    def _present(self, record: dict[str, Any] | None, clocks: _nvidia_smi.Clocks) -> str | None:
        low, high = self.params["min_mhz"], self.params["max_mhz"]
        _nvidia_smi.check_lock(low, high, clocks)
        driver = _nvidia_smi.driver_load()
        why = _nvidia_smi.why_lock(record, low, high, driver, clocks)
        if why is not None and not self.module.check_mode:
            reply = _nvidia_smi.lock_clocks(low, high, **self.smi)
            at = time.clock_gettime(time.CLOCK_BOOTTIME)
            self.run_state["gpu"] = {"min_mhz": low, "max_mhz": high, "driver": driver, "reply": reply, "at": at}
            write_json(self.params["record"], self.run_state)
        return why

    def _absent(self) -> str:
        if not self.module.check_mode:
            _nvidia_smi.reset_clocks(**self.smi)
            del self.run_state["gpu"]
            write_json(self.params["record"], self.run_state)
        return "a lock is recorded"

    def _exit(self, why: str | None, clocks: _nvidia_smi.Clocks, before: str, after: str) -> None:
        present = self.params["state"] == "present"
        proved = present and clocks.loaded and clocks.sm_mhz is not None and not (why and self.module.check_mode)
        if clocks.stuck_low_power:
            self.module.warn(
                f"The GPU is stuck in its low-power state ({clocks.shown}, no reason given). {_nvidia_smi.LOW_POWER_CURE}"
            )
        if present and clocks.persistence is False:
            self.module.warn(
                "Persistence mode is off: the lock is lost whenever no program uses the GPU. Enable nvidia-persistenced."
            )
        self.module.exit_json(
            changed=why is not None,
            reason=why,
            reply=(self.run_state.get("gpu") or {}).get("reply"),
            verified=not self._above(clocks) if proved else None,
            low_power=clocks.stuck_low_power,
            clocks={
                "sm_mhz": clocks.sm_mhz,
                "gr_max_mhz": clocks.gr_max_mhz,
                "power_w": clocks.power_w,
                "utilization_percent": clocks.utilization_percent,
                "reasons": list(clocks.reasons),
            },
            diff={"before": f"GPU clock: {before}\n", "after": f"GPU clock: {after}\n"} if why else {},
        )


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
            "min_mhz": {"type": "int", "default": 300},
            "max_mhz": {"type": "int"},
            "record": {"type": "path", "default": "/run/gb10-fleet/tuning.json"},
            "nvidia_smi": {"type": "str", "default": "nvidia-smi"},
            "timeout_s": {"type": "float", "default": 10},
        },
        required_if=[("state", "present", ["max_mhz"])],
        supports_check_mode=True,
    )
    try:
        GpuClockManager(module).run()
    except (_nvidia_smi.NvidiaSmiError, JournalError) as exc:
        module.fail_json(msg=str(exc))


if __name__ == "__main__":
    main()
