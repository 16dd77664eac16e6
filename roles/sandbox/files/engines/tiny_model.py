#!/usr/bin/env python3
# Copyright (c) The gb10.fleet maintainers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Write the sandbox's checkpoint: a tiny Llama which answers one readable sentence.

Nothing is downloaded and nothing but Python's own library is needed. The tokenizer (byte-level BPE, 512 entries) is
trained here; the weights are computed, not trained: the embedding of a token of ``SENTENCE`` points to the output row of
the token after it, attention and MLP add a small noise. So a served answer is the sentence, whatever is asked: a check
that looks for replacement characters or an empty answer means something, which random weights would not allow.
The bytes are the same on every machine and Python version (integers and exact products of doubles only).

    tiny_model.py DIRECTORY [--layers 2] [--shards 1]
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import re
import struct
import sys
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

SENTENCE = "Hello from a tiny model: all ranks of this cluster computed these words together, over the fabric."
# Seen by the tokenizer's training only: common words keep prompts short.
CORPUS = (
    [SENTENCE] * 40
    + ["You are a helpful assistant. "] * 20
    + ["Hello, how are you today? The quick brown fox jumps over the lazy dog. "] * 10
    + ["Answer in one sentence: which two nodes serve this model, and what is the capital of France?"] * 5
    + ["user system assistant tool role content name function value result token count 0 1 2 3 4 5 6 7 8 9"] * 5
)
SPECIAL = ["<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
BOS, EOS, PAD = "<s>", "<|im_end|>", "<pad>"
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
VOCAB, HIDDEN, HEADS, INTERMEDIATE = 512, 128, 4, 256
# GPT-2's split, for ASCII text (which the corpus is).
SPLIT = re.compile(r"'s|'t|'re|'ve|'m|'ll|'d| ?[A-Za-z]+| ?[0-9]+| ?[^\sA-Za-z0-9]+|\s+(?!\S)|\s+")


def byte_alphabet() -> dict[int, str]:
    """Byte -> printable character, as GPT-2's byte-level BPE and the `tokenizers` library map them."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    table = {byte: chr(byte) for byte in printable}
    for byte in range(256):
        if byte not in table:
            table[byte] = chr(256 + len(table) - len(printable))
    return table


def words(text: str) -> list[str]:
    """`text` split as the byte-level pre-tokenizer splits it, in the byte alphabet's characters."""
    alphabet = byte_alphabet()
    return ["".join(alphabet[byte] for byte in word.encode()) for word in SPLIT.findall(text)]


def merged(symbols: tuple[str, ...], pair: tuple[str, str]) -> tuple[str, ...]:
    """`symbols` with every occurrence of `pair` made one symbol, left to right."""
    out: list[str] = []
    i = 0
    while i < len(symbols):
        if symbols[i : i + 2] == pair:
            out.append(pair[0] + pair[1])
            i += 2
        else:
            out.append(symbols[i])
            i += 1
    return tuple(out)


def train(corpus: list[str], size: int) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Byte-pair encoding of at most `size` entries: (token -> id, merges in order). Ties go to the smaller pair."""
    vocabulary = {token: number for number, token in enumerate(SPECIAL)}
    for character in sorted(byte_alphabet().values()):
        vocabulary[character] = len(vocabulary)
    counts = Counter(word for text in corpus for word in words(text))
    split = {word: tuple(word) for word in counts}
    merges: list[tuple[str, str]] = []
    while len(vocabulary) < size:
        pairs: Counter[tuple[str, str]] = Counter()
        for word, symbols in split.items():
            for pair in pairwise(symbols):
                pairs[pair] += counts[word]
        if not pairs:
            break
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        merges.append(best)
        vocabulary.setdefault(best[0] + best[1], len(vocabulary))
        split = {word: merged(symbols, best) for word, symbols in split.items()}
    return vocabulary, merges


def encode(text: str, vocabulary: dict[str, int], merges: list[tuple[str, str]]) -> list[int]:
    """Token numbers of `text`, without special tokens."""
    out: list[int] = []
    for word in words(text):
        symbols = tuple(word)
        for pair in merges:
            symbols = merged(symbols, pair)
        out += [vocabulary[symbol] for symbol in symbols]
    return out


def tokenizer_json(vocabulary: dict[str, int], merges: list[tuple[str, str]]) -> dict[str, object]:
    """The file of the `tokenizers` library."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": vocabulary[token], "content": token, "single_word": False, "lstrip": False, "rstrip": False}
            | {"normalized": False, "special": True}
            for token in SPECIAL
        ],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocabulary,
            "merges": [list(pair) for pair in merges],
        },
    }


def bfloat16(value: float) -> bytes:
    """`value` rounded to nearest even, little endian."""
    (bits,) = struct.unpack("<I", struct.pack("<f", value))
    return struct.pack("<H", (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16)


def chain(sentence: list[int]) -> dict[int, int]:
    """Token -> token after it: the sentence, its end, and round again; every other token leads to its start."""
    if len(set(sentence)) != len(sentence):
        raise ValueError("a token stands twice in the sentence: the chain would loop")
    if len(sentence) + 2 > HIDDEN:
        raise ValueError(f"{len(sentence)} tokens in the sentence, {HIDDEN - 2} at most")
    end = SPECIAL.index(EOS)
    return dict(zip(sentence, [*sentence[1:], end], strict=True)) | {end: sentence[0]}


def tensors(layers: int, sentence: list[int]) -> Iterator[tuple[str, tuple[int, ...], bytes]]:
    """Name, shape and bfloat16 bytes of each tensor, one at a time."""
    noise = random.Random(20260101)  # noqa: S311  reproducible on purpose

    def matrix(rows: int, columns: int, scale: float) -> list[list[float]]:
        return [[(noise.random() * 2 - 1) * scale for _column in range(columns)] for _row in range(rows)]

    def packed(name: str, rows: list[list[float]]) -> tuple[str, tuple[int, ...], bytes]:
        return name, (len(rows), len(rows[0])), b"".join(bfloat16(value) for row in rows for value in row)

    follows = chain(sentence)
    direction = {token: number + 1 for number, token in enumerate(follows)}  # dimension 0: every other token
    embedding, head = matrix(VOCAB, HIDDEN, 1 / 16), matrix(VOCAB, HIDDEN, 1 / 64)
    for token in range(VOCAB):
        embedding[token][direction.get(token, 0)] = 8.0
    for token, after in follows.items():
        head[after][direction[token]] = 4.0
    head[sentence[0]][0] = 4.0
    yield packed("model.embed_tokens.weight", embedding)
    ones = b"".join([bfloat16(1.0)] * HIDDEN)
    for layer in range(layers):
        at = f"model.layers.{layer}"
        yield f"{at}.input_layernorm.weight", (HIDDEN,), ones
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            yield packed(f"{at}.self_attn.{name}.weight", matrix(HIDDEN, HIDDEN, 1 / 32))
        yield f"{at}.post_attention_layernorm.weight", (HIDDEN,), ones
        yield packed(f"{at}.mlp.gate_proj.weight", matrix(INTERMEDIATE, HIDDEN, 1 / 32))
        yield packed(f"{at}.mlp.up_proj.weight", matrix(INTERMEDIATE, HIDDEN, 1 / 32))
        yield packed(f"{at}.mlp.down_proj.weight", matrix(HIDDEN, INTERMEDIATE, 1 / 32))
    yield "model.norm.weight", (HIDDEN,), ones
    yield packed("lm_head.weight", head)


def safetensors(parts: list[tuple[str, tuple[int, ...], bytes]]) -> bytes:
    """One file of the safetensors format: length of the header, header (JSON), data."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape, data in parts:
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [offset, offset + len(data)]}
        offset += len(data)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + b"".join(data for _name, _shape, data in parts)


def shard_files(parts: list[tuple[str, tuple[int, ...], bytes]], shards: int) -> dict[str, bytes]:
    """File name -> content: one `model.safetensors`, or `shards` files and their index."""
    if shards == 1:
        return {"model.safetensors": safetensors(parts)}
    groups = [parts[number::shards] for number in range(shards)]
    names = [f"model-{number + 1:05d}-of-{shards:05d}.safetensors" for number in range(shards)]
    where = {name: file for file, group in zip(names, groups, strict=True) for name, _shape, _data in group}
    index = {"metadata": {"total_size": sum(len(data) for _n, _s, data in parts)}, "weight_map": where}
    out = {name: safetensors(group) for name, group in zip(names, groups, strict=True)}
    return out | {"model.safetensors.index.json": as_json(index)}


def as_json(value: object) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()


def files(layers: int = 2, shards: int = 1) -> dict[str, bytes]:
    """File name -> content of the whole checkpoint."""
    vocabulary, merges = train(CORPUS, VOCAB)
    sentence = encode(SENTENCE, vocabulary, merges)
    special = {"bos_token_id": vocabulary[BOS], "eos_token_id": vocabulary[EOS], "pad_token_id": vocabulary[PAD]}
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "dtype": "bfloat16",
        "head_dim": HIDDEN // HEADS,
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "initializer_range": 0.02,
        "intermediate_size": INTERMEDIATE,
        "max_position_embeddings": 4096,
        "mlp_bias": False,
        "num_attention_heads": HEADS,
        "num_hidden_layers": layers,
        "num_key_value_heads": HEADS,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "vocab_size": VOCAB,
    }
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 4096,
        "chat_template": CHAT_TEMPLATE,
    }
    return {
        "config.json": as_json(config | special),
        "generation_config.json": as_json(special | {"do_sample": True, "temperature": 1.0}),
        "tokenizer.json": as_json(tokenizer_json(vocabulary, merges)),
        "tokenizer_config.json": as_json(tokenizer_config),
        **shard_files(list(tensors(layers, sentence)), shards),
    }


def write(directory: Path, content: dict[str, bytes]) -> bool:
    """Write what differs, remove weights of an earlier shape; True when something changed. Readable by any user."""
    directory.mkdir(parents=True, exist_ok=True)
    changed = False
    for old in directory.glob("model*.safetensors*"):
        if old.name not in content:
            old.unlink()
            changed = True
    for name, data in content.items():
        target = directory / name
        if target.is_file() and target.read_bytes() == data:
            continue
        partial = directory / f".{name}.partial"
        with partial.open("wb") as handle:
            handle.write(data)
            handle.flush()
            os.fsync(handle.fileno())
        partial.chmod(0o644)
        partial.replace(target)
        changed = True
    return changed


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Write the sandbox's tiny checkpoint.")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--layers", type=int, default=2, help="decoder layers; pipeline parallel wants one per stage")
    parser.add_argument("--shards", type=int, default=1, help="weight files")
    arguments = parser.parse_args(argv)
    if arguments.layers < 1 or arguments.shards < 1:
        parser.error("--layers and --shards are 1 or more")
    content = files(arguments.layers, arguments.shards)
    changed = write(arguments.directory, content)
    digest = hashlib.sha256(b"".join(name.encode() + data for name, data in sorted(content.items()))).hexdigest()
    size = sum(map(len, content.values()))
    print(json.dumps({"changed": changed, "bytes": size, "files": sorted(content), "sha256": digest}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
