"""compare.yml on two result files; it touches no host."""

from __future__ import annotations

import json
from pathlib import Path

from fleet import ROOT, run_playbook

from ansible_collections.gb10.fleet.plugins.module_utils._qualify import judge

SEED = ROOT / "tests/fixtures/qualify/seed-local-ai-systems.json"


def test_two_results(tmp_path: Path) -> None:
    """Seed "Local AI Systems": the clock cap took power from 78 to 50 W at the same speed."""
    capped = judge(json.loads(SEED.read_text(encoding="utf-8")))
    free = json.loads(json.dumps(capped))
    free["nodes"]["spark-01"]["power_w"] = 78.0
    for name, result in (("before", free), ("after", capped)):
        (tmp_path / f"{name}.json").write_text(json.dumps(result), encoding="utf-8")
    files = {f"qualify_compare_{name}": str(tmp_path / f"{name}.json") for name in ("before", "after")}
    done = run_playbook("compare", "inventories/spark", "-e", json.dumps(files), timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {line.split("  ")[0]: line for line in done.stdout.splitlines()}
    assert rows["GPU power, spark-01"].split()[-1] == "better"
    assert rows["Decode speed, one stream"].endswith("within noise")
    assert "✓ better" in (tmp_path / "compare.html").read_text(encoding="utf-8")
