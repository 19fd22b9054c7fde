"""An E2B account: the SDK's control plane, each call with the configuration's own options."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from e2b import NotFoundException, SandboxQuery

from providers.addresses import rules
from providers.e2b.errors import translate
from providers.e2b.machine import CodeInterpreter, E2BMachine
from providers.e2b.transports import Route
from providers.errors import SandboxError
from providers.remote import service
from providers.remote.receiver import Receiver
from providers.remote.secret import Secret
from providers.remote.service import AccountClient, CreateRequest, SandboxGone

_NAME = "cofferdam"


@dataclass(frozen=True)
class Account(AccountClient):
    """Where and as whom the SDK is called. Empty texts leave the choice to the SDK's own rules."""

    api_key: Secret
    domain: str = ""
    api_url: str = ""
    sandbox_url: str = ""
    receiver: Receiver = field(default_factory=lambda: Receiver(rules()))
    region: str = ""
    template: str = ""
    internet: bool = False

    label = "E2B"

    @property
    def place(self) -> str:  # type: ignore[override]
        return self.api_url or self.domain or "its own address"

    def create(self, wanted: CreateRequest) -> E2BMachine:
        sandbox = CodeInterpreter.create(
            template=wanted.template or self.template or None,
            timeout=wanted.seconds,
            metadata={_NAME: wanted.name},
            envs=dict(wanted.environment or {}),
            allow_internet_access=self.internet,
            **self._options(),
        )
        return E2BMachine(sandbox)

    def connect(self, ref: str) -> E2BMachine:
        try:
            return E2BMachine(CodeInterpreter.connect(ref, **self._options()))
        except NotFoundException:
            raise SandboxGone(f"There is no E2B sandbox {ref!r} any more.") from None

    def end(self, ref: str) -> bool:
        return bool(CodeInterpreter.kill(ref, **self._options()))

    def listed(self) -> Iterator[tuple[str, str]]:
        pages = CodeInterpreter.list(query=SandboxQuery(metadata={}), **self._options())
        while pages.has_next:
            for info in pages.next_items():
                if name := (info.metadata or {}).get(_NAME):
                    yield info.sandbox_id, name

    def check(self) -> None:
        CodeInterpreter.list(limit=1, **self._options()).next_items()

    def translate(self, error: Exception, *, creating: bool) -> SandboxError:
        return translate(error, [self.api_key], creating=creating)

    def details(self) -> dict[str, Any]:
        return {"region": self.region}

    def _options(self) -> dict[str, Any]:
        given = {"domain": self.domain, "api_url": self.api_url, "sandbox_url": self.sandbox_url}
        return {
            **{name: value for name, value in given.items() if value},
            "api_key": self.api_key.reveal(),
            "proxy": self._route.name,
            "debug": False,
            "request_timeout": service.REQUEST_SECONDS,
            # Whether to wait for a busy service or to leave it is the caller's decision.
            "retries": 0,
        }

    @cached_property
    def _route(self) -> Route:
        return Route(self.receiver)
