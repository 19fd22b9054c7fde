"""Adding an entry, and entering what happened to a bound row.

An entry is added under a lock, in the caller's transaction, and signed together with its place. Of
a bound row it has one hash over all that is bound, and the entry that spoke of the row last is
found by an index.

The index is a column, `bound_row`, which repeats the signed statement. Whoever changes it can hide
an entry from here for a time. `verify_ledger` compares it with the statement. What was entered
meanwhile is a finding for good: each entry names the hash of the row before, and that is not the
one of the hidden entry.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime
from decimal import Decimal
from typing import Any, cast
from uuid import UUID

from django.db import transaction
from django.db.models import Model

from executions.kernel.audit import current_actor, log_entry
from executions.kernel.text import storable_value
from executions.ledger import checkpoints
from executions.ledger.bindings import (
    ACCEPTED,
    ALTERED,
    BASELINE,
    BINDINGS,
    DELETED,
    FOUND,
    NEVER_ENTERED,
    NOT_COMPARED,
    NOT_VOUCHED_FOR,
    RowsRead,
    columns_of,
    encrypted_columns,
    model_of,
    row_hash,
)
from executions.ledger.entry import (
    LedgerUnavailable,
    add,
    bound_row_of,
    column_of,
    lock_ledger,
    moment,
    parse,
    read_head,
    row_name,
    signing_key,
)
from executions.ledger.erasures import authentic
from executions.ledger.models import LedgerEntry
from executions.ledger.trust import configured_keys, introduce, trusted_keys
from executions.ledger.verification import verify_entry
from providers.fields import DecryptionError

logger = logging.getLogger(__name__)

_MOST_KEPT = 2000


@dataclass(frozen=True)
class LastEntry:
    """What an entry says of a row. `problem` says why it cannot be believed, "" where it can;
    `is_forged` whether it is not what one of our keys signed."""

    sequence: int
    stated: Mapping[str, Any]
    problem: str = ""
    is_forged: bool = False

    @property
    def is_there(self) -> bool:
        """Whether the row is there, by this entry."""
        return self.stated["action"] != DELETED and self.stated["row_hash"] is not None

    @property
    def columns(self) -> list[str]:
        return cast("list[str]", self.stated["columns"])

    @property
    def row_hash(self) -> str | None:
        return cast("str | None", self.stated["row_hash"])

    @property
    def altered_at(self) -> int | None:
        """The entry that tells of an alteration which nobody has accepted since."""
        if self.stated["action"] == ALTERED:
            return self.sequence
        return cast("int | None", self.stated.get("altered_at"))


def last_entry(label: str, row: str) -> LastEntry | None:
    """The newest entry of a row, None where there is none. Raises LedgerUnavailable.

    It is only then the newest for long when the caller's transaction holds the row.
    """
    of_row = LedgerEntry.objects.filter(bound_row=row_name(label, row))
    found = of_row.order_by("-sequence").first()
    return None if found is None else _read(found, label, row)


def _read(entry: LedgerEntry, label: str, row: str) -> LastEntry:
    keys = configured_keys()
    if entry.key_id not in keys:
        keys = trusted_keys()
    stated = authentic(entry, keys)
    if stated is not None and bound_row_of(stated) == row_name(label, row):
        return LastEntry(entry.sequence, stated)
    nothing: dict[str, Any] = {"action": "", "row_hash": None, "columns": []}
    if entry.key_id not in keys:
        problem = f"no key of LEDGER_KEYS vouches for entry {entry.sequence}"
        return LastEntry(entry.sequence, nothing, problem)
    problem = f"its entry {entry.sequence} is not what was signed"
    return LastEntry(entry.sequence, nothing, problem, is_forged=True)


def rows_by_subject(label: str, subject: str) -> list[str]:
    """Return the rows of a model that some entry calls by this subject. They may be called
    otherwise by now, or be gone."""
    entries = LedgerEntry.objects.filter(kind=BINDINGS[label].kind, subject=column_of(subject))
    stated = filter(None, (parse(entry.statement) for entry in entries))
    said = (label, subject)
    return sorted(
        {str(each["row"]) for each in stated if (each.get("model"), each.get("subject")) == said}
    )


def has_baseline_of(label: str) -> bool:
    """Whether stock was taken of the rows of this model, so that each must have an entry."""
    baselines = LedgerEntry.objects.filter(kind=BASELINE).order_by("-sequence")
    if not (entries := list(baselines)):
        return False
    keys = trusted_keys()
    return any(label in (authentic(entry, keys) or {"models": ()})["models"] for entry in entries)


class _Written(threading.local):
    """The newest entry of each row that this thread has written, which may be undone by now, and
    how many it had written then."""

    def __init__(self) -> None:
        self.number = 0
        self.entries: dict[tuple[str, str], tuple[int, LedgerEntry]] = {}


_written = _Written()


def write_count() -> int:
    """Return how many entries of rows this thread has written."""
    return _written.number


def note_write(label: str, row: str, entry: LedgerEntry) -> None:
    if len(_written.entries) >= _MOST_KEPT:
        _written.entries.clear()
    _written.number += 1
    _written.entries[label, row] = (_written.number, entry)


def entry_since(label: str, row: str, number: int) -> LedgerEntry | None:
    """Return the newest entry of the row, if this thread has written it after `number` others and
    it was not undone."""
    written, entry = _written.entries.get((label, row), (0, None))
    if entry is None or written <= number:
        return None
    there = LedgerEntry.objects.filter(sequence=entry.sequence, digest=entry.digest)
    return entry if there.exists() else None


RESERVED = frozenset(
    ("ledger", "sequence", "previous", "key_id", "kind", "subject", "at", "signature")
)


def append(
    kind: str,
    subject: str,
    content: Mapping[str, Any],
    *,
    execution_id: UUID | None = None,
) -> LedgerEntry:
    """Enter what happened to `subject`, in the transaction that makes it happen.

    `content` is JSON without secrets. Opens a transaction when there is none. Raises
    LedgerUnavailable when no key may continue the ledger; the caller's change must then not be
    committed, as with any other error from here.
    """
    if taken := RESERVED & content.keys():
        raise ValueError(f"an entry names these itself: {', '.join(sorted(taken))}")
    if kind != "execution":
        content = {"actor": current_actor(), **content}
    with transaction.atomic(savepoint=False):
        head = read_head(lock=True)
        is_first = head is None
        key = signing_key()
        if head is None or head.key_id != key.key_id:
            head = introduce(key, head)
        entry = add(head, key, kind, subject, content, execution_id)
        transaction.on_commit(lambda: checkpoints.note(entry, None if is_first else head))
        if kind != "execution":
            transaction.on_commit(lambda: log_entry(entry, subject, content))
    return entry


# What lets somebody sign in.
_ACCOUNTS = frozenset(("auth.user", "otp_totp.totpdevice", "sandbox_site.recoverycode"))


@dataclass(frozen=True)
class Before:
    """A row before a change.

    `said` is what the entry of the change says of it: the hash that its last entry has, None where
    there was no row, NEVER_ENTERED, NOT_VOUCHED_FOR or NOT_COMPARED.
    `altered_at` is the entry that tells of an alteration which nobody has accepted since. `written`
    is how many entries this thread had written by then.
    """

    said: str | None
    altered_at: int | None = None
    written: int = field(default_factory=write_count)


@dataclass
class _Save:
    """A row that this thread saves now; `pk` is None for one that gets its key from the database.
    `nested` are rows that a receiver changed before the entry of their creation was made."""

    label: str
    pk: str | None
    is_new: bool = False
    before: Before | None = None
    nested: set[str] = field(default_factory=set)


class _Saves(threading.local):
    def __init__(self) -> None:
        self.open: list[_Save] = []


_saves = _Saves()


@contextmanager
def track_save(row: Model) -> Iterator[None]:
    """Track the save of a row: within it `compare_before_save` compares the row, and
    `state_before_save` returns what was found."""
    pk = None if row.pk is None else str(row.pk)
    _saves.open.append(_Save(_label(type(row)), pk))
    try:
        yield
    finally:
        _saves.open.pop()


def compare_before_save(row: Model) -> None:
    """Compare a row with its last entry before it is saved."""
    save = _saves.open[-1]
    key: Any = row._meta.pk
    if save.pk is None or (row._state.adding and key.has_default()):
        # It has a key of its own, and is compared as a new one.
        save.is_new = True
        return
    save.before = look_at(type(row), row.pk)


def state_before_save(row: Model, *, created: bool) -> Before:
    """Return what `compare_before_save` found of the row that is saved; a new one is compared
    now."""
    save = _saves.open[-1]
    if not created and save.before is not None:
        return save.before
    label, pk = _label(type(row)), str(row.pk)
    last = last_entry(label, pk)
    if pk in save.nested:
        return _before(last, last.row_hash if last is not None else None)
    # Nothing of a row that somebody removed is left in a new one of its key.
    return replace(_judge(label, pk, None, last), altered_at=None)


def look_at(model: type[Model], pk: Any) -> Before:
    """Compare a row, as the database has it, with its last entry, and hold it.

    Call it before the change, in the transaction of the change. A row that differs is entered as
    altered outside. Raises LedgerUnavailable.
    """
    label, name = _label(model), str(pk)
    for save in _saves.open:
        if (save.label, save.pk) == (label, name) and save.before is not None:
            # The row is changed already, and its entry is made when it is saved.
            save.nested.add(name)
            return save.before
    row = _lock_row(model, pk)
    last = last_entry(label, name)
    for save in _saves.open:
        is_new = save.is_new and save.label == label and save.pk in (None, name)
        if is_new and row is not None and last is None:
            save.nested.add(name)
            return Before(NOT_COMPARED)
    return _judge(label, name, row, last)


def is_altered(model: type[Model], pk: Any) -> bool:
    """Whether a row was changed past the service, and nobody has accepted that. It is entered now,
    if it was not: where the ledger takes no entry, it is compared alone. Raises LedgerUnavailable
    without a key of the ledger."""
    try:
        with transaction.atomic():
            return look_at(model, pk).altered_at is not None
    except LedgerUnavailable as error:
        logger.warning("%s %s could not be entered: %s", _label(model), pk, error.message)
    with transaction.atomic():
        row, last = _lock_row(model, pk), last_entry(_label(model), str(pk))
        has_been = last is not None and last.altered_at is not None
        return has_been or bool(_difference(_label(model), row, last))


def accept(row: Model, reason: str, said: Mapping[str, Any]) -> LedgerEntry | None:
    """Enter that somebody answers for a row that was altered outside. None where it was not.

    The alteration stays a finding. Raises LedgerUnavailable.
    """
    with transaction.atomic():
        before = look_at(type(row), row.pk)
        if before.altered_at is None:
            return None
        told = {**said, "reason": reason, "accepts": before.altered_at}
        return enter_row(row, ACCEPTED, before, told)


def accept_removal(model: type[Model], pk: Any, reason: str) -> LedgerEntry | None:
    """The same for a row that was removed past the service. None where it was not, or is there.

    Raises LedgerUnavailable.
    """
    label, name = _label(model), str(pk)
    with transaction.atomic():
        before = look_at(model, pk)
        last = last_entry(label, name)
        if before.altered_at is None or last is None or last.is_there:
            return None
        content = {
            **{known: last.stated[known] for known in _clear_columns(label, last.stated)},
            "reason": reason,
            "accepts": before.altered_at,
            "action": ACCEPTED,
            "model": label,
            "row": name,
            "columns": [],
            "row_hash": None,
            "before": before.said,
        }
        entry = append(BINDINGS[label].kind, str(last.stated["subject"]), content)
        note_write(label, name, entry)
        return entry


def enter_row(
    row: Model, action: str, before: Before, said: Mapping[str, Any] | None = None
) -> LedgerEntry | None:
    """Enter the row as the database has it now, in the transaction that made it so.

    `before` is what `look_at` found of it before the change; `said` is what the entry tells beside
    its columns. None where nothing changed that is to be entered. Raises LedgerUnavailable.
    """
    label, pk = _label(type(row)), str(row.pk)
    binding = BINDINGS[label]
    columns: list[str] = []
    found = None
    before = _now(label, pk, action, before)
    if action != DELETED:
        columns = columns_of(_concrete(type(row)))
        # Read again: what was saved may be a text for a date, or a number not yet rounded.
        found = row_hash(_concrete(type(row))._base_manager.get(pk=row.pk), columns)
        if binding.only_if_changed and action != ACCEPTED and found == before.said:
            return None
    content = {
        **_facts(row, binding.shown),
        **(said or {}),
        "action": action,
        "model": label,
        "row": pk,
        "columns": columns,
        "row_hash": found,
        "before": before.said,
    }
    if before.altered_at is not None and action not in (ACCEPTED, DELETED):
        content["altered_at"] = before.altered_at
    entry = append(binding.kind, _subject(row), content)
    note_write(label, pk, entry)
    return entry


def _now(label: str, pk: str, action: str, before: Before) -> Before:
    """What is so before this entry: the same transaction may have entered the row since."""
    if (entry := entry_since(label, pk, before.written)) is not None:
        return _before(LastEntry(entry.sequence, entry.stated), entry.stated["row_hash"])
    if before.said == NEVER_ENTERED and action != FOUND:
        # Unless stock was taken since, of the row as it was.
        lock_ledger()
        if (last := last_entry(label, pk)) is not None:
            return _before(last, last.row_hash)
    return before


def _judge(label: str, pk: str, row: Model | None, last: LastEntry | None) -> Before:
    """What was before, by the row as it is. One that differs is entered as what it is."""
    difference = _difference(label, row, last)
    if difference is None:
        why = NOT_VOUCHED_FOR if last is not None and last.problem else NOT_COMPARED
        return _before(last, NEVER_ENTERED if last is None else why)
    if not difference:
        return _before(last, last.row_hash if last is not None and last.is_there else None)
    return _enter_alteration(label, pk, row, last, difference)


def _difference(label: str, row: Model | None, last: LastEntry | None) -> str | None:
    """How a row differs from what was entered of it last; "" where it does not, None where that
    cannot be told."""
    if last is None:
        if row is None:
            return ""
        return "it has no entry" if has_baseline_of(label) else None
    if last.problem:
        return last.problem if last.is_forged else None
    if row is None or not last.is_there:
        if row is None:
            return "it was removed" if last.is_there else ""
        return "it was removed, and is there again"
    try:
        if row_hash(row, last.columns) != last.row_hash:
            return "it was changed"
        return BINDINGS[label].compare(row)
    except AttributeError:
        # The column is gone with a later version.
        return None
    except DecryptionError:
        # A key of FERNET_KEYS is lost, or somebody has written what is no text of ours.
        facts = _facts(row, BINDINGS[label].shown)
        named = _differences(facts, last.stated)
        # Times and decimals are entered as they were before the database had them.
        kinds = {column.attname: column.get_internal_type() for column in row._meta.concrete_fields}
        is_changed = any(kinds[name] not in ("DateTimeField", "DecimalField") for name in named)
        return "it was changed" if is_changed else None
    except ValueError:
        return "it holds what was never entered"


def _enter_alteration(
    label: str, pk: str, row: Model | None, last: LastEntry | None, because: str
) -> Before:
    binding = BINDINGS[label]
    stated = last.stated if last is not None else {}
    columns: list[str] = []
    found = None
    if row is not None:
        facts, subject = _facts(row, binding.shown), _subject(row)
        try:
            columns = columns_of(type(row))
            found = row_hash(row, columns)
        except (DecryptionError, ValueError):
            columns = []
    else:
        facts = {name: stated[name] for name in _clear_columns(label, stated)}
        subject = str(stated.get("subject", pk))
    content = {
        **facts,
        "action": ALTERED,
        "because": because,
        "differs": _differences(facts, stated),
        "model": label,
        "row": pk,
        "columns": columns,
        "row_hash": found,
    }
    # Its own number is what the entries after it name.
    entry = append(binding.kind, subject, content)
    note_write(label, pk, entry)
    logger.critical(
        "ALERT: %s %s was changed outside the service: %s. Find out who can write to the database, "
        "and run `manage.py verify_ledger`.",
        label,
        pk,
        because,
        extra={
            "alert": "account_altered_outside" if label in _ACCOUNTS else "row_altered_outside",
            "ledger_sequence": entry.sequence,
        },
    )
    return Before(found, entry.sequence)


def _clear_columns(label: str, stated: Mapping[str, Any]) -> list[str]:
    """Which columns the last entry of a row that is gone says in clear."""
    return [name for name in BINDINGS[label].shown or () if name in stated]


def _differences(facts: Mapping[str, Any], stated: Mapping[str, Any]) -> list[str]:
    return [name for name in facts if name in stated and stated[name] != facts[name]]


def _before(last: LastEntry | None, said: str | None) -> Before:
    return Before(said, None if last is None else last.altered_at)


def _lock_row(model: type[Model], pk: Any) -> Model | None:
    """The row, which nobody else changes until this transaction ends; None where there is none.

    What is encrypted is read when it is compared: a lost key must not keep a row from going.
    """
    rows = _concrete(model)._base_manager.select_for_update(no_key=True)
    return rows.filter(pk=pk).defer(*encrypted_columns(_concrete(model))).first()


def _concrete(model: type[Model]) -> type[Model]:
    return cast("type[Model]", model._meta.concrete_model)


def _label(model: type[Model]) -> str:
    return _concrete(model)._meta.label_lower


def _subject(row: Model) -> str:
    subject = BINDINGS[_label(type(row))].subject
    if subject == "pk":
        return f"{row._meta.model_name} {row.pk}"
    return str(getattr(row, subject) or "") if isinstance(subject, str) else subject(row)


def _facts(row: Model, shown: tuple[str, ...] | None) -> dict[str, Any]:
    facts = {}
    for column in row._meta.concrete_fields:
        if column.attname in shown if shown is not None else not column.primary_key:
            value = getattr(row, column.attname)
            if isinstance(value, datetime):
                value = moment(value)
            facts[column.attname] = format(value, "f") if isinstance(value, Decimal) else value
    return cast("dict[str, Any]", storable_value(facts))


def record_baseline() -> int:
    """Enter what was never entered, of models not taken into the ledger yet. How many there were.

    Safe to call at every start: each model, and each column of one, is taken in once. A row that
    is not as it was entered stays as it is, for the verifier to find, and so does one that was
    added behind our back to a model that was taken in before.
    """
    entered = 0
    with transaction.atomic(savepoint=False):
        read_head(lock=True)
        columns = {label: columns_of(model) for label, model in _models().items()}
        adopted = _baseline_columns() or {}
        missing = [label for label in columns if not {*columns[label]} <= {*adopted.get(label, ())}]
        if not missing:
            return entered
        with RowsRead() as rows:
            kinds = {binding.kind for binding in BINDINGS.values()}
            for entry in LedgerEntry.objects.filter(kind__in=kinds).order_by("sequence").iterator():
                if (stated := parse(entry.statement)) is not None:
                    rows.read(stated)
            for label in missing:
                entered += sum(
                    _enter(rows, label, row, columns[label], label in adopted)
                    for row in _models()[label]._base_manager.order_by("pk")
                )
        append(BASELINE, "ledger", {"models": columns, "entered": entered})
    return entered


def _models() -> dict[str, type[Model]]:
    return {label: model for label in BINDINGS if (model := model_of(label)) is not None}


def _baseline_columns() -> dict[str, list[str]] | None:
    """The columns of every model that was taken in; None before that was ever done."""
    adopted: dict[str, list[str]] | None = None
    for entry in LedgerEntry.objects.filter(kind=BASELINE).order_by("sequence"):
        if not verify_entry(entry):
            adopted = (adopted or {}) | entry.stated["models"]
    return adopted


def _enter(rows: RowsRead, label: str, row: Model, columns: list[str], was_adopted: bool) -> bool:
    said = rows.last_entry_of(label, str(row.pk))
    if said is None and was_adopted:
        return False
    before = Before(NEVER_ENTERED)
    if said is not None:
        _, bound, expected = said
        before = Before(expected, rows.altered_at(label, str(row.pk)))
        if {*columns} <= {*bound}:
            return False
        try:
            if row_hash(row, bound) != expected:
                return False
        except (DecryptionError, AttributeError):
            return False
    enter_row(row, FOUND, before)
    return True
