#!/usr/bin/env python3
# Copyright (c) The gb10.fleet maintainers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Write what nodes get from this machine and what logs in to them: one call for all nodes, idempotent.

    describe_nodes.py --directory .sandbox --prefix gb10-sandbox < nodes.json

Reads the role's plan (a JSON list of nodes) and writes below the directory: id_ed25519 (the login key), per node a folder
nodes/<container>/ with its host key, node.json and authorized_keys, and for ssh a block per prefix in known_hosts and in
ssh_config. Prints {"changed": true|false, "new_key": true|false}; nodes that run know nothing of a new login key.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

SSH_OPTIONS = """\
  User spark
  IdentityFile {directory}/id_ed25519
  IdentitiesOnly yes
  UserKnownHostsFile {directory}/known_hosts
  GlobalKnownHostsFile /dev/null
  StrictHostKeyChecking yes
  ControlMaster auto
  ControlPath /tmp/.gb10-%i-%C
  ControlPersist 60s
  ServerAliveInterval 5
  ServerAliveCountMax 3
"""


def write(path: Path, text: str, mode: int = 0o644) -> bool:
    """Replace a file as a whole when it differs; whether it did."""
    if path.exists() and path.read_text(encoding="utf-8") == text:
        return False
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    Path(stream.name).chmod(mode)
    Path(stream.name).replace(path)
    return True


def with_block(text: str, name: str, block: str) -> str:
    """The text with the block of this name replaced, or added at its end; an empty block is removed."""
    begin, end = f"# BEGIN {name}\n", f"# END {name}\n"
    without = re.sub(f"{re.escape(begin)}.*?{re.escape(end)}", "", text, flags=re.DOTALL)
    return without + (f"{begin}{block}{end}" if block else "")


def make_key(path: Path, comment: str) -> bool:
    """An ed25519 key pair, unless it is there."""
    if path.exists():
        return False
    argv = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", comment, "-f", str(path)]
    subprocess.run(argv, check=True, timeout=30, stdin=subprocess.DEVNULL)
    return True


def known_hosts(nodes: list[dict[str, Any]], directory: Path) -> str:
    """One line per node: its management and fabric addresses, its host key."""
    lines = []
    for node in nodes:
        key = (directory / "nodes" / node["container"] / "ssh_host_ed25519_key.pub").read_text(encoding="utf-8")
        addresses = [node["management"]["address"], *(rail["address"] for rail in node["rails"] if "address" in rail)]
        lines.append(f"{','.join(addresses)} {' '.join(key.split()[:2])}\n")
    return "".join(lines)


def ssh_config(nodes: list[dict[str, Any]], directory: Path) -> str:
    """`ssh -F .sandbox/ssh_config spark-01`."""
    options = SSH_OPTIONS.format(directory=directory)
    return "".join(f"Host {node['name']}\n  HostName {node['management']['address']}\n{options}" for node in nodes)


def describe(nodes: list[dict[str, Any]], directory: Path, prefix: str) -> dict[str, bool]:
    """Write everything; whether anything changed, and whether the login key is a new one."""
    directory.mkdir(parents=True, exist_ok=True)
    new_key = changed = make_key(directory / "id_ed25519", "gb10-sandbox")
    login = (directory / "id_ed25519.pub").read_text(encoding="utf-8")
    for node in nodes:
        folder = directory / "nodes" / node["container"]
        if not folder.exists():
            folder.mkdir(parents=True, mode=0o700)
            changed = True
        changed |= make_key(folder / "ssh_host_ed25519_key", node["name"])
        changed |= write(folder / "node.json", json.dumps(node, indent=2) + "\n")
        changed |= write(folder / "authorized_keys", login)
    for name, block in (("known_hosts", known_hosts(nodes, directory)), ("ssh_config", ssh_config(nodes, directory))):
        path = directory / name
        before = path.read_text(encoding="utf-8") if path.exists() else ""
        changed |= write(path, with_block(before, prefix, block))
    return {"changed": changed, "new_key": new_key}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", required=True, type=Path)
    parser.add_argument("--prefix", required=True, help="name of the blocks in known_hosts and ssh_config")
    given = parser.parse_args()
    print(json.dumps(describe(json.load(sys.stdin), given.directory.resolve(), given.prefix)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
