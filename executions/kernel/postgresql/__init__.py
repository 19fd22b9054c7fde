"""PostgreSQL as a database engine of this project (`base.py`), and how long it is waited for."""

from __future__ import annotations

_answer_within: float | None = None


def expect_answers_within(seconds: float | None) -> None:
    """From now on, in this process, a statement that takes longer ends with its connection.

    None, which every process begins with, waits for ever: a migration or a verification may.
    """
    global _answer_within
    _answer_within = seconds


def answer_within() -> float | None:
    return _answer_within
