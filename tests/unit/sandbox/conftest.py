"""Programs of the sandbox role, loaded from where they lie: they run on nodes, not as a package."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[3]
FILES = ROOT / "roles/sandbox/files"
FIXTURES = ROOT / "tests/fixtures"


def load(relative: str) -> ModuleType:
    """Import roles/sandbox/files/<relative>.py under a name of its own."""
    name = f"gb10_sandbox_{Path(relative).stem}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, FILES / f"{relative}.py")
        assert spec and spec.loader
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[name]


@pytest.fixture
def program():
    """Loader of a program of the role."""
    return load


@pytest.fixture
def fixtures() -> Path:
    return FIXTURES
