"""Run the collection's playbooks as a user does, in a process of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def inventory(tmp_path: Path) -> Callable[..., Path]:
    """Write an inventory folder; every host points at loopback port 1, so that a contact is refused at once and would be seen."""

    def write(hosts: dict[str, dict], variables: dict | None = None, groups: dict | None = None) -> Path:
        defaults = {"ansible_port": 1, "ansible_ssh_retries": 0}
        data = {"all": {"hosts": {name: {**defaults, **h} for name, h in hosts.items()}, "vars": variables or {}}}
        data["all"]["children"] = groups or {}
        (tmp_path / "hosts.yml").write_text(yaml.safe_dump(data))
        (tmp_path / "zz_constructed.yml").write_text((ROOT / "inventories/spark/zz_constructed.yml").read_text())
        return tmp_path

    return write


@pytest.fixture
def playbook() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run `ansible-playbook playbooks/<name>.yml` from the root of the clone."""

    def run(name: str, inventory: Path | str, *words: str) -> subprocess.CompletedProcess[str]:
        argv = [
            str(Path(sys.executable).with_name("ansible-playbook")),
            f"playbooks/{name}.yml",
            "-i",
            str(inventory),
            *words,
        ]
        env = {**os.environ, "ANSIBLE_NOCOLOR": "1", "COLUMNS": "100"}
        return subprocess.run(argv, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300, check=False)

    return run
