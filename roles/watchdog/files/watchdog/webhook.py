# Copyright (c) The gb10.fleet maintainers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""One webhook call; the event stands on standard input."""

from __future__ import annotations

import json
import sys

from .outside import post

if __name__ == "__main__":
    post(json.load(sys.stdin))
