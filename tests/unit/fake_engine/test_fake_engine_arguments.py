"""The fake engine's command line: the recorded options, and the real parser's words (run in the real image)."""

from __future__ import annotations

import json

import pytest
from fake_engine import arguments

from .conftest import recorded

OPTIONS = json.loads(recorded("flags.json"))["options"]
# An argument that each kind of option takes.
SAMPLES = {"int": "1", "float": "0.5", "human_readable_int": "2k", "human_readable_int_or_auto": "auto"}
SAMPLES |= dict.fromkeys(("loads", "parse_dataclass", "union_dict_and_str", "<lambda>"), "{}")


def sample(option: dict[str, object]) -> str:
    if option["choices"]:
        return str(option["choices"][0])  # type: ignore[index]
    kind = str(option["type"] or "").partition(":")[0]
    return SAMPLES.get(str(option["inner_type"] or "str") if kind == "_optional_type" else kind, "text")


def test_every_recorded_option_is_taken() -> None:
    assert len(OPTIONS) > 300
    for option in OPTIONS:
        if not option["flags"] or option["action"] == "_HelpAction":
            continue
        for flag in option["flags"]:
            bare = option["nargs"] == 0
            words = [flag] if bare else [flag, sample(option)]
            assert option["dest"] in arguments.parse(["serve", "m", *words]) or flag.startswith("--no-"), words


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--nope", "1"], "vllm: error: unrecognized arguments: --nope 1"),
        (
            ["--tensor-parallel-size", "two"],
            "vllm serve: error: argument --tensor-parallel-size/-tp: invalid int value: 'two'",
        ),
        (["--block_size"], "vllm serve: error: argument --block-size: expected one argument"),
        (
            ["--kv-cache-dtype", "fp9"],
            "vllm serve: error: argument --kv-cache-dtype: invalid choice: 'fp9' (choose from 'auto', 'bfloat16', ",
        ),
    ],
)
def test_bad_flag(words: list[str], error: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Exit 2 and the line that real vLLM 0.32 ended with for the same arguments."""
    with pytest.raises(SystemExit) as ended:
        arguments.parse(["serve", "m", *words])
    assert ended.value.code == 2
    last = capfd.readouterr().err.rstrip().splitlines()[-1]
    # Python 3.12 lists choices without quotes.
    assert last.replace("'", "").startswith(error.replace("'", ""))


@pytest.mark.parametrize(
    ("words", "dest", "value"),
    [
        (["--kv-cache-memory", "1000"], "kv_cache_memory_bytes", 1000),
        (["--kv_cache_memory_bytes", "64M"], "kv_cache_memory_bytes", 67108864),
        (["--max-model-len", "256k"], "max_model_len", 256000),
        (["--gpu-memory-utilization", "1.7"], "gpu_memory_utilization", 1.7),
        (
            ["--speculative-config.method", "mtp", "--speculative-config.num_speculative_tokens", "4"],
            "speculative_config",
            {"method": "mtp", "num_speculative_tokens": 4},
        ),
        (["-cc.mode=1", "-cc.backend=eager"], "compilation_config", {"mode": 1, "backend": "eager"}),
        (["--served-model-name", "a", "b"], "served_model_name", ["a", "b"]),
        (["--headless"], "headless", True),
    ],
)
def test_flexible_forms(words: list[str], dest: str, value: object) -> None:
    """Abbreviations, underscores, units, dotted JSON; ranges are not checked (facts of the real parser)."""
    assert arguments.parse(["serve", "m", *words])[dest] == value


def test_other_commands(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        arguments.parse(["--version"])
    assert (ended.value.code, capfd.readouterr().out.strip()) == (0, "0.32.0")
    with pytest.raises(SystemExit) as ended:
        arguments.parse(["serv", "m"])
    assert ended.value.code == 2
