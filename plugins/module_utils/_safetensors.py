# Copyright (c) The gb10.fleet maintainers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The safetensors format, as far as it can be judged without reading tensor data: headers, and the index over them.

A file is 8 bytes (length n of the header, little endian), n bytes of JSON, then data that the header's offsets tile without holes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

INDEX = "model.safetensors.index.json"
SUFFIX = ".safetensors"
_LARGEST_HEADER = 100_000_000


class SafetensorsError(ValueError):
    """A file that no engine can load; the message says what is wrong with it, without its name."""


@dataclass(frozen=True)
class Header:
    """Tensors of one file. ``data_bytes`` is the size of all tensors together."""

    tensors: Mapping[str, Mapping[str, Any]]
    data_bytes: int


def header_length(start: bytes, size: int) -> int:
    """Length of the JSON header, from the first 8 bytes of a file of ``size`` bytes. Raises SafetensorsError."""
    if len(start) < 8:
        raise SafetensorsError(f"holds {size} bytes, a safetensors file begins with 8 bytes of header length")
    length = int.from_bytes(start[:8], "little")
    if length > _LARGEST_HEADER or 8 + length > size:
        raise SafetensorsError(f"says that its header has {length} bytes, which cannot be in a file of {size} bytes")
    return length


def parse_header(text: bytes, size: int) -> Header:
    """The header of a file of ``size`` bytes. Raises SafetensorsError for JSON, offsets or a size that do not fit."""
    try:
        tensors = json.loads(text)
        tensors.pop("__metadata__", None)
        spans = sorted((int(t["data_offsets"][0]), int(t["data_offsets"][1])) for t in tensors.values())
    except (ValueError, AttributeError, KeyError, TypeError, IndexError) as exc:
        raise SafetensorsError(f"has a header that is not JSON of tensors ({exc})") from exc
    position = 0
    for begin, end in spans:
        if begin != position or end < begin:
            raise SafetensorsError(f"has a hole or an overlap in its tensors at byte {position}")
        position = end
    wanted = 8 + len(text) + position
    if wanted != size:
        kind = "is truncated" if size < wanted else "has bytes after its end"
        raise SafetensorsError(f"{kind}: {size} bytes found, its header says {wanted}")
    return Header(tensors, position)


def read_header(path: Path) -> Header:
    """The header of a file, checked against the size of the file. Raises SafetensorsError and OSError."""
    size = path.stat().st_size
    with path.open("rb") as stream:
        length = header_length(stream.read(8), size)
        return parse_header(stream.read(length), size)


def index_faults(weight_map: Mapping[str, str], tensors: Mapping[str, Iterable[str]]) -> list[str]:
    """What an index and its files say differently.

    :param weight_map: tensor to file name, from ``model.safetensors.index.json``.
    :param tensors: names of the tensors of each file that is present and readable; files not listed are not judged.
    """
    faults = []
    for name, found in tensors.items():
        wanted = {tensor for tensor, place in weight_map.items() if place == name}
        lost, extra = sorted(wanted - set(found)), sorted(set(found) - set(weight_map))
        if lost:
            faults.append(f"{name} lacks {len(lost)} tensors that the index expects there, for example {lost[0]}")
        if extra:
            faults.append(f"{name} holds {len(extra)} tensors that the index does not know, for example {extra[0]}")
    return faults
