# Copyright (c) The gb10.fleet maintainers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What no engine's parser checks: ranges, and settings that have to fit to each other. Pure functions over a normalised recipe."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ansible_collections.gb10.fleet.plugins.module_utils._recipe import RecipeError


def _number(args: Mapping[str, Any], *names: str) -> float | None:
    found = next((args[name] for name in names if name in args), None)
    return found if isinstance(found, (int, float)) and not isinstance(found, bool) else None


def draft_rows(recipe: Mapping[str, Any]) -> float | None:
    """Tokens that one decode step of a full batch verifies: max-num-seqs × (drafted tokens + 1). None without a drafter."""
    config, seqs = recipe["args"].get("speculative-config"), _number(recipe["args"], "max-num-seqs")
    if not isinstance(config, Mapping) or seqs is None:
        return None
    return seqs * (int(config.get("num_speculative_tokens") or 0) + 1)


def check(recipe: Mapping[str, Any]) -> None:
    """Raise RecipeError for what cannot serve; one sentence that names the key, what was found and what is wanted."""
    if recipe["engine"] != "vllm":
        return
    args = recipe["args"]
    length, batched = _number(args, "max-model-len"), _number(args, "max-num-batched-tokens")
    block, most = _number(args, "block-size"), recipe["limits"]["context_tokens"]
    if length is not None and most is not None and length > most:
        raise RecipeError(f"args.max-model-len is {length}, over the model's limit here of {most} tokens.")
    if block and batched is not None and batched < block:
        raise RecipeError(
            f"args.max-num-batched-tokens is {batched}, under the block of {block} tokens: no step could fill a block of the "
            f"prefix cache. Wanted {block} or a multiple of it."
        )
    if block and length is not None and length < 2 * block:
        raise RecipeError(
            f"args.max-model-len is {length}, under two blocks of {block} tokens: the prefix cache could never hit. "
            f"Wanted {2 * block} or more."
        )
    rows = draft_rows(recipe)
    if rows and batched is not None and batched < rows:
        raise RecipeError(
            f"args.max-num-batched-tokens is {batched}, but max-num-seqs {args['max-num-seqs']} with a drafter verifies {rows} "
            f"tokens a step. Wanted {rows} or more."
        )


def warnings(recipe: Mapping[str, Any]) -> list[str]:
    """Sentences about what may go wrong although it can start."""
    out = []
    args, limit = recipe["args"], recipe["limits"]["gpu_memory_utilization"]
    used = _number(args, "gpu-memory-utilization")
    if used is not None and used > limit:
        out.append(
            f"recipe {recipe['name']}: gpu-memory-utilization {used} is over {limit}, the largest value that is known to be safe "
            "(0.87 has crashed heads). Keep the memory guard on."
        )
    rows, sizes = draft_rows(recipe), args.get("cudagraph-capture-sizes")
    if rows and isinstance(sizes, list) and sizes and rows > max(sizes):
        out.append(
            f"recipe {recipe['name']}: a full batch decodes {rows} tokens a step, but cudagraph-capture-sizes end at {max(sizes)}: "
            f"it would run without a graph. Add {rows}, or lower max-num-seqs."
        )
    return out
