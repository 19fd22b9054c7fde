"""Files of any size go into storage and out of it in pieces, and are seen whole or not at all."""

from __future__ import annotations

import hashlib
import os
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from django.core.exceptions import SuspiciousFileOperation
from hypothesis import given, settings
from hypothesis import strategies as st

from executions.kernel.storage import (
    WORKSPACES,
    FileStore,
    checked_key,
    disposition,
    file_store,
    safe_type,
)

MIB = 1024 * 1024
KEY = "7/ab/abcdef-0123"


@pytest.fixture
def folder(settings: Any, tmp_path: Path) -> FileStore:
    settings.DATA_DIR = tmp_path
    return file_store(WORKSPACES)


@pytest.fixture(params=["folder", "swift"])
def storage(request: pytest.FixtureRequest) -> FileStore:
    if request.param == "folder":
        found: FileStore = request.getfixturevalue("folder")
        return found
    request.getfixturevalue("on_swift")
    return file_store(WORKSPACES)


def names(storage: FileStore) -> list[str]:
    return sorted(entry.name for entry in storage.entries())


def megabytes(number: int) -> Iterator[bytes]:
    """Each another, and so are its bytes."""
    for count in range(number):
        yield hashlib.sha256(b"%d" % count).digest() * (MIB // 32)


@pytest.mark.parametrize("size", [0, 1, 700_000, 9 * MIB])
def test_what_is_streamed_in_comes_out_whole_and_in_parts(size: int, storage: FileStore) -> None:
    content = os.urandom(size)
    step = 99_991
    pieces = (content[start : start + step] for start in range(0, size, step))

    assert storage.save_stream(KEY, pieces) == size

    assert b"".join(storage.open_range(KEY)) == content
    assert b"".join(storage.open_range(KEY, 5, 300_000)) == content[5:300_005]
    assert b"".join(storage.open_range(KEY, max(0, size - 10), 100)) == content[-10:]
    assert b"".join(storage.open_range(KEY, size)) == b""
    assert b"".join(storage.open_range(KEY, 0, 0)) == b""
    assert names(storage) == [KEY]


def test_a_large_file_takes_little_memory_on_its_way(storage: FileStore) -> None:
    number = 45
    tracemalloc.start()
    try:
        assert storage.save_stream(KEY, megabytes(number)) == number * MIB
        digest = hashlib.sha256()
        for piece in storage.open_range(KEY):
            digest.update(piece)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert most < 40 * MIB
    assert digest.digest() == hashlib.sha256(b"".join(megabytes(number))).digest()


@pytest.mark.parametrize("sent", [1, 9 * MIB])
def test_of_a_stream_that_fails_nothing_is_kept(sent: int, storage: FileStore) -> None:
    class Gone(Exception):
        pass

    def stream() -> Iterator[bytes]:
        yield b"x" * sent
        assert not storage.exists(KEY)
        raise Gone

    with pytest.raises(Gone):
        storage.save_stream(KEY, stream())

    assert names(storage) == []
    assert storage.discard_unfinished(time.time() + 3600) == 0
    with pytest.raises(FileNotFoundError):
        storage.open_range(KEY)


def test_a_reader_keeps_what_it_reads_while_the_file_is_replaced(folder: FileStore) -> None:
    folder.save_stream(KEY, [b"a" * 600_000])
    reading = folder.open_range(KEY)
    first = next(reading)
    folder.save_stream(KEY, [b"b"])
    assert first + b"".join(reading) == b"a" * 600_000


def test_what_a_killed_process_left_is_discarded_when_it_is_old(
    folder: FileStore, settings: Any
) -> None:
    folder.save_stream(KEY, [b"whole"])
    draft = settings.DATA_DIR / WORKSPACES / "7" / "ab" / f".abcdef-4567.{'0' * 16}"
    draft.write_bytes(b"half")

    assert folder.discard_unfinished(time.time() - 3600) == 0
    assert folder.discard_unfinished(time.time() + 3600) == 1
    assert names(folder) == [KEY]


def test_a_folder_has_no_links_of_its_own(folder: FileStore) -> None:
    assert folder.link(KEY, expires_in=60, filename="a", mime_type="text/plain") is None


@settings(max_examples=50)
@given(st.text() | st.from_regex(r"[a-z0-9./\x00_-]*", fullmatch=True))
def test_a_key_means_one_place_below_its_kind(name: str) -> None:
    try:
        checked_key(name)
    except SuspiciousFileOperation:
        return
    # No case, no form of Unicode and no system makes two of it, or leads elsewhere.
    assert name == name.lower()
    assert name.isascii()
    assert os.path.normpath(name) == name
    assert all(part and not part.startswith(".") for part in name.split("/"))


@pytest.mark.parametrize(
    "name", ["", "/etc/passwd", "../a", "a/../../b", "a//b", "A", "\ufb01", "a\0", "a\n", "a" * 201]
)
def test_a_name_that_is_no_key_is_refused(name: str, folder: FileStore) -> None:
    refused_before_anything_happens(folder, name)


def test_a_name_that_is_no_key_is_refused_wherever_files_are_kept(storage: FileStore) -> None:
    refused_before_anything_happens(storage, "a/../../b")


def refused_before_anything_happens(storage: FileStore, name: str) -> None:
    wanted = {"expires_in": 60, "filename": "a", "mime_type": "text/plain"}
    with pytest.raises(SuspiciousFileOperation):
        storage.save_stream(name, [b"x"])
    with pytest.raises(SuspiciousFileOperation):
        storage.open_range(name)
    with pytest.raises(SuspiciousFileOperation):
        storage.link(name, **wanted)
    assert names(storage) == []


@given(st.text())
def test_no_file_name_leaves_its_place_in_the_header(name: str) -> None:
    header = disposition(name)
    assert header.isascii()
    assert header.isprintable()
    assert header.startswith('attachment; filename="')
    assert header.count('"') == 2
    assert header.count(";") == 2
    assert "/" not in header
    assert "\\" not in header
    assert len(header) < 2200


def test_a_readable_name_stays_readable() -> None:
    assert disposition("a/b/日本 1.csv") == (
        "attachment; filename=\"__ 1.csv\"; filename*=UTF-8''%E6%97%A5%E6%9C%AC%201.csv"
    )
    assert disposition("../..") == "attachment; filename=\"file\"; filename*=UTF-8''file"
    # What would turn the rest of the name around.
    assert disposition("a\u202egpj.exe").startswith('attachment; filename="a_gpj.exe"')


@pytest.mark.parametrize(
    ("said", "sent"),
    [
        ("image/png", "image/png"),
        ("text/html", "application/octet-stream"),
        ("image/svg+xml", "application/octet-stream"),
        ("text/plain\r\nX: 1", "application/octet-stream"),
        ("", "application/octet-stream"),
    ],
)
def test_a_type_that_may_be_a_program_is_only_bytes(said: str, sent: str) -> None:
    assert safe_type(said) == sent
