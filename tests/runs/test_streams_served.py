"""Streams over the real servers: live, cancelled by leaving, followed from another process."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.raw_http import ask
from tests.support.site import EXECUTIONS, Site, sleeper
from tests.support.streaming import NDJSON, SSE, running_stream, streamed
from tests.support.waiting import wait_until


@pytest.fixture
def site(streaming_site: Site) -> Site:
    return streaming_site


def record(site: Site, execution_id: str, key: str = "") -> dict[str, Any]:
    answer = ask(site.service, "GET", f"{EXECUTIONS}/{execution_id}", key=key or site.alice)
    assert answer.status == 200, answer.body
    found: dict[str, Any] = answer.json
    return found


def cancel(site: Site, execution_id: str, key: str = "") -> Any:
    path = f"{EXECUTIONS}/{execution_id}/cancel"
    return ask(site.service, "POST", path, {}, key=key or site.alice)


def queue(site: Site, body: dict[str, Any]) -> str:
    answer = ask(site.service, "POST", EXECUTIONS, {**body, "mode": "async"}, key=site.alice)
    assert answer.status == 202, answer.body
    return str(answer.json["id"])


def until_status(site: Site, execution_id: str, *wanted: str) -> None:
    wait_until(lambda: record(site, execution_id)["status"] in wanted, 60)


def test_a_run_is_told_event_by_event_and_ends_with_its_record(site: Site) -> None:
    code = "import sys\nprint('out')\nprint('err', file=sys.stderr)\n"
    with running_stream(site, {"code": code}) as events:
        assert events.answer.status == 200
        assert events.answer.headers["Content-Type"] == "application/x-ndjson"
        assert events.answer.headers["X-Request-ID"]
        found = list(events)

    assert [event["seq"] for event in found] == list(range(1, len(found) + 1))
    assert (found[0]["type"], found[-1]["type"]) == ("started", "done")
    done = found[-1]["execution"]
    assert found[0]["id"] == done["id"]
    texts = {"stdout": "", "stderr": ""}
    for event in found[1:-1]:
        texts[event["type"]] += event["text"]
    assert texts == {"stdout": "out\n", "stderr": "err\n"}
    assert done == record(site, done["id"])
    assert done["receipt"]


def test_server_sent_events_name_their_number_and_type(site: Site) -> None:
    with running_stream(site, {"code": "print('a\\r\\nb')"}, accept=SSE) as events:
        text = events.answer.read().decode()

    blocks = [block.split("\n") for block in text.removesuffix("\n\n").split("\n\n")]
    # A program may write its lines in pieces.
    kinds = ["started", *["stdout"] * (len(blocks) - 2), "done"]
    assert [block[:2] for block in blocks] == [
        [f"id: {number}", f"event: {kind}"] for number, kind in enumerate(kinds, start=1)
    ]
    pieces = (json.loads(block[2].removeprefix("data: ")) for block in blocks[1:-1])
    assert "".join(piece["text"] for piece in pieces) == "a\r\nb\n"


def test_it_has_started_before_anything_came(site: Site) -> None:
    with running_stream(site, sleeper(30)) as events:
        started = next(events)
        assert started["type"] == "started"
        assert record(site, started["id"])["status"] == "running"


@pytest.mark.parametrize("accept", [NDJSON, SSE])
def test_headers_are_there_before_there_is_anything_to_tell(site: Site, accept: str) -> None:
    with running_stream(site, sleeper(60)) as events:
        path = f"{EXECUTIONS}/{next(events)['id']}/events?after=1"
        # It would wait for a minute for the next event.
        with streamed(site.service, path, site.alice, accept=accept, seconds=30) as silent:
            assert silent.answer.status == 200
            assert silent.answer.headers["Content-Type"].startswith(accept)


def test_who_leaves_a_stream_cancels_its_run_at_once(site: Site) -> None:
    with running_stream(site, sleeper(30)) as events:
        execution_id = next(events)["id"]
        site.wait_for_running(1)

    until_status(site, execution_id, "cancelled")
    assert record(site, execution_id)["receipt"]
    site.assert_serves_others()


def test_a_detached_run_goes_on_and_is_followed_to_its_end(site: Site) -> None:
    code = "import time; print('before'); time.sleep(1.5); print('after')"
    with running_stream(site, {"code": code}, "?detach=1") as events:
        execution_id = next(events)["id"]

    with streamed(
        site.service, f"{EXECUTIONS}/{execution_id}/events?after=1", site.alice
    ) as events:
        found = list(events)

    assert [event["seq"] for event in found] == list(range(2, len(found) + 2))
    assert "".join(event["text"] for event in found[:-1]) == "before\nafter\n"
    assert found[-1]["execution"]["status"] == "succeeded"
    # Another time, after the end: the same events under the same numbers.
    with streamed(
        site.service, f"{EXECUTIONS}/{execution_id}/events?after=1", site.alice
    ) as events:
        assert list(events) == found


def test_what_a_worker_runs_is_followed_from_the_web(site: Site) -> None:
    execution_id = queue(site, {"code": "import time; time.sleep(1.5); print('done')"})

    with streamed(site.service, f"{EXECUTIONS}/{execution_id}/events", site.alice) as events:
        found = list(events)

    assert [event["type"] for event in found] == ["started", "stdout", "done"]
    assert found[-1]["execution"]["status"] == "succeeded"


def test_what_a_worker_runs_is_cancelled_from_the_web(site: Site) -> None:
    execution_id = queue(site, sleeper(30))
    until_status(site, execution_id, "running")

    assert cancel(site, execution_id, site.charlie).status == 404
    answer = cancel(site, execution_id)

    assert (answer.status, answer.json["status"]) == (200, "cancelled")
    assert answer.json["receipt"]
    assert answer.json["provider"] == "local"
    assert cancel(site, execution_id).json == answer.json


def test_the_caller_who_waits_for_a_run_is_told_that_it_was_cancelled(site: Site) -> None:
    with running_stream(site, sleeper(30)) as events:
        execution_id = next(events)["id"]
        assert cancel(site, execution_id).json["status"] == "cancelled"
        done = list(events)[-1]

    assert (done["type"], done["execution"]["status"]) == ("done", "cancelled")


def test_output_comes_while_the_program_runs(site: Site) -> None:
    code = "import sys, time\nprint('early', flush=True)\ntime.sleep(30)\n"
    with running_stream(site, {"code": code, "timeout": 40}) as events:
        started, early = next(events), next(events)
        assert record(site, started["id"])["status"] == "running"

    assert (early["type"], early["text"]) == ("stdout", "early\n")
    until_status(site, started["id"], "cancelled")
    assert record(site, started["id"])["stdout"] == "early\n"


def test_a_worker_tells_the_web_while_its_program_runs(site: Site) -> None:
    execution_id = queue(site, {"code": "import time; print('early', flush=True); time.sleep(30)"})
    path = f"{EXECUTIONS}/{execution_id}/events"
    with (
        streamed(site.service, path, site.alice) as events,
        streamed(site.service, path, site.alice) as others,
    ):
        assert [next(events)["type"], next(events)["text"]] == ["started", "early\n"]
        answer = cancel(site, execution_id)
        assert (answer.json["status"], answer.json["stdout"]) == ("cancelled", "early\n")
        done = next(events)
        assert (done["seq"], done["execution"]) == (3, record(site, execution_id))
        assert [event["type"] for event in others] == ["started", "stdout", "done"]


def test_the_record_has_the_order_of_both_streams(site: Site) -> None:
    code = (
        "import sys, time\n"
        "for number in range(3):\n"
        "    print(number, flush=True); time.sleep(0.3)\n"
        "    print('!', file=sys.stderr); time.sleep(0.3)\n"
    )
    execution_id = queue(site, {"code": code})
    until_status(site, execution_id, "succeeded")

    with streamed(site.service, f"{EXECUTIONS}/{execution_id}/events", site.alice) as events:
        pieces = [(event["type"], event["text"]) for event in list(events)[1:-1]]

    texts = {
        stream: "".join(text for kind, text in pieces if kind == stream)
        for stream in ("stdout", "stderr")
    }
    assert texts == {"stdout": "0\n1\n2\n", "stderr": "!\n!\n!\n"}
    # Without an order they are told one after the other.
    assert len(pieces) > 2
    assert pieces[0][0] == "stdout"
