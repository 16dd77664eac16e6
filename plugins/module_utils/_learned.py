# Copyright (c) The gb10.fleet maintainers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a start taught about a cluster, kept on the controller: the engine's own proposal for its KV cache, the window that fits.

A figure holds for one cluster, image and recipe only ("never copy another's", seed "Running GLM-5.3-Flash on two DGX Sparks"): its
key is a hash over all three. No host is touched, so that a render finds it with the network down.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# Settings that the figure is meant to replace, or that say nothing about memory.
_ASIDE = ("kv-cache-memory", "kv-cache-memory-bytes")
FLAG = "kv-cache-memory"
# Where a value comes from that a start taught.
ORIGIN = "this cluster's last start"


def key(cluster: str, recipe: Mapping[str, Any]) -> str:
    """Hash of cluster, image and recipe (without the KV cache setting itself)."""
    args = {k: v for k, v in (recipe.get("args") or {}).items() if str(k).replace("_", "-") not in _ASIDE}
    names = ("nodes", "engine", "image", "checkpoint", "drafter", "parallel", "env", "mods")
    content = {"cluster": cluster, "args": args, **{name: recipe.get(name) for name in names}}
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()[:16]


def path_of(directory: str | Path, cluster: str) -> Path:
    """The file of a cluster."""
    return Path(directory).expanduser() / f"{re.sub(r'[^A-Za-z0-9_.-]', '_', cluster)}.json"


def load(directory: str | Path, cluster: str) -> dict[str, Any]:
    """Everything that is kept about a cluster, by key; empty without a file or with a damaged one."""
    try:
        content = json.loads(path_of(directory, cluster).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def kv_cache_memory(directory: str | Path, cluster: str, recipe: Mapping[str, Any]) -> int | None:
    """Bytes that a start of just this cluster, image and recipe proposed, or None."""
    entry = load(directory, cluster).get(key(cluster, recipe)) or {}
    found = entry.get("kv_cache_memory")
    return int(found) if found else None


def window(directory: str | Path, cluster: str, recipe: Mapping[str, Any]) -> int | None:
    """The largest window that an engine said would fit just this cluster, image and recipe, or None."""
    found = (load(directory, cluster).get(key(cluster, recipe)) or {}).get("window")
    return int(found) if found else None


def keep_window(directory: str | Path, cluster: str, recipe: Mapping[str, Any], tokens: int) -> None:
    """Keep the largest window that fits. Raises OSError."""
    content = load(directory, cluster)
    entry = content.setdefault(key(cluster, recipe), {})
    entry["window"] = tokens
    _write(path_of(directory, cluster), content)


def store(directory: str | Path, cluster: str, recipe: Mapping[str, Any], entry: Mapping[str, Any]) -> bool:
    """Keep ``entry`` (with ``kv_cache_memory``). True when it differs from what was kept. Raises OSError."""
    content = load(directory, cluster)
    had = content.get(key(cluster, recipe)) or {}
    if had.get("kv_cache_memory") == entry["kv_cache_memory"]:
        return False
    content[key(cluster, recipe)] = dict(entry)
    _write(path_of(directory, cluster), content)
    return True


def _write(path: Path, content: Mapping[str, Any]) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with temporary.open("w", encoding="utf-8") as file:
        json.dump(content, file, indent=1, sort_keys=True)
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(path)
