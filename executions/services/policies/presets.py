"""Rules to begin a policy with, as `presets.toml` has them."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from executions.kernel.declarations import refuse
from executions.models.policy import Policy

_FILE = Path(__file__).with_name("presets.toml")


@cache
def presets() -> Mapping[str, Mapping[str, str]]:
    """By name: a `title`, and columns of a policy."""
    return tomllib.loads(_FILE.read_text(encoding="utf-8"))


def policy_from(name: str, tenant_slug: str = "") -> Policy:
    """An unsaved draft. Raises InvalidConfiguration for a preset that there is not."""
    if name not in presets():
        refuse("preset", f"Must be one of {', '.join(presets())}.")
    rules = {column: value for column, value in presets()[name].items() if column != "title"}
    return Policy(tenant_slug=tenant_slug, draft=True, name=name, **rules)
