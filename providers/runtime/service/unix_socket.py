"""The service on a socket in the data directory, for the processes of this installation alone.

Its folder belongs to whoever runs them, so that nobody else reaches it and no token is needed.
"""

from __future__ import annotations

import fcntl
import logging
import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from providers.errors import InvalidConfiguration

logger = logging.getLogger(__name__)

BACKLOG = 1024
# What a temporary service may take to end: the longest run that is allowed by default, and its end.
LONGEST_WAIT_SECONDS = 400.0
LOOK_SECONDS = 0.05
# A longer path does not fit into an address.
LONGEST_PATH = 100


def socket_path(data_dir: Path) -> Path:
    """The service's HTTP."""
    return data_dir / "run" / "pool.sock"


def runs_path(data_dir: Path) -> Path:
    """Single runs, as `runs` has them."""
    return data_dir / "run" / "runs.sock"


@contextmanager
def alone(path: Path, *, is_temporary: bool = False) -> Iterator[None]:
    """Be the only service that listens at `path`. Raises InvalidConfiguration where there is one,
    or for want of rights.

    A temporary one is asked to end, and waited for, by one that is not.
    """
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # A file of its own, which stays: who removes a lock may remove that of another.
        lock = os.open(_lock_of(path), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise _cannot_listen(path, error) from None
    try:
        _take(lock, path, is_temporary=is_temporary)
        yield
        for left in (path, runs_path(path.parent.parent)):
            left.unlink(missing_ok=True)
        os.ftruncate(lock, 0)
    finally:
        os.close(lock)


def _take(lock: int, path: Path, *, is_temporary: bool) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = _temporary_owner(path)
        if is_temporary or owner is None:
            raise InvalidConfiguration(
                f"socket: Another service listens at {path}.", field="socket"
            ) from None
        _wait_for_end(lock, path)
    os.ftruncate(lock, 0)
    if is_temporary:
        os.pwrite(lock, str(os.getpid()).encode(), 0)


def _wait_for_end(lock: int, path: Path) -> None:
    """Take the lock once the temporary service is gone, which may first finish what runs in it."""
    logger.info("waiting for the temporary service at %s to end", path)
    deadline = time.monotonic() + LONGEST_WAIT_SECONDS
    asked: int | None = None
    while True:
        # Another one may have come before us.
        owner = _temporary_owner(path)
        if owner is not None and owner != asked:
            asked = owner
            with suppress(ProcessLookupError):
                os.kill(owner, signal.SIGTERM)
        with suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        if time.monotonic() > deadline:
            raise InvalidConfiguration(
                f"socket: The temporary service at {path}, process {asked}, does not end.",
                field="socket",
            )
        time.sleep(LOOK_SECONDS)


def is_taken(path: Path) -> bool:
    """Whether a service listens at `path` that does not end by itself."""
    return answers(path) and _temporary_owner(path) is None


def _temporary_owner(path: Path) -> int | None:
    """The process that has the lock, where it is a temporary service."""
    try:
        return int(_lock_of(path).read_text("ascii"))
    except (FileNotFoundError, ValueError):
        return None


def _lock_of(path: Path) -> Path:
    return path.with_suffix(".lock")


def listen(path: Path) -> socket.socket:
    """A listening socket at `path`, for who is `alone` there. Raises InvalidConfiguration for want
    of rights."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        # What a service has left that was killed.
        path.unlink(missing_ok=True)
        with address_of(path) as address:
            before = os.umask(0o177)
            try:
                listener.bind(address)
            finally:
                os.umask(before)
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise _cannot_listen(path, error) from None
    return listener


def connect(path: Path, timeout: float | None = None) -> socket.socket:
    """A connection to the service at `path`. Raises OSError."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(timeout)
        with address_of(path) as address:
            connection.connect(address)
    except BaseException:
        connection.close()
        raise
    return connection


def answers(path: Path) -> bool:
    """Whether somebody listens at `path`."""
    try:
        connect(path, 1).close()
    except OSError:
        return False
    return True


@contextmanager
def address_of(path: Path) -> Iterator[str]:
    if len(os.fsencode(path)) <= LONGEST_PATH:
        yield str(path)
        return
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


def _cannot_listen(path: Path, error: OSError) -> InvalidConfiguration:
    return InvalidConfiguration(
        f"socket: Cannot listen at {path}: {error.strerror or error}.", field="socket"
    )
