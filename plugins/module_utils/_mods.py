# Copyright (c) The gb10.fleet maintainers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Mods: a file of an image with replacements. Pure functions; the module engine_mods reads the image and writes the file."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any


class ModError(ValueError):
    """A mod that does not fit its image; one or two sentences with what was found and what to do."""


def sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def patched(original: str, mod: Mapping[str, Any], image: str) -> str:
    """The file with the replacements. Each anchor has to be there exactly once, in the file that the mod was made for."""
    found, wanted = sha256(original), mod.get("original_sha256")
    if wanted and found != wanted:
        raise ModError(
            f"mods {mod['name']}: {mod['target']} in {image} has sha256 {found}, the mod was made for {wanted}. The image moved "
            "on: check the mod against its file, then write that checksum as original_sha256."
        )
    text = original
    for change in mod["replace"]:
        count = text.count(change["anchor"])
        if count != 1:
            raise ModError(
                f"mods {mod['name']}: its anchor {change['anchor'].strip().splitlines()[0]!r} is {count} times in {mod['target']} "
                f"of {image} (sha256 {found}), wanted once. Correct the anchor."
            )
        text = text.replace(change["anchor"], change["with"])
    return text


def silent(log: str, mods: Sequence[Mapping[str, Any]]) -> list[str]:
    """Sentences for the mods whose lines are not in the log of the container."""
    out = []
    for mod in mods:
        missing = [line for line in mod.get("log") or [] if line not in log]
        if missing:
            out.append(f"mods {mod['name']} is not in effect: the container never said {missing[0]!r}.")
    return out
