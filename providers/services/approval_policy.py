"""Whether the two-person rule is on, and what stands in the way of a change."""

from __future__ import annotations

from django.conf import settings

from providers.guarded import Guarded


class ConfigurationConflict(Exception):
    """Somebody else changed the configuration first. Nothing was saved."""


class NotPermitted(Exception):
    """Whoever asked for a change cannot approve it, and it can be decided only once."""


def two_person_rule() -> bool:
    return bool(settings.TWO_PERSON_RULE)


def rule_holds_for(guarded: Guarded) -> bool:
    """Whether changes of these rows wait for a second person, where they take two."""
    return guarded.two_always or two_person_rule()
