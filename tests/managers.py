"""What tests of the provider manager ask of it."""

from __future__ import annotations

from typing import Any

from providers.manager import ProviderManager
from providers.models import ProviderConfig
from providers.services import activate, save_config

TOKEN = "tok-0123456789-wxyz"
GOOD = {"endpoint": "http://a", "token": TOKEN}


def configure(**changes: Any) -> ProviderConfig:
    save_config("probe", GOOD | changes)
    return activate("probe")


def leased(manager: ProviderManager) -> tuple[int, Any]:
    with manager.lease() as lease:
        return lease.config_version, lease.provider
