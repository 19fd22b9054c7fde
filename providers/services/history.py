"""The versions of a configuration: written with each change, compared, proved."""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Mapping
from typing import Any

from django.db.models import Max
from django.views.decorators.debug import sensitive_variables

from providers import registry
from providers.errors import InvalidConfiguration
from providers.fields import DecryptionError
from providers.models import ConfigVersion
from providers.schema import Schema, mask
from providers.signals import configuration_changed

SYSTEM = "system"

Diff = list[dict[str, Any]]


@sensitive_variables()
def record_version(
    provider_id: str,
    version: int,
    *,
    before: Mapping[str, Any] | None,
    after: Mapping[str, Any],
    author: str,
    reason: str,
    approved_by: str = "",
) -> ConfigVersion:
    """Write one version and tell whoever listens. Call it in the transaction of the change.

    A receiver that raises undoes the change.
    """
    salt = secrets.token_hex(16)
    diff = compare(schema_of(provider_id), before or {}, after)
    recorded = ConfigVersion.objects.create(
        provider_id=provider_id,
        version=version,
        content={"config": dict(after), "salt": salt},
        content_hash=content_hash(provider_id, version, after, salt),
        author=author[:200],
        approved_by=approved_by[:200],
        reason=reason[:500],
        diff=diff,
    )
    announce(recorded.pk, provider_id, version, author, reason, diff, recorded.content_hash)
    return recorded


def announce(
    config_id: int,
    provider_id: str,
    version: int,
    author: str,
    reason: str,
    diff: Diff,
    digest: str,
) -> None:
    """Send `configuration_changed`. Whatever a receiver raises is raised here."""
    configuration_changed.send(
        sender=ConfigVersion,
        config_id=config_id,
        provider_id=provider_id,
        version=version,
        author=author,
        reason=reason,
        diff=diff,
        content_hash=digest,
    )


def next_version(provider_id: str) -> int:
    """The version a provider that is configured anew starts with: none is ever used twice."""
    versions = ConfigVersion.objects.filter(provider_id=provider_id)
    return (versions.aggregate(last=Max("version"))["last"] or 0) + 1


@sensitive_variables()
def content_hash(provider_id: str, version: int, config: Mapping[str, Any], salt: str) -> str:
    """`sha256:` and the digest of a version, from its canonical JSON."""
    content = {"provider": provider_id, "version": version, "config": config, "salt": salt}
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()


@sensitive_variables()
def config_of(version: ConfigVersion) -> dict[str, Any]:
    """A version's configuration, proved against its hash. Raises InvalidConfiguration."""
    try:
        content = ConfigVersion.objects.values_list("content", flat=True).get(pk=version.pk)
    except DecryptionError as error:
        raise InvalidConfiguration(f"{version} cannot be decrypted. {error}") from None
    config: dict[str, Any] = content["config"]
    found = content_hash(version.provider_id, version.version, config, content["salt"])
    if found != version.content_hash:
        raise InvalidConfiguration(f"{version} was altered after it was written.")
    return config


@sensitive_variables()
def compare_versions(old: ConfigVersion, new: ConfigVersion) -> Diff:
    """What changed between two versions of one provider. Raises InvalidConfiguration."""
    if old.provider_id != new.provider_id:
        raise InvalidConfiguration("Only versions of one provider can be compared.")
    return compare(schema_of(new.provider_id), config_of(old), config_of(new))


@sensitive_variables()
def compare(schema: Schema, before: Mapping[str, Any], after: Mapping[str, Any]) -> Diff:
    """One entry per changed field: `field`, `label`, `change`, and `before` and `after` as shown.

    Of a secret, and of a field the schema does not know, only the last 4 characters are shown.
    """
    diff: Diff = []
    for key in sorted({*before, *after}):
        old, new = before.get(key), after.get(key)
        if old == new and type(old) is type(new):
            continue
        declared = schema.get(key)
        hidden = declared is None or declared.secret
        gone, added = new in (None, ""), old in (None, "")
        diff.append(
            {
                "field": key,
                "label": declared.label if declared else key,
                "change": "removed" if gone else "added" if added else "changed",
                "before": _hint(old) if hidden else old,
                "after": _hint(new) if hidden else new,
            }
        )
    return diff


def summary(diff: Diff) -> str:
    """A diff in one line, such as `Token changed, ends in 1234; Pool size 10 → 20`."""
    return "; ".join(_line(entry) for entry in diff)


def _line(entry: Mapping[str, Any]) -> str:
    before, after = entry["before"], entry["after"]
    if isinstance(after, str) and after.startswith(_ENDS):
        return f"{entry['label']} {entry['change']}, {after}"
    if entry["change"] == "removed" or after == _HIDDEN:
        return f"{entry['label']} {entry['change']}"
    if entry["change"] == "added":
        return f"{entry['label']} set to {_short(after)}"
    return f"{entry['label']} {_short(before)} → {_short(after)}"


def _short(value: Any) -> str:
    text = " ".join(str(value).split())
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


_ENDS = "ends in "
_HIDDEN = "hidden"
# In a line; a page shows the whole.
_LONGEST = 100


def _hint(value: Any) -> str | None:
    if value in (None, ""):
        return None
    last = mask(str(value)).lstrip("•")
    return _ENDS + last if last else _HIDDEN


def schema_of(provider_id: str) -> Schema:
    """The fields a provider declares, none when its package is gone."""
    try:
        return registry.get(provider_id).config_fields
    except InvalidConfiguration:
        return {}
