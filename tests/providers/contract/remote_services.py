"""Remote services that fail on command, as the contract's tests of failures have them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from providers.base import SandboxProvider
from tests.support.agentrun_server import AgentRunServer
from tests.support.e2b_server import E2BServer
from tests.support.remote_providers import open_aliyun, open_e2b


@dataclass(frozen=True)
class RemoteService:
    """A provider and the server of its service.

    `operations` names what the server is told to fail by what is done to a sandbox: create, run,
    shell, write, destroy and health. `elsewhere` is the provider's configuration that has its
    service at another address.
    """

    provider: SandboxProvider
    server: E2BServer | AgentRunServer
    secret: str = field(repr=False)
    operations: Mapping[str, str]
    open: Callable[..., SandboxProvider]
    elsewhere: Callable[[str], dict[str, Any]]

    def fail(self, what: str, *faults: str) -> None:
        """Order faults for the next requests that do this, one each."""
        self.server.fail(self.operations[what], *faults)

    @property
    def is_empty(self) -> bool:
        """Whether the service has no sandbox."""
        return not self.server.sandboxes


def e2b_service(server: E2BServer) -> RemoteService:
    return RemoteService(
        provider=open_e2b(server),
        server=server,
        secret=server.api_key,
        operations={
            "create": "create",
            "run": "execute",
            "shell": "Start",
            "write": "write",
            "destroy": "kill",
            "health": "list",
        },
        open=lambda **config: open_e2b(server, **config),
        elsewhere=lambda url: {"api_url": url, "sandbox_url": url},
    )


def aliyun_service(server: AgentRunServer) -> RemoteService:
    return RemoteService(
        provider=open_aliyun(server),
        server=server,
        secret=server.access_key_secret,
        operations={
            "create": "create",
            "run": "execute",
            "write": "upload",
            "destroy": "delete",
            "health": "get",
        },
        open=lambda **config: open_aliyun(server, **config),
        elsewhere=lambda url: {"data_endpoint": url},
    )
