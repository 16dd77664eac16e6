"""The fake /sys against captures of real GB10 nodes."""

from __future__ import annotations

import re

import pytest


@pytest.fixture
def surfaces(program):
    return program("node/surfaces")


@pytest.fixture
def node(surfaces):
    """spark-02 of the demo, as templates/nodes.yml.j2 describes it."""
    return surfaces.Node.from_dict(
        {
            "name": "spark-02",
            "container": "gb10-sandbox-spark-02",
            "light": False,
            "management": {"interface": "enP7s7", "address": "198.18.0.12"},
            "rails": [
                {
                    "interface": "enp1s0f0np0",
                    "hca": "rocep1s0f0",
                    "pci": "0000:01:00.0",
                    "port": 0,
                    "gid_index": 4,
                    "address": "198.51.100.12",
                },
                {
                    "interface": "enP2p1s0f0np0",
                    "hca": "roceP2p1s0f0",
                    "pci": "0002:01:00.0",
                    "port": 0,
                    "gid_index": 4,
                    "address": "198.51.100.140",
                },
                {"interface": "enp1s0f1np1", "hca": "rocep1s0f1", "pci": "0000:01:00.1", "port": 1},
                {"interface": "enP2p1s0f1np1", "hca": "roceP2p1s0f1", "pci": "0002:01:00.1", "port": 1},
            ],
        }
    )


def test_gid_of_an_address_is_written_as_show_gids_prints_it(surfaces, fixtures):
    capture = (fixtures / "gb10/ref-show_gids-gb10.txt").read_text()
    assert f"{surfaces.mapped_gid('192.0.2.10')} 192.0.2.10" in capture


def test_index_3_table_has_the_order_of_the_capture(surfaces, fixtures):
    """rocep1s0f0 there: fe80 v1, fe80 v2, IPv4 v1, IPv4 v2 at 3."""
    rail = surfaces.Rail("enp1s0f0np0", "rocep1s0f0", "0000:01:00.0", "192.0.2.10", gid_index=3)
    rows = re.findall(
        r"^rocep1s0f0\s+1\s+(\d)\s+(\S+).*\bv([12])\s",
        (fixtures / "gb10/ref-show_gids-gb10.txt").read_text(),
        re.MULTILINE,
    )
    table = surfaces.gid_table(rail, 1)
    short = {"IB/RoCE v1": "1", "RoCE v2": "2"}
    assert [(str(index), gid, short[kind]) for index, (gid, kind) in enumerate(table[:4])] == rows
    assert table[4:] == [(surfaces.ZERO_GID, None)] * 12


@pytest.mark.parametrize("index", [3, 4, 5, 6])
def test_the_v2_ipv4_entry_stands_where_it_was_asked_for(surfaces, index):
    """Indices 3 to 6 were seen in public reports."""
    rail = surfaces.Rail("enp1s0f0np0", "rocep1s0f0", "0000:01:00.0", "198.51.100.12", gid_index=index)
    table = surfaces.gid_table(rail, 1)
    assert [
        i for i, (gid, kind) in enumerate(table) if kind == "RoCE v2" and gid == surfaces.mapped_gid("198.51.100.12")
    ] == [index]
    assert len(table) == surfaces.GID_SLOTS


def test_rdma_devices_and_states_are_those_of_the_capture(surfaces, node, fixtures):
    capture = (fixtures / "gb10/ref-rdma-link-gb10.txt").read_text()
    tree = surfaces.node_tree(node)
    for hca, state, netdev in re.findall(
        r"^link (\S+)/1 state (\S+) physical_state \S+ netdev (\S+)", capture, re.MULTILINE
    ):
        link = tree[f"class/infiniband/{hca}"]
        base = link.target.removeprefix("../../")
        assert tree[f"{base}/ports/1/state"].split(": ")[1].strip() == state
        assert f"{base.rsplit('/infiniband/', 1)[0]}/net/{netdev}" in tree


def test_pci_functions_are_those_of_the_capture(surfaces, node, fixtures):
    functions = re.findall(r"^(\S+) Ethernet", (fixtures / "gb10/ref-lspci-cx7-gb10.txt").read_text(), re.MULTILINE)
    tree = surfaces.node_tree(node)
    assert sorted(path.rsplit("/", 1)[1] for path in tree if path.startswith("bus/pci/devices/")) == functions


def test_every_link_leads_somewhere(surfaces, node, program, tmp_path):
    """Laid out in a folder, every link resolves: netdev to PCI function, HCA to netdev, CPU to policy."""
    for rail in node.rails:
        (tmp_path / "devices/virtual/net" / rail.interface).mkdir(parents=True)
    boot = program("node/boot")
    tree = surfaces.node_tree(node)
    boot.lay_tree(
        {
            name: boot.surfaces.Link(entry.target) if isinstance(entry, surfaces.Link) else entry
            for name, entry in tree.items()
        },
        tmp_path,
    )
    (tmp_path / "bus/pci/drivers/mlx5_core").mkdir(exist_ok=True)
    links = [path for path in tmp_path.rglob("*") if path.is_symlink()]
    assert len(links) > 50
    assert [path for path in links if not path.exists()] == []
    function = (tmp_path / "devices/virtual/net/enP2p1s0f0np0/device").resolve()
    assert function.name == "0002:01:00.0"
    assert [path.name for path in (function / "infiniband").iterdir()] == ["roceP2p1s0f0"]
    assert (tmp_path / "class/infiniband/rocep1s0f0/device/net/enp1s0f0np0").resolve().name == "enp1s0f0np0"
    assert (tmp_path / "class/infiniband/rocep1s0f0/device").resolve() == (
        tmp_path / "bus/pci/devices/0000:01:00.0"
    ).resolve()
    assert (tmp_path / "devices/system/cpu/cpu7/cpufreq/cpuinfo_max_freq").read_text() == "3900000\n"


def test_laying_twice_puts_every_value_back(surfaces, node, program, tmp_path):
    """gb10-sandbox-reset: what a test changed, removed or added is as at boot."""
    boot = program("node/boot")
    tree = boot.surfaces.node_tree(boot.surfaces.Node("n", "enP7s7", "198.18.0.9"))
    boot.lay_tree(tree, tmp_path)
    governor = tmp_path / "devices/system/cpu/cpufreq/policy0/scaling_governor"
    governor.write_text("powersave\n")
    (tmp_path / "class/thermal/thermal_zone0").unlink()
    (tmp_path / "class/thermal/thermal_zone9").mkdir()
    boot.lay_tree(tree, tmp_path)
    assert governor.read_text() == "performance\n"
    assert sorted(path.name for path in (tmp_path / "class/thermal").iterdir()) == [
        f"thermal_zone{zone}" for zone in range(7)
    ]


def test_two_core_types_and_cpu0_is_a_slow_one(surfaces):
    """lscpu of a GB10: Cortex-A725 is 0-4 and 10-14, minimum 338 MHz; Cortex-X925 is 5-9 and 15-19, minimum 1378 MHz."""
    tree = surfaces.cpu_tree()
    limits = {cpu: tree[f"devices/system/cpu/cpufreq/policy{cpu}/cpuinfo_max_freq"] for cpu in range(20)}
    assert {cpu for cpu, limit in limits.items() if limit == "3900000\n"} == {*range(5, 10), *range(15, 20)}
    assert limits[0] == "2808000\n"
    assert tree["devices/system/cpu/cpufreq/policy0/cpuinfo_min_freq"] == "338000\n"
    assert tree["devices/system/cpu/cpu5/regs/identification/midr_el1"] == "0x00000000410fd851\n"


def test_a_light_node_without_rails_has_no_rdma_device(surfaces):
    node = surfaces.Node.from_dict({"name": "n", "management": {"interface": "enP7s7", "address": "198.18.0.9"}})
    assert not [path for path in surfaces.node_tree(node) if "infiniband" in path]
