"""Whose session it is: the one place where sessions are looked up, and who began what on a page."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import cache
from typing import Annotated, Any, cast
from uuid import UUID

from django.contrib.admin.models import ADDITION, LogEntry
from django.contrib.contenttypes.models import ContentType
from django.db import connection
from django.db.models import BooleanField, ExpressionWrapper, Model, Q, QuerySet, Value
from django.db.models.fields.json import KeyTextTransform
from django.db.models.lookups import Exact

from executions.kernel import database
from executions.kernel.database import Columns
from executions.kernel.declarations import Query, declared, newest_first, oldest_first, one_of
from executions.kernel.text import uuid7
from executions.ledger.entry import parse
from executions.ledger.models import LedgerEntry
from executions.runs.models import Execution
from executions.runs.requests import Conflict
from executions.runs.results import DEFAULT_LIMIT, Cursor, Limit
from executions.sessions.ending import DUE, close_if_due
from executions.sessions.models import Session
from executions.sessions.requests import NoSuchSession, ensure_not_ended
from executions.tenants.models import ApiKey, Tenant
from providers.services.guarded_rows import NotAllowed


@declared
class SessionFilter:
    """Which sessions, and where to go on. An empty state stands for all."""

    state: Annotated[str, one_of(Session.State.values)] = ""
    limit: Limit = DEFAULT_LIMIT
    cursor: Cursor | None = None


LIST = Query(SessionFilter, empty_is_none=True)


class _TextNamed(KeyTextTransform):
    """The text under a name, whatever that is. Django takes digits for a place in a list, and
    in the paths of older SQLite no name can hold a quotation mark."""

    def as_postgresql(self, compiler: Any, connection: Any) -> tuple[str, tuple[Any, ...]]:
        lhs, params, (name,) = self.preprocess_lhs(compiler, connection)
        return f"({lhs} ->> %s::text)", (*params, name)

    def as_sqlite(
        self, compiler: Any, connection: Any, **extra_context: Any
    ) -> tuple[str, tuple[Any, ...]]:
        lhs, params, (name,) = self.preprocess_lhs(compiler, connection)
        # Which has true and false as numbers.
        text = "CASE WHEN type IN ('true', 'false') THEN type ELSE CAST(atom AS TEXT) END"
        sql = f"(SELECT {text} FROM json_each({lhs}) WHERE key = %s)"  # noqa: S608
        return sql, (*params, name)


@dataclass(frozen=True)
class Page:
    sessions: list[Session]
    next_cursor: str


def session_of(tenant: Tenant | None, session_id: UUID) -> Session:
    """The tenant's session, as it is now: one that is over age is closed by being looked at, unless
    it is to be saved before (`close_if_due`).

    None stands for staff, whose permissions are not this module's to know. Raises NoSuchSession for
    one that is not there, and for somebody else's.
    """
    sql, before = _with_due()
    with connection.cursor() as cursor:
        cursor.execute(sql, [*before, _ROW.write("id", session_id)])
        row = cursor.fetchone()
    session = None if row is None else _ROW.read(row[:-1])
    if session is None or (tenant is not None and session.tenant_id != tenant.pk):
        raise NoSuchSession("Session not found.")
    is_due = row[-1]
    if is_due and close_if_due(session.pk):
        session.refresh_from_db()
    return session


# What only opening and waking need is encrypted.
_ENCRYPTED = ("env",)
_ROW = Columns(Session, leave_out=_ENCRYPTED)


@cache
def _with_due() -> tuple[str, list[Any]]:
    """The columns of a session by its id and whether it is due, and what stands for the parameters
    before the id."""
    due = Session.objects.defer(*_ENCRYPTED).annotate(is_due=ExpressionWrapper(DUE, BooleanField()))
    sql, values = due.filter(pk=uuid7()).order_by().query.sql_with_params()
    return str(sql), list(values[:-1])


def living_session_of(tenant: Tenant | None, session_id: UUID) -> Session:
    """As `session_of`, for whoever wants to do something in it. It may be asleep.

    Raises Conflict where it has ended.
    """
    session = session_of(tenant, session_id)
    ensure_not_ended(session)
    if session.ref is None and session.state == Session.State.OPEN:
        raise Conflict("The session is still being opened. Try again.", retry_after=1)
    return session


def has_ended(session_id: UUID | None) -> bool:
    """Whether the session was closed or lost, or is no longer there."""
    living = Session.objects.filter(closed_at=None)
    return session_id is None or not living.filter(pk=session_id).exists()


def list_sessions(tenant: Tenant, wanted: SessionFilter) -> Page:
    """A page of the tenant's sessions, newest first.

    Those that are over age and have not been looked after yet are closed by being listed.
    """
    for due in sessions_of(tenant).filter(DUE).values_list("pk", flat=True):
        close_if_due(due)
    found = sessions_of(tenant).select_related("workspace").defer("env", "ref")
    if wanted.state:
        found = found.filter(state=wanted.state)
    return Page(*newest_first(found, wanted.cursor, wanted.limit))


@dataclass(frozen=True)
class LivingFilter:
    """Which sessions that have not ended: in one of these states, whose metadata says all of this,
    opened at a moment or later, of one of these templates ("" is the usual one). None is any."""

    states: Sequence[str]
    metadata: Mapping[str, str] = field(default_factory=dict)
    opened_after: datetime | None = None
    templates: Sequence[str] | None = None
    is_oldest_first: bool = False


def living_sessions(tenant: Tenant, wanted: LivingFilter, cursor: UUID | None, limit: int) -> Page:
    """As `list_sessions`, of those that the filter names."""
    for due in sessions_of(tenant).filter(DUE).values_list("pk", flat=True):
        close_if_due(due)
    found = sessions_of(tenant).filter(state__in=list(wanted.states), closed_at=None).defer("env")
    for name, value in wanted.metadata.items():
        found = found.filter(Exact(_TextNamed(name, "metadata"), Value(value)))
    if wanted.opened_after is not None:
        # SQLite keeps its own clock's milliseconds, as a text that is shorter than what it is
        # compared with.
        found = found.filter(created_at__gt=wanted.opened_after - timedelta(milliseconds=1))
    if wanted.templates is not None:
        found = found.filter(_of_template(wanted.templates))
    order = oldest_first if wanted.is_oldest_first else newest_first
    return Page(*order(found, cursor, limit))


def _of_template(names: Sequence[str]) -> Q:
    """Of these templates, whatever version."""
    found = Q(template__in=list(names))
    for name in filter(None, names):
        found |= Q(template__startswith=f"{name}@")
    return found


def sessions_with_keys(session_id: UUID | None, most: int) -> Iterable[tuple[UUID, int, str]]:
    """Return sessions, each with the id and the hash of the key that opened it: one that has not
    ended, or all that are open.

    Of all tenants, so it is no more than there may be of those: who sleeps is counted for nobody.
    Strangers may ask, so nothing is made of what is found.
    """
    found = Session.objects.filter(closed_at=None, api_key__isnull=False, tenant__isnull=False)
    if session_id is not None:
        found = found.filter(pk=session_id)
    else:
        found = found.filter(state=Session.State.OPEN)
    rows = found.order_by("-pk").values_list("pk", "api_key_id", "api_key__key_hash")
    return cast("Iterable[tuple[UUID, int, str]]", rows[:most])


def expires_at(session: Session) -> datetime:
    """The earlier of both ages; of one that is asleep, the total age."""
    if session.state == Session.State.ASLEEP:
        return ends_by(session)
    return min(session.used_at + timedelta(seconds=session.idle_seconds), ends_by(session))


def ends_by(session: Session) -> datetime:
    """When it has its total age."""
    return session.created_at + timedelta(seconds=session.max_seconds)


def sessions_of(tenant: Tenant | None) -> QuerySet[Session]:
    found = Session.objects.all()
    return found if tenant is None else found.filter(tenant=tenant)


def ensure_unused(api_keys: Collection[ApiKey]) -> None:
    """Before keys are deleted in one transaction: raise NotAllowed where more records name them
    than one transaction may write, for each of these is written then.
    """
    most = database.MOST_ROWS
    # With the tenants, by whose index sessions are found.
    tenants = {key.tenant_id for key in api_keys}
    found = 0
    for model in (Execution, Session):
        named = model.objects.filter(tenant__in=tenants, api_key__in=api_keys).order_by()
        found += named.values("pk")[: most + 1].count()
    if found > most:
        raise NotAllowed(
            f"More than {most} runs and sessions use the selected keys. Revoke them instead: a "
            "revoked key has no access, and is deleted with its tenant."
        )


def record_initiator(person: Any, row: Execution | Session, message: str) -> None:
    """Note that this person, who is signed in, has begun it."""
    LogEntry.objects.create(
        user_id=person.pk,
        content_type_id=ContentType.objects.get_for_model(type(row)).pk,
        object_id=str(row.pk),
        object_repr=str(row.pk),
        action_flag=ADDITION,
        change_message=message,
    )


def initiators(execution_id: UUID) -> list[int]:
    """The accounts by which it was begun, under whatever names they have by now."""
    return _creators(Execution, [str(execution_id)])


def key_creators(execution_id: UUID) -> list[int]:
    """Return the accounts that made the key it was sent with, or one in whose place that key came.
    Also of keys that somebody deleted: the ledger knows them."""
    found = Execution.objects.filter(pk=execution_id).values_list("api_key_prefix", flat=True)
    todo, line, keys = set(found), {""}, set[str]()
    while new := todo - line:
        prefix = new.pop()
        line.add(prefix)
        for pk, rotated_from in _keys_with_prefix(prefix):
            keys.add(pk)
            todo.add(rotated_from)
    return _creators(ApiKey, sorted(keys))


def _keys_with_prefix(prefix: str) -> Iterator[tuple[str, str]]:
    """The keys with this prefix, each with the prefix of the one in whose place it came."""
    for pk, rotated_from in ApiKey.objects.filter(prefix=prefix).values_list("pk", "rotated_from"):
        yield str(pk), rotated_from
    for entry in LedgerEntry.objects.filter(kind="api_key", subject=prefix):
        stated = parse(entry.statement)
        if stated is not None and stated.get("subject") == prefix and "row" in stated:
            yield stated["row"], stated.get("rotated_from") or ""


def _creators(model: type[Model], keys: list[str]) -> list[int]:
    entries = LogEntry.objects.filter(
        content_type=ContentType.objects.get_for_model(model),
        object_id__in=keys,
        action_flag=ADDITION,
    )
    return list(entries.values_list("user_id", flat=True))
