"""What a tenant asks of a schedule."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from executions.kernel.declarations import END, STORABLE, Body, Query, Rule, declared
from executions.runs.listing import DEFAULT_LIMIT, Cursor, Limit
from executions.services.recurring import body
from executions.services.recurring.cron import CRON, MOST_CHARACTERS, check_cron, check_zone

# Of the names in the tz database.
_ZONE = "[A-Za-z0-9_+-]+(/[A-Za-z0-9_+-]+)*"
Name = Annotated[str, Field(min_length=1, max_length=100), STORABLE]
Cron = Annotated[
    str,
    Field(
        max_length=MOST_CHARACTERS,
        description="Minute, hour, day, month, and the day of the week as a name: `30 6 * * "
        "mon-fri`.",
    ),
    Rule(check_cron, {"format": "cron", "pattern": f"^{CRON}{END}"}),
]
Zone = Annotated[
    str,
    Field(max_length=64, description="A time zone, such as `UTC` or `Europe/Berlin`."),
    Rule(check_zone, {"format": "time-zone", "pattern": f"^{_ZONE}{END}"}),
]
Scheduled = Annotated[
    Mapping[str, Any],
    Rule(lambda sent: sent, body.SCHEDULED.schema),
    Field(description="The request for each run: a body of `POST /api/v1/executions`."),
]


@declared
class ScheduleRequest:
    """Have a request run at the times of a cron expression."""

    name: Name
    cron: Cron
    request: Scheduled
    timezone: Zone = "UTC"
    paused: bool = False

    def __post_init__(self) -> None:
        body.read_scheduled(self.request)


@declared
class ScheduleChange:
    """What is to be otherwise; what is left out stays."""

    name: Name | None = None
    cron: Cron | None = None
    request: Scheduled | None = None
    timezone: Zone | None = None
    paused: bool | None = None

    def __post_init__(self) -> None:
        if self.request is not None:
            body.read_scheduled(self.request)


@declared
class ScheduleFilter:
    """Where to go on."""

    limit: Limit = DEFAULT_LIMIT
    cursor: Cursor | None = None


CREATE = Body(ScheduleRequest, "ScheduleRequest")
CHANGE = Body(ScheduleChange, "ScheduleChange")
LIST = Query(ScheduleFilter, empty_is_none=True)
