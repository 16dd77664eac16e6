"""The program as systemd runs it: its start, its signals, TLS, and a configuration that it cannot use."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import signal
import socket
import ssl
import subprocess
import sys
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from stub_engine import StubEngine

FILES = Path(__file__).resolve().parents[3] / "roles/gateway/files"
BODY = {"model": "m", "stream": True}


def configure(folder: Path, **changes: Any) -> Path:
    keys = folder / "keys.json"
    keys.write_text(json.dumps([{"name": "a", "sha256": hashlib.sha256(b"first").hexdigest()}]))
    keys.chmod(0o600)
    config = {
        "upstream": "http://127.0.0.1:9",
        "model": "m",
        "lanes": {"all": {"aliases": ["m"], "max_concurrent": 4}},
        "keys_file": str(keys),
        "hold_file": str(folder / "hold"),
        **changes,
    }
    path = folder / "gateway.json"
    path.write_text(json.dumps(config))
    return path


def start(config: Path, *more: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "gateway", "--config", str(config), *more],
        env={**os.environ, "PYTHONPATH": str(FILES), "PYTHONDONTWRITEBYTECODE": "1"},
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"lane": {}}, "has the unknown key lane; known are"),
        ({"lanes": {}}, "lanes is missing, wanted at least one."),
        ({"lanes": {"a": {"aliases": ["m"]}, "b": {"aliases": ["m"]}}}, "two lanes have the same alias"),
        ({"lanes": {"a": {"aliases": ["m"], "max": 1}}}, "lane a has the unknown key max"),
        ({"keys_file": None, "host": "0.0.0.0"}, "No key is set and the gateway would listen on 0.0.0.0"),
        ({"tls_certificate": "/nowhere.pem"}, "the certificate /nowhere.pem cannot be used"),
    ],
)
def test_a_configuration_that_cannot_be_used(tmp_path: Path, changes: dict[str, Any], sentence: str) -> None:
    process = start(configure(tmp_path, **changes), "--check")
    _out, said = process.communicate(timeout=20)
    assert process.returncode == 2 and sentence in said
    assert "Traceback" not in said


def certificate(folder: Path) -> dict[str, str]:
    files = {"tls_certificate": str(folder / "tls.pem"), "tls_key": str(folder / "tls.key")}
    argv = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    argv += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", files["tls_key"], "-out", files["tls_certificate"]]
    subprocess.run(argv, check=True, capture_output=True, timeout=30)
    return files


def test_its_life_with_tls(tmp_path: Path) -> None:
    """Ready to systemd, new keys at SIGHUP while a stream runs, SIGTERM lets that stream end and refuses others."""

    async def life() -> None:
        engine = StubEngine(chunks=60, delay_s=0.05)
        await engine.start()
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        files = certificate(tmp_path)
        config = configure(tmp_path, upstream=f"http://127.0.0.1:{engine.port}", port=port, **files)
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
            systemd.bind(str(tmp_path / "notify"))
            systemd.settimeout(20)
            os.environ["NOTIFY_SOCKET"] = str(tmp_path / "notify")
            process = start(config)
            del os.environ["NOTIFY_SOCKET"]
            said = await asyncio.to_thread(systemd.recv, 100)
        assert said == b"READY=1"
        trusted = ssl.create_default_context(cafile=files["tls_certificate"])
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=trusted)) as client:

            async def ask(key: str) -> tuple[int, bytes]:
                url, headers = f"https://127.0.0.1:{port}/v1/chat/completions", {"Authorization": f"Bearer {key}"}
                async with client.post(url, json=BODY, headers=headers) as answer:
                    return answer.status, await answer.read()

            stream = asyncio.ensure_future(ask("first"))
            while engine.running == 0:
                await asyncio.sleep(0.02)
            (tmp_path / "keys.json").write_text(
                json.dumps([{"name": "b", "sha256": hashlib.sha256(b"second").hexdigest()}])
            )
            process.send_signal(signal.SIGHUP)
            for _turn in range(100):
                if (await ask("wrong"))[0] == 401 and (await ask("first"))[0] == 401:
                    break
                await asyncio.sleep(0.02)
            process.send_signal(signal.SIGTERM)
            await asyncio.sleep(0.2)
            status, body = await ask("second")
            assert status == 503 and b"the gateway is stopping" in body
            status, body = await stream
            assert status == 200 and body.endswith(b"data: [DONE]\n\n")
        _out, log = await asyncio.to_thread(process.communicate, None, 20)
        assert process.returncode == 0, log
        assert "keys are read again" in log and "key=a status=200 outcome=ok" in log
        assert "first" not in log.replace("first_byte", "") and "second" not in log
        await engine.stop()

    asyncio.run(asyncio.wait_for(life(), 60))
