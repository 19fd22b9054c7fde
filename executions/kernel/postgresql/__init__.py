"""PostgreSQL as a database engine of this project (`base.py`), how long it is waited for, and the
statements that it sends together with others.
"""

from __future__ import annotations

_answer_within: float | None = None


class DeferredStatement(str):
    """SQL of a statement whose result is not read: a lock, or the last INSERT of a transaction.

    Within a transaction PostgreSQL gets it together with the next statement, or with COMMIT, which
    saves a round trip. What it raises is raised there. Every other database executes it at once.
    """

    __slots__ = ()


def expect_answers_within(seconds: float | None) -> None:
    """From now on, in this process, a statement that takes longer ends with its connection.

    None, which every process begins with, waits for ever: a migration or a verification may.
    """
    global _answer_within
    _answer_within = seconds


def answer_within() -> float | None:
    return _answer_within
