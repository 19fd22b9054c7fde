"""The threads that save: they keep their connection while there is work, and end without it."""

from __future__ import annotations

import threading

import pytest
from django.db import connection

from executions.kernel import background

pytestmark = pytest.mark.database


@pytest.fixture
def savers() -> background._KeyedExecutor:
    return background._KeyedExecutor()


def here() -> tuple[int, int]:
    """Which thread this is, and which connection it has."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT 1")
    return threading.get_ident(), id(connection.connection)


@pytest.mark.django_db(transaction=True)
def test_one_save_after_another_has_the_same_connection(savers: background._KeyedExecutor) -> None:
    first = savers.submit("a", "wonderland", here).result(30)
    assert savers.submit("b", "wonderland", here).result(30) == first


@pytest.mark.django_db(transaction=True)
def test_a_saver_without_work_ends_and_the_next_save_has_another(
    savers: background._KeyedExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "IDLE_SECONDS", 0.01)
    saver = savers.submit("a", "wonderland", threading.current_thread).result(30)
    saver.join(30)
    assert not saver.is_alive()
    assert savers.submit("a", "wonderland", here).result(30)


@pytest.mark.only_on("postgresql")
@pytest.mark.django_db(transaction=True)
def test_a_connection_that_was_lost_is_made_anew(savers: background._KeyedExecutor) -> None:
    def lose() -> None:
        here()
        connection.connection.close()
        with pytest.raises(Exception, match="closed"):
            here()

    savers.submit("a", "wonderland", lose).result(30)
    assert savers.submit("a", "wonderland", here).result(30)
