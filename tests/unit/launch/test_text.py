"""Tables for a terminal."""

from __future__ import annotations

from ansible_collections.gb10.fleet.plugins.filter.text import explain_recipe
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


def test_explain_says_where_each_value_came_from() -> None:
    recipe = {
        "name": "mine",
        "options": {"context": 4096},
        "option_rules": {"context": {"means": "prompt and reply together"}, "effort": {"means": "unset"}},
        "args": {"max-model-len": 4096},
        "warmup": "chat",
    }
    hosts = [
        {
            "topology_cluster": "alpha",
            "topology_rank": rank,
            "topology_recipe": recipe,
            "topology_origins": {"options.context": "command line", "args.max-model-len": "option context"},
        }
        for rank in (1, 0)
    ]
    assert explain_recipe(hosts).splitlines() == [
        "alpha: mine (command line > inventory > option > recipe > default)",
        "setting             value  from",
        "options.context     4096   command line",
        "options.effort      -      default",
        "args.max-model-len  4096   option context",
        "warmup              chat   default",
        "",
        "options.context 4096: prompt and reply together.",
    ]
