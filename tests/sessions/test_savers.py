"""The threads that save: they keep their connection while there is work, and end without it."""

from __future__ import annotations

import threading

import pytest
from django.db import connection

from executions.kernel.background import Executor

pytestmark = pytest.mark.database


def saver_threads(idle_seconds: float = 10.0) -> Executor:
    return Executor("saver", threads=8, of_one=3, idle_seconds=idle_seconds)


@pytest.fixture
def savers() -> Executor:
    return saver_threads()


def here() -> tuple[int, int]:
    """Which thread this is, and which connection it has."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT 1")
    return threading.get_ident(), id(connection.connection)


@pytest.mark.django_db(transaction=True)
def test_one_save_after_another_has_the_same_connection(savers: Executor) -> None:
    first = savers.submit("wonderland", here, key="a").result(60)
    assert savers.submit("wonderland", here, key="b").result(60) == first


@pytest.mark.django_db(transaction=True)
def test_a_saver_without_work_ends_and_the_next_save_has_another() -> None:
    savers = saver_threads(idle_seconds=0.01)
    saver = savers.submit("wonderland", threading.current_thread, key="a").result(60)
    saver.join(60)
    assert not saver.is_alive()
    assert savers.submit("wonderland", here, key="a").result(60)


@pytest.mark.only_on("postgresql")
@pytest.mark.django_db(transaction=True)
def test_a_connection_that_was_lost_is_made_anew(savers: Executor) -> None:
    def lose() -> None:
        here()
        connection.connection.close()
        with pytest.raises(Exception, match="closed"):
            here()

    savers.submit("wonderland", lose, key="a").result(60)
    assert savers.submit("wonderland", here, key="a").result(60)
