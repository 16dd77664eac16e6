# Copyright (c) The gb10.fleet maintainers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""vLLM's command line, rebuilt from the recorded list of its options (recorded/flags.json)."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

RECORDED = Path(__file__).resolve().parent.parent / "recorded"
VERSION = "0.32.0"
COMMANDS = "chat,complete,serve,launch,bench,collect-env,download-kernels,preload,run-batch,snapshot"
USAGE = f"usage: vllm [-h] [-v]\n            {{{COMMANDS}}}\n            ...\n"
_UNITS = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def human_int(text: str) -> int:
    """As vLLM reads them: 2k is 2000, 64M is 67108864."""
    found = re.fullmatch(r"(-?\d+(?:\.\d+)?)([kmgtKMGT]?)", text)
    if not found:
        raise ValueError(text)
    return int(float(found[1]) * _UNITS.get(found[2], 1))


def human_int_or_auto(text: str) -> int:
    return -1 if text == "auto" else human_int(text)


def json_or_text(text: str) -> Any:
    return json.loads(text) if text[:1] == "{" else text


human_int.__name__ = "human_readable_int"
human_int_or_auto.__name__ = "human_readable_int_or_auto"
TYPES: dict[str, Callable[[str], Any]] = {
    "int": int,
    "float": float,
    "str": str,
    "loads": json.loads,
    "human_readable_int": human_int,
    "human_readable_int_or_auto": human_int_or_auto,
    "union_dict_and_str": json_or_text,
    "parse_dataclass": json.loads,
    "_parse_type": str,
    "<lambda>": json_or_text,
}


class Parser(argparse.ArgumentParser):
    """Errors as the real one prints them: unknown options are the outer parser's, everything else is `vllm serve`'s."""

    def error(self, message: str) -> NoReturn:
        print(f"usage: vllm serve [model_tag] [options]\nvllm serve: error: {message}", file=sys.stderr)
        raise SystemExit(2)


def option_type(option: dict[str, Any]) -> Callable[[str], Any]:
    name = str(option["type"] or "").partition(":")[0]
    if name == "_optional_type":
        name = option["inner_type"] or "str"
    return TYPES.get(name, str)


@cache
def build() -> tuple[Parser, list[str]]:
    """The parser and the destinations in vLLM's order."""
    parser = Parser(prog="vllm serve", add_help=False)
    order: list[str] = []
    for option in json.loads((RECORDED / "flags.json").read_text(encoding="utf-8"))["options"]:
        kind, flags, dest = option["action"], option["flags"], option["dest"]
        order.append(dest)
        if kind == "_HelpAction":
            parser.add_argument(*flags, action="help")
        elif not flags:
            parser.add_argument(dest, nargs=option["nargs"], default=argparse.SUPPRESS)
        elif kind == "_StoreTrueAction":
            parser.add_argument(*flags, dest=dest, action="store_true", default=argparse.SUPPRESS)
        elif kind == "BooleanOptionalAction":
            plain = [flag for flag in flags if not flag.startswith("--no-")]
            parser.add_argument(*plain, dest=dest, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS)
        else:
            action = "append" if kind == "_AppendAction" else "store"
            parser.add_argument(
                *flags,
                dest=dest,
                action=action,
                nargs=option["nargs"],
                type=option_type(option),
                choices=option["choices"],
                default=argparse.SUPPRESS,
            )
    return parser, order


def flexible(argv: list[str]) -> list[str]:
    """Underscores as dashes; "--name.key value" and "-cc.mode=1" gathered into one JSON option, as vLLM does."""
    out: list[str] = []
    nested: dict[str, dict[str, Any]] = {}
    words = iter(argv)
    for word in words:
        name, equals, value = word.partition("=")
        if name.startswith("--"):
            head, dot, rest = name.partition(".")
            name = head.replace("_", "-") + dot + rest
        head, dot, path = name.partition(".")
        if dot and head.startswith("-") and not re.fullmatch(r"-\d.*", name):
            text = value if equals else next(words, "")
            try:
                parsed: Any = json.loads(text)
            except ValueError:
                parsed = text
            inner = nested.setdefault(head, {})
            *parents, last = path.split(".")
            for parent in parents:
                inner = inner.setdefault(parent, {})
            inner[last] = parsed
        else:
            out.append(name + equals + value if name.startswith("-") else word)
    for head, values in nested.items():
        out += [head, json.dumps(values)]
    return out


def parse(argv: list[str]) -> dict[str, Any]:
    """The given options in vLLM's order ("non-default args"). Errors end with exit code 2, as there."""
    if argv[:1] in (["--version"], ["-v"]):
        print(VERSION)
        raise SystemExit(0)
    if argv[:1] != ["serve"]:
        print(f"{USAGE}vllm: error: argument subparser: invalid choice: {' '.join(argv[:1])!r}", file=sys.stderr)
        raise SystemExit(2)
    parser, order = build()
    given, unknown = parser.parse_known_args(flexible(argv[1:]))
    if unknown:
        print(f"{USAGE}vllm: error: unrecognized arguments: {' '.join(unknown)}", file=sys.stderr)
        raise SystemExit(2)
    if getattr(given, "model_tag", None) is not None:
        given.model = given.model_tag
    chosen = vars(given)
    return {dest: chosen[dest] for dest in dict.fromkeys(order) if chosen.get(dest) is not None}
