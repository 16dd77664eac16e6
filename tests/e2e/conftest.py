"""The sandbox with real vLLM on two nodes. Every test leaves it serving or stopped; the next one starts from either."""

from __future__ import annotations

import pytest
from fleet import SANDBOX, Node, run_playbook, sandbox_nodes


@pytest.fixture(scope="session", autouse=True)
def sandbox() -> None:
    done = run_playbook("sandbox", "localhost,", "--tags", "up")
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


@pytest.fixture(scope="session")
def nodes() -> dict[str, Node]:
    return sandbox_nodes()


@pytest.fixture
def stopped() -> None:
    done = run_playbook("stop", SANDBOX)
    assert done.returncode == 0, done.stdout
