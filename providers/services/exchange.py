"""Provider settings as the records of a `system_settings.json`, in and out. A file that a person
brings in is looked at first, then made or left waiting.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from django.db import transaction
from django.views.decorators.debug import sensitive_variables

from providers import registry
from providers.errors import InvalidConfiguration
from providers.guarded import ConfigurationConflict
from providers.models import PendingChange, ProviderConfig
from providers.schema import mask_secrets
from providers.services import history
from providers.services.approval import request_change
from providers.services.configuration import activate, merged_config, save_config, stored_config

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


ACTIVE = "sandbox.provider_type"
_PREFIX = "sandbox."


@dataclass
class Imported:
    """Which providers were saved, which were left alone and why, and which is active now."""

    saved: list[str] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    active: str | None = None


@sensitive_variables()
def import_settings(document: Any, *, author: str, reason: str = "") -> Imported:
    """Take over the `sandbox.*` records, all or none; other records are not ours.

    A provider whose required values are all empty is a template nobody filled in, and one that
    is not installed here is somebody else's: both are skipped, unless they are to be active.
    Raises InvalidConfiguration naming the record.
    """
    wanted = read_settings(document)
    imported = Imported(skipped=wanted.skipped)
    with transaction.atomic():
        for provider_id, config in wanted.configs.items():
            with naming(provider_id):
                save_config(provider_id, config, author=author, reason=reason)
            imported.saved.append(provider_id)
        if wanted.active:
            activate(wanted.active, author=author, reason=reason)
            imported.active = wanted.active
    return imported


@dataclass(frozen=True)
class Wanted:
    """What a file asks for: configurations by provider, and which is to be active, "" for none."""

    configs: dict[str, dict[str, Any]]
    skipped: dict[str, str]
    active: str


@sensitive_variables()
def read_settings(document: Any) -> Wanted:
    """The `sandbox.*` records of a document. Raises InvalidConfiguration naming the record."""
    records = _records(document)
    active = records.pop(ACTIVE, "")
    configs: dict[str, dict[str, Any]] = {}
    skipped: dict[str, str] = {}
    for name, text in records.items():
        provider_id = name.removeprefix(_PREFIX)
        config = _json(name, text)
        if why := _reason_to_skip(provider_id, config):
            skipped[provider_id] = why
            continue
        configs[provider_id] = config
    if active in skipped:
        raise InvalidConfiguration(f"{ACTIVE}: {active!r}: {skipped[active]}", field=ACTIVE)
    return Wanted(configs, skipped, active)


@contextmanager
def naming(provider_id: str) -> Iterator[None]:
    """Have what is refused name the record that it was refused of."""
    name = _PREFIX + provider_id
    try:
        yield
    except InvalidConfiguration as error:
        raise InvalidConfiguration(f"{name}: {error.message}", field=name) from None


@sensitive_variables()
def export_settings(*, with_secrets: bool = False) -> dict[str, Any]:
    """The same form, secrets masked unless asked for. Reading it back keeps what is masked."""
    rows = list(ProviderConfig.objects.defer("config").order_by("provider_id"))
    active = next((row.provider_id for row in rows if row.is_active), "")
    records = [_record(ACTIVE, "string", active)]
    for row in rows:
        config = stored_config(row) or {}
        set_values = {key: value for key, value in config.items() if value is not None}
        if not with_secrets:
            set_values = mask_secrets(history.schema_of(row.provider_id), set_values)
        text = json.dumps(set_values, ensure_ascii=False)
        records.append(_record(_PREFIX + row.provider_id, "json", text))
    return {"system_settings": records}


def _record(name: str, data_type: str, value: str) -> dict[str, str]:
    return {"name": name, "source": "variable", "data_type": data_type, "value": value}


@sensitive_variables()
def _records(document: Any) -> dict[str, str]:
    entries = document.get("system_settings") if isinstance(document, Mapping) else None
    if not isinstance(entries, list):
        raise InvalidConfiguration("The file must be a JSON object with the list system_settings.")
    records: dict[str, str] = {}
    for number, entry in enumerate(entries, start=1):
        name = entry.get("name") if isinstance(entry, Mapping) else None
        if not isinstance(name, str):
            raise InvalidConfiguration(f"Record {number} has no name.")
        if not name.startswith(_PREFIX):
            continue
        if name in records or not isinstance(entry.get("value"), str):
            raise InvalidConfiguration(f"{name}: Must appear once, with a string as value.")
        records[name] = entry["value"]
    return records


@sensitive_variables()
def _json(name: str, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        raise InvalidConfiguration(f"{name}: The value is not JSON.", field=name) from None
    if not isinstance(value, dict):
        raise InvalidConfiguration(f"{name}: The value must be a JSON object.", field=name)
    return value


@sensitive_variables()
def _reason_to_skip(provider_id: str, config: Mapping[str, Any]) -> str:
    try:
        schema = registry.get(provider_id).config_fields
    except InvalidConfiguration as error:
        return error.message
    required = [key for key in schema if schema[key].required and schema[key].default is None]
    if required and all(config.get(key) in (None, "") for key in required):
        return f"Not configured: {', '.join(required)} empty."
    return ""
