"""Canonical JSON is RFC 8785's: its own vectors, and what an ECMAScript engine says."""

from __future__ import annotations

import json
import math
import struct
import subprocess
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from examples.receipts import verify_receipt
from executions.ledger.entry import canonical
from tests.conftest import require

# RFC 8785, appendix B: the bits of a double, and how it is written.
NUMBERS = [
    ("0000000000000000", "0"),
    ("8000000000000000", "0"),
    ("0000000000000001", "5e-324"),
    ("8000000000000001", "-5e-324"),
    ("7fefffffffffffff", "1.7976931348623157e+308"),
    ("ffefffffffffffff", "-1.7976931348623157e+308"),
    ("4340000000000000", "9007199254740992"),
    ("c340000000000000", "-9007199254740992"),
    ("4430000000000000", "295147905179352830000"),
    ("44b52d02c7e14af5", "9.999999999999997e+22"),
    ("44b52d02c7e14af6", "1e+23"),
    ("44b52d02c7e14af7", "1.0000000000000001e+23"),
    ("444b1ae4d6e2ef4e", "999999999999999700000"),
    ("444b1ae4d6e2ef4f", "999999999999999900000"),
    ("444b1ae4d6e2ef50", "1e+21"),
    ("3eb0c6f7a0b5ed8c", "9.999999999999997e-7"),
    ("3eb0c6f7a0b5ed8d", "0.000001"),
    ("41b3de4355555553", "333333333.3333332"),
    ("41b3de4355555554", "333333333.33333325"),
    ("41b3de4355555555", "333333333.3333333"),
    ("41b3de4355555556", "333333333.3333334"),
    ("41b3de4355555557", "333333333.33333343"),
    ("becbf647612f3696", "-0.0000033333333333333333"),
    ("43143ff3c1cb0959", "1424953923781206.2"),
]


@pytest.fixture(params=[canonical, verify_receipt.canonical], ids=["service", "script"])
def write(request: pytest.FixtureRequest) -> Any:
    """The service's, and the one in the script that checks receipts."""
    return request.param


@pytest.mark.parametrize(("bits", "written"), NUMBERS)
def test_numbers_are_written_as_the_standard_lists_them(
    write: Any, bits: str, written: str
) -> None:
    assert write(struct.unpack(">d", bytes.fromhex(bits))[0]) == written


def test_the_example_of_section_3_2_2(write: Any) -> None:
    value = json.loads(
        r"""{"numbers": [333333333.33333329, 1E30, 4.50, 2e-3, 0.000000000000000000000000001],
        "string": "\u20ac$\u000F\u000aA'\u0042\u0022\u005c\\\"\/", "literals": [null, true, false]}"""
    )
    assert write(value).encode().hex(" ") == (
        "7b 22 6c 69 74 65 72 61 6c 73 22 3a 5b 6e 75 6c 6c 2c 74 72 75 65 2c 66 61 6c 73 65 5d"
        " 2c 22 6e 75 6d 62 65 72 73 22 3a 5b 33 33 33 33 33 33 33 33 33 2e 33 33 33 33 33 33 33"
        " 2c 31 65 2b 33 30 2c 34 2e 35 2c 30 2e 30 30 32 2c 31 65 2d 32 37 5d 2c 22 73 74 72 69"
        " 6e 67 22 3a 22 e2 82 ac 24 5c 75 30 30 30 66 5c 6e 41 27 42 5c 22 5c 5c 5c 5c 5c 22 2f"
        " 22 7d"
    )


def test_keys_are_sorted_by_utf_16_as_section_3_2_3_has_it(write: Any) -> None:
    value = {
        "€": "Euro Sign",
        "\r": "Carriage Return",
        "\ufb33": "Hebrew Letter Dalet With Dagesh",
        "1": "One",
        "😀": "Emoji: Grinning Face",
        "\x80": "Control",
        "ö": "Latin Small Letter O With Diaeresis",
    }
    assert list(json.loads(write(value)).values()) == [
        "Carriage Return",
        "One",
        "Control",
        "Latin Small Letter O With Diaeresis",
        "Euro Sign",
        "Emoji: Grinning Face",
        "Hebrew Letter Dalet With Dagesh",
    ]


@pytest.mark.parametrize(
    "value", [math.nan, math.inf, 2**53 + 1, 10**400, "\ud800", {"\udfff": 1}, {1: 2}, {1, 2}]
)
def test_what_has_no_canonical_form_is_refused(value: Any) -> None:
    with pytest.raises(ValueError):
        canonical(value)


def test_one_number_has_one_form_whatever_type_holds_it(write: Any) -> None:
    assert write([2, 2.0, 10**22, 1e22, -0.0]) == "[2,2,1e+22,1e+22,0]"


# Whatever JSON.parse of an ECMAScript engine and ours agree on holding.
_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda child: st.lists(child, max_size=4) | st.dictionaries(st.text(), child, max_size=5),
    max_leaves=8,
)

_ORACLE = """
const write = v => v === null || typeof v !== "object" ? JSON.stringify(v)
  : Array.isArray(v) ? "[" + v.map(write).join(",") + "]"
  : "{" + Object.keys(v).sort().map(k => JSON.stringify(k) + ":" + write(v[k])).join(",") + "}";
const lines = require("fs").readFileSync(0, "utf8").split("\\n").filter(line => line);
console.log(JSON.stringify(lines.map(line => write(JSON.parse(line)))));
"""


@settings(max_examples=25, deadline=None)
@given(st.lists(_values, min_size=5, max_size=20))
def test_an_ecmascript_engine_writes_the_same(values: list[Any]) -> None:
    lines = "\n".join(json.dumps(value) for value in values)
    done = subprocess.run(
        [require("node"), "-e", _ORACLE], input=lines, capture_output=True, text=True, check=True
    )
    written = json.loads(done.stdout)
    assert [canonical(value) for value in values] == written
    assert [verify_receipt.canonical(value) for value in values] == written


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_every_number_is_read_back_as_it_was(value: float) -> None:
    assert float(canonical(value)) == value
