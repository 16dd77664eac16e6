"""No secret leaves a node: planted in every place where one was seen to hide, and looked for in what comes out."""

from __future__ import annotations

import json

import pytest

from ansible_collections.gb10.fleet.plugins.module_utils import _redact

KEY = "s3cr3t-key-0123456789"


@pytest.mark.parametrize(
    "name",
    ["VLLM_API_KEY", "api-key", "--api-key", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "hf_token", "AWS_SECRET_ACCESS_KEY", "password",
     "REGISTRY_AUTH", "token", "SSH_PRIVATE_KEY", "OPENAI_API_KEY", "proxy_password"],
)  # fmt: skip
def test_names_of_secrets(name: str) -> None:
    assert _redact.is_secret(name)


@pytest.mark.parametrize(
    "name",
    ["max-tokens", "tokenizer", "max_num_batched_tokens", "eos_token", "NCCL_IB_GID_INDEX", "keep", "api_key_file", "monkey",
     "prompt_tokens", "VLLM_HOST_IP", "author"],
)  # fmt: skip
def test_names_of_no_secrets(name: str) -> None:
    assert not _redact.is_secret(name)


def test_argument_words() -> None:
    argv = ["/m", "--api-key", KEY, KEY + "2", "--port", "8000", f"--hf-token={KEY}", "--max-model-len", "2048"]
    assert _redact.words(argv) == [
        "/m", "--api-key", _redact.GONE, _redact.GONE, "--port", "8000", f"--hf-token={_redact.GONE}", "--max-model-len", "2048",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "line",
    [
        # vLLM's own line, with the value in its repr
        f"INFO 11-29 12:48:19 [api_utils.py:286] non-default args: {{'model_tag': '/m', 'api_key': ['{KEY}'], 'port': 8000}}",
        f"curl -H 'Authorization: Bearer {KEY}' http://x",
        f'{{"api_key": "{KEY}"}}',
        f"vllm serve /m --api-key {KEY} --port 8000",
        f"VLLM_API_KEY={KEY}",
        f"http://user:{KEY}@proxy.example:3128/",
        "using token hf_abcdefghijklmnopqrstuvwxyz",
        "key sk-abcdefghijklmnop0123456789",
        "-----BEGIN OPENSSH PRIVATE KEY-----\nAAAA\n-----END OPENSSH PRIVATE KEY-----",
    ],
)
def test_text(line: str) -> None:
    for said in (_redact.text(line), _redact.log(f"before\n{line}\nafter")):
        assert _redact.GONE in said
        for secret in (KEY, "hf_abc", "sk-abc", "AAAA"):
            assert secret not in said


@pytest.mark.parametrize(
    "line",
    [
        "(APIServer pid=1) INFO 06-07 13:29:19 [loggers.py:271] Engine 000: Avg prompt throughput: 2.8 tokens/s",
        "GPU KV cache size: 177,440 tokens",
        "Setting attention block size to 2304 tokens to ensure that attention page size is >= mamba page size.",
        "http://198.18.0.3:8085/sandbox/tiny",
        "{'max_tokens': 16, 'tokenizer': '/m'}",
    ],
)
def test_text_without_a_secret_stays(line: str) -> None:
    assert _redact.text(line) == line


def test_inspect_and_what_it_held() -> None:
    answer = {
        "Name": "/vllm_glm53",
        "Path": "vllm",
        "Args": ["serve", "--api-key", KEY],
        "Config": {
            "Env": [f"VLLM_API_KEY={KEY}", "NCCL_IB_GID_INDEX=3", "HF_TOKEN=hf_zzzzzzzzzzzzzzzzzzzz"],
            "Cmd": ["serve", "/m", "--api-key", KEY],
            "Entrypoint": ["vllm"],
            "Labels": {"note": f"key is {KEY}"},
        },
        "HostConfig": {"Memory": 0},
    }
    clean, known = _redact.inspect(answer)
    text = json.dumps(clean)
    assert KEY not in text
    assert "hf_zzz" not in text
    assert "NCCL_IB_GID_INDEX=3" in text
    assert known == {KEY, "hf_zzzzzzzzzzzzzzzzzzzz"}
    assert answer["Args"][2] == KEY, "the original is left alone"
    # What was found in the container's settings is taken out of its log as well, whatever it looks like there.
    assert KEY not in _redact.text(f"handshake with {KEY} failed", known)
