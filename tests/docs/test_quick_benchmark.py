"""What `make bench-quick` calls slower."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from benchmarks.quick import compare


@pytest.mark.parametrize(
    ("ratios", "is_slower"),
    [
        # A machine that was busy in one round, on either side.
        ([1.0, 1.01, 0.99, 1.6], False),
        ([1.2, 1.3, 1.2, 0.7], True),
        # Less than the rounds differ.
        ([1.04, 1.02, 1.03, 1.05], False),
        ([1.1, 1.3, 0.9, 0.95], False),
        ([0.5, 0.6, 0.5, 0.6], False),
        ([1.2], True),
    ],
)
def test_it_is_slower_where_the_rounds_agree(ratios: Sequence[float], is_slower: bool) -> None:
    base = [{"a cell, ms": 10.0} for _ in ratios]
    now = [{"a cell, ms": 10.0 * ratio} for ratio in ratios]
    (found,) = compare(base, now)
    assert found.is_slower is is_slower
    assert found.base == 10.0
