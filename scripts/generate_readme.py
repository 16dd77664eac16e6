#!/usr/bin/env python3
"""Make the tables of README.md from the playbooks' first comments, the roles' argument_specs and the modules' documentation.

Usage: generate_readme.py [--check]. With --check nothing is written; exit code 1 says that README.md is out of date.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"


def playbook_sentence(path: Path) -> str:
    """The first sentence of the comment at the top."""
    lines = path.read_text(encoding="utf-8").splitlines()[1:]
    words = []
    for line in lines:
        if not line.startswith("# ") or line.startswith("#  "):
            break
        words.append(line[2:])
    return re.split(r"(?<=\.)\s", " ".join(words), maxsplit=1)[0].rstrip(".:")


def module_sentence(path: Path) -> str:
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "DOCUMENTATION":
            return str(yaml.safe_load(ast.literal_eval(node.value))["short_description"])
    raise SystemExit(f"{path.relative_to(ROOT)} has no DOCUMENTATION.")


def role_sentence(path: Path) -> str:
    specs = yaml.safe_load((path / "meta/argument_specs.yml").read_text(encoding="utf-8"))["argument_specs"]
    return str(specs["main"]["short_description"])


def recipe_sentence(path: Path) -> str:
    return str(yaml.safe_load(path.read_text(encoding="utf-8"))["description"]).strip().rstrip(".")


def table(title: str, rows: dict[str, str]) -> str:
    return "\n".join(
        [f"| {title} | |", "|---|---|", *(f"| `{name}` | {text} |" for name, text in sorted(rows.items()))]
    )


def tables() -> str:
    playbooks = {path.name: playbook_sentence(path) for path in (ROOT / "playbooks").glob("*.yml")}
    roles = {path.name: role_sentence(path) for path in (ROOT / "roles").iterdir() if (path / "meta").is_dir()}
    modules = {path.stem: module_sentence(path) for path in (ROOT / "plugins/modules").glob("*.py")}
    recipes = {path.stem: recipe_sentence(path) for path in (ROOT / "recipes").glob("*.yml")}
    named = (("playbook", playbooks), ("role", roles), ("module or action", modules), ("recipe", recipes))
    return "\n\n".join(table(title, rows) for title, rows in named)


def main() -> int:
    before = README.read_text(encoding="utf-8")
    start, end = "## What is in it\n\n", "\n\nMore: "
    head, _, rest = before.partition(start)
    _, _, tail = rest.partition(end)
    if not tail:
        raise SystemExit(f"README.md has no part between {start.strip()!r} and {end.strip()!r}.")
    after = head + start + tables() + end + tail
    if after == before:
        return 0
    if "--check" in sys.argv[1:]:
        print("README.md is out of date. Run: python scripts/generate_readme.py", file=sys.stderr)
        return 1
    README.write_text(after, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
