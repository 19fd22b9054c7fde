"""A storage service that ends or falls silent in the middle: an error in time, and nothing half."""

from __future__ import annotations

import os
import secrets
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from executions.kernel import bucket
from executions.kernel.storage import WORKSPACES, FileStore, file_store
from executions.sessions.storage import blobs
from executions.tasks import discard_unfinished_uploads
from tests.support.bucket import Swift, keep_in, swift_service

MIB = 1024 * 1024
KEY = "7/ab/abcdef-0123"
WHOLE = "7/ab/abcdef-4567"


@pytest.fixture(scope="module")
def swift() -> Iterator[Swift]:
    with swift_service() as service:
        yield service


@pytest.fixture
def own_swift(swift: Swift, settings: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Swift]:
    """One to be stopped, with a place of its own in it. It serves again afterwards."""
    swift.prefix = secrets.token_hex(8)
    keep_in(swift, settings, monkeypatch)
    yield swift
    assert swift.process is not None
    if swift.process.poll() is None:
        swift.process.send_signal(signal.SIGCONT)
    else:
        swift.start()


@pytest.fixture
def storage(own_swift: Swift, monkeypatch: pytest.MonkeyPatch) -> FileStore:
    """Of a client that waits for less than usual, and for long enough on a busy machine."""
    monkeypatch.setattr(bucket, "_READ_SECONDS", 5)
    return file_store(WORKSPACES)


def freeze(service: Swift) -> None:
    assert service.process is not None
    os.kill(service.process.pid, signal.SIGSTOP)


def cut_off(harm: Callable[[], None]) -> Iterator[bytes]:
    """Two parts of an upload, and some more when the service is gone."""
    for _ in range(16):
        yield os.urandom(MIB)
    harm()
    for _ in range(16):
        yield os.urandom(MIB)


def names(storage: FileStore) -> list[str]:
    return sorted(entry.name for entry in storage.entries())


@pytest.mark.parametrize("how", ["killed", "frozen"])
def test_an_upload_that_was_cut_off_is_not_seen(
    how: str, storage: FileStore, own_swift: Swift, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage.save_stream(WHOLE, [b"whole"])
    harm = own_swift.stop if how == "killed" else lambda: freeze(own_swift)

    with pytest.raises(OSError, match="STORAGE_URL"):
        storage.save_stream(KEY, cut_off(harm))

    if how == "killed":
        own_swift.start()
    else:
        assert own_swift.process is not None
        own_swift.process.send_signal(signal.SIGCONT)
    assert not storage.exists(KEY)
    assert names(storage) == [WHOLE]
    assert b"".join(storage.open_range(WHOLE)) == b"whole"
    # Its parts are there still, until they are swept; what was frozen may yet hear that it is over.
    assert discard_unfinished_uploads() == 0
    monkeypatch.setattr(blobs, "_SECONDS", -60)
    assert discard_unfinished_uploads() == 1 or how == "frozen"
    assert discard_unfinished_uploads() == 0


@pytest.mark.parametrize("how", ["killed", "frozen"])
def test_a_download_that_was_cut_off_is_an_error_and_no_shorter_file(
    how: str, storage: FileStore, own_swift: Swift
) -> None:
    # More than the sockets between can hold.
    storage.save_stream(KEY, (bytes(MIB) for _ in range(48)))
    pieces = storage.open_range(KEY)
    next(pieces)
    if how == "killed":
        own_swift.stop()
    else:
        freeze(own_swift)

    with pytest.raises(OSError, match="STORAGE_URL"):
        for _ in pieces:
            pass


def test_a_service_that_comes_later_is_used_without_a_restart(
    storage: FileStore, own_swift: Swift
) -> None:
    own_swift.stop()
    assert discard_unfinished_uploads() == 0
    with pytest.raises(OSError, match="STORAGE_URL"):
        storage.save_stream(KEY, [b"content"])
    with pytest.raises(OSError, match="STORAGE_URL"):
        storage.open_range(KEY)
    own_swift.start()
    storage.save_stream(KEY, [b"content"])
    assert b"".join(storage.open_range(KEY)) == b"content"
