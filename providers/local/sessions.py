"""The local provider's kept sandboxes: of the same pool as its others, over the service's HTTP."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

from django.conf import settings

from providers.errors import InvalidConfiguration
from providers.runtime.pool.settings import LAUNCHERS
from providers.runtime.service.settings import FIELDS
from providers.runtime.service.unix_socket import socket_path
from providers.sandbox import KeptSandbox
from providers.schema import validate
from providers.self_managed.client import PoolClient
from providers.self_managed.kept import ServiceSandbox
from providers.values import SandboxSpec


class LocalSessions:
    """Kept sandboxes of the pool of this spec, which runs under `runtime`."""

    def __init__(self, pool: Mapping[str, Any], runtime: str) -> None:
        self._pool = pool
        self._runtime = runtime
        self._path = socket_path(settings.DATA_DIR)

    def keep(self, spec: SandboxSpec, owner: str) -> KeptSandbox:
        """Raises SandboxError; nothing has run then."""
        if self._runtime not in LAUNCHERS:
            raise InvalidConfiguration(
                "kept: A persistent sandbox needs isolation. Install bubblewrap or gVisor.",
                field="kept",
            )
        return ServiceSandbox(self._client, self._client.keep(spec, owner, self._pool))

    def attach(self, ref: str) -> KeptSandbox:
        """Raises KeptSandboxLost and ProviderUnavailable."""
        return ServiceSandbox(self._client, self._client.ask_of("GET", ref))

    def close(self) -> None:
        client: PoolClient | None = self.__dict__.get("_client")
        if client is not None:
            client.close()

    @cached_property
    def _client(self) -> PoolClient:
        """Made for the first of them: single runs need nothing that it is."""
        given = validate(FIELDS, dict(self._pool["settings"]))
        return PoolClient("", settings.POOL_TOKEN, 0, given, socket=self._path)
