"""An execution's page: readable, and harmless whatever the code printed."""

from __future__ import annotations

import base64
import re
import unicodedata
from collections.abc import Callable
from typing import Any

import pytest
from django.contrib.auth import get_user_model
from django.contrib.auth.models import Permission
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.utils import timezone
from hypothesis import given
from hypothesis import strategies as st

from executions.kernel.presentation import MAX_CHARACTERS, MAX_LINE, shown
from executions.runs.models import Approval, Artifact, Execution
from providers.hidden_characters import visible
from tests.admin.pages.execution_pages import page_of
from tests.conftest import Caller
from tests.support.execution_rows import make_rows
from tests.support.running import run

pytestmark = [pytest.mark.django_db, pytest.mark.one_database]

PNG = b"\x89PNG\r\n\x1a\n" + b"\0" * 20
HOSTILE = "\x1b[2J\x1b]0;owned\x07 a\u202eb\u2066c \u200b \ufeff \x00 \x7f \x9b31m \U000e0041"


def leave(caller: Caller, name: str, mime: str, content: bytes) -> Artifact:
    file = f"ArtifactFile({name!r}, {mime!r}, {content!r})"
    run(caller, f"answer = ExecutionResult('', '', 0, 0.0, artifacts=[{file}])")
    return Artifact.objects.order_by("-pk")[0]


def test_nothing_that_acts_or_hides_reaches_the_page(
    scripted: object, alice: Caller, auditor: Client
) -> None:
    body = run(
        alice,
        f"# {HOSTILE[20:24]!r}\nhostile = {HOSTILE!r}\n"
        "answer = ExecutionResult(hostile, hostile, 0, 0.0, has_result=True, result=hostile)",
        arguments={"a": HOSTILE},
    ).json()
    Execution.objects.update(subject="a\u202eb", error_message="\x1b[1m")

    page = page_of(auditor, body["id"])

    for character in "\x1b\x07\x7f\x9b\u202e\u2066\u200b\ufeff\U000e0041":
        assert character not in page, f"U+{ord(character):04X}"
    assert "[U+001B][2J" in page
    assert "a[U+202E]b[U+2066]c" in page


@given(st.text())
def test_what_is_shown_holds_no_character_that_cannot_be_seen(text: str) -> None:
    for character in visible(text):
        if character not in "\t\n":
            category = unicodedata.category(character)
            assert category != "Cc"
            bidi = unicodedata.bidirectional(character)
            assert bidi not in ("LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI")


def test_what_can_be_seen_stays_as_it_is() -> None:
    text = "def f():\n\treturn 'Zürich 東京 العربية é 😀'\n"
    assert visible(text) == text
    assert shown(text).note == ""


def test_huge_lines_and_texts_are_cut_and_can_be_downloaded(
    scripted: object, alice: Caller, auditor: Client
) -> None:
    body = run(alice, "answer = ExecutionResult('x' * 150_000, 'y\\n' * 60_000, 0, 0.0)").json()

    page = page_of(auditor, body["id"])

    assert len(page) < 260_000
    assert "x" * MAX_LINE in page
    assert "x" * (MAX_LINE + 1) not in page
    assert f"{150_000 - MAX_CHARACTERS:,} more characters are not shown." in page
    download = auditor.get(f"/admin/executions/execution/{body['id']}/text/stdout")
    assert download.content == b"x" * 150_000
    assert download["Content-Disposition"].startswith("attachment")
    assert download["Content-Type"] == "text/plain; charset=utf-8"


ORDERED = "answer.output_order = [[1, 4], [2, 20], [1, 3]]"


def test_both_streams_are_shown_in_the_order_in_which_they_came(
    scripted: object, alice: Caller, auditor: Client
) -> None:
    code = (
        f"answer = ExecutionResult('one\\ntwo', '<script>\\x1b</script>\\n\\n', 0, 0.0)\n{ORDERED}"
    )
    body = run(alice, code).json()

    page = page_of(auditor, body["id"])

    shown_pieces = re.findall(
        r'<span class="from-(\w+)"><span class="stream-name">(\w+): </span>([^<]*)</span>', page
    )
    assert shown_pieces == [
        ("stdout", "stdout", "one\n"),
        ("stderr", "stderr", "&lt;script&gt;[U+001B]&lt;/script&gt;\n\n"),
        ("stdout", "stdout", "two"),
    ]


def test_streams_whose_order_is_unknown_erased_or_too_long_are_shown_one_after_the_other(
    scripted: object, alice: Caller, auditor: Client
) -> None:
    unordered = run(alice, "answer = ExecutionResult('out', 'err', 0, 0.0)").json()
    assert "stream-name" not in page_of(auditor, unordered["id"])
    body = run(
        alice,
        "answer = ExecutionResult('o' * 2000, 'e' * 2000, 0, 0.0)\n"
        "answer.output_order = [[1, 1], [2, 1]] * 2000",
    ).json()
    assert "stream-name" not in (page := page_of(auditor, body["id"]))
    assert "Too long to show in order. stdout and stderr are shown separately." in page
    Execution.objects.filter(pk=body["id"]).update(stdout="", stderr="")
    assert "Too long" not in page_of(auditor, body["id"])


def test_code_is_coloured(scripted: object, alice: Caller, auditor: Client) -> None:
    body = run(alice, "import os  # <b>\n").json()
    page = page_of(auditor, body["id"])
    assert '<span class="hl-kn">import</span>' in page
    assert '<span class="hl-c1"># &lt;b&gt;</span>' in page


def test_code_that_is_too_long_to_colour_is_shown_plain(
    scripted: object, alice: Caller, auditor: Client
) -> None:
    body = run(alice, "x = 1  # <b>\n" * 6000).json()
    page = page_of(auditor, body["id"])
    assert "x = 1  # &lt;b&gt;\n" in page
    assert 'class="hl-' not in page


def test_the_phases_are_drawn_to_scale(scripted: object, alice: Caller, auditor: Client) -> None:
    body = run(alice, "pass").json()
    Execution.objects.update(
        received_ms=5.0, queue_ms=5.0, start_ms=30.0, run_ms=50.0, closed_ms=10.0, total_ms=100.0
    )

    page = page_of(auditor, body["id"])

    bars = re.findall(r'<rect class="phase-(\w+)" x="([\d.]+)" y="0" width="([\d.]+)"', page)
    assert bars == [
        ("received", "0.000", "5.000"),
        ("queue", "5.000", "5.000"),
        ("start", "10.000", "30.000"),
        ("run", "40.000", "50.000"),
        ("closed", "90.000", "10.000"),
    ]
    assert "<dd>50 ms</dd>" in page


def test_the_page_says_whether_the_receipt_holds(
    scripted: object, alice: Caller, auditor: Client
) -> None:
    answer = run(alice, "pass").json()
    assert "receipt-good" in page_of(auditor, answer["id"])
    download = auditor.get(f"/admin/executions/execution/{answer['id']}/receipt")
    assert download.json() == answer["receipt"]

    Execution.objects.update(stdout="changed")
    page = page_of(auditor, answer["id"])
    assert "NOT VALID" in page
    assert "the stdout was changed" in page


def test_a_picture_is_shown_and_a_text_begun(
    scripted: object, alice: Caller, auditor: Client
) -> None:
    picture = leave(alice, "plot.png", "image/png", PNG)
    url = f"/admin/executions/execution/{picture.execution_id}/artifacts/{picture.pk}/image"
    assert f'<img class="artifact-image" src="{url}"' in page_of(auditor, str(picture.execution_id))
    image = auditor.get(url)
    assert image.getvalue() == PNG
    assert image["Content-Type"] == "image/png"
    assert image["X-Content-Type-Options"] == "nosniff"
    assert "sandbox" in image["Content-Security-Policy"]

    text = leave(alice, "notes.txt", "text/plain", "<b>ü\x1b</b>".encode() + b"x" * 9000)
    page = page_of(auditor, str(text.execution_id))
    assert "&lt;b&gt;ü[U+001B]&lt;/b&gt;xxx" in page


def show(caller: Caller, *bundles: dict[str, Any]) -> str:
    body = run(caller, f"answer = ExecutionResult('', '', 0, 0.0, outputs={list(bundles)!r})")
    return str(body.json()["id"])


def test_a_plot_the_program_showed_is_drawn_and_the_rest_is_text(
    scripted: object, alice: Caller, auditor: Client
) -> None:
    plot = {"text/plain": "<Figure>", "image/png": base64.b64encode(PNG).decode()}
    table = {"text/html": "<table onclick='x()'></table>", "text/plain": "a\u202eb"}
    only_html = {"text/html": "<script>x()</script>"}
    execution_id = show(alice, plot, table, only_html, {"application/json": {"a": [1]}})

    page = page_of(auditor, execution_id)

    url = f"/admin/executions/execution/{execution_id}/outputs/0/image"
    assert f'<img class="artifact-image" src="{url}"' in page
    assert "a[U+202E]b" in page
    assert "&lt;script&gt;x()&lt;/script&gt;" in page
    assert "<script>x()" not in page
    assert "{&quot;a&quot;:[1]}" in page
    image = auditor.get(url)
    assert (image.content, image["Content-Type"]) == (PNG, "image/png")
    assert "sandbox" in image["Content-Security-Policy"]
    for number in (1, 4):
        assert auditor.get(url.replace("/0/", f"/{number}/")).status_code == 404


@pytest.mark.parametrize(
    "bundle",
    [
        {"image/png": base64.b64encode(b"<html>").decode()},
        {"image/png": "no base64"},
        {"image/svg+xml": "<svg onload='x()'/>"},
        {},
    ],
)
def test_an_output_that_is_no_picture_is_not_served_as_one(
    scripted: object, alice: Caller, auditor: Client, bundle: dict[str, str]
) -> None:
    execution_id = show(alice, bundle)
    url = f"/admin/executions/execution/{execution_id}/outputs/0/image"
    assert auditor.get(url).status_code == 404
    page = page_of(auditor, execution_id)
    assert url not in page
    assert "<svg onload" not in page


@pytest.mark.parametrize(
    ("name", "mime", "content"),
    [
        ("a.svg", "image/svg+xml", b"<svg xmlns='http://www.w3.org/2000/svg' onload='x()'/>"),
        ("a.png", "image/png", b"<html>"),
        ("a.webp", "image/webp", b"RIFF0000WAVE"),
        ("empty.png", "image/png", b""),
    ],
)
def test_what_is_no_picture_is_not_served_as_one(
    scripted: object, alice: Caller, auditor: Client, name: str, mime: str, content: bytes
) -> None:
    artifact = leave(alice, name, mime, content)
    url = f"/admin/executions/execution/{artifact.execution_id}/artifacts/{artifact.pk}/image"
    assert auditor.get(url).status_code == 404
    page = page_of(auditor, str(artifact.execution_id))
    assert "<img" not in page.partition('id="content"')[2]
    assert "<svg xmlns='" not in page


def test_a_binary_or_erased_artifact_is_no_error(
    scripted: object, alice: Caller, auditor: Client
) -> None:
    binary = leave(alice, "a.bin", "application/octet-stream", bytes(range(256)))
    assert "a.bin" in page_of(auditor, str(binary.execution_id))
    binary.file.storage.delete(str(binary.file.name))
    assert "a.bin" in page_of(auditor, str(binary.execution_id))
    Artifact.objects.update(file="")
    assert "erased" in page_of(auditor, str(binary.execution_id))


def test_the_views_beneath_the_page_are_for_who_may_look(
    scripted: object, alice: Caller, auditor: Client, django_user_model: Any
) -> None:
    picture = leave(alice, "plot.png", "image/png", PNG)
    base = f"/admin/executions/execution/{picture.execution_id}/"
    clerk = Client()
    clerk.force_login(django_user_model.objects.create_user("clerk", is_staff=True))
    for path in ("text/stdout", "receipt", f"artifacts/{picture.pk}/image", "replay"):
        assert Client().get(base + path).status_code == 302
        assert clerk.get(base + path).status_code == 403
    assert auditor.get(f"{base}text/pending").status_code == 404
    unknown = base.replace(str(picture.execution_id), "00000000-0000-7000-8000-000000000000")
    for path in ("text/stdout", "receipt", f"artifacts/{picture.pk}/image"):
        assert auditor.get(unknown + path).status_code == 404


def test_the_page_costs_few_statements(
    scripted: Callable[[], list[str]], alice: Caller, auditor: Client
) -> None:
    picture = leave(alice, "plot.png", "image/png", PNG)
    with CaptureQueriesContext(connection) as queries:
        page_of(auditor, str(picture.execution_id))
    assert len(queries) <= 12


def test_who_waits_for_an_approval_is_led_to_it(admin_client: Client) -> None:
    rows = make_rows(3, status="queued", finished_at=None)
    approval = Approval.objects.create(execution=rows[0], tenant_slug="acme")
    decided = {"status": "approved", "decided_by": "user:a", "decided_at": timezone.now()}
    Approval.objects.create(execution=rows[1], tenant_slug="acme", **decided)

    assert "Open approval" in (page := page_of(admin_client, str(rows[0].pk)))
    assert f"/admin/executions/approval/{approval.pk}/change/" in page
    for row in rows[1:]:
        assert "approved" not in page_of(admin_client, str(row.pk))

    # Of somebody who may not look at approvals it is told alone.
    user = get_user_model().objects.create_user("looks", is_staff=True)
    user.user_permissions.add(Permission.objects.get(codename="view_execution"))
    client = Client()
    client.force_login(user)
    page = page_of(client, str(rows[0].pk))
    assert "Pending approval." in page
    assert "executions/approval" not in page


def test_the_facts_are_said_once_and_in_units_that_people_use(auditor: Client) -> None:
    row = make_rows(
        1,
        runtime="gvisor",
        isolation="gvisor",
        input_files=[{"path": "in/a.csv", "size_bytes": 12, "hash": "sha256:" + "0" * 64}],
        total_ms=61_234.5,
        queue_ms=0.4,
        start_ms=25.25,
        run_ms=61_208.85,
    )[0]
    page = page_of(auditor, str(row.pk))
    assert "gvisor · gvisor" not in page
    assert re.search(r"in/a\.csv</th><td class=\"number\">12\xa0bytes", page)
    assert [*re.findall(r"<dd>([^<]+)</dd></div>", page)][-4:] == [
        *("under 1 ms", "25 ms"),
        *("1 min 1 s", "1 min 1 s"),
    ]
