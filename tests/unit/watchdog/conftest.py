"""A cluster that has served for a minute."""

from __future__ import annotations

import pytest
from watched_cluster import Cluster


@pytest.fixture
def cluster() -> Cluster:
    """Two nodes that serve under the watchdog's eyes."""
    one = Cluster()
    one.looks(60)
    assert one.state.name == "serving"
    one.names.clear()
    return one
