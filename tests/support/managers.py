"""What tests of the provider manager ask of it."""

from __future__ import annotations

import time
from collections.abc import Callable
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


def eventually(condition: Callable[[], bool], seconds: float = 60.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True
