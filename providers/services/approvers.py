"""Who may approve: a second person, which is more than a second name.

Two accounts count as one person when one had the other in its hands, or both were in the hands of
the same third (`AccountHold`). And whoever approves had the right before the change was asked for.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import combinations
from typing import Any

from django.contrib.auth import get_user_model

from providers.models import AccountHold, ConfigVersion, PendingChange
from providers.services.history import SYSTEM

APPROVE = "providers.change_pendingchange"
_BACKEND = "django.contrib.auth.backends.ModelBackend"
_LOOKED_AT = 100
_REMEDY = "If they are different people, run `manage.py confirm_account {}` on the server."


def why_not(change: PendingChange, approver: Any) -> str:
    """Why this account may not approve the change, "" when it may."""
    if not (approver.is_active and approver.has_perm(APPROVE)):
        return "You don't have permission to approve changes."
    if change.author_id is None or change.author_id == approver.pk:
        return "A second person has to approve it."
    author = get_user_model()._default_manager.filter(pk=change.author_id).first()
    if author is None or not author.is_active:
        return "The account that requested it is gone. Reject the change, and request it again."
    if shared := persons_behind(approver.pk) & persons_behind(change.author_id):
        names = _names(shared)
        return (
            f"Your account and {author.get_username()} count as one person: {names} created one of "
            "them, or set its password, authenticator or rights. Another person has to approve it. "
            + _REMEDY.format(approver.get_username())
        )
    if _gained_rights_since(change, approver):
        return "Your rights are newer than this change. Another person has to approve it."
    return ""


def can_approve() -> bool:
    """Whether there are two accounts of two persons who may approve, so that anything can be."""
    users = get_user_model()._default_manager
    may = users.with_perm(APPROVE, backend=_BACKEND).filter(is_staff=True)
    persons = [persons_behind(pk) for pk in may.values_list("pk", flat=True)[:_LOOKED_AT]]
    return any(not one & other for one, other in combinations(persons, 2))


def persons_behind(account_id: int) -> set[int]:
    """The account, whoever had it in hand, whoever had those in hand, and so on."""
    found: set[int] = set()
    frontier = {account_id}
    while frontier:
        found |= frontier
        holds = AccountHold.objects.filter(account_id__in=frontier, released_at=None)
        frontier = set(holds.values_list("holder_id", flat=True)) - found
    return found


def hold(account_ids: Iterable[int], holder_id: int) -> None:
    """Keep that `holder_id` had these accounts in hand. One's own is one's own."""
    for pk in sorted({pk for pk in account_ids if pk != holder_id}):
        AccountHold.objects.create(account_id=pk, holder_id=holder_id)


def _names(account_ids: set[int]) -> str:
    users = get_user_model()._default_manager.filter(pk__in=account_ids)
    known = sorted(user.get_username() for user in users)
    return ", ".join(known) or "an account that is gone"


def _gained_rights_since(change: PendingChange, approver: Any) -> bool:
    if getattr(approver, "date_joined", change.created_at) > change.created_at:
        return True
    subjects = [f"{approver._meta.label_lower}:{approver.pk}"]
    subjects += [f"{group._meta.label_lower}:{group.pk}" for group in approver.groups.all()]
    since = ConfigVersion.objects.filter(subject__in=subjects, created_at__gt=change.created_at)
    # What was only found gave no rights.
    return since.exclude(author=SYSTEM).exists()
