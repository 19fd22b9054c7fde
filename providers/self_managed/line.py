"""One kept sandbox's operations over the pool service: frames there and back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from providers.runtime.guest.protocol import CHUNK_BYTES
from providers.runtime.pool.channel import Frame
from providers.runtime.pool.conversation import Parts
from providers.runtime.service import operations
from providers.self_managed.client import PoolClient


class Line:
    """To the sandbox of this ref. Every method raises SandboxError, KeptSandboxLost included."""

    def __init__(self, client: PoolClient, ref: str) -> None:
        self.client = client
        self.ref = ref

    def ask(self, name: str, parts: Parts = (), **fields: Any) -> Frame:
        """An operation's answer, whatever it sends before."""
        with self.follow(name, parts, **fields) as frames:
            for header, received in frames:
                if header["event"] == "done":
                    return header, received
        raise operations.unfinished()

    def follow(
        self, name: str, parts: Parts = (), *, also_alive: bool = False, **fields: Any
    ) -> AbstractContextManager[Iterator[Frame]]:
        """The frames of an operation as they come, the last of which is `done`."""
        return self.send(operations.frame({"op": name, **fields}, parts), also_alive=also_alive)

    def write(self, name: str, content: Iterable[bytes], **fields: Any) -> dict[str, object]:
        """The answer to an operation that is given bytes."""

        def body() -> Iterator[bytes]:
            yield operations.frame({"op": name, **fields})
            for piece in content:
                for start in range(0, len(piece), CHUNK_BYTES):
                    data = piece[start : start + CHUNK_BYTES]
                    yield operations.frame({"op": "data"}, [("data", data)])

        with self.send(body()) as frames:
            for header, _ in frames:
                if header["event"] == "done":
                    return header
        raise operations.unfinished()

    @contextmanager
    def send(
        self, body: bytes | Iterator[bytes], *, also_alive: bool = False
    ) -> Iterator[Iterator[Frame]]:
        """The same for what is packed already."""
        with self.client.operate(self.ref, body) as frames:
            yield operations.checked(frames, also_alive=also_alive)
