"""When a schedule is due: cron expressions of five fields, in a time zone.

APScheduler reads them. What it understands otherwise than cron does is refused, not guessed.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta, tzinfo
from functools import cache
from zoneinfo import ZoneInfo, available_timezones

from apscheduler.triggers.cron import CronTrigger

MOST_CHARACTERS = 100
# Longer than from one 29th of February to the next, around a century as well.
_HORIZON = timedelta(days=9 * 366)
_PLAIN = re.compile(r"[0-9A-Za-z*,/-]+( +[0-9A-Za-z*,/-]+){4}", re.ASCII)


def check_zone(name: str) -> str:
    """Raises ValueError for what is no name of a time zone."""
    if name != "UTC" and name not in _zones():
        raise ValueError("It is no time zone. Name one as tz database does: Europe/Berlin, or UTC.")
    return name


def check_cron(cron: str) -> str:
    """Raises ValueError for what is no expression, or is one of which readers differ."""
    if not _PLAIN.fullmatch(cron):
        raise ValueError(
            "It is no cron expression. It has five fields: minute, hour, day, month, day of the "
            "week, as in '30 6 * * mon-fri'."
        )
    fields = cron.split()
    if any(character.isdigit() for character in fields[4]):
        raise ValueError(
            "It is no cron expression that is read alike everywhere: name the days of the week, "
            "mon to sun, for their numbers differ."
        )
    if fields[2] != "*" and fields[4] != "*":
        raise ValueError(
            "It is no cron expression that is read alike everywhere: restrict the day of the month "
            "or that of the week, and leave the other a '*'."
        )
    try:
        found = next_time(cron, "UTC", datetime.now(UTC))
    except (ValueError, OverflowError):
        raise ValueError("It is no cron expression: a field is not understood.") from None
    if found is None:
        raise ValueError("It is no cron expression of a day that there is.")
    return cron


def next_time(cron: str, zone: str, after: datetime) -> datetime | None:
    """The first time after this moment, in UTC. Raises ValueError for what is no expression."""
    local = _zone(zone)
    trigger = CronTrigger.from_crontab(cron, timezone=local)
    # Without an end it would look for the 31st of February for thousands of years.
    trigger.end_date = (after + _HORIZON).astimezone(local)
    moment = (after + timedelta(microseconds=1)).astimezone(local)
    found: datetime | None = trigger.get_next_fire_time(None, moment)
    return None if found is None else found.astimezone(UTC)


def _zone(name: str) -> tzinfo:
    return UTC if name == "UTC" else ZoneInfo(name)


@cache
def _zones() -> frozenset[str]:
    return frozenset(available_timezones())
