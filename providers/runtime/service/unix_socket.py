"""The service on a socket in the data directory, for the processes of this installation alone.

Its folder belongs to whoever runs them, so that nobody else reaches it and no token is needed.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from providers.errors import InvalidConfiguration

BACKLOG = 1024
# A longer path does not fit into an address.
LONGEST_PATH = 100


def socket_path(data_dir: Path) -> Path:
    return data_dir / "run" / "pool.sock"


def listen(path: Path) -> socket.socket:
    """A listening socket at `path`. Raises InvalidConfiguration where one is in use, or for want
    of rights."""
    if answers(path):
        raise InvalidConfiguration(f"socket: Another service listens at {path}.", field="socket")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # What a service has left that was killed.
        path.unlink(missing_ok=True)
        with _address(path) as address:
            before = os.umask(0o177)
            try:
                listener.bind(address)
            finally:
                os.umask(before)
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise InvalidConfiguration(
            f"socket: Cannot listen at {path}: {error.strerror or error}.", field="socket"
        ) from None
    return listener


def connect(path: Path, timeout: float | None = None) -> socket.socket:
    """A connection to the service at `path`. Raises OSError."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(timeout)
        with _address(path) as address:
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
def _address(path: Path) -> Iterator[str]:
    if len(os.fsencode(path)) <= LONGEST_PATH:
        yield str(path)
        return
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)
