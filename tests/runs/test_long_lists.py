"""Lists for auditors: paged by key, filtered by anything, bounded, and honest about the bound."""

from __future__ import annotations

import re
from datetime import datetime, timedelta
from html import unescape
from itertools import chain, repeat
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.auth import get_user_model
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from executions.admin.executions import searched
from executions.capabilities.search.models import CodeText, SavedFilter
from executions.kernel.text import first_uuid7
from executions.ledger.models import LedgerEntry
from executions.runs.models import Execution
from providers import admin_lists
from tests.support.execution_rows import LIST, make_rows, shown

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the number of rows cuts: a busy machine must not decide."""
    monkeypatch.setattr(admin_lists, "SECONDS", 600)


def ids_of(page: Any) -> list[str]:
    return [str(row.pk) for row in page.context["cl"].result_list]


def link(page: Any, text: str) -> str:
    """The address of a link below the list, "" where there is none."""
    found = re.search(rf'<a [^>]*href="([^"]+)"[^>]*>{text}</a>', page.content.decode())
    return LIST + unescape(found[1]) if found else ""


def walked(client: Client, address: str, text: str = "Next") -> list[list[str]]:
    pages = []
    while address:
        page = client.get(address)
        assert page.status_code == 200
        pages.append(ids_of(page))
        address = link(page, text)
    return pages


@pytest.mark.parametrize("query", ["", "tenant_slug=acme", "tenant_slug=acme&language=python"])
def test_every_row_is_on_one_page_and_the_way_back_is_the_same(auditor: Client, query: str) -> None:
    rows = [str(row.pk) for row in make_rows(130)][::-1]
    make_rows(3, tenant_slug="other", language="bash") if query else None

    pages = walked(auditor, f"{LIST}?{query}")

    assert [len(page) for page in pages] == [50, 50, 30]
    assert [*chain(*pages)] == rows
    last = auditor.get(f"{LIST}?{query}&next={pages[1][-1]}")
    back = auditor.get(link(last, "Previous"))
    assert ids_of(back) == pages[1]
    assert [*chain(*walked(auditor, f"{LIST}?{query}&order=oldest"))] == rows[::-1]


def test_a_permalink_shows_the_same_rows_when_newer_ones_have_come(auditor: Client) -> None:
    make_rows(60)
    first = auditor.get(LIST)
    permalink = link(first, "Permalink")
    make_rows(10)
    assert ids_of(auditor.get(permalink)) == ids_of(first) != ids_of(auditor.get(LIST))
    assert permalink.startswith(f"{LIST}?")


def test_each_filter_finds_its_rows(auditor: Client) -> None:
    first = make_rows(2)[0]
    wanted = make_rows(
        1,
        api_key_prefix="cfd_abc",
        runtime="runsc",
        exit_code=137,
        replay_of=first,
        agent="coder",
        conversation="c 1",
        observed="network",
        tenant_slug="other",
    )
    for query in (
        {"api_key_prefix": "cfd_abc"},
        {"runtime": "runsc"},
        {"exit_code": "137"},
        {"replay": "yes"},
        {"replay_of": str(first.pk)},
        {"agent": "coder"},
        {"conversation": "c 1"},
        {"observed": "network"},
        {"agent": "coder", "exit_code": "137", "tenant_slug": "other", "runtime": "runsc"},
    ):
        assert shown(auditor, **query) == {str(wanted[0].pk)}, query
    assert shown(auditor, agent="coder", tenant_slug="acme") == set()


def test_a_range_of_times_is_exact_to_its_ends(auditor: Client) -> None:
    noon = timezone.now().replace(hour=12, minute=0, second=0, microsecond=0) - timedelta(days=2)
    moments = [noon + timedelta(seconds=after) for after in (-70, -1, 0, 1, 59, 60)]
    rows = [str(make_rows(1, id=first_uuid7(at), created_at=at)[0].pk) for at in moments]

    def between(since: datetime, until: datetime) -> set[str]:
        query = {
            "created_at__gte": f"{since:%Y-%m-%dT%H:%M:%S}",
            "created_at__lt": f"{until:%Y-%m-%d %H:%M}",
        }
        return shown(auditor, **query)

    assert between(noon, noon + timedelta(minutes=1)) == set(rows[2:5])
    assert shown(auditor, created_at__gte=noon.isoformat(), status__exact="succeeded") == {
        *rows[2:]
    }
    assert shown(auditor, created_at__lt=noon.isoformat()) == {*rows[:2]}


@pytest.mark.parametrize(
    ("query", "told"),
    [
        ({"created_at__gte": "yesterday"}, "From: Must be a time like"),
        ({"created_at__lt": "0001-01-01T00:00:00+14:00"}, "Before: Must be a time like"),
        ({"exit_code": "1e3"}, "Exit code: Must be a whole number."),
        ({"exit_code": "9" * 30}, "Exit code: Must be a number of 32 bits."),
        ({"replay_of": "x"}, "Replay of (id): Must be a whole id."),
        ({"replay": "no"}, "Replays: Must be yes"),
        ({"agent": "a" * 256}, "Agent: Must be at most 255"),
        ({"tenant_slug": "a\0b"}, "Tenant: Must be at most 255"),
        ({"next": "-1"}, "next: Must be the key of a row."),
        ({"from": "x\0"}, "from: Must be the key of a row."),
        ({"q": "a\0bcd"}, "Search: At most 1000"),
        ({"q": "a" * 1001}, "Search: At most 1000"),
        ({"request_hash__startswith": "a"}, "Unknown filter"),
        ({"code__icontains": "a"}, "Unknown filter"),
        ({"tenant__keys__digest": "a"}, "Unknown filter"),
        ({"<script>": "1"}, "Unknown filter &#x27;&lt;script&gt;&#x27;"),
    ],
)
def test_what_cannot_be_filtered_by_is_told_and_shows_nothing(
    auditor: Client, query: dict[str, str], told: str
) -> None:
    make_rows(1)
    page = auditor.get(LIST, query)
    assert page.status_code == 400
    assert told in page.content.decode()
    assert ids_of(page) == []


def test_a_time_that_this_zone_has_not_is_told(auditor: Client) -> None:
    with timezone.override("Asia/Shanghai"):
        page = auditor.get(LIST, {"created_at__gte": "9999-12-31T20:00Z"})
    assert page.status_code == 400
    assert "From: Must be a time like" in page.content.decode()


@pytest.mark.parametrize("key", ["-1", str(2**63), "x", "1.5", "9" * 400])
def test_a_key_of_a_numbered_list_is_a_number(admin_client: Client, key: str) -> None:
    for path in ("executions/ledgerentry", "providers/configversion", "admin/logentry"):
        for way in ("next", "previous", "from"):
            page = admin_client.get(f"/admin/{path}/", {way: key})
            assert page.status_code == 400
            assert "Must be the key of a row." in page.content.decode()


def test_more_than_ten_thousand_are_not_counted_but_paged(
    auditor: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admin_lists, "MOST", 120)
    make_rows(121)
    assert "<b>120+</b> executions" in auditor.get(LIST).content.decode()
    assert [len(page) for page in walked(auditor, LIST)] == [50, 50, 21]
    Execution.objects.latest("pk").delete()
    assert "<b>120</b> executions" in auditor.get(LIST).content.decode()


def test_where_the_bound_cuts_is_told_and_the_list_goes_on_behind_it(
    auditor: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admin_lists, "MOST", 100)
    monkeypatch.setattr(admin_lists, "_FIRST_CHUNK", 20)
    monkeypatch.setattr(admin_lists, "_LARGEST_CHUNK", 20)
    wanted = make_rows(1, runtime="runsc")[0]
    make_rows(150)

    page = auditor.get(LIST, {"tenant_slug": "acme", "runtime": "runsc"})
    content = page.content.decode()
    assert ids_of(page) == []
    assert "<b>at least 0</b>" in content
    assert "100 executions searched; older ones not yet." in content
    page = auditor.get(link(page, "Search further"))
    assert ids_of(page) == [str(wanted.pk)]
    assert "looked through" not in page.content.decode()


def test_of_two_filters_that_many_rows_meet_the_rarer_is_walked(
    auditor: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admin_lists, "MOST", 40)
    monkeypatch.setattr(admin_lists, "_FIRST_CHUNK", 10)
    monkeypatch.setattr(admin_lists, "_LARGEST_CHUNK", 10)
    wanted = []
    for _ in range(50):
        wanted += make_rows(1, exit_code=3)
        make_rows(3)
    newest = [str(row.pk) for row in wanted][:9:-1]

    page = auditor.get(LIST, {"tenant_slug": "acme", "exit_code": "3"})
    assert ids_of(page) == newest
    assert "40 executions searched" in page.content.decode()
    oldest = auditor.get(LIST, {"tenant_slug": "acme", "exit_code": "3", "order": "oldest"})
    assert ids_of(oldest) == [str(row.pk) for row in wanted[:40]]


def test_a_page_that_is_full_is_not_held_up_by_counting_on(
    auditor: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admin_lists, "MOST", 150)
    monkeypatch.setattr(admin_lists, "SECONDS", 1e9)
    monkeypatch.setattr(admin_lists, "_FIRST_CHUNK", 60)
    clock = SimpleNamespace(monotonic=chain([0], repeat(5e8)).__next__)
    monkeypatch.setattr(admin_lists, "time", clock)
    make_rows(170)
    page = auditor.get(LIST, {"tenant_slug": "acme", "language": "python"})
    assert len(ids_of(page)) == 50
    assert "<b>at least 60</b>" in page.content.decode()
    assert link(page, "Next")


@pytest.mark.one_database
def test_the_first_line_of_a_time_is_found_without_reading_every_key(
    admin_client: Client,
) -> None:
    with CaptureQueriesContext(connection) as queries:
        admin_client.get("/admin/executions/ledgerentry/", {"at__gte": "2026-01-01T00:00"})
    halving = next(each["sql"] for each in queries.captured_queries if "halved" in each["sql"])
    with connection.cursor() as cursor:
        cursor.execute(f"EXPLAIN QUERY PLAN {halving}")
        steps = [row[3] for row in cursor.fetchall()]
    assert steps
    assert not [step for step in steps if step.startswith("SCAN executions_ledgerentry")]


def test_what_most_programs_contain_is_looked_for_and_not_counted(
    auditor: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("executions.admin.executions.MOST_PROGRAMS", 1)
    found = make_rows(2, code="IMPORT os", code_hash="sha256:" + "a" * 64)
    make_rows(1, code="print(1)")
    make_rows(1, code="")
    CodeText.objects.create(code_hash="sha256:" + "a" * 64, code="IMPORT os")
    assert searched("import").index == ""
    assert set(ids_of(auditor.get(LIST, {"q": "import"}))) == {str(row.pk) for row in found}


def test_time_cuts_too_and_nothing_is_lost_by_it(
    auditor: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admin_lists, "SECONDS", -1)
    monkeypatch.setattr(admin_lists, "_FIRST_CHUNK", 20)
    rows = [str(row.pk) for row in make_rows(70)][::-1]
    query = f"{LIST}?tenant_slug=acme&language=python"
    pages, address = [], query
    while address:
        page = auditor.get(address)
        pages.append(ids_of(page))
        address = link(page, "Search further")
    assert [len(page) for page in pages] == [20, 20, 20, 10]
    assert [*chain(*pages)] == rows


def test_a_small_filter_finds_what_is_old_among_many(
    auditor: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admin_lists, "MOST", 50)
    wanted = make_rows(1, agent="rare", exit_code=3)[0]
    make_rows(120, exit_code=3)
    assert shown(auditor, agent="rare", exit_code="3") == {str(wanted.pk)}
    assert shown(auditor, agent="rare", exit_code="3", tenant_slug="acme") == {str(wanted.pk)}


def test_a_short_search_and_what_the_index_lacks_are_told(auditor: Client) -> None:
    make_rows(2, code="print(1)")
    page = auditor.get(LIST, {"q": "pr"}).content.decode()
    assert "Code search needs at least three characters." in page
    page = auditor.get(LIST, {"q": "print"}).content.decode()
    assert re.search(r"does not include executions requested since [-0-9: ]+UTC yet: 2 exec", page)
    assert "does not include" not in auditor.get(LIST, {"q": "agent:coder"}).content.decode()


def test_a_shared_filter_leads_nowhere_but_into_the_list(auditor: Client) -> None:
    owner = get_user_model().objects.create_user("owner")
    for number, query in enumerate(("code__regex=x", "//elsewhere.example", "next=//evil.example")):
        SavedFilter.objects.create(owner=owner, name=str(number), query=query, is_shared=True)
    page = auditor.get(LIST).content.decode()
    assert 'href="?//elsewhere.example"' in page
    for saved in SavedFilter.objects.all():
        answer = auditor.get(f"{LIST}?{saved.query}")
        assert answer.status_code == 400
    saved_from = auditor.post(f"{LIST}filters/", {"name": "x", "query": "//evil.example"})
    assert saved_from["Location"].startswith(f"{LIST}?")


def test_times_are_alike_in_executions_ledger_history_and_log(admin_client: Client) -> None:
    make_rows(1)
    user = get_user_model().objects.get()
    LogEntry.objects.create(user=user, action_flag=2, object_repr="x", change_message="y")
    shape = re.compile(
        r'<time class="moment" datetime="[^"]+\.\d{3}\+00:00" title="[^"]+\.\d{3}\+00:00">'
        r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC</time>"
    )
    for path in ("executions/execution", "executions/ledgerentry", "admin/logentry"):
        page = admin_client.get(f"/admin/{path}/").content.decode()
        assert shape.search(page), path
        assert "Oldest first" in page


def test_the_ledger_and_the_log_are_filtered_by_time(admin_client: Client) -> None:
    start = timezone.now() - timedelta(days=5)
    user = get_user_model().objects.get()
    for hour in range(100):
        row = LogEntry.objects.create(user=user, action_flag=2, object_repr="x", change_message="y")
        LogEntry.objects.filter(pk=row.pk).update(action_time=start + timedelta(hours=hour))
    begin = LedgerEntry.objects.latest("sequence").sequence
    LedgerEntry.objects.bulk_create(
        LedgerEntry(
            # One of them was taken out.
            sequence=begin + 1 + hour + (hour > 50),
            kind="refusal",
            at=start + timedelta(hours=hour),
            statement="{}",
            digest="0" * 64,
            key_id="k",
        )
        for hour in range(100)
    )
    LedgerEntry.objects.filter(sequence__lte=begin).delete()
    since, until = start + timedelta(hours=49, minutes=30), start + timedelta(hours=60)
    for path, column in (("executions/ledgerentry", "at"), ("admin/logentry", "action_time")):
        query = {f"{column}__gte": since.isoformat(), f"{column}__lt": until.isoformat()}
        page = admin_client.get(f"/admin/{path}/", query)
        assert page.context["cl"].page.count == 10, path


def test_ids_milliseconds_and_status_are_shown_to_be_read(auditor: Client) -> None:
    row = make_rows(1, total_ms=1234.567, status="timed_out", error_code="SB005")[0]
    page = auditor.get(LIST).content.decode()
    assert f'<span class="one-line">{row.pk}</span>' in page
    assert "1.23 s" in page
    assert '<span class="badge badge-warn">Timed out</span>' in page
    assert UUID(str(row.pk))
