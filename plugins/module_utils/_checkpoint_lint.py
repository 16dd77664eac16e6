# Copyright (c) The gb10.fleet maintainers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A checkpoint against the recipe that wants to serve it, before anything starts: config.json and headers only. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

ERROR, WARNING = "error", "warning"
GIB = 1 << 30


def _first(config: Mapping[str, Any], *names: str) -> Any:
    """A value of config.json; multimodal models keep their decoder's values in text_config."""
    inner = config.get("text_config")
    for place in (config, inner if isinstance(inner, Mapping) else {}):
        for name in names:
            if place.get(name) is not None:
                return place[name]
    return None


def quantization_of(config: Mapping[str, Any]) -> str | None:
    """``quant_method`` of config.json (compressed-tensors, modelopt, exl3, …), or None for plain weights."""
    quantization = _first(config, "quantization_config", "compression_config")
    if not isinstance(quantization, Mapping):
        return None
    method = quantization.get("quant_method") or ("compressed-tensors" if quantization.get("format") else None)
    return str(method).lower() if method else None


def lint(
    config: Mapping[str, Any], tensors: Mapping[str, Any], recipe: Mapping[str, Any], memory_bytes: int | None
) -> list[dict[str, str]]:
    """Findings, each with ``severity``, ``code`` and a sentence.

    :param config: config.json. :param tensors: ``bytes`` of all tensors, ``mtp`` names of speculation weights, ``layers``.
    :param recipe: normalised. :param memory_bytes: MemTotal of the node (unified memory: the GPU's, too).
    """
    found: list[dict[str, str]] = []

    def say(severity: str, code: str, text: str) -> None:
        found.append({"severity": severity, "code": code, "text": f"{text} [{code}]"})

    name = recipe["checkpoint"]["repo"]
    if not config:
        say(
            ERROR,
            "config-missing",
            f"{name} has no readable config.json, so no engine can load it: check include and exclude.",
        )
        return found
    _shape(config, tensors, recipe, say)
    _quantization(config, recipe, say)
    _speculation(config, tensors, recipe, say)
    _memory(tensors, recipe, memory_bytes, say)
    _blocks(recipe, say)
    return found


def _shape(config: Mapping[str, Any], tensors: Mapping[str, Any], recipe: Mapping[str, Any], say: Any) -> None:
    tensor, pipeline = recipe["parallel"]["tensor"], recipe["parallel"]["pipeline"]
    heads = _first(config, "num_attention_heads")
    if isinstance(heads, int) and heads % tensor:
        say(
            ERROR,
            "tensor-parallel",
            f"{heads} attention heads cannot be split over parallel.tensor {tensor}: choose a divisor of {heads}.",
        )
    kv = _first(config, "num_key_value_heads")
    if isinstance(kv, int) and kv % tensor and tensor % kv:
        say(WARNING, "kv-heads", f"{kv} key-value heads over parallel.tensor {tensor}: they are replicated unevenly.")
    layers = _first(config, "num_hidden_layers")
    if isinstance(layers, int) and layers < pipeline:
        say(
            ERROR,
            "pipeline-parallel",
            f"{layers} layers cannot be split over parallel.pipeline {pipeline}: choose {layers} or less.",
        )
    held = tensors.get("layers")
    if isinstance(layers, int) and isinstance(held, int) and 0 < held < layers:
        say(
            WARNING,
            "layers",
            f"config.json names {layers} layers, the weights hold {held}: layers may have been pruned away by mistake.",
        )


def _quantization(config: Mapping[str, Any], recipe: Mapping[str, Any], say: Any) -> None:
    checkpoint = recipe["checkpoint"]
    method, wanted = quantization_of(config), checkpoint["quantization"]
    if wanted and method != str(wanted).lower():
        better = next((r["instead"] for r in checkpoint["refused"] if r.get("instead")), None)
        hint = (
            f" Use {better}."
            if better and better != checkpoint["repo"]
            else " Fetch the build that the recipe was made for."
        )
        reasons = [r["reason"] for r in checkpoint["refused"] if method and method in r["reason"].lower()]
        why = f" ({reasons[0]})" if reasons else ""
        say(
            ERROR,
            "quantization",
            f"{checkpoint['repo']} is quantized by {method or 'nothing'}{why}, the recipe wants {wanted}.{hint}",
        )
    asked = recipe["args"].get("quantization")
    if asked and method and str(asked).lower() not in (method, method.replace("-", "_")):
        say(
            ERROR,
            "quantization-arg",
            f"args.quantization is {asked}, but the checkpoint is quantized by {method}: remove the argument.",
        )


def _speculation(config: Mapping[str, Any], tensors: Mapping[str, Any], recipe: Mapping[str, Any], say: Any) -> None:
    speculation = recipe["args"].get("speculative-config")
    method = str(speculation.get("method", "")) if isinstance(speculation, Mapping) else ""
    if "mtp" not in method:
        return
    predicted = _first(config, "num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers")
    layers, held = _first(config, "num_hidden_layers"), tensors.get("layers")
    beyond = isinstance(layers, int) and isinstance(held, int) and held > layers
    if not predicted and not tensors.get("mtp") and not beyond:
        say(
            ERROR,
            "mtp",
            "The recipe speculates with MTP, but this checkpoint has no MTP layers: remove "
            "args.speculative-config or fetch a build with them.",
        )
    elif predicted and not tensors.get("mtp") and not beyond and held:
        say(
            ERROR,
            "mtp-weights",
            f"config.json promises {predicted} MTP layers, but their weights are in no file: they were stripped from this build.",
        )


def _memory(tensors: Mapping[str, Any], recipe: Mapping[str, Any], memory_bytes: int | None, say: Any) -> None:
    size = tensors.get("bytes") or 0
    ranks = recipe["parallel"]["tensor"] * recipe["parallel"]["pipeline"]
    utilization = recipe["args"].get("gpu-memory-utilization", 0.9)
    if recipe["container"]["gpus"] is None or not memory_bytes or not size or not isinstance(utilization, (int, float)):
        return
    share, budget = size / ranks, utilization * memory_bytes
    if share > budget:
        say(
            ERROR,
            "memory",
            f"Each of {ranks} ranks loads {share / GIB:.1f} GiB of weights, {utilization} × "
            f"{memory_bytes / GIB:.1f} GiB = {budget / GIB:.1f} GiB "
            "are allowed: take more nodes or a smaller build.",
        )
    elif share > 0.92 * budget:
        say(
            WARNING,
            "memory-tight",
            f"Weights take {share / GIB:.1f} of {budget / GIB:.1f} GiB per rank: hardly any KV cache is left.",
        )


def _blocks(recipe: Mapping[str, Any], say: Any) -> None:
    args = recipe["args"]
    block, batched, length = args.get("block-size"), args.get("max-num-batched-tokens"), args.get("max-model-len")
    if not isinstance(block, int) or isinstance(block, bool) or block <= 0:
        return
    if isinstance(batched, int):
        if batched < block:
            say(
                ERROR,
                "block",
                f"max-num-batched-tokens {batched} is less than block-size {block}: no block is ever filled. Set {block} or more.",
            )
        elif batched % block:
            whole = batched // block * block
            say(
                WARNING,
                "block-alignment",
                f"max-num-batched-tokens {batched} is no multiple of block-size {block}: only {whole} of them are used. "
                f"{whole + block} = {whole // block + 1} × {block} aligns.",
            )
    if isinstance(length, int) and length < 2 * block:
        say(
            WARNING,
            "block-length",
            f"max-model-len {length} is less than two blocks of {block}: the prefix cache can hardly hit.",
        )
