"""What kept sandboxes are made by when it is not what the service is set to."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from providers.errors import InvalidConfiguration
from providers.runtime.service.settings import ServiceSettings, settings_digest

LAUNCHERS = ("bubblewrap", "gvisor")
PLATFORMS = ("systrap", "ptrace", "kvm")


@dataclass(frozen=True)
class Apart:
    """The local provider's sandboxes: its settings, and which of its launchers."""

    settings: ServiceSettings
    launcher: str
    gvisor_platform: str
    key: Hashable

    @classmethod
    def from_json(cls, given: object) -> Apart:
        """Raises InvalidConfiguration naming the field at fault."""
        if not isinstance(given, Mapping):
            raise InvalidConfiguration("apart: Must be an object.", field="apart")
        config: Any = given.get("settings")
        launcher, platform = given.get("launcher"), given.get("gvisor_platform")
        if not isinstance(config, Mapping):
            raise InvalidConfiguration("settings: Must be an object.", field="settings")
        if launcher not in LAUNCHERS:
            raise InvalidConfiguration(
                f"launcher: Must be one of: {', '.join(LAUNCHERS)}.", field="launcher"
            )
        if platform not in PLATFORMS:
            raise InvalidConfiguration(
                f"gvisor_platform: Must be one of: {', '.join(PLATFORMS)}.", field="gvisor_platform"
            )
        settings = ServiceSettings.from_config(config)
        if settings.isolation in ("auto", "tenant-kernel"):
            # No session is ever in a tenant's kernel.
            settings = replace(settings, isolation="execution")
        return cls(settings, launcher, platform, (launcher, platform, settings_digest(config)))
