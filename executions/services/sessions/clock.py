"""When sessions are tended: every few seconds, by one of the worker processes.

The schedule, which has the same row for a clock, looks too rarely for that. It does it where no
worker has for a minute.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from datetime import timedelta

from django.conf import settings
from django.db import close_old_connections, connections
from django.db.models import Q
from django.utils import timezone
from django_q.models import Schedule

from executions.services.sessions.due import look_ahead
from executions.services.sessions.tending import tend

logger = logging.getLogger(__name__)

TASK = "executions.tasks.tend_sessions"
LOOK_SECONDS = 1.0


def tend_if_due() -> bool:
    """Tend the sessions unless somebody has within SANDBOX_REAPER_INTERVAL. Whether this did."""
    now = timezone.now()
    interval = timedelta(seconds=settings.SANDBOX_REAPER_INTERVAL)
    due = Schedule.objects.filter(
        # A time that lies further ahead was meant for a longer interval.
        Q(next_run__lte=now) | Q(next_run__gt=now + interval) | Q(next_run=None),
        name=TASK,
    )
    # Of several one wins; those that look too early write nothing.
    if not due.exists() or not due.update(next_run=now + interval):
        return False
    # First: what one tenant's sandboxes hold up must not make the ends of others late.
    look_ahead()
    tend()
    return True


def tend_in_background(goes_on: Callable[[], bool]) -> None:
    """Have a thread of this process look whether it is due, until it does not go on."""

    def work() -> None:
        while goes_on():
            close_old_connections()
            try:
                tend_if_due()
            except Exception:
                logger.exception("the sessions could not be maintained; it is tried again")
            time.sleep(LOOK_SECONDS)
        connections.close_all()

    # What it does is done again by another: nobody waits for it at the end.
    threading.Thread(target=work, name="tending", daemon=True).start()
