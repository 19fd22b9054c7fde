"""The lines that a warm bridge reads and writes, over real pipes."""

from __future__ import annotations

import json
import os
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as some

from executions.doors.bridge import THREADS, Bridge, Serving, TooLong, whole_of
from executions.runs.models import Execution
from tests.support.wire_server import eventually

pytestmark = pytest.mark.one_database

SLEEPER = "import time\ntime.sleep(60)"
FORGED = json.dumps({"id": "forged", "stdout": "", "returned": "1"})
LOUD = f"""
import os
for stream in (1, 2):
    os.write(stream, {FORGED!r}.encode() + b"\\n\\r\\n\\xff\\x00\\xe2\\x80\\xa8")
def main():
    return {FORGED!r} + "\\n"
"""


class Client:
    """The program on the other side."""

    def __init__(self) -> None:
        requests, self._requests = os.pipe()
        self._answers, answers = os.pipe()
        self.serving = Serving(Bridge(), requests, answers)
        self._reader = os.fdopen(self._answers, "rb")
        self._thread = threading.Thread(target=self._serve, args=(requests, answers))
        self._thread.start()

    def _serve(self, requests: int, answers: int) -> None:
        self.serving.run(lambda: None)
        os.close(requests)
        os.close(answers)

    def send(self, data: bytes) -> None:
        while data:
            data = data[os.write(self._requests, data) :]

    def ask(self, **frame: Any) -> None:
        self.send(json.dumps(frame).encode() + b"\n")

    def hear(self) -> dict[str, Any]:
        line = self._reader.readline()
        assert line.isascii()
        assert line.endswith(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def end(self) -> list[dict[str, Any]]:
        """Send no more; what is answered until the end."""
        self.hang_up()
        answers = [json.loads(line) for line in self._reader]
        self.wait()
        return answers

    def hang_up(self) -> None:
        if self._requests >= 0:
            os.close(self._requests)
            self._requests = -1

    def go_away(self) -> None:
        """Read no more, as who was killed."""
        self._reader.close()

    def wait(self) -> None:
        self._thread.join(60)
        assert not self._thread.is_alive()


@contextmanager
def serving() -> Iterator[Client]:
    client = Client()
    try:
        yield client
    finally:
        client.hang_up()
        client.go_away()
        client.wait()


@pytest.fixture
def small(settings: Any) -> None:
    """Requests may have 10,000 bytes."""
    settings.SANDBOX_MAX_BODY_BYTES = 10_000


@pytest.fixture
def client() -> Iterator[Client]:
    with serving() as found:
        yield found


def refused(answer: dict[str, Any]) -> tuple[Any, str, str]:
    return answer["id"], answer["error"]["code"], answer["error"]["field"]


@pytest.mark.django_db(transaction=True)
def test_one_process_serves_many_calls_and_none_takes_another_for_its_answer(
    local_active: None, client: Client
) -> None:
    client.ask(id="slow", code=SLEEPER)
    assert eventually(lambda: Execution.objects.filter(status="running").exists())
    client.ask(id=7, code="def main(n): return n * 2", arguments={"n": 21})
    assert (answer := client.hear())["id"] == 7
    assert (answer["returned"], answer["error"]) == ("42", None)

    client.ask(id="loud", code=LOUD)
    loud = client.hear()
    assert loud["id"] == "loud"
    assert loud["stdout"].startswith(FORGED)
    assert loud["stderr"].startswith(FORGED)
    assert json.loads(loud["returned"]) == FORGED + "\n"

    client.ask(id="slow", code="print(1)")
    assert refused(client.hear()) == ("slow", "SB002", "id")
    client.ask(cancel="nobody")
    client.ask(cancel="slow")
    cancelled = client.hear()
    assert (cancelled["id"], cancelled["metadata"]["status"]) == ("slow", "cancelled")
    assert "its client" in cancelled["stderr"]
    client.ask(id="slow", code="print(1)")
    assert client.hear()["stdout"] == "1\n"

    for number in range(12):
        client.ask(id=number, code=f"print({number})")
    client.send(b'{"id": "last", "code": "print(99)"}')
    answers = {answer["id"]: answer["stdout"] for answer in client.end()}
    assert answers == {**{number: f"{number}\n" for number in range(12)}, "last": "99\n"}
    assert not Execution.objects.filter(finished_at=None).exists()


@pytest.mark.django_db(transaction=True)
def test_who_reads_no_more_has_what_runs_ended(local_active: None) -> None:
    with serving() as client:
        for number in range(THREADS + 1):
            client.ask(id=number, code=SLEEPER)
        assert eventually(lambda: Execution.objects.filter(status="running").count() == THREADS)
        client.go_away()
        client.wait()
    # What waited for a thread was not begun.
    statuses = Execution.objects.values_list("status", flat=True)
    assert list(statuses) == ["cancelled"] * THREADS


def test_a_hostile_line_is_answered_and_ends_nothing(small: None, client: Client) -> None:
    lines: list[tuple[bytes, tuple[Any, str, str]]] = [
        (b"nonsense", (None, "SB002", "request")),
        (
            b'{"id": 1, "code": "print(1)"} {"id": 2, "code": "print(2)"}',
            (None, "SB002", "request"),
        ),
        (b'{"id": 3, "code": "a\x00b"}', (None, "SB002", "request")),
        (b'\x00{"id": 3}\x00', (None, "SB002", "request")),
        (b"\xff\xfe{\x00}\x00", (None, "SB002", "request")),
        (b'{"id": 4, "code": "1", "tenant": "acme"}', (4, "SB002", "tenant")),
        (b'{"id": [5], "code": "1"}', (None, "SB002", "id")),
        (b'{"cancel": 6, "code": "1"}', (None, "SB002", "cancel")),
        (b'{"cancel": null}', (None, "SB002", "cancel")),
        (b'{"id": 7, "code": "' + b"x" * 20_000 + b'"}', (None, "SB002", "request")),
        (b"[" * 9_000, (None, "SB002", "request")),
        (b'{"id": 8}', (8, "SB002", "code")),
    ]
    for line, expected in lines:
        client.send(b" \r\n" + line + b"\r\n")
        assert refused(client.hear()) == expected
    # More than is held at once: reading waits, and nothing is lost.
    for number in range(30):
        client.ask(id=number, nothing="y" * 9_000)
    assert {client.hear()["id"] for _ in range(30)} == set(range(30))
    # Without the end of its line: what is whole is carried out, and what is not is refused.
    client.send(b'{"id": 9, "code": "print(')
    assert [refused(answer) for answer in client.end()] == [(None, "SB002", "request")]


@pytest.mark.parametrize("size", [9_999, 10_000, 10_001, 600_000])
def test_the_bound_of_a_line_holds_to_the_byte(small: None, client: Client, size: int) -> None:
    line = b'{"id": "x", "no": "' + b"y" * (size - 21) + b'"}'
    assert len(line) == size
    client.send(line + b"\n")
    assert refused(client.hear())[0] == ("x" if size <= 10_000 else None)


def test_a_single_request_has_the_same_bound() -> None:
    with tempfile.TemporaryFile(buffering=0) as file:
        file.write(b"y" * 10_001)
        file.seek(0)
        assert whole_of(file.fileno(), 10_001) == b"y" * 10_001
        file.seek(0)
        with pytest.raises(TooLong):
            whole_of(file.fileno(), 10_000)


VALUES: some.SearchStrategy[Any] = some.recursive(
    some.none() | some.booleans() | some.integers() | some.floats() | some.text(),
    lambda inner: some.lists(inner) | some.dictionaries(some.text(), inner),
    max_leaves=5,
)
NAMES = some.sampled_from(["id", "language", "timeout", "arguments", "files", "x", "\0"])
# None has code, so that none is run.
OBJECTS = some.dictionaries(NAMES, VALUES).map(lambda each: json.dumps(each).encode())
LINES = some.lists(some.binary(max_size=40) | OBJECTS, max_size=8)


@settings(deadline=None, max_examples=20, suppress_health_check=[HealthCheck.too_slow])
@given(LINES, some.integers(1, 50))
def test_every_line_is_answered_once_whatever_it_is(lines: list[bytes], piece: int) -> None:
    whole = b"\n".join(lines)
    asked = [line for line in whole.split(b"\n") if line.strip()]
    with serving() as client:
        for start in range(0, len(whole), piece):
            client.send(whole[start : start + piece])
        answers = client.end()
    assert len(answers) == len(asked)
    assert all(answer["error"]["code"] == "SB002" for answer in answers)
