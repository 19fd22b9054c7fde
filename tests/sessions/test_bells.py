"""One of those who wait for a session looks into the database; the others are rung."""

from __future__ import annotations

from uuid import uuid4

from executions.sessions import cell_order

MANY = 250


def test_one_of_many_who_wait_looks_often() -> None:
    session = uuid4()
    waits = [cell_order.poll_pause(session) for _ in range(MANY)]
    pauses = [each.__enter__() for each in waits]
    for _ in range(2):
        assert sorted(pause(0.1) for pause in pauses) == [0.1] + [cell_order.REST_SECONDS] * (
            MANY - 1
        )
    with cell_order.poll_pause(uuid4()) as another:
        assert another(0.1) == 0.1
    for each in waits:
        each.__exit__(None, None, None)
    assert session not in cell_order._lookers


def test_when_the_one_who_looked_has_done_the_others_are_rung_and_one_of_them_looks() -> None:
    session = uuid4()
    with cell_order.poll_pause(session) as second:
        with cell_order.poll_pause(session) as first:
            assert first(0.1) == 0.1
            assert second(0.1) == cell_order.REST_SECONDS
            with cell_order.waiter(session) as bell:
                assert not bell.done()
        # Hung before the first has done.
        with cell_order.waiter(session) as bell:
            with cell_order.poll_pause(session) as third:
                assert third(0.1) == 0.1
            assert bell.done()
        assert second(0.1) == 0.1


def test_who_only_waits_rings_for_nobody_when_he_leaves() -> None:
    session = uuid4()
    with cell_order.poll_pause(session) as first, cell_order.waiter(session) as bell:
        assert first(0.1) == 0.1
        with cell_order.poll_pause(session) as second:
            assert second(0.1) == cell_order.REST_SECONDS
        assert not bell.done()
