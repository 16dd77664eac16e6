"""Fixtures of the playbook and end-to-end tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from fleet import ROOT


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
