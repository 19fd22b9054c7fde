"""When schedules are due where clocks are put forward and back, compared with looking each minute."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from executions.capabilities.schedules.cron import next_time

MINUTE = timedelta(minutes=1)
# Clocks that leave out midnight, two hours or half an hour, and some that are usual or never change.
ZONES = (
    *("America/Havana", "Africa/Cairo", "Asia/Beirut", "America/Santiago", "Australia/Lord_Howe"),
    *("Antarctica/Troll", "Europe/Berlin", "America/New_York", "America/Nuuk", "Asia/Kolkata"),
    "UTC",
)
# Minutes and hours of each, so that the slow model need not read expressions.
FIELDS = {"*": range(60), "0": (0,), "30": (30,), "*/20": (0, 20, 40), "5,59": (5, 59)}
HOURS = {
    "*": range(24),
    "0": (0,),
    "2": (2,),
    "0,23": (0, 23),
    "1-3": (1, 2, 3),
    "*/6": range(0, 24, 6),
}


def looked_for(minute: str, hour: str, zone: str, after: datetime) -> datetime | None:
    """Each minute is looked at, and whether the clock has just left out one that is meant."""
    local = ZoneInfo(zone)
    moment = after.replace(second=0, microsecond=0)
    for _ in range(3 * 24 * 60):
        moment += MINUTE
        now, shown = moment.astimezone(local), {moment.astimezone(local).replace(tzinfo=None)}
        earlier = (moment - timedelta(hours=3)).astimezone(local).utcoffset()
        assert earlier is not None
        unchanged = (moment + earlier).replace(tzinfo=None)
        if (
            unchanged.replace(tzinfo=local).astimezone(UTC).astimezone(local).replace(tzinfo=None)
            != unchanged
        ):
            # There is no such time that day.
            shown.add(unchanged)
        if any(each.minute in FIELDS[minute] and each.hour in HOURS[hour] for each in shown):
            return now.astimezone(UTC)
    return None


CHANGES = {
    zone: [
        day
        for day in (datetime(2025, 1, 1, tzinfo=UTC) + timedelta(days=n) for n in range(1100))
        if day.astimezone(ZoneInfo(zone)).utcoffset()
        != (day + timedelta(days=1)).astimezone(ZoneInfo(zone)).utcoffset()
    ]
    or [datetime(2026, 3, 1, tzinfo=UTC)]
    for zone in ZONES
}


@st.composite
def moments(draw: st.DrawFn) -> tuple[str, datetime]:
    """A zone, and a moment of the days around a change of its clock."""
    zone = draw(st.sampled_from(ZONES))
    change = draw(st.sampled_from(CHANGES[zone]))
    seconds = draw(st.integers(-86400, 2 * 86400))
    return zone, change + timedelta(seconds=seconds)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(sorted(FIELDS)), st.sampled_from(sorted(HOURS)), moments())
@example("0", "0", ("America/Havana", datetime(2026, 3, 7, 12, tzinfo=UTC)))
@example("30", "2", ("Europe/Berlin", datetime(2026, 3, 29, 1, 10, tzinfo=UTC)))
def test_it_is_due_when_looking_each_minute_finds_it(
    minute: str, hour: str, where: tuple[str, datetime]
) -> None:
    zone, after = where
    found = next_time(f"{minute} {hour} * * *", zone, after)
    assert found == looked_for(minute, hour, zone, after)


@pytest.mark.parametrize(
    ("cron", "zone", "after", "expected"),
    [
        ("0 0 * * *", "America/Havana", "2026-03-07T12:00", "2026-03-08T01:00-04:00"),
        ("0 0 * * sun", "America/Havana", "2026-03-07T12:00", "2026-03-08T01:00-04:00"),
        ("30 0,5 * * *", "America/Havana", "2026-03-08T05:30", "2026-03-08T05:30-04:00"),
        ("15 0 * * *", "Africa/Cairo", "2026-04-23T12:00", "2026-04-24T01:15+03:00"),
        ("0 0 * * *", "Asia/Beirut", "2026-03-28T12:00", "2026-03-29T01:00+03:00"),
        ("0 0 * * *", "America/Santiago", "2026-09-05T12:00", "2026-09-06T01:00-03:00"),
        ("0 0 * * *", "America/Havana", "2026-03-08T05:00", "2026-03-09T00:00-04:00"),
        ("30 2 * * *", "Europe/Berlin", "2026-03-28T12:00", "2026-03-29T03:30+02:00"),
    ],
)
def test_what_a_clock_leaves_out_is_due_after_it(
    cron: str, zone: str, after: str, expected: str
) -> None:
    found = next_time(cron, zone, datetime.fromisoformat(after).replace(tzinfo=UTC))
    assert found == datetime.fromisoformat(expected)
