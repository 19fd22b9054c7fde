"""What a page does with hostile texts that may take long: colours, and lines side by side.

This file runs as a process of its own (`presentation`), without Django: its argument is the folder
that Pygments is in. A text that a lexer, or a comparison, takes too long for is given up.
"""

from __future__ import annotations

import difflib
import json
import resource
import signal
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

MEMORY_BYTES = 512 << 20

COLOURS, LINES = "colours", "lines"


class _TimeIsUp(BaseException):
    """No Exception: nobody between the signal and this file handles it."""


class _Watch:
    """Raises _TimeIsUp in the work after so many seconds of this process's processor time.

    The signal comes within a regular expression too. It is repeated, for the case that it came
    where Python drops what is raised.
    """

    def __init__(self) -> None:
        self._counts = False
        signal.signal(signal.SIGPROF, self._ring)

    def _ring(self, *_: object) -> None:
        if self._counts:
            raise _TimeIsUp

    def do(self, work: Callable[[], Any], seconds: float) -> Any:
        """The result of the work, None where it took too long or failed."""
        try:
            self._counts = True
            signal.setitimer(signal.ITIMER_PROF, seconds, seconds)
            return work()
        except (_TimeIsUp, Exception):
            return None
        finally:
            self._counts = False
            signal.setitimer(signal.ITIMER_PROF, 0)


def colours(lexer_name: str, text: str) -> Callable[[], str]:
    """Makes the text HTML with a class for each kind of token. What is slow the first time, to
    make the lexer, is done here."""
    from pygments import highlight
    from pygments.formatters import HtmlFormatter
    from pygments.lexers import get_lexer_by_name

    lexer = get_lexer_by_name(lexer_name, stripnl=False, ensurenl=False)
    formatter = HtmlFormatter(nowrap=True, classprefix="hl-")
    return lambda: highlight(text, lexer, formatter)


def lines(before: list[str], after: list[str]) -> Callable[[], Sequence[tuple[object, ...]]]:
    """Finds which lines of one text are those of the other, as difflib's operations."""
    return lambda: difflib.SequenceMatcher(
        None, before, after, autojunk=len(before) > 200
    ).get_opcodes()


_WORK: dict[str, Callable[..., Callable[[], Any]]] = {COLOURS: colours, LINES: lines}


def main() -> None:
    """Answer each line, [kind, seconds, texts...], with one of [seconds taken, result or null]."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sys.path.append(sys.argv[1])
    watch = _Watch()
    for line in sys.stdin.buffer:
        kind, seconds, *given = json.loads(line)
        work = _WORK[kind](*given)
        began = time.process_time()
        result = watch.do(work, seconds)
        took = time.process_time() - began
        answer = json.dumps([took, result], ensure_ascii=False).encode("utf-8", "replace")
        sys.stdout.buffer.write(answer + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
