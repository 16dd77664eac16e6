# Copyright (c) The gb10.fleet maintainers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""As vllm.entrypoints.openai.cli_args: the recorded options."""

from __future__ import annotations

import argparse
import sys

sys.path.insert(0, "/opt/fake-engine")

from fake_engine import arguments


class Recorded(arguments.Parser):
    """The recorded parser; words in any of vLLM's spellings."""

    def parse_args(self, args: list[str]) -> argparse.Namespace:  # type: ignore[override]
        given, unknown = self.parse_known_args(arguments.flexible(args))
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return given


def make_arg_parser(_parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    parser, _order = arguments.build()
    parser.__class__ = Recorded
    return parser
