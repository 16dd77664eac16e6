"""The tiny checkpoint: its bytes, its format, and the sentence that it was made to say."""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path

import pytest
import tiny_model

# As served by real vLLM 0.32 (CPU), two nodes, tensor parallel 2: it answered SENTENCE with 21 tokens.
SERVED = "26276ef5dc9629b604b5aeee8a20ea5beaabb6753ed01473db9da296749eeb75"


def digest(content: dict[str, bytes]) -> str:
    return hashlib.sha256(b"".join(name.encode() + data for name, data in sorted(content.items()))).hexdigest()


def read_safetensors(data: bytes) -> dict[str, tuple[list[int], bytes]]:
    (size,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + size])
    body = data[8 + size :]
    return {
        name: (entry["shape"], body[entry["data_offsets"][0] : entry["data_offsets"][1]])
        for name, entry in header.items()
        if name != "__metadata__"
    }


def test_bytes_are_the_served_ones() -> None:
    assert digest(tiny_model.files()) == SERVED


def test_the_chain_says_the_sentence() -> None:
    """Embedding of a token times output rows: the next token wins by far, whatever stood before."""
    tensors = read_safetensors(tiny_model.files()["model.safetensors"])
    rows: dict[str, list[list[float]]] = {}
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        (count, width), data = tensors[name]
        values = [struct.unpack("<f", b"\0\0" + data[i : i + 2])[0] for i in range(0, len(data), 2)]
        rows[name] = [values[row * width : (row + 1) * width] for row in range(count)]
    vocabulary, merges = tiny_model.train(tiny_model.CORPUS, tiny_model.VOCAB)
    names = {number: token for token, number in vocabulary.items()}
    token, said = vocabulary["Ċ"], ""  # the newline that ends the template's "assistant"
    for _step in range(30):
        embedded = rows["model.embed_tokens.weight"][token]
        scores = [sum(a * b for a, b in zip(embedded, row, strict=True)) for row in rows["lm_head.weight"]]
        token = max(range(len(scores)), key=scores.__getitem__)
        assert sorted(scores)[-1] > 4 * abs(sorted(scores)[-2])
        if names[token] == tiny_model.EOS:
            break
        said += names[token].replace("Ġ", " ")
    assert said == tiny_model.SENTENCE
    assert len(tiny_model.encode(tiny_model.SENTENCE, vocabulary, merges)) == 20


def test_layers_and_shards() -> None:
    content = tiny_model.files(layers=3, shards=2)
    index = json.loads(content["model.safetensors.index.json"])
    files = set(index["weight_map"].values())
    assert files == {"model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"}
    held = {name for file in files for name in read_safetensors(content[file])}
    assert held == set(index["weight_map"])
    assert "model.layers.2.mlp.down_proj.weight" in held
    assert json.loads(content["config.json"])["num_hidden_layers"] == 3


def test_written_once(tmp_path: Path) -> None:
    content = tiny_model.files(shards=2)
    assert tiny_model.write(tmp_path, content)
    assert not tiny_model.write(tmp_path, content)
    assert tiny_model.write(tmp_path, tiny_model.files())
    assert not list(tmp_path.glob("model-0*")), "shards of an earlier shape are gone"
    assert (tmp_path / "config.json").stat().st_mode & 0o444 == 0o444


def test_a_sentence_that_would_loop_is_refused() -> None:
    with pytest.raises(ValueError, match="stands twice"):
        tiny_model.chain([5, 6, 5])
