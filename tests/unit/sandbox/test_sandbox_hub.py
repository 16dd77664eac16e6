"""The model hub, over real HTTP on a free port."""

from __future__ import annotations

import hashlib
import http.client
import json
import threading
import time
import urllib.request

import pytest


@pytest.fixture
def hub(program, tmp_path):
    """A running hub with the repository sandbox/tiny, 300,000 bytes of weights."""
    repo = tmp_path / "models/sandbox/tiny"
    (repo / ".cache").mkdir(parents=True)
    (repo / ".cache/secret").write_text("not served")
    (repo / "config.json").write_text("hello\n")
    (repo / "model.safetensors").write_bytes(bytes(range(256)) * 1172)
    (tmp_path / "files").mkdir()
    (tmp_path / "files/huggingface_hub-1.0-py3-none-any.whl").write_bytes(b"wheel")
    (tmp_path / "files/.stamp").write_bytes(b"")
    module = program("hub")
    server = module.Hub(("127.0.0.1", 0), tmp_path / "models", tmp_path / "files", None, True)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()


def ask(hub, path, method="GET", headers=None, body=None):
    """(status, headers, body)"""
    connection = http.client.HTTPConnection("127.0.0.1", hub.server_address[1], timeout=10)
    connection.request(method, path, body=body, headers=headers or {})
    answer = connection.getresponse()
    try:
        content = answer.read()
    except http.client.IncompleteRead as error:
        content = error.partial
    connection.close()
    return answer.status, dict(answer.getheaders()), content


def rule(hub, *rules):
    assert ask(hub, "/_ctl", "POST", body=json.dumps(list(rules)))[0] == 200


WEIGHTS = "/sandbox/tiny/resolve/main/model.safetensors"
CONTENT = bytes(range(256)) * 1172


def test_git_identity(program):
    """Known to every git: the empty blob, and `hello\\n`."""
    assert program("hub").git_blob(b"") == "e69de29bb2d1d6434b8b29ae775ad8c2e48c5391"
    assert program("hub").git_blob(b"hello\n") == "ce013625030ba8dba906f756967f9e9ca394464a"


def test_tree_names_lfs_and_git_hashes(hub):
    listed = json.loads(ask(hub, "/api/models/sandbox/tiny/tree/main?recursive=true")[2])
    assert [entry["path"] for entry in listed] == ["config.json", "model.safetensors"]
    assert listed[0]["oid"] == "ce013625030ba8dba906f756967f9e9ca394464a"
    assert "lfs" not in listed[0]
    assert listed[1]["lfs"]["oid"] == hashlib.sha256(CONTENT).hexdigest()
    assert listed[1]["lfs"]["size"] == listed[1]["size"] == len(CONTENT)


def test_revision_is_a_commit_that_follows_the_content(hub):
    about = json.loads(ask(hub, "/api/models/sandbox/tiny/revision/main")[2])
    assert len(about["sha"]) == 40
    assert {file["rfilename"] for file in about["siblings"]} == {"config.json", "model.safetensors"}
    assert ask(hub, f"/api/models/sandbox/tiny/revision/{about['sha']}")[0] == 200
    (hub.store.root / "sandbox/tiny/config.json").write_text("changed\n")
    assert json.loads(ask(hub, "/api/models/sandbox/tiny")[2])["sha"] != about["sha"]
    assert ask(hub, f"/api/models/sandbox/tiny/revision/{about['sha']}")[1]["X-Error-Code"] == "RevisionNotFound"


def test_head_and_range(hub):
    status, headers, body = ask(hub, WEIGHTS, "HEAD")
    assert (status, body) == (200, b"")
    assert headers["ETag"] == headers["X-Linked-Etag"] == f'"{hashlib.sha256(CONTENT).hexdigest()}"'
    assert int(headers["Content-Length"]) == len(CONTENT)
    status, headers, body = ask(hub, WEIGHTS, headers={"Range": "bytes=100-199"})
    assert (status, body) == (206, CONTENT[100:200])
    assert headers["Content-Range"] == f"bytes 100-199/{len(CONTENT)}"
    assert ask(hub, WEIGHTS, headers={"Range": "bytes=299000-"})[2] == CONTENT[299000:]
    assert ask(hub, WEIGHTS, headers={"Range": f"bytes={len(CONTENT)}-"})[0] == 416


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("/api/models/sandbox/none", "RepoNotFound"),
        ("/api/models/../tiny", "NotFound"),
        ("/sandbox/tiny/resolve/main/none.json", "EntryNotFound"),
        ("/sandbox/tiny/resolve/main/.cache/secret", "EntryNotFound"),
        ("/sandbox/tiny/resolve/v2/config.json", "RevisionNotFound"),
    ],
)
def test_refusals_carry_the_reason_where_the_client_looks(hub, path, reason):
    status, headers, _ = ask(hub, path)
    assert status == 404
    assert headers["X-Error-Code"] in (reason, "RepoNotFound")


def test_token(hub):
    hub.token = "hf_x"
    assert ask(hub, WEIGHTS)[0] == 401
    assert ask(hub, WEIGHTS, headers={"Authorization": "Bearer hf_x"})[0] == 200


def test_ckpt_429(hub):
    """Two refusals with Retry-After, then the answer."""
    rule(hub, {"match": "GET /api/", "status": 429, "headers": {"Retry-After": "2"}, "times": 2})
    answers = [ask(hub, "/api/models/sandbox/tiny") for _ in range(3)]
    assert [status for status, _, _ in answers] == [429, 429, 200]
    assert answers[0][1]["Retry-After"] == "2"


def test_ckpt_gated(hub):
    rule(
        hub,
        {"match": "/sandbox/tiny", "unless_token": "hf_ok", "status": 403, "headers": {"X-Error-Code": "GatedRepo"}},
    )
    assert ask(hub, WEIGHTS)[1]["X-Error-Code"] == "GatedRepo"
    assert ask(hub, WEIGHTS, headers={"Authorization": "Bearer hf_ok"})[2] == CONTENT


def test_cut_flip_rate_and_delay(hub):
    rule(hub, {"match": "GET .*safetensors", "cut": 1000, "times": 1})
    assert ask(hub, WEIGHTS)[2] == CONTENT[:1000]
    assert ask(hub, WEIGHTS)[2] == CONTENT
    rule(hub, {"match": "safetensors", "flip": 5})
    changed = ask(hub, WEIGHTS)[2]
    assert [i for i, (a, b) in enumerate(zip(CONTENT, changed, strict=True)) if a != b] == [5]
    assert ask(hub, WEIGHTS, headers={"Range": "bytes=6-20"})[2] == CONTENT[6:21]
    rule(hub, {"match": "safetensors", "rate": 1e6, "delay": 0.1})
    begun = time.monotonic()
    assert ask(hub, WEIGHTS)[2] == CONTENT
    assert time.monotonic() - begun >= 0.1 + (1 << 18) / 1e6  # paced by blocks of 256 KiB; nothing follows the last one


def test_requests_and_bytes_are_counted(hub):
    rule(hub)
    ask(hub, WEIGHTS, headers={"Range": "bytes=0-99"})
    ask(hub, WEIGHTS, "HEAD")
    ask(hub, "/files/")
    state = json.loads(ask(hub, "/_ctl")[2])
    assert [(request["method"], request["range"], request["sent"]) for request in state["requests"]] == [
        ("GET", "bytes=0-99", 100),
        ("HEAD", None, 0),
    ]
    assert state["sent"] == 100


def test_a_bad_rule_is_refused(hub):
    status, _, body = ask(hub, "/_ctl", "POST", body=b'[{"match": "x", "colour": 1}]')
    assert status == 400
    assert b"colour" in body


def test_no_faults_without_ctl(hub):
    hub.ctl = False
    assert ask(hub, "/_ctl", "POST", body=b"[]")[0] == 404


def test_files_is_a_find_links_page(hub):
    page = ask(hub, "/files/")[2].decode()
    assert 'href="huggingface_hub-1.0-py3-none-any.whl"' in page
    assert ".stamp" not in page
    assert ask(hub, "/files/huggingface_hub-1.0-py3-none-any.whl")[2] == b"wheel"
    assert ask(hub, "/files/../models/sandbox/tiny/config.json")[0] == 404


def test_parallel_downloads(hub):
    """`hf` opens eight connections."""
    url = f"http://127.0.0.1:{hub.server_address[1]}{WEIGHTS}"
    got: list[bytes] = []
    threads = [
        threading.Thread(target=lambda: got.append(urllib.request.urlopen(url, timeout=10).read())) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == [CONTENT] * 8
