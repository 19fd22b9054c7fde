"""Frames arrive as they were sent however they are cut up, and nothing else gets through."""

from __future__ import annotations

import json
import os
import socket
import threading
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from providers.runtime.guest.wire import (
    HEADER_LIMIT,
    FrameError,
    Parser,
    chunks,
    dumps,
    loads,
    pack,
    read_frame,
    write_all,
)

text = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | text
values = st.recursive(
    scalars.filter(lambda value: value not in (float("inf"), float("-inf"))),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(text, inner, max_size=4),
    max_leaves=10,
)
headers = st.dictionaries(text.filter(lambda name: name != "parts"), values, max_size=4)
parts = st.dictionaries(text, st.binary(max_size=200), max_size=5)
frames = st.lists(st.tuples(headers, parts), max_size=4)


def sent(header: dict[str, Any], content: dict[str, bytes]) -> bytes:
    return pack(header, list(content.items()))


@settings(max_examples=100, deadline=None)
@given(frames, st.data())
def test_frames_arrive_whole_however_they_are_cut(
    sent_frames: list[tuple[dict[str, Any], dict[str, bytes]]], data: st.DataObject
) -> None:
    stream = b"".join(sent(*frame) for frame in sent_frames)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=20)))
    parser = Parser(limit=10_000)
    received = []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        received += parser.feed(stream[start:end])
    assert [content for _, content in received] == [content for _, content in sent_frames]
    for (header, content), (arrived, _) in zip(sent_frames, received, strict=True):
        assert arrived.pop("parts") == [[name, len(part)] for name, part in content.items()]
        assert json.dumps(arrived) == json.dumps(header)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.binary(max_size=100), max_size=10))
def test_of_arbitrary_bytes_come_frames_or_a_frame_error(pieces: list[bytes]) -> None:
    parser = Parser(limit=100)
    try:
        for piece in pieces:
            for header, content in parser.feed(piece):
                assert isinstance(header, dict)
                assert sum(map(len, content.values())) <= 100
    except FrameError:
        return


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=60), values)
def test_of_arbitrary_headers_come_frames_or_a_frame_error(junk: bytes, value: Any) -> None:
    for header in (junk, json.dumps(value).encode(), json.dumps({"parts": value}).encode()):
        parser = Parser(limit=100)
        try:
            parser.feed(len(header).to_bytes(4, "big") + header + b"x" * 100)
        except FrameError:
            continue


@settings(max_examples=100, deadline=None)
@given(sent_frame=st.tuples(headers, parts), data=st.data())
def test_of_a_damaged_frame_come_frames_or_a_frame_error(
    sent_frame: tuple[dict[str, Any], dict[str, bytes]], data: st.DataObject
) -> None:
    stream = bytearray(sent(*sent_frame))
    at = data.draw(st.integers(0, len(stream) - 1))
    stream[at] ^= data.draw(st.integers(1, 255))
    try:
        Parser(limit=10_000).feed(bytes(stream))
    except FrameError:
        return


REFUSED = {
    "a header over the limit": (HEADER_LIMIT + 1).to_bytes(4, "big"),
    "the largest length there is": b"\xff\xff\xff\xff",
    "an empty header": b"\0\0\0\0",
}
for name, header in {
    "no JSON": b"{",
    "no UTF-8": b'{"\xff": 1}',
    "text after the value": b'{"parts":[]} {}',
    "a list": b"[]",
    "a string": b'"x"',
    "null": b"null",
    "without parts": b"{}",
    "parts that are no list": b'{"parts":{}}',
    "a part that is no pair": b'{"parts":[["a"]]}',
    "a part of three": b'{"parts":[["a",1,2]]}',
    "a part without a name": b'{"parts":[[1,1]]}',
    "a size below zero": b'{"parts":[["a",-1]]}',
    "a size that is true": b'{"parts":[["a",true]]}',
    "a size that is no integer": b'{"parts":[["a",1.0]]}',
    "a size beyond all bounds": b'{"parts":[["a",1' + b"0" * 100 + b"]]}",
    "an integer of too many digits": b'{"parts":[["a",' + b"9" * 5000 + b"]]}",
    "one byte over the limit": b'{"parts":[["a",101]]}',
    "parts that are together over the limit": b'{"parts":[["a",60],["b",60]]}',
    "too deep a nesting": b'{"parts":' + b"[" * 100_000,
}.items():
    REFUSED[name] = len(header).to_bytes(4, "big") + header


@pytest.mark.parametrize("stream", REFUSED.values(), ids=REFUSED)
def test_a_frame_that_is_not_one_is_refused(stream: bytes) -> None:
    with pytest.raises(FrameError):
        Parser(limit=100).feed(stream)
    parser = Parser(limit=100)
    with pytest.raises(FrameError):
        for byte in stream:
            parser.feed(bytes([byte]))


def test_a_frame_at_its_limit_is_taken() -> None:
    ((header, content),) = Parser(limit=100).feed(sent({}, {"a": b"x" * 60, "b": b"y" * 40}))
    assert (header["parts"], content) == ([["a", 60], ["b", 40]], {"a": b"x" * 60, "b": b"y" * 40})


def test_a_header_is_refused_before_its_parts_arrive() -> None:
    stream = sent({}, {"a": b"x" * 101})
    with pytest.raises(FrameError, match="101 bytes are over the limit of 100"):
        Parser(limit=100).feed(stream[:-101])


@settings(max_examples=100, deadline=None)
@given(values)
def test_values_are_written_and_read_like_json(value: Any) -> None:
    written = dumps(value)
    assert written == json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    assert json.dumps(loads(written)) == json.dumps(value)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), {1, 2}, b"x", object(), {(1,): 1}])
def test_what_is_not_json_is_not_written(value: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        dumps([value])


def test_the_chunks_of_a_frame_are_its_bytes() -> None:
    content = [("a", b"1"), ("b", b""), ("c", b"23")]
    assert b"".join(chunks({"x": 1}, content)) == pack({"x": 1}, content)


@pytest.mark.parametrize("blocking", [True, False])
def test_a_large_frame_passes_through_a_small_socket(blocking: bool) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        for end in (ours, theirs):
            end.setblocking(blocking)
        frame = sent({"n": 1}, {"large": os.urandom(5_000_000)})
        writer = threading.Thread(target=write_all, args=(ours.fileno(), frame))
        writer.start()
        received = read_frame(theirs.fileno(), Parser(limit=6_000_000))
        writer.join()
    assert received is not None
    assert sent({"n": 1}, received[1]) == frame


def test_the_end_of_the_channel_is_no_frame() -> None:
    reader, writer = os.pipe()
    os.write(writer, sent({}, {"a": b"xyz"})[:-1])
    os.close(writer)
    assert read_frame(reader, Parser(limit=100)) is None
    os.close(reader)
