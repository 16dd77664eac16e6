# Copyright (c) The gb10.fleet maintainers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Which requests warm an engine up. Pure functions.

A kernel that is compiled in the middle of serving has ended clusters by timeout (case launch-exec-timeout): the shapes that
users will bring are sent once before they do.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SHORT, LONG_ANSWER = 16, 64


def _int(value: Any, default: int) -> int:
    try:
        return int(str(value).replace("_", ""))
    except ValueError:
        return default


def warmup_plan(recipe: Mapping[str, Any], kind: str | None = None) -> list[dict[str, int]]:
    """The requests of a warm-up: ``[{prompt_tokens, max_tokens, concurrency}]``.

    ``none``: nothing. ``chat``: a short and a longer question. ``shapes``: one chunk and a little more than one chunk of prefill
    (max-num-batched-tokens), a prompt across two blocks of the prefix cache, and 1, 2, 4 ... max-num-seqs answers at once.

    :param kind: instead of the recipe's ``warmup``.
    """
    kind = kind or str(recipe.get("warmup") or "chat")
    if kind == "none":
        return []
    args = {str(name).replace("_", "-"): value for name, value in (recipe.get("args") or {}).items()}
    length = _int(args.get("max-model-len"), 32768)
    room = max(length - LONG_ANSWER - SHORT, SHORT)
    plan = [(SHORT, SHORT, 1), (512, LONG_ANSWER, 1)]
    if kind == "shapes":
        batched = _int(args.get("max-num-batched-tokens"), 8192)
        block = _int(args.get("block-size"), 0)
        plan += [(batched - SHORT, SHORT, 1), (batched + batched // 4, SHORT, 1)]
        if block:
            plan.append((2 * block + SHORT, SHORT, 1))
        seats, most = 2, _int(args.get("max-num-seqs"), 4)
        while seats < most:
            plan.append((64, LONG_ANSWER, seats))
            seats *= 2
        plan.append((64, LONG_ANSWER, most))
    out: list[dict[str, int]] = []
    for prompt, answer, together in plan:
        request = {"prompt_tokens": min(prompt, room), "max_tokens": answer, "concurrency": together}
        if request not in out:
            out.append(request)
    return out
