"""The two-person rule: with it, a change is asked for by one administrator and made by another."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from django.db import IntegrityError, transaction
from django.utils import timezone
from django.views.decorators.debug import sensitive_variables

from providers import guarded, registry
from providers.errors import InvalidConfiguration
from providers.fields import DecryptionError
from providers.guarded import ConfigurationConflict, NotPermitted, two_person_rule
from providers.models import ConfigVersion, PendingChange, ProviderConfig
from providers.services import approvers, guarded_rows, history
from providers.services.configuration import (
    activate,
    merged_config,
    remove_config,
    save_config,
    stored_config,
)
from providers.services.row_changes import collecting

Action = PendingChange.Action
_SAVES = (Action.SAVE, Action.SAVE_AND_ACTIVATE)
_ACTIVATES = (Action.ACTIVATE, Action.SAVE_AND_ACTIVATE)


@sensitive_variables()
def request_change(
    provider_id: str,
    action: PendingChange.Action,
    config: Mapping[str, Any] | None = None,
    *,
    author: str,
    author_id: int | None = None,
    reason: str = "",
    expected_version: int | None = None,
    clear: Collection[str] = (),
) -> ProviderConfig | PendingChange | None:
    """Make a change, or leave it waiting when the two-person rule is on.

    `author_id` is the account that asks: without one nobody can approve what waits.
    Returns the configured provider, the waiting change, or None when the provider was removed.
    Raises InvalidConfiguration and ConfigurationConflict, as the change itself would.
    """
    if two_person_rule():
        return _leave_waiting(
            provider_id,
            action,
            config,
            author=author,
            author_id=author_id,
            reason=reason,
            expected_version=expected_version,
            clear=clear,
        )
    return _make(
        provider_id,
        action,
        config,
        author=author,
        reason=reason,
        expected_version=expected_version,
        clear=clear,
    )


@sensitive_variables()
def request_rollback(
    version: ConfigVersion, *, author: str, author_id: int | None = None, reason: str = ""
) -> ProviderConfig | PendingChange | None:
    """Ask for an earlier configuration to be stored again. Raises as `request_change` does."""
    config = history.config_of(version)
    if not config:
        raise InvalidConfiguration(f"{version} is the removal of the provider: nothing to restore.")
    return request_change(
        version.subject,
        Action.SAVE,
        {key: value for key, value in config.items() if value is not None},
        clear=_emptied(version.subject, config),
        author=author,
        author_id=author_id,
        reason=reason or f"Rolled back to version {version.version}.",
    )


@sensitive_variables()
def approve(change: PendingChange, *, approver: Any) -> None:
    """Make a waiting change in the name of a second account.

    Raises NotPermitted, InvalidConfiguration, ConfigurationConflict; and NotAllowed where the
    account may not make that change itself.
    """
    if why := approvers.why_not(change, approver):
        raise NotPermitted(why)
    try:
        with transaction.atomic():
            _approve(change, approver)
    except IntegrityError:
        raise ConfigurationConflict(
            "The change conflicts with newer data. Reject it, and request it again."
        ) from None


@sensitive_variables()
def _approve(change: PendingChange, approver: Any) -> None:
    approved_by = f"user:{approver.get_username()}"
    config = _asked_config(change)
    _decide(change, PendingChange.Status.APPROVED, approved_by, approver.pk)
    if guarded.is_row(change.subject):
        guarded_rows.refuse_to(approver, guarded_rows.asked_for(change, config))
        guarded_rows.make(change, config, approved_by)
        return
    if change.action in _SAVES:
        _refuse_another(change, config)
    _make(
        change.subject,
        Action(change.action),
        config,
        author=change.author,
        reason=change.reason,
        expected_version=change.base_version,
        clear=_emptied(change.subject, config),
        approved_by=approved_by,
    )


@sensitive_variables()
def _refuse_another(change: PendingChange, config: dict[str, Any] | None) -> None:
    """Raise ConfigurationConflict unless what would be saved is what the approver was shown.

    What waits is encrypted for its column and not for its row: whoever writes to the database can
    put there what another change asks for.
    """
    row = ProviderConfig.objects.filter(provider_id=change.subject).defer("config").first()
    if (row.version if row else 0) != change.base_version:
        raise _changed_meanwhile(change.subject)
    _, diff = _asked_for(change.subject, row, config, _emptied(change.subject, config))
    history.refuse_another(diff, change.diff)


@sensitive_variables()
def _asked_for(
    provider_id: str,
    row: ProviderConfig | None,
    config: Mapping[str, Any] | None,
    clear: Collection[str],
) -> tuple[dict[str, Any], history.Diff]:
    """What would be stored, and what an approver is shown of it."""
    provider = registry.get(provider_id)
    before = stored_config(row) or {}
    cleaned = merged_config(provider, config or {}, before, clear)
    return cleaned, history.difference_of(provider.config_fields, before, cleaned)


def _changed_meanwhile(provider_id: str) -> ConfigurationConflict:
    return ConfigurationConflict(
        f"The configuration of {provider_id!r} was changed in the meantime."
    )


@sensitive_variables()
def _asked_config(change: PendingChange) -> dict[str, Any] | None:
    try:
        return PendingChange.objects.values_list("config", flat=True).get(pk=change.pk)
    except DecryptionError as error:
        raise InvalidConfiguration(f"The requested change cannot be read. {error}") from None


def reject(change: PendingChange, *, decider: Any) -> None:
    """Let a waiting change go. Its author may do that too. Raises NotPermitted."""
    with transaction.atomic():
        rejected_by = f"user:{decider.get_username()}"
        _decide(change, PendingChange.Status.REJECTED, rejected_by, decider.pk)


def _decide(
    change: PendingChange, status: PendingChange.Status, decided_by: str, decided_by_id: int
) -> None:
    waiting = PendingChange.objects.filter(pk=change.pk, status=PendingChange.Status.WAITING)
    if not waiting.update(
        status=status,
        decided_by=decided_by[:200],
        decided_by_id=decided_by_id,
        decided_at=timezone.now(),
        config=None,
    ):
        raise NotPermitted("The change was already approved or rejected.")


@sensitive_variables()
def _make(
    provider_id: str,
    action: PendingChange.Action,
    config: Mapping[str, Any] | None,
    *,
    author: str,
    reason: str,
    expected_version: int | None,
    clear: Collection[str],
    approved_by: str = "",
) -> ProviderConfig | None:
    with transaction.atomic():
        row = ProviderConfig.objects.defer("config").filter(provider_id=provider_id).first()
        if action in _SAVES:
            row = save_config(
                provider_id,
                config or {},
                expected_version=expected_version,
                clear=clear,
                author=author,
                reason=reason,
                approved_by=approved_by,
            )
        elif expected_version not in (None, row.version if row else 0):
            raise _changed_meanwhile(provider_id)
        if action in _ACTIVATES:
            row = activate(provider_id, author=author, reason=reason)
        if action == Action.REMOVE and row is not None:
            # The steps of routes that name the provider go with it.
            with collecting() as touched:
                remove_config(row, author=author, reason=reason, approved_by=approved_by)
            guarded_rows.keep_versions(touched.changes(), author, reason, approved_by)
            return None
    return row


@sensitive_variables()
def _leave_waiting(
    provider_id: str,
    action: PendingChange.Action,
    config: Mapping[str, Any] | None,
    *,
    author: str,
    author_id: int | None,
    reason: str,
    expected_version: int | None,
    clear: Collection[str],
) -> PendingChange:
    row = ProviderConfig.objects.filter(provider_id=provider_id).defer("config").first()
    version = row.version if row else 0
    if expected_version not in (None, version):
        raise _changed_meanwhile(provider_id)
    diff: history.Diff = []
    cleaned = None
    if action in _SAVES:
        cleaned, diff = _asked_for(provider_id, row, config, clear)
    elif row is None:
        raise InvalidConfiguration(
            f"Provider {provider_id!r} has no configuration yet. Save one first.", field="provider"
        )
    with transaction.atomic():
        return PendingChange.objects.create(
            subject=provider_id,
            action=action,
            base_version=version,
            config=cleaned,
            diff=diff,
            author=author[:200],
            author_id=author_id,
            reason=reason[:500],
        )


def _emptied(provider_id: str, config: Mapping[str, Any] | None) -> set[str]:
    """What a complete configuration leaves unset, so that a stored secret does not stay."""
    return {key for key in history.schema_of(provider_id) if (config or {}).get(key) in (None, "")}
