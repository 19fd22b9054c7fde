"""The parts of pages that are fetched again while somebody looks at them."""

from __future__ import annotations

import pytest
from django.contrib.auth import get_user_model
from django.test import Client

from executions.runs.models import Execution
from tests.support.execution_rows import LIST, make_rows

FIGURES = "/admin/figures/"
PART = {"X-Fragment": "1"}

pytestmark = pytest.mark.django_db


@pytest.mark.parametrize("path", [LIST, FIGURES])
def test_a_part_is_sent_once_and_again_when_it_has_changed(path: str, auditor: Client) -> None:
    make_rows(2)
    first = auditor.get(path, headers=PART)
    assert first.status_code == 200
    assert b"<html" not in first.content
    assert b"csrfmiddlewaretoken" not in first.content
    had = {**PART, "If-None-Match": first["ETag"]}

    again = auditor.get(path, headers=had)
    assert (again.status_code, again.content) == (304, b"")

    make_rows(1, status="failed", tenant_slug="<b>\u202e")
    Execution.objects.update(total_ms=7)
    if path == LIST:
        changed = auditor.get(path, headers=had)
        assert changed.status_code == 200
        assert b"&lt;b&gt;" in changed.content


def test_a_part_of_the_list_is_filtered_as_the_list_is(auditor: Client) -> None:
    make_rows(1)
    wanted = make_rows(1, provider="e2b")[0]
    part = auditor.get(LIST, {"provider": "e2b"}, headers=PART).content.decode()
    assert part.count("/change/") == 1
    assert str(wanted.pk) in part


def test_whoever_may_not_see_executions_gets_no_part(db: None) -> None:
    clerk = Client()
    clerk.force_login(get_user_model().objects.create_user("clerk", is_staff=True))
    for path in (LIST, FIGURES):
        assert clerk.get(path, headers=PART).status_code == 403
        assert Client().get(path, headers=PART).status_code == 302
