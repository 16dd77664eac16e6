"""What every scenario may rely on: runs once per node, as root, before and after a reboot."""

from __future__ import annotations

import json

import pytest

NUMBER = {"molecule-1": 1, "molecule-2": 2}


@pytest.fixture
def number(host):
    """1 for the head, 2 for the worker."""
    return NUMBER[host.check_output("hostname")]


def test_systemd_is_up(host):
    assert host.check_output("systemctl is-system-running") == "running"
    for unit in ("ssh", "docker", "dbus"):
        assert host.service(unit).is_running


def test_interfaces_have_a_sparks_names(host, number):
    for name, address, mtu in (
        ("enP7s7", f"198.18.0.{100 + number}", 1500),
        ("enp1s0f0np0", f"198.51.100.{100 + number}", 9000),
        ("enP2p1s0f0np0", f"198.51.100.{228 + number}", 9000),
    ):
        [link] = json.loads(host.check_output(f"ip -j addr show dev {name}"))
        assert link["mtu"] == mtu
        assert [entry["local"] for entry in link["addr_info"] if entry["family"] == "inet"] == [address]
    [idle] = json.loads(host.check_output("ip -j link show dev enp1s0f1np1"))
    assert "UP" not in idle["flags"]


def test_jumbo_frames_pass_on_both_rails(host, number):
    peer = 3 - number
    assert host.run(f"ping -c1 -W2 -M do -s 8972 -I enp1s0f0np0 198.51.100.{100 + peer}").rc == 0
    assert host.run(f"ping -c1 -W2 -M do -s 8972 -I enP2p1s0f0np0 198.51.100.{228 + peer}").rc == 0
    assert host.run(f"ping -c1 -W2 -M do -s 9000 -I enp1s0f0np0 198.51.100.{100 + peer}").rc != 0


def test_sysfs_leads_from_netdev_to_hca_and_pci_function(host):
    for interface, hca, pci in (
        ("enp1s0f0np0", "rocep1s0f0", "0000:01:00.0"),
        ("enP2p1s0f0np0", "roceP2p1s0f0", "0002:01:00.0"),
    ):
        assert host.check_output(f"readlink -f /sys/class/net/{interface}/device").endswith(f"/{pci}")
        assert host.check_output(f"ls /sys/class/net/{interface}/device/infiniband") == hca
        assert host.check_output(f"ls /sys/class/infiniband/{hca}/device/net") == interface
        assert host.check_output(f"readlink -f /sys/bus/pci/devices/{pci}").endswith(f"/{pci}")
        assert host.file(f"/sys/class/infiniband/{hca}/ports/1/state").content_string == "4: ACTIVE\n"
    assert host.file("/sys/class/infiniband/rocep1s0f1/ports/1/state").content_string == "1: DOWN\n"


def test_gid_index_differs_between_nodes(host, number):
    """Public case net-gid-differs: 3 on one node, 4 on the other."""
    base = "/sys/class/infiniband/rocep1s0f0/ports/1"
    own = f"0000:0000:0000:0000:0000:ffff:c633:64{100 + number:02x}"
    table = host.check_output(f"grep -rH . {base}/gids {base}/gid_attrs/types")
    of_ours = {line.split(":")[0].rsplit("/")[-1] for line in table.splitlines() if own in line and "/gids/" in line}
    v2 = {line.split(":")[0].rsplit("/")[-1] for line in table.splitlines() if line.endswith(":RoCE v2")}
    assert of_ours & v2 == {str(2 + number)}


def test_gb10_identity(host):
    assert host.file("/sys/class/dmi/id/product_name").content_string == "NVIDIA_DGX_Spark\n"
    zones = host.check_output("cat /sys/class/thermal/thermal_zone*/type").split()
    assert zones == ["acpitz"] * 7


def test_cpufreq_is_at_its_boot_default(host):
    base = "/sys/devices/system/cpu/cpufreq"
    limits = host.check_output(f"grep -H . {base}/policy*/cpuinfo_max_freq").splitlines()
    fast = {int(line.split("/policy")[1].split("/")[0]) for line in limits if line.endswith(":3900000")}
    assert fast == {*range(5, 10), *range(15, 20)}
    assert len(limits) == 20
    assert set(host.check_output(f"cat {base}/policy*/scaling_governor").split()) == {"performance"}
    assert "schedutil" in host.file(f"{base}/policy0/scaling_available_governors").content_string


def test_gpu_answers_as_a_gb10(host):
    fields = "name,compute_cap,driver_version,memory.total"
    line = host.check_output(f"nvidia-smi --query-gpu={fields} --format=csv,noheader")
    assert line == "NVIDIA GB10, 12.1, 580.159.03, [N/A]"  # public case pre-nvsmi-na
    assert host.check_output("nvidia-smi --query-gpu=utilization.gpu --format=csv,noheader,nounits") == "0"


def test_sysctls_are_the_nodes_own(host):
    """A write lands in this node's copy; a persisted value is applied at boot, an unknown key is refused."""
    before = host.check_output("sysctl -n vm.swappiness")
    persisted = host.file("/etc/sysctl.d/90-molecule.conf")
    if persisted.exists:  # after the reboot of the side effect
        assert before == "7"
    host.run_test("sysctl -w vm.swappiness=33")
    assert host.check_output("sysctl -n vm.swappiness") == "33"
    host.run_test(f"sysctl -w vm.swappiness={before}")
    assert host.run("sysctl -w vm.no_such_key=1").rc != 0
    assert host.run("findmnt /proc/sys/vm/drop_caches").rc == 0


def test_swap_stays_in_the_node(host):
    host.check_output(
        "rm -f /var/tmp/swap && truncate -s 8M /var/tmp/swap && chmod 600 /var/tmp/swap && mkswap /var/tmp/swap"
    )
    try:
        host.check_output("swapon /var/tmp/swap")
        assert "/var/tmp/swap" in host.file("/proc/swaps").content_string
    finally:
        host.check_output("swapoff /var/tmp/swap; rm -f /var/tmp/swap")
    assert "/var/tmp/swap" not in host.file("/proc/swaps").content_string


def test_nested_engine_takes_a_gpu_container(host):
    info = json.loads(host.check_output("docker info --format '{{json .}}'"))
    assert "nvidia" in info["Runtimes"]
    image = "198.18.0.2:5000/molecule/payload:1"
    created = host.check_output(f"docker create --gpus all --device /dev/infiniband --cap-add IPC_LOCK {image}")
    try:
        inspected = json.loads(host.check_output(f"docker inspect {created}"))[0]
        assert inspected["HostConfig"]["DeviceRequests"][0]["Capabilities"] == [["gpu"]]
    finally:
        host.check_output(f"docker rm {created}")


def test_second_node_pulled_from_the_registry(host):
    digests = host.check_output("docker image inspect -f '{{json .RepoDigests}}' 198.18.0.2:5000/molecule/payload:1")
    assert json.loads(digests)[0].startswith("198.18.0.2:5000/molecule/payload@sha256:")


def test_pip_installs_from_the_hub(host):
    found = host.run("curl -sf http://198.18.0.3:8085/files/")
    assert found.rc == 0
    assert "huggingface_hub-" in found.stdout
    assert "no-index = true" in host.file("/etc/pip.conf").content_string


def test_login_has_docker_and_sudo(host):
    assert "docker" in host.user("spark").groups
    assert host.check_output("runuser -u spark -- sudo -n id -u") == "0"
    assert host.check_output("runuser -u spark -- docker version --format '{{.Server.Os}}'") == "linux"
