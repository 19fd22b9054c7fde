"""What a provider says of its pool, brought down to numbers and short names.

It is the word of whatever service is asked: only known names are taken, and of them only what is
of their kind.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from providers.schema import Schema

# Of a pool: what it has now, and what it has counted since it began.
NUMBERS = (
    *("capacity", "busy", "idle", "kept", "creating", "ending", "waiting"),
    *("started", "failed", "restarts", "refused", "creation_ms"),
)
_RUNTIME = re.compile(r"[A-Za-z0-9._ -]{1,32}")
_REGION = re.compile(r"[A-Za-z0-9._-]{1,64}")


def figures_of(details: Mapping[str, Any]) -> dict[str, Any]:
    """Of `Health.details`; empty for what keeps no pool."""
    found: dict[str, Any] = {}
    for name in NUMBERS:
        value = details.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool):
            number = float(value)
            if math.isfinite(number) and 0 <= number < 2**53:
                found[name] = value
    if "capacity" not in found:
        return {}
    runtime = details.get("runtime")
    if isinstance(runtime, str) and _RUNTIME.fullmatch(runtime):
        found["runtime"] = runtime
    return found


def region_of(fields: Schema, config: Mapping[str, Any]) -> dict[str, str]:
    """Where a service is, by its configuration, which says so in no secret."""
    declared, region = fields.get("region"), config.get("region")
    if declared is None or declared.secret or not isinstance(region, str):
        return {}
    return {"region": region} if _REGION.fullmatch(region) else {}
