"""Fixtures of the memory guard's tests."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

PROGRAM = Path(__file__).resolve().parents[3] / "roles/memory_guard/files/memory_guard.py"


@pytest.fixture(scope="session")
def guard() -> ModuleType:
    """The guard program as a module: it is one file of a role, outside of any package."""
    spec = importlib.util.spec_from_file_location("gb10_memory_guard_program", PROGRAM)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def program() -> Path:
    return PROGRAM
