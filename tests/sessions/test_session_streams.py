"""What runs in a session is told while it runs, over the real servers; who leaves, cancels it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from providers.runtime.guest.files_worker import MOST_WATCHES
from tests.support.raw_http import ask
from tests.support.site import EXECUTIONS, Site
from tests.support.streaming import Events, streamed
from tests.support.waiting import wait_until

SESSIONS = "/api/v1/sessions"
# Runs until the workspace has a folder of this name.
UNTIL_GO = "import os, time\nprint('early', flush=True)\nwhile not os.path.isdir('go'): time.sleep(.01)\nprint('late')"


class Session:
    def __init__(self, site: Site) -> None:
        self.site = site
        answer = self.post("", {})
        assert answer.status == 201, answer.body
        self.url = f"{SESSIONS}/{answer.json['id']}"

    url = SESSIONS

    def post(self, path: str, body: Any, key: str = "") -> Any:
        return ask(self.site.service, "POST", self.url + path, body, key=key or self.site.alice)

    def get(self, path: str) -> Any:
        return ask(self.site.service, "GET", self.url + path, key=self.site.alice).json

    def go(self) -> None:
        assert self.post("/files/mkdir", {"path": "go"}).status == 201

    def cell(self, code: str, query: str = "") -> Any:
        path = f"{self.url}/executions{query}"
        return streamed(self.site.service, path, self.site.alice, {"code": code})

    def command(self, shell: str, **body: Any) -> Any:
        path = f"{self.url}/processes"
        return streamed(self.site.service, path, self.site.alice, {"shell": shell, **body})

    def record(self, execution_id: str) -> Any:
        path = f"{EXECUTIONS}/{execution_id}"
        return ask(self.site.service, "GET", path, key=self.site.alice).json

    def until_cancelled(self, execution_id: str, seconds: float = 60) -> None:
        wait_until(lambda: self.record(execution_id)["status"] == "cancelled", seconds)


@pytest.fixture
def session(streaming_site: Site) -> Iterator[Session]:
    session = Session(streaming_site)
    yield session
    ask(streaming_site.service, "DELETE", session.url, key=streaming_site.alice)


def until_said(events: Events, text: str) -> str:
    """Read until this was printed. The execution's id."""
    execution_id, said = next(events)["id"], ""
    while text not in said:
        said += next(events)["text"]
    return str(execution_id)


def texts(found: list[dict[str, Any]]) -> str:
    return "".join(event["text"] for event in found if event["type"] == "stdout")


def test_a_cell_is_told_while_it_runs_and_ends_with_its_record(session: Session) -> None:
    with session.cell(UNTIL_GO) as events:
        execution_id = until_said(events, "early\n")
        assert session.record(execution_id)["status"] == "running"
        session.go()
        found = list(events)

    done = found[-1]["execution"]
    assert (texts(found), done["stdout"]) == ("late\n", "early\nlate\n")
    # Its files are saved behind the answer.
    assert done | {"files_saved": True} == session.record(execution_id) | {"files_saved": True}
    assert (done["context"], done["context_kept"]) == ("default", True)
    assert done["receipt"]


def test_who_leaves_a_cell_stops_it_and_the_context_keeps_its_state(session: Session) -> None:
    with session.cell(f"x = 41\n{UNTIL_GO}") as events:
        execution_id = until_said(events, "early\n")
    session.until_cancelled(execution_id)

    with session.cell("print(x + 1)") as events:
        assert texts(list(events)) == "42\n"


def test_who_leaves_while_he_waits_for_his_turn_is_cancelled_and_nobody_else(
    session: Session,
) -> None:
    with session.cell(UNTIL_GO) as first:
        running = until_said(first, "early\n")
        with session.cell("never = 1") as second:
            waiting = next(second)["id"]
        session.until_cancelled(waiting)
        assert session.record(running)["status"] == "running"
        session.go()
        assert list(first)[-1]["execution"]["status"] == "succeeded"
    with session.cell("print('never' in globals())") as events:
        assert texts(list(events)) == "False\n"


def test_a_detached_cell_goes_on_and_is_followed_from_where_its_client_was(
    session: Session,
) -> None:
    with session.cell(UNTIL_GO, "?detach=1") as events:
        execution_id = until_said(events, "early\n")
    path = f"{EXECUTIONS}/{execution_id}/events"
    site = session.site
    with streamed(site.service, path, site.alice) as again:
        assert until_said(again, "early\n") == execution_id
        session.go()
        assert list(again)[-1]["execution"]["stdout"] == "early\nlate\n"
    with streamed(site.service, path, site.charlie) as strangers:
        assert strangers.answer.status == 404


def test_a_command_is_told_while_it_runs_and_killed_when_its_client_leaves(
    session: Session,
) -> None:
    with session.command("echo early; sleep 600") as events:
        execution_id = until_said(events, "early\n")
    session.until_cancelled(execution_id)

    def has_ended() -> bool:
        (process,) = session.get("/processes")["results"]
        return bool(process["exit_code"] == 137)

    wait_until(has_ended, 60)
    assert session.record(execution_id)["stdout"] == "early\n"


def test_a_flood_is_told_up_to_the_bound_and_no_further(session: Session) -> None:
    with session.command("yes | head -c 30000000; echo end >&2") as events:
        found = list(events)

    done = found[-1]["execution"]
    assert done["stdout_truncated"] is True
    assert texts(found) == done["stdout"]
    assert (done["status"], done["stderr"]) == ("succeeded", "end\n")


def test_a_strangers_session_is_no_stream_and_runs_nothing(session: Session) -> None:
    site = session.site
    for path, body in (("executions", {"code": "1"}), ("processes", {"shell": "true"})):
        with streamed(site.service, f"{session.url}/{path}", site.charlie, body) as events:
            assert events.answer.status == 404
    assert session.get("/processes")["results"] == []


def test_a_command_in_the_background_is_followed_from_wherever_its_follower_was(
    session: Session,
) -> None:
    site = session.site
    shell = "echo early; until [ -d go ]; do sleep .01; done; echo late; exit 3"
    started = session.post("/processes", {"shell": shell, "background": True})
    path = f"{session.url}/processes/{started.json['pid']}/events"
    with streamed(site.service, path, site.charlie) as strangers:
        assert strangers.answer.status == 404
    with streamed(site.service, path, site.alice) as events:
        assert until_said(events, "early\n") == started.json["execution"]
    # Leaving what nobody waits for ends nothing.
    with streamed(site.service, f"{path}?after=1", site.alice) as events:
        found = [next(events)]
        session.go()
        found += events

    assert [event["seq"] for event in found] == [2, 3, 4]
    assert [event["text"] for event in found[:2]] == ["early\n", "late\n"]
    done = found[-1]["execution"]
    assert (done["status"], done["exit_code"]) == ("failed", 3)
    assert done["stdout"] == "early\nlate\n"
    with streamed(site.service, f"{path}?after=1", site.alice) as again:
        repeated = list(again)
    # Its files may have been saved meanwhile.
    for each in (done, repeated[-1]["execution"]):
        del each["files_saved"]
    assert repeated == found


def test_whoever_follows_a_command_hears_of_the_end_of_its_session(session: Session) -> None:
    site = session.site
    body = {"shell": "echo early; sleep 600", "background": True}
    pid = session.post("/processes", body).json["pid"]
    with streamed(site.service, f"{session.url}/processes/{pid}/events", site.alice) as events:
        until_said(events, "early\n")
        ask(site.service, "DELETE", session.url, key=site.alice)
        assert list(events)[-1]["execution"]["status"] == "cancelled"


def listeners(session: Session) -> Any:
    return streamed(session.site.service, f"{session.url}/files/events", session.site.alice)


def test_what_changes_in_the_files_is_told_while_it_happens(session: Session) -> None:
    with listeners(session) as events:
        assert events.answer.status == 200
        session.post("/executions", {"code": "open('new', 'w').close()"})
        assert next(events) == {"seq": 1, "type": "created", "path": "new"}
        session.post("/files/move", {"from": "new", "to": "other"})
        moved = {"seq": 2, "type": "moved", "path": "other", "former": "new"}
        assert next(events) == moved
        session.post("/executions", {"code": "import os; os.unlink('other')"})
        assert next(events) == {"seq": 3, "type": "deleted", "path": "other"}
        ask(session.site.service, "DELETE", session.url, key=session.site.alice)
        last = next(events)
        assert (last["type"], last["error"]["code"]) == ("error", "conflict")
        assert list(events) == []


def test_who_leaves_ends_the_watch_and_makes_room_for_another(session: Session) -> None:
    path = f"{session.url}/files/events"
    with ExitStack() as watching:
        for _ in range(MOST_WATCHES):
            assert watching.enter_context(listeners(session)).answer.status == 200
        refused = ask(session.site.service, "GET", path, key=session.site.alice)
        assert (refused.status, refused.json["error"]["code"]) == (429, "SB008")
        assert session.post("/executions", {"code": "print(1)"}).json["stdout"] == "1\n"

    def is_there_room() -> bool:
        with listeners(session) as events:
            return bool(events.answer.status == 200)

    wait_until(is_there_room, 60)


def test_only_a_folder_of_ones_own_session_is_watched(session: Session) -> None:
    path = f"{session.url}/files/events"
    for query, status in (("?path=nowhere", 400), ("?path=../x", 400), ("?what=1", 400)):
        answer = ask(session.site.service, "GET", path + query, key=session.site.alice)
        assert answer.status == status, answer.body
    assert ask(session.site.service, "GET", path, key=session.site.charlie).status == 404
    assert ask(session.site.service, "GET", path).status == 401
