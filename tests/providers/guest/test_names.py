"""Names of files are data: each has one text, and each text one name."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from providers.errors import InvalidConfiguration
from providers.runtime.guest.names import (
    MOST_OMISSIONS,
    Omissions,
    escape,
    problem,
    shorten,
    unescape,
)
from providers.runtime.pool.requests import check_files
from providers.runtime.service import messages
from providers.values import InputFile, Job

SIGNS = st.sampled_from(
    [b"\\", b"x", b"5", b"c", b"f", b"0", b"\xff", b"\x80", b"\n", b"\xc2\x85", "漢".encode(), b"a"]
)
NAMES = st.one_of(st.binary(max_size=30), st.lists(SIGNS, max_size=10).map(b"".join)).map(
    lambda name: name.replace(b"\0", b"").replace(b"/", b"")
)


@given(NAMES, NAMES)
@example(b"\\xff", b"\xff")
@example(b"\\x5cxff", b"\\xff")
def test_a_name_is_told_so_that_it_can_be_read_again(one: bytes, other: bytes) -> None:
    names = [os.fsdecode(name) for name in (one, other)]
    texts = [escape(name) for name in names]
    assert [os.fsencode(unescape(text)) for text in texts] == [one, other]
    assert (texts[0] == texts[1]) == (one == other)
    for text in texts:
        text.encode()
        assert not any(sign < " " or "\x7f" <= sign <= "\x9f" for sign in text)


@given(st.text(max_size=30))
def test_any_text_means_a_name_and_a_name_on_the_way_stays_one(text: str) -> None:
    name = unescape(text)
    assert name.count("/") == text.count("/")
    assert ("\0" in name) == ("\0" in text)
    assert (".." in name.split("/")) == (".." in text.split("/"))


PLAIN = [f"a{sign}b" for sign in "\u3000\u202f\u00a0\u200d\u00ad\ufeff\u202e\u2028\\ %é漢"]
HARMFUL = ["a\nb", "a\x7f", "a\x85b", "\udcff", "\ud800", "nul\0"]
NO_PATH = ["", "/a", "a//b", "a/../b", ".", "a/"]


@pytest.mark.parametrize("name", PLAIN)
def test_a_name_with_signs_that_nobody_sees_is_itself(name: str) -> None:
    assert (escape(name), unescape(name), problem(name)) == (name, name, "")


@pytest.mark.parametrize("path", [*PLAIN, *HARMFUL, *NO_PATH, "x" * 256, "d/" * 300 + "x"])
def test_a_pool_here_and_a_pool_service_take_the_same_paths_of_files(path: str) -> None:
    def takes(check: Callable[[], object]) -> bool:
        try:
            check()
        except InvalidConfiguration as error:
            return error.field != "files"
        return True

    here = takes(lambda: check_files(Job("", files=[InputFile(path, b"")])))
    there = takes(lambda: messages._file({"path": path, "content_base64": ""}))
    assert here == there == (path in PLAIN)


def test_a_list_of_what_was_left_out_is_bounded_and_says_how_many_more() -> None:
    skipped = Omissions()
    for number in range(MOST_OMISSIONS + 7):
        skipped.add(f"{number}\n\u202e", "why")
    entries = skipped.entries
    assert entries[0] == ["0\\x0a\u202e", "why"]
    assert (len(entries), entries[-1]) == (MOST_OMISSIONS + 1, ["", "and 7 more"])
    # Whoever takes the list over knows the number still.
    taken_over = Omissions()
    taken_over.add_claimed(entries)
    taken_over.add("one", "why")
    assert taken_over.entries == [*entries[:-1], ["", "and 8 more"]]

    large = Omissions()
    for _ in range(10):
        large.add("漢" * 5000, "x" * 5000)
    assert all(len(text) <= 200 for entry in large.entries for text in entry)
    assert sum(len(text.encode()) for entry in large.entries for text in entry) <= 20_100


def test_what_somebody_claims_is_a_list_only_as_far_as_it_is_one() -> None:
    claims = [1, [], ["a"], ["a", 1], ["a", "b", "c"], {}, ["\ud800", "x"], ["a\0", "\x1b"]]
    skipped = Omissions()
    skipped.add_claimed(claims)
    skipped.add_claimed("all")
    assert skipped.entries == [["\ufffd", "x"], ["a\\x00", "\\x1b"]]
    for entry in skipped.entries:
        assert entry == [shorten(text) for text in entry]
