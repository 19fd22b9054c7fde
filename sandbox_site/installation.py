"""One installation, many instances: each has the keys that fit the database, and the same files.

The first instance leaves marks in the database, in InstallationMark; every other is compared with
them before it touches queue or ledger. A mark that was changed stops instances, and says the
remedy: nothing is believed because of one.

- FERNET_KEYS: a value that one of the keys must open. `rotate_keys` writes it anew.
- SECRET_KEY: its HMAC, encrypted under FERNET_KEYS, so that nobody can try guesses against it.
- LEDGER_KEYS: the ledger itself is the mark; its newest entry was signed with one of them.
- STORAGE_URL, LEDGER_CHECKPOINTS: a number that lies beside the files as well.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import secrets
from collections.abc import Iterator
from pathlib import Path

from django.conf import settings
from django.db import DatabaseError, connection

from executions.kernel.storage import INSTALLATION, FileStore, Folder, file_store
from executions.ledger.append import append
from executions.ledger.entry import LedgerUnavailable, keyring
from executions.ledger.models import LedgerEntry
from providers.fields import DecryptionError
from sandbox_site.models import InstallationMark

logger = logging.getLogger(__name__)

FILE_NAME = "installation"
# In DATA_DIR, as long as what was restored there is not to be used.
RESTORING = ".restoring"
NAMES = ("FERNET_KEYS", "SECRET_KEY", "STORAGE_URL", "LEDGER_CHECKPOINTS")


class DoesNotFit(Exception):
    """This instance is not of the installation whose database it has. Says why and what to do."""


def join() -> None:
    """Leave the marks that are not there yet. Raises DoesNotFit.

    Safe to call at every start, and by several instances at once: who was second is compared.
    """
    _refuse_half_restored()
    if not _has_marks():
        return
    _leave_marks()
    refuse_foreign()


def _refuse_half_restored() -> None:
    if (settings.DATA_DIR / RESTORING).exists():
        raise DoesNotFit(
            f"DATA_DIR: restoring a backup into {settings.DATA_DIR} was not completed, and open "
            "executions could run again. Move the folder away and restore the backup again."
        )


def _leave_marks() -> None:
    _leave("FERNET_KEYS", secrets.token_hex(16))
    _leave("SECRET_KEY", _of_secret_key(settings.SECRET_KEY))
    for name, place in _places():
        _join_place(name, place)


def refuse_foreign() -> None:
    """Raise DoesNotFit where a mark is not of this instance. Changes nothing.

    Without a database, or without its tables, there is nothing to compare.
    """
    _refuse_half_restored()
    if not _has_marks():
        return
    _refuse_other_keys()
    for name, place in _places():
        _refuse_other_place(name, place)


def problems() -> str:
    """As `refuse_foreign`, told; "" where all fits. The connection is left as it was found."""
    was_open = connection.connection is not None
    try:
        refuse_foreign()
    except DoesNotFit as error:
        return str(error)
    finally:
        if not was_open and not connection.in_atomic_block:
            connection.close()
    return ""


def accept(name: str, reason: str) -> None:
    """Take this instance's for the right one, and enter that in the ledger: the operator's word,
    for what was lost or moved. Raises DoesNotFit and LedgerUnavailable."""
    append("installation", name, {"reason": reason})
    InstallationMark.objects.filter(name=name).delete()
    if name == "FERNET_KEYS":
        # It is encrypted under them, and no instance could compare it.
        InstallationMark.objects.all().delete()
    for place_name, place in _places():
        if place_name == name:
            place.delete(FILE_NAME)
    _leave_marks()
    refuse_foreign()


def rotate_secret_key() -> None:
    """Take SECRET_KEY for the mark, where one of SECRET_KEY_FALLBACKS is the one before."""
    _refuse_other_keys()
    InstallationMark.objects.filter(name="SECRET_KEY").update(
        mark=_of_secret_key(settings.SECRET_KEY)
    )


def _refuse_other_keys() -> None:
    try:
        marks = {row.name: row.mark for row in InstallationMark.objects.order_by("name")}
    except DecryptionError:
        raise DoesNotFit(
            "FERNET_KEYS: none of these keys decrypts the data of this database. Set the same "
            "FERNET_KEYS on every instance, the old key after a new one until `manage.py "
            "rotate_keys` has run. If the key is lost, `manage.py accept_installation FERNET_KEYS "
            "--reason ...`."
        ) from None
    ours = [settings.SECRET_KEY, *settings.SECRET_KEY_FALLBACKS]
    mark = marks.get("SECRET_KEY")
    if mark is not None and not any(_is_same(mark, _of_secret_key(key)) for key in ours):
        raise DoesNotFit(
            "SECRET_KEY: this database is used with another key, so links, sessions and queued "
            "tasks of other instances would not be accepted. Set the same key on every instance; "
            "to change it, put the old one into SECRET_KEY_FALLBACKS and run `manage.py "
            "rotate_keys`. If it is lost, `manage.py accept_installation SECRET_KEY --reason ...`."
        )
    newest = LedgerEntry.objects.order_by("-sequence").values_list("key_id", flat=True).first()
    try:
        if newest is None or newest in keyring():
            return
    except LedgerUnavailable as error:
        raise DoesNotFit(error.message) from error
    raise DoesNotFit(
        f"LEDGER_KEYS: the ledger was last signed with the key {newest}, which is none of these. "
        "Set the same LEDGER_KEYS on every instance, the old key after a new one. If it is lost, "
        "`manage.py adopt_ledger_key --reason ...`; if your service did not write this entry, see "
        "`manage.py verify_ledger`."
    )


def _leave(name: str, mark: str) -> None:
    if name not in _names():
        InstallationMark.objects.bulk_create(
            [InstallationMark(name=name, mark=mark)], ignore_conflicts=True
        )


def _join_place(name: str, place: FileStore) -> None:
    """The number is the file's or the database's, whichever was first."""
    if name in _names():
        if not _is_embedded(place):
            return
        # Database and files are in one directory: they belong together whatever happened to them.
        mark = InstallationMark.objects.get(name=name).mark
        if _number(place) != mark:
            place.delete(FILE_NAME)
            place.create(FILE_NAME, mark.encode())
        return
    try:
        _leave(name, place.create(FILE_NAME, secrets.token_hex(16).encode()).decode())
    except OSError as error:
        raise DoesNotFit(f"{name}: {place.setting} cannot be written: {error}") from error


def _refuse_other_place(name: str, place: FileStore) -> None:
    row = InstallationMark.objects.filter(name=name).first()
    if row is None:
        return
    try:
        found = _number(place)
    except OSError as error:
        if isinstance(place, Folder):
            raise DoesNotFit(f"{name}: {place.setting} cannot be read: {error}") from error
        # That it is away shows no other bucket. What needs it fails, and says so.
        logger.warning("%s cannot be compared with the database now: %s", name, error)
        return
    if found == row.mark or _is_embedded(place):
        return
    what = "is empty" if not found else "belongs to another installation"
    raise DoesNotFit(
        f"{name}: the location in {place.setting} {what}, while this database's files are "
        "elsewhere. Every host needs the same: a directory that all of them share, or a bucket, "
        "named by STORAGE_URL on each. If the files were moved here, or restored, on purpose: "
        f"`manage.py accept_installation {name} --reason ...`."
    )


def _places() -> Iterator[tuple[str, FileStore]]:
    """Where this installation's files are, by the mark's name."""
    yield "STORAGE_URL", file_store(INSTALLATION)
    if settings.LEDGER_CHECKPOINTS not in ("", "storage"):
        folder = Folder(root=settings.LEDGER_CHECKPOINTS)
        folder.setting = "LEDGER_CHECKPOINTS"
        yield "LEDGER_CHECKPOINTS", folder


def _is_embedded(place: FileStore) -> bool:
    """Whether the files are in the very directory of the database, so nobody can mix them up."""
    if not isinstance(place, Folder) or connection.vendor != "sqlite":
        return False
    database = Path(str(connection.settings_dict["NAME"])).resolve()
    return database.parent == Path(place.location).resolve()


def _number(place: FileStore) -> str:
    """ "" where there is none. Raises OSError."""
    try:
        return place.start(FILE_NAME, 64).decode(errors="replace")
    except FileNotFoundError:
        return ""


def _names() -> set[str]:
    return set(InstallationMark.objects.values_list("name", flat=True))


def _has_marks() -> bool:
    """Whether there is the table. To look must not make a database."""
    if connection.vendor == "sqlite":
        name = str(connection.settings_dict["NAME"])
        if not name.startswith(("file:", ":memory:")) and not Path(name).exists():
            return False
    try:
        tables = connection.introspection.table_names()
    except DatabaseError:
        return False
    return InstallationMark._meta.db_table in tables and LedgerEntry._meta.db_table in tables


def _of_secret_key(key: str | bytes) -> str:
    secret = key.encode() if isinstance(key, str) else key
    return hmac.new(secret, b"cofferdam SECRET_KEY", hashlib.sha256).hexdigest()


def _is_same(one: str, other: str) -> bool:
    return hmac.compare_digest(one.encode(), other.encode())
