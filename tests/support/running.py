"""Running code in tests."""

from __future__ import annotations

import json
import zlib
from typing import Any

from executions.runs import active_runs
from executions.runs.queue import claim_next
from executions.runs.record import Outcome
from executions.runs.worker import run_claimed
from providers.errors import SandboxError
from providers.manager import manager
from providers.models import ProviderConfig
from tests.conftest import Caller

LOCAL = {"launcher": "bubblewrap", "pool_size": 2}


def run(caller: Caller, code: str, **body: Any) -> Any:
    """The answer to POST /api/v1/executions."""
    response = caller.client.post("/api/v1/executions", {"code": code, **body})
    # Nobody waits for the end of a sandbox, but whoever counts them then.
    assert active_runs.wait_for_ends(60)
    return response


def run_queued() -> Outcome | None:
    """Run the next queued execution here, as a thread of a worker does. None where there is none
    to be run now."""
    execution = claim_next()
    return None if execution is None else run_claimed(execution)


def activate(provider_id: str, config: dict[str, Any]) -> None:
    """Make a provider the active one, and let the manager keep what it has loaded if it is that.

    The version stands for the configuration, so that what another test has loaded is told apart.
    """
    version = zlib.crc32(json.dumps([provider_id, config]).encode()) >> 1
    ProviderConfig(
        pk=1, provider_id=provider_id, config=config, is_active=True, version=version
    ).save(force_insert=True)
    try:
        with manager.lease() as lease:
            loaded = (lease.provider_id, lease.config_version)
    except SandboxError:
        loaded = None
    if loaded != (provider_id, version):
        manager.close()
