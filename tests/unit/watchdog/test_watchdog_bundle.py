"""The archive of collections: what playbooks need, the same bytes each time."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

from ansible_collections.gb10.fleet.plugins.action.collection_bundle import archive

ROOT = Path(__file__).resolve().parents[3]


def test_what_is_packed() -> None:
    data = archive({"gb10.fleet": ROOT})
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        names = set(tar.getnames())
    top = "ansible_collections/gb10/fleet/"
    assert {f"{top}playbooks/serve.yml", f"{top}meta/runtime.yml", f"{top}recipes/sandbox-fake.yml"} <= names
    assert not [
        name for name in names if ".git/" in name or ".venv" in name or "__pycache__" in name or "/tests/" in name
    ]


def test_the_same_files_are_the_same_archive() -> None:
    assert archive({"gb10.fleet": ROOT}) == archive({"gb10.fleet": ROOT})
