"""Provider settings as the records of a `system_settings.json`, in and out."""

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
from providers.models import ProviderConfig
from providers.schema import mask_secrets
from providers.services import history
from providers.services.configuration import activate, save_config, stored_config

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
