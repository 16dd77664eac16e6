# Copyright (c) The gb10.fleet maintainers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The plan of one cluster: which rank asks the hub or registry, which copies from which rank, and why it cannot be done.

Pure functions over what the ranks reported (``checkpoint_verify``, ``image_identity``)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ansible_collections.gb10.fleet.plugins.module_utils._checkpoint import Step, fan_out, wanted_revision

ITEM_KEYS = ("repo", "revision", "layout", "directory", "include", "exclude", "licence", "non_commercial")


def recipe_checkpoints(recipe: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """The checkpoints that a recipe needs, as the checkpoint modules take them: the model, then the drafter."""
    found = [recipe.get("checkpoint"), recipe.get("drafter")] if recipe else []
    return [{k: item[k] for k in ITEM_KEYS if item.get(k) is not None} for item in found if item]


def _reports(hosts: Iterable[Mapping[str, Any]], variable: str) -> tuple[dict[str, Mapping[str, Any]], list[str]]:
    """By name, what each rank reported, and the ranks that did not."""
    known: dict[str, Mapping[str, Any]] = {}
    silent = []
    for host in hosts:
        name, report = str(host["inventory_hostname"]), host.get(variable)
        if (
            isinstance(report, Mapping)
            and not report.get("failed")
            and not report.get("skipped")
            and not report.get("unreachable")
        ):
            known[name] = report
        else:
            silent.append(name)
    return known, silent


def _duty(step: Step, me: str, addresses: Mapping[str, str], port: int) -> dict[str, Any]:
    """A step as the options ``peer`` and ``serve`` of our modules."""
    peer = serve = None
    if step.source not in (None, "hub"):
        peer = {"name": step.source, "address": addresses.get(str(step.source), step.source), "port": port, "me": me}
    if step.clients:
        serve = {"address": addresses.get(me, "0.0.0.0"), "port": port, "clients": list(step.clients)}  # noqa: S104 - its own fabric
    return {"needed": not step.idle, "asks": step.source == "hub", "peer": peer, "serve": serve}


def checkpoint_plan(
    hosts: Iterable[Mapping[str, Any]],
    me: str,
    distribution: str = "peer",
    addresses: Mapping[str, str] | None = None,
    port: int = 18437,
    report: str = "__checkpoint_found",
    refresh: bool = False,
) -> dict[str, Any]:
    """What this rank does: ``needed``, ``asks`` (the hub), ``peer``, ``serve``, ``revisions`` by repository, ``failure``.

    :param hosts: host variables of the ranks of this cluster, by rank. :param me: this host. :param addresses: fabric addresses.
    :param refresh: without a revision in the recipe, the hub is to be asked for a newer one.
    """
    known, silent = _reports(hosts, report)
    if silent:
        failure = f"{', '.join(silent)} did not say what it has of the checkpoint."
        return {"needed": True, "asks": False, "peer": None, "serve": None, "revisions": {}, "failure": failure}
    revisions: dict[str, str | None] = {}
    first = next(iter(known.values()))["checkpoints"]
    for number, item in enumerate(first):
        had = [found["checkpoints"][number]["revision"] for found in known.values()]
        revisions[item["repo"]] = None if refresh else wanted_revision(None, had)
    missing: dict[str, int | None] = {}
    for name, found in known.items():
        size: int | None = 0
        for item in found["checkpoints"]:
            if item["revision"] is None or item["revision"] != revisions[item["repo"]]:
                size = None
            elif size is not None:
                # What is here and was never hashed has to be read once; it counts like nothing against what must travel.
                size += item["missing_bytes"] + (0 if item["complete"] else 1)
        missing[name] = size
    steps = fan_out(missing, distribution)
    return {**_duty(steps[me], me, addresses or {}, port), "revisions": revisions, "failure": None}


def pinned(
    items: Sequence[Mapping[str, Any]], revisions: Mapping[str, Any], answers: Iterable[Mapping[str, Any]] = ()
) -> list[dict[str, Any]]:
    """The checkpoints with their commit: the recipe's, the one that the ranks have, or the first answer of the hub in the run.

    :param answers: what ``checkpoint_verify`` with ``resolve`` reported, of all clusters: one commit for the fleet.
    """
    asked: dict[str, str] = {}
    for answer in answers:
        for found in (answer.get("checkpoints") or []) if isinstance(answer, Mapping) else []:
            if found["revision"]:
                asked.setdefault(found["repo"], found["revision"])
    out = []
    for item in items:
        commit = item.get("revision") or revisions.get(item["repo"]) or asked.get(item["repo"])
        out.append({**item, **({"revision": commit} if commit else {})})
    return out


def image_plan(
    hosts: Iterable[Mapping[str, Any]],
    me: str,
    distribution: str = "each",
    addresses: Mapping[str, str] | None = None,
    port: int = 18438,
    report: str = "__image_found",
    refresh: bool = False,
    inputs: str | None = None,
) -> dict[str, Any]:
    """What this rank does: ``needed``, ``asks`` (registry, build or archive), ``peer``, ``serve``, ``failure``.

    :param inputs: hash of what the image is to be built from; an image without it counts as missing, and one rank builds for all.
    """
    hosts = list(hosts)
    known, silent = _reports(hosts, report)
    nothing = {"needed": True, "asks": False, "peer": None, "serve": None}
    if silent:
        return {**nothing, "failure": f"{', '.join(silent)} did not say whether it has the image."}
    images = {name: found["image"] for name, found in known.items()}

    def lacks(image: Mapping[str, Any]) -> bool:
        return not image["present"] or refresh or (inputs is not None and image["inputs"] != inputs)

    missing: dict[str, int | None] = {name: 1 if lacks(image) else 0 for name, image in images.items()}
    identities = {name: image["identity"] for name, image in images.items() if not missing[name]}
    if len(set(identities.values())) > 1:
        if inputs is None:
            return {**nothing, "failure": differ(images, [n for n in images if not missing[n]])}
        # Built on two nodes once: the lowest rank's build is the one that all get.
        reference = next(iter(identities.values()))
        missing = {name: 0 if not missing[name] and identities.get(name) == reference else 1 for name in images}
    steps = fan_out(missing, "peer" if inputs is not None or distribution == "peer" else "each")
    return {**_duty(steps[me], me, addresses or {}, port), "failure": None}


def differ(images: Mapping[str, Mapping[str, Any]], names: Sequence[str]) -> str:
    """The sentence for ranks with different content under one name (case img-digest-mismatch)."""
    shown = ", ".join(
        f"{n} has {images[n]['identity'][:12]} ({images[n]['id'][:19]}, made {str(images[n].get('created'))[:10]})"
        for n in names
    )
    return (
        f"The ranks have different content under {images[names[0]]['name']}: {shown}. Ranks of different builds hang. Run: "
        "ansible-playbook playbooks/prepare.yml -e image_refresh=true, and pin image.digest in the recipe."
    )
