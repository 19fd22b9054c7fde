"""The local provider's kept sandboxes. They live in the pool service of this installation, so that
web and worker share them and outlive a restart."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

from django.conf import settings

from providers.errors import InvalidConfiguration, ProviderUnavailable
from providers.runtime.service.sandbox_registry import LAUNCHERS
from providers.runtime.service.settings import FIELDS
from providers.runtime.service.unix_socket import answers, socket_path
from providers.sandbox import KeptSandbox
from providers.schema import validate
from providers.self_managed.client import PoolClient
from providers.self_managed.kept import ServiceSandbox
from providers.values import SandboxSpec

# What sessions do not have from the local provider's configuration. All else that it has in common
# with the service's they have.
_OWN = ("pool_size", "timeout", "isolation")


class LocalSessions:
    """Kept sandboxes made as the provider's own, by `launcher` and its configuration."""

    def __init__(self, config: Mapping[str, Any], launcher: str) -> None:
        given = {name: config[name] for name in FIELDS if name in config and name not in _OWN}
        self._pushed = validate(FIELDS, {**given, "pool_size": 1})
        self._apart = {
            "settings": {**given, "pool_size": 1},
            "launcher": launcher,
            "gvisor_platform": config["gvisor_platform"],
        }
        self._path = socket_path(settings.DATA_DIR)

    def keep(self, spec: SandboxSpec, owner: str) -> KeptSandbox:
        """Raises SandboxError; nothing has run then."""
        if self._apart["launcher"] not in LAUNCHERS:
            raise InvalidConfiguration(
                "kept: A persistent sandbox needs isolation. Install bubblewrap or gVisor.",
                field="kept",
            )
        self._check_service()
        return ServiceSandbox(self._client, self._client.keep(spec, owner, self._apart))

    def attach(self, ref: str) -> KeptSandbox:
        """Raises KeptSandboxLost and ProviderUnavailable."""
        self._check_service()
        return ServiceSandbox(self._client, self._client.ask_of("GET", ref))

    def close(self) -> None:
        client: PoolClient | None = self.__dict__.get("_client")
        if client is not None:
            client.close()

    @cached_property
    def _client(self) -> PoolClient:
        """Made for the first of them: single runs need no service, and nothing that it is."""
        return PoolClient("", settings.POOL_TOKEN, 0, self._pushed, socket=self._path)

    def _check_service(self) -> None:
        if not answers(self._path):
            raise ProviderUnavailable(
                "Sessions need the pool service, which `manage.py up` starts. Or start it alone: "
                "python manage.py pool --no-port"
            )
