"""Which apt sources the node image is made from: forms seen on real machines."""

from __future__ import annotations

import pytest

# Debian 12 as cloud images and containers have it.
DEBIAN = """\
Types: deb
# http://snapshot.debian.org/archive/debian/20250520T000000Z
URIs: http://deb.example.org/debian
Suites: bookworm bookworm-updates
Components: main
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg

Types: deb
URIs: http://deb.example.org/debian-security
Suites: bookworm-security
Components: main
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg
"""
# Ubuntu 24.04 (/etc/apt/sources.list.d/ubuntu.sources), and DGX OS beside it with keys in the stanza.
UBUNTU = """\
Types: deb
URIs: http://ports.example.org/ubuntu-ports/
Suites: noble noble-updates noble-backports
Components: main universe restricted multiverse
Signed-By: /usr/share/keyrings/ubuntu-archive-keyring.gpg

## Ubuntu security updates.
Types: deb
URIs: http://ports.example.org/ubuntu-ports/
Suites: noble-security
Components: main universe restricted multiverse
Signed-By:
 -----BEGIN PGP PUBLIC KEY BLOCK-----
 .
 mQINBFufwdoBEADv
 -----END PGP PUBLIC KEY BLOCK-----
"""
OLD = """\
# deb cdrom:[Debian]/ bullseye main
deb http://deb.example.org/debian bullseye main contrib # the archive
deb-src http://deb.example.org/debian bullseye main
deb [arch=amd64 signed-by=/etc/apt/keyrings/docker.gpg] https://docker.example.org/linux/debian bullseye stable
deb http://security.example.org/debian-security bullseye-security main
"""


@pytest.fixture
def build(program):
    return program("build_base")


def write(folder, **files):
    (folder / "sources.list.d").mkdir()
    for name, text in files.items():
        (folder / name.replace("__", ".").replace("_d_", "sources.list.d/")).write_text(text)
    return folder


def test_deb822_of_debian(build, tmp_path):
    found = build.choose(build.read_sources(write(tmp_path, _d_debian__sources=DEBIAN)), "bookworm", "bookworm")
    assert [source.suites for source in found] == [("bookworm", "bookworm-updates"), ("bookworm-security",)]
    assert found[0].uris == ("http://deb.example.org/debian",)
    assert found[0].options == {"Signed-By": "/usr/share/keyrings/debian-archive-keyring.gpg"}


def test_deb822_of_ubuntu_drops_backports_and_keeps_a_key_in_the_stanza(build, tmp_path):
    found = build.choose(build.read_sources(write(tmp_path, _d_ubuntu__sources=UBUNTU)), "noble", "noble")
    assert [source.suites for source in found] == [("noble", "noble-updates"), ("noble-security",)]
    assert "universe" in found[0].components  # docker.io and docker-registry are there
    written = build.to_deb822(found)
    assert "\n -----BEGIN PGP PUBLIC KEY BLOCK-----\n .\n" in written
    assert list(build.parse_deb822(written)) == found


def test_one_line_list_without_third_parties_and_source_packages(build, tmp_path):
    found = build.choose(build.read_sources(write(tmp_path, sources__list=OLD)), "bullseye", "bullseye")
    assert [(source.uris[0], source.components) for source in found] == [
        ("http://deb.example.org/debian", ("main", "contrib")),
        ("http://security.example.org/debian-security", ("main",)),
    ]


def test_one_line_options(build):
    [source] = build.parse_list("deb [ arch=arm64 signed-by=/k.gpg ] http://x.example.org/d noble main")
    assert source.options == {"Architectures": "arm64", "Signed-By": "/k.gpg"}


def test_another_release_from_the_same_archive(build, tmp_path):
    found = build.choose(build.read_sources(write(tmp_path, _d_debian__sources=DEBIAN)), "bookworm", "trixie")
    assert [source.suites for source in found] == [("trixie", "trixie-updates"), ("trixie-security",)]


def test_a_disabled_stanza_and_other_files_play_no_part(build, tmp_path):
    folder = write(tmp_path, _d_a__sources=f"Enabled: no\n{DEBIAN}", _d_b__save=OLD)
    with pytest.raises(build.NoSourceError, match="'bookworm' with component main"):
        build.choose(build.read_sources(folder), "bookworm", "bookworm")


@pytest.mark.parametrize(
    ("text", "expected"),
    [("ID=debian\nVERSION_CODENAME=bookworm\n", "bookworm"), ('VERSION_CODENAME="noble"\n', "noble")],
)
def test_codename(build, text, expected):
    assert build.codename_of(text) == expected


def test_no_codename_is_a_sentence(build):
    with pytest.raises(build.NoSourceError, match="built on Debian or Ubuntu"):
        build.codename_of("ID=fedora\n")


def test_the_command_names_packages_hook_and_sources(build):
    argv = build.command(["systemd", "jq"], "/hook.sh", "bookworm", "/tmp/root.tar", "/tmp/node.sources")
    assert argv[0] == "mmdebstrap"
    assert "--include=systemd,jq" in argv
    assert argv[-3:] == ["bookworm", "/tmp/root.tar", "/tmp/node.sources"]
    assert '--customize-hook=/hook.sh "$1"' in argv
