#!/usr/bin/python3
# Copyright (c) The gb10.fleet maintainers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""PID 1 of a stand-in node until systemd takes over: makes a container look like a GB10, then becomes systemd.

The container's start is the node's boot: what stands here in /run, /sys and /proc/sys is at its boot default again after
`docker restart`, as on a real node; what lies on its disk (units, host keys, /etc, nested images) stays.

    boot.py              PID 1: mounts, names, keys, fakes, then exec systemd (a light node: sshd alone, below docker-init)
    boot.py --surfaces   on a running node, as root: put every fake of /sys and /run/fake-gpu back to its boot default

How a test injects a fault (all gone after `docker restart`, the first group also after `gb10-sandbox-reset`):

    echo 0000:...:0000 > /sys/class/infiniband/rocep1s0f0/ports/1/gids/3    GID entry all zero
    rm -r /sys/class/infiniband/* /sys/bus/pci/devices/000[02]:01:*         cable unplugged: no function, no RDMA device
    echo "1: DOWN" > /sys/class/infiniband/rocep1s0f0/ports/1/state         link down for RDMA
    echo 3 > /run/fake-gpu/hang ... (all knobs: see nvidia_smi.py)          nvidia-smi hangs, refuses, reports
    echo 95000 > /sys/class/thermal/thermal_zone2/temp                      hot zone
    ip link set enp1s0f0np0 mtu 1500 | ip addr flush dev enP2p1s0f0np0      MTU, second rail without address
    iptables -A INPUT -i enp1s0f0np0 -p tcp --dport 32768:60999 -j DROP     firewall on ephemeral ports
    rm /dev/infiniband/uverbs0 | mv /usr/bin/nvidia-container-runtime-hook… devices, container GPU runtime
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import surfaces

GIVEN = Path("/etc/gb10-sandbox")
STATE = Path("/run/gb10-sandbox")
GPU = Path("/run/fake-gpu")
SYSTEMD = "/lib/systemd/systemd"
SSHD = "/usr/sbin/sshd"
MS_BIND = 4096
# Overlays: the live entries (netdevs, block devices) below, ours above; a write to a live one is copied up, never reaches the host.
OVERLAYS = ("class", "bus", "devices")
# What the host has here of its own is hidden, else its zones and policies would mix with ours.
REPLACED = (
    "class/thermal",
    "class/infiniband",
    "class/infiniband_verbs",
    "class/dmi",
    "devices/system/cpu/cpufreq",
    "devices/virtual/dmi",
)
# Host-wide sysctls: plain files over them. (net.ipv4.* belongs to the node's own network namespace and stays real.)
FAKE_SYSCTLS = (
    "vm/*",
    "net/core/*mem*",
    "net/core/netdev_max_backlog",
    "fs/file-max",
    "fs/nr_open",
    "fs/aio-max-nr",
    "fs/inotify/*",
    "kernel/numa_balancing",
    "kernel/panic",
    "kernel/panic_on_oops",
    "kernel/sysrq",
    "kernel/pid_max",
    "kernel/threads-max",
    "kernel/sched_*",
    "kernel/*watchdog*",
    "kernel/hung_task_*",
    "kernel/perf_event_*",
    "kernel/randomize_va_space",
    "kernel/shm*",
)
LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.mount.argtypes = (ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_ulong, ctypes.c_char_p)
DEVICES = {"uverbs0": (231, 192), "uverbs1": (231, 193), "rdma_cm": (10, 58)}


def run(*argv: str, check: bool = True) -> str:
    """Run a command of the node, at most 20 s; its standard output."""
    done = subprocess.run(argv, check=False, capture_output=True, text=True, timeout=20)
    if check and done.returncode:
        say(f"{' '.join(argv)}: exit {done.returncode}: {done.stderr.strip()}")
    return done.stdout


def bind(source: Path, target: Path) -> None:
    """mount(2) itself: there are a hundred of these, and a process each would be most of a boot."""
    if LIBC.mount(os.fsencode(source), os.fsencode(target), None, MS_BIND, None):
        say(f"cannot bind {source} over {target}: {os.strerror(ctypes.get_errno())}")


def say(message: str) -> None:
    print(f"gb10-sandbox: {message}", file=sys.stderr, flush=True)


def mounts() -> Iterator[tuple[str, str]]:
    """(mount point, file system type), in the order of mounting."""
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, where, kind, *_ = line.split()
        yield where.replace("\\040", " "), kind


def open_up() -> None:
    """Undo what the engine closes for a container that is not privileged: read-only /sys and cgroups, masked /proc paths."""
    for where, _ in list(mounts()):
        if where == "/sys" or where.startswith("/sys/fs/cgroup"):
            run("mount", "-o", "remount,bind,rw", where)
    for where, _ in reversed(list(mounts())):
        if where.startswith("/proc/") or where.startswith("/sys/firmware"):
            run("umount", where)
    run("mount", "-o", "remount,bind,rw", "/proc")
    run("mount", "--make-rshared", "/")
    # cgroup v1 keeps its device list in a file; on v2 the engine's --device-cgroup-rule holds.
    with contextlib.suppress(OSError):
        Path("/sys/fs/cgroup/devices/devices.allow").write_text("a")


def name_interfaces(node: surfaces.Node) -> None:
    """Give the NICs a Spark's names: by address, since the order of eth0, eth1, … is the engine's choice."""
    default = json.loads(run("ip", "-j", "route", "show", "default") or "[]")
    wanted = {node.management_address: node.management_interface}
    wanted |= {rail.address: rail.interface for rail in node.rails if rail.address}
    for link in json.loads(run("ip", "-j", "-4", "addr", "show") or "[]"):
        for address in link.get("addr_info", []):
            name = wanted.get(address.get("local"))
            if name and name != link["ifname"]:
                run("ip", "link", "set", link["ifname"], "down")
                run("ip", "link", "set", link["ifname"], "name", name)
                run("ip", "link", "set", name, "up")
    idle = [rail.interface for rail in node.rails if not rail.active]
    if len(idle) == 2:  # the second QSFP port, there without a cable: two ends of a veth, both down
        run("ip", "link", "add", idle[0], "type", "veth", "peer", "name", idle[1])
    for route in default:  # taking the link down dropped it
        run("ip", "route", "replace", "default", "via", route["gateway"])


def write_addresses_down(node: surfaces.Node) -> None:
    """The rails' addresses come back at each boot (the engine's doing), which a Debian would have from this file."""
    folder = Path("/etc/network/interfaces.d")
    folder.mkdir(parents=True, exist_ok=True)
    rails = [rail for rail in node.rails if rail.address]
    stanzas = [f"iface {rail.interface} inet static\n    address {rail.address}/25\n    mtu 9000\n" for rail in rails]
    (folder / "fabric").write_text("\n".join(stanzas))


def install_keys() -> None:
    """Host keys, and who may log in, as the role gave them. Copied: sshd is strict about owners and modes."""
    for source in GIVEN.glob("ssh_host_*"):
        target = Path("/etc/ssh") / source.name
        target.write_bytes(source.read_bytes())
        target.chmod(0o644 if source.suffix == ".pub" else 0o600)
    keys = GIVEN / "authorized_keys"
    if not keys.exists():
        return
    for user, home in (("root", "/root"), ("spark", "/home/spark")):
        folder = Path(home) / ".ssh"
        folder.mkdir(mode=0o700, exist_ok=True)
        allowed = folder / "authorized_keys"
        # Keys that somebody else gave the node stay, as on any node that boots again.
        there = allowed.read_text().splitlines() if allowed.exists() else []
        others = [line for line in there if not line.endswith(" gb10-sandbox")]
        allowed.write_text("\n".join([*keys.read_text().splitlines(), *others]) + "\n")
        allowed.chmod(0o600)
        shutil.chown(folder, user, user)
        shutil.chown(allowed, user, user)


def mount_overlays() -> None:
    """Lay a writable layer over /sys/class, /sys/bus and /sys/devices."""
    STATE.mkdir(exist_ok=True)
    run("mount", "-t", "tmpfs", "-o", "mode=755", "gb10-sandbox", str(STATE))
    for name in OVERLAYS:
        upper, work = STATE / f"{name}.upper", STATE / f"{name}.work"
        upper.mkdir()
        work.mkdir()
        run(
            "mount",
            "-t",
            "overlay",
            f"gb10-{name}",
            "-o",
            f"lowerdir=/sys/{name},upperdir={upper},workdir={work}",
            f"/sys/{name}",
        )


def lay_tree(tree: surfaces.Tree, root: Path = Path("/sys")) -> None:
    """Write the fake entries; folders that the host has of its own kind are emptied first."""
    for name in REPLACED:
        shutil.rmtree(root / name, ignore_errors=True)
    for name, entry in tree.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_symlink() or path.exists():
            path.unlink()
        if isinstance(entry, surfaces.Link):
            path.symlink_to(entry.target)
        else:
            path.write_text(entry)


def fake_sysctls() -> None:
    """Bind plain copies over host-wide sysctls, and over /proc/swaps: a role that sets them changes this node's copy only."""
    root = Path("/proc/sys")
    copies = STATE / "sysctl"
    for pattern in FAKE_SYSCTLS:
        for path in sorted(root.glob(pattern)):
            if not path.is_file() or not path.stat().st_mode & stat.S_IWUSR:
                continue
            copy = copies / path.relative_to(root)
            copy.parent.mkdir(parents=True, exist_ok=True)
            try:
                copy.write_text(path.read_text())
            except OSError:  # write-only ones: drop_caches of older kernels, compact_memory
                copy.write_text("")
            copy.chmod(path.stat().st_mode & 0o777)
            bind(copy, path)
    swaps = STATE / "swaps"
    swaps.write_text("Filename\t\t\t\tType\t\tSize\t\tUsed\t\tPriority\n")
    bind(swaps, Path("/proc/swaps"))


def make_devices(node: surfaces.Node) -> None:
    """/dev/infiniband, as a container asks for it. No driver stands behind the nodes."""
    if not node.rails:
        return
    folder = Path("/dev/infiniband")
    folder.mkdir(exist_ok=True)
    for name, (major, minor) in DEVICES.items():
        path = folder / name
        if not path.exists():
            os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(major, minor))
            path.chmod(0o666)


def reset_gpu() -> None:
    """A GPU after boot: no clock lock, no fault."""
    shutil.rmtree(GPU, ignore_errors=True)
    GPU.mkdir(mode=0o755)


def with_present_ports(node: surfaces.Node) -> surfaces.Node:
    """A port whose netdev could not be made is left out, rather than shown without one."""
    there = {Path(path).name for path in Path("/sys/class/net").iterdir()}
    rails = tuple(rail for rail in node.rails if rail.interface in there)
    for rail in node.rails:
        if rail not in rails:
            say(f"{rail.interface}: no such interface, left out")
    return surfaces.Node(node.name, node.management_interface, node.management_address, rails, node.light)


def read_node() -> surfaces.Node:
    return surfaces.Node.from_dict(json.loads((GIVEN / "node.json").read_text()))


def main(argv: list[str]) -> None:
    node = read_node()
    if "--surfaces" in argv:
        lay_tree(surfaces.node_tree(with_present_ports(node)))
        make_devices(node)
        reset_gpu()
        return
    open_up()
    name_interfaces(node)
    write_addresses_down(node)
    install_keys()
    mount_overlays()
    lay_tree(surfaces.node_tree(with_present_ports(node)))
    fake_sysctls()
    make_devices(node)
    reset_gpu()
    if node.light:  # dozens of systemds would use up the host's inotify instances (128 by default)
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
    os.execv(*((SSHD, [SSHD, "-D"]) if node.light else (SYSTEMD, [SYSTEMD])))  # noqa: S606 - becoming it is the point


if __name__ == "__main__":
    main(sys.argv[1:])
