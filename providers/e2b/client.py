"""The E2B SDK as the provider uses it: every call with its configuration, bounded, translated."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import httpx
from e2b import FileType, NotFoundException, SandboxQuery
from e2b.api.client_sync import get_transport
from e2b_code_interpreter import Sandbox as CodeInterpreter

from providers.addresses import rules
from providers.e2b.errors import has_status, translate
from providers.e2b.transports import Route
from providers.errors import ConnectionFailed, SandboxError
from providers.remote.bounded import BoundedClient
from providers.remote.deadline import DeadlinePassed, call_within
from providers.remote.receiver import Receiver
from providers.remote.secret import Secret

T = TypeVar("T")

REQUEST_SECONDS = 30.0


class Sandbox(CodeInterpreter):  # type: ignore[misc]
    """The SDK's sandbox, whose code interpreter's answers are bounded."""

    @property
    def _client(self) -> httpx.Client:
        transport = get_transport(self.connection_config, http_version="1.1")
        return BoundedClient(transport=transport)


@dataclass(frozen=True)
class Account:
    """Where and as whom the SDK is called. Empty texts leave the choice to the SDK's own rules."""

    api_key: Secret
    domain: str = ""
    api_url: str = ""
    sandbox_url: str = ""
    receiver: Receiver = field(default_factory=lambda: Receiver(rules()))

    def options(self) -> dict[str, Any]:
        given = {"domain": self.domain, "api_url": self.api_url, "sandbox_url": self.sandbox_url}
        return {
            **{name: value for name, value in given.items() if value},
            "api_key": self.api_key.reveal(),
            "proxy": self._route.name,
            "debug": False,
            "request_timeout": REQUEST_SECONDS,
            # Whether to wait for a busy service or to leave it is the caller's decision.
            "retries": 0,
        }

    @cached_property
    def _route(self) -> Route:
        return Route(self.receiver)

    @contextmanager
    def translated(self, *, creating: bool = False, running: bool = False) -> Iterator[None]:
        """Turn whatever the SDK raises within the block into a SandboxError."""
        try:
            yield
        except (SandboxError, DeadlinePassed):
            raise
        except Exception as error:
            # Not chained: the SDK's frames hold the key.
            told = translate(error, [self.api_key], creating=creating, running=running)
            told.answered = "status" if has_status(error) else ""
            raise told from None

    def create(
        self, template: str, lifetime: int, metadata: dict[str, str], *, internet: bool
    ) -> Sandbox:
        """A new sandbox that ends by itself after `lifetime` seconds."""

        def create() -> Sandbox:
            sandbox: Sandbox = Sandbox.create(
                template=template or None,
                timeout=lifetime,
                metadata=metadata,
                allow_internet_access=internet,
                **self.options(),
            )
            return sandbox

        with self.translated(creating=True):
            return self._soon(create, too_late=lambda sandbox: self._kill_quietly(sandbox))

    def connect(self, instance_id: str) -> Sandbox:
        def connect() -> Sandbox:
            sandbox: Sandbox = Sandbox.connect(instance_id, **self.options())
            return sandbox

        with self.translated():
            return self._soon(connect)

    def kill(self, instance_id: str) -> bool:
        with self.translated():
            return bool(self._soon(lambda: Sandbox.kill(instance_id, **self.options())))

    def ours(self, metadata: dict[str, str]) -> list[tuple[str, dict[str, str]]]:
        """Every running sandbox with this metadata: its id and all of its metadata."""
        with self.translated():
            return self._soon(lambda: list(self._listed(metadata)))

    def check(self) -> None:
        """One small request that needs a working key. Raises SandboxError."""
        with self.translated():
            self._soon(lambda: Sandbox.list(limit=1, **self.options()).next_items())

    def files_in(self, sandbox: Sandbox, folder: str) -> list[tuple[str, int]]:
        """Regular files below a folder of the workspace: names relative to it, and sizes."""
        with self.translated(running=True):
            try:
                entries = sandbox.files.list(folder, depth=8)
            except NotFoundException:
                return []
        found = []
        for entry in entries:
            if entry.type == FileType.FILE and entry.symlink_target is None:
                _, _, name = entry.path.partition(f"/{folder}/")
                found.append((name, entry.size))
        return found

    def read(self, sandbox: Sandbox, path: str, longest: int) -> bytes | None:
        """A file of the workspace; None when it is longer than `longest` bytes."""
        content = bytearray()
        with self.translated(running=True):
            stream = sandbox.files.read(path, format="stream", request_timeout=REQUEST_SECONDS)
            for chunk in stream:
                content += chunk
                if len(content) > longest:
                    stream.close()
                    return None
        return bytes(content)

    def _listed(self, metadata: dict[str, str]) -> Iterator[tuple[str, dict[str, str]]]:
        pages = Sandbox.list(query=SandboxQuery(metadata=metadata), **self.options())
        while pages.has_next:
            for info in pages.next_items():
                yield info.sandbox_id, dict(info.metadata or {})

    def _soon(self, call: Callable[[], T], *, too_late: Callable[[T], None] | None = None) -> T:
        try:
            return call_within(REQUEST_SECONDS, call, too_late=too_late)
        except DeadlinePassed:
            raise ConnectionFailed(f"E2B does not answer within {REQUEST_SECONDS:g} s.") from None

    def _kill_quietly(self, sandbox: Sandbox) -> None:
        # It ends by itself after its lifetime, so nothing is lost but money.
        try:
            self.kill(sandbox.sandbox_id)
        except SandboxError:
            return
