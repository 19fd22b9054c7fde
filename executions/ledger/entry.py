"""One entry of the ledger: how it is written and signed, with which key, and the newest row.

It is written as RFC 8785 says, names the number of its format, and is signed together with its
place. The keys are Ed25519, from LEDGER_KEYS; the first one signs. Whoever holds a receipt needs
only the public key, which is why this is no HMAC.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import logging
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from decimal import Decimal
from functools import lru_cache
from json.encoder import encode_basestring
from typing import Any, NamedTuple
from uuid import UUID

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import (
    Ed25519PrivateKey,
    Ed25519PublicKey,
)
from django.conf import settings
from django.db import connection
from django.db.models.fields.files import FieldFile
from django.utils import timezone

from executions.kernel.postgresql import DeferredStatement
from executions.kernel.text import without_surrogates
from executions.ledger.models import LedgerEntry
from providers.errors import ProviderUnavailable

logger = logging.getLogger(__name__)

# The integers that a double holds exactly, all of them (RFC 8785, appendix D).
EXACT = 2**53


def canonical(value: Any) -> str:
    """JSON as RFC 8785 has it. Raises ValueError for what that cannot hold.

    That is what is no JSON, an integer that no double is, and half a surrogate pair.
    """
    text = _text(value)
    if not text.isascii():
        text.encode()
    return text


def digest(statement: str) -> str:
    """What the next entry names this one by: SHA-256 in hexadecimal."""
    return hashlib.sha256(statement.encode()).hexdigest()


def text_hash(text: str) -> str:
    return "sha256:" + digest(text)


def moment(at: datetime | None) -> str | None:
    """UTC with microseconds, always of one length."""
    return None if at is None else at.astimezone(UTC).isoformat(timespec="microseconds")


def is_double(value: int) -> bool:
    """Whether a double holds exactly this integer."""
    try:
        return float(value) == value
    except OverflowError:
        return False


def _text(value: Any) -> str:
    # Some hundred times within every execution: the type itself is asked for first.
    write = _WRITERS.get(type(value))
    if write is not None:
        return write(value)
    for kind in (str, int, float, Mapping, list, tuple):
        if isinstance(value, kind):
            return _WRITERS[kind](value)
    raise ValueError(f"{type(value).__name__} is not JSON")


def _object(value: Mapping[Any, Any]) -> str:
    members = []
    for name in _sort(value):
        child = value[name]
        # Without a call of ours for a text, of which most objects consist.
        write = _WRITERS.get(type(child), _text)
        members.append(f"{encode_basestring(name)}:{write(child)}")
    return "{" + ",".join(members) + "}"


def _array(value: Iterable[Any]) -> str:
    return "[" + ",".join([_text(child) for child in value]) + "]"


def _sort(names: Mapping[Any, Any]) -> list[str]:
    """By UTF-16 code units, as section 3.2.3 has it; of ASCII that is the order of characters."""
    for name in names:
        if not isinstance(name, str):
            raise ValueError(f"{name!r} is no name")
    if all(map(str.isascii, names)):
        return sorted(names)
    return sorted(names, key=lambda name: name.encode("utf-16-be", "surrogatepass"))


def _integer(value: int) -> str:
    if -EXACT <= value <= EXACT:
        return int.__repr__(value)
    if not is_double(value):
        raise ValueError("an integer that no double is has no canonical form")
    return _number(float(value))


def _number(value: float) -> str:
    """As ECMAScript writes it (Number::toString), which section 3.2.2.3 asks for."""
    if not math.isfinite(value):
        raise ValueError(f"{value} is not JSON")
    if value == 0:
        return "0"
    text = float.__repr__(value)
    if "e" not in text:
        return text.removesuffix(".0")
    sign = "-" if value < 0 else ""
    mantissa, _, power = text.lstrip("-").partition("e")
    whole, _, fraction = mantissa.partition(".")
    digits = (whole + fraction).rstrip("0")
    # How many digits stand before the point.
    point = int(power) + 1
    if len(digits) <= point <= 21:
        return sign + digits.ljust(point, "0")
    if 0 < point <= 21:
        return f"{sign}{digits[:point]}.{digits[point:]}"
    if -6 < point <= 0:
        return f"{sign}0.{'0' * -point}{digits}"
    tail = f".{digits[1:]}" if len(digits) > 1 else ""
    return f"{sign}{digits[0]}{tail}e{'+' if point > 0 else '-'}{abs(point - 1)}"


_WRITERS: dict[type[Any], Callable[[Any], str]] = {
    str: encode_basestring,
    type(None): lambda _: "null",
    bool: lambda value: "true" if value else "false",
    int: _integer,
    float: _number,
    dict: _object,
    Mapping: _object,
    list: _array,
    tuple: _array,
}


FORMAT = 1
# Characters of a subject that its column has.
_MOST_SUBJECT = 200

# What is signed starts with it, so that nothing else a key signs can pass for an entry.
DOMAIN = b"cofferdam-ledger-1\n"


def parse(statement: str) -> dict[str, Any] | None:
    """What a statement states; None when it is not written as the format it names has it."""
    try:
        stated = json.loads(statement)
        if not isinstance(stated, dict) or write(stated) != statement:
            return None
    except (ValueError, TypeError, RecursionError):
        return None
    sequence = stated.get("sequence")
    return stated if isinstance(sequence, int) and not isinstance(sequence, bool) else None


def bound_row_of(stated: Mapping[str, Any]) -> str | None:
    """What the column `bound_row` of this entry holds; None for an entry of an execution."""
    if stated["kind"] == "execution":
        return None
    return row_name(stated["model"], stated["row"]) if "row_hash" in stated else ""


def subject_of(stated: Mapping[str, Any]) -> str:
    """What the column `subject` of this entry holds. Of an execution it is the tenant: its id has
    a column of its own."""
    return column_of(stated["tenant" if stated["kind"] == "execution" else "subject"])


def column_of(subject: str) -> str:
    """A subject as the column `subject` has it."""
    return subject[:_MOST_SUBJECT]


def row_name(model: str, row: str) -> str:
    """A row as the column `bound_row` has it."""
    return f"{model} {row}"


def write(stated: Mapping[str, Any]) -> str:
    """The statement's text. Raises ValueError for a format that this version does not know."""
    if stated.get("ledger") != FORMAT:
        raise ValueError(f"format {stated.get('ledger')!r} is not known here")
    return canonical(stated)


def signed_bytes(stated: Mapping[str, Any], statement: str) -> bytes:
    """What the signature of this entry is over."""
    return place_bytes(stated["sequence"], digest(statement))


def place_bytes(sequence: int, statement_digest: str) -> bytes:
    """What is signed of an entry."""
    return DOMAIN + f"{sequence}\n{statement_digest}".encode()


def line_bytes(line: Mapping[str, Any]) -> bytes:
    """What is signed of a line of the checkpoints, its signature left out."""
    return DOMAIN + b"checkpoint\n" + canonical(line).encode()


@dataclass(frozen=True)
class Schema:
    """How an execution is sealed.

    `record`: the columns that neither change after its end nor are ever erased; one hash is over
    all of them and over the times of its artifacts. `stated`: the columns that the entry, and so
    the receipt, also says in clear.
    """

    record: tuple[str, ...]
    stated: tuple[str, ...]


SCHEMAS: Mapping[int, Schema] = {
    1: Schema(
        record=(
            *("tenant_slug", "api_key_name", "api_key_prefix", "subject", "request_id"),
            *("client_address", "idempotency_key", "request_hash", "language", "entrypoint"),
            *("mode", "code_hash", "input_files", "timeout", "deadline", "status", "provider"),
            *("config_version", "runtime", "isolation", "sharing", "has_result"),
            *("stdout_truncated", "stderr_truncated", "exit_code", "artifact_count"),
            *("error_code", "error_message", "error_field", "retryable", "meta", "hops", "cost"),
            *("received_ms", "queue_ms", "start_ms", "run_ms", "closed_ms", "total_ms"),
            *("created_at", "started_at", "finished_at"),
            *("session_id", "turn", "context", "context_kept", "pid", "background"),
            "output_order",
            # By the caller's word; on whose behalf it ran is a body, of which there is a hash.
            *("agent", "model", "conversation", "traceparent", "trace_id", "priority"),
            *("run_at", "schedule_id"),
        ),
        stated=(
            *("language", "status", "exit_code", "config_version", "has_result"),
            *("stdout_truncated", "stderr_truncated", "turn", "context_kept", "pid"),
            *("agent", "model", "conversation", "traceparent", "run_at"),
        ),
    ),
}
CURRENT = 1


def schema_of(stated: Mapping[str, Any]) -> Schema | None:
    """The schema an entry was sealed with; None for one that a later version brought."""
    return SCHEMAS.get(stated["schema"])


def to_canonical(value: Any) -> Any:
    """A column's value as JSON that has a canonical form, and one only."""
    if value is None or isinstance(value, (bool, float)):
        return value
    if isinstance(value, str):
        return value if value.isascii() else without_surrogates(value)
    if isinstance(value, int):
        if -EXACT <= value <= EXACT:
            return value
        # Some databases return 1e22 as an integer; others come from what a provider says of itself.
        return float(value) if is_double(value) else str(value)
    if isinstance(value, datetime):
        return moment(value)
    if isinstance(value, Decimal):
        return format(value, "f")
    if isinstance(value, Mapping):
        return {without_surrogates(str(name)): to_canonical(child) for name, child in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_canonical(child) for child in value]
    return str(value) if isinstance(value, (UUID, date, FieldFile)) else value


class LedgerUnavailable(ProviderUnavailable):
    """The ledger takes no entry, so what was to be entered must not happen."""


class LedgerAltered(LedgerUnavailable):
    """The newest entry is not what one of our keys signed: somebody else wrote it."""


@dataclass(frozen=True)
class SigningKey:
    """`key_id` is the start of the SHA-256 of the public key, `public_key` its base64."""

    key_id: str
    public_key: str
    _private: Ed25519PrivateKey = field(repr=False)

    def sign(self, message: bytes) -> str:
        """The signature in base64. What a message begins with says what it is: see `DOMAIN`."""
        return base64.b64encode(self._private.sign(message)).decode()


def keyring() -> dict[str, SigningKey]:
    """The configured keys by id, the signing one first. Raises LedgerUnavailable."""
    return _load_keys(tuple(settings.LEDGER_KEYS))


def signing_key() -> SigningKey:
    """The key that new entries are signed with. Raises LedgerUnavailable."""
    return next(iter(keyring().values()))


def public_key_id(public_key: str) -> str:
    return hashlib.sha256(base64.b64decode(public_key)).hexdigest()[:16]


def is_signed_by(public_key: str, message: bytes, signature: str) -> bool:
    """Whether `signature` is the one of this key's holder over the message."""
    try:
        key = Ed25519PublicKey.from_public_bytes(base64.b64decode(public_key, validate=True))
        key.verify(base64.b64decode(signature, validate=True), message)
    except (InvalidSignature, ValueError):
        return False
    return True


@lru_cache(maxsize=8)
def _load_keys(seeds: tuple[str, ...]) -> dict[str, SigningKey]:
    if not seeds:
        raise LedgerUnavailable("LEDGER_KEYS is not set, so nothing can be entered in the ledger.")
    keys = [_load(number, seed) for number, seed in enumerate(seeds, 1)]
    return {key.key_id: key for key in keys}


def _load(number: int, seed: str) -> SigningKey:
    try:
        raw = base64.b64decode(seed + "=" * (-len(seed) % 4), altchars=b"-_", validate=True)
        private = Ed25519PrivateKey.from_private_bytes(raw)
    except (binascii.Error, ValueError):
        raise LedgerUnavailable(
            f"LEDGER_KEYS: Key {number} is not 32 bytes in URL-safe base64. Make one with: "
            "python -c 'import secrets; print(secrets.token_urlsafe(32))'"
        ) from None
    public = private.public_key().public_bytes_raw()
    public_key = base64.b64encode(public).decode()
    return SigningKey(public_key_id(public_key), public_key, private)


# Any number that no other lock of this database uses.
_POSTGRES_LOCK = 0x1ED6E5
_LOCK = DeferredStatement("SELECT pg_advisory_xact_lock(%s)")
_SELECT = (
    "SELECT sequence, statement, digest, key_id, signature"  # noqa: S608
    f" FROM {LedgerEntry._meta.db_table} ORDER BY sequence DESC LIMIT 1"
)


class Row(NamedTuple):
    """What the database has in the row of the newest entry. All of it are claims."""

    sequence: int
    statement: str
    digest: str
    key_id: str
    signature: str


class Head(NamedTuple):
    """The newest entry, as far as the next one needs it."""

    sequence: int
    digest: str
    key_id: str
    signature: str = ""


class _Seen(NamedTuple):
    """The row that this process wrote or checked last, and the keys it was checked with."""

    row: Row | None = None
    keys: tuple[str, ...] = ()


_seen = _Seen()
_has_refused = False
# What was told of last: it is met with every look until it is mended.
_told: Row | None = None


def read_head(*, lock: bool) -> Head | None:
    """The newest entry; with `lock` it stays that until this transaction ends.

    Raises LedgerAltered for a row that is not what its key signed. One signed by a key that we do
    not have is returned: whether it may be continued is the caller's question.
    """
    global _has_refused
    if lock:
        lock_ledger()
    with connection.cursor() as cursor:
        cursor.execute(_SELECT)
        found = cursor.fetchone()
    if found is None:
        return None
    row = Row(*found)
    if _seen != (row, tuple(settings.LEDGER_KEYS)):
        if reason := _wrong(row):
            _has_refused = True
            raise _alteration_error(row, reason)
        remember(row)
    return Head(row.sequence, row.digest, row.key_id, row.signature)


def lock_ledger() -> None:
    """Let nobody else enter anything from the next statement on, until this transaction ends.

    SQLite's transactions begin as writers (see sandbox_site.database), and there is one writer.
    """
    if connection.vendor == "postgresql":
        with connection.cursor() as cursor:
            cursor.execute(_LOCK, [_POSTGRES_LOCK])


def remember(row: Row) -> None:
    """Take a row for checked. Should its transaction be rolled back, none like it is ever met."""
    global _seen, _told
    _seen, _told = _Seen(row, tuple(settings.LEDGER_KEYS)), None


def ensure_ours(head: Head) -> None:
    """Raise LedgerUnavailable where none of our keys signed the newest entry: our signature after
    it would vouch for it."""
    global _has_refused
    if head.key_id not in keyring():
        _has_refused = True
        raise LedgerUnavailable(
            f"The ledger was last signed with the key {head.key_id}, which LEDGER_KEYS does not "
            "hold. Put it back, after the new one, so that it can introduce the new one; if it is "
            "lost, run `manage.py adopt_ledger_key`."
        )


def ensure_ledger() -> None:
    """Raise LedgerUnavailable where an entry was refused before, until it takes entries again.

    What runs could not be entered. Costs nothing while nothing was ever refused.
    """
    global _has_refused
    if _has_refused:
        head = read_head(lock=False)
        if head is not None:
            ensure_ours(head)
        _has_refused = False


def _wrong(row: Row) -> str:
    """What shows that the row is not ours; "" when it is, or when a key of others signed it."""
    stated = parse(row.statement)
    if stated is None:
        return "its statement is not canonical JSON"
    if stated["sequence"] != row.sequence:
        return "it stands in another place than it was signed for"
    if digest(row.statement) != row.digest:
        return "its digest is not its statement's"
    if stated.get("key_id") != row.key_id:
        return "it claims another key than the one that it was signed with"
    key = keyring().get(row.key_id)
    if key is not None and not is_signed_by(
        key.public_key, signed_bytes(stated, row.statement), row.signature
    ):
        return "this service's key did not sign it"
    return ""


_MESSAGE = (
    "The ledger takes no entry: its newest one is not what this service signed. "
    "Run `manage.py verify_ledger`."
)


def _alteration_error(row: Row, reason: str) -> LedgerAltered:
    global _told
    if _told != row:
        _told = row
        logger.critical(
            "ALERT: the ledger's newest entry, %s, was not written by this service: %s. Nothing "
            "runs and nothing can be changed until it is repaired. Run `manage.py verify_ledger`, "
            "find out who can write to the database, and restore a backup.",
            row.sequence,
            reason,
            extra={"alert": "ledger_altered", "ledger_sequence": row.sequence},
        )
    return LedgerAltered(_MESSAGE)


FIRST_PREVIOUS = "0" * 64

# Runs within every execution. Through the ORM an entry took 0.55 ms, so it takes 0.20 ms.
_INSERT = DeferredStatement(
    f"INSERT INTO {LedgerEntry._meta.db_table}"  # noqa: S608
    " (sequence, kind, execution_id, at, statement, digest, key_id, signature, bound_row,"
    " subject) VALUES (%s, %s, %s, %s, %s, %s, %s, %s, %s, %s)"
)


def add(
    head: Head | None,
    key: SigningKey,
    kind: str,
    subject: str,
    content: Mapping[str, Any],
    execution_id: UUID | None = None,
) -> LedgerEntry:
    """Write the entry after `head`, which this transaction holds; None for the first one."""
    now = timezone.now()
    sequence = head.sequence + 1 if head else 1
    stated = {
        **content,
        "ledger": FORMAT,
        "sequence": sequence,
        "previous": head.digest if head else FIRST_PREVIOUS,
        "key_id": key.key_id,
        "kind": kind,
        "subject": subject,
        "at": moment(now),
    }
    statement = write(stated)
    statement_digest = digest(statement)
    entry = LedgerEntry(
        sequence=sequence,
        kind=kind,
        execution_id=execution_id,
        at=now,
        statement=statement,
        digest=statement_digest,
        key_id=key.key_id,
        signature=key.sign(place_bytes(sequence, statement_digest)),
        bound_row=bound_row_of(stated),
        subject=subject_of(stated),
    )
    _insert(entry)
    remember(Row(sequence, statement, statement_digest, entry.key_id, entry.signature))
    return entry


def _insert(entry: LedgerEntry) -> None:
    execution_id: Any = entry.execution_id
    if execution_id is not None and not connection.features.has_native_uuid_field:
        execution_id = execution_id.hex
    row = [
        entry.sequence,
        entry.kind,
        execution_id,
        connection.ops.adapt_datetimefield_value(entry.at),
        entry.statement,
        entry.digest,
        entry.key_id,
        entry.signature,
        entry.bound_row,
        entry.subject,
    ]
    with connection.cursor() as cursor:
        cursor.execute(_INSERT, row)
