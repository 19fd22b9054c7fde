"""JSON goes in and comes out unchanged; what is not JSON is an error of the program."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from providers.errors import InvalidConfiguration
from providers.values import InputFile, RunLimits
from tests.conftest import require
from tests.support.sandboxes import Local

ECHO = "def main(**values):\n    print('kept')\n    return values"

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(10**4000), 10**4000)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=50)
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=9), inner),
    max_leaves=20,
)
arguments = st.dictionaries(
    st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=9), values, max_size=5
)


def same(one: Any, other: Any) -> bool:
    """Equal, and of the same types: 1, 1.0 and True are three values."""
    return json.dumps(one) == json.dumps(other)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])  # fmt: skip
@given(arguments)
def test_every_json_value_comes_back_as_it_went_in(
    bubblewrap: Local, given_arguments: dict[str, Any]
) -> None:
    result = bubblewrap.run(ECHO, arguments=given_arguments)
    assert result.has_result
    assert same(result.result, given_arguments)


def test_gvisor_returns_what_went_in(gvisor: Local) -> None:
    sent = {"a": [1, 1.5, None, True, "é🚢\0", 10**30], "b": {"c": {}}}
    result = gvisor.run(ECHO, arguments=sent)
    assert same(result.result, sent)


@pytest.mark.parametrize(
    "value",
    [
        None, True, False, 0, -1, 1.5, 1e300, 5e-324, "", "é🚢", "\0", "\u2028", "\"\\", [], {}, [[[]]],
        {"a": {"b": [None, {"c": True}]}}, 2**53, "\\ud800", {"__proto__": 1}, {"": ""},
    ],
)  # fmt: skip
def test_every_json_value_passes_through_javascript(bubblewrap: Local, value: Any) -> None:
    require("node")
    code = "function main (given) { console.log('kept'); return given.value }"
    result = bubblewrap.run(code, "nodejs", arguments={"value": value})
    assert same(result.result, value)
    assert result.stdout == "kept\n"


@pytest.mark.parametrize("sent", [None, {}])
@pytest.mark.parametrize("language", ["python", "nodejs"])
def test_main_gets_what_was_sent_and_nothing_without(
    bubblewrap: Local, language: str, sent: dict[str, Any] | None
) -> None:
    code, expected = "def main(*given): return len(given)", 0
    if language == "nodejs":
        require("node")
        # An empty object is one, so that a parameter's properties can be looked at.
        code, expected = "function main (...given) { return given.length }", int(sent == {})
    assert bubblewrap.run(code, language, arguments=sent).result == expected


def test_returning_nothing_is_the_result_null(bubblewrap: Local) -> None:
    result = bubblewrap.run("def main(): pass")
    assert (result.has_result, result.result) == (True, None)


@pytest.mark.parametrize(
    ("language", "code"),
    [
        ("python", "def main(): return {'a': [float('nan'), 1.5], 'b': (float('-inf'),)}"),
        ("nodejs", "function main () { return { a: [NaN, 1.5], b: [-1 / 0] } }"),
    ],
)
def test_what_is_no_finite_number_is_null(bubblewrap: Local, language: str, code: str) -> None:
    if language == "nodejs":
        require("node")
    result = bubblewrap.run(code, language)
    assert (result.has_result, result.result) == (True, {"a": [None, 1.5], "b": [None]})


def test_a_key_that_is_no_finite_number_is_its_name(bubblewrap: Local) -> None:
    result = bubblewrap.run("def main(): return {float('nan'): 1, float('inf'): 2}")
    assert result.result == {"NaN": 1, "Infinity": 2}


NOT_JSON = {
    "set": ("{1, 2}", "set is not JSON"),
    "bytes": ("b'x'", "bytes is not JSON"),
    "object": ("object()", "object is not JSON"),
    "tuple as a key": ("{(1, 2): 3}", "keys must be"),
    "circular": ("loop", "Circular"),
    "too deep": ("deep", "nested too deeply"),
    "lone surrogate": ("'a\\ud800'", "not valid Unicode"),
    "lone surrogate as a key": ("{'\\udfff': 1}", "not valid Unicode"),
    "integer beyond all bounds": ("10 ** 5000", "4300 digits"),
    "generator": ("(x for x in [1])", "generator is not JSON"),
    "too large": ("'x' * 1_048_576", "1048578 bytes of JSON, the limit is 1048576"),
    "far too large": ("'x' * 50_000_000", "the limit is 1048576"),
}


@pytest.mark.parametrize(("returned", "message"), NOT_JSON.values(), ids=NOT_JSON)
def test_a_result_that_is_not_json_is_told_and_keeps_the_output(
    bubblewrap: Local, returned: str, message: str
) -> None:
    code = f"""
        def main():
            print("kept")
            loop = []
            loop.append(loop)
            deep = []
            for _ in range(100_000):
                deep = [deep]
            return {returned}
    """
    result = bubblewrap.run(code)
    assert (result.exit_code, result.stdout, result.has_result) == (1, "kept\n", False)
    assert message in result.stderr
    assert "Traceback" not in result.stderr


NOT_JSON_IN_JAVASCRIPT = {
    "function": ("() => 1", "function is not JSON"),
    "big integer": ("10n", "BigInt"),
    "circular": ("loop", "circular"),
    "too deep": ("deep", "call stack"),
    "lone surrogate": ("'a\\ud800'", "not valid Unicode"),
    "too large": ("'x'.repeat(1_048_576)", "1048578 bytes of JSON, the limit is 1048576"),
    "far too large": ("'x'.repeat(50_000_000)", "the limit is 1048576"),
    "refuses": ("{ toJSON () { throw new Error('no') } }", "no"),
}


@pytest.mark.parametrize(
    ("returned", "message"), NOT_JSON_IN_JAVASCRIPT.values(), ids=NOT_JSON_IN_JAVASCRIPT
)
def test_a_javascript_result_that_is_not_json_is_told(
    bubblewrap: Local, returned: str, message: str
) -> None:
    require("node")
    code = f"""
        function main () {{
          console.log('kept')
          const loop = []; loop.push(loop)
          let deep = []; for (let i = 0; i < 1e6; i++) deep = [deep]
          return {returned}
        }}
    """
    result = bubblewrap.run(code, "nodejs", timeout=60)
    assert (result.exit_code, result.stdout, result.has_result) == (1, "kept\n", False)
    assert message in result.stderr


def test_a_result_just_within_the_bound_arrives(bubblewrap: Local) -> None:
    assert len(bubblewrap.run("def main(): return 'x' * 1_048_574").result) == 1_048_574


def test_the_bound_of_the_request_holds(local: Local) -> None:
    limits = replace(RunLimits(), result_bytes=10, output_bytes=100)
    result = local.run("def main(): print('x' * 120); return '12345678'", limits=limits)
    assert (result.result, len(result.stdout), result.stdout_truncated) == ("12345678", 100, True)
    result = local.run("def main(): return '123456789'", limits=limits)
    assert (result.exit_code, result.has_result) == (1, False)
    assert "11 bytes of JSON, the limit is 10" in result.stderr


FORGED = {
    "garbage": b"garbage that is no frame at all" * 10_000,
    "a huge header": (2**31).to_bytes(4, "big") + b"x" * 100_000,
    "no json": (3).to_bytes(4, "big") + b"{{{",
    "no object": (2).to_bytes(4, "big") + b"[]",
    "half a frame": (100).to_bytes(4, "big") + b'{"type"',
    "too large a part": None,
    "another type": None,
}


def framed(header: dict[str, Any], parts: tuple[tuple[str, bytes], ...] = ()) -> bytes:
    header = {**header, "parts": [[name, len(content)] for name, content in parts]}
    text = json.dumps(header).encode()
    return len(text).to_bytes(4, "big") + text + b"".join(content for _, content in parts)


FORGED["too large a part"] = framed({"type": "done", "exit_code": 0}, (("result", b"1" * 9_000_000),))  # fmt: skip
FORGED["another type"] = framed({"type": "result", "timed_out": True, "id": 1})


@pytest.mark.parametrize("forged", FORGED.values(), ids=FORGED)
@pytest.mark.parametrize("ending", ["sys.exit(3)", "os._exit(3)"])
def test_garbage_in_place_of_a_report_changes_nothing(
    bubblewrap: Local, forged: bytes, ending: str
) -> None:
    file = InputFile("forged", forged)
    code = f"""
        import os, sys
        data = open("forged", "rb").read()
        print("kept")
        while data:
            data = data[os.write(4, data):]
        {ending}
    """
    result = bubblewrap.survive(code, files=[file])
    assert (result.exit_code, result.stdout) == (3, "kept\n")
    assert (result.timed_out, result.out_of_memory, result.has_result) == (False, False, False)


@pytest.mark.parametrize(
    "claimed",
    [
        b'"\xed\xa0\x80"', b'"\\ud800"', b"\xff\xfe1\x00", b"NaN", b"1e999", b"[" * 100_000, b"",
        b"1" * 10_000, b"{1: 2}", b"\0",
    ],
)  # fmt: skip
def test_a_forged_result_is_refused_like_an_honest_one(bubblewrap: Local, claimed: bytes) -> None:
    frame = framed({"type": "done", "exit_code": 0}, (("result", claimed),))
    result = bubblewrap.run(
        "import os\nos.write(4, open('forged', 'rb').read())\nwhile True: pass",
        files=[InputFile("forged", frame)],
    )
    assert (result.exit_code, result.has_result, result.result) == (1, False, None)
    assert "not JSON" in result.stderr


@pytest.mark.parametrize("claimed", [256 + 7, -1, 2**70, "0", None, True, 1.5, [0]])
def test_a_forged_exit_code_is_still_an_exit_code(bubblewrap: Local, claimed: Any) -> None:
    frame = framed({"type": "done", "exit_code": claimed, "timed_out": True, "out_of_memory": True})
    result = bubblewrap.run(
        "import os\nos.write(4, open('forged', 'rb').read())\nwhile True: pass",
        files=[InputFile("forged", frame)],
    )
    assert result.exit_code is not None
    assert 0 <= result.exit_code <= 255
    assert (result.timed_out, result.out_of_memory) == (False, False)


def test_nothing_printed_is_taken_for_a_result(local: Local) -> None:
    frame = framed({"type": "done", "exit_code": 9}, (("result", b'"forged"'),))
    code = """
        import os
        def main():
            for fd in (1, 2):
                os.write(fd, open("forged", "rb").read())
            print("__RESULT__", '{"result": 1}', "__COFFERDAM_RESULT__:eyJ9")
            return "honest"
    """
    result = local.run(code, files=[InputFile("forged", frame)])
    assert (result.result, result.exit_code) == ("honest", 0)
    assert '"forged"' in result.stdout
    assert result.stdout.endswith('__RESULT__ {"result": 1} __COFFERDAM_RESULT__:eyJ9\n')
    assert '"forged"' in result.stderr


@pytest.mark.parametrize(
    "refused",
    [
        {"a": math.nan}, {"a": [math.inf]}, {"a": {1}}, {"a": b"x"}, {"a": "\ud800"}, {"\udfff": 1},
        {"a": 10**5000}, {(1, 2): 3},
    ],
)  # fmt: skip
def test_arguments_that_are_not_json_name_the_field(bubblewrap: Local, refused: Any) -> None:
    with pytest.raises(InvalidConfiguration) as caught:
        bubblewrap.run(ECHO, arguments=refused)
    assert caught.value.field == "arguments"
    assert not caught.value.started


def test_arguments_without_end_name_the_field(bubblewrap: Local) -> None:
    loop: list[Any] = []
    loop.append(loop)
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    for refused in (loop, deep):
        with pytest.raises(InvalidConfiguration) as caught:
            bubblewrap.run(ECHO, arguments={"a": refused})
        assert caught.value.field == "arguments"


def test_code_that_is_no_text_names_the_field(bubblewrap: Local) -> None:
    with pytest.raises(InvalidConfiguration) as caught:
        bubblewrap.run("print('\ud800')")
    assert caught.value.field == "code"
