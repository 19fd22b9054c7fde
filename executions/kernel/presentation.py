"""Text of hostile writers on pages: made fit to be looked at, coloured, and lines side by side.

Colours and comparisons are made in a process apart (`text_work`), within the processor time that a
page has. A text that takes longer is shown as it is. Results are kept, so that a page that is asked
for again costs nothing. Lists that are empty have their text here too.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import sys
import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import pygments

from executions.kernel import text_work
from executions.kernel.process_pool import PoolBusy, ProcessPool
from providers.hidden_characters import spelled_length
from providers.hidden_characters import visible as visible
from providers.languages import language_of

logger = logging.getLogger(__name__)

# Of the processor, for all texts of one page.
PAGE_SECONDS = 0.15
# What is shorter than this is not worth to ask for.
_LEAST_SECONDS = 0.005
# Beyond it, colours cost more than they tell.
MAX_COLOURED = 50_000
# For a machine that has no time. The thread of the page waits so long at most, and so long before
# that for one of the processes.
WALL_SECONDS, PATIENCE_SECONDS = 3.0, 1.0
AT_ONCE = 2
_MOST_ANSWERED = 1 << 20
_KEPT_BYTES = 8 << 20

Operation = tuple[str, int, int, int, int]


class PageTime:
    """What one page may spend, in seconds of the processor. Make one for each page."""

    def __init__(self, seconds: float = PAGE_SECONDS) -> None:
        self._whole = self._left = seconds

    def coloured(self, text: str, language: str) -> str | None:
        """The text as HTML, escaped, in the colours of a language. None where it is to be shown as
        it is: it is too long, takes too long, or nobody knows the language."""
        if len(text) > MAX_COLOURED or not (known := language_of(language)):
            return None
        found = self._ask(text_work.COLOURS, known.lexer, text)
        return found if isinstance(found, str) else None

    def aligned(self, before: list[str], after: list[str]) -> list[Operation] | None:
        """How lines become others, as difflib's operations. None where that takes too long."""
        found = self._ask(text_work.LINES, before, after)
        if not isinstance(found, list):
            return None
        return [(str(kind), *map(int, places)) for kind, *places in found]  # type: ignore[misc]

    def _ask(self, kind: str, *given: Any) -> Any:
        name = hashlib.sha256(json.dumps([kind, *given]).encode()).digest()
        is_known, answer = _kept.find(name)
        if is_known:
            return None if answer is None else json.loads(answer)[1]
        if self._left < _LEAST_SECONDS:
            return None
        seconds, self._left = self._left, 0.0
        try:
            answer = _pool.ask(
                json.dumps([kind, seconds, *given]).encode() + b"\n", PATIENCE_SECONDS
            )
        except PoolBusy:
            return None
        except OSError as error:
            logger.warning("no process can be started for a page's texts: %s", error)
            return None
        took, found = (seconds, None) if answer is None else json.loads(answer)
        self._left = max(0.0, seconds - took)
        if found is not None:
            _kept.keep(name, answer)
        elif answer is not None and seconds >= self._whole == PAGE_SECONDS:
            # It had all that there is, and would have no more the next time.
            _kept.keep(name, None)
        return found


class _Kept:
    """The last answers, in bounded memory. None for a text that takes too long."""

    def __init__(self, most_bytes: int) -> None:
        self._most = most_bytes
        self._lock = threading.Lock()
        self._answers: OrderedDict[bytes, bytes | None] = OrderedDict()
        self._size = 0

    def find(self, name: bytes) -> tuple[bool, bytes | None]:
        with self._lock:
            if name not in self._answers:
                return False, None
            self._answers.move_to_end(name)
            return True, self._answers[name]

    def keep(self, name: bytes, answer: bytes | None) -> None:
        with self._lock:
            if name in self._answers:
                return
            self._answers[name] = answer
            self._size += _size_of(answer)
            while self._size > self._most:
                _, gone = self._answers.popitem(last=False)
                self._size -= _size_of(gone)


def _size_of(answer: bytes | None) -> int:
    """With what keeping it takes beside."""
    return 300 + len(answer or b"")


def _command() -> tuple[str, ...]:
    folder = os.path.dirname(os.path.dirname(pygments.__file__))
    return (sys.executable, "-I", "-S", text_work.__file__, folder)


_kept = _Kept(_KEPT_BYTES)
_pool = ProcessPool(
    _command(), at_once=AT_ONCE, wall_seconds=WALL_SECONDS, most_answered=_MOST_ANSWERED
)


MAX_CHARACTERS = 100_000
MAX_LINE = 2_000
_STEP = 1_000


@dataclass(frozen=True)
class Shown:
    """Text to show, and what was left out of it."""

    text: str
    cut_characters: int = 0
    cut_lines: int = 0

    @property
    def note(self) -> str:
        parts = []
        if self.cut_lines:
            lines = "1 long line is" if self.cut_lines == 1 else f"{self.cut_lines} long lines are"
            parts.append(f"{lines} shortened.")
        if self.cut_characters:
            rest = self.cut_characters
            left = "1 more character is" if rest == 1 else f"{rest:,} more characters are"
            parts.append(f"{left} not shown.")
        return " ".join(parts)


def shown(text: str, most: int = MAX_CHARACTERS) -> Shown:
    """`text` as a page may hold it: harmless, of bounded length, in lines of bounded length."""
    kept = text[:most].replace("\r\n", "\n")
    cut = max(0, len(text) - most)
    fits = _fitting(kept, most)
    cut, kept = cut + len(kept) - fits, kept[:fits]
    lines = kept.split("\n")
    long = [number for number, line in enumerate(lines) if len(line) > MAX_LINE]
    for number in long:
        line = lines[number]
        lines[number] = f"{line[:MAX_LINE]}… [{len(line) - MAX_LINE} more characters]"
    return Shown(visible("\n".join(lines)), cut, len(long))


def _fitting(text: str, most: int) -> int:
    """How many of its characters fit, where those that cannot be seen are spelled out."""
    size = 0
    for start in range(0, len(text), _STEP):
        piece = text[start : start + _STEP]
        size += spelled_length(piece)
        if size > most:
            return start
    return len(text)


def in_time(milliseconds: float) -> str:
    """A duration in the units that a person would use."""
    if 0 < milliseconds < 1:
        return "under 1 ms"
    if milliseconds < 1000:
        return f"{milliseconds:.0f} ms"
    if milliseconds < 60_000:
        return f"{milliseconds / 1000:.2f} s"
    minutes, seconds = divmod(round(milliseconds / 1000), 60)
    if minutes < 60:
        return f"{minutes} min {seconds} s"
    return f"{minutes // 60} h {minutes % 60} min"


EMPTY = {
    "executions.execution": "No executions yet. Run a program in the playground, with "
    "POST /api/v1/executions, or with `manage.py execute`.",
    "executions.thread": "No threads yet. An execution with the field `conversation` is part of "
    "one.",
    "executions.session": "No sessions yet. POST /api/v1/sessions opens one.",
    "executions.schedule": "No schedules yet. POST /api/v1/schedules creates one.",
    "executions.snapshot": "No snapshots yet. POST /api/v1/sessions/{id}/snapshot creates one.",
    "executions.ledgerentry": "No entries yet. Every run and every change adds one.",
    "executions.process": "No processes yet. `manage.py up` starts them.",
    "executions.policy": "No policies. Everything is allowed that the providers allow. A policy "
    "can restrict, warn or require approval, for one tenant or all.",
    "executions.approval": "No approvals yet. Runs appear here if a policy requires approval.",
    "executions.budget": "No budgets. Spending is not limited.",
    "executions.spending": "No spending yet. Costs are counted for providers with a price.",
    "executions.spendingalert": "No alerts. No budget is close to its limit.",
    "executions.alert": "No alerts.",
    "executions.auditexport": "No export. Set AUDIT_EXPORT_URL to send the ledger to a collector.",
    "executions.tenant": "No tenants. Runs and API keys belong to a tenant.",
    "executions.apikey": "No API keys. Agents need one to run code.",
    "executions.networkcredential": "No network credentials. The network proxy puts one into the "
    "requests that it is bound to.",
    "executions.webhooksecret": "No webhook secrets. A tenant needs one to receive webhooks.",
    "executions.webhookdelivery": "No webhook deliveries yet.",
    "executions.legalhold": "No legal holds. Retention erases old data.",
    "executions.toolcall": "No tool calls yet.",
    "executions.report": "No reports yet.",
    "executions.ledgercheck": "No verifications yet.",
    "providers.providerconfig": "No providers. Add one to run code.",
    "providers.configversion": "No versions yet. Each change creates one.",
    "providers.pendingchange": "No pending changes. With TWO_PERSON_RULE=true, changes wait here "
    "for a second administrator.",
    "providers.providerprice": "No prices. Costs are not counted.",
    "providers.route": "No routes. All runs use the active provider. A route names several "
    "providers, for one tenant or all.",
    "providers.circuitbreaker": "No provider is out of service.",
    "auth.group": "No roles. `manage.py migrate` creates the three.",
    "axes.accessattempt": "No failed sign-ins.",
}
