# Copyright (c) The gb10.fleet maintainers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Stands for a start patch of the EXL3 kit: reads its setting as the real one does, and says what it did."""

import os
import sys

setting = os.environ.get("GLM53_SPINWAIT_MS", "")
if setting != "stock" and not (setting.isdigit() and 1 <= int(setting) <= 1000):
    sys.exit(f"GLM53_SPINWAIT_MS must be stock or between 1 and 1000 (got: {setting})")
print(f"[kit] spin wait {setting}", flush=True)
