"""What ends a program is told as fields, as its interpreter knows them."""

from __future__ import annotations

import json

import pytest

from providers.runtime.guest.program import MESSAGE_CHARACTERS, TRACEBACK_CHARACTERS
from providers.runtime.guest.wire import EXCEPTION_BYTES
from providers.runtime.pool import claims
from providers.values import exception_of
from tests.conftest import require
from tests.support.kept_guest import Cell, Guests, KeptGuest


def told(cell: Cell) -> dict[str, str]:
    found: dict[str, str] = json.loads(cell.parts["exception"])
    return found


@pytest.fixture
def node(guests: Guests) -> KeptGuest:
    require("node")
    return guests.kept("nodejs")


@pytest.mark.parametrize(
    ("code", "kind", "message"),
    [
        (
            "raise RuntimeError('worker failed:\\nValueError: bad input')",
            "RuntimeError",
            "worker failed:\nValueError: bad input",
        ),
        (
            "class NotFound(Exception): pass\nraise NotFound('no row\\nfor id 7')",
            "NotFound",
            "no row\nfor id 7",
        ),
        ("raise ExceptionGroup('g', [ValueError(1)])", "ExceptionGroup", "g (1 sub-exception)"),
        ("a b c", "SyntaxError", "invalid syntax"),
        ("{}['k']", "KeyError", "'k'"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt", ""),
        (
            "class E(Exception):\n    def __str__(self): 1 / 0\nraise E",
            "E",
            "<exception str() failed>",
        ),
    ],
)
def test_python_tells_type_and_whole_message(
    kept: KeptGuest, code: str, kind: str, message: str
) -> None:
    failed = kept.run(code)

    assert (failed.exit_code, told(failed)["type"], told(failed)["message"]) == (1, kind, message)
    assert told(failed)["traceback"].rstrip("\n") == failed.stderr.rstrip("\n")


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("class E(ValueError):\n    __class__ = property(lambda s: 1 / 0)\nraise E", "E"),
        ("class E(ValueError):\n    __traceback__ = property(lambda s: 1 / 0)\nraise E", "E"),
        ("class E(ValueError):\n    def with_traceback(s, t): exit(0)\nraise E", "E"),
        ("class E(SystemExit):\n    code = property(lambda s: 1 / 0)\nraise E", "E"),
        ("class I(int):\n    def __and__(s, o): 1 / 0\nexit(I(1))", "SystemExit"),
        ("import sys\nsys.stderr = object()\nexit('why')", "SystemExit"),
        ("import sys\ndel sys.stdin, sys.excepthook\nraise ValueError", "ValueError"),
    ],
)
def test_an_exception_that_cannot_be_looked_at_ends_no_context(
    kept: KeptGuest, code: str, kind: str
) -> None:
    kept.run("x = 1")
    failed = kept.run(code)

    assert (failed.exit_code, told(failed)["type"]) == (1, kind)
    assert kept.run("x").shown == ["1"]


@pytest.mark.parametrize(
    "code",
    [
        "import io\nclass T(io.TextIOWrapper):\n def flush(s): exit(5)\nt = T(open('/tmp/t', 'wb'))",
        "import gc, os\ngc.get_objects = os.listdir = None\nt = open('/tmp/t', 'w')",
        "import os\nt = open('/tmp/t', 'w')\ntry:\n while 1: os.dup(0)\nexcept OSError: pass",
    ],
)
def test_a_file_that_cannot_be_looked_at_ends_no_context(kept: KeptGuest, code: str) -> None:
    kept.run("x = 1")

    assert kept.run(code).exit_code == 0
    assert kept.run("x").shown == ["1"]


def test_what_is_no_unicode_is_replaced(kept: KeptGuest) -> None:
    assert told(kept.run("raise ValueError('\\ud800\\0')"))["message"] == "?\0"


def test_a_program_that_ends_itself_has_no_traceback(kept: KeptGuest) -> None:
    text = kept.run("import sys; sys.exit('usage: prog FILE')")
    number = kept.run("exit(3)")

    assert told(text) == {"type": "SystemExit", "message": "usage: prog FILE", "traceback": ""}
    assert (number.exit_code, told(number)["message"]) == (3, "3")
    assert "exception" not in kept.run("exit(0)").parts
    # What one cell was ended by is not the next one's.
    assert "exception" not in kept.run("1").parts


def test_notes_and_causes_are_in_the_traceback(kept: KeptGuest) -> None:
    failed = kept.run(
        """
        try:
            1 / 0
        except ZeroDivisionError as cause:
            error = KeyError('k')
            error.add_note('a note')
            raise error from cause
        """
    )

    trace = told(failed)["traceback"]
    assert "ZeroDivisionError: division by zero" in trace
    assert "direct cause" in trace
    assert trace.endswith("KeyError: 'k'\na note\n")


@pytest.mark.parametrize("call", ["await f()", "asyncio.run(f())"])
def test_a_traceback_begins_with_the_callers_own_frames(kept: KeptGuest, call: str) -> None:
    failed = kept.run(f"import asyncio\nasync def f():\n    1 / 0\n{call}")

    lines = told(failed)["traceback"].splitlines()
    assert lines[1:3] == ['  File "<cell 1>", line 4, in <module>', f"    {call}"]
    assert "_cofferdam" not in failed.stderr + told(failed)["traceback"]


def test_a_long_message_and_traceback_are_cut_in_the_middle(kept: KeptGuest) -> None:
    found = told(kept.run("raise ValueError('a' + 'é' * 100_000 + 'z')"))

    assert len(found["message"]) <= MESSAGE_CHARACTERS
    assert (found["message"][0], found["message"][-1]) == ("a", "z")
    assert len(found["traceback"]) <= TRACEBACK_CHARACTERS
    assert found["traceback"].startswith("Traceback (most recent call last)")


@pytest.mark.parametrize(
    ("code", "kind", "message", "in_trace"),
    [
        ("throw {status: 404, why: 'no such row'}", "Object", "{ status: 404, why: 'no such row' }", "Uncaught"),
        ("throw new Error('outer', {cause: new Error('the real reason')})", "Error", "outer", "[cause]: Error: the real reason"),
        ("const e = new Error('m'); e.code = 'EX'; throw e", "Error", "m", "code: 'EX'"),
        ("throw new AggregateError([new Error('a'), new TypeError('b')], 'all')", "AggregateError", "all", "TypeError: b"),
        ("class NotFound extends Error {}\nthrow new NotFound('a\\nb')", "NotFound", "a\nb", "NotFound"),
        ("throw 'text'", "string", "text", "Uncaught 'text'"),
        ("throw null", "null", "null", "Uncaught null"),
        ("await Promise.reject(new TypeError('later'))", "TypeError", "later", "<cell 1>:1"),
        ("const = 5", "SyntaxError", "Unexpected token '='", "<cell 1>:1"),
        ("throw Object.freeze(new Error('frozen'))", "Error", "frozen", "<cell 1>:1"),
    ],
)  # fmt: skip
def test_javascript_tells_what_node_prints(
    node: KeptGuest, code: str, kind: str, message: str, in_trace: str
) -> None:
    failed = node.run(code)

    assert (failed.exit_code, told(failed)["type"], told(failed)["message"]) == (1, kind, message)
    assert in_trace in told(failed)["traceback"]
    assert told(failed)["traceback"] == failed.stderr.rstrip("\n")
    if "frozen" not in code:
        assert "node_context" not in failed.stderr
        assert "node:" not in failed.stderr


@pytest.mark.parametrize(
    "thrown",
    ["new Proxy({}, {get () { throw 1 }})", "{get name () { throw 2 }}", "Object.create(null)"],
)
def test_what_cannot_be_looked_at_keeps_the_state_of_javascript(
    node: KeptGuest, thrown: str
) -> None:
    node.run("const kept = 1")
    failed = node.run(f"throw {thrown}")

    assert (failed.exit_code, failed.context_kept) == (1, True)
    assert told(failed)["type"]
    assert node.run("kept").shown == ["1"]


def test_bash_tells_its_exit_status(guests: Guests) -> None:
    bash = guests.kept("bash")

    assert told(bash.run("exit 3"))["message"] == "exit status 3"
    assert "exception" not in bash.run("true").parts


@pytest.mark.parametrize(
    "claimed",
    [
        b"",
        b"[]",
        b"{",
        b'{"type": "E", "message": "m"}',
        b'{"type": "", "message": "m", "traceback": ""}',
        b'{"type": 1, "message": "m", "traceback": ""}',
        b'{"type": "\\ud800", "message": "m", "traceback": ""}',
        b'{"type": "E", "message": "' + b"m" * EXCEPTION_BYTES + b'", "traceback": ""}',
    ],
)
def test_what_is_no_exception_is_left_out(claimed: bytes) -> None:
    assert claims.exception(claimed) is None


def test_a_claim_is_cut_and_has_no_nul() -> None:
    found = exception_of({"type": "E\0", "message": "m" * 20_000, "traceback": "", "more": 1})

    assert found is not None
    assert found["type"] == "E\ufffd"
    assert len(found["message"]) == MESSAGE_CHARACTERS
    assert set(found) == {"type", "message", "traceback"}
