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
_FIELD, _WEEKDAY = "[0-9A-Za-z*,/-]+", "[A-Za-z*,/-]+"
_PLAIN = re.compile(rf"{_FIELD}( +{_FIELD}){{4}}", re.ASCII)
# As far as a pattern can say it: one of the two kinds of days is `*`, and weekdays have names.
CRON = rf"{_FIELD} +{_FIELD} +(\* +{_FIELD} +{_WEEKDAY}|{_FIELD} +{_FIELD} +\*)"


def check_zone(name: str) -> str:
    """Raises ValueError for what is no name of a time zone."""
    if name != "UTC" and name not in _zones():
        raise ValueError(
            "Unknown time zone. Use a name of the tz database, such as Europe/Berlin, or UTC."
        )
    return name


def check_cron(cron: str) -> str:
    """Raises ValueError for what is no expression, or is one of which readers differ."""
    if not _PLAIN.fullmatch(cron):
        raise ValueError(
            "Invalid cron expression. Use five fields: minute, hour, day, month, day of the week, "
            "as in '30 6 * * mon-fri'."
        )
    fields = cron.split()
    if any(character.isdigit() for character in fields[4]):
        raise ValueError(
            "Ambiguous cron expression. Use the names mon to sun instead of numbers for the days "
            "of the week."
        )
    if fields[2] != "*" and fields[4] != "*":
        raise ValueError(
            "Ambiguous cron expression. Restrict either the day of the month or the day of the "
            "week, and use '*' for the other."
        )
    try:
        found = next_time(cron, "UTC", datetime.now(UTC))
    except (ValueError, OverflowError):
        raise ValueError("Invalid cron expression: a field has no valid value.") from None
    if found is None:
        raise ValueError("Invalid cron expression: there is no such day.")
    return cron


def next_time(cron: str, zone: str, after: datetime) -> datetime | None:
    """The first time after this moment, in UTC. Raises ValueError for what is no expression."""
    local = _zone(zone)
    moment = (after + timedelta(microseconds=1)).astimezone(local)
    found = [_first(cron, moment), _first_on_the_wall(cron, after, local)]
    return min((each for each in found if each is not None), default=None)


def _first_on_the_wall(cron: str, after: datetime, local: tzinfo) -> datetime | None:
    """The first time after this moment, of a wall clock that leaves nothing out.

    What the zone's clock leaves out is due after it, as much later as that was put forward. Asked
    in the zone itself, APScheduler leaves out the day of which midnight is.
    """
    # As the clock was a day ago: what was left out since may be still to come.
    before = (after - timedelta(days=1)).astimezone(local).utcoffset()
    wall = min(after.astimezone(UTC) + (before or timedelta()), _as_utc(after.astimezone(local)))
    while (found := _first(cron, wall)) is not None:
        if (moment := found.replace(tzinfo=local).astimezone(UTC)) > after:
            return moment
        wall = found + timedelta(microseconds=1)
    return None


def _as_utc(moment: datetime) -> datetime:
    """What the clock on the wall shows."""
    return moment.replace(tzinfo=UTC, fold=0)


def _first(cron: str, moment: datetime) -> datetime | None:
    """The first time from this moment on, in its zone."""
    trigger = CronTrigger.from_crontab(cron, timezone=moment.tzinfo)
    # Without an end it would look for the 31st of February for thousands of years.
    trigger.end_date = moment + _HORIZON
    found: datetime | None = trigger.get_next_fire_time(None, moment)
    return None if found is None else found.astimezone(UTC)


def _zone(name: str) -> tzinfo:
    return UTC if name == "UTC" else ZoneInfo(name)


@cache
def _zones() -> frozenset[str]:
    return frozenset(available_timezones())
