"""Filters kept under a name: one's own, or for everybody."""

from __future__ import annotations

import pytest
from django.contrib.auth import get_user_model
from django.contrib.auth.models import Permission
from django.test import Client

from executions.capabilities.search import service as search
from executions.capabilities.search.models import SavedFilter
from tests.support.execution_rows import LIST, make_rows, shown

pytestmark = pytest.mark.django_db


@pytest.fixture
def colleague(auditor: Client) -> Client:
    user = get_user_model().objects.create_user("colleague", is_staff=True)
    user.user_permissions.add(Permission.objects.get(codename="view_execution"))
    client = Client()
    client.force_login(user)
    return client


def save(client: Client, name: str, query: str, **values: str) -> str:
    """Save a filter; the page one ends on."""
    page = client.post(f"{LIST}filters/", {"name": name, "query": query, **values}, follow=True)
    assert page.redirect_chain[0][0].startswith(f"{LIST}?")
    return page.content.decode()


def test_a_saved_filter_shows_what_it_was_saved_for(auditor: Client) -> None:
    make_rows(1)
    failed = make_rows(1, status="failed", tenant_slug="a&b")
    query = "status__exact=failed&tenant_slug=a%26b&p=3"

    page = save(auditor, "Failed of a&b", query)

    assert "The filter &#x27;Failed of a&amp;b&#x27; was saved." in page
    saved = SavedFilter.objects.get()
    assert saved.query == "status__exact=failed&tenant_slug=a%26b"
    assert f'href="?{saved.query.replace("&", "&amp;")}"' in auditor.get(LIST).content.decode()
    assert shown(auditor, status__exact="failed", tenant_slug="a&b") == {str(failed[0].pk)}


def test_saving_under_the_same_name_replaces(auditor: Client) -> None:
    save(auditor, "mine", "status__exact=failed")
    save(auditor, "mine", "status__exact=error")
    assert SavedFilter.objects.get().query == "status__exact=error"


def test_sharing_takes_a_permission(auditor: Client, colleague: Client) -> None:
    assert 'name="shared"' not in auditor.get(LIST).content.decode()
    assert "You may not share filters." in save(auditor, "for all", "", shared="1")
    assert not SavedFilter.objects.exists()
    assert "You may not share" not in save(auditor, "for me", "")
    assert "for me" not in colleague.get(LIST).content.decode()


def test_others_see_what_is_shared_and_cannot_remove_it(auditor: Client, colleague: Client) -> None:
    get_user_model().objects.get(username="auditor").user_permissions.add(
        Permission.objects.get(codename="share_savedfilter")
    )
    save(auditor, "my own", "status__exact=failed")
    save(auditor, "for all <b>", "status__exact=error", shared="1")

    page = colleague.get(LIST).content.decode()

    assert "for all &lt;b&gt;" in page
    assert "my own" not in page
    for saved in SavedFilter.objects.all():
        assert colleague.post(f"{LIST}filters/{saved.pk}/remove").status_code == 404
        assert auditor.get(f"{LIST}filters/{saved.pk}/remove").status_code == 404
        assert auditor.post(f"{LIST}filters/{saved.pk}/remove").status_code == 302
    assert not SavedFilter.objects.exists()


@pytest.mark.parametrize(
    ("name", "query"),
    [("", "a=b"), ("x" * 101, "a=b"), ("a\u202eb", "a=b"), ("x", "a=" + "b" * 2000)],
)
def test_what_cannot_be_kept_is_refused(auditor: Client, name: str, query: str) -> None:
    page = save(auditor, name, query)
    assert "Must be 1 to 100 printable characters." in page or "Is too long to be stored." in page
    assert not SavedFilter.objects.exists()


def test_there_is_a_most(auditor: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "MOST_FILTERS", 2)
    for name in ("a", "b", "c"):
        save(auditor, name, "")
    assert set(SavedFilter.objects.values_list("name", flat=True)) == {"a", "b"}


def test_they_are_for_who_may_look(auditor: Client) -> None:
    clerk = Client()
    clerk.force_login(get_user_model().objects.create_user("clerk", is_staff=True))
    assert clerk.post(f"{LIST}filters/", {"name": "x"}).status_code == 403
    assert Client().post(f"{LIST}filters/", {"name": "x"}).status_code == 302
    strict = Client(enforce_csrf_checks=True)
    strict.cookies = auditor.cookies
    assert strict.post(f"{LIST}filters/", {"name": "x"}).status_code == 403
    assert not SavedFilter.objects.exists()
