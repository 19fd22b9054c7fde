"""Work in several processes: the order of the answers, and whatever ends a process."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from pathlib import Path

import pytest
from django.db import connection
from hypothesis import given, settings
from hypothesis import strategies as st

from executions.kernel.ordered_work import map_in_order
from executions.tenants.models import Tenant


def square(number: int) -> int:
    return number * number


def identify(question: object) -> int:
    return os.getpid()


def children() -> set[str]:
    listed = Path(f"/proc/self/task/{os.getpid()}/children").read_text()
    return set(listed.split())


@settings(max_examples=10, deadline=None)
@given(numbers=st.lists(st.integers()), processes=st.integers(1, 3))
def test_answers_come_in_the_order_of_the_questions(numbers: list[int], processes: int) -> None:
    assert list(map_in_order(square, numbers, processes)) == [square(each) for each in numbers]


def test_one_process_is_this_one_and_several_are_others_which_end_with_the_work() -> None:
    before = children()
    assert set(map_in_order(identify, range(3), 1)) == {os.getpid()}
    assert os.getpid() not in set(map_in_order(identify, range(3), 2))
    with closing(map_in_order(identify, range(100), 2)) as answers:
        next(answers)
        assert len(children() - before) == 2
    assert children() == before


def test_questions_are_asked_at_most_one_ahead_of_each_process() -> None:
    asked = []

    def questions() -> Iterator[int]:
        for number in range(100):
            asked.append(number)
            yield number

    with closing(map_in_order(square, questions(), 2)) as answers:
        assert next(answers) == 0
        assert asked == [0, 1, 2]


def test_what_the_work_raises_is_raised_here() -> None:
    def divide(number: int) -> float:
        return 1 / number

    answers = map_in_order(divide, [1, 0, 1], 2)
    assert next(answers) == 1
    with pytest.raises(ZeroDivisionError):
        list(answers)


def test_a_process_that_is_killed_ends_the_work() -> None:
    def end(number: int) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    before = children()
    with pytest.raises(BrokenProcessPool):
        list(map_in_order(end, range(10), 2))
    assert children() == before


@pytest.mark.only_on("postgresql")
@pytest.mark.django_db(transaction=True)
def test_each_process_has_a_connection_of_its_own() -> None:
    """On SQLite, where a fork beside other threads may hang, `test_verify_processes` does it."""

    def count(number: int) -> tuple[int, int]:
        return Tenant.objects.count(), os.getpid()

    Tenant.objects.create(slug="one")
    counted = list(map_in_order(count, range(4), 2))
    assert {number for number, _ in counted} == {1}
    # The connection of this process still answers.
    Tenant.objects.create(slug="two")
    assert not connection.in_atomic_block
    assert Tenant.objects.count() == 2
