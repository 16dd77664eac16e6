# Copyright (c) The gb10.fleet maintainers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Put back the network definition that was there before, unless somebody confirmed the new one in time.

Run by the timer gb10-fabric-rollback, which the role arms before it applies a new definition and disarms when the node is
reachable again with all its rails. A node that is cut off helps itself.

    netplan_rollback.py STATE     STATE: JSON {path, content (null: there was no file), receipt}
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path


def write(path: Path, text: str, mode: int = 0o600) -> None:
    """Atomically: temporary file, fsync, rename."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    with os.fdopen(descriptor, "w", encoding="utf-8") as handle:
        handle.write(text)
        handle.flush()
        os.fsync(handle.fileno())
    temporary.replace(path)


def roll_back(state: Path, netplan: str = "netplan") -> int:
    """Restore, apply, leave a receipt. Returns netplan's exit code; 0 when there is nothing to do."""
    try:
        job = json.loads(state.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return 0
    path = Path(job["path"])
    if job["content"] is None:
        path.unlink(missing_ok=True)
    else:
        write(path, job["content"])
    try:
        done = subprocess.run([netplan, "apply"], check=False, capture_output=True, text=True, timeout=120)
        rc, words = done.returncode, (done.stdout + done.stderr).strip()
    except (OSError, subprocess.TimeoutExpired) as error:
        rc, words = 1, str(error)
    receipt = {
        "rolled_back": str(path),
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "rc": rc,
        "netplan": words,
    }
    write(Path(job["receipt"]), json.dumps(receipt, indent=1) + "\n", 0o644)
    with contextlib.suppress(FileNotFoundError):
        state.unlink()
    return rc


if __name__ == "__main__":
    sys.exit(roll_back(Path(sys.argv[1])))
