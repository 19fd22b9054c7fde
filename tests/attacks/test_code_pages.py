"""Code and output that are slow to draw: whoever looks at them in the admin waits for nothing.

What a page spends is counted: the processor time of the thread that makes it, and what the process
apart says it has taken. The bounds are several times what either needs; without them one of these
texts takes from three to ninety seconds.
"""

from __future__ import annotations

import html
import json
import re
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
from django.test import Client
from django.urls import reverse

from executions.admin.execution_page import text_box
from executions.capabilities.playground.service import MAX_LINES
from executions.kernel import presentation
from executions.kernel.presentation import MAX_CHARACTERS, MAX_COLOURED, PAGE_SECONDS, PageTime
from executions.kernel.process_pool import PoolBusy, ProcessPool
from executions.runs.models import Execution
from executions.sessions.models import Session
from executions.tenants.models import Tenant
from providers.languages import TABLE
from tests.support.execution_rows import make_rows

pytestmark = [pytest.mark.django_db, pytest.mark.one_database]

SIZE = MAX_COLOURED - 10
LANGUAGES = [each.name for each in TABLE]
# Each makes one of the lexers look at the rest of the text again and again, or many tokens.
HOSTILE = {
    "blank lines": "\n" * SIZE,
    "lines of blanks": " \n" * (SIZE // 2),
    "attributes": "(" + "a." * (SIZE // 2 - 1),
    "letters": "a\n" * (SIZE // 2),
    "words": "a a " * (SIZE // 4),
    "definitions": "def " * (SIZE // 4),
    "generics": "a<" * (SIZE // 2),
    "classes": "class A<" * (SIZE // 8),
    "divisions": "/" * SIZE,
    "interpolations": "`${" * (SIZE // 3),
    "here documents": "<<A\n" * (SIZE // 4),
    "lines of attributes": ("(" + "a." * 990 + "\n") * (SIZE // 1982),
    "quotes": "'\"" * (SIZE // 2),
}
# What the thread of a page may spend. It needs less than a tenth of it.
THREAD_SECONDS = 1.0
# The bound is of the process's clock, whose ticks are coarse.
APART_SECONDS = PAGE_SECONDS + 0.25
# Of a page for one text alone, so that what is slow is given up sooner.
SHORT_SECONDS = 0.05


@pytest.fixture(autouse=True)
def apart(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long each answer of the process apart has taken. Nothing is known from another test."""
    taken: list[float] = []
    ask = presentation._pool.ask

    def counted(question: bytes, patience: float | None = None) -> bytes | None:
        answer = ask(question, 60)
        taken.append(PAGE_SECONDS if answer is None else json.loads(answer)[0])
        return answer

    monkeypatch.setattr(presentation, "_kept", presentation._Kept(1 << 20))
    monkeypatch.setattr(presentation._pool, "ask", counted)
    # However busy the machine is: the processor's time is what counts here.
    monkeypatch.setattr(presentation._pool, "wall_seconds", 60.0)
    return taken


def drawn(client: Client, address: str) -> str:
    """The page, which has kept within its bound of the thread's processor time."""
    began = time.thread_time()
    answer = client.get(address)
    took = time.thread_time() - began
    assert answer.status_code == 200
    assert took < THREAD_SECONDS
    return answer.content.decode()


def page_of(execution: Execution) -> str:
    return reverse("admin:executions_execution_change", args=[execution.pk])


@pytest.mark.parametrize("language", LANGUAGES)
def test_a_hostile_text_takes_its_time_of_no_page_and_no_neighbours(
    language: str, apart: list[float]
) -> None:
    for text in HOSTILE.values():
        found = PageTime(SHORT_SECONDS).coloured(text, language)
        assert apart[-1] < SHORT_SECONDS + 0.25
        if found is not None:
            said = html.unescape(re.sub(r"<[^>]*>", "", found))
            assert said.removesuffix("\n") == text.removesuffix("\n")
    assert (PageTime().coloured("import os", "python") or "").strip() == (
        '<span class="hl-kn">import</span><span class="hl-w"> </span><span class="hl-nn">os</span>'
    )


@pytest.mark.parametrize(
    ("language", "name"),
    [("java", "blank lines"), ("java", "letters"), ("typescript", "lines of attributes")],
)
def test_what_is_slow_to_colour_is_shown_plain_and_says_so(
    language: str, name: str, admin_client: Client, apart: list[float]
) -> None:
    first, again = make_rows(2, code=HOSTILE[name], language=language)
    honest = make_rows(1, code="import os", tenant_slug="elsewhere")[0]
    drawn(admin_client, page_of(honest))  # the first page of all loads what pages need
    apart.clear()
    page = drawn(admin_client, page_of(first))
    assert "Too long for syntax highlighting." in page
    assert len(page) < 1_000_000
    assert page.count('class="line"') <= 5_000
    assert sum(apart) < APART_SECONDS
    # It is known by now, and not tried again.
    apart.clear()
    assert "Too long for syntax highlighting." in drawn(admin_client, page_of(again))
    assert apart == []
    assert '<span class="hl-kn">import</span>' in drawn(admin_client, page_of(honest))


def test_a_notebook_of_slow_cells_has_the_time_of_one_page(
    admin_client: Client, apart: list[float]
) -> None:
    tenant = Tenant.objects.create(slug="acme", name="Acme")
    session = Session.objects.create(tenant=tenant, tenant_slug="acme", language="java")
    outputs = json.dumps([{"application/json": [[]] * 300_000}])
    for turn in range(1, 21):
        # Each of its own, so that what is known of one says nothing of the others.
        code = "\n" * (8_000 - turn)
        make_rows(1, code=code, language="java", session=session, turn=turn, outputs=outputs)
    address = reverse("admin:executions_session_change", args=[session.pk])
    admin_client.get(address)  # loads what pages need
    apart.clear()
    page = drawn(admin_client, address)
    assert page.count('<article class="cell"') == 20
    assert "Rich outputs are large. See the execution." in page
    assert sum(apart) < APART_SECONDS


def hostile_lines(mark: str) -> str:
    """Lines of which a few are everywhere on both sides, with others between them."""
    return "".join(f"c{number % 50}\n{mark}{number}\n" for number in range(MAX_LINES // 2))


def test_two_outcomes_that_are_slow_to_compare_take_the_time_of_one_page(
    admin_client: Client, apart: list[float]
) -> None:
    texts = ("stdout", "stderr", "result")
    before = make_rows(1, **{name: f"{name}\n" + hostile_lines("u") for name in texts})[0]
    other = {name: f"{name}!\n" + hostile_lines("v") for name in texts}
    after = make_rows(1, replay_of=before, **other)[0]
    address = reverse("admin:executions_replay", args=[before.pk])
    page = drawn(admin_client, f"{address}?with={after.pk}")
    assert page.count("<tr") < 2_000
    assert page.count("More lines are not shown.") == 3
    assert sum(apart) < APART_SECONDS
    # What came of two honest runs is told line by line, as ever.
    Execution.objects.filter(pk=before.pk).update(stdout="a\nb\nc", stderr="", result="")
    Execution.objects.filter(pk=after.pk).update(stdout="a\nc\nd", stderr="", result="")
    page = drawn(admin_client, f"{address}?with={after.pk}")
    stdout = page.partition(">stdout")[2].partition("</tbody>")[0]
    assert re.findall(r'class="line-(\w+)"', stdout) == ["removed", "same", "added"]


def test_hidden_characters_make_no_page_longer_than_it_may_be() -> None:
    box = text_box(Execution(stdout="\x01" * 10_000_000), "stdout")
    assert box is not None
    assert len(box.body) <= MAX_CHARACTERS
    assert "more characters are not shown." in box.notes[0]


def test_streams_in_many_pieces_are_not_cut_up_for_a_page(admin_client: Client) -> None:
    order = [[1, 1], [2, 1]] * 12_000
    row = make_rows(1, stdout="o" * 24_000, stderr="e" * 24_000, output_order=order)[0]
    assert "Too long to show in order." in drawn(admin_client, page_of(row))


def test_without_a_free_process_texts_are_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    def busy(*_: Any) -> None:
        raise PoolBusy

    def none(*_: Any) -> None:
        raise OSError("no process")

    for fail in (busy, none):
        monkeypatch.setattr(presentation._pool, "ask", fail)
        assert PageTime().coloured("import os", "python") is None
        assert PageTime().aligned(["a"], ["b"]) is None


ECHO = "import sys\nfor line in sys.stdin: print(line, end='', flush=True)"
NEVER = "import sys\nfor line in sys.stdin: pass"
ENDLESS = "import sys\nwhile True: print('x' * 9999, end='', flush=True)"
ENDS = "import sys\nsys.stdin.readline()"


def pool(program: str, seconds: float = 60.0) -> ProcessPool:
    command = (sys.executable, "-I", "-S", "-c", program)
    return ProcessPool(command, at_once=1, wall_seconds=seconds, most_answered=1000)


@pytest.mark.parametrize(
    "made", [lambda: pool(NEVER, 0.2), lambda: pool(ENDLESS), lambda: pool(ENDS)]
)
def test_a_process_that_does_not_answer_as_it_should_is_ended(
    made: Callable[[], ProcessPool],
) -> None:
    found = made()
    assert found.ask(b"question\n") is None
    assert found._idle == []
    # Its place is free again.
    assert found.ask(b"question\n", patience=1) is None


def test_one_process_answers_all_and_who_finds_no_place_is_told() -> None:
    found = pool(ECHO)
    assert found.ask(b"first\n") == b"first\n"
    process = found._idle[0]._process
    assert found.ask(b"second\n") == b"second\n"
    assert found._idle[0]._process is process
    with found._places, pytest.raises(PoolBusy):
        found.ask(b"third\n", patience=0.01)
    process.kill()
    process.wait()
    assert found.ask(b"fourth\n") == b"fourth\n"
    found._idle.pop().end()
