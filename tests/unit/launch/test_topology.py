"""Topology: every mistake in an inventory is a sentence, found before any host is touched."""

from __future__ import annotations

import pytest

from ansible_collections.gb10.fleet.plugins.module_utils._topology import (
    Member,
    TopologyError,
    check_cluster,
    declared_fabric,
)


def member(
    name: str, rank: object, address: str = "", cluster: object = "alpha", groups: tuple[str, ...] = ()
) -> Member:
    return Member(name, cluster, rank, address or f"198.51.100.{10 + int(name[-2:])}", groups)


def check(*members: Member, nodes: int = 2, fleet: tuple[Member, ...] = ()) -> list[str]:
    return [m.name for m in check_cluster("alpha", members, nodes, [*members, *fleet])]


def test_members_come_back_by_rank() -> None:
    assert check(member("spark-02", 1), member("spark-01", 0)) == ["spark-01", "spark-02"]


@pytest.mark.parametrize(
    ("members", "sentence"),
    [
        (
            (member("spark-01", 0), member("spark-02", 0)),
            "cluster alpha: rank 0 (the head) is given to spark-01, spark-02. Give every host a rank of its own.",
        ),
        (
            (member("spark-01", 0), member("spark-02", 2)),
            "cluster alpha: rank 1 is missing (found spark-01 = 0, spark-02 = 2). Number the ranks 0 to 1 without holes.",
        ),
        (
            (member("spark-01", 0), member("spark-02", 1), member("spark-03", 2)),
            "cluster alpha has 3 hosts (spark-01, spark-02, spark-03), its recipe wants 2.",
        ),
        (
            (member("spark-01", 0), member("spark-02", 1, groups=("cluster_alpha", "cluster_beta"))),
            "spark-02 is in two clusters: its variable cluster says alpha, and it is also in the group cluster_beta.",
        ),
        (
            (member("spark-01", 0), member("spark-02", 1, cluster=["alpha", "beta"])),
            "spark-02: cluster is ['alpha', 'beta'], wanted the name of one cluster.",
        ),
        (
            (member("spark-01", 0), member("spark-02", 1, address="198.51.100.11")),
            "spark-01 and spark-02 have the same address 198.51.100.11. Every host needs an address of its own.",
        ),
        ((member("spark-01", 0), member("spark-02", "1")), "spark-02: rank is '1', wanted a whole number"),
        ((member("spark-01", 0), member("spark-02", None)), "spark-02: rank is None, wanted a whole number"),
        (
            (member("spark-01", 0), member("spark-02", 1, address="spark-02.example.org")),
            "spark-02: its fabric address is 'spark-02.example.org', wanted a numeric IPv4 address.",
        ),
        (
            (member("spark-01", 0), member("spark-02", 1, address="127.0.1.1")),
            "spark-02: fabric_address 127.0.1.1 is a loopback address that no other rank can reach.",
        ),
    ],
)
def test_a_mistake_is_a_sentence(members: tuple[Member, ...], sentence: str) -> None:
    with pytest.raises(TopologyError) as error:
        check(*members)
    assert str(error.value).startswith(sentence)


def test_net_host_ip_collision_across_clusters() -> None:
    """The same address in another cluster is as wrong as in this one (public case: every node needs a unique IP)."""
    other = member("spark-03", 0, address="198.51.100.11", cluster="beta")
    with pytest.raises(TopologyError, match=r"spark-01 and spark-03 have the same address 198\.51\.100\.11"):
        check(member("spark-01", 0), member("spark-02", 1), fleet=(other,))


def test_a_collision_between_other_clusters_is_theirs() -> None:
    fleet = (
        member("spark-03", 0, address="198.51.100.13", cluster="b"),
        member("spark-04", 0, "198.51.100.13", cluster="c"),
    )
    assert check(member("spark-01", 0), member("spark-02", 1), fleet=fleet) == ["spark-01", "spark-02"]


def test_net_ifname_baked_sets_all_interface_variables_together() -> None:
    env = declared_fabric({"fabric_interface": "enp1s0f1np1"}, "roce")["env"]
    assert env == dict.fromkeys(
        ["NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "MN_IF_NAME"], "enp1s0f1np1"
    )


def test_index_zero_is_a_declared_index() -> None:
    assert declared_fabric({"fabric_gid_index": 0}, "roce")["env"] == {"NCCL_IB_GID_INDEX": "0"}
    assert declared_fabric({"fabric_gid_index": ""}, "roce")["env"] == {}
    assert declared_fabric({"fabric_gid_index": 3, "fabric_hca": "a"}, "socket")["env"] == {}
