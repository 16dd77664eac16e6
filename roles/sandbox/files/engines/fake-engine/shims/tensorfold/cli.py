# Copyright (c) The gb10.fleet maintainers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""As tensorfold.cli: the parser that TensorFold's own start script checks with."""

import sys

sys.path.insert(0, "/opt/fake-engine")

from fake_engine.tensorfold import build_parser

__all__ = ["build_parser"]
