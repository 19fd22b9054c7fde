"""What is to outlive its session is saved before that ends, whoever finds that it is over age."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from executions.capabilities.conversations import Conversation, find
from executions.kernel import background
from executions.sessions.maintenance import maintain
from executions.sessions.models import Session
from executions.sessions.queries import LivingFilter, living_sessions
from tests.conftest import Caller
from tests.support import kept_here
from tests.support.saved_files import saved, write
from tests.support.sessions import URL, aged, cell, opened, row


@pytest.fixture
def own_storage(own_storage: None, settings: Any) -> None:
    settings.DELETE_S3_ON_CLEANUP = False


pytestmark = [pytest.mark.usefixtures("own_storage", "kept_here"), pytest.mark.database]

_CONVERSATION = Conversation("user")


@pytest.mark.parametrize(
    "look",
    [
        lambda caller, url: caller.client.get(url),
        lambda caller, url: caller.client.get(URL),
        lambda caller, url: living_sessions(caller.tenant, LivingFilter(["open"]), None, 10),
        lambda caller, url: find(caller.tenant, _CONVERSATION),
    ],
    ids=["one", "list", "living", "conversation"],
)
def test_one_over_age_that_is_looked_at_is_closed_by_the_schedule_with_its_files_saved(
    alice: Caller, look: Callable[[Caller, str], object]
) -> None:
    session = opened(alice)
    Session.objects.update(conversation=_CONVERSATION.key)
    cell(alice, session, write("f", "kept"))
    assert background.wait_for_keyed_work()
    (sandbox,) = kept_here.sandboxes()
    (sandbox.folder / "g").write_text("of a daemon")
    aged(session, created_at=1801)
    look(alice, f"{URL}/{session['id']}")
    maintain()
    assert row(session).state == "closed"
    assert saved(session) == {"f": b"kept", "g": b"of a daemon"}


def test_one_of_which_nothing_is_saved_is_closed_by_being_looked_at(alice: Caller) -> None:
    session = opened(alice, saves="never")
    aged(session, created_at=1801)
    assert alice.client.get(f"{URL}/{session['id']}").json()["state"] == "closed"
