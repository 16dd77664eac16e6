"""Write the golden rank specs anew: tests/fixtures/golden/<recipe>.rank<N>.json. Read the diff before you commit it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "collections"), str(ROOT / "tests/utils")]

from rendered import GOLDEN, RECIPES, recipe, spec  # noqa: E402

GOLDEN.mkdir(parents=True, exist_ok=True)
for name in RECIPES:
    for rank in range(recipe(name)["nodes"]):
        path = GOLDEN / f"{name}.rank{rank}.json"
        path.write_text(json.dumps(spec(name, rank), indent=1) + "\n")
        print(path.relative_to(ROOT))
