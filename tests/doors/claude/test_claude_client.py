"""Requests of a worker to the queue: to one address, bounded, and never with the key elsewhere."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from executions.doors.claude.client import (
    NO_HEARTBEAT,
    Client,
    Refused,
    Unavailable,
    Work,
    _events,
    _token_in,
    _work,
    stream_budget,
)
from providers.addresses import Allowed, Rules
from providers.remote.receiver import Receiver
from providers.remote.secret import Secret
from tests.support.certificates import Authority
from tests.support.claude_queue import ENVIRONMENT, KEY, Queue, queue_over_tls


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority()


@pytest.fixture
def queue(authority: Authority, tmp_path: Path) -> Iterator[Queue]:
    with queue_over_tls(authority.issue(tmp_path).path, seconds=2) as found:
        yield found


def receiver(authority: Authority, queue: Queue) -> Receiver:
    return Receiver(Rules((Allowed.parse(f"localhost:{queue.port}"),), ()), authority.pem)


@pytest.fixture
def client(authority: Authority, queue: Queue) -> Client:
    return Client(queue.url, Secret(KEY), receiver(authority, queue))


def taken(client: Client, queue: Queue) -> Work:
    queue.add_session("sesn_1")
    work = client.poll(ENVIRONMENT, "w")
    assert work is not None
    client.acknowledge(ENVIRONMENT, work)
    return work


def test_an_item_is_taken_held_and_stopped(client: Client, queue: Queue) -> None:
    assert client.poll(ENVIRONMENT, "w") is None
    work = taken(client, queue)
    assert work.session_id == "sesn_1"
    assert work.token is not None
    own = client.with_token(work.token)
    first = own.beat(ENVIRONMENT, work, NO_HEARTBEAT)
    assert (first.seconds, first.goes_on) == (2.0, True)
    assert own.beat(ENVIRONMENT, work, first.last).goes_on
    with pytest.raises(Refused) as lost:
        own.beat(ENVIRONMENT, work, first.last)
    assert lost.value.status == 412
    own.stop(ENVIRONMENT, work)
    assert queue.items[0].is_stopped
    assert client.poll(ENVIRONMENT, "w") is None


def test_all_pages_of_a_history_are_read_and_then_what_comes(client: Client, queue: Queue) -> None:
    taken(client, queue)
    for number in range(8):
        queue.call("sesn_1", "bash", command=str(number))
    assert [each["input"]["command"] for each in client.events("sesn_1")] == list("01234567")
    stream = client.stream("sesn_1", stream_budget())
    assert next(stream) is None
    call = queue.call("sesn_1", "bash", command="ü\n")
    event = next(stream)
    assert event is not None
    assert (event["id"], event["input"]) == (call, {"command": "ü\n"})


def test_a_stream_ends_when_it_is_cut_elsewhere(client: Client, queue: Queue) -> None:
    taken(client, queue)
    budget = stream_budget()
    stream = client.stream("sesn_1", budget)
    assert next(stream) is None
    ended = threading.Event()

    def read() -> None:
        # Whether it is an error or an end is a matter of the moment.
        with suppress(Unavailable):
            list(stream)
        ended.set()

    reader = threading.Thread(target=read)
    reader.start()
    budget.cut.cut()
    reader.join(60)
    assert ended.is_set()


@pytest.mark.parametrize("status", [301, 302, 307, 308])
def test_no_redirect_is_followed(client: Client, queue: Queue, status: int) -> None:
    queue.statuses["poll"] = [status]
    with pytest.raises(Refused) as refused:
        client.poll(ENVIRONMENT, "w")
    assert refused.value.status == status
    assert len(queue.requests) == 1


@pytest.mark.parametrize("status", [408, 409, 429, 500, 503])
def test_what_may_pass_is_told_from_what_will_not(
    client: Client, queue: Queue, status: int
) -> None:
    queue.statuses["poll"] = [status, 403]
    with pytest.raises(Unavailable):
        client.poll(ENVIRONMENT, "w")
    with pytest.raises(Refused):
        client.poll(ENVIRONMENT, "w")


def test_the_key_goes_to_no_address_that_is_not_allowed(authority: Authority, queue: Queue) -> None:
    elsewhere = Client(queue.url, Secret(KEY), Receiver(Rules((), ()), authority.pem))
    with pytest.raises(Unavailable):
        elsewhere.poll(ENVIRONMENT, "w")
    with pytest.raises(Unavailable):
        next(elsewhere.stream("sesn_1", stream_budget()))
    assert queue.requests == []


def test_the_key_goes_to_no_server_with_another_certificate(queue: Queue) -> None:
    allowed = Rules((Allowed.parse(f"localhost:{queue.port}"),), ())
    stranger = Client(queue.url, Secret(KEY), Receiver(allowed, Authority().pem))
    with pytest.raises(Unavailable):
        stranger.poll(ENVIRONMENT, "w")
    assert queue.requests == []


def test_the_key_is_in_no_log_and_no_error(
    client: Client, queue: Queue, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    queue.statuses["poll"] = [401, 500]
    for _ in range(2):
        with pytest.raises((Refused, Unavailable)) as error:
            client.poll(ENVIRONMENT, "w")
        assert KEY not in str(error.value)
    assert KEY not in repr(vars(client))
    assert KEY not in caplog.text


@pytest.mark.parametrize(
    "said",
    [
        [],
        "x",
        {"id": 7},
        {"id": "../../v1/keys"},
        {"id": "a b"},
        {"id": "x" * 1000, "data": {}},
        {"id": "work_1", "environment_id": "env_other"},
        {"id": "work_1", "environment_id": None},
    ],
)
def test_what_is_no_item_is_refused(said: Any) -> None:
    with pytest.raises(Refused):
        _work(said, ENVIRONMENT)


@pytest.mark.parametrize(
    "data",
    [
        None,
        {"type": "healthcheck", "id": "sesn_1"},
        {"type": "session", "id": "../sesn"},
        {"type": "session", "id": None},
        {"type": "session", "id": "sesn_1?x"},
    ],
)
def test_an_item_of_no_session_has_none(data: Any) -> None:
    work = _work({"id": "work_1", "data": data}, ENVIRONMENT)
    assert work is not None
    assert work.session_id == ""


@pytest.mark.parametrize(
    "secret",
    [
        None,
        7,
        "",
        "?",
        "e30",
        "W10",
        "eyJzZXNzaW9uc190b2tlbiI6IDd9",
        "eyJzZXNzaW9uc190b2tlbiI6ICJhXHJcbmIifQ",
    ],
)
def test_a_secret_without_a_token_has_none(secret: Any) -> None:
    assert _token_in(secret) is None


def test_a_stream_is_read_in_any_pieces() -> None:
    events = [{"id": "a", "text": "x\n"}, {"id": "b"}]
    text = b": hello\r\n\r\n" + b"".join(
        b"event: x\r\ndata: " + json.dumps(each).encode() + b"\r\n\r\n" for each in events
    )
    for size in (1, 2, 7, len(text)):
        pieces = (text[at : at + size] for at in range(0, len(text), size))
        assert list(_events(pieces, stream_budget())) == events


@pytest.mark.parametrize(
    "text", [b"data: {\n\n", b"data: NaN\n\n", b"data: " + b"[" * 100 + b"\n\n"]
)
def test_an_event_that_is_no_json_ends_the_stream(text: bytes) -> None:
    with pytest.raises(Refused):
        list(_events(iter([text]), stream_budget()))


def test_a_stream_of_small_pieces_costs_what_its_bytes_cost() -> None:
    text = b"data:\n" * 400_000 + b"x" * 200_000 + b"\n" + b'data: {"id": "a"}\n\n'
    began = time.process_time()
    pieces = (text[at : at + 8] for at in range(0, len(text), 8))
    assert list(_events(pieces, stream_budget())) == [{"id": "a"}]
    # Some 100 times that where each piece is added to a copy.
    assert time.process_time() - began < 10


def test_a_history_without_an_end_is_refused(client: Client, queue: Queue) -> None:
    taken(client, queue)
    for number in range(8):
        queue.call("sesn_1", "bash", command=str(number))
    queue.page_after = "0"
    with pytest.raises(Refused):
        list(client.events("sesn_1"))


@pytest.mark.parametrize("text", ["\ud800", "ü\r\nX: y", "x" * 100_000])
def test_what_a_server_says_is_never_more_than_a_parameter(
    client: Client, queue: Queue, text: str
) -> None:
    taken(client, queue)
    queue.call("sesn_1", "bash", command="x")
    queue.page_after = text
    with pytest.raises((Refused, Unavailable)):
        list(client.events("sesn_1"))
