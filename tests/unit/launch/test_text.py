"""Tables for a terminal."""

from __future__ import annotations

from ansible_collections.gb10.fleet.plugins.module_utils._text import table


def test_table_aligns_and_shows_what_is_unknown_as_a_dash() -> None:
    rows = [{"node": "spark-01", "rank": 0, "stage": "ready"}, {"node": "spark-02", "rank": 1, "stage": None}]
    assert table(rows, title="alpha").splitlines() == [
        "alpha",
        "node      rank  stage",
        "spark-01     0  ready",
        "spark-02     1  -",
    ]
    assert table([]) == ""
