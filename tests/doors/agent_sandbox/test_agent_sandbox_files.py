"""The files of a conversation: sent, fetched, listed and linked to, in Agent Sandbox's words."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import jsonschema
import pytest
from django.test import Client
from drf_spectacular.generators import SchemaGenerator

from executions.capabilities import conversations as agent_sandbox
from executions.capabilities.network.models import NetworkAttempt
from executions.sessions.capacity import suspend
from executions.sessions.models import Session, WorkspaceFile
from executions.sessions.session_sandbox import borrow_sandbox
from executions.sessions.storage import blobs
from tests.conftest import Caller
from tests.support.agent_sandbox import (
    content,
    download_url,
    execute,
    listed,
    output,
    upload,
    upload_urls,
)
from tests.support.fetching import allow
from tests.support.schemas import strict
from tests.support.sessions import in_thread
from tests.support.web_server import WebServer, answer

pytestmark = pytest.mark.one_database

pytest_plugins = ["tests.support.agent_sandbox"]

# What leads out of a folder, or is none of ours to write.
ESCAPES = ["../x", "a/../../x", "/etc/passwd", "a\0b", "a//b", ".", "a/.", "x/" * 70 + "x",
           "n" * 1024, ".sb_meta.json", "__sandboxd__.py"]  # fmt: skip


@pytest.fixture
def pages(settings: Any) -> Iterator[WebServer]:
    with WebServer() as server:
        allow(settings, server)
        yield server


def test_a_file_that_is_sent_is_there_and_saved(conversations: None, alice: Caller) -> None:
    sent = upload(alice, b"a,b\n", path="in/data.csv", presign_expires_in=60)
    assert sent.status_code == 200, sent.content
    found = sent.json()
    assert content(found.pop("download_url")) == b"a,b\n"
    assert found == {
        "status": "success",
        "path": "in/data.csv",
        "size_bytes": 4,
        "mime_type": "text/csv",
        "container_id": str(Session.objects.get().pk),
    }
    assert output(alice, "open('in/data.csv').read()") == "'a,b\\n'\n"
    again = upload(alice, b"anew", path="in/data.csv").json()
    assert content(again["download_url"]) == b"anew"
    assert upload(alice, b"", filename="a b.txt").json()["path"] == "a b.txt"
    [first, second] = alice.client.get("/v1/files/list", {"user_id": "alice"}).json()["files"]
    assert (first["path"], first["size_bytes"]) == ("a b.txt", 0)
    assert (second["path"], second["size_bytes"]) == ("in/data.csv", 4)
    assert type(first["mtime"]) is int
    assert first["mtime"] > 1_700_000_000


@pytest.mark.parametrize("path", ESCAPES, ids=lambda path: repr(path[:12]))
def test_a_path_out_of_the_folder_is_refused_everywhere(
    path: str, no_provider: None, alice: Caller
) -> None:
    for refused in (
        upload(alice, b"x", path=path),
        upload_urls(alice, ["https://files.example/x"], dest_dir=path),
        download_url(alice, path),
        execute(alice, "1", inputs=[path])
        if not path.startswith("/")
        else download_url(alice, path),
    ):
        assert refused.status_code == 400, refused.content
        assert list(refused.json()) == ["detail"]
    assert Session.objects.count() == 0


def test_a_file_whose_storing_is_begun_anew_comes_whole(
    conversations: None, alice: Caller, pages: WebServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert upload(alice, b"x", path="x").status_code == 200
    assert suspend(Session.objects.get().pk, "it is tested")
    pages.pages["/late.csv"] = answer(b"late")
    real, tries = blobs.store_all, []

    def store_all(*args: Any) -> Any:
        found = real(*args)
        tries.append(1)
        if len(tries) == 1:
            assert blobs.remove_unnamed(alice.tenant.pk) == 1
        return found

    monkeypatch.setattr(blobs, "store_all", store_all)
    assert upload_urls(alice, [pages.url("/late.csv")]).json()["uploaded"] == ["late.csv"]
    assert content(download_url(alice, "late.csv").json()["download_url"]) == b"late"
    tries.clear()
    assert upload(alice, b"sent", path="sent").status_code == 200
    assert content(download_url(alice, "sent").json()["download_url"]) == b"sent"
    assert Session.objects.get().state == Session.State.ASLEEP


def test_a_file_that_could_not_be_saved_is_refused_before_it_keeps_others_from_it(
    conversations: None, alice: Caller, settings: Any
) -> None:
    assert upload(alice, b"x", path="x").status_code == 200
    settings.SESSION_STORAGE_BYTES = 100
    refused = upload(alice, b"x" * 200, path="big")
    assert refused.status_code == 429, refused.content
    assert "SESSION_STORAGE_BYTES" in refused.json()["detail"]
    assert output(alice, "import os; open('y', 'w').close(); os.path.exists('big')") == "False\n"
    assert listed(alice) == ["x", "y"]


def test_twins_of_names_are_files_of_their_own(conversations: None, alice: Caller) -> None:
    names = ["File", "file", "\ufb01le", "e\u0301", "\u00e9"]
    for name in names:
        assert upload(alice, name.encode(), path=name).json()["path"] == name
    assert sorted(listed(alice)) == sorted(names)
    for name in names:
        assert content(download_url(alice, name).json()["download_url"]) == name.encode()
    assert download_url(alice, "FILE").status_code == 404


def test_names_are_text_and_what_is_handed_out_is_no_page(
    conversations: None, alice: Caller
) -> None:
    name = "<img src=x onerror=alert(1)>.html"
    found = upload(alice, b"<script>alert(1)</script>", path=f"d/{name}").json()
    assert found["path"] == f"d/{name}"
    got = Client().get(found["download_url"])
    assert got["Content-Disposition"].startswith("attachment")
    assert got["X-Content-Type-Options"] == "nosniff"
    assert "sandbox" in got["Content-Security-Policy"]
    assert listed(alice) == [f"d/{name}"]


def test_a_file_that_is_too_large_is_413_and_nothing_is_opened(
    no_provider: None, alice: Caller, settings: Any
) -> None:
    settings.AGENT_SANDBOX = replace(settings.AGENT_SANDBOX, upload_bytes=1000)
    refused = upload(alice, b"x" * 1001, path="f")
    assert refused.status_code == 413
    assert "MAX_UPLOAD_BYTES" in refused.json()["detail"]
    settings.SANDBOX_MAX_BODY_BYTES = 2000
    assert upload(alice, b"x" * 3000, path="f").status_code == 413
    assert Session.objects.count() == 0


@pytest.mark.parametrize("form", [{}, {"file": "text"}, {"file": ""}])
def test_a_form_without_a_file_is_refused(form: dict[str, str], alice: Caller) -> None:
    refused = alice.client.post(
        "/v1/files/upload", {"user_id": "alice", "path": "f", **form}, format="multipart"
    )
    assert (refused.status_code, list(refused.json())) == (400, ["detail"])
    assert "file" in refused.json()["detail"]


def test_a_form_that_is_none_is_refused(alice: Caller) -> None:
    body = {"user_id": "alice", "path": "f"}
    assert alice.client.post("/v1/files/upload", body).status_code == 415
    broken = alice.client.generic(
        "POST", "/v1/files/upload", b"x", content_type="multipart/form-data; boundary="
    )
    assert (broken.status_code, list(broken.json())) == (400, ["detail"])


def test_what_is_no_saved_file_has_no_link(conversations: None, alice: Caller) -> None:
    assert download_url(alice, "f").json() == {"detail": "File not found"}
    assert Session.objects.count() == 0
    output(alice, "import os; os.mkdir('d'); os.symlink('/etc/passwd', 'l')")
    output(alice, "open('.sb_meta.json', 'w').write('{}'); open('f', 'w').write('f')")
    assert listed(alice) == ["f"]
    for path in ("d", "l", "g"):
        assert download_url(alice, path).status_code == 404
    assert WorkspaceFile.objects.filter(path=".sb_meta.json").exists()
    for expires_in in ("0", "604801", "x", "-1"):
        assert download_url(alice, "f", expires_in=expires_in).status_code == 400


def test_files_by_url_come_into_a_folder_and_are_saved_once(
    conversations: None, alice: Caller, pages: WebServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages.pages["/data.csv"] = answer(b"a\n")
    pages.pages["/image.jpg"] = answer(b"jpg")
    saves: list[object] = []
    save = agent_sandbox.save_changes
    monkeypatch.setattr(
        agent_sandbox, "save_changes", lambda session: saves.append(1) or save(session)
    )
    urls = [
        pages.url("/data.csv"),
        pages.url("/missing"),
        pages.url("/image.jpg?Content-Disposition=filename%3D%22my.jpg%22"),
        pages.url("/data.csv"),
    ]
    found = upload_urls(alice, urls, dest_dir="data/")
    assert found.status_code == 200, found.content
    assert found.json()["status"] == "partial_success"
    assert found.json()["uploaded"] == ["data/data.csv", "data/my.jpg", "data/data-2.csv"]
    [error] = found.json()["errors"]
    assert error["source_url"] == pages.url("/missing")
    assert "404" in error["error"]
    assert len(saves) == 1
    assert output(alice, "open('data/data.csv').read()") == "'a\\n'\n"
    # Nothing that is there is replaced, whatever its case.
    output(alice, "open('data/DATA.CSV', 'w').write('mine'); import os; os.remove('data/data.csv')")
    again = upload_urls(alice, urls[:1], dest_dir="data").json()
    assert again == {"status": "success", "uploaded": ["data/data-3.csv"], "errors": []}
    assert content(download_url(alice, "data/DATA.CSV").json()["download_url"]) == b"mine"


def test_a_file_by_url_replaces_none_that_a_program_wrote_after_the_last_save(
    conversations: None, alice: Caller, pages: WebServer
) -> None:
    pages.pages["/data.csv"] = answer(b"theirs")
    output(alice, "1")
    with borrow_sandbox(Session.objects.get()) as sandbox:
        sandbox.files.write("d/data.csv", [b"mine"])
    found = upload_urls(alice, [pages.url("/data.csv")], dest_dir="d").json()
    assert found["uploaded"] == ["d/data-2.csv"]
    assert output(alice, "print(open('d/data.csv').read())") == "mine\n"


def test_two_requests_at_once_give_their_files_names_of_their_own(
    conversations: None, alice: Caller, pages: WebServer
) -> None:
    output(alice, "1")
    both = threading.Barrier(2)

    def page(body: bytes) -> Callable[[socket.socket], None]:
        def serve(client: socket.socket) -> None:
            both.wait(60)
            client.sendall(answer(body))

        return serve

    pages.pages.update({f"/{name}/data.csv": page(name.encode()) for name in "ab"})
    came: dict[str, str] = {}

    def fetch(name: str) -> None:
        [path] = upload_urls(alice, [pages.url(f"/{name}/data.csv")]).json()["uploaded"]
        came[name] = output(alice, f"print(open({path!r}).read())")

    for thread in [in_thread(partial(fetch, name)) for name in "ab"]:
        thread.join()
    assert came == {"a": "a\n", "b": "b\n"}


def test_where_no_file_comes_the_status_is_error(
    conversations: None, alice: Caller, pages: WebServer, settings: Any
) -> None:
    found = upload_urls(alice, [pages.url("/missing"), "ftp://files.example/x"]).json()
    assert (found["status"], found["uploaded"], len(found["errors"])) == ("error", [], 2)
    settings.AGENT_SANDBOX = replace(settings.AGENT_SANDBOX, upload_bytes=10)
    pages.pages["/large"] = answer(b"x" * 11)
    found = upload_urls(alice, [pages.url("/large")]).json()
    assert (found["status"], len(found["errors"])) == ("error", 1)
    assert listed(alice) == []


def test_each_file_by_url_is_an_attempt_of_the_session_to_reach_a_host(
    conversations: None, alice: Caller, pages: WebServer
) -> None:
    pages.pages["/data.csv"] = answer(b"a\n")
    upload_urls(
        alice,
        [
            pages.url("/data.csv?token=secret"),
            pages.url("/missing"),
            "https://metadata.google.internal/x",
            "https://user:secret@[::1",
        ],
    )
    host, port = pages.url("").removeprefix("http://").split(":")
    rows = NetworkAttempt.objects.order_by("id")
    assert [(row.host, row.port, row.path, row.outcome, row.why) for row in rows] == [
        (host, int(port), "/data.csv", "allowed", ""),
        (host, int(port), "/missing", "failed", "answer"),
        ("metadata.google.internal", 443, "/x", "refused", "host"),
        ("?", 0, "", "refused", "url"),
    ]
    assert rows[0].received == 2
    assert rows[0].session_id is not None
    assert {row.tenant_slug for row in rows} == {alice.tenant.slug}


def test_without_a_provider_a_fetch_says_why_as_it_is_described(
    no_provider: None, alice: Caller
) -> None:
    found = upload_urls(alice, ["https://files.example/x"])
    assert found.status_code == 200
    body = found.json()
    assert body.pop("error").startswith("SB001: ")
    assert body == {"status": "error", "uploaded": [], "errors": []}
    described = strict(SchemaGenerator().get_schema(public=True), "AgentSandboxFetched")
    jsonschema.validate(found.json(), described)


def test_this_machine_is_not_fetched_from_unless_it_is_named(
    conversations: None, alice: Caller
) -> None:
    with WebServer() as server:
        server.pages["/secret"] = answer(b"secret")
        found = upload_urls(alice, [server.url("/secret")]).json()
        assert (found["status"], found["uploaded"]) == ("error", [])
        assert server.connections == 0


@pytest.mark.parametrize("urls", [[], ["https://files.example/"] * 201, "https://x", [5], [""]])
def test_a_list_of_urls_that_is_none_is_refused(urls: Any, alice: Caller) -> None:
    refused = upload_urls(alice, urls)
    assert (refused.status_code, list(refused.json())) == (400, ["detail"])
