"""What is sent to PostgreSQL together is executed as if it were sent by itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from django.db import DatabaseError, IntegrityError, OperationalError, connection, transaction
from django.db.backends.postgresql import base as django_engine
from psycopg.pq import TransactionStatus

from executions.kernel.database import is_refusal, problem_of
from executions.kernel.postgresql import DeferredStatement
from executions.kernel.postgresql import base as engine
from executions.kernel.postgresql.base import DatabaseWrapper
from executions.tenants.models import Tenant
from tests.support.round_trips import round_trips

pytestmark = [
    pytest.mark.only_on("postgresql"),
    pytest.mark.django_db(transaction=True),
]

ADD = DeferredStatement("INSERT INTO trips (name) VALUES (%s)")
NAMES = "SELECT name FROM trips ORDER BY name"


@pytest.fixture(autouse=True)
def table() -> Iterator[None]:
    ask("CREATE TABLE trips (name text UNIQUE)")
    yield
    connection.close()
    ask("DROP TABLE trips")


@pytest.fixture
def trips() -> Iterator[list[str]]:
    """The round trips of this thread's connection, which is a new one."""
    connection.close()
    with round_trips() as found:
        ask("SELECT 1")
        found.clear()
        yield found
    connection.close()


def ask(sql: str, values: list[Any] | None = None) -> list[Any]:
    """The first columns of what it returns."""
    with connection.cursor() as cursor:
        cursor.execute(sql, values)
        return [row[0] for row in cursor.fetchall()] if cursor.description else []


def seen_by_others() -> list[Any]:
    other = connection.copy()
    try:
        with other.cursor() as cursor:
            cursor.execute(NAMES)
            return [row[0] for row in cursor.fetchall()]
    finally:
        other.close()


def opened_with(**options: Any) -> DatabaseWrapper:
    """Another connection, with these options."""
    other: Any = connection.copy()
    other.settings_dict["OPTIONS"] = {**other.settings_dict["OPTIONS"], **options}
    opened: DatabaseWrapper = other
    return opened


def is_idle() -> bool:
    status = connection.connection.pgconn.transaction_status
    return bool(status == TransactionStatus.IDLE and not connection.pending)  # type: ignore[attr-defined]


def test_a_transaction_begins_with_its_first_statement(trips: list[str]) -> None:
    with transaction.atomic():
        assert ask("SELECT %s || '%%'", ["a"]) == ["a%"]
        ask("INSERT INTO trips VALUES ('b')")
    assert len(trips) == 3
    assert seen_by_others() == ["b"]


def test_a_transaction_without_a_statement_asks_nothing(trips: list[str]) -> None:
    with transaction.atomic():
        pass
    assert trips == []


def test_what_can_wait_is_sent_with_the_next_statement_and_with_the_commit(
    trips: list[str],
) -> None:
    with transaction.atomic():
        ask(ADD, ["'a;%s"])
        ask(ADD, ["b"])
        with connection.cursor() as cursor:
            cursor.execute("UPDATE trips SET name = name || %s", ["%"])
            assert cursor.rowcount == 2
        ask(ADD, ["c"])
    assert len(trips) == 2
    assert seen_by_others() == ["'a;%s%", "b%", "c"]
    assert is_idle()


def test_outside_of_a_transaction_nothing_waits() -> None:
    ask(ADD, ["a"])
    assert seen_by_others() == ["a"]


def test_what_waits_is_not_executed_where_the_transaction_is_taken_back(trips: list[str]) -> None:
    with pytest.raises(KeyError), transaction.atomic():
        ask(ADD, ["a"])
        raise KeyError
    assert trips == []
    with transaction.atomic():
        ask(ADD, ["b"])
        with pytest.raises(KeyError), transaction.atomic():
            ask(ADD, ["c"])
            raise KeyError
    assert seen_by_others() == ["b"]
    assert is_idle()


@pytest.mark.parametrize("then", ["SELECT 1", "COMMIT"])
def test_an_error_of_what_waits_is_raised_by_what_sends_it(then: str) -> None:
    with pytest.raises(IntegrityError) as raised, transaction.atomic():
        ask(ADD, ["a"])
        ask(ADD, ["a"])
        if then != "COMMIT":
            ask(then)
            pytest.fail("nothing was raised")
    assert isinstance(raised.value.__cause__, psycopg.errors.UniqueViolation)
    assert is_idle()
    assert seen_by_others() == []
    ask(ADD, ["a"])
    assert seen_by_others() == ["a"]


def test_an_error_within_a_savepoint_takes_back_that_alone() -> None:
    with transaction.atomic():
        ask(ADD, ["a"])
        with pytest.raises(IntegrityError), transaction.atomic():
            ask(ADD, ["a"])
        ask(ADD, ["b"])
    assert seen_by_others() == ["a", "b"]


def test_a_value_that_postgresql_cannot_hold_is_refused_where_it_is_given() -> None:
    with pytest.raises(DatabaseError), transaction.atomic():
        with pytest.raises(DatabaseError) as raised:
            ask(ADD, ["\0"])
        raise raised.value
    assert is_idle()


def test_a_value_that_cannot_be_sent_takes_nothing_of_what_waits() -> None:
    with transaction.atomic():
        ask(ADD, ["a"])
        with pytest.raises(DatabaseError):
            ask("SELECT %s", ["\0"])
        ask(ADD, ["b"])
    assert seen_by_others() == ["a", "b"]


def test_a_lock_is_held_from_the_next_statement_on() -> None:
    lock = DeferredStatement("SELECT pg_advisory_xact_lock(%s)")
    held = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND objid = %s"
    with transaction.atomic():
        ask(lock, [4711])
        assert ask(held, [4711]) == [1]
    assert ask(held, [4711]) == [0]


@pytest.mark.parametrize("way", ["executemany", "copy", "stream", "cursor of the server"])
def test_what_is_sent_by_itself_is_of_the_transaction_too(way: str) -> None:
    with pytest.raises(KeyError), transaction.atomic():
        ask(ADD, ["a"])
        with connection.cursor() as cursor:
            if way == "executemany":
                cursor.executemany("INSERT INTO trips VALUES (%s)", [["b"], ["c"]])
            elif way == "copy":
                with cursor.cursor.copy("COPY trips FROM STDIN") as copy:
                    copy.write_row(["b"])
            elif way == "stream":
                assert list(cursor.cursor.stream(NAMES)) == [("a",)]
            else:
                with connection.chunked_cursor() as chunked:
                    chunked.execute(f"{NAMES} FOR UPDATE")
                    assert chunked.fetchall() == [("a",)]
        raise KeyError
    assert seen_by_others() == []
    assert is_idle()


def test_rows_are_held_and_read_in_chunks_within_a_transaction() -> None:
    Tenant.objects.create(slug="a", name="A")
    with transaction.atomic():
        found = Tenant.objects.select_for_update().iterator(chunk_size=1)
        assert [tenant.slug for tenant in found] == ["a"]
    assert [tenant.slug for tenant in Tenant.objects.iterator(chunk_size=1)] == ["a"]


@pytest.mark.parametrize(
    "options",
    [{"server_side_binding": True}, {"isolation_level": psycopg.IsolationLevel.SERIALIZABLE}],
)
def test_a_connection_that_cannot_send_several_sends_each_by_itself(
    options: dict[str, Any],
) -> None:
    other = opened_with(**options)
    try:
        other.set_autocommit(False)
        with other.cursor() as cursor:
            cursor.execute(ADD, ["a"])
            assert cursor.rowcount == 1
            cursor.execute("SHOW transaction_isolation")
            wanted = "serializable" if "isolation_level" in options else "read committed"
            assert cursor.fetchall() == [(wanted,)]
        other.rollback()
        assert seen_by_others() == []
    finally:
        other.close()


def test_several_transactions_follow_each_other_where_autocommit_is_off() -> None:
    other = opened_with()
    try:
        other.set_autocommit(False)
        for name in ("a", "b"):
            with other.cursor() as cursor:
                cursor.execute(ADD, [name])
            other.commit()
        with other.cursor() as cursor:
            cursor.execute(ADD, ["c"])
            cursor.execute(NAMES)
        other.rollback()
        assert seen_by_others() == ["a", "b"]
    finally:
        other.close()


def between_requests() -> None:
    connection.close_if_unusable_or_obsolete()


def test_a_connection_that_has_just_answered_is_not_asked_whether_it_lives(
    trips: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    connection.health_check_enabled = True  # type: ignore[attr-defined]
    between_requests()
    ask(NAMES)
    assert trips == [NAMES]
    monkeypatch.setattr(engine, "TRUST_SECONDS", 0.0)
    between_requests()
    ask(NAMES)
    assert len(trips) == 3


def test_a_connection_that_the_server_has_closed_is_replaced() -> None:
    connection.health_check_enabled = True  # type: ignore[attr-defined]
    [ours] = ask("SELECT pg_backend_pid()")
    end_backend(ours)
    between_requests()
    assert ask("SELECT pg_backend_pid()") != [ours]


def test_a_commit_that_was_not_answered_is_no_refusal() -> None:
    with pytest.raises(OperationalError) as raised, transaction.atomic():
        [ours] = ask("SELECT pg_backend_pid()")
        ask(ADD, ["a"])
        end_backend(ours)
    assert isinstance(raised.value.__cause__, psycopg.OperationalError)
    assert problem_of(raised.value)
    assert not is_refusal(raised.value)
    assert is_idle()
    assert seen_by_others() == []


def test_a_commit_that_the_server_refuses_is_a_refusal() -> None:
    with pytest.raises(OperationalError) as raised, transaction.atomic():
        ask("SET LOCAL statement_timeout = 1")
        ask(ADD, ["a"])
        ask(DeferredStatement("SELECT pg_sleep(60)"))
    assert is_refusal(raised.value)
    assert is_idle()
    assert seen_by_others() == []


def end_backend(pid: int) -> None:
    """End it, and wait until it is gone."""
    other = opened_with()
    try:
        with other.cursor() as cursor:
            cursor.execute("SELECT pg_terminate_backend(%s, 60000)", [pid])
            assert cursor.fetchall() == [(True,)]
    finally:
        other.close()


def test_the_engine_is_djangos_with_another_cursor() -> None:
    assert issubclass(DatabaseWrapper, django_engine.DatabaseWrapper)
    assert connection.connection.cursor_factory is engine.Cursor
