"""Saved files in the admin: looked at in storage, drawn harmlessly, and for staff alone."""

from __future__ import annotations

import re
from html import unescape
from urllib.parse import urlencode

import pytest
from django.contrib.auth import get_user_model
from django.test import Client

from executions.admin import files
from executions.sessions.models import Snapshot
from executions.sessions.storage import browse, changes
from executions.tenants.service import AUDITOR
from tests.conftest import Caller
from tests.support import kept_here
from tests.support.roles import member
from tests.support.saved_files import asleep, packed, still_asleep
from tests.support.session_files import put
from tests.support.sessions import URL, cell, opened, row
from tests.support.snapshots import taken

PNG = b"\x89PNG\r\n\x1a\n" + b"no real one"


pytestmark = [pytest.mark.usefixtures("own_storage", "kept_here"), pytest.mark.one_database]


def at(pk: str, view: str = "", path: str = "", kind: str = "session") -> str:
    query = urlencode({"path": path}, errors="surrogateescape")
    return f"/admin/executions/{kind}/{pk}/saved{view}?{query}"


def page_of(client: Client, url: str, status: int = 200) -> str:
    page = client.get(url)
    assert page.status_code == status, page.content
    return page.content.decode()


def test_folders_and_files_are_looked_at_and_nobody_is_woken(alice: Caller) -> None:
    session = asleep(alice)
    put(alice, session, "d/table.csv", b"name,<b>size</b>\nx,1\n")
    put(alice, session, "", packed(("l", b"", "/etc/passwd")), "archive")
    auditor, pk = member(AUDITOR), session["id"]
    page = page_of(auditor, at(pk))
    assert "/etc/passwd" in page
    assert at(pk, "/file", "f").replace("&", "&amp;") in page
    assert "d/table.csv" in page_of(auditor, at(pk, path="d"))
    table = page_of(auditor, at(pk, "/file", "d/table.csv"))
    assert '<th scope="col">&lt;b&gt;size&lt;/b&gt;</th>' in table
    assert "<td>1</td>" in table
    saved = auditor.get(at(pk, "/download", "d/table.csv"))
    assert b"".join(saved.streaming_content).startswith(b"name,")
    assert saved["Content-Disposition"].startswith("attachment")
    assert "Saved files" in page_of(auditor, f"/admin/executions/session/{pk}/change/")
    assert still_asleep(session)


def test_names_that_are_not_utf_8_are_looked_at_like_all_others(
    alice: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "MOST_LISTED", 1)
    session = asleep(alice)
    names = ["b\udcff", "b\udcffc", "f", "100%"]
    for name in (*names[:2], names[3]):
        changes.write(row(session), name, [f"it is {name!a}".encode()])
    auditor, pk = member(AUDITOR), session["id"]
    page, url, seen = page_of(auditor, at(pk)), at(pk), []
    while True:
        seen += re.findall(r'href="([^"]*/saved/file\?[^"]*)"', page)
        if not (following := re.search(r'href="(\?path=[^"]*after=[^"]*)"', page)):
            break
        page = page_of(auditor, url.partition("?")[0] + unescape(following[1]))
    assert len(seen) == len(names)
    told = "".join(page_of(auditor, unescape(link)) for link in seen)
    for name in (names[0], names[1], names[3]):
        assert f"it is &#x27;{ascii(name)[1:-1]}&#x27;" in told


def test_what_is_hostile_is_text_and_never_a_document(alice: Caller) -> None:
    session = asleep(alice)
    hostile = b"<script>alert(1)</script> a\xe2\x80\xaeb"
    svg = b'<svg xmlns="http://www.w3.org/2000/svg" onload="alert(2)"/>'
    for name, content in (("x.html", hostile), ("x.svg", svg), ("x.png", hostile), ("p", PNG)):
        put(alice, session, name, content)
    put(alice, session, "x.csv", b'a,"<script>alert(3)</script>"\n')
    put(alice, session, "%3Cscript%3Ealert(4)", b"\x00binary")
    auditor, pk = member(AUDITOR), session["id"]
    for name in ("x.html", "x.svg", "x.png", "x.csv", "<script>alert(4)"):
        page = page_of(auditor, at(pk, "/file", name))
        for tag in ("<script>alert", "<svg xmlns", "\u202e", "saved-image"):
            assert tag not in page, (name, tag)
        assert auditor.get(at(pk, "/image", name)).status_code == 404
    assert "&lt;script&gt;alert(1)" in page_of(auditor, at(pk, "/file", "x.html"))
    assert "<script>alert" not in page_of(auditor, at(pk))
    assert "saved-image" in page_of(auditor, at(pk, "/file", "p"))
    image = auditor.get(at(pk, "/image", "p"))
    assert b"".join(image.streaming_content) == PNG
    assert image["Content-Type"] == "image/png"
    assert image["Content-Security-Policy"] == "sandbox; default-src 'none'"
    assert image["X-Content-Type-Options"] == "nosniff"
    html = auditor.get(at(pk, "/download", "x.html"))
    assert html["Content-Type"] == "application/octet-stream"
    assert html["Content-Security-Policy"] == "sandbox; default-src 'none'"


def test_what_is_large_is_shown_in_part(alice: Caller, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(browse, "MOST_IMAGE_BYTES", 1000)
    session = asleep(alice)
    put(alice, session, "text", "ä".encode() * 500_000)
    put(alice, session, "picture", PNG + bytes(1000))
    put(alice, session, "table.csv", b"a,b\n" * 100_000)
    auditor, pk = member(AUDITOR), session["id"]
    page = page_of(auditor, at(pk, "/file", "text"))
    assert "Beginning only." in page
    assert len(page) < 300_000
    assert "saved-image" not in page_of(auditor, at(pk, "/file", "picture"))
    assert auditor.get(at(pk, "/image", "picture")).status_code == 404
    table = page_of(auditor, at(pk, "/file", "table.csv"))
    assert table.count("<td>a</td>") == browse.MOST_ROWS - 1
    assert "Beginning only." in table


def test_paths_that_are_none_are_refused(alice: Caller) -> None:
    session = asleep(alice)
    put(alice, session, "", packed(("l", b"", "f")), "archive")
    auditor, pk = member(AUDITOR), session["id"]
    for path in ("../f", "l", "nothing", "f/x", "\0"):
        assert auditor.get(at(pk, "/file", path)).status_code == 400
        assert auditor.get(at(pk, "/download", path)).status_code == 404
        assert auditor.get(at(pk, path=path)).status_code == 400
    missing = "01a20560-0000-7000-8000-000000000000"
    assert auditor.get(at(missing)).status_code == 404
    assert auditor.post(at(pk)).status_code == 404


def test_only_staff_who_may_look_see_them(alice: Caller) -> None:
    session = asleep(alice)
    snapshot = taken(alice, session)
    powerless = Client()
    powerless.force_login(get_user_model().objects.create_user("powerless", is_staff=True))
    for client, status in ((Client(), 302), (powerless, 403)):
        for kind, pk in (("session", session["id"]), ("snapshot", snapshot["id"])):
            for view in ("", "/file", "/image", "/download"):
                assert client.get(at(pk, view, "f", kind)).status_code == status


def test_snapshots_are_listed_with_their_files(alice: Caller) -> None:
    session = opened(alice)
    cell(alice, session, "open('f', 'w').write('then')")
    snapshot = taken(alice, session, name="a\u202eb<i>")
    alice.client.delete(f"{URL}/{session['id']}")
    assert row(session).state == "closed"
    assert kept_here.sandboxes() == []
    auditor = member(AUDITOR)
    page = page_of(auditor, "/admin/executions/snapshot/")
    assert snapshot["id"] in page
    assert "a[U+202E]b&lt;i&gt;" in page
    assert snapshot["id"] in page_of(
        auditor, f"/admin/executions/snapshot/{snapshot['id']}/change/"
    )
    assert "then" in page_of(auditor, at(snapshot["id"], "/file", "f", "snapshot"))
    assert auditor.post("/admin/executions/snapshot/add/").status_code == 403
    assert Snapshot.objects.count() == 1


def test_a_tenants_page_tells_what_its_files_take(alice: Caller) -> None:
    session = asleep(alice)
    put(alice, session, "big", b"x" * 2048)
    taken(alice, session)
    page = page_of(member(AUDITOR), f"/admin/executions/tenant/{alice.tenant.pk}/change/")
    bars = dict(re.findall(r"<dt>([^<]+)</dt>.*?<span>([^<]*)</span>", page, re.DOTALL))
    assert bars["Tenant storage bytes"] == "2.0\xa0KB of 20.0\xa0GB"
    assert bars["Tenant storage files"] == "4 of 1,000,000"
