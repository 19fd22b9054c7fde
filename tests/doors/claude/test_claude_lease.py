"""The hold on an item of the queue, and for how long it may be believed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from executions.doors.claude.client import Beat, Refused, Unavailable, Work
from executions.doors.claude.environment import NoEnvironment
from executions.doors.claude.serving import Lease

BEATS = (
    (lambda: Beat("1", 5.0, goes_on=False), False),
    (lambda: _raise(Refused(412, "taken")), True),
    (lambda: _raise(Refused(403, "no")), False),
)


def _raise(error: Exception) -> Any:
    raise error


class Server:
    """Answers heartbeats, one after another."""

    def __init__(self, *beats: Callable[[], Any]) -> None:
        self._beats = list(beats)

    def beat(self, *_: Any) -> Any:
        return self._beats.pop(0)()


def lease_at(*beats: Callable[[], Any]) -> tuple[Lease, list[str]]:
    ends: list[str] = []
    server: Any = Server(*beats)
    work = Work("work_1", "sesn_1", None)
    return Lease(server, "env_1", work, lambda: ends.append("end")), ends


@pytest.mark.parametrize(("beat", "is_lost"), BEATS)
def test_a_lease_ends_as_the_server_says(beat: Callable[[], Any], is_lost: bool) -> None:
    lease, ends = lease_at(beat)
    lease.extend(lambda: None)
    assert (lease.is_lost, ends) == (is_lost, ["end"])


def test_a_lease_of_a_key_that_is_gone_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    lease, ends = lease_at()
    lease.extend(lambda: _raise(NoEnvironment("revoked")))
    assert (lease.is_lost, ends) == (True, ["end"])


def test_a_lease_is_over_while_a_heartbeat_takes_long() -> None:
    lease, ends = lease_at()
    lease.end_if_over()
    assert ends == []
    lease.seconds = -1.0
    lease.end_if_over()
    lease.end_if_over()
    assert (lease.is_lost, ends) == (True, ["end"])


def test_a_lease_that_a_server_gives_for_a_day_is_not_believed() -> None:
    lease, _ = lease_at(
        lambda: Beat("1", 80_000.0, goes_on=True), lambda: _raise(Unavailable("away"))
    )
    lease.ended.wait = lambda timeout=None: lease.ended.is_set()  # type: ignore[method-assign]
    with pytest.raises(IndexError):
        lease.extend(lambda: None)
    assert lease.seconds == 600
