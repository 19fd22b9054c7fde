"""Saving a provider's configuration and choosing the provider that runs the code.

A stored secret is sent to nobody but the receiver it was entered for: whoever may change an address
would otherwise have it sent to one of his own, and read it there.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from django.db import IntegrityError, transaction
from django.db.models import F
from django.utils import timezone
from django.views.decorators.debug import sensitive_variables

from providers import registry
from providers.addresses import places_of
from providers.base import SandboxProvider
from providers.errors import InvalidConfiguration
from providers.fields import DecryptionError
from providers.guarded import ConfigurationConflict
from providers.models import ConfigVersion, ProviderConfig
from providers.schema import ConfigField, Schema, keep_untouched_secrets, mask
from providers.services import history
from providers.services.history import SYSTEM


class Unreadable(InvalidConfiguration):
    """A configuration is stored, and no key of this process opens it."""

    def __init__(self, provider_id: str, error: DecryptionError) -> None:
        super().__init__(
            f"The stored configuration of {provider_id!r} was not changed. {error} "
            "If that key is lost, delete the configuration and enter it again."
        )


@sensitive_variables()
def save_config(
    provider_id: str,
    config: Mapping[str, Any],
    *,
    expected_version: int | None = None,
    clear: Collection[str] = (),
    author: str = SYSTEM,
    reason: str = "",
    approved_by: str = "",
) -> ProviderConfig:
    """Validate and store a configuration; every process takes it up within a second.

    What changes is a new version with its author and reason, in the same transaction.

    A secret that is missing, empty or masked stays what it is, unless `clear` names it.
    `expected_version` is the version the change was made from, 0 for none stored yet.
    Raises InvalidConfiguration naming each refused field, Unreadable when what is stored cannot
    be decrypted, and ConfigurationConflict when the stored version is another.
    """
    provider = registry.get(provider_id)
    row = ProviderConfig.objects.defer("config").filter(provider_id=provider_id).first()
    stored_version = row.version if row else 0
    if expected_version is not None and expected_version != stored_version:
        raise _conflict(provider_id)
    before = stored_config(row)
    cleaned = merged_config(provider, config, before or {}, clear)
    _refuse_shared(provider_id, provider, cleaned)
    if row is not None and cleaned == before:
        return row
    with transaction.atomic():
        row = _create(provider_id, cleaned) if row is None else _update(row, cleaned)
        if row is not None:
            history.record_version(
                provider_id,
                row.version,
                before=before,
                after=cleaned,
                author=author,
                reason=reason,
                approved_by=approved_by,
            )
    if row is None:
        raise _conflict(provider_id)
    return row


@sensitive_variables()
def merged_config(
    provider: type[SandboxProvider],
    config: Mapping[str, Any],
    stored: Mapping[str, Any],
    clear: Collection[str] = (),
) -> dict[str, Any]:
    """The configuration as it would be stored. Raises InvalidConfiguration.

    Also where a secret that was not entered would be sent to another address than before.
    """
    if not isinstance(config, Mapping):
        raise InvalidConfiguration("The configuration must be a JSON object.")
    merged = keep_untouched_secrets(provider.config_fields, config, stored)
    cleaned = provider.check_config({k: v for k, v in merged.items() if k not in clear})
    entered = {k: v for k, v in config.items() if k not in clear}
    check_receivers(provider.config_fields, entered, stored, cleaned)
    return cleaned


@sensitive_variables()
def _refuse_shared(
    provider_id: str, provider: type[SandboxProvider], config: Mapping[str, Any]
) -> None:
    """Raise InvalidConfiguration for what another configuration gives its settings to."""
    if not (name := provider.alone_at):
        return
    for row in ProviderConfig.objects.exclude(provider_id=provider_id).order_by("provider_id"):
        if registry.class_id(row.provider_id) != registry.class_id(provider_id):
            continue
        other = stored_config(row) if is_readable(row) else None
        declared = provider.config_fields[name]
        both = other and places_of(declared, other.get(name)) & places_of(declared, config[name])
        if both:
            raise InvalidConfiguration(
                f"{name}: The configuration {row.provider_id!r} already uses this address, and its "
                "service can have only one set of settings. Enter another one, or change that "
                "configuration.",
                field=name,
            )


@sensitive_variables()
def stored_config(row: ProviderConfig | None) -> dict[str, Any] | None:
    """The row's configuration, None without a row.

    Raises Unreadable where no key opens it: to be replaced it would have to be known to be lost,
    and whoever removes the configuration says that it is.
    """
    if row is None:
        return None
    try:
        config: dict[str, Any] = row.config
    except DecryptionError as error:
        raise Unreadable(row.provider_id, error) from None
    return config


def is_readable(row: ProviderConfig) -> bool:
    try:
        stored_config(row)
    except Unreadable:
        return False
    return True


def remove_config(
    row: ProviderConfig, *, author: str = SYSTEM, reason: str = "", approved_by: str = ""
) -> None:
    """Delete a configuration; its history stays, with the removal as the last version.

    Raises ConfigurationConflict when it was changed at the same moment.
    """
    before = stored_config(row) if is_readable(row) else None
    with transaction.atomic():
        version = max(history.next_version(row.provider_id), row.version + 1)
        # Without its column, which need not be readable to be removed.
        stored = ProviderConfig.objects.defer("config").filter(pk=row.pk, version=row.version)
        if not stored.delete()[0]:
            raise _conflict(row.provider_id)
        history.record_version(
            row.provider_id,
            version,
            before=before,
            after={},
            author=author,
            reason=reason or "Removed.",
            approved_by=approved_by,
        )


def activate(provider_id: str, *, author: str = SYSTEM, reason: str = "") -> ProviderConfig:
    """Make a configured provider the one that runs the code.

    Raises InvalidConfiguration when its configuration is missing or no longer fits its schema,
    and ConfigurationConflict when it was changed, or another one activated, at the same moment.
    """
    provider = registry.get(provider_id)
    row = ProviderConfig.objects.defer("config").filter(provider_id=provider_id).first()
    if row is None:
        raise InvalidConfiguration(
            f"Provider {provider_id!r} has no configuration yet. Save one first.", field="provider"
        )
    provider.check_config(stored_config(row) or {})
    rows = ProviderConfig.objects
    now = timezone.now()
    try:
        with transaction.atomic():
            former = rows.filter(is_active=True).values_list("provider_id", flat=True).first()
            rows.filter(is_active=True).exclude(pk=row.pk).update(is_active=False, updated_at=now)
            checked = rows.filter(pk=row.pk, version=row.version)
            if not checked.update(is_active=True, updated_at=now):
                raise _conflict(provider_id)
            if former != provider_id:
                _announce_active(row, former, author, reason)
    except IntegrityError:
        raise _conflict(provider_id) from None
    row.refresh_from_db(fields=["is_active", "updated_at"])
    return row


def _announce_active(row: ProviderConfig, former: str | None, author: str, reason: str) -> None:
    diff = [
        {
            "field": "active",
            "label": "Active provider",
            "change": "changed" if former else "added",
            "before": former,
            "after": row.provider_id,
        }
    ]
    recorded = ConfigVersion.objects.filter(subject=row.provider_id, version=row.version)
    digest = recorded.values_list("content_hash", flat=True).first() or ""
    history.announce(row.pk, row.provider_id, row.version, author, reason, diff, digest)


@sensitive_variables()
def _create(provider_id: str, config: dict[str, Any]) -> ProviderConfig:
    try:
        with transaction.atomic():
            return ProviderConfig.objects.create(
                provider_id=provider_id, config=config, version=history.next_version(provider_id)
            )
    except IntegrityError:
        raise _conflict(provider_id) from None


@sensitive_variables()
def _update(row: ProviderConfig, config: dict[str, Any]) -> ProviderConfig | None:
    unchanged = ProviderConfig.objects.filter(pk=row.pk, version=row.version)
    if not unchanged.update(config=config, version=F("version") + 1, updated_at=timezone.now()):
        return None
    row.refresh_from_db()
    return row


def _conflict(provider_id: str) -> ConfigurationConflict:
    return ConfigurationConflict(
        f"Another user changed the configuration of {provider_id!r} in the meantime. "
        "Nothing was saved. Reload the page and make your change again."
    )


@sensitive_variables()
def check_receivers(
    schema: Schema,
    entered: Mapping[str, Any],
    stored: Mapping[str, Any],
    cleaned: Mapping[str, Any],
) -> None:
    """Raises InvalidConfiguration naming each secret that has to be entered again.

    `entered` is what somebody wants, `cleaned` what would be stored of it. A secret that came
    empty or masked is kept only while every address is what it was. One of the environment serves
    only with the addresses of the environment, or the provider's own.
    """
    moved = _labels(schema, cleaned, stored)
    given = _labels(schema, cleaned, {})
    errors = {}
    for key, declared in schema.items():
        if not declared.secret:
            continue
        kept = stored.get(key) and entered.get(key) in (None, "", mask(str(stored[key])))
        if kept and cleaned.get(key) and moved:
            errors[key] = f"Enter it again, because {moved} changed."
        elif not cleaned.get(key) and declared.from_environment and given:
            errors[key] = (
                f"Enter it: the environment variable is not sent to an address entered as {given}."
            )
    if errors:
        text = " ".join(f"{key}: {problem}" for key, problem in errors.items())
        raise InvalidConfiguration(text, field=next(iter(errors)), errors=errors)


def _labels(schema: Schema, config: Mapping[str, Any], before: Mapping[str, Any]) -> str:
    """The fields that lead elsewhere than before, by their labels."""
    return ", ".join(
        declared.label
        for key, declared in schema.items()
        if declared.decides_receiver
        and not _same(declared, config.get(key), before.get(key, declared.default))
    )


def _same(declared: ConfigField, value: Any, before: Any) -> bool:
    """Whether both lead to one place, of several to none that is new. Nothing leads to where the
    environment says."""
    own = declared.from_environment or declared.default or ""
    now, former = places_of(declared, value or own), places_of(declared, before or own)
    return now <= former if declared.several else now == former
