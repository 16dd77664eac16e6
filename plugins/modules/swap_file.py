#!/usr/bin/python
# Copyright (c) The gb10.fleet maintainers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: swap_file
short_description: Keep a swap file of a given size, also after a reboot
version_added: "0.1.0"
description:
  - Makes a file, formats it, uses it and names it in C(/etc/fstab); or takes all of that back.
  - Looks at the free space before anything is written, so that a disk is never filled.
author:
  - The gb10.fleet maintainers (@gb10-fleet)
extends_documentation_fragment:
  - gb10.fleet.attributes
  - gb10.fleet.attributes.full
options:
  state:
    description: V(absent) stops using the file, removes it and its line in C(/etc/fstab).
    type: str
    choices: [present, absent]
    default: present
  path:
    description: The file. Its file system has to be able to hold one (ext4 and xfs are; btrfs, zfs and overlays are not).
    type: path
    required: true
  size_gib:
    description: Size in GiB. Required with O(state=present). A file of another size is made anew.
    type: float
  margin_gib:
    description: GiB that have to stay free on the file system.
    type: float
    default: 5
  timeout_s:
    description: Seconds that C(mkswap), C(swapon) or C(swapoff) may take; the last one has to move what it holds back to memory.
    type: float
    default: 300
  root:
    description: Folder that stands for V(/), for tests.
    type: path
    default: /
"""

EXAMPLES = r"""
- name: Swap of 64 GiB beside what the node has
  gb10.fleet.swap_file:
    path: /swapfile.gb10-fleet
    size_gib: 64
  become: true
"""

RETURN = r"""
actions:
  description: What was done, or would be in check mode.
  returned: success
  type: list
  elements: str
  sample: ["make a file of 64 GiB", "mkswap", "swapon", "add to /etc/fstab"]
"""

import os
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.gb10.fleet.plugins.module_utils import _command, _kernel

SIGNATURE = b"SWAPSPACE2"


class SwapError(Exception):
    """The swap file cannot be made; the message is a sentence."""


class SwapFileManager:
    def __init__(self, module: AnsibleModule) -> None:
        self.module = module
        self.params = module.params
        self.root = Path(module.params["root"])
        self.path: str = module.params["path"]
        self.file = self.root / self.path.lstrip("/")
        self.fstab = self.root / "etc/fstab"
        self.present = module.params["state"] == "present"
        self.size = int((module.params["size_gib"] or 0) * 1024**3) // 4096 * 4096
        self.actions: list[str] = []

    def run(self) -> None:
        if self.present and self.size <= 0:
            raise SwapError(f"size_gib is {self.params['size_gib']:g}, wanted more than 0.")
        there = self.file.stat().st_size if self.file.is_file() else None
        active = any(swap.path == self.path for swap in _kernel.parse_swaps(self._text("proc/swaps")))
        foreign = there is not None and not active and not self._formatted()
        if foreign and there != self.size:
            raise SwapError(f"{self.path} exists and is not a swap file of ours. Remove it, or choose another path.")
        anew = self.present and (there != self.size or not (active or self._formatted()))
        if anew:
            self._check_disk(there or 0)
        if active and (anew or not self.present):
            self._do("swapoff", lambda: self._command("swapoff", self.path))
        if there is not None and (anew or not self.present):
            self._do("remove the file", self.file.unlink)
        if anew:
            self._do(f"make a file of {self.params['size_gib']:g} GiB", self._make)
        if self.present and (anew or not active):
            self._do("swapon", lambda: self._swapon(anew))
        self._fstab()
        self.module.exit_json(changed=bool(self.actions), actions=self.actions, diff=self._diff(there, active))

    def _do(self, words: str, act: object) -> None:
        self.actions.append(words)
        if not self.module.check_mode and callable(act):
            act()

    def _check_disk(self, reusable: int) -> None:
        folder = self.file.parent
        if not folder.is_dir():
            raise SwapError(f"{self.path}: there is no folder {self.path.rpartition('/')[0] or '/'}.")
        disk = os.statvfs(folder)
        free = (disk.f_bavail * disk.f_frsize + reusable) / 1024**3
        shown = self.path.rpartition("/")[0] or "/"
        problem = _kernel.disk_problem(self.path, shown, self.params["size_gib"], free, self.params["margin_gib"])
        if problem:
            raise SwapError(problem)

    def _make(self) -> None:
        """A file without holes (swapon refuses holes), readable by root only; gone again when it cannot be formatted."""
        descriptor = os.open(self.file, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, self.size)
            os.fsync(descriptor)
            self._command("mkswap", str(self.file))
        except (OSError, SwapError) as exc:
            self.file.unlink(missing_ok=True)
            words = exc.strerror if isinstance(exc, OSError) else str(exc)
            raise SwapError(f"{self.path} cannot be made: {words}") from exc
        finally:
            os.close(descriptor)

    def _swapon(self, anew: bool) -> None:
        try:
            self._command("swapon", self.path)
        except SwapError:
            if anew:
                self.file.unlink(missing_ok=True)
            raise

    def _command(self, *argv: str) -> None:
        answer = _command.run(argv, timeout_s=self.params["timeout_s"])
        if not answer.ok:
            words = " ".join((answer.err or answer.out).split()) or f"exit code {answer.rc}"
            hint = (
                " This file system cannot hold a swap file."
                if "Invalid argument" in words and argv[0] == "swapon"
                else ""
            )
            raise SwapError(f"{' '.join(argv)}: {words}.{hint}")

    def _formatted(self) -> bool:
        try:
            with self.file.open("rb") as file:
                file.seek(os.sysconf("SC_PAGE_SIZE") - len(SIGNATURE))
                return file.read(len(SIGNATURE)) == SIGNATURE
        except OSError:
            return False

    def _fstab(self) -> None:
        text = self.fstab.read_text(encoding="utf-8", errors="surrogateescape") if self.fstab.exists() else ""
        after = _kernel.fstab_with(text, self.path, self.present)
        if after != text:
            self._do(
                "add to /etc/fstab" if self.present else "remove from /etc/fstab", lambda: self._write_fstab(after)
            )

    def _write_fstab(self, text: str) -> None:
        temporary = self.fstab.with_name(".fstab.gb10-fleet")
        with temporary.open("w", encoding="utf-8", errors="surrogateescape") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.chmod(self.fstab.stat().st_mode & 0o777 if self.fstab.exists() else 0o644)
        temporary.replace(self.fstab)

    def _text(self, path: str) -> str:
        try:
            return (self.root / path).read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""

    def _diff(self, there: int | None, active: bool) -> dict[str, str]:
        def words(size: float | None, used: bool) -> str:
            return "no file\n" if size is None else f"{size / 1024**3:g} GiB, {'used' if used else 'not used'}\n"

        if not self.actions:
            return {}
        header = {"before_header": self.path, "after_header": self.path}
        after = words(self.size, True) if self.present else words(None, False)
        return {**header, "before": words(there, active), "after": after}


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
            "path": {"type": "path", "required": True},
            "size_gib": {"type": "float"},
            "margin_gib": {"type": "float", "default": 5},
            "timeout_s": {"type": "float", "default": 300},
            "root": {"type": "path", "default": "/"},
        },
        required_if=[("state", "present", ["size_gib"])],
        supports_check_mode=True,
    )
    try:
        SwapFileManager(module).run()
    except SwapError as exc:
        module.fail_json(msg=str(exc))


if __name__ == "__main__":
    main()
