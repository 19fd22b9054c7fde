"""What the checkpoints say of the ledger, and whether all of them are there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from executions.services.ledger import checkpoints
from executions.services.ledger.checkpoints import EVERY, Point

RESET = "checkpoints_reset"
# The first commits of a ledger may be noted by several processes before the first of them has made
# the file. So many entries after a beginning, a missing file is none that was not yet made.
BEGINNING = 64

Problem = tuple[str, int, str]


class Marks:
    """`known` is the digest of every entry that a checkpoint tells of."""

    def __init__(self, public_keys: dict[str, str]) -> None:
        self.is_kept = bool(checkpoints.where())
        self.history = checkpoints.history(public_keys)
        self.known = {point.sequence: point.digest for point in self.history.points}
        self.head: Point | None = None
        self.head_problem = ""
        try:
            self.head = checkpoints.head()
        except ValueError:
            self.head_problem = "head.json is damaged"
        else:
            if self.head and not checkpoints.is_signed(self.head, public_keys):
                self.head_problem = "no trusted key signed head.json"
            elif self.head is not None:
                self.known.setdefault(self.head.sequence, self.head.digest)
        self.reset_at = 0

    def read(self, stated: Mapping[str, Any]) -> None:
        """Take in what an authentic entry says of the checkpoints themselves."""
        if stated["kind"] == RESET:
            self.reset_at = stated["sequence"]

    def problems(self, last: int) -> Iterator[Problem]:
        """What is wrong with the checkpoints of a ledger whose newest entry is `last`."""
        if not self.is_kept:
            return
        end = last + 1
        beyond = [sequence for sequence in self.known if sequence > last]
        if beyond:
            yield (
                "truncated",
                end,
                f"the checkpoints know entries up to {max(beyond)}: the end was cut off, or an "
                "older copy of the database is in use",
            )
        for number in self.history.damaged:
            yield (
                "altered checkpoint",
                end,
                f"line {number} of the checkpoints was not written by this service, or does not "
                "follow the line before",
            )
        if self.head_problem:
            yield "altered checkpoint", end, self.head_problem
        elif self.head is None:
            yield (
                "missing checkpoint",
                last,
                f"there is no head.json in {checkpoints.where()}. If the folder was changed on "
                "purpose, run `manage.py checkpoint_ledger --reset REASON`",
            )
        yield from self._missing_lines(last)

    def _missing_lines(self, last: int) -> Iterator[Problem]:
        for number, sequence in self.history.begun.items():
            is_first = number == 1 and abs(sequence - self.reset_at) <= BEGINNING
            if not is_first:
                yield (
                    "missing checkpoint",
                    sequence,
                    "the checkpoints were gone when it was entered, and had not been reset",
                )
        points = self.history.points
        begin = max(self.reset_at, points[0].sequence if points else 0)
        for sequence in range(begin - begin % EVERY + EVERY, last - BEGINNING, EVERY):
            if sequence not in self.known:
                yield (
                    "missing checkpoint",
                    sequence,
                    "checkpoints.jsonl has no line for it, as for every thousandth entry",
                )
                return
