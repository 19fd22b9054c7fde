"""Encrypting everything that is stored under the newest key."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from cryptography.fernet import Fernet, InvalidToken
from django.apps import apps
from django.db import connections, models
from django.db.models import ExpressionWrapper, F
from fernet_fields import EncryptedField

from providers.fields import DecryptionError, EncryptedTextField

BATCH = 500


@dataclass
class Rotation:
    """What became of one column. `failed` are the keys of the rows that no key decrypts."""

    model: str
    column: str
    rotated: int = 0
    current: int = 0
    failed: list[str] = field(default_factory=list)


_elsewhere: list[Callable[[bool], Rotation]] = []


def also_rotate(rotate_files: Callable[[bool], Rotation]) -> None:
    """Have `rotate_elsewhere` call this too. Its argument says whether only to count."""
    _elsewhere.append(rotate_files)


def rotate_elsewhere(*, dry_run: bool = False) -> Iterator[Rotation]:
    """What is encrypted beside the database."""
    for rotate_files in _elsewhere:
        yield rotate_files(dry_run)


def encrypted_fields() -> Iterator[tuple[type[models.Model], Any]]:
    """Every encrypted column of the installed models, once per table."""
    for model in apps.get_models(include_auto_created=True):
        if model._meta.proxy or not model._meta.managed:
            continue
        for column in model._meta.local_concrete_fields:
            if isinstance(column, EncryptedField):
                yield model, column


def rotate(
    model: type[models.Model],
    column: Any,
    *,
    using: str,
    dry_run: bool = False,
    report: Callable[[Rotation], None] = lambda rotation: None,
) -> Rotation:
    """Encrypt a column under the first key of FERNET_KEYS, as it is done today.

    `report` is called after each batch. A row written meanwhile is never overwritten, and one that
    cannot be decrypted is left as it is. Running it again does only what is left.
    """
    rotation = Rotation(model._meta.label, column.name)
    raw = ExpressionWrapper(F(column.name), output_field=models.BinaryField())
    rows = model._base_manager.using(using).annotate(raw_token=raw)
    stored = rows.filter(**{f"{column.name}__isnull": False}).order_by("pk")
    batch = list(stored.values_list("pk", "raw_token")[:BATCH])
    while batch:
        for pk, token in batch:
            outcome = _rotate_row(rows.filter(pk=pk), column, bytes(token), dry_run)
            if outcome == "failed":
                rotation.failed.append(str(pk))
            elif outcome == "rotated":
                rotation.rotated += 1
            elif outcome == "current":
                rotation.current += 1
        report(rotation)
        batch = list(stored.filter(pk__gt=batch[-1][0]).values_list("pk", "raw_token")[:BATCH])
    return rotation


def _rotate_row(
    row: models.QuerySet[Any], column: Any, token: bytes, dry_run: bool
) -> Literal["rotated", "current", "failed", "gone"]:
    while not _is_current(column, token):
        try:
            value = column.from_db_value(token, None, connections[row.db])
        except (DecryptionError, InvalidToken):
            return "failed"
        if dry_run or row.filter(raw_token=token).update(**{column.name: value}):
            return "rotated"
        # Somebody wrote the row since it was read: look at what is there now.
        written = row.values_list("raw_token", flat=True).first()
        if written is None:
            return "gone"
        token = bytes(written)
    return "current"


def _is_current(column: Any, token: bytes) -> bool:
    if isinstance(column, EncryptedTextField):
        return column.is_current(token)
    # The field of another app, straight from the package.
    try:
        Fernet(column.fernet_keys[0]).decrypt(token)
    except InvalidToken:
        return False
    return True
