#!/usr/bin/python
# Copyright (c) The gb10.fleet maintainers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: sysctl_file
short_description: Keep one sysctl.d file with exactly the given kernel settings
version_added: "0.1.0"
description:
  - Sets the kernel's parameters, reads them back, and keeps a file with exactly O(settings), so that they hold after a reboot.
    A setting that is no longer given gets the value back that it had before.
  - Unlike M(ansible.posix.sysctl), which edits one line, this module owns the whole file, journals the previous values and can put
    all of them back.
  - Warns about another file that sets the same parameter differently at the next boot, and about a raised C(vm.min_free_kbytes),
    with the arithmetic.
author:
  - The gb10.fleet maintainers (@gb10-fleet)
extends_documentation_fragment:
  - gb10.fleet.attributes
  - gb10.fleet.attributes.full
options:
  state:
    description: V(absent) puts the previous values back and removes the file.
    type: str
    choices: [present, absent]
    default: present
  path:
    description: The file. Files of the same folders that sort later win at the next boot.
    type: path
    default: /etc/sysctl.d/99-zz-gb10-fleet.conf
  settings:
    description: Values by name, such as C(vm.swappiness).
    type: dict
    default: {}
  utilization:
    description: The engine's share of the memory (C(gpu-memory-utilization)), for the arithmetic of C(vm.min_free_kbytes).
    type: float
  journal:
    description: File on the node that keeps the previous values.
    type: path
    default: /var/lib/gb10-fleet/sysctl.json
  root:
    description: Folder that stands for V(/), for tests.
    type: path
    default: /
seealso:
  - module: ansible.posix.sysctl
"""

EXAMPLES = r"""
- name: Let the kernel swap before it kills
  gb10.fleet.sysctl_file:
    settings:
      vm.swappiness: 10
  become: true
"""

RETURN = r"""
actions:
  description: What was written, or would be in check mode.
  returned: success
  type: list
  elements: str
  sample: ["vm.swappiness: 60 -> 10"]
"""

import os
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.gb10.fleet.plugins.module_utils import _kernel
from ansible_collections.gb10.fleet.plugins.module_utils._journal import Journal, JournalError
from ansible_collections.gb10.fleet.plugins.module_utils._node import meminfo

HEADER = "Written by gb10.fleet: changes made here are lost."


class SysctlError(Exception):
    """A setting that cannot be made; the message is a sentence."""


class SysctlFileManager:
    def __init__(self, module: AnsibleModule) -> None:
        self.module = module
        self.root = Path(module.params["root"])
        self.path: str = module.params["path"]
        present = module.params["state"] == "present"
        self.settings = {str(k): str(v) for k, v in module.params["settings"].items()} if present else {}
        self.journal = Journal(module.params["journal"], module.params["root"])

    def run(self) -> None:
        refused = _kernel.refused_sysctls(list(self.settings))
        if refused:
            raise SysctlError(refused)
        changes = self._changes()
        self._warn()
        content = _kernel.sysctl_file(self.settings, HEADER) if self.settings else ""
        held = self._text(self.path)
        if not self.module.check_mode:
            self._carry_out(changes)
            if held != content:
                self._write_file(content)
        actions = [f"{name}: {before.strip()} -> {after.strip()}" for name, dummy, before, after in changes]
        if held != content:
            actions.append(f"{self.path}: {'written' if content else 'removed'}")
        before, after = ("".join(f"{c[0]} = {c[i].strip()}\n" for c in changes) for i in (2, 3))
        diffs = [{"before": before, "after": after, "before_header": "kernel", "after_header": "kernel"}]
        diffs.append({"before": held, "after": content, "before_header": self.path, "after_header": self.path})
        self.module.exit_json(
            changed=bool(actions), actions=actions, diff=[d for d in diffs if d["before"] != d["after"]]
        )

    def _changes(self) -> list[tuple[str, str, str, str]]:
        """(name, path, raw before, raw after) of what has to be written to the kernel."""
        changes = []
        for name, value in sorted(self.settings.items()):
            path = _kernel.sysctl_path(name)
            now = self._now(name, path)
            if not _kernel.same(now, value):
                changes.append((name, path, now, value + "\n"))
        wanted = {_kernel.sysctl_path(name) for name in self.settings}
        for path, before in sorted(self.journal.before.items()):
            name = path.removeprefix("/proc/sys/").replace("/", ".")
            if path not in wanted and (self.root / path.lstrip("/")).exists():
                now = self._now(name, path)
                if now != before:
                    changes.append((name, path, now, before))
        return changes

    def _now(self, name: str, path: str) -> str:
        try:
            return self.journal.read(path)
        except FileNotFoundError as exc:
            folder = (self.root / path.lstrip("/")).parent
            prefix = name.rpartition(".")[0]
            known = [f"{prefix}.{entry.name}" for entry in folder.iterdir()] if folder.is_dir() else []
            raise SysctlError(
                f"{name}: this kernel has no such setting ({path}).{_kernel.nearest(name, known)}"
            ) from exc
        except OSError as exc:
            raise SysctlError(f"{name} cannot be read ({path}): {exc.strerror}.") from exc

    def _carry_out(self, changes: list[tuple[str, str, str, str]]) -> None:
        wanted = {_kernel.sysctl_path(name) for name in self.settings}
        for name in self.settings:
            path = _kernel.sysctl_path(name)
            self.journal.remember(path, self._now(name, path))
        self.journal.save()
        for name, path, dummy, after in changes:
            try:
                self.journal.write(path, after)
            except OSError as exc:
                raise SysctlError(f"{name}: the kernel refuses {after.strip()!r}: {exc.strerror}.") from exc
            now = self._now(name, path)
            if not _kernel.same(now, after):
                raise SysctlError(f"{name}: {after.strip()!r} was written, the kernel holds {now.strip()!r}.")
        for path in [p for p in self.journal.before if p not in wanted]:
            del self.journal.before[path]
        self.journal.save()

    def _write_file(self, content: str) -> None:
        target = self.root / self.path.lstrip("/")
        if not content:
            target.unlink(missing_ok=True)
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_name(f".{target.name}.tmp")
        with temporary.open("w", encoding="utf-8") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.chmod(0o644)
        temporary.replace(target)

    def _text(self, path: str) -> str:
        try:
            return (self.root / path.lstrip("/")).read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""

    def _warn(self) -> None:
        files = {}
        for folder in _kernel.SYSCTL_FOLDERS:
            for path in sorted((self.root / folder.lstrip("/")).glob("*.conf")):
                name = f"{folder}/{path.name}"
                if name != self.path:
                    files[name] = self._text(name)
        for name, value, other in _kernel.overridden(self.path, self.settings, files):
            self.module.warn(
                f"{name} = {value} in {other} wins over ours ({self.settings[name]}) at the next boot: remove it there, or give "
                f"our file a name that sorts later than {other.rpartition('/')[2]}."
            )
        if _kernel.MIN_FREE in self.settings:
            wanted, now = (
                self.settings[_kernel.MIN_FREE],
                self._now(_kernel.MIN_FREE, _kernel.sysctl_path(_kernel.MIN_FREE)),
            )
            if not wanted.isdigit():
                raise SysctlError(f"{_kernel.MIN_FREE} is {wanted!r}, wanted a number of KiB.")
            memory = meminfo(self._text("/proc/meminfo"))
            self.module.warn(_kernel.min_free_warning(int(wanted), int(now), memory, self.module.params["utilization"]))


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
            "path": {"type": "path", "default": "/etc/sysctl.d/99-zz-gb10-fleet.conf"},
            "settings": {"type": "dict", "default": {}},
            "utilization": {"type": "float"},
            "journal": {"type": "path", "default": "/var/lib/gb10-fleet/sysctl.json"},
            "root": {"type": "path", "default": "/"},
        },
        supports_check_mode=True,
    )
    try:
        SysctlFileManager(module).run()
    except (SysctlError, JournalError) as exc:
        module.fail_json(msg=str(exc))


if __name__ == "__main__":
    main()
