# Copyright (c) The gb10.fleet maintainers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""An engine's own argument parser: the program that runs it inside the engine's image, and what its answer means. Pure."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Sequence
from typing import Any

# Where vLLM keeps its parser has moved: the newer place first. TensorFold's is the one that its kit checks with.
BUILDERS: dict[str, str] = {
    "vllm": """
make = first("vllm.entrypoints.launchers.cli_args.make_arg_parser", "vllm.entrypoints.openai.cli_args.make_arg_parser")
parser = make(first("vllm.utils.argparse_utils.FlexibleArgumentParser", "vllm.utils.FlexibleArgumentParser")(prog="vllm serve"))
words = sys.argv[2:]
""",
    "tensorfold": """
parser = first("tensorfold.cli.build_parser")()
words = sys.argv[1:]
""",
}
_MARK = "@answer "
_PROGRAM = """
import contextlib, importlib, io, json, sys
def first(*names):
    for name in names:
        module, _, attribute = name.rpartition(".")
        try:
            return getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError) as error:
            kept = error
    raise kept
def flags(parser):
    for action in parser._actions:
        yield from action.option_strings
        for inner in (action.choices.values() if isinstance(action.choices, dict) else ()):
            if hasattr(inner, "_actions"):
                yield from flags(inner)
answer, said = {"error": None, "unchecked": None, "flags": []}, io.StringIO()
try:
%s
    answer["flags"] = sorted(set(flags(parser)))
except Exception as error:
    answer["unchecked"] = type(error).__name__ + ": " + str(error)[:300]
else:
    try:
        with contextlib.redirect_stderr(said):
            parser.parse_args(words)
    except SystemExit as end:
        if end.code:
            answer["error"] = said.getvalue().strip()[-2000:] or "exit code " + str(end.code)
    except Exception as error:
        answer["error"] = type(error).__name__ + ": " + str(error)[:1000]
print()
print("@answer " + json.dumps(answer))
"""


def program(engine: str) -> str:
    """The program for ``python3 -c PROGRAM serve …`` inside an image of the engine."""
    body = "\n".join(f"    {line}" for line in BUILDERS[engine].strip().splitlines())
    return _PROGRAM % body


def answer_of(out: str) -> dict[str, Any] | None:
    """What the program said, or None: it did not come to its end."""
    for line in reversed(out.splitlines()):
        if line.startswith(_MARK):
            return dict(json.loads(line.removeprefix(_MARK)))
    return None


def refusal(error: str, flags: Sequence[str]) -> str:
    """The parser's error in one sentence, with the nearest flag where it does not know one."""
    line = next(
        (text for text in reversed(error.splitlines()) if "error: " in text), error.splitlines()[-1] if error else ""
    )
    said = line.split("error: ", 1)[-1].strip().rstrip(".")
    unknown = re.search(r"unrecognized arguments: (--[\w.-]+)", said)
    near = difflib.get_close_matches(unknown[1].replace("_", "-"), flags, n=1, cutoff=0.6) if unknown else []
    return f"{said}." + (f" Did you mean {near[0]}?" if near else "")
