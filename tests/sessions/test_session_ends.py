"""How sessions end: closed by their caller, by age, for room, or because the sandbox is gone."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from executions.ledger.models import LedgerEntry
from executions.ledger.verification import verify
from executions.runs import event_log
from executions.runs.heartbeat import Heartbeat
from executions.runs.models import Execution
from executions.sessions import background_commands, ending, maintenance, session_sandbox
from executions.sessions.capacity import suspend
from executions.sessions.ending import mark_lost
from executions.sessions.maintenance import maintain
from executions.sessions.models import Session
from executions.sessions.session_sandbox import LEASE_SECONDS, NEW_SECONDS
from providers.errors import KeptFull, ProviderUnavailable
from tests.conftest import Caller
from tests.support import kept_here
from tests.support.sessions import URL, aged, cell, in_thread, opened, row, wait_for

pytestmark = [pytest.mark.usefixtures("kept_here"), pytest.mark.database]


def test_a_closed_session_is_a_conflict_for_its_own_and_its_sandbox_is_gone(alice: Caller) -> None:
    session = opened(alice)
    url = f"{URL}/{session['id']}"
    assert alice.client.delete(url).status_code == 204
    assert kept_here.sandboxes() == []
    refused = cell(alice, session, "1")
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "conflict")
    assert refused.json()["id"] is None
    for verb, path in (
        ("post", "/interrupt"),
        ("post", "/reset"),
        ("get", "/contexts"),
        ("patch", ""),
    ):
        assert getattr(alice.client, verb)(url + path).status_code == 409, path
    assert alice.client.get(url).json()["state"] == "closed"
    assert alice.client.delete(url).status_code == 204
    assert row(session).released_at is not None
    assert [str(finding) for finding in verify().findings] == []


def test_closing_cancels_what_runs_and_what_waits(alice: Caller, bob: Caller) -> None:
    session = opened(alice)
    (sandbox,) = kept_here.sandboxes()
    threads = [in_thread(lambda: cell(alice, session, "import time; time.sleep(30)"))]
    wait_for(lambda: sandbox.known["default"][1].busy)
    threads.append(in_thread(lambda: cell(alice, session, "print('never')")))
    wait_for(lambda: row(session).turns == 2)
    queued = cell(alice, session, "print('never')", mode="async")
    assert queued.status_code == 202
    assert bob.client.delete(f"{URL}/{session['id']}").status_code == 204
    for thread in threads:
        thread.join()
    assert {e.status for e in Execution.objects.all()} == {"cancelled"}
    assert Execution.objects.count() == LedgerEntry.objects.filter(kind="execution").count() == 3


@pytest.mark.parametrize(
    ("seconds", "saves"), [({"used_at": 601}, "never"), ({"created_at": 1801}, "background")]
)
def test_a_session_over_age_is_closed_by_the_schedule_and_by_being_looked_at(
    alice: Caller, seconds: dict[str, int], saves: str
) -> None:
    looked_at, forgotten, young = (opened(alice, saves=saves) for _ in range(3))
    aged(looked_at, **seconds)
    assert cell(alice, looked_at, "1").status_code == 409
    assert alice.client.get(f"{URL}/{looked_at['id']}").json()["state"] == "closed"
    aged(forgotten, **seconds)
    assert maintain() == 1
    assert len(kept_here.sandboxes()) == 1
    assert [row(each).state for each in (forgotten, young)] == ["closed", "open"]


def test_a_busy_session_is_never_reaped(alice: Caller) -> None:
    session = opened(alice)
    (sandbox,) = kept_here.sandboxes()
    thread = in_thread(lambda: cell(alice, session, "import time; time.sleep(30)"))
    wait_for(lambda: sandbox.known["default"][1].busy)
    aged(session, used_at=5000, created_at=5000)
    assert maintain() == 0
    assert alice.client.get(f"{URL}/{session['id']}").json()["state"] == "open"
    alice.client.post(f"{URL}/{session['id']}/interrupt")
    thread.join()


def test_extending_a_session_keeps_it(alice: Caller) -> None:
    session = opened(alice)
    url = f"{URL}/{session['id']}"
    aged(session, created_at=1700)
    before = alice.client.get(url).json()["expires_at"]
    changed = alice.client.patch(url, {"max_seconds": 7200, "metadata": {"kept": True}}).json()
    assert changed["expires_at"] > before
    aged(session, created_at=1900)
    assert alice.client.get(url).json()["state"] == "open"
    assert alice.client.patch(url, {"idle_seconds": 0}).status_code == 400
    assert alice.client.patch(url, {"state": "closed"}).status_code == 400


@pytest.mark.parametrize(("saves", "state"), [("never", "closed"), ("background", "asleep")])
def test_the_longest_idle_makes_room_unless_all_are_in_use(
    alice: Caller, settings: Any, saves: str, state: str
) -> None:
    settings.SESSIONS_PER_TENANT = 2
    old, used = opened(alice, saves=saves), opened(alice)
    aged(old, used_at=5)
    cell(alice, used, "x = 1")
    third = opened(alice)
    assert [row(each).state for each in (old, used, third)] == [state, "open", "open"]
    assert len(kept_here.sandboxes()) == 2
    threads = [
        in_thread(lambda each=each: cell(alice, each, "import time; time.sleep(30)"))
        for each in (used, third)
    ]
    wait_for(lambda: all(s.known["default"][1].busy for s in kept_here.sandboxes()))
    refused = alice.client.post(URL, {})
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "SB008")
    for each in (used, third):
        alice.client.post(f"{URL}/{each['id']}/interrupt")
    for thread in threads:
        thread.join()


def test_who_has_most_makes_room_for_another_tenant_and_never_the_other_way(
    alice: Caller, charlie: Caller, settings: Any
) -> None:
    settings.SESSIONS_MAX_TOTAL = 3
    flood = [opened(alice) for _ in range(3)]
    only = opened(charlie)
    assert [row(each).state for each in flood].count("asleep") == 1
    opened(alice)
    opened(alice)
    assert row(only).state == "open"


@pytest.fixture
def room_for_three(monkeypatch: pytest.MonkeyPatch) -> None:
    """The provider keeps three sandboxes, however many sessions there may be."""
    really = kept_here.KeptHere.open

    def open_where_there_is_room(self: Any, spec: Any, owner: str) -> Any:
        if len(kept_here.sandboxes()) >= 3:
            raise KeptFull("No more sandboxes can be kept.")
        return really(self, spec, owner)

    monkeypatch.setattr(kept_here.KeptHere, "open", open_where_there_is_room)


@pytest.mark.usefixtures("room_for_three")
def test_where_a_provider_keeps_no_more_who_has_most_there_makes_room(
    alice: Caller, charlie: Caller
) -> None:
    flood = [opened(alice) for _ in range(3)]
    only = opened(charlie)
    assert [row(each).state for each in flood] == ["asleep", "open", "open"]
    opened(alice)
    opened(alice)
    assert row(only).state == "open"
    assert len(kept_here.sandboxes()) == 3


@pytest.mark.usefixtures("room_for_three")
def test_who_is_woken_where_a_provider_keeps_no_more_is_made_room_for(alice: Caller) -> None:
    flood = [opened(alice) for _ in range(4)]
    asleep = next(each for each in flood if row(each).state == "asleep")
    assert cell(alice, asleep, "print(1)").json()["stdout"] == "1\n"
    assert sorted(row(each).state for each in flood) == ["asleep", "open", "open", "open"]
    assert len(kept_here.sandboxes()) == 3


@pytest.mark.usefixtures("room_for_three")
def test_where_a_provider_keeps_no_more_and_all_are_in_use_nobody_makes_room(
    alice: Caller, charlie: Caller
) -> None:
    flood = [opened(alice) for _ in range(3)]
    threads = [
        in_thread(lambda each=each: cell(alice, each, "import time; time.sleep(30)"))
        for each in flood
    ]
    wait_for(lambda: all(s.known["default"][1].busy for s in kept_here.sandboxes()))
    refused = charlie.client.post(URL, {})
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "SB008")
    for each in flood:
        assert row(each).state == "open"
        alice.client.post(f"{URL}/{each['id']}/interrupt")
    for thread in threads:
        thread.join()


def test_an_open_name_is_taken_and_a_closed_one_is_free(alice: Caller, charlie: Caller) -> None:
    session = opened(alice, name="one")
    refused = alice.client.post(URL, {"name": "one"})
    assert (refused.status_code, refused.json()["error"]["field"]) == (409, "name")
    opened(charlie, name="one")
    alice.client.delete(f"{URL}/{session['id']}")
    opened(alice, name="one")


def test_a_sandbox_that_is_gone_is_told_as_a_lost_session(alice: Caller) -> None:
    session = opened(alice)
    kept_here.sandboxes()[0].close()
    refused = cell(alice, session, "1")
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "conflict")
    assert refused.json()["id"] is not None
    assert alice.client.get(f"{URL}/{session['id']}").json()["state"] == "lost"
    actions = [
        e.stated["action"] for e in LedgerEntry.objects.filter(kind="session").order_by("pk")
    ]
    assert actions == ["created", "opened", "lost"]
    assert cell(alice, session, "1").json()["id"] is None


def test_the_schedule_finds_what_is_lost_and_renews_what_is_there(alice: Caller) -> None:
    there, gone = opened(alice), opened(alice)
    living, dead = kept_here.sandboxes()
    dead.close()
    before = len(living.renewals)
    assert maintain() == 1
    assert [row(each).state for each in (there, gone)] == ["open", "lost"]
    assert len(living.renewals) > before


def test_the_living_are_renewed_before_what_ends_is_saved(
    alice: Caller, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of those that end may be waited for, and all of them longer than a lease lasts."""
    settings.DELETE_S3_ON_CLEANUP = False
    old, _ = opened(alice), opened(alice)
    _, living = kept_here.sandboxes()
    before, renewed = len(living.renewals), []
    monkeypatch.setattr(ending, "save", lambda _: renewed.append(len(living.renewals) > before))
    aged(old, created_at=1801)
    assert maintain() == 1
    assert renewed == [True]
    assert row(old).state == "closed"


def test_what_cannot_be_renewed_is_asked_for_anew(
    alice: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A service may not say for certain that what it was asked of is gone."""
    session = opened(alice, saves="never")
    (sandbox,) = kept_here.sandboxes()
    cell(alice, session, "1")

    def fail(seconds: float) -> None:
        raise ProviderUnavailable("Not found, perhaps.")

    monkeypatch.setattr(sandbox, "renew", fail)
    sandbox.close()
    monkeypatch.setattr(session_sandbox, "RENEW_SECONDS", 0)
    assert [maintain(), row(session).state] == [0, "open"]
    assert [maintain(), row(session).state] == [1, "lost"]


def test_what_a_failing_provider_would_not_release_is_released_later(
    alice: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    from providers.errors import ConnectionFailed

    session = opened(alice)
    (sandbox,) = kept_here.sandboxes()

    def fail() -> bool:
        raise ConnectionFailed("Not now.")

    with monkeypatch.context() as patched:
        patched.setattr(sandbox, "close", fail)
        assert alice.client.delete(f"{URL}/{session['id']}").status_code == 204
    assert row(session).released_at is None
    maintain()
    assert row(session).released_at is not None
    assert kept_here.sandboxes() == []


def test_a_session_that_cannot_be_opened_is_closed_and_leaves_nothing(alice: Caller) -> None:
    refused = alice.client.post(URL, {"language": "cobol"})
    assert (refused.status_code, refused.json()["error"]["field"]) == (400, "language")
    assert alice.client.post(URL, {"provider": "e2b"}).json()["error"]["field"] == "provider"
    alice.tenant.minimum_isolation = "microvm"
    alice.tenant.save()
    assert alice.client.post(URL, {}).status_code == 503
    assert [s.state for s in Session.objects.all()] == ["closed"]
    assert kept_here.sandboxes() == []


def test_a_provider_that_does_not_answer_costs_no_sandbox_of_another(
    alice: Caller, charlie: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What hangs comes first, and would be waited for once for each of its sessions."""
    monkeypatch.setattr(maintenance, "RENEWAL_SECONDS", 0.2)
    monkeypatch.setattr(maintenance, "SILENT_SECONDS", 0.2)
    hung = [opened(alice) for _ in range(5)]
    Session.objects.update(config_version=0)
    there = opened(charlie)
    *silent, living = kept_here.sandboxes()
    asked: list[float] = []
    over = threading.Event()

    def hang(seconds: float) -> None:
        asked.append(seconds)
        over.wait(60)

    for each in silent:
        monkeypatch.setattr(each, "renew", hang)
    before = len(living.renewals)
    assert maintain() == 0
    # On a slow machine the time is over before the thread that asks has begun.
    wait_for(lambda: bool(asked) and len(living.renewals) > before)
    over.set()
    assert len(asked) == 1
    assert [row(each).state for each in (*hung, there)] == ["open"] * 6


def test_a_process_that_says_it_has_ended_and_goes_on_does_not_hold_up_the_schedule(
    alice: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_log.shares, "of_one", 0)
    monkeypatch.setattr(background_commands, "FOLLOW_SECONDS", 0.2)
    session, over = opened(alice), threading.Event()
    url = f"{URL}/{session['id']}/processes"
    assert alice.client.post(url, {"shell": "true", "background": True}).status_code == 201
    (sandbox,) = kept_here.sandboxes()
    wait_for(lambda: sandbox.processes.list()[0].exit_code is not None)
    monkeypatch.setattr(sandbox.processes, "follow", lambda *_: over.wait(120))
    tended = in_thread(maintain)
    tended.join(60)
    was_held_up = tended.is_alive()
    over.set()
    tended.join()
    assert not was_held_up
    assert row(session).state == "open"


def test_a_session_whose_process_died_while_opening_it_gives_its_name_back(alice: Caller) -> None:
    died, young = opened(alice, name="one", idle_seconds=7200, max_seconds=7200), opened(alice)
    Session.objects.update(ref=None, provider="")
    aged(died, created_at=1000)
    assert maintain() == 1
    assert [row(each).state for each in (died, young)] == ["closed", "open"]
    assert row(died).released_at is not None
    opened(alice, name="one")


def test_a_session_names_its_process_while_that_opens_or_wakes_it(
    alice: Caller, lease: Heartbeat, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By which others know that nobody does any more; the sandbox lasts as briefly until then."""
    seen: list[tuple[Any, float | None]] = []
    really = kept_here.KeptHere.open

    def look(self: Any, spec: Any, owner: str) -> Any:
        seen.append((Session.objects.get().process_id, spec.seconds))
        return really(self, spec, owner)

    monkeypatch.setattr(kept_here.KeptHere, "open", look)
    session = opened(alice)
    assert suspend(row(session).pk, "a test")
    assert cell(alice, session, "print(1)").json()["stdout"] == "1\n"
    assert seen == [(lease.mine(), NEW_SECONDS)] * 2
    assert row(session).process is None
    assert kept_here.sandboxes()[0].renewals[0] == LEASE_SECONDS


def test_what_an_idempotency_key_stands_for_is_told_after_the_end(alice: Caller) -> None:
    for end in (
        lambda session: alice.client.delete(f"{URL}/{session['id']}"),
        lambda session: mark_lost(row(session), "it is gone"),
    ):
        # Lost with something of it saved, it would sleep.
        session = opened(alice, saves="never")
        first = cell(alice, session, "x = 1", idempotency_key=session["id"])
        end(session)
        again = cell(alice, session, "x = 1", idempotency_key=session["id"])
        assert (again.status_code, again.json()["id"]) == (200, first.json()["id"])
        other = cell(alice, session, "x = 2", idempotency_key=session["id"])
        assert (other.status_code, other.json()["error"]["field"]) == (409, "idempotency_key")
        assert cell(alice, session, "x = 1", idempotency_key="new").status_code == 409
    assert Execution.objects.count() == 2
