#!/usr/bin/env python3
"""Make plugins/module_utils/_failure_data.py and docs/troubleshooting.md from failures/catalogue.yml.

Usage: generate_troubleshooting.py [--check]. With --check nothing is written; exit code 1 says that a file is out of date.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
CATALOGUE = ROOT / "failures" / "catalogue.yml"
DATA = ROOT / "plugins" / "module_utils" / "_failure_data.py"
PAGE = ROOT / "docs" / "troubleshooting.md"

SOURCES = {
    "engine": "In the log of a rank",
    "kernel": "In the kernel log of a node",
    "container": "Docker's own words",
    "state": "No line at all: judged from all ranks together",
}
KINDS = ("cause", "wrapper", "peer", "wait", "note")
REQUIRED = ("id", "title", "source", "kind", "severity", "stage", "cause", "fix")
OPTIONAL = ("signature", "patience_s", "any_level", "compute", "cases", "evidence")


class CatalogueError(ValueError):
    """An entry of the catalogue is not as it should be."""


def load(path: Path = CATALOGUE) -> list[dict[str, Any]]:
    """Read and check the catalogue. Raises CatalogueError that names entry and key."""
    entries = yaml.safe_load(path.read_text(encoding="utf-8"))
    seen: set[str] = set()
    for number, entry in enumerate(entries, 1):
        name = entry.get("id", f"entry {number}")
        for key in REQUIRED:
            if not entry.get(key):
                raise CatalogueError(f"{name}: {key} is missing")
        for key in entry:
            if key not in (*REQUIRED, *OPTIONAL):
                raise CatalogueError(f"{name}: unknown key {key}")
        if name in seen:
            raise CatalogueError(f"{name}: twice in the catalogue")
        seen.add(name)
        if entry["source"] not in SOURCES or entry["kind"] not in KINDS or entry["severity"] not in ("hard", "soft"):
            raise CatalogueError(f"{name}: source, kind or severity is none of the known ones")
        if (entry["source"] == "state") == bool(entry.get("signature")):
            raise CatalogueError(f"{name}: a signature belongs to every source but state")
        if (entry["kind"] == "wait") != bool(entry.get("patience_s")):
            raise CatalogueError(f"{name}: patience_s belongs to kind wait")
        for pattern in entry.get("signature", []):
            re.compile(pattern)
    return entries


def literal(value: Any) -> str:
    """As repr, with long strings in pieces."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{literal(k)}: {literal(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(literal(item) for item in value) + "]"
    if isinstance(value, str) and len(value) > 100:
        return "(" + " ".join(repr(value[at : at + 100]) for at in range(0, len(value), 100)) + ")"
    return repr(value)


def data_text(entries: list[dict[str, Any]]) -> str:
    """The catalogue as a Python module (what a node needs of it)."""
    keys = [k for k in (*REQUIRED, *OPTIONAL) if k not in ("evidence", "cases")]
    rows = [{k: entry[k] for k in keys if k in entry} for entry in entries]
    text = (
        "# Copyright (c) The gb10.fleet maintainers\n"
        "# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)\n"
        "# SPDX-License-Identifier: GPL-3.0-or-later\n"
        '"""Made by scripts/generate_troubleshooting.py from failures/catalogue.yml; edit that file."""\n\n'
        "from __future__ import annotations\n\n"
        "from typing import Any\n\n"
        "# ruff: noqa: S108\n"
        f"CATALOGUE: list[dict[str, Any]] = {literal(rows)}\n"
    )
    ruff = [str(Path(sys.executable).with_name("ruff")), "format", "--stdin-filename", str(DATA), "-"]
    return subprocess.run(ruff, input=text, capture_output=True, text=True, check=True, timeout=60).stdout


def _words(text: str) -> str:
    """Placeholders as a reader sees them: {free_gib} -> N."""
    return re.sub(r"\{(\w+)\}", lambda found: f"<{found.group(1).replace('_', ' ')}>", text)


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def page_text(entries: list[dict[str, Any]]) -> str:
    """The troubleshooting page."""
    lines = [
        "# Troubleshooting",
        "",
        "<!-- Made by scripts/generate_troubleshooting.py from failures/catalogue.yml; edit that file. -->",
        "",
        "Every failure that the collection recognises while ranks start and serve. `playbooks/serve.yml` names the one that it",
        "met; `playbooks/diagnose.yml` looks at running or ended ranks at any time and changes nothing; `playbooks/evidence.yml`",
        "packs everything that a person needs to look further.",
        "",
        "The first error *by time across all ranks* is taken for the cause: the loudest one often names the wrong node.",
        "",
        "| verdict | what it means |",
        "|---|---|",
    ]
    lines += [f"| [{e['id']}](#{e['id']}) | {e['title']} |" for e in entries]
    for source, heading in SOURCES.items():
        lines += ["", f"## {heading}"]
        for entry in (e for e in entries if e["source"] == source):
            lines += ["", f"### {entry['id']}", "", f"**{entry['title']}**"]
            if entry["severity"] == "soft":
                lines[-1] += " (never ends a launch by itself)"
            if entry["kind"] == "wait":
                lines[-1] += f" (counts when it lasted {entry['patience_s']} s)"
            lines += ["", f"- Cause: {_sentence(_words(entry['cause']))}.", f"- Do: {_sentence(_words(entry['fix']))}."]
            lines += [f"- Shows as: `{pattern}`" for pattern in entry.get("signature", [])]
            if entry.get("cases"):
                lines.append("- Seen in: " + ", ".join(str(c) for c in entry["cases"]))
    return "\n".join(lines) + "\n"


def main() -> int:
    entries = load()
    stale = []
    for path, text in ((DATA, data_text(entries)), (PAGE, page_text(entries))):
        if path.exists() and path.read_text(encoding="utf-8") == text:
            continue
        stale.append(path.relative_to(ROOT))
        if "--check" not in sys.argv[1:]:
            path.write_text(text, encoding="utf-8")
    for path in stale:
        print(f"{path}: {'out of date' if '--check' in sys.argv[1:] else 'written'}")
    return 1 if stale and "--check" in sys.argv[1:] else 0


if __name__ == "__main__":
    sys.exit(main())
