"""The versions of a configuration: written with each change, compared, proved."""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Mapping
from typing import Any

from django.db.models import Max
from django.views.decorators.debug import sensitive_variables

from providers import guarded, registry
from providers.errors import InvalidConfiguration
from providers.fields import DecryptionError
from providers.guarded import ConfigurationConflict
from providers.models import ConfigVersion
from providers.schema import Schema, mask
from providers.signals import configuration_changed, setting_changed

SYSTEM = "system"

Diff = list[dict[str, Any]]


@sensitive_variables()
def record_version(
    subject: str,
    version: int,
    *,
    before: Mapping[str, Any] | None,
    after: Mapping[str, Any],
    author: str,
    reason: str,
    approved_by: str = "",
    shown_as: str = "",
) -> ConfigVersion:
    """Write one version and tell whoever listens. Call it in the transaction of the change.

    A receiver that raises undoes the change.
    """
    salt = secrets.token_hex(16)
    diff = difference_of(schema_of(subject), before or {}, after)
    recorded = ConfigVersion.objects.create(
        subject=subject,
        shown_as=shown_as[:200],
        version=version,
        content={"config": dict(after), "salt": salt},
        content_hash=content_hash(subject, version, after, salt),
        author=author[:200],
        approved_by=approved_by[:200],
        reason=reason[:500],
        diff=diff,
    )
    digest = recorded.content_hash
    if guarded.is_row(subject):
        setting_changed.send(
            sender=ConfigVersion,
            config_id=recorded.pk,
            subject=subject,
            version=version,
            author=author,
            approved_by=approved_by,
            reason=reason,
            diff=diff,
            content_hash=digest,
        )
    else:
        announce(recorded.pk, subject, version, author, reason, diff, digest)
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


def next_version(subject: str) -> int:
    """The version that something configured anew starts with: none is ever used twice."""
    versions = ConfigVersion.objects.filter(subject=subject)
    return (versions.aggregate(last=Max("version"))["last"] or 0) + 1


@sensitive_variables()
def content_hash(subject: str, version: int, config: Mapping[str, Any], salt: str) -> str:
    """`sha256:` and the digest of a version, from its canonical JSON."""
    content = {"provider": subject, "version": version, "config": config, "salt": salt}
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
    found = content_hash(version.subject, version.version, config, content["salt"])
    if found != version.content_hash:
        raise InvalidConfiguration(f"{version} was altered after it was written.")
    return config


@sensitive_variables()
def compare_versions(old: ConfigVersion, new: ConfigVersion) -> Diff:
    """What changed between two versions of one subject. Raises InvalidConfiguration."""
    if old.subject != new.subject:
        raise InvalidConfiguration("Only versions of one provider or setting can be compared.")
    return difference_of(schema_of(new.subject), config_of(old), config_of(new))


@sensitive_variables()
def difference_of(schema: Schema, before: Mapping[str, Any], after: Mapping[str, Any]) -> Diff:
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
        gone, added = new in (None, "", []), old in (None, "", [])
        if gone and added:
            continue
        diff.append(
            {
                "field": key,
                "label": declared.label if declared else key,
                "change": "removed" if gone else "added" if added else "changed",
                "before": _hint(old) if hidden else _without(old, new),
                "after": _hint(new) if hidden else _without(new, old),
            }
        )
    return diff


def refuse_another(diff: Diff, shown: Diff) -> None:
    """Raise ConfigurationConflict when a change would not do what its approver was shown."""
    if json.loads(json.dumps(diff)) != shown:
        raise ConfigurationConflict(
            "The change would differ from the one shown. Reject it, and request it again."
        )


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


def _without(items: Any, others: Any) -> Any:
    """Of a list only what the other one has not; anything else as it is."""
    if not isinstance(items, list):
        return items
    known = others if isinstance(others, list) else []
    return ", ".join(_item(item) for item in items if item not in known)


def _item(item: Any) -> str:
    if isinstance(item, dict):
        return " ".join(f"{name} {_item(value)}" for name, value in item.items())
    return ".".join(map(str, item)) if isinstance(item, list) else str(item)


def _hint(value: Any) -> str | None:
    if value in (None, ""):
        return None
    last = mask(str(value)).lstrip("•")
    return _ENDS + last if last else _HIDDEN


def schema_of(subject: str) -> Schema:
    """The fields of a provider or of a guarded row, none when whatever knew them is gone."""
    try:
        if guarded.is_row(subject):
            return guarded.schema_of_row(guarded.parse(subject)[0])
        return registry.get(subject).config_fields
    except InvalidConfiguration:
        return {}
