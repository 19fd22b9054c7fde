"""Sessions in tests: a provider that keeps real interpreters, and who asks for them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.db import connections, transaction
from django.db.models.functions import Now

from executions.kernel import background
from executions.ledger.append import enter_row, look_at
from executions.ledger.bindings import NOT_PROVEN
from executions.runs import event_log
from executions.sessions.models import Session
from providers import registry
from providers.leases import close_all
from providers.manager import manager
from tests.conftest import Caller
from tests.support import kept_here
from tests.support.provider_package import Packages
from tests.support.running import activate

URL = "/api/v1/sessions"


@pytest.fixture
def own_storage(tmp_path: Path, settings: Any) -> None:
    """A place for files that has none of another test's."""
    settings.DATA_DIR = tmp_path


@pytest.fixture(name="kept_here")
def provide_kept_here(
    transactional_db: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """The provider of `tests.support.kept_here`, active."""
    packages = Packages(tmp_path / "packages", monkeypatch)
    packages.install("kept_here", {"kept_here": "tests.support.kept_here:KeptHere"}, {})
    activate("kept_here", {})
    yield
    assert background.wait_for_keyed_work()
    for sandbox in kept_here.sandboxes():
        sandbox.close()
    # What follows a command writes down its end, which is not to meet the emptying of the tables.
    wait_for(lambda: not event_log.ids())
    assert background.wait_for_keyed_work()
    close_all()
    manager.close()
    monkeypatch.undo()
    registry.refresh()


def opened(caller: Caller, **body: Any) -> dict[str, Any]:
    """A new session, as the API answers."""
    response = caller.client.post(URL, body)
    assert response.status_code == 201, response.content
    answer: dict[str, Any] = response.json()
    return answer


def cell(caller: Caller, session: dict[str, Any], code: str, **body: Any) -> Any:
    """The answer to running code in it."""
    return caller.client.post(f"{URL}/{session['id']}/executions", {"code": code, **body})


def row(session: dict[str, Any]) -> Session:
    return Session.objects.get(pk=session["id"])


def in_thread(work: Callable[[], object]) -> threading.Thread:
    def body() -> None:
        try:
            work()
        finally:
            connections.close_all()

    thread = threading.Thread(target=body)
    thread.start()
    return thread


def wait_for(is_so: Callable[[], bool], seconds: float = 60) -> None:
    done = threading.Event()
    until = seconds / 0.01
    while not is_so():
        done.wait(0.01)
        until -= 1
        assert until > 0, "it never became so"


def aged(session: dict[str, Any], **seconds: int) -> None:
    """Move its times into the past. When it was made is bound: that is entered, or it would be
    found as altered."""
    past = {name: Now() - timedelta(seconds=value) for name, value in seconds.items()}
    rows = Session.objects.filter(pk=session["id"])
    with transaction.atomic():
        before = look_at(Session, session["id"])
        rows.update(**past)
        if not past.keys() <= NOT_PROVEN["executions.session"].keys():
            enter_row(rows.get(), "changed", before)
