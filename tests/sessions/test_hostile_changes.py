"""Whatever a guest claims of changes and of files that are held back, the client is bounded by it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import SpooledTemporaryFile
from typing import Any

import pytest

from providers.errors import InvalidConfiguration, ProviderUnavailable
from providers.runtime.guest import wire
from providers.runtime.guest.protocol import MOST_CHOSEN
from providers.runtime.service import operations
from providers.runtime.service.settings import FIELDS
from providers.schema import validate
from providers.self_managed import kept
from providers.self_managed.client import PoolClient, SandboxConnection
from providers.self_managed.kept import ServiceFiles
from tests.support.wire_server import Request, WireServer

Frame = tuple[dict[str, object], dict[str, bytes]]


class LyingService(WireServer):
    """Answers every operation with the frames that a test has put there."""

    frames: list[Frame]

    def operation(self, request: Request) -> str:
        return "operation"

    def answer(self, operation: str, request: Request, fault: str | None) -> None:
        request.start_stream(operations.MEDIA_TYPE)
        for header, parts in self.frames:
            request.send_chunk(wire.pack(header, list(parts.items())))
        request.end_stream()


@pytest.fixture(scope="module")
def lying() -> Iterator[LyingService]:
    server = LyingService()
    yield server
    server.close()


@pytest.fixture
def tell(lying: LyingService) -> Iterator[Callable[..., ServiceFiles]]:
    client = PoolClient(lying.url, "", 0, validate(FIELDS, {}))

    def told(*frames: Frame) -> ServiceFiles:
        lying.frames = list(frames)
        return ServiceFiles(SandboxConnection(client, "ref"))

    yield told
    client.close()


def event(name: str, value: object = None, **fields: object) -> Frame:
    parts = {} if value is None else {"data": json.dumps(value).encode()}
    return {"event": name, **fields}, parts


def entry(path: object, **fields: object) -> dict[str, object]:
    said = {"path": path, "type": "file", "size": 1, "mode": 0o644, "modified": 0.5, "target": ""}
    return {**said, **fields}


DONE = event("done", mark="e:1", complete=False)
PATHS = {
    "above": "../x",
    "above on the way": "a/../../x",
    "absolute": "/etc/passwd",
    "the workspace": "",
    "twice the same": "a//b",
    "a needless part": "./a",
    "NUL": "a\0b",
    "too deep": "/".join("d" * 65),
    "too long": "x/" * 10 + "y" * 4090,
    "too long in bytes": "é" * 2049,
    "a surrogate that is no byte": "a\ud800",
    "ours": "d/.cofferdam-0123456789abcdef",
    "no text": 7,
    "nothing": None,
}


@pytest.mark.parametrize("path", PATHS.values(), ids=PATHS)
def test_what_is_no_path_of_the_workspace_is_no_answer(
    tell: Callable[..., ServiceFiles], path: object
) -> None:
    for claimed in (event("entries", [entry("a"), entry(path)]), event("removed", ["a", path])):
        with pytest.raises(ProviderUnavailable, match="invalid answer"):
            tell(claimed, DONE).changes()


NO_ANSWERS: dict[str, list[Frame]] = {
    "entries that are no list": [event("entries", {"a": 1}), DONE],
    "an entry of no type": [event("entries", [entry("a", type="door")]), DONE],
    "an entry that is a list": [event("entries", [[]]), DONE],
    "paths that are no list": [event("removed", "abc"), DONE],
    "nested without end": [({"event": "entries"}, {"data": b"[" * 60_000}), DONE],
    "no text": [({"event": "removed"}, {"data": b"\xff"}), DONE],
    "no mark": [event("done", complete=True)],
    "an empty mark": [event("done", mark="", complete=True)],
    "a long mark": [event("done", mark="x" * 101, complete=True)],
    "a mark of two lines": [event("done", mark="a\nb", complete=True)],
    "a mark that is no text": [event("done", mark=7, complete=True)],
    "there and gone": [event("entries", [entry("a")]), event("removed", ["a"]), DONE],
    "all, and some gone": [event("removed", ["a"]), event("done", mark="e:1", complete=True)],
    "no end": [event("entries", [])],
    "nothing": [],
}


@pytest.mark.parametrize("frames", NO_ANSWERS.values(), ids=NO_ANSWERS)
def test_an_answer_that_cannot_be_one_is_told(
    tell: Callable[..., ServiceFiles], frames: list[Frame]
) -> None:
    with pytest.raises(ProviderUnavailable):
        tell(*frames).changes()


def test_more_than_a_workspace_can_hold_is_not_taken_in(
    tell: Callable[..., ServiceFiles], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept, "CHANGES_BYTES", 100_000)
    names = [f"{n:060}" for n in range(1000)]
    frames = [event("removed", [f"{first}{name}" for name in names]) for first in range(3)]
    assert len(tell(frames[0], DONE).changes().removed) == 1000
    with pytest.raises(ProviderUnavailable, match="invalid answer"):
        tell(*frames, DONE).changes()


def test_what_is_claimed_twice_counts_once_and_figures_are_bounded(
    tell: Callable[..., ServiceFiles],
) -> None:
    claimed = [entry("b"), entry("a", size=-1, mode="x", modified=1e300), entry("b", size=2)]
    told = tell(event("entries", claimed), event("removed", ["c", "c"]), DONE).changes()
    assert [(each.path, each.size, each.mode, each.modified) for each in told.entries] == [
        *(("a", 0, 0, 0.0), ("b", 2, 0o644, 0.5)),
    ]
    assert (list(told.removed), told.mark, told.complete) == (["c"], "e:1", False)


def test_what_was_dropped_is_never_handed_on(tell: Callable[..., ServiceFiles]) -> None:
    def piece(name: str, data: bytes) -> Frame:
        return {"event": name}, {"data": data}

    large = b"x" * 65536
    frames = [
        *(piece("data", b"1"), *[piece("held", large)] * 20, event("dropped"), piece("held", b"2")),
        *(event("kept"), piece("data", b"3"), *[piece("held", large)] * 20, event("kept")),
        *(piece("held", b"lost"), event("kept"), piece("held", b"never"), event("done", count=1)),
    ]
    told = b"".join(tell(*frames).read_archive("", ["a"]))
    assert told == b"123" + 20 * large + b"lost"


def test_a_file_that_is_too_large_to_be_held_back_is_left_out_and_no_other(
    tell: Callable[..., ServiceFiles], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept, "HELD_BYTES", 1 << 20)
    most = 0

    class Counted(SpooledTemporaryFile):  # type: ignore[type-arg]
        def write(self, data: Any) -> int:
            nonlocal most
            written = super().write(data)
            most = max(most, self.tell())
            return written

    monkeypatch.setattr(kept, "SpooledTemporaryFile", Counted)
    frames: list[Frame] = [({"event": "held"}, {"data": bytes(65536)})] * 17
    others = [({"event": "held"}, {"data": b"other"}), event("kept")]
    told = tell(*frames, event("kept"), *others, event("done", count=1)).read_archive("", ["a"])
    assert b"".join(told) == b"other"
    assert most == 1 << 20


def test_a_disk_that_is_full_is_told_as_what_it_is(
    tell: Callable[..., ServiceFiles], monkeypatch: pytest.MonkeyPatch
) -> None:
    full = Path("/dev/full").open("r+b", buffering=0)  # noqa: SIM115
    monkeypatch.setattr(kept, "SpooledTemporaryFile", lambda most: full)
    frames: list[Frame] = [({"event": "held"}, {"data": b"x"})]
    with pytest.raises(ProviderUnavailable, match="disk"):
        list(tell(*frames, DONE).read_archive("", ["a"]))


@pytest.mark.parametrize(
    "only", [["x"] * (MOST_CHOSEN + 1), ["x" * 4000] * 2200], ids=["many", "long"]
)
def test_more_paths_than_are_taken_are_refused_before_they_are_sent(
    tell: Callable[..., ServiceFiles], lying: LyingService, only: list[str]
) -> None:
    lying.requests.clear()
    with pytest.raises(InvalidConfiguration) as refused:
        tell().read_archive("", only)
    assert refused.value.field == "only"
    assert lying.requests == []
