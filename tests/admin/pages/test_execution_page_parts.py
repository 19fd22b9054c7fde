"""The parts of an execution's page: what is there, what is left out, and for whom it links."""

from __future__ import annotations

import html
import json
import re
from typing import Any

import pytest
from django.test import Client
from django.utils import timezone
from hypothesis import given
from hypothesis import strategies as st

from executions.admin.execution_page import code_box
from executions.kernel.presentation import PageTime, in_time, shown
from executions.runs.models import Artifact, Execution
from executions.tenants.models import Tenant
from providers.hidden_characters import visible
from providers.services import save_config
from tests.admin.pages.execution_pages import page_of
from tests.support.execution_rows import make_rows
from tests.support.processes import ROOT

pytestmark = [pytest.mark.django_db, pytest.mark.one_database]

HOSTILE = "<script>x()</script>\u202e\x1b[2J\u200b"
HARMLESS = "&lt;script&gt;x()&lt;/script&gt;[U+202E][U+001B][2J[U+200B]"


def part_of(page: str) -> str:
    """What is ours of a page."""
    return page.partition('<article class="run"')[2].partition("</article>")[0]


def page(client: Client, **values: Any) -> str:
    return part_of(page_of(client, str(make_rows(1, **values)[0].pk)))


def headings(page: str) -> list[str]:
    return re.findall(r"<h[23][^>]*>([^<]+)</h", page)


def test_what_is_empty_is_left_out(auditor: Client) -> None:
    bare = page(auditor, provider="")
    assert headings(bare) == ["Record", "Caller", "Environment", "Times", "Receipt"]
    assert "No output is stored." in bare
    for name in re.findall(r"<dd>(.*?)</dd>", bare):
        assert name.strip("- –"), bare
    waits = page(auditor, status="queued", finished_at=None)
    assert headings(waits) == ["Output", "Record", "Caller", "Environment", "Times"]


def test_what_is_there_comes_in_its_order(auditor: Client) -> None:
    full = page(
        auditor,
        code="print(1)",
        arguments="{}",
        stdout="1\n",
        stderr="!\n",
        result="1",
        outputs=json.dumps([{"text/plain": "shown"}]),
        hops=[{"provider": "local", "outcome": "served", "ms": 2.0}],
        total_ms=1500.0,
        run_ms=1500.0,
        input_files=[{"path": "in/a.txt", "size": 3, "hash": "sha256:0"}],
    )
    inputs, outputs = ["Code", "Arguments", "Input files"], ["stdout", "stderr", "Result"]
    rest = [
        "Rich outputs",
        "Record",
        "Caller",
        "Environment",
        "Times",
        "Receipt",
        "Providers tried",
        "Timings",
    ]
    assert headings(full) == [*inputs, *outputs, *rest]
    assert "1.50 s" in full
    for name in ("code", "arguments", "stdout", "stderr", "result"):
        assert f'/text/{name}"' in full


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({"status": "failed", "stderr": "Traceback\n  1 / 0\nZeroDivisionError: <b>\n\n"},
         "ZeroDivisionError: &lt;b&gt;"),
        ({"status": "timed_out", "error_code": "SB005", "error_message": "Longer than 1 s."},
         "SB005: Longer than 1 s."),
        ({"status": "error", "error_code": "SB003", "error_message": "one\ntwo\u202e"},
         "SB003: two[U+202E]"),
        ({"status": "failed", "stderr": "z" * 9000}, "z" * 500 + "…"),
    ],
)  # fmt: skip
def test_the_last_line_of_the_error_is_told_first(
    values: dict[str, str], line: str, auditor: Client
) -> None:
    assert f'<p class="run-error">{line}</p>' in page(auditor, **values)


def test_no_error_is_told_of_what_succeeded(auditor: Client) -> None:
    assert "run-error" not in page(auditor, stderr="a warning\n")


def test_a_hostile_name_stays_text_wherever_it_stands(
    auditor: Client, admin_client: Client
) -> None:
    row = make_rows(
        1,
        tenant_slug=HOSTILE[:60],
        provider=HOSTILE[:60],
        runtime=HOSTILE[:60],
        api_key_name=HOSTILE,
        agent=HOSTILE,
        subject=HOSTILE,
        request_id=HOSTILE,
        idempotency_key=HOSTILE,
        language=HOSTILE[:30],
        code=HOSTILE,
        arguments=HOSTILE,
        stderr=HOSTILE,
        status="failed",
        meta={"image": HOSTILE},
        hops=[{"provider": HOSTILE, "outcome": "failed", "code": "x", "reason": HOSTILE, "ms": 1}],
        input_files=[{"path": HOSTILE, "size": 1, "hash": HOSTILE}],
    )[0]
    Artifact.objects.create(
        execution=row, name=HOSTILE, mime_type=HOSTILE, size_bytes=1, sha256="0", file=""
    )
    for client in (auditor, admin_client):
        whole = page_of(client, str(row.pk))
        found = part_of(whole)
        assert "<script>x()" not in whole
        for character in HOSTILE[-6:]:
            if character in "\u202e\x1b\u200b":
                assert character not in whole
        assert found.count(HARMLESS) >= 12
        assert "erased" in found


def test_a_page_of_huge_texts_stays_small(auditor: Client) -> None:
    ten = "x" * 10_000_000
    order = [[1, 10_000_000], [2, 10_000_000]]
    found = page(auditor, stdout=ten, stderr="y\n" * 5_000_000, output_order=order, status="failed")
    assert len(found) < 200_000
    assert "Too long to show in order. stdout and stderr are shown separately." in found
    assert '<p class="run-error">y</p>' in found
    lines = page(auditor, code="\n" * 100_000)
    assert len(lines) < 200_000
    assert 'id="L1"' not in lines


@given(st.text(st.characters(codec="utf-8"), min_size=1))
def test_numbered_lines_say_what_the_code_says(code: str) -> None:
    box = code_box(Execution(code=code, language="python"), PageTime())
    assert box is not None
    lines = re.findall(r'<span class="line" id="L(\d+)"><a href="#L(\d+)" tabindex="-1">(\d+)</a>'
                       r"<span>(.*?)\n</span></span>", box.body, re.DOTALL)  # fmt: skip
    expected = shown(code).text.removesuffix("\n").split("\n")
    assert [html.unescape(re.sub(r"<[^>]*>", "", line[3])) for line in lines] == expected
    assert [line[:3] for line in lines] == [(str(n),) * 3 for n in range(1, len(expected) + 1)]


def test_links_lead_only_to_what_the_reader_may_see(auditor: Client, admin_client: Client) -> None:
    tenant = Tenant.objects.create(slug="acme", name="Acme")
    row = save_config("local", {"pool_size": 2})
    values = {"tenant": tenant, "config_version": row.version, "runtime": "bubblewrap"}
    execution = make_rows(1, **values)[0]

    mine, all_of_it = (part_of(page_of(one, str(execution.pk))) for one in (auditor, admin_client))

    for url in (
        f"/admin/executions/tenant/{tenant.pk}/change/",
        f"/admin/providers/providerconfig/{row.pk}/change/",
        "/admin/providers/configversion/",
    ):
        assert url in all_of_it
        assert url not in mine
    for query in ("tenant_slug=acme", "provider=local"):
        assert f'href="/admin/executions/execution/?{query}"' in mine
    assert "Cancel this execution" not in all_of_it


def test_only_who_may_cancel_is_offered_it(auditor: Client, admin_client: Client) -> None:
    execution = make_rows(1, status="running", finished_at=None)[0]
    assert "Cancel this execution" in page_of(admin_client, str(execution.pk))
    assert "Cancel this execution" not in page_of(auditor, str(execution.pk))
    refused = auditor.post(f"/admin/executions/execution/{execution.pk}/cancel")
    assert refused.status_code == 403
    execution.refresh_from_db()
    assert execution.status == "running"


def test_the_stream_of_an_erased_execution_tells_nothing_of_it(auditor: Client) -> None:
    execution = make_rows(1, stdout="secret", output_order=[[1, 6]], started_at=timezone.now())[0]
    url = f"/api/v1/executions/{execution.pk}/events"
    assert "secret" in streamed(auditor, url)
    Execution.objects.filter(pk=execution.pk).update(stdout="")

    events = [json.loads(line) for line in streamed(auditor, url).splitlines()]

    assert [event["type"] for event in events] == ["started", "done"]
    Execution.objects.filter(pk=execution.pk).delete()
    assert auditor.get(url).status_code == 404
    assert Client().get(url).status_code == 401


def streamed(client: Client, url: str) -> str:
    answer = client.get(url)
    assert answer.status_code == 200
    return b"".join(answer.streaming_content).decode()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("milliseconds", "words"),
    [(0, "0 ms"), (0.4, "under 1 ms"), (999.4, "999 ms"), (1240, "1.24 s"), (125_000, "2 min 5 s"),
     (3_780_000, "1 h 3 min")],
)  # fmt: skip
def test_a_duration_is_told_in_the_units_of_a_person(milliseconds: float, words: str) -> None:
    assert in_time(milliseconds) == words


def test_the_script_spells_out_the_same_characters_as_the_server() -> None:
    script = (ROOT / "static" / "executions" / "live.js").read_text()
    literals = script.partition("const HIDDEN = new RegExp(")[2].partition(")")[0]
    written = "".join(json.loads(each) for each in re.findall(r'"[^"]*"', literals))
    table = re.compile(re.sub(r"\\u\{(\w+)\}", lambda m: f"\\U{m[1]:0>8}", written.rstrip("gu")))
    characters = [chr(code) for code in range(0x110000) if not 0xD800 <= code < 0xE000]
    spelt_out = {each for each in characters if visible(each) != each}
    assert spelt_out == set(table.findall("".join(characters)))
