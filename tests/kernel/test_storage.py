"""Files where every host finds them: a bucket over a real socket, and what comes of one away."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.core.management import call_command

from executions.capabilities.retention import service as retention
from executions.capabilities.retention.service import apply_retention
from executions.kernel.bucket import Bucket
from executions.kernel.ordered_work import map_in_order
from executions.kernel.storage import ARTIFACTS, LEDGER, QUEUE, file_store
from executions.ledger import checkpoints
from executions.ledger.append import append
from executions.ledger.entry import LedgerUnavailable
from executions.ledger.models import LedgerEntry
from executions.ledger.verification import verify, verify_entries
from executions.runs import journal, payloads
from executions.runs.models import Artifact, Execution
from providers.values import InputFile
from sandbox_site import installation, storage_settings
from sandbox_site.environment import StrictEnv
from tests.conftest import Caller
from tests.support.bucket import S3
from tests.support.held import opened
from tests.support.retention import keep, later
from tests.support.running import run, run_queued

__all__ = ["later"]

pytestmark = pytest.mark.django_db(transaction=True)

FILES = (InputFile("data", os.urandom(200_000)),)
CODE = (
    "answer = ExecutionResult('out', '', 0, 0.0,"
    " artifacts=[ArtifactFile('a.txt', 'text/plain', b'content')])"
)


def checkpoints_written() -> None:
    """What is noted in the background is there."""
    for thread in threading.enumerate():
        if thread.name == "checkpoints":
            thread.join()


def test_artifacts_live_in_the_bucket_as_they_do_on_a_disk(
    scripted: object, on_s3: S3, alice: Caller, bob: Caller, charlie: Caller, later: None
) -> None:
    answer = run(alice, CODE).json()
    (artifact,) = answer["artifacts"]
    name = str(Artifact.objects.get().file.name)

    assert f"kept/artifacts/{name}" in on_s3.names()
    for caller, status in ((alice, 200), (bob, 200), (charlie, 404)):
        got = caller.client.get(artifact["url"])
        assert got.status_code == status
    got = alice.client.get(artifact["url"])
    assert b"".join(got.streaming_content) == b"content"
    assert got["Cache-Control"] == "private, no-store"
    assert verify().is_intact

    keep(alice, artifacts=1)
    assert [erased.executions for erased in apply_retention()] == [1]
    assert f"kept/artifacts/{name}" not in on_s3.names()
    assert alice.client.get(artifact["url"]).status_code == 404
    checkpoints_written()


def test_replaced_bytes_are_found_in_the_bucket(scripted: object, on_s3: S3, alice: Caller) -> None:
    run(alice, CODE)
    name = str(Artifact.objects.get().file.name)
    file_store(ARTIFACTS).delete(name)
    file_store(ARTIFACTS).create(name, b"changed")
    checkpoints_written()
    assert [finding.kind for finding in verify().findings] == ["altered record"]


def test_a_large_queued_request_waits_in_the_bucket_encrypted(
    scripted: Callable[[], list[str]], on_s3: S3, alice: Caller
) -> None:
    execution = opened(alice, "async", code=CODE, files=FILES)
    (key,) = (name for name in on_s3.names() if "/queue/" in name)
    stored = file_store(QUEUE).start(execution.pk.hex, 1_000_000)
    assert CODE.encode() not in stored

    outcome = run_queued()

    assert outcome is not None
    assert outcome.execution.status == "succeeded"
    assert key not in on_s3.names()
    checkpoints_written()


def test_checkpoints_in_the_bucket_show_a_ledger_that_was_cut(on_s3: S3) -> None:
    for number in range(5):
        append("setting", f"entry {number}", {})
    checkpoints_written()
    head = checkpoints.head()
    assert head is not None
    assert head.sequence == LedgerEntry.objects.latest("sequence").sequence
    point = checkpoints.write_checkpoint(verify_entries)
    assert point is not None
    assert verify().is_intact

    LedgerEntry.objects.filter(sequence__gt=3).delete()
    assert "truncated" in {finding.kind for finding in verify().findings}


def test_a_mark_in_the_bucket_is_where_a_verification_begins(on_s3: S3, alice: Caller) -> None:
    append("setting", "an entry", {})
    checkpoints_written()
    checkpoints.write_checkpoint(verify_entries)
    assert verify().is_intact
    found = verify(since_verified=True)
    assert (found.is_intact, found.entries, found.mark is not None) == (True, 0, True)
    assert len(checkpoints.set_aside()) == 3
    assert verify(since_verified=True).mark is None


def test_a_forked_process_makes_its_own_connections_to_the_bucket(on_s3: S3) -> None:
    store = file_store(QUEUE)
    assert isinstance(store, Bucket)
    assert list(store.entries()) == []

    def is_connected(question: object) -> tuple[bool, list[object]]:
        return hasattr(store._connections, "connection"), list(store.entries())

    assert list(map_in_order(is_connected, [None], 2)) == [(False, [])]
    assert hasattr(store._connections, "connection")


def test_writers_of_one_checkpoint_file_do_not_lose_each_others_lines(on_s3: S3) -> None:
    bucket: Any = file_store(LEDGER)
    failures: list[BaseException] = []

    def write(number: int) -> None:
        try:
            bucket.change("lines", lambda found: (found or b"") + b"%d\n" % number)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert failures == []
    assert sorted(bucket.read("lines")[0].split()) == [b"%d" % number for number in range(5)]


@pytest.mark.parametrize("service", ["on_s3", "on_swift"])
def test_a_renamed_file_replaces_none_and_is_not_lost(
    service: str, request: pytest.FixtureRequest
) -> None:
    request.getfixturevalue(service)
    bucket: Any = file_store(LEDGER)
    bucket.replace("old", b"old")
    bucket.replace("new", b"new")
    with pytest.raises(FileExistsError):
        bucket.rename("old", "new")
    assert (bucket.read("old")[0], bucket.read("new")[0]) == (b"old", b"new")
    assert bucket.rename("old", "newer")
    assert (bucket.read("old")[0], bucket.read("newer")[0]) == (None, b"old")
    assert not bucket.rename("old", "newest")


def test_a_bucket_that_is_away_loses_no_record(scripted: object, on_s3: S3, alice: Caller) -> None:
    kept_before = run(alice, CODE).json()["artifacts"][0]["url"]
    checkpoints_written()
    on_s3.stop()

    answer = run(alice, CODE)

    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "SB009"
    assert "artifacts could not be stored" in answer.json()["error"]["message"]
    record = Execution.objects.get(pk=answer.json()["id"])
    assert (record.status, record.stdout, record.retryable) == ("error", "out", False)
    assert LedgerEntry.objects.filter(execution_id=record.pk).exists()
    without = run(alice, "answer = ExecutionResult('fine', '', 0, 0.0)")
    assert (without.status_code, without.json()["stdout"]) == (200, "fine")
    queued = run(alice, f"# {'x' * 100_000}", mode="async")
    assert (queued.status_code, queued.json()["error"]["code"]) == (503, "SB009")
    assert "STORAGE_URL" in queued.json()["error"]["message"]
    assert not Execution.objects.filter(status="queued").exists()
    fetched = alice.client.get(kept_before)
    assert (fetched.status_code, fetched.json()["error"]["code"]) == (503, "SB009")
    checkpoints_written()

    on_s3.start()
    on_s3.make_bucket()
    assert run(alice, CODE).status_code == 200
    checkpoints_written()
    head = checkpoints.head()
    assert head is not None
    assert head.sequence == LedgerEntry.objects.latest("sequence").sequence


def test_of_two_instances_on_a_bucket_the_second_finds_the_mark(on_s3: S3) -> None:
    installation.join()
    installation.join()
    assert "kept/installation" in on_s3.names()
    file_store("installation").delete(installation.FILE_NAME)
    with pytest.raises(
        installation.DoesNotFit, match=r"^STORAGE_URL: the location in STORAGE_URL is empty"
    ):
        installation.refuse_foreign()
    on_s3.stop()
    installation.refuse_foreign()  # being away shows no other bucket


@pytest.mark.parametrize("place", ["folder", "bucket"])
def test_storage_and_rows_are_compared_both_ways(
    place: str, scripted: object, alice: Caller, request: Any, settings: Any, tmp_path: Path
) -> None:
    if place == "bucket":
        request.getfixturevalue("on_s3")
    else:
        settings.DATA_DIR = tmp_path
    fine, gone = (str(run(alice, CODE).json()["id"]).replace("-", "") for _ in range(2))
    waiting = opened(alice, "async", files=FILES)
    lost = opened(alice, "async", files=FILES)
    assert retention.compare_storage().is_same

    file_store(ARTIFACTS).delete(str(Artifact.objects.get(execution_id=gone).file.name))
    payloads.forget(lost.pk)
    file_store(ARTIFACTS).create("00/nobody/0", b"left")
    file_store(ARTIFACTS).create(f"{fine[-2:]}/{fine}/1", b"left")
    file_store(QUEUE).create("0" * 32, b"left")
    young = retention.compare_storage()
    assert young.without_row.number == 0, "they may be about to have their rows"
    for module in (retention, payloads):
        request.getfixturevalue("monkeypatch").setattr(module, "ORPHAN_SECONDS", -60)

    found = retention.compare_storage()

    assert sorted(found.without_row.names) == sorted(
        ["artifacts/00/nobody/0", f"artifacts/{fine[-2:]}/{fine}/1", f"queue/{'0' * 32}"]
    )
    assert sorted(found.without_bytes.names) == sorted(
        [f"artifacts/{gone[-2:]}/{gone}/0", f"queue/{lost.pk.hex}"]
    )
    out = StringIO()
    with pytest.raises(SystemExit):
        call_command("check_storage", "--remove", stdout=out, stderr=StringIO())
    assert "3 files removed" in out.getvalue()
    assert retention.compare_storage().without_row.number == 0
    assert file_store(QUEUE).exists(waiting.pk.hex)
    assert file_store(ARTIFACTS).size(f"{fine[-2:]}/{fine}/0") > 0
    with pytest.raises(FileNotFoundError):
        file_store(ARTIFACTS).size("nothing")
    checkpoints_written()


def test_what_a_run_that_waits_in_the_journal_made_is_not_removed(
    scripted: object,
    alice: Caller,
    record_kept: Callable[[], int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def away(*_: object) -> None:
        raise LedgerUnavailable("The ledger takes no entry now.")

    with monkeypatch.context() as patch:
        patch.setattr(journal, "record", away)
        run(alice, CODE)
    monkeypatch.setattr(retention, "ORPHAN_SECONDS", -60)
    assert retention.compare_storage(remove=True).is_same
    assert record_kept() == 1
    assert file_store(ARTIFACTS).exists(str(Artifact.objects.get().file.name))
    checkpoints_written()


@pytest.mark.parametrize(
    "url",
    [
        "shared",
        "s3://",
        "s3://key:secret@bucket",
        "s3://bucket?endpoint=ftp://host",
        "s3://bucket?endpoint=http://host:9000",
        "s3://bucket?acl=public-read",
        "s3://bucket?addressing=other",
    ],
)
def test_a_storage_that_is_not_understood_is_refused(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STORAGE_URL", url)
    with pytest.raises(ImproperlyConfigured, match="STORAGE_URL"):
        storage_settings.storages(StrictEnv())
