# Copyright (c) The gb10.fleet maintainers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The heart of the collection: (recipe, topology, fabric facts) -> rank spec, and the spec as ``docker run``.

A rank spec says all there is to say about one rank's container:

``image, name, entrypoint, argv, env, mounts, ulimits, devices, gpus, cap_add, network_mode, ipc_mode, shm_size, memory,
memory_swap, init, stop_timeout_s, restart_policy, labels``

Every engine goes through :func:`rank_spec`; ``serve.yml`` starts what it returns, ``render.yml`` prints it.
"""

from __future__ import annotations

import hashlib
import json
import posixpath
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from ansible_collections.gb10.fleet.plugins.module_utils._plain import plain

# Static NCCL environment of a RoCE fabric, the same on every rank
# (seed "Running GLM-5.3-Flash on two DGX Sparks", step 5).
ROCE_ENV: dict[str, str] = {
    "NCCL_NET": "IB",
    "NCCL_IB_DISABLE": "0",
    "NCCL_IB_ROCE_VERSION_NUM": "2",
    "NCCL_IB_ADDR_FAMILY": "AF_INET",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_CROSS_NIC": "0",
    "NCCL_IB_MERGE_NICS": "0",
    "NCCL_CUMEM_ENABLE": "0",
    "NCCL_IGNORE_CPU_AFFINITY": "1",
    "NCCL_DEBUG": "WARN",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
}
SOCKET_ENV: dict[str, str] = {
    "NCCL_IB_DISABLE": "1",
    "NCCL_IGNORE_CPU_AFFINITY": "1",
    "NCCL_CUMEM_ENABLE": "0",
    "NCCL_DEBUG": "WARN",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
}

# The only things in which ranks of one cluster may differ. Anything else that differs is an error before a start:
# ranks with different engine arguments deadlock with both GPUs at 100 % (case launch-args-mismatch).
PER_RANK_ENV = frozenset(
    {
        "VLLM_HOST_IP",
        "NCCL_SOCKET_IFNAME",
        "GLOO_SOCKET_IFNAME",
        "TP_SOCKET_IFNAME",
        "MN_IF_NAME",
        "NCCL_IB_HCA",
        "NCCL_IB_GID_INDEX",
    }
)
PER_RANK_LABELS = frozenset({"gb10.fleet.rank", "gb10.fleet.spec"})

LABEL_CLUSTER = "gb10.fleet.cluster"
LABEL_RANK = "gb10.fleet.rank"
LABEL_RECIPE = "gb10.fleet.recipe"
LABEL_PORT = "gb10.fleet.port"
LABEL_SPEC = "gb10.fleet.spec"


class RankSpecError(ValueError):
    """The ranks of a cluster cannot be started as asked; the message names rank and field."""


def _flag(name: str, value: Any) -> list[str]:
    """One engine flag as argv words: true is a bare flag, a mapping is JSON, a list repeats its values behind one flag."""
    flag = f"--{name}"
    if value is False:
        return []
    if value is True:
        return [flag]
    if isinstance(value, Mapping):
        return [flag, json.dumps(value)]
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [flag, *(str(v) for v in value)]
    return [flag, str(value)]


def _vllm_argv(recipe: Mapping[str, Any], topology: Mapping[str, Any], model: str) -> list[str]:
    parallel = recipe["parallel"]
    argv = [model]
    argv += _flag("served-model-name", recipe["served_name"])
    argv += _flag("host", recipe["api_host"]) + _flag("port", recipe["port"])
    if parallel["tensor"] > 1:
        argv += _flag("tensor-parallel-size", parallel["tensor"])
    if parallel["pipeline"] > 1:
        argv += _flag("pipeline-parallel-size", parallel["pipeline"])
    for name, value in recipe["args"].items():
        argv += _flag(name, value)
    if topology["size"] > 1:
        argv += _flag("distributed-executor-backend", parallel["backend"])
        argv += _flag("nnodes", topology["size"]) + _flag("node-rank", topology["rank"])
        argv += _flag("master-addr", topology["head_address"]) + _flag("master-port", recipe["master_port"])
        if topology["rank"] > 0:
            # Last, and on every rank but 0: without it the worker builds a full engine and dies with "collective_rpc
            # should not be called on follower node", and the head waits for ever (case launch-headless).
            argv.append("--headless")
    return argv


def _env(recipe: Mapping[str, Any], topology: Mapping[str, Any], fabric: Mapping[str, Any]) -> dict[str, str]:
    env: dict[str, str] = {}
    if topology["size"] > 1:
        env["VLLM_HOST_IP"] = topology["address"]
        env.update(ROCE_ENV if recipe["fabric"]["transport"] == "roce" else SOCKET_ENV)
        # An empty NCCL_IB_GID_INDEX means index 0, not "automatic" (case net-gid-drift): empty values are left out.
        env.update({k: str(v) for k, v in (fabric.get("env") or {}).items() if v not in (None, "")})
    env.update(recipe["env"])
    return env


def _mounts(recipe: Mapping[str, Any], topology: Mapping[str, Any]) -> tuple[str, list[dict[str, Any]]]:
    model = posixpath.join(topology["models_dir"], recipe["checkpoint"]["directory"])
    mounts: list[dict[str, Any]] = [{"source": model, "target": model, "read_only": True}]
    cache = recipe["container"]["cache_dir"]
    if cache:
        mounts.append({"source": cache, "target": "/cache", "read_only": False})
    return model, mounts


def image_name(image: Mapping[str, Any]) -> str:
    """The reference to pull and run: pinned by digest when the recipe gives one."""
    reference: str = image["reference"]
    if not image.get("digest"):
        return reference
    name, _colon, tag = reference.rpartition(":")
    base = name if name and "/" not in tag else reference
    return f"{base}@{image['digest']}"


def rank_spec(recipe: Mapping[str, Any], topology: Mapping[str, Any], fabric: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rank spec of one rank.

    :param recipe: a normalised recipe (:func:`._recipe.normalise`).
    :param topology: ``cluster`` (str), ``rank`` and ``size`` (int), ``address`` and ``head_address`` (fabric IPv4 of this rank
        and of rank 0), ``models_dir`` (absolute path).
    :param fabric: ``env``: the environment that the fabric role derived for this node (may be empty: NCCL then chooses).
    """
    container = recipe["container"]
    model, mounts = _mounts(recipe, topology)
    return {
        "image": image_name(recipe["image"]),
        "name": recipe["container_name"],
        # Always explicit: images that start `python -m …api_server` ignore --headless (case launch-apiserver-entrypoint).
        "entrypoint": ["vllm", "serve"],
        "argv": _vllm_argv(recipe, topology, model),
        "env": _env(recipe, topology, fabric),
        "mounts": mounts,
        "ulimits": {name: _ulimit(value) for name, value in container["ulimits"].items()},
        "devices": list(container["devices"])
        if recipe["fabric"]["transport"] == "roce" and topology["size"] > 1
        else [],
        "gpus": container["gpus"],
        "cap_add": list(container["cap_add"]),
        "network_mode": container["network"],
        "ipc_mode": container["ipc"],
        "shm_size": container["shm_size"],
        "memory": container["memory"],
        "memory_swap": container["memory_swap"],
        "init": container["init"],
        "stop_timeout_s": container["stop_timeout_s"],
        # A lone rank never rejoins (case wd-pair-restart): recovery restarts the whole cluster, Docker never restarts a rank.
        "restart_policy": "no",
        "labels": {
            LABEL_CLUSTER: topology["cluster"],
            LABEL_RANK: str(topology["rank"]),
            LABEL_RECIPE: recipe["name"],
            LABEL_PORT: str(recipe["port"]),
        },
    }


def _ulimit(value: Any) -> dict[str, int]:
    if isinstance(value, Mapping):
        return {"soft": int(value["soft"]), "hard": int(value["hard"])}
    return {"soft": int(value), "hard": int(value)}


def spec_hash(spec: Mapping[str, Any]) -> str:
    """sha256 of the spec without its own label. Two specs with one hash start the same container."""
    bare = plain(spec)
    bare["labels"] = {k: v for k, v in bare["labels"].items() if k != LABEL_SPEC}
    return hashlib.sha256(json.dumps(bare, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def labelled(spec: Mapping[str, Any], declared_hash: str) -> dict[str, Any]:
    """The spec with the hash label. The hash is that of the *declared* spec: a GID index that drifts restarts nothing."""
    out = plain(spec)
    out["labels"][LABEL_SPEC] = declared_hash
    return out


def _without_allowed(spec: Mapping[str, Any]) -> dict[str, Any]:
    out = plain(spec)
    out["env"] = {k: v for k, v in out["env"].items() if k not in PER_RANK_ENV}
    out["labels"] = {k: v for k, v in out["labels"].items() if k not in PER_RANK_LABELS}
    argv = [word for word in out["argv"] if word != "--headless"]
    if "--node-rank" in argv:
        at = argv.index("--node-rank")
        del argv[at : at + 2]
    out["argv"] = argv
    return out


def check_group(specs: Sequence[Mapping[str, Any]]) -> None:
    """Raise RankSpecError unless the specs (by rank) of one cluster differ only where ranks may differ."""
    for rank, spec in enumerate(specs):
        count = spec["argv"].count("--headless")
        if count != (1 if rank else 0):
            raise RankSpecError(f"rank {rank} has --headless {count} times: exactly the ranks above 0 have it, once.")
    reference = _without_allowed(specs[0])
    for rank, spec in enumerate(specs[1:], start=1):
        other = _without_allowed(spec)
        for key in reference:
            if other[key] != reference[key]:
                raise RankSpecError(
                    f"rank {rank} differs from rank 0 in {key}: {_difference(reference[key], other[key])}. "
                    "Ranks with different settings deadlock: give every rank of the cluster the same value."
                )


def _difference(a: Any, b: Any) -> str:
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        keys = [k for k in sorted({*a, *b}) if a.get(k) != b.get(k)]
        return ", ".join(f"{k} is {a.get(k)!r} on rank 0 and {b.get(k)!r} here" for k in keys)
    return f"{a!r} on rank 0 and {b!r} here"


def docker_run_argv(spec: Mapping[str, Any]) -> list[str]:
    """The spec as ``docker run`` words, ready for an argv list or for :func:`docker_run_text`."""
    out = ["docker", "run", "--detach", "--name", spec["name"], "--restart", spec["restart_policy"]]
    if spec["init"]:
        out.append("--init")
    if spec["gpus"]:
        out += ["--gpus", spec["gpus"]]
    out += ["--network", spec["network_mode"]]
    if spec["ipc_mode"]:
        out += ["--ipc", spec["ipc_mode"]]
    out += ["--shm-size", spec["shm_size"]]
    if spec["memory"]:
        out += ["--memory", spec["memory"]]
    if spec["memory_swap"]:
        out += ["--memory-swap", spec["memory_swap"]]
    for name, limit in spec["ulimits"].items():
        out += ["--ulimit", f"{name}={limit['soft']}:{limit['hard']}"]
    for cap in spec["cap_add"]:
        out += ["--cap-add", cap]
    for device in spec["devices"]:
        out += ["--device", f"{device}:{device}"]
    out += ["--stop-timeout", str(spec["stop_timeout_s"])]
    for mount in spec["mounts"]:
        out += ["--volume", f"{mount['source']}:{mount['target']}" + (":ro" if mount["read_only"] else "")]
    for name, value in spec["env"].items():
        out += ["--env", f"{name}={value}"]
    for name, value in spec["labels"].items():
        out += ["--label", f"{name}={value}"]
    # docker run takes one word as entrypoint; the others lead the command.
    out += ["--entrypoint", spec["entrypoint"][0], spec["image"], *spec["entrypoint"][1:], *spec["argv"]]
    return out


def docker_run_text(spec: Mapping[str, Any]) -> str:
    """The ``docker run`` as shell text, one option a line, quoted so that it can be pasted."""
    words = docker_run_argv(spec)
    image_at = len(words) - len(spec["argv"]) - len(spec["entrypoint"][1:]) - 1
    lines = [" ".join(shlex.quote(w) for w in words[:3])]
    lines += _option_lines(words[3:image_at])
    head = " ".join(shlex.quote(w) for w in [*words[image_at : image_at + len(spec["entrypoint"])], *spec["argv"][:1]])
    lines.append(head)
    lines += _option_lines(list(spec["argv"][1:]))
    return " \\\n  ".join(lines)


def _option_lines(words: list[str]) -> list[str]:
    lines: list[str] = []
    for word in words:
        if word.startswith("--") or not lines:
            lines.append(shlex.quote(word))
        else:
            lines[-1] += " " + shlex.quote(word)
    return lines


def docker_container_options(spec: Mapping[str, Any]) -> dict[str, Any]:
    """The spec as parameters of ``community.docker.docker_container`` (all but ``state``)."""
    options: dict[str, Any] = {
        "name": spec["name"],
        "image": spec["image"],
        "entrypoint": [spec["entrypoint"][0]],
        "command": [*spec["entrypoint"][1:], *spec["argv"]],
        "command_handling": "correct",
        "env": dict(spec["env"]),
        "mounts": [
            {"type": "bind", "source": m["source"], "target": m["target"], "read_only": m["read_only"]}
            for m in spec["mounts"]
        ],
        "ulimits": [f"{name}:{limit['soft']}:{limit['hard']}" for name, limit in spec["ulimits"].items()],
        "capabilities": list(spec["cap_add"]),
        "devices": [f"{device}:{device}:rwm" for device in spec["devices"]],
        "network_mode": spec["network_mode"],
        "shm_size": spec["shm_size"],
        "init": spec["init"],
        "stop_timeout": spec["stop_timeout_s"],
        "restart_policy": spec["restart_policy"],
        "labels": dict(spec["labels"]),
    }
    if spec["ipc_mode"]:
        options["ipc_mode"] = spec["ipc_mode"]
    if spec["memory"]:
        options["memory"] = spec["memory"]
    if spec["memory_swap"]:
        options["memory_swap"] = spec["memory_swap"]
    if spec["gpus"]:
        # Without a driver the module compares unequal on every run and recreates the container, i.e. reloads the model.
        options["device_requests"] = [{"driver": "nvidia", "count": -1, "capabilities": [["gpu"]]}]
    return options
