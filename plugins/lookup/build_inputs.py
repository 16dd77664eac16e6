# Copyright (c) The gb10.fleet maintainers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What an image is built from, as one hash."""

from __future__ import annotations

DOCUMENTATION = r"""
name: build_inputs
short_description: Hash of all inputs of an image build
version_added: "0.1.0"
author: The gb10.fleet maintainers (@gb10-fleet)
description:
  - Two equal hashes mean that a build would give the same image - the same files with the same content and execute bits (or the
    same commit of the same repository), the same Dockerfile and the same build arguments.
  - Times, owners and the folder's own name play no part.
options:
  _terms:
    description:
      - One mapping with C(context), a folder of the controller (relative to C(basedir)), or C(repository) and C(commit); and with
        C(subdirectory), C(dockerfile) and C(args).
    type: list
    elements: dict
    required: true
  basedir:
    description: Where a relative C(context) begins; the current folder by default.
    type: path
"""

EXAMPLES = r"""
- name: Show the hash
  ansible.builtin.debug:
    msg: "{{ lookup('gb10.fleet.build_inputs', {'context': 'images/engine', 'args': {'BASE': 'debian:13'}}) }}"
"""

RETURN = r"""
_raw:
  description: The hash, 64 hexadecimal digits.
  type: list
  elements: str
"""

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ansible.errors import AnsibleError
from ansible.plugins.lookup import LookupBase

_COMMIT = re.compile(r"^[0-9a-f]{40}$")
_SKIPPED = {".git", "__pycache__"}


def folder_hash(folder: Path) -> list[tuple[str, str, str]]:
    """Path, kind and hash of the content of every file below a folder."""
    rows = []
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        if _SKIPPED & set(name.parts):
            continue
        if path.is_symlink():
            rows.append((name.as_posix(), "link", str(path.readlink())))
        elif path.is_file():
            kind = "program" if path.stat().st_mode & 0o100 else "file"
            rows.append((name.as_posix(), kind, hashlib.sha256(path.read_bytes()).hexdigest()))
    return rows


def inputs(build: Mapping[str, Any], basedir: Path) -> str:
    """The hash. Raises AnsibleError when there is nothing to build from."""
    value: dict[str, Any] = {
        "dockerfile": build.get("dockerfile") or "Dockerfile",
        "args": {str(k): str(v) for k, v in (build.get("args") or {}).items()},
    }
    if build.get("repository"):
        commit = str(build.get("commit") or "")
        if not _COMMIT.match(commit):
            raise AnsibleError(
                f"image.build.commit is {commit or 'not set'}, wanted a full commit of 40 hexadecimal digits."
            )
        value |= {"repository": build["repository"], "commit": commit, "subdirectory": build.get("subdirectory") or ""}
    else:
        folder = basedir / str(build.get("context") or "")
        if not build.get("context") or not (folder / value["dockerfile"]).is_file():
            raise AnsibleError(
                f"image.build: there is no {folder / value['dockerfile']}. Set context to a folder with a Dockerfile."
            )
        value["files"] = folder_hash(folder)
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


class LookupModule(LookupBase):
    """One hash per term."""

    def run(self, terms: list[Any], variables: Any = None, **kwargs: Any) -> list[str]:
        self.set_options(var_options=variables, direct=kwargs)
        basedir = Path(str(self.get_option("basedir") or ".")).expanduser()
        return [inputs(term, basedir) for term in terms]
