"""Files that code leaves behind: kept whole, named harmlessly, handed out as downloads only."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from executions.kernel.text import uuid7
from executions.runs.artifacts import remove_files, store_files
from executions.runs.models import Artifact, Execution
from providers.runtime.guest.names import MOST_CHARACTERS
from providers.values import ArtifactFile
from tests.conftest import Caller
from tests.support.running import run


def leave(caller: Caller, *files: tuple[str, str, bytes]) -> Any:
    made = ", ".join(
        f"ArtifactFile({name!r}, {mime!r}, {content!r})" for name, mime, content in files
    )
    return run(caller, f"answer = ExecutionResult('', '', 0, 0.0, artifacts=[{made}])").json()


def fetch(caller: Caller, execution_id: str, name: str) -> Any:
    return caller.client.get(f"/api/v1/executions/{execution_id}/artifacts/{quote(name)}")


def test_what_real_code_writes_comes_back(local_active: None, alice: Caller) -> None:
    code = (
        "import os\n"
        "os.makedirs('artifacts/charts', exist_ok=True)\n"
        "open('artifacts/charts/a.bin', 'wb').write(bytes(range(256)))\n"
        "os.symlink('/etc/passwd', 'artifacts/stolen')\n"
        "open('elsewhere.txt', 'w').write('not an artifact')\n"
    )

    body = run(alice, code).json()

    assert [artifact["name"] for artifact in body["artifacts"]] == ["charts/a.bin"]
    artifact = body["artifacts"][0]
    assert set(artifact) == {"name", "mime_type", "size_bytes", "url"}
    assert artifact["size_bytes"] == 256
    download = alice.client.get(artifact["url"])
    assert download.status_code == 200
    assert download.getvalue() == bytes(range(256))


def test_a_download_is_saved_and_never_shown(scripted: object, alice: Caller) -> None:
    body = leave(alice, ("page.html", "text/html", b"<script>alert(1)</script>"))

    download = fetch(alice, body["id"], "page.html")

    named = "attachment; filename=\"page.html\"; filename*=UTF-8''page.html"
    assert download["Content-Disposition"] == named
    assert download["X-Content-Type-Options"] == "nosniff"
    assert "sandbox" in download["Content-Security-Policy"]
    assert download["Content-Type"] == "text/html"
    assert download["Content-Length"] == "25"


def test_the_record_knows_size_and_hash(scripted: object, alice: Caller) -> None:
    leave(alice, ("a.txt", "text/plain", b"hello"))

    artifact = Artifact.objects.get()
    assert (artifact.name, artifact.size_bytes) == ("a.txt", 5)
    assert artifact.sha256 == hashlib.sha256(b"hello").hexdigest()
    assert Execution.objects.get().artifact_count == 1


def test_its_name_never_decides_where_a_file_is_kept(
    scripted: object, alice: Caller, settings: Any
) -> None:
    leave(alice, ("../../../escape", "text/plain", b"x"), ("/abs", "text/plain", b"y"))

    folder = settings.DATA_DIR / "artifacts"
    for artifact in Artifact.objects.all():
        path = Path(artifact.file.path)
        assert folder in path.parents
        assert path.name.isdigit()
        assert os.stat(path).st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    "name",
    [
        "a b.txt",
        "\u3000\u202f\u00a0\u200d\u00ad.txt",
        "\\xff",
        "\\x5cxff",
        "ü/日本.txt",
        "50%?#&.txt",
        'quo"te.txt',
        "semi;colon",
        "x" * 255,
    ],
)
def test_a_file_is_found_under_its_own_name(name: str, scripted: object, alice: Caller) -> None:
    body = leave(alice, (name, "text/plain", b"content"))

    assert body["artifacts"][0]["name"] == name
    download = alice.client.get(body["artifacts"][0]["url"])
    assert download.getvalue() == b"content"
    assert download["Content-Disposition"].startswith("attachment")


def test_a_name_that_turns_text_around_is_saved_without_that(
    scripted: object, alice: Caller
) -> None:
    name = "a\u202egnp.exe"
    body = leave(alice, (name, "text/plain", b"content"))
    assert body["artifacts"][0]["name"] == name
    header = fetch(alice, body["id"], name)["Content-Disposition"]
    assert header == "attachment; filename=\"a_gnp.exe\"; filename*=UTF-8''a_gnp.exe"


HOSTILE = ("a\r\nSet-Cookie: x=1", "nul\0and\ud800", "d/" * 2000 + "end.txt", "")


def test_a_hostile_name_is_left_out_and_noted(scripted: object, alice: Caller) -> None:
    body = leave(alice, *((name, "text/plain", b"x") for name in (*HOSTILE, "good")))
    assert [artifact["name"] for artifact in body["artifacts"]] == ["good"]
    skipped = Execution.objects.get().meta["artifacts_skipped"]
    assert [reason for _, reason in skipped] == [
        "the name has control characters, or is not UTF-8",
        "the name has control characters, or is not UTF-8",
        "the name is too long: at most 512 characters are kept",
        "it has no name",
    ]


def test_of_two_files_with_one_name_the_first_is_kept(scripted: object, alice: Caller) -> None:
    body = leave(alice, ("a", "text/plain", b"1"), ("a", "text/plain", b"2"))
    assert [artifact["name"] for artifact in body["artifacts"]] == ["a"]
    assert fetch(alice, body["id"], "a").getvalue() == b"1"
    assert Execution.objects.get().meta["artifacts_skipped"] == [
        ["a", "another file has this name"]
    ]


def test_what_is_stored_has_a_harmless_name_whoever_checked_it(scripted: object) -> None:
    files = [ArtifactFile(name, "text/plain", b"x") for name in (*HOSTILE, "a\0", "a\x01")]
    stored = store_files(uuid7(), files)
    names = [artifact.name for artifact in stored]
    remove_files(stored)
    assert names[:2] == ["a\ufffd\ufffdSet-Cookie: x=1", "nul\ufffdand\ufffd"]
    assert (len(names[2]), names[2][-7:]) == (500, "end.txt")
    assert names[3:] == ["unnamed", "a\ufffd", "a\ufffd (2)"]


def test_names_that_are_kept_are_stored_as_they_are(scripted: object, alice: Caller) -> None:
    names = ["\u2028a", "\u2029a", "/".join(["f" * 127] * 4)]
    assert len(names[2]) == MOST_CHARACTERS - 1
    body = leave(alice, *((name, "text/plain", name.encode()) for name in names))

    assert sorted(artifact["name"] for artifact in body["artifacts"]) == sorted(names)
    assert fetch(alice, body["id"], names[1]).getvalue() == names[1].encode()


@pytest.mark.parametrize("mime_type", ["text/plain\r\nX: 1", "nonsense", "", "a/" + "b" * 200])
def test_a_mime_type_that_is_none_becomes_bytes(
    mime_type: str, scripted: object, alice: Caller
) -> None:
    body = leave(alice, ("a", mime_type, b"x"))

    assert body["artifacts"][0]["mime_type"] == "application/octet-stream"
    assert fetch(alice, body["id"], "a")["Content-Type"] == "application/octet-stream"


def test_an_empty_file_is_a_file(scripted: object, alice: Caller) -> None:
    body = leave(alice, ("empty", "text/plain", b""))

    assert fetch(alice, body["id"], "empty").getvalue() == b""


def test_without_artifacts_nothing_touches_the_storage(
    scripted: object, alice: Caller, settings: Any, tmp_path: Path
) -> None:
    settings.DATA_DIR = tmp_path

    run(alice, "pass")

    assert list(tmp_path.iterdir()) == [tmp_path / "packages"]


def test_artifacts_that_cannot_be_stored_are_an_error_that_keeps_the_output(
    scripted: object, alice: Caller, settings: Any, tmp_path: Path
) -> None:
    (tmp_path / "artifacts").write_text("in the way")
    settings.DATA_DIR = tmp_path

    answer = run(
        alice,
        "answer = ExecutionResult('kept', '', 0, 0.0,"
        " artifacts=[ArtifactFile('a', 'text/plain', b'x')])",
    )

    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "SB009"
    record = Execution.objects.get()
    assert (record.status, record.stdout, record.exit_code) == ("error", "kept", 0)
    assert (record.artifact_count, record.retryable) == (0, False)


def test_a_file_that_is_gone_is_not_found(scripted: object, alice: Caller) -> None:
    body = leave(alice, ("a", "text/plain", b"x"))
    os.unlink(Artifact.objects.get().file.path)

    assert fetch(alice, body["id"], "a").status_code == 404


def test_a_name_that_is_not_there_is_not_found(
    scripted: object, alice: Caller, bob: Caller, charlie: Caller
) -> None:
    body = leave(alice, ("a", "text/plain", b"x"))

    assert fetch(alice, body["id"], "b").status_code == 404
    assert fetch(bob, body["id"], "a").status_code == 200
    assert fetch(charlie, body["id"], "a").status_code == 404
