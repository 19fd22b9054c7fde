"""Who loses a right loses the answers that are being sent by it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, cast

import pytest
from django.contrib.auth import get_user_model
from django.contrib.auth.models import Group, Permission
from django.contrib.sessions.models import Session as SignIn
from django.core.handlers.wsgi import WSGIHandler
from django.db import OperationalError, connection
from django.http import StreamingHttpResponse
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from executions.doors.native.deferred import LATER, DeferredResponse
from executions.runs import rights
from executions.runs.rights import KeyRight, OpenAnswers, Right
from executions.tenants.keys import create_api_key, revoke
from executions.tenants.models import ApiKey, Tenant
from providers.threads import Loop
from sandbox_site.web import bridge
from sandbox_site.web.admission import Limits
from sandbox_site.web.bridge import Bridge
from tests.conftest import Caller
from tests.support.asgi import scope
from tests.support.held import ended, opened

pytestmark = pytest.mark.django_db
START = Loop.start


@pytest.fixture(autouse=True)
def _no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test looks itself, in its own transaction."""
    monkeypatch.setattr(Loop, "start", lambda self: None)


@pytest.fixture
def answers() -> OpenAnswers:
    return OpenAnswers()


@pytest.fixture
def path(alice: Caller) -> str:
    execution = opened(alice)
    ended(execution, stdout="x")
    return f"/api/v1/executions/{execution.pk}/events"


@pytest.fixture
def auditor(path: str) -> Client:
    """Signed in, with one permission of his own and another by his role."""
    view = Permission.objects.get(codename="view_execution")
    user = get_user_model().objects.create_user("auditor", password="x", is_staff=True)
    user.user_permissions.set([view])
    role = Group.objects.create(name="Inspectors")
    role.permissions.set([Permission.objects.get(codename="view_tenant")])
    user.groups.add(role)
    client = Client()
    client.force_login(user)
    return client


def right_by(client: Any, path: str) -> Right:
    """With what right an answer of this client's is received, as the web server is told."""
    later = DeferredResponse()
    answer = client.get(path, **{LATER: later})
    assert answer.status_code == 200, answer.content
    assert later.right is not None
    return later.right


def is_lost(answers: OpenAnswers, right: Right, change: Callable[[], object]) -> bool:
    with answers.watch(right) as lost:
        answers._tick()
        assert not lost.done()
        change()
        answers._tick()
        return lost.done()


def change_key(caller: Caller, **values: Any) -> None:
    ApiKey.objects.filter(pk=caller.api_key.pk).update(**values)


KEY_CHANGES: dict[str, Callable[[Caller], object]] = {
    "revoked": lambda caller: revoke(caller.api_key),
    "expired": lambda caller: change_key(caller, expires_at=timezone.now()),
    "fewer scopes": lambda caller: change_key(caller, scopes="execute"),
    "other addresses": lambda caller: change_key(caller, addresses="10.0.0.0/8"),
    "deleted": lambda caller: ApiKey.objects.filter(pk=caller.api_key.pk).delete(),
    "inactive tenant": lambda caller: Tenant.objects.filter(pk=caller.tenant.pk).update(
        is_active=False
    ),
}


@pytest.mark.parametrize("change", KEY_CHANGES)
def test_a_key_that_is_not_what_it_was_loses_its_answers_and_a_strangers_goes_on(
    change: str, alice: Caller, charlie: Caller, path: str, answers: OpenAnswers
) -> None:
    right = right_by(alice.client, path)
    other = KeyRight(charlie.api_key.pk, "elsewhere", frozenset({"read"}), "")
    with answers.watch(other) as kept:
        assert is_lost(answers, right, lambda: KEY_CHANGES[change](alice))
        assert not kept.done()


def test_a_colleagues_key_that_is_revoked_ends_nothing_of_others(
    alice: Caller, bob: Caller, path: str, answers: OpenAnswers
) -> None:
    assert not is_lost(answers, right_by(alice.client, path), lambda: revoke(bob.api_key))


def test_a_key_that_gets_more_keeps_its_answers(
    alice: Caller, path: str, answers: OpenAnswers
) -> None:
    right = right_by(alice.client, path)
    assert not is_lost(answers, right, lambda: change_key(alice, scopes=" ".join(SCOPES)))


SCOPES = ("admin", "execute", "files", "read", "sessions")


def change_user(**values: Any) -> None:
    get_user_model().objects.filter(username="auditor").update(**values)


def set_password() -> None:
    user = get_user_model().objects.get(username="auditor")
    user.set_password("another pass phrase")
    user.save()


PERSON_CHANGES: dict[str, Callable[[Client], object]] = {
    "signed out": lambda client: client.logout(),
    "sign-in expired": lambda _: SignIn.objects.update(
        expire_date=timezone.now() - timedelta(seconds=1)
    ),
    "password": lambda _: set_password(),
    "inactive": lambda _: change_user(is_active=False),
    "off the staff": lambda _: change_user(is_staff=False),
    "permission": lambda _: (
        get_user_model().objects.get(username="auditor").user_permissions.clear()
    ),
    "role": lambda _: get_user_model().objects.get(username="auditor").groups.clear(),
    "role's permission": lambda _: Group.objects.get(name="Inspectors").permissions.clear(),
    "deleted": lambda _: get_user_model().objects.filter(username="auditor").delete(),
}


@pytest.mark.parametrize("change", PERSON_CHANGES)
def test_a_person_who_is_not_who_he_was_loses_his_answers(
    change: str, auditor: Client, path: str, answers: OpenAnswers
) -> None:
    assert is_lost(answers, right_by(auditor, path), lambda: PERSON_CHANGES[change](auditor))


def test_a_person_who_gets_more_keeps_his_answers(
    auditor: Client, path: str, answers: OpenAnswers
) -> None:
    right = right_by(auditor, path)
    assert not is_lost(answers, right, lambda: change_user(is_superuser=True))


def test_a_superuser_who_is_none_any_more_loses_his_answers(
    auditor: Client, path: str, answers: OpenAnswers
) -> None:
    change_user(is_superuser=True)
    get_user_model().objects.get(username="auditor").user_permissions.clear()
    right = right_by(auditor, path)
    assert is_lost(answers, right, lambda: change_user(is_superuser=False))


def test_pages_that_are_sent_in_pieces_are_received_by_a_right_too(
    auditor: Client, answers: OpenAnswers
) -> None:
    change_user(is_superuser=True)
    right = right_by(auditor, "/admin/executions/execution/export/?format=csv")
    assert is_lost(answers, right, auditor.logout)


def test_who_may_be_anybody_has_no_right_to_lose(answers: OpenAnswers) -> None:
    with answers.watch(None) as lost:
        answers._tick()
        assert not lost.done()
    assert answers._tick() is not None


@pytest.mark.usefixtures("no_lookup_grows_old")
def test_one_check_serves_all_open_answers(
    alice: Caller, auditor: Client, path: str, answers: OpenAnswers
) -> None:
    person = right_by(auditor, path)
    of_one = right_by(alice.client, path)
    more = [
        KeyRight(create_api_key(alice.tenant, f"{n}")[0].pk, "wonderland", frozenset(), "")
        for n in range(20)
    ]
    counts = []
    for held in ([of_one, person], [of_one, person, *more, *[of_one] * 100]):
        open_ones = [answers.watch(right) for right in held]
        for each in open_ones:
            each.__enter__()
        with CaptureQueriesContext(connection) as asked:
            answers._tick()
        counts.append(len(asked))
        for each in open_ones:
            each.__exit__(None, None, None)
    assert counts == [5, 5]


def test_answers_outlive_a_database_that_is_away_but_not_for_long(
    alice: Caller, path: str, answers: OpenAnswers, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(_: object) -> None:
        raise OperationalError("away")

    right = right_by(alice.client, path)
    monkeypatch.setattr(rights, "_valid_rights", away)
    with answers.watch(right) as lost:
        answers._tick()
        assert not lost.done()
        answers._answered_at = time.monotonic() - rights.AWAY_SECONDS
        answers._tick()
        assert lost.done()


def test_an_answer_that_nobody_can_check_is_not_sent(
    alice: Caller, path: str, answers: OpenAnswers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Loop, "start", START)

    def none_left(_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("threading.Thread.start", none_left)
    with answers.watch(KeyRight(alice.api_key.pk, "wonderland", frozenset(), "")) as lost:
        assert lost.done()


def test_the_thread_stays_for_a_while_and_goes(answers: OpenAnswers) -> None:
    looks = [answers._tick() for _ in range(rights._IDLE_CHECKS + 1)]
    assert looks == [rights.CHECK_SECONDS] * rights._IDLE_CHECKS + [None]


@pytest.mark.parametrize("loses", [True, False])
def test_a_download_whose_receiver_loses_the_right_breaks_off(
    loses: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers, right = OpenAnswers(), KeyRight(1, "wonderland", frozenset(), "")
    monkeypatch.setattr(bridge, "open_answers", answers)
    closed = threading.Event()

    def pieces() -> Iterator[bytes]:
        try:
            for number in range(4):
                if loses and number == 2:
                    answers._end([right])
                yield bytes(bridge.PIECE_BYTES)
        finally:
            closed.set()

    def handler(environ: Any, start: Any) -> StreamingHttpResponse:
        environ[LATER].right = right
        return StreamingHttpResponse(pieces())

    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    limits = Limits(body_bytes=1000, spool_bytes=1000, body_seconds=10)
    asyncio.run(Bridge(cast("WSGIHandler", handler), 2, limits)(scope("/file"), receive, send))

    bodies = [each for each in sent if each["type"] == "http.response.body"]
    assert sum(len(each["body"]) for each in bodies) == (3 if loses else 4) * bridge.PIECE_BYTES
    assert bodies[-1]["more_body"] == loses
    assert closed.wait(60)
    assert not answers._open
