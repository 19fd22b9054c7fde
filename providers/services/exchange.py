"""A file of settings brought in by a person: looked at first, then made or left waiting."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from django.db import transaction
from django.views.decorators.debug import sensitive_variables

from providers import registry
from providers.errors import InvalidConfiguration
from providers.models import PendingChange, ProviderConfig
from providers.services import history
from providers.services.approval import request_change
from providers.services.approval_policy import ConfigurationConflict
from providers.services.configuration import merged_config, stored_config
from providers.services.system_settings import naming, read_settings

Action = PendingChange.Action

# Of a file. One of every provider there is has a few KiB.
MOST_BYTES = 128 * 1024


@dataclass(frozen=True)
class Change:
    """What a file would make of one provider, compared with this version; 0 for none."""

    provider_id: str
    version: int
    diff: history.Diff


@dataclass(frozen=True)
class Plan:
    """What a file would do. `active` is the provider that it would have run the code, "" where
    that is as it is."""

    changes: list[Change]
    unchanged: list[str]
    skipped: dict[str, str]
    active: str

    @property
    def does_something(self) -> bool:
        return bool(self.changes or self.active)

    @property
    def versions(self) -> dict[str, int]:
        return {change.provider_id: change.version for change in self.changes}


@sensitive_variables()
def read(text: bytes) -> Any:
    """The document of a file. Raises InvalidConfiguration for what is none."""
    if len(text) > MOST_BYTES:
        raise InvalidConfiguration(f"The file has more than {MOST_BYTES // 1024} KiB.")
    try:
        return json.loads(text.decode("utf-8-sig"))
    except (ValueError, RecursionError):
        raise InvalidConfiguration("The file is not JSON.") from None


@sensitive_variables()
def plan(document: Any) -> Plan:
    """Raises InvalidConfiguration as saving it would, naming the record."""
    wanted = read_settings(document)
    rows = {row.provider_id: row for row in ProviderConfig.objects.defer("config")}
    changes, unchanged = [], []
    for provider_id, config in wanted.configs.items():
        provider, row = registry.get(provider_id), rows.get(provider_id)
        with naming(provider_id):
            before = stored_config(row) or {}
            cleaned = merged_config(provider, config, before)
        if row is not None and cleaned == before:
            unchanged.append(provider_id)
            continue
        diff = history.difference_of(provider.config_fields, before, cleaned)
        changes.append(Change(provider_id, row.version if row else 0, diff))
    active = rows.get(wanted.active)
    if wanted.active and active is None and wanted.active not in wanted.configs:
        raise InvalidConfiguration(
            f"{wanted.active!r} cannot be activated: it has no configuration."
        )
    is_so = active is not None and active.is_active
    return Plan(changes, unchanged, wanted.skipped, "" if is_so else wanted.active)


@sensitive_variables()
def bring_in(
    document: Any,
    versions: Mapping[str, int],
    active: str,
    *,
    author: str,
    author_id: int,
    reason: str = "",
) -> list[ProviderConfig | PendingChange | None]:
    """Make what the file asks for, all or none; or leave each change waiting for a second person.

    `versions` and `active` are of the plan that was looked at. Raises InvalidConfiguration, and
    ConfigurationConflict where something was changed meanwhile.
    """
    now = plan(document)
    if now.active != active:
        raise ConfigurationConflict(
            "Another provider was activated in the meantime. Check the file again."
        )
    wanted = read_settings(document)
    who = {"author": author, "author_id": author_id, "reason": reason}
    done: list[ProviderConfig | PendingChange | None] = []
    with transaction.atomic():
        for change in now.changes:
            both = change.provider_id == now.active
            done.append(
                request_change(
                    change.provider_id,
                    Action.SAVE_AND_ACTIVATE if both else Action.SAVE,
                    wanted.configs[change.provider_id],
                    expected_version=versions.get(change.provider_id, -1),
                    **who,  # type: ignore[arg-type]
                )
            )
        if now.active and now.active not in now.versions:
            done.append(request_change(now.active, Action.ACTIVATE, **who))  # type: ignore[arg-type]
    return done
