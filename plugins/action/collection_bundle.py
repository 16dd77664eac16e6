# Copyright (c) The gb10.fleet maintainers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Pack collections of the controller into one archive. See the module of the same name."""

from __future__ import annotations

import gzip
import hashlib
import importlib
import io
import os
import tarfile
import tempfile
from pathlib import Path
from typing import Any

from ansible.errors import AnsibleActionFail
from ansible.plugins.action import ActionBase

# What playbooks read of a collection.
PARTS = ("meta", "playbooks", "plugins", "recipes", "roles", "failures", "MANIFEST.json", "galaxy.yml")


def files(root: Path) -> list[Path]:
    """The files of a collection in a fixed order, without what Python or a linter left beside them."""
    found: list[Path] = []
    for part in PARTS:
        top = root / part
        found += [top] if top.is_file() else sorted(path for path in top.rglob("*") if path.is_file())
    return [path for path in found if not {"__pycache__", ".mypy_cache", "molecule", "tests"} & set(path.parts)]


def archive(roots: dict[str, Path]) -> bytes:
    """The archive of the collections ``{namespace.name: folder}``."""
    packed = io.BytesIO()
    with gzip.GzipFile(fileobj=packed, mode="wb", mtime=0) as zipped, tarfile.open(fileobj=zipped, mode="w") as tar:
        for name, root in sorted(roots.items()):
            for path in files(root):
                info = tarfile.TarInfo(f"ansible_collections/{name.replace('.', '/')}/{path.relative_to(root)}")
                data = path.read_bytes()
                info.size, info.mode = len(data), 0o755 if os.access(path, os.X_OK) else 0o644
                tar.addfile(info, io.BytesIO(data))
    return packed.getvalue()


class ActionModule(ActionBase):
    """Finds collections as Ansible does."""

    TRANSFERS_FILES = False
    _requires_connection = False
    _supports_check_mode = True

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        super().run(tmp, task_vars)
        dummy, args = self.validate_argument_spec(
            argument_spec={
                "collections": {"type": "list", "elements": "str", "required": True},
                "dest": {"type": "str", "required": True},
            }
        )
        roots = {name: self._root(name) for name in args["collections"]}
        dest = Path(args["dest"]).expanduser()
        data = archive(roots)
        changed = not dest.is_file() or dest.read_bytes() != data
        if changed and not self._task.check_mode:
            dest.parent.mkdir(parents=True, exist_ok=True)
            descriptor, name = tempfile.mkstemp(dir=dest.parent)
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
            Path(name).replace(dest)
        return {"changed": changed, "path": str(dest), "checksum": hashlib.sha256(data).hexdigest()}

    @staticmethod
    def _root(name: str) -> Path:
        try:
            return Path(next(iter(importlib.import_module(f"ansible_collections.{name}").__path__))).resolve()
        except (ImportError, StopIteration) as exc:
            raise AnsibleActionFail(
                f"collection {name} is not installed on this controller, and the watchdog needs it. "
                f"Run `ansible-galaxy collection install {name}`."
            ) from exc
