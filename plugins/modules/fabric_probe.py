#!/usr/bin/python
# Copyright (c) The gb10.fleet maintainers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

DOCUMENTATION = r"""
module: fabric_probe
short_description: Prove the rails between the ranks of a cluster
version_added: "0.1.0"
description:
  - Proves each rail of this node to its peers - a ping bound to the interface, not to be fragmented, that fills the MTU; a
    small ping beside it, to tell a dead link from a small MTU; and a TCP connection to the listener on a random high port
    that M(gb10.fleet.fabric_info) left on the peer. All of them run at the same time.
  - What to probe is worked out on the controller from what M(gb10.fleet.fabric_info) registered on every rank of the cluster.
    Nothing on the node is changed.
author:
  - The gb10.fleet maintainers (@gb10-fleet)
extends_documentation_fragment:
  - gb10.fleet.attributes
  - gb10.fleet.attributes.read_only
options:
  targets:
    description:
      - What to prove. Set by the action plugin; give it only when the module is used without the C(fabric) role.
    type: list
    elements: dict
    default: []
    suboptions:
      peer:
        description: Inventory name of the peer.
        type: str
        required: true
      rail:
        description: Number of the rail, 1 for the one that the route takes.
        type: int
        required: true
      interface:
        description: Interface to bind to.
        type: str
        required: true
      source:
        description: Own address on that interface.
        type: str
        required: true
      address:
        description: Address of the peer on this rail.
        type: str
        required: true
      payload:
        description: Bytes of ICMP payload, the MTU less 28.
        type: int
        required: true
      port:
        description: Port of the peer's listener, 0 when it has none.
        type: int
        default: 0
  timeout_s:
    description: How long one ping or one connection may take.
    type: float
    default: 3.0
  info_from:
    description: Name of the variable that M(gb10.fleet.fabric_info) was registered in. Read by the action plugin.
    type: str
  transport:
    description: What the recipe wants. Read by the action plugin.
    type: str
    choices: [roce, socket]
    default: roce
"""

EXAMPLES = r"""
- name: Read the fabric
  gb10.fleet.fabric_info:
    peers: "{{ topology_addresses.values() | difference([topology_addresses[inventory_hostname]]) }}"
    listen_s: 60
  register: fabric_report

- name: Prove every rail both ways
  gb10.fleet.fabric_probe:
    info_from: fabric_report
"""

RETURN = r"""
results:
  description:
    - One entry per target - C(ping) (full MTU), C(small) and C(tcp), each with C(ok); pings with C(rtt_ms), the C(mtu) that was
      too small and C(missing) when there is no ping program; C(tcp) with C(port), C(seen) (the source that the peer saw) and
      C(error).
  returned: success
  type: list
  elements: dict
  sample:
    - peer: spark-02
      rail: 1
      ping: {ok: true, sent: 2, received: 2, mtu: null, rtt_ms: 0.08, missing: false}
      small: {ok: true, sent: 2, received: 2, mtu: null, rtt_ms: 0.05, missing: false}
      tcp: {ok: true, port: 41233, seen: 198.51.100.11, error: null}
"""

import contextlib
import socket
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.gb10.fleet.plugins.module_utils import _fabric
from ansible_collections.gb10.fleet.plugins.module_utils._command import run
from ansible_collections.gb10.fleet.plugins.module_utils._listener import GREETING


def ping(target: dict[str, Any], payload: int, timeout_s: float) -> dict[str, Any]:
    """Two echo requests, a fifth of a second apart, bound to the interface and not to be fragmented."""
    answer = run(
        (
            *("ping", "-n", "-c", "2", "-i", "0.2", "-W", f"{max(1, int(timeout_s))}"),
            *("-M", "do", "-s", str(payload), "-I", target["interface"], target["address"]),
        ),
        timeout_s + 2,
    )
    return {**_fabric.parse_ping(answer.out + answer.err, answer.rc), "missing": answer.missing}


def connect(target: dict[str, Any], timeout_s: float) -> dict[str, Any]:
    """A TCP connection from this rail's own address; what a firewall does with it is in the error's words."""
    result: dict[str, Any] = {"ok": False, "port": target["port"], "seen": None, "error": None}
    if not target["port"]:
        return {**result, "error": "no listener"}
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as client:
            client.settimeout(timeout_s)
            with contextlib.suppress(PermissionError):  # older kernels keep binding to a device for root
                client.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, target["interface"].encode() + b"\0")
            client.bind((target["source"], 0))
            client.connect((target["address"], target["port"]))
            said = client.recv(256)
    except TimeoutError:
        return {**result, "error": f"no answer within {timeout_s:g} s"}
    except OSError as error:
        return {**result, "error": (error.strerror or str(error)).lower()}
    if not said.startswith(GREETING):
        return {**result, "error": "something else answers on that port"}
    return {**result, "ok": True, "seen": said[len(GREETING) :].decode("ascii", "replace").strip()}


def probe(targets: list[dict[str, Any]], timeout_s: float) -> list[dict[str, Any]]:
    """All targets at the same time: a dead rail costs its timeout once."""
    with ThreadPoolExecutor(max_workers=max(1, min(96, 3 * len(targets)))) as pool:
        jobs = [
            (
                pool.submit(ping, target, target["payload"], timeout_s),
                pool.submit(ping, target, 56, timeout_s),
                pool.submit(connect, target, timeout_s),
            )
            for target in targets
        ]
        return [
            {
                "peer": target["peer"],
                "rail": target["rail"],
                "ping": full.result(),
                "small": small.result(),
                "tcp": tcp.result(),
            }
            for target, (full, small, tcp) in zip(targets, jobs)  # noqa: B905 - one job per target
        ]


def main() -> None:
    target = {
        "peer": {"type": "str", "required": True},
        "rail": {"type": "int", "required": True},
        "interface": {"type": "str", "required": True},
        "source": {"type": "str", "required": True},
        "address": {"type": "str", "required": True},
        "payload": {"type": "int", "required": True},
        "port": {"type": "int", "default": 0},
    }
    module = AnsibleModule(
        argument_spec={
            "targets": {"type": "list", "elements": "dict", "options": target, "default": []},
            "timeout_s": {"type": "float", "default": 3.0},
            "info_from": {"type": "str"},
            "transport": {"type": "str", "choices": ["roce", "socket"], "default": "roce"},
        },
        supports_check_mode=True,
    )
    module.exit_json(changed=False, results=probe(module.params["targets"], module.params["timeout_s"]))


if __name__ == "__main__":
    main()
