"""How far a verification is: what is written, and when."""

from __future__ import annotations

from executions.ledger.models import Finding, Mark, Verification
from executions.ledger.progress import Progress


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def lines_of(entries: range, newest: int, *, is_terminal: bool, mark: Mark | None) -> list[str]:
    """The lines for a verification that reads 100 entries a second."""
    lines: list[str] = []
    clock = Clock()
    progress = Progress(newest, lines.append, is_terminal=is_terminal, now=clock)
    found = Verification(mark=mark, findings=[Finding("altered", 1, "")])
    for number in entries:
        clock.now = number / 100
        found.entries = number
        progress(found)
    return lines


def test_a_line_is_written_for_each_tenth() -> None:
    lines = lines_of(range(50, 2001, 50), 2000, is_terminal=False, mark=None)
    assert len(lines) == 10
    assert lines[0] == (
        "200 of 2000 entries, 10 %, 1 findings, 100 entries a second, 18 seconds left"
    )
    assert lines[-1].startswith("2000 of 2000 entries, 100 %")
    assert lines[-1].endswith("0 seconds left")


def test_a_terminal_has_at_most_one_line_a_second() -> None:
    lines = lines_of(range(30, 601, 30), 600, is_terminal=True, mark=None)
    assert [line.split()[0] for line in lines] == ["120", "240", "360", "480", "600"]


def test_entries_before_the_mark_do_not_count() -> None:
    mark = Mark(1000, digest="", rows="", executions="", at="", key_id="")
    lines = lines_of(range(50, 501, 50), 1500, is_terminal=False, mark=mark)
    assert lines[0].startswith("50 of 500 entries, 10 %")


def test_entries_that_are_added_meanwhile_count() -> None:
    lines = lines_of(range(50, 201, 50), 100, is_terminal=False, mark=None)
    assert lines[-1].startswith("100 of 100 entries, 100 %")
