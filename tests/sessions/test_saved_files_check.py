"""`check_storage` of the files of sessions: bytes that are gone, and files that no row knows."""

from __future__ import annotations

import os
import time
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from django.core.management import call_command
from django.db.models import QuerySet

from executions.capabilities.retention.service import ORPHAN_SECONDS, compare_storage
from executions.kernel.storage import WORKSPACES, file_store
from executions.sessions.models import Blob, LooseFile
from executions.sessions.storage import blobs
from tests.conftest import Caller
from tests.support.saved_files import stored

pytestmark = pytest.mark.usefixtures("own_storage")


def age_all(root: Path) -> None:
    then = time.time() - ORPHAN_SECONDS - 60
    for path in (root / "workspaces").rglob("*"):
        if path.is_file():
            os.utime(path, (then, then))


@pytest.mark.django_db
def test_what_has_no_counterpart_is_named(alice: Caller, tmp_path: Path) -> None:
    there, gone = stored(alice.tenant, b"there", b"gone")
    file_store(WORKSPACES).save_stream("1/ab/stray", iter([b"stray"]))
    file_store(WORKSPACES).save_stream("1/ab/loose", iter([b"loose"]))
    LooseFile.objects.create(
        tenant=alice.tenant, file="1/ab/loose", size=5, due_at=there.kept_until
    )
    age_all(tmp_path)
    file_store(WORKSPACES).save_stream("1/ab/young", iter([b"its row comes"]))
    file_store(WORKSPACES).delete(str(gone.file))
    found = compare_storage()
    assert found.without_row.names == ["workspaces/1/ab/stray"]
    assert found.without_bytes.names == [f"workspaces/{gone.file}"]
    assert (found.files, found.rows) == (4, 2)
    with pytest.raises(SystemExit):
        call_command("check_storage", "--remove", stdout=StringIO())
    assert not file_store(WORKSPACES).exists("1/ab/stray")
    assert file_store(WORKSPACES).exists("1/ab/loose")
    Blob.objects.filter(pk=gone.pk).delete()
    assert compare_storage().is_same


@pytest.mark.database
@pytest.mark.django_db
def test_what_is_saved_is_the_same_on_both_sides(alice: Caller, tmp_path: Path) -> None:
    stored(alice.tenant, b"0", b"1", b"2")
    age_all(tmp_path)
    found = compare_storage()
    assert found.is_same
    assert (found.files, found.rows) == (3, 3)


@pytest.mark.django_db
def test_an_upload_that_ends_while_rows_are_looked_up_keeps_its_bytes(
    alice: Caller, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settle, ask = blobs._settle, QuerySet.values_list

    def compare_before(*upload: Any) -> Any:
        made: list[Any] = []
        age_all(tmp_path)

        def ask_and_settle(rows: QuerySet[Any], *names: str, **how: Any) -> Any:
            found = ask(rows, *names, **how)
            if names == ("file",) and not made:
                found = list(found)
                made.append(settle(*upload))
            return found

        with monkeypatch.context() as patch:
            patch.setattr(QuerySet, "values_list", ask_and_settle)
            compare_storage(remove=True)
        return made[0]

    monkeypatch.setattr(blobs, "_settle", compare_before)
    (blob,) = stored(alice.tenant, b"bytes")
    assert b"".join(blobs.read(blob)) == b"bytes"
