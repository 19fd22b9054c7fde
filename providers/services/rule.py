"""Whether the two-person rule is on, and what stands in the way of a change."""

from __future__ import annotations

from django.conf import settings


class ConfigurationConflict(Exception):
    """Somebody else changed the configuration first. Nothing was saved."""


class NotPermitted(Exception):
    """Whoever asked for a change cannot approve it, and it can be decided only once."""


def two_person_rule() -> bool:
    return bool(settings.TWO_PERSON_RULE)
