#!/usr/bin/python3
"""Stand-in for netplan on a node without it: applies /etc/netplan/*.yaml with `ip`, and behaves as badly as the real one can.

The management address is gone for a second on every apply (case net-netplan-blip). With /run/netplan-cut, a node that has a
definition of its rails loses its management link for as long as the definition is there.
"""

import json
import re
import subprocess
import sys
import time
from pathlib import Path

MANAGEMENT, STATE, CUT = "enP7s7", Path("/run/netplan-stand-in.json"), Path("/run/netplan-cut")


def ip(*words):
    return subprocess.run(["ip", *words], check=False, capture_output=True, text=True).stdout


def addresses(name):
    (link,) = json.loads(ip("-j", "addr", "show", "dev", name))
    return [f"{i['local']}/{i['prefixlen']}" for i in link["addr_info"] if i["family"] == "inet"]


def give(name, wanted, mtu=None):
    ip("addr", "flush", "dev", name)
    for address in wanted:
        ip("addr", "add", address, "dev", name)
    if mtu:
        ip("link", "set", name, "mtu", mtu)


def main():
    text = "\n".join(path.read_text() for path in sorted(Path("/etc/netplan").glob("*.yaml")))
    if sys.argv[1] == "generate":
        if "nonsense" in text or "mtu: 1281" in text:
            sys.exit("/etc/netplan/60-gb10-fabric.yaml:6:12: Invalid MTU value")
        return
    defined = re.findall(r"^    (\S+):\n      addresses: \[(.*)\]\n      mtu: (\d+)", text, re.MULTILINE)
    before = json.loads(STATE.read_text()) if STATE.exists() else {}
    for name in [name for name in before if name not in [d[0] for d in defined]]:
        give(name, before.pop(name))
    for name, wanted, mtu in defined:
        before.setdefault(name, addresses(name))
        give(name, wanted.split(", "), mtu)
    STATE.write_text(json.dumps(before))
    held = addresses(MANAGEMENT)
    for address in held:
        ip("addr", "del", address, "dev", MANAGEMENT)
    time.sleep(1)
    give(MANAGEMENT, held)
    ip("link", "set", MANAGEMENT, "down" if CUT.exists() and defined else "up")


main()
