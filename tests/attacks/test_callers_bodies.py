"""Callers whose bodies cost more to read than to send: many members, many names, long texts.

Over the real server. What shows that nobody was held up is counted: the neighbour's runs all
succeed, and what was refused was refused unread.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from io import BytesIO
from pathlib import Path

import pytest
from django.test import RequestFactory
from rest_framework.request import Request

from executions.doors.e2b.filesystem import uploads_in
from executions.kernel.bodies import (
    CALL,
    HELD,
    LARGE,
    OF_ONE_TENANT,
    SMALL,
    TINY,
    requests_of,
    submit_read,
)
from providers import json_reading, json_values
from providers.errors import RateLimited
from providers.json_reading import MOST_VALUES, Base64, TooMuch, read_bytes, read_text
from sandbox_site.web.body import Refused, Share, Spool
from tests.conftest import Caller, require
from tests.support.processes import ROOT, clean_environment
from tests.support.raw_http import Answer, ask, connect, head, read
from tests.support.site import EXECUTIONS, Site, prepare, serving

MIB = 1024 * 1024
CREATE_KEY = [sys.executable, "manage.py", "create_api_key", "wonderland", "--name", "reads"]


def members(start: str, member: str, end: str, size: int) -> bytes:
    return (start + ",".join([member] * (size // (len(member) + 1))) + end).encode()


def names(start: str, end: str, size: int) -> bytes:
    return (start + ",".join(f'"k{n:07}":1' for n in range(size // 13)) + end).encode()


# Each is refused; before they were read apart and counted, one of them held the process for seconds.
BODIES: dict[str, tuple[str, Callable[[], bytes]]] = {
    "files": (EXECUTIONS, lambda: members('{"code":"1","files":[', "{}", "]}", 7 * MIB)),
    "tools": (EXECUTIONS, lambda: members('{"code":"1","tools":[', "{}", "]}", 2 * MIB)),
    "env": (EXECUTIONS, lambda: names('{"code":"1","env":{', "}}", 2 * MIB)),
    "unknown names": (EXECUTIONS, lambda: names("{", "}", 7 * MIB)),
    "levels": (EXECUTIONS, lambda: b"[" * (7 * MIB)),
    "escapes": (EXECUTIONS, lambda: b'{"code":"' + b"\\n" * (4 * MIB) + b'"}'),
    "blanks": (EXECUTIONS, lambda: b'{"code":' + b" " * (7 * MIB) + b"}"),
    "schedule": (
        "/api/v1/schedules",
        lambda: members('{"name":"a","cron":"* * * * *","request":{"files":[', "1", "]}}", MIB),
    ),
    "inputs": (
        "/v1/execute",
        lambda: members('{"user_id":"a","code":"1","inputs":[', "1", "]}", 2 * MIB),
    ),
    "urls": (
        "/v1/files/upload-urls",
        lambda: members('{"user_id":"a","urls":[', "1", "]}", 2 * MIB),
    ),
    "mcp": (
        "/mcp",
        lambda: members('{"jsonrpc":"2.0","id":1,"method":"x","params":[', "{}", "]}", 7 * MIB),
    ),
    "cell": (
        "/api/v1/sessions/{session}/executions",
        lambda: members('{"code":"1","files":[', "{}", "]}", 2 * MIB),
    ),
    "argv": (
        "/api/v1/sessions/{session}/processes",
        lambda: members('{"command":[', "1", "]}", 2 * MIB),
    ),
    "sandboxes": ("/sandboxes", lambda: names('{"metadata":{', "}}", 2 * MIB)),
}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    require("bwrap")
    folder = tmp_path_factory.mktemp("bodies")
    prepared = prepare(folder / "data")
    with serving(prepared, folder / "log", WEB_SPOOL_MB="256") as running:
        yield running


@pytest.fixture(scope="module")
def session(site: Site) -> str:
    opened = ask(site.service, "POST", "/api/v1/sessions", {}, key=site.alice)
    assert opened.status == 201, opened.body
    return str(opened.json["id"])


@pytest.fixture(scope="module")
def reading_key(site: Site) -> str:
    done = subprocess.run(
        [*CREATE_KEY, "--scope", "read"],
        cwd=ROOT,
        env=clean_environment(site.data_dir),
        check=True,
        capture_output=True,
        text=True,
    )
    return done.stdout.split()[-1]


def post(site: Site, path: str, body: bytes, key: str, **headers: str) -> Answer:
    sent = head("POST", path, len(body), key=key, **headers) + body
    with connect(site.service, sent) as connection:
        connection.settimeout(240)
        return read(connection)


def memory_of(site: Site) -> int:
    """Resident bytes of all its processes that serve."""
    total = 0
    for pid in family(site.service.process.pid):
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
            if b"gunicorn" in command or b"manage.py" in command:
                pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
                total += pages * os.sysconf("SC_PAGE_SIZE")
        except (OSError, IndexError):
            continue
    return total


def family(pid: int) -> Iterator[int]:
    yield pid
    children: list[str] = []
    # It may end meanwhile, as what was forked for a moment does.
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").glob("*/children"):
            children += task.read_text().split()
    for child in children:
        yield from family(int(child))


@pytest.mark.parametrize(("path", "made"), BODIES.values(), ids=BODIES)
def test_the_neighbours_run_ends_well_while_eight_such_bodies_are_sent(
    site: Site, session: str, path: str, made: Callable[[], bytes]
) -> None:
    body, path = made(), path.format(session=session)
    with ThreadPoolExecutor(8) as threads:
        sent = [threads.submit(post, site, path, body, site.alice) for _ in range(8)]
        site.assert_serves_others()
        site.assert_serves_tenants()
        while not all(each.done() for each in sent):
            site.assert_serves_tenants()
        answers = [each.result() for each in sent]
    # Told what is wrong, or that too many of them are read at once; and nothing else.
    assert {answer.status for answer in answers} <= {400, 413, 429}, answers
    assert any(answer.status != 429 for answer in answers)


def test_a_key_that_reads_sends_mcp_no_more_than_it_needs(site: Site, reading_key: str) -> None:
    body = members('{"jsonrpc":"2.0","id":1,"method":"tools/call","params":[', "1", "]}", 4000)
    accept = {"Accept": "application/json, text/event-stream"}
    assert post(site, "/mcp", body, reading_key, **accept).status == 413
    large = BODIES["mcp"][1]()
    with ThreadPoolExecutor(10) as threads:
        sent = [threads.submit(post, site, "/mcp", large, reading_key, **accept) for _ in range(10)]
        site.assert_serves_others()
        assert {each.result().status for each in sent} <= {413, 429}


def test_a_call_over_mcp_has_no_more_values_than_the_sdk_reads_in_a_moment(site: Site) -> None:
    def answered(count: int) -> Answer:
        named = {f"k{number}": 1 for number in range(count)}
        call = {"name": "run_code", "arguments": {"code": "1", "arguments": named}}
        message = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": call}
        accept = {"Accept": "application/json, text/event-stream"}
        return post(site, "/mcp", json.dumps(message).encode(), site.charlie, **accept)

    assert answered(CALL.values - 100).status == 200
    assert answered(CALL.values).status == 413


def test_memory_comes_back_after_large_bodies(site: Site) -> None:
    text = b'{"code":"1","files":[{"path":"a","content_base64":"' + b"AAAA" * (10 * MIB)
    bodies = [text + b'"},{}]}', names("{", "}", 60 * MIB), BODIES["files"][1]()]
    for body in bodies:
        post(site, EXECUTIONS, body, site.alice)
    before = memory_of(site)
    for body in bodies * 2:
        assert post(site, EXECUTIONS, body, site.alice).status in (400, 413)
    deadline = time.monotonic() + 120
    while (after := memory_of(site)) > before + 128 * MIB:
        assert time.monotonic() < deadline, (before, after)
        time.sleep(0.5)
    site.assert_serves_others()


def test_a_large_file_still_arrives_whole(site: Site) -> None:
    content = b"AAAA" * (4 * MIB)
    code = "import hashlib; print(hashlib.sha256(open('a', 'rb').read()).hexdigest())"
    file = b'{"path":"a","content_base64":"' + content + b'"}'
    body = b'{"code":%s,"files":[%s]}' % (json.dumps(code).encode(), file)
    answer = post(site, EXECUTIONS, body, site.charlie)
    assert answer.status == 200, answer.body
    # Of three bytes of zeros for each four characters.
    expected = hashlib.sha256(bytes(3 * len(content) // 4)).hexdigest()
    assert answer.json["stdout"].strip() == expected


def test_a_large_body_counts_as_several_requests(site: Site) -> None:
    sizes = (0, 100, 5 * MIB)
    bodies = [b'{"code":"","x":"' + b"y" * size + b'"}' for size in sizes]
    minutes: set[str] = set()
    while len(minutes) != 1:
        # All within one minute of the count.
        answers = [post(site, EXECUTIONS, body, site.charlie) for body in bodies]
        minutes = {answer.headers["x-ratelimit-reset"] for answer in answers}
    left = [int(answer.headers["x-ratelimit-remaining"]) for answer in answers]
    assert (left[0] - left[1], left[1] - left[2]) == (1, 6)


class Slow(BytesIO):
    """A body that is not read before `goes_on`."""

    def __init__(self, goes_on: threading.Event) -> None:
        super().__init__(b"{}")
        self._goes_on = goes_on

    def read(self, size: int | None = -1, /) -> bytes:
        assert self._goes_on.wait(60)
        return super().read(size)


def test_one_body_more_than_a_tenants_line_is_refused_and_holds_up_no_other() -> None:
    goes_on = threading.Event()
    try:
        held = [submit_read(Slow(goes_on), 2, "greedy") for _ in range(OF_ONE_TENANT)]
        with pytest.raises(RateLimited, match="large requests"):
            submit_read(Slow(goes_on), 2, "greedy")
        assert submit_read(BytesIO(b"[1]"), 3, "other").result(60).value == [1]
        assert not any(each.done() for each in held)
    finally:
        goes_on.set()
    assert [each.result(60).value for each in held] == [{}] * OF_ONE_TENANT


def test_the_values_are_counted_before_any_is_made() -> None:
    text = members("[", "{}", "]", 7 * MIB)
    with pytest.raises(TooMuch, match=str(MOST_VALUES)):
        json_values.check(text, MOST_VALUES, 10)
    # What is in a text is no value.
    inside = json.dumps({"code": "[{," * 200_000}).encode()
    assert json_values.check(inside, MOST_VALUES, 10) <= 10
    for bounds in (TINY, SMALL, CALL, LARGE):
        with pytest.raises(TooMuch):
            read_text(members("[", "1", "]", 2 * bounds.values + 10), bounds)


def test_a_text_that_is_cut_off_is_searched_once() -> None:
    """Read where all threads wait for it: from each of its quotes to the end it took seconds."""
    quotes = rb"\"" * 30_000
    cut_off = b"[]" * 401 + b'"' + quotes
    assert json_reading.is_plain(cut_off)
    # Its only match has the whole rest, up to the end.
    assert [found.span() for found in json_values._STRINGS.finditer(cut_off)] == [
        (cut_off.index(b'"'), len(cut_off))
    ]
    for end in (b"", b"\\", b'"'):
        assert len(list(json_values._MARKS.finditer(cut_off + end))) <= 804
        with pytest.raises(ValueError, match="Extra data"):
            read_text(cut_off + end)
    # What is cut off is no text, however long it is, and no base64.
    for text in (b'{"a": "' + b"x" * (2 * MIB), b'{"a": "' + b"x" * (2 * MIB) + rb"\""):
        with pytest.raises(ValueError, match="Unterminated"):
            read_bytes(text)
    file = b'{"files": [{"content_base64": "' + b"AAAA" * MIB + b"A"
    with pytest.raises(ValueError, match="Unterminated"):
        read_bytes(file, ("content_base64",))


def test_what_is_read_apart_is_what_is_read_here() -> None:
    value = {
        "texts": ['é中😀\ud800\n"\\' * 9000, "A" * 40_000, "", "x" * 16_385],
        "numbers": [1, -0.0, 1.5e300, 10**300, True, None],
        "nested": [{"a": {"b": ["long " * 9000, {"": "c" * 20_000}]}}],
        "padding": [["y" * 600] for _ in range(3000)],
    }
    for text in (json.dumps(value), json.dumps(value, ensure_ascii=False)):
        encoded = text.encode("utf-8", "surrogatepass")
        assert len(encoded) > MIB
        assert repr(read_bytes(encoded).value) == repr(json.loads(text))
    assert read_bytes(b" " * MIB + b' {"a": 1e400}').value == {"a": float("inf")}
    with pytest.raises(ValueError, match="not JSON"):
        read_bytes(b" " * MIB + b'{"a": NaN}')
    with pytest.raises(ValueError, match="Expecting"):
        read_bytes(b'{"a": "' + b"x" * MIB + b'" "b"}')


def test_files_are_decoded_where_they_are_read() -> None:
    files = [{"content_base64": "QUJD" * 500_000}, {"content_base64": "!!!!" * 50_000}]
    found = read_bytes(json.dumps({"files": files}).encode(), ("content_base64",)).value["files"]
    assert found[0]["content_base64"] == Base64(b"ABC" * 500_000)
    problem = "Must be base64: character 1 is '!'."
    assert found[1]["content_base64"] == Base64(None, problem)


def test_what_has_the_name_of_a_files_content_stays_the_callers_own() -> None:
    own = {"content_base64": "QUJD" * 50_000, "files": [{"content_base64": "!" * 50_000}]}
    sent = {"request": {"files": [own], "arguments": own}, "result": [own], "content_base64": "A"}
    found = read_bytes(json.dumps([sent] + [","] * 20_000).encode(), ("content_base64",)).value
    assert found[0] == sent
    padding = "x" * MIB
    found = read_bytes(json.dumps({**sent, "a": padding}).encode(), ("content_base64",)).value
    assert found["request"]["files"][0] == {**own, "content_base64": Base64(b"ABC" * 50_000)}
    del found["request"]["files"]
    del sent["request"]["files"]
    assert found == {**sent, "a": padding}


def test_arguments_may_have_the_names_of_files(site: Site) -> None:
    own = {"content_base64": "QUJD" * 10_000}
    file = {"path": "a", "content_base64": "AAAA" * (MIB // 4)}
    code = "print(len(arguments['content_base64']))"
    body = json.dumps({"code": code, "arguments": own, "files": [file]}).encode()
    answer = post(site, EXECUTIONS, body, site.charlie)
    assert (answer.status, answer.json.get("stdout")) == (200, "40000\n"), answer.body


def test_a_text_that_no_field_takes_is_not_brought_back() -> None:
    with pytest.raises(TooMuch, match="no text"):
        read_bytes(b'{"a": "' + b"x" * (2 * MIB) + b'"}', most_text=MIB)


def test_packed_uploads_hold_what_they_unpack_to_for_their_tenant(
    alice: Caller, charlie: Caller
) -> None:
    spool = Spool(64 * MIB)
    packed = gzip.compress(bytes(12 * MIB))
    assert len(packed) < 64 * 1024

    def unpack(caller: Caller) -> Share:
        share = Share(spool)
        sent = RequestFactory().post(
            "/files?path=a",
            packed,
            content_type="application/octet-stream",
            HTTP_CONTENT_ENCODING="gzip",
            **{HELD: share},
        )
        request = Request(sent)
        request.auth = caller.api_key
        try:
            for _, content in uploads_in(request, "a"):
                content.close()
        except RateLimited:
            share.release()
            raise
        return share

    held = [unpack(alice), unpack(alice)]
    with pytest.raises(RateLimited, match="You are sending too much"):
        unpack(alice)
    unpack(charlie).release()
    held[0].release()
    unpack(alice).release()


def test_what_a_request_holds_is_counted_for_its_tenant() -> None:
    spool = Spool(64 * MIB)
    shares = [Share(spool) for _ in range(3)]
    for share in shares[:2]:
        share.hold_unpacked("greedy", 16 * MIB)
    with pytest.raises(RateLimited, match="You are sending too much"):
        shares[2].hold_unpacked("greedy", 1)
    shares[2].hold_unpacked("other", 16 * MIB)
    shares[0].release()
    shares[1].hold_unpacked("greedy", 16 * MIB)
    for share in shares:
        share.release()
    with pytest.raises(Refused):
        Share(spool).hold("anybody", 33 * MIB)
    Share(spool).hold("anybody", 32 * MIB)


def test_bodies_count_by_their_size() -> None:
    sizes = (0, 1, MIB, MIB + 1, 64 * MIB)
    assert [requests_of(size) for size in sizes] == [1, 1, 1, 2, 64]


def test_what_ends_a_reading_ends_nothing_else() -> None:
    text = b'{"a": "' + b"\\n" * MIB + b'"}'
    assert len(read_bytes(text).value["a"]) == MIB
    reader = json_reading._idle[-1]
    # Another text by the same process, which has ended meanwhile.
    reader._process.kill()
    reader._process.wait()
    assert len(read_bytes(text).value["a"]) == MIB
    assert json_reading._idle[-1] is not reader
    # More than is brought back.
    wide = ("[" + ",".join('"' + "😀" * 30 + '"' for _ in range(60_000)) + "]").encode()
    with pytest.raises(TooMuch, match="at most"):
        read_bytes(wide)
    assert len(read_bytes(text).value["a"]) == MIB
