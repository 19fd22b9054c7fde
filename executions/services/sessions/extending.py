"""More time for a session."""

from __future__ import annotations

import math

from django.conf import settings
from django.utils import timezone

from executions.kernel.declarations import refuse
from executions.models.session import Session
from executions.services.sessions.control import change
from executions.services.sessions.requests import SessionChanges


def extend(session: Session, seconds: int, by: str) -> Session:
    """Have it live for so long from now at least, used or not; never shorter than it would.

    Raises InvalidConfiguration where it would then be older than any may be, and Conflict where it
    has ended.
    """
    if seconds <= 0:
        refuse("seconds", "Must be more than 0.")
    age = math.ceil((timezone.now() - session.created_at).total_seconds())
    longest = settings.SESSION_MAX_SECONDS
    if age + seconds > longest:
        refuse("seconds", f"Its maximum age is {longest} s, and it is {age} s old.")
    changes = SessionChanges(
        idle_seconds=max(session.idle_seconds, seconds),
        max_seconds=max(session.max_seconds, age + seconds),
    )
    return change(session, changes, by)
