"""A backup that is not what was written is found out, and nothing of it is restored."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from sandbox_site.backups.archive import DamagedArchive, unpack
from tests.support.backups import manage

pytest_plugins = ["tests.site.backup_fixtures"]


Members = list[tuple[tarfile.TarInfo, bytes]]


def rewritten(archive: Path, target: Path, edit: Callable[[Members], None]) -> None:
    with tarfile.open(archive) as tar:
        members = [
            (member, (tar.extractfile(member) or io.BytesIO()).read())
            for member in tar.getmembers()
        ]
    edit(members)
    with tarfile.open(target, "w") as tar:
        for member, content in members:
            member.size = len(content) if member.isreg() else 0
            tar.addfile(member, io.BytesIO(content))


def _without_an_artifact(members: Members) -> None:
    members[:] = [pair for pair in members if not pair[0].name.endswith("/0")]


def _with_another_byte(members: Members) -> None:
    for place, (member, content) in enumerate(members):
        if member.name == "database.sqlite3":
            members[place] = (member, content[:5000] + bytes([content[5000] ^ 1]) + content[5001:])


def _with_a_file_more(members: Members) -> None:
    members.insert(0, (tarfile.TarInfo("data/more"), b"more"))


def _with_a_file_twice(members: Members) -> None:
    members.insert(0, members[0])


def _with_a_way_out(members: Members) -> None:
    members.insert(0, (tarfile.TarInfo("data/../../escaped"), b"out"))


def _with_an_absolute_name(members: Members) -> None:
    members.insert(0, (tarfile.TarInfo("/tmp/escaped"), b"out"))


def _with_a_link(members: Members) -> None:
    link = tarfile.TarInfo("data/artifacts")
    link.type, link.linkname = tarfile.SYMTYPE, "/"
    members.insert(0, (link, b""))


def _with_another_database(members: Members) -> None:
    manifest = members.pop()
    members.append((tarfile.TarInfo("data/cofferdam.sqlite3"), b""))
    lines = manifest[1].decode().splitlines()
    about = json.loads(lines[0])
    about["files"] += 1
    digest = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    more = json.dumps({"name": "data/cofferdam.sqlite3", "size": 0, "sha256": digest})
    text = "\n".join([json.dumps(about), *lines[1:], more]) + "\n"
    members.append((manifest[0], text.encode()))


def _without_a_manifest(members: Members) -> None:
    members.pop()


@pytest.mark.parametrize(
    "edit",
    [
        _without_an_artifact,
        _with_another_byte,
        _with_a_file_more,
        _with_a_file_twice,
        _with_a_way_out,
        _with_an_absolute_name,
        _with_a_link,
        _without_a_manifest,
    ],
)
def test_a_damaged_archive_is_found_out(
    archive: Path, tmp_path: Path, edit: Callable[[Members], None]
) -> None:
    rewritten(archive, tmp_path / "damaged.tar", edit)
    (tmp_path / "unpacked").mkdir()
    with (tmp_path / "damaged.tar").open("rb") as stream, pytest.raises(DamagedArchive):
        unpack(stream, tmp_path / "unpacked")
    assert not (tmp_path / "escaped").exists()
    assert not Path("/tmp/escaped").exists()


def test_a_damaged_archive_leaves_nothing(archive: Path, tmp_path: Path) -> None:
    rewritten(archive, tmp_path / "damaged.tar", _with_another_database)
    refused = manage(tmp_path / "restored", "restore", str(tmp_path / "damaged.tar"))
    assert refused.returncode == 2, refused.stdout
    assert "Nothing was restored. The backup is damaged" in refused.stderr
    assert not list((tmp_path / "restored").iterdir())


def test_an_archive_that_was_cut_off_is_found_out(archive: Path, tmp_path: Path) -> None:
    content = archive.read_bytes()
    for number, length in enumerate((0, 100, len(content) // 2, content.rindex(b"manifest.jsonl"))):
        (tmp_path / str(number)).mkdir()
        with pytest.raises(DamagedArchive):
            unpack(io.BytesIO(content[:length]), tmp_path / str(number))
