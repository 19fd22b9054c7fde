"""Filters that auditors keep under a name."""

from __future__ import annotations

from typing import Any

from django.db.models import Q, QuerySet
from django.http import QueryDict

from executions.kernel.declarations import refuse
from executions.models.saved_filter import SavedFilter

MOST = 50
SHARE = "executions.share_savedfilter"
# Where in the list one was, and what belongs to no list.
_NOT_KEPT = ("p", "e", "_popup", "_to_field", "next", "previous", "from")


def filters_for(user: Any) -> QuerySet[SavedFilter]:
    """The user's own and those that others share."""
    visible = SavedFilter.objects.filter(Q(owner=user) | Q(is_shared=True))
    return visible.select_related("owner").order_by("name", "pk")[: 2 * MOST]


def save_filter(user: Any, name: str, query: str, *, shared: bool = False) -> SavedFilter:
    """Keep a list's query under a name; one of the same name is replaced.

    It is its owner's alone unless it is shared, which takes a permission. Raises
    InvalidConfiguration for a name or a query that cannot be kept, or shared.
    """
    if shared and not user.has_perm(SHARE):
        refuse("shared", "You may not share filters. Save it for yourself.")
    name = name.strip()
    if not name or len(name) > 100 or not name.isprintable():
        refuse("name", "Must be 1 to 100 printable characters.")
    parameters = QueryDict(query.lstrip("?"), mutable=True)
    for parameter in _NOT_KEPT:
        parameters.pop(parameter, None)
    for parameter in [name for name, values in parameters.lists() if not any(values)]:
        del parameters[parameter]
    kept = parameters.urlencode()
    if len(kept) > 1000:
        refuse("query", "Is too long to be stored.")
    if SavedFilter.objects.filter(owner=user).exclude(name=name).count() >= MOST:
        refuse("name", f"At most {MOST} filters can be kept. Remove one first.")
    saved, _ = SavedFilter.objects.update_or_create(
        owner=user, name=name, defaults={"query": kept, "is_shared": shared}
    )
    return saved


def remove_filter(user: Any, pk: int) -> bool:
    """True when it was there and the user's own."""
    return bool(SavedFilter.objects.filter(owner=user, pk=pk).delete()[0])
