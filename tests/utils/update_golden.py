"""Write the golden rank specs anew: tests/fixtures/golden/<recipe>.rank<N>.json. Read the diff before you commit it."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "collections"))
_spec = importlib.util.spec_from_file_location("test_rank_spec", ROOT / "tests/unit/launch/test_rank_spec.py")
assert _spec is not None
assert _spec.loader is not None
tests = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(tests)

tests.GOLDEN.mkdir(parents=True, exist_ok=True)
for recipe in tests.RECIPES:
    for rank in range(tests.recipe(recipe)["nodes"]):
        path = tests.GOLDEN / f"{recipe}.rank{rank}.json"
        path.write_text(json.dumps(tests.spec(recipe, rank), indent=1) + "\n")
        print(path.relative_to(ROOT))
