"""What is refused: always 400 (or its kin) naming the field, with nothing run and nothing kept."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from typing import Any

import pytest

from executions.runs.models import Execution
from executions.runs.requests import MAX_FILE_BYTES, MAX_FILES_BYTES, RUN, ExecutionRequest
from providers.errors import InvalidConfiguration
from providers.values import InputFile
from tests.conftest import Caller
from tests.support.running import run

pytestmark = pytest.mark.one_database

PATH = "/api/v1/executions"


@pytest.fixture(autouse=True)
def nothing_happens(scripted: Callable[[], list[str]]) -> Any:
    yield
    assert scripted() == []
    assert Execution.objects.count() == 0


def send(caller: Caller, content: str | bytes, content_type: str = "application/json") -> Any:
    return caller.client.generic("POST", PATH, content, content_type=content_type)


def assert_refused(answer: Any, field: str, status: int = 400) -> None:
    assert answer.status_code == status, answer.content
    body = answer.json()
    assert set(body) == {"error", "id"}
    assert body["error"]["code"] == "SB002"
    assert body["error"]["field"] == field
    assert field in body["error"]["message"]
    assert body["id"] is None


def text_file(path: Any, content: Any = "aGk=") -> dict[str, Any]:
    return {"path": path, "content_base64": content}


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "",
        "{'code': 'x'}",
        '{"code": "print(1)"} trailing',
        b'{"code": "\xff"}',
        '{"code": "x", "timeout": NaN}',
        '{"code": "x", "arguments": {"a": Infinity}}',
        '{"code": "x", "arguments": {"a": -Infinity}}',
        '{"code": "x", "arguments": ' + '{"a":' * 100_000 + "1" + "}" * 100_000 + "}",
        "[" * 1_000_000,
        '{"code": "x", "arguments": {"a": ' + "9" * 10_000 + "}}",
    ],
    ids=lambda content: repr(content[:40]),
)
def test_a_body_that_is_not_json_is_refused(content: str | bytes, alice: Caller) -> None:
    assert_refused(send(alice, content), "body" if content else "code")


@pytest.mark.parametrize("content", ["[]", '"x"', "1", "null", "true"])
def test_a_body_that_is_no_object_is_refused(content: str, alice: Caller) -> None:
    assert_refused(send(alice, content), "body")


def test_an_unknown_field_is_refused_by_name(alice: Caller) -> None:
    assert_refused(run(alice, "pass", timout=3), "timout")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("code", None),
        ("code", ""),
        ("code", " \n\t"),
        ("code", 1),
        ("code", ["print(1)"]),
        ("code", "print(1)\0"),
        ("language", ""),
        ("language", 3),
        ("language", "cobol"),
        ("language", "Python"),
        ("language", "x" * 1000),
        ("language", "py\0thon"),
        ("arguments", []),
        ("arguments", "x"),
        ("arguments", 1),
        ("arguments", True),
        ("timeout", 0),
        ("timeout", -1),
        ("timeout", 301),
        ("timeout", 10**400),
        ("timeout", True),
        ("timeout", "5"),
        ("timeout", [5]),
        ("entrypoint", "run"),
        ("entrypoint", "repl"),
        ("entrypoint", 1),
        ("entrypoint", []),
        ("mode", "later"),
        ("mode", {}),
        ("session", "abc"),
        ("session", ""),
        ("idempotency_key", ""),
        ("idempotency_key", 5),
        ("idempotency_key", "x" * 256),
        ("idempotency_key", "a\0b"),
        ("files", {}),
        ("files", "x"),
        ("files", [text_file(f"{number}") for number in range(101)]),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_a_bad_value_is_refused_by_field(field: str, value: Any, alice: Caller) -> None:
    body = {"code": "print(1)", field: value}

    assert_refused(alice.client.post(PATH, body), field)


@pytest.mark.parametrize(
    ("field", "content"),
    [
        ("code", r'{"code": "print(\ud800)"}'),
        ("arguments", r'{"code": "x", "arguments": {"a": [{"b": "\udfff"}]}}'),
        ("arguments", r'{"code": "x", "arguments": {"\ud800": 1}}'),
        ("arguments", '{"code": "x", "arguments": {"a": 1e999}}'),
        ("timeout", '{"code": "x", "timeout": 1e999}'),
        ("files[0].path", r'{"code": "x", "files": [{"path": "\ud800", "content_base64": ""}]}'),
        ("idempotency_key", r'{"code": "x", "idempotency_key": "\ud800"}'),
    ],
)
def test_lone_surrogates_and_infinities_are_refused(
    field: str, content: str, alice: Caller
) -> None:
    assert_refused(send(alice, content), field)


def test_arguments_nested_too_deeply_are_refused(alice: Caller) -> None:
    nested: Any = 1
    for _ in range(250):
        nested = [nested]

    assert_refused(run(alice, "pass", arguments={"a": nested}), "arguments")


def test_arguments_that_are_too_large_are_refused(alice: Caller) -> None:
    assert_refused(run(alice, "pass", arguments={"a": "x" * 1024 * 1024}), "arguments")


@pytest.mark.parametrize("code", ["#" * (1024 * 1024 + 1), "#" + "é" * (512 * 1024)])
def test_code_over_a_mebibyte_is_refused(code: str, alice: Caller) -> None:
    assert_refused(run(alice, code), "code")


@pytest.mark.parametrize(
    ("field", "files"),
    [
        ("files[0]", ["x"]),
        ("files[0].mode", [{**text_file("a"), "mode": 7}]),
        ("files[0].path", [{"content_base64": ""}]),
        ("files[0].path", [text_file("a\nb")]),
        ("files[0].path", [text_file("a\x85")]),
        ("files[0].content_base64", [{"path": "a"}]),
        ("files[0].path", [text_file(5)]),
        ("files[0].path", [text_file("")]),
        ("files[0].path", [text_file("/etc/passwd")]),
        ("files[0].path", [text_file("../up")]),
        ("files[0].path", [text_file("a/../b")]),
        ("files[0].path", [text_file("a//b")]),
        ("files[0].path", [text_file("./a")]),
        ("files[0].path", [text_file("a/")]),
        ("files[0].path", [text_file("a\0b")]),
        ("files[0].path", [text_file("/".join("abcdefghijk"))]),
        ("files[0].path", [text_file("x" * 256)]),
        ("files[0].path", [text_file("/".join(["x" * 200] * 3))]),
        ("files[1].path", [text_file("a"), text_file("a")]),
        ("files[1].path", [text_file("a"), text_file("a/b")]),
        ("files[1].path", [text_file("a/b"), text_file("a")]),
        ("files[0].content_base64", [text_file("a", "not base64!")]),
        ("files[0].content_base64", [text_file("a", "aGk")]),
        ("files[0].content_base64", [text_file("a", "é")]),
        ("files[1].content_base64", [text_file("a"), text_file("b", 5)]),
    ],
)
def test_a_bad_file_is_refused_by_its_place(field: str, files: Any, alice: Caller) -> None:
    assert_refused(run(alice, "pass", files=files), field)


def test_files_that_are_too_large_are_refused() -> None:
    with pytest.raises(InvalidConfiguration) as one:
        ExecutionRequest("pass", files=[InputFile("a", b"x" * (MAX_FILE_BYTES + 1))])
    half = bytes(MAX_FILES_BYTES // 2)
    with pytest.raises(InvalidConfiguration) as together:
        ExecutionRequest(
            "pass", files=[InputFile(name, half) for name in ("a", "b")] + [InputFile("c", b"x")]
        )

    assert (one.value.field, together.value.field) == ("files[0]", "files")


def test_a_body_over_the_limit_is_refused_unread(alice: Caller, settings: Any) -> None:
    settings.SANDBOX_MAX_BODY_BYTES = 1000

    answer = run(alice, "#" * 1000)

    assert_refused(answer, "body", status=413)


@pytest.mark.parametrize(
    "content_type", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""]
)
def test_another_media_type_is_unsupported(content_type: str, alice: Caller) -> None:
    answer = send(alice, json.dumps({"code": "pass"}), content_type)

    assert answer.status_code == 415
    assert answer.json()["error"]["code"] == "unsupported_media_type"


def test_a_body_in_chunks_is_refused_by_what_is_missing(alice: Caller) -> None:
    answer = alice.client.post(PATH, headers={"Transfer-Encoding": "chunked"})

    assert_refused(answer, "body")


def test_a_hostile_field_name_is_shown_harmlessly(alice: Caller) -> None:
    answer = send(alice, json.dumps({"code": "x", "\r\nSet-Cookie: \ud800" + "a" * 500: 1}))

    assert answer.status_code == 400
    assert len(answer.json()["error"]["field"]) == 100


def test_null_stands_for_a_field_left_out() -> None:
    names = ("language", "arguments", "entrypoint", "timeout", "files", "session", "mode")

    assert RUN.read({"code": "x"} | dict.fromkeys(names)) == ExecutionRequest("x")


def test_what_is_allowed_to_the_edge_is_allowed(settings: Any) -> None:
    request = RUN.read(
        {
            "code": "#" * 1024 * 1024,
            "arguments": {"NUL \0 and \u2028": [1e308, 2**100]},
            "timeout": 300,
            "files": [text_file("a/b/c/d/e/f/g/h/i/j", base64.b64encode(b"x").decode())],
            "idempotency_key": "x" * 255,
        }
    )

    assert request.timeout == 300.0
    assert request.files == (InputFile("a/b/c/d/e/f/g/h/i/j", b"x"),)


def test_base64_that_is_none_is_told_by_its_first_wrong_character(alice: Caller) -> None:
    files = [text_file("a", "aGk=\naG k=")]
    answer = alice.client.post(PATH, {"code": "print(1)", "files": files})
    assert_refused(answer, "files[0].content_base64")
    assert "character 8 is ' '" in answer.json()["error"]["message"]
