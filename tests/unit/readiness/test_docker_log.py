"""The log is read once: from Docker's file where that may be read, else from the engine, and then only what is new."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ansible_collections.gb10.fleet.plugins.module_utils import _docker_log
from ansible_collections.gb10.fleet.plugins.module_utils._docker_api import Docker
from ansible_collections.gb10.fleet.plugins.module_utils._docker_log import DockerLog

LOGS = Path(__file__).parents[2] / "fixtures" / "engine_logs"
LINES = [
    line for line in (LOGS / "worker_without_headless_worker.log").read_text().replace("\r", "").splitlines() if line
]


def stamp(number: int) -> str:
    return f"2026-11-29T12:49:{number // 1000:02d}.{number % 1000:03d}456789Z"


def record(number: int, line: str) -> str:
    return json.dumps({"log": line + "\n", "stream": "stderr", "time": stamp(number)}) + "\n"


def look(docker: Any, cursor: dict[str, Any] | None) -> DockerLog:
    reader = DockerLog(Docker(str(docker.path)), docker.inspect, json.loads(json.dumps(cursor)))
    reader.read()
    return reader


def test_engine_is_asked_only_for_what_is_new(docker: Any) -> None:
    docker.container()
    messages = [(stamp(i), line) for i, line in enumerate(LINES)]
    docker.messages = messages[:60]
    first = look(docker, None)
    assert first.reader.state["stage"] == "loaded"
    docker.messages = messages[:100]
    second = look(docker, first.cursor)
    assert second.reader.state["fatal"]["id"] == "launch-headless"
    docker.messages = messages
    third = look(docker, second.cursor)
    assert third.reader.state["lines"] == len(LINES), "each line once"
    assert third.cursor["bytes"] == sum(len(f"{t} {line}\n".encode()) for t, line in messages)
    assert "tail=" in docker.asked[-1]


def test_more_than_the_tail_came_in_between(docker: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(_docker_log, "_TAIL", 10)
    docker.container()
    messages = [(stamp(i), line) for i, line in enumerate(LINES)]
    docker.messages = messages[:20]
    first = look(docker, None)
    docker.messages = messages
    second = look(docker, first.cursor)
    assert second.reader.state["lines"] == len(LINES)
    assert second.reader.state["fatal"]["id"] == "launch-headless"
    assert "tail=20000" in docker.asked[-1]


def test_of_a_very_long_log_the_engine_is_asked_for_both_ends(docker: Any, monkeypatch: Any) -> None:
    """It decodes its whole file for every question without a tail."""
    monkeypatch.setattr(_docker_log, "_CAREFUL", 2000)
    monkeypatch.setattr(_docker_log, "_LONG_TAIL", 50)
    docker.container()
    start = [(stamp(i), line) for i, line in enumerate(LINES[:60])]
    chatter = [(stamp(60 + i), f'INFO:     127.0.0.1:{i} - "GET /health HTTP/1.1" 200 OK') for i in range(5000)]
    docker.messages = [
        *start,
        *chatter,
        (stamp(5060), "(EngineCore pid=7) ERROR 11-29 12:10:03 [c.py:1] EngineDeadError"),
    ]
    reader = look(docker, None)
    assert reader.reader.state["fatal"]["id"] == "engine-failed"
    assert reader.reader.state["stages"]["config"] < stamp(20)
    assert reader.reader.state["lines"] < 100
    assert "tail=50" in docker.asked[-1]


def test_a_new_start_of_the_container_begins_anew(docker: Any) -> None:
    docker.container()
    docker.messages = [(stamp(i), line) for i, line in enumerate(LINES)]
    first = look(docker, None)
    assert first.reader.state["fatal"]
    docker.container(State={"StartedAt": "2026-11-29T13:00:00Z"})
    second = look(docker, first.cursor)
    assert (second.reader.state["fatal"], second.reader.state["lines"]) == (None, 0)


def test_file_is_read_from_where_the_last_look_ended(docker: Any, tmp_path: Path) -> None:
    path = tmp_path / "c-json.log"
    docker.container(LogPath=str(path))
    records = [record(i, line) for i, line in enumerate(LINES)]
    # The third write ends in the middle of a record, as a reader may find it.
    path.write_text("".join(records[:60]) + records[60][:30])
    first = look(docker, None)
    assert (first.reader.state["lines"], first.reader.state["stage"]) == (60, "loaded")
    path.write_text("".join(records))
    second = look(docker, first.cursor)
    assert second.reader.state["lines"] == len(LINES)
    assert second.reader.state["fatal"]["id"] == "launch-headless"
    assert docker.asked == [], "the engine is not asked"


def test_file_that_was_rotated(docker: Any, tmp_path: Path) -> None:
    path = tmp_path / "c-json.log"
    docker.container(LogPath=str(path))
    records = [record(i, line) for i, line in enumerate(LINES)]
    path.write_text("".join(records[:60]))
    first = look(docker, None)
    with path.open("a") as file:
        file.write("".join(records[60:90]))
    path.rename(tmp_path / "c-json.log.1")
    path.write_text("".join(records[90:]))
    second = look(docker, first.cursor)
    assert second.reader.state["lines"] == len(LINES)


def test_lines_of_an_earlier_start_do_not_count(docker: Any, tmp_path: Path) -> None:
    """docker restart keeps the file; only what came after StartedAt is this start's."""
    path = tmp_path / "c-json.log"
    docker.container(LogPath=str(path), State={"StartedAt": stamp(100)})
    path.write_text("".join(record(i, line) for i, line in enumerate(LINES)))
    assert look(docker, None).reader.state["lines"] == len(LINES) - 100


def test_a_flood_is_searched_and_its_end_kept(docker: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(_docker_log, "_BLOCK", 20_000)
    monkeypatch.setattr(_docker_log, "_CAREFUL", 20_000)
    path = tmp_path / "c-json.log"
    docker.container(LogPath=str(path))
    chatter = [record(i, f'INFO:     127.0.0.1:{i} - "GET /health HTTP/1.1" 200 OK') for i in range(2000)]
    error = record(2000, "(EngineCore pid=7) ERROR 11-29 12:10:03 [core.py:1510] EngineCore failed to start.")
    path.write_text("".join([*chatter, error, *chatter]))
    reader = look(docker, None)
    assert reader.reader.state["fatal"]["id"] == "engine-failed"
    assert reader.reader.state["lines"] < 400
    assert reader.cursor["offset"] == path.stat().st_size
    assert reader.reader.state["last"][-1].startswith('INFO:     127.0.0.1:1999 - "GET')


def test_times() -> None:
    """Docker leaves trailing zeros out in its file and not in its answers."""
    assert _docker_log.padded("2026-11-29T12:49:00.5Z") == "2026-11-29T12:49:00.500000000Z"
    assert _docker_log.padded("2026-11-29T12:49:00Z") == "2026-11-29T12:49:00.000000000Z"
    assert _docker_log.epoch("2026-11-29T12:49:00.5Z") == "1795956540.500000000"
