"""What the engine images' builder reads of this machine."""

from __future__ import annotations

from pathlib import Path

import build_engine

# pip 24 on a machine with a private index.
DEBUG = """\
env_var:
  PIP_CERT='/etc/ssl/certs/ca-certificates.crt'
env:
global:
  /etc/xdg/pip/pip.conf, exists: True
    global.constraint: /etc/xdg/pip/constraints.txt
  /etc/pip.conf, exists: False
site:
  /home/user/venv/pip.conf, exists: False
user:
  /root/.pip/pip.conf, exists: False
  /root/.config/pip/pip.conf, exists: True
    global.find-links: /opt/wheels
"""
LIST = """\
:env:.cert='/etc/ssl/certs/ca-certificates.crt'
:env:.default-timeout='180'
global.constraint='/etc/xdg/pip/constraints.txt'
global.extra-index-url='file:///srv/pypi/simple https://example.org/simple'
global.find-links='/opt/wheels'
"""


def test_pip_configuration_files() -> None:
    assert build_engine.configuration_files(DEBUG) == ["/etc/xdg/pip/pip.conf", "/root/.config/pip/pip.conf"]


def test_pip_local_paths() -> None:
    paths = ["/etc/ssl/certs/ca-certificates.crt", "/etc/xdg/pip/constraints.txt", "/srv/pypi", "/opt/wheels"]
    assert build_engine.local_paths(LIST) == paths


def test_inputs_follow_content_names_and_settings(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("one")
    first = build_engine.inputs(tmp_path, "x")
    assert first == build_engine.inputs(tmp_path, "x")
    assert first != build_engine.inputs(tmp_path, "y")
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "__pycache__" / "a.pyc").write_text("compiled")
    assert first == build_engine.inputs(tmp_path, "x")
    (tmp_path / "a").rename(tmp_path / "b")
    assert first != build_engine.inputs(tmp_path, "x")
