#!/usr/bin/python
# Copyright (c) The gb10.fleet maintainers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

DOCUMENTATION = r"""
module: fabric_netplan
short_description: Write down the rails of a node in netplan, with a way back
version_added: "0.1.0"
description:
  - O(state=present) writes one netplan file with the address of each rail, the MTU and no link-local addresses, checks it with
    C(netplan generate), arms a timer that puts the former definition back, and starts C(netplan apply) apart from this session,
    since the management address may vanish for a second.
  - O(state=confirmed) waits until all addresses and MTUs are live, then disarms the timer. When this is never reached, the node
    rolls back by itself.
  - O(state=absent) puts back what was there before the first run, the same way.
  - What the file held before the first run is kept in a journal.
author:
  - The gb10.fleet maintainers (@gb10-fleet)
extends_documentation_fragment:
  - gb10.fleet.attributes
  - gb10.fleet.attributes.full
options:
  state:
    description: What to do.
    type: str
    choices: [present, confirmed, absent]
    default: present
  addresses:
    description: Address with prefix by interface. Needed for O(state=present) and O(state=confirmed).
    type: dict
    default: {}
  mtu:
    description: MTU of every rail.
    type: int
    default: 9000
  path:
    description: The netplan file.
    type: path
    default: /etc/netplan/60-gb10-fabric.yaml
  directory:
    description: Folder of the journal, the rollback state and its receipt.
    type: path
    default: /var/lib/gb10-fleet/fabric
  program:
    description: The rollback program on the node.
    type: path
    default: /opt/gb10-fleet/netplan_rollback.py
  rollback_s:
    description: Seconds after which the node rolls back unless the definition was confirmed.
    type: int
    default: 120
  timeout_s:
    description: Seconds that O(state=confirmed) waits for the addresses.
    type: int
    default: 30
"""

EXAMPLES = r"""
- name: Write down both rails
  gb10.fleet.fabric_netplan:
    addresses:
      enp1s0f0np0: 198.51.100.11/25
      enP2p1s0f0np0: 198.51.100.139/25
  become: true

- name: Wait until the node answers again
  ansible.builtin.wait_for_connection:
    timeout: 60

- name: Keep it
  gb10.fleet.fabric_netplan:
    state: confirmed
    addresses:
      enp1s0f0np0: 198.51.100.11/25
      enP2p1s0f0np0: 198.51.100.139/25
  become: true
"""

RETURN = r"""
path:
  description: The netplan file.
  returned: success
  type: str
armed:
  description: Whether a rollback is pending.
  returned: success
  type: bool
"""

import contextlib
import json
import os
import time
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.gb10.fleet.plugins.module_utils import _fabric, _netplan
from ansible_collections.gb10.fleet.plugins.module_utils._command import run
from ansible_collections.gb10.fleet.plugins.module_utils._journal import JournalError, read_json, write_json

UNIT = "gb10-fabric-rollback"
APPLY = "gb10-fabric-apply"


class FabricNetplan:
    """One file, its journal and its way back."""

    def __init__(self, module: AnsibleModule) -> None:
        self.module, self.params = module, module.params
        self.path = Path(self.params["path"])
        folder = Path(self.params["directory"])
        self.journal, self.state, self.receipt = (
            folder / "netplan.json",
            folder / "rollback.json",
            folder / "rolled-back.json",
        )

    def current(self) -> str | None:
        try:
            return self.path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return None

    def write(self, content: str | None) -> None:
        if content is None:
            self.path.unlink(missing_ok=True)
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}.tmp")
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)  # netplan warns about wider modes
        with os.fdopen(descriptor, "w", encoding="utf-8") as handle:
            handle.write(content)
            handle.flush()
            os.fsync(handle.fileno())
        temporary.replace(self.path)

    def wanted(self) -> str | None:
        if self.params["state"] == "absent":
            return read_json(str(self.journal), {}).get("before") if self.journal.exists() else self.current()
        return _netplan.render(self.params["addresses"], self.params["mtu"])

    def change(self) -> dict[str, Any]:
        """present and absent: write, check, arm, apply."""
        before, after = self.current(), self.wanted()
        result: dict[str, Any] = {
            "changed": before != after,
            "path": str(self.path),
            "armed": False,
            "diff": {
                **{"before": before or "", "after": after or ""},
                **{"before_header": str(self.path), "after_header": str(self.path)},
            },
        }
        if not result["changed"]:
            self.forget()
            return result
        if self.module.check_mode:
            return result
        if self.params["state"] == "present" and not self.journal.exists():
            write_json(str(self.journal), {"path": str(self.path), "before": before})
        self.write(after)
        checked = run(["netplan", "generate"], 30)
        if not checked.ok:
            self.write(before)
            words = "there is no netplan command" if checked.missing else (checked.err or checked.out).strip()
            self.module.fail_json(msg=f"{self.path} was put back as it was, since netplan refused the new one: {words}")
        self.receipt.unlink(missing_ok=True)
        write_json(str(self.state), {"path": str(self.path), "content": before, "receipt": str(self.receipt)}, 0o600)
        self.arm(before)
        self.forget()
        return {**result, "armed": True}

    def arm(self, before: str | None) -> None:
        """The way back first, then apply; both belong to systemd, not to this session."""
        self.disarm()
        after = [f"--on-active={self.params['rollback_s']}", "--timer-property=AccuracySec=1s"]
        way_back = [
            "systemd-run",
            "--quiet",
            f"--unit={UNIT}",
            *after,
            "/usr/bin/python3",
            self.params["program"],
            str(self.state),
        ]
        apply = ["systemd-run", "--quiet", "--collect", "--no-block", f"--unit={APPLY}", "netplan", "apply"]
        for argv in (way_back, apply):
            answer = run(argv, 30)
            if not answer.ok:
                self.disarm()
                self.write(before)
                self.state.unlink(missing_ok=True)
                self.module.fail_json(
                    msg=f"{self.path} was put back as it was: `{' '.join(argv[:5])}` failed: {(answer.err or answer.out).strip()}"
                )

    def disarm(self) -> None:
        run(["systemctl", "stop", f"{UNIT}.timer"], 30)
        run(["systemctl", "reset-failed", f"{UNIT}.service", f"{UNIT}.timer", f"{APPLY}.service"], 30)

    def forget(self) -> None:
        """After an uninstall the journal is done with."""
        if self.params["state"] == "absent" and not self.module.check_mode:
            with contextlib.suppress(OSError):
                self.journal.unlink()

    def confirm(self) -> dict[str, Any]:
        """Wait for the addresses, then disarm. Fails with what is missing; the way back stays armed."""
        if self.receipt.exists() and not self.state.exists():
            self.module.fail_json(
                msg="this node rolled back to its former network definition before the new one was confirmed (receipt: "
                f"{self.receipt}). "
                "Look at `journalctl -u gb10-fabric-apply`."
            )
        pending = self.state.exists()
        deadline = time.monotonic() + self.params["timeout_s"]
        while lacking := self.lacking():
            if self.module.check_mode or time.monotonic() > deadline:
                break
            time.sleep(0.5)
        if lacking and not self.module.check_mode:
            back = (
                f" The former definition comes back by itself {self.params['rollback_s']} s after the change."
                if pending
                else ""
            )
            self.module.fail_json(
                msg=f"after netplan apply {'; '.join(lacking)} ({self.params['timeout_s']} s waited).{back}"
            )
        if pending and not self.module.check_mode:
            self.disarm()
            self.state.unlink(missing_ok=True)
        return {"changed": False, "path": str(self.path), "armed": False}

    def lacking(self) -> list[str]:
        interfaces = _fabric.parse_ip_addr(run(["ip", "-j", "addr", "show"], 10).out)
        return _netplan.missing(self.params["addresses"], self.params["mtu"], interfaces)


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "state": {"type": "str", "choices": ["present", "confirmed", "absent"], "default": "present"},
            "addresses": {"type": "dict", "default": {}},
            "mtu": {"type": "int", "default": 9000},
            "path": {"type": "path", "default": "/etc/netplan/60-gb10-fabric.yaml"},
            "directory": {"type": "path", "default": "/var/lib/gb10-fleet/fabric"},
            "program": {"type": "path", "default": "/opt/gb10-fleet/netplan_rollback.py"},
            "rollback_s": {"type": "int", "default": 120},
            "timeout_s": {"type": "int", "default": 30},
        },
        supports_check_mode=True,
    )
    netplan = FabricNetplan(module)
    try:
        result = netplan.confirm() if module.params["state"] == "confirmed" else netplan.change()
    except (_netplan.NetplanError, JournalError) as error:
        module.fail_json(msg=str(error))
    except OSError as error:
        module.fail_json(msg=f"The network definition of this node cannot be changed: {error}")
    module.exit_json(**json.loads(json.dumps(result)))


if __name__ == "__main__":
    main()
