"""No owner's callers hold a whole pool: whoever comes next finds a sandbox."""

from __future__ import annotations

import time

from hypothesis import given
from hypothesis import strategies as st

from providers.runtime.pool.pool import PoolSettings
from providers.runtime.pool.shelf import Shares
from tests.conftest import require
from tests.support.warm_pools import WarmPool


def filled(shares: Shares, owner: str, capacity: int) -> int:
    """How many this owner gets, one after the other."""
    number = 0
    while shares.more_for(owner, capacity):
        shares.give(owner)
        number += 1
    return number


def test_what_an_owner_may_hold_shrinks_with_what_others_hold() -> None:
    shares = Shares()
    assert [filled(shares, owner, 16) for owner in ("first", "second", "third", "fourth")] == [
        *(13, 3, 0, 0)
    ]
    shares = Shares()
    for _ in range(4):
        for owner in ("first", "second", "third"):
            assert shares.more_for(owner, 16)
            shares.give(owner)
    assert shares.more_for("fourth", 16)


@given(st.integers(1, 4))
def test_a_small_pool_is_anybodys(capacity: int) -> None:
    assert filled(Shares(), "only", capacity) == capacity


@given(
    st.integers(1, 64),
    st.lists(st.tuples(st.sampled_from("abcde"), st.booleans()), max_size=200),
)
def test_while_one_is_free_a_newcomer_gets_it(capacity: int, asked: list[tuple[str, bool]]) -> None:
    shares = Shares()
    held: list[str] = []
    for owner, comes in asked:
        if comes and (more := shares.more_for(owner, capacity)):
            assert more <= capacity - len(held)
            shares.give(owner)
            held.append(owner)
        elif not comes and owner in held:
            shares.take_back(owner)
            held.remove(owner)
        assert len(held) <= capacity
        assert (shares.more_for("newcomer", capacity) > 0) == (len(held) < capacity)
        # A lowered capacity takes nothing back and gives nothing out.
        assert shares.more_for(owner, min(len(held), capacity)) == 0


def test_the_rest_of_a_greedy_owners_callers_wait_beside_a_warm_sandbox() -> None:
    require("bwrap")
    with WarmPool(PoolSettings(size=1, capacity=5, patience=60)) as pool:
        held = [pool.acquire("greedy") for _ in range(4)]
        fifth = pool.in_background(pool.acquire, "greedy")
        pool.settle(idle=1, waiting=1)

        began = time.monotonic()
        modest = pool.acquire("modest")
        assert time.monotonic() - began < 20
        pool.release(modest)
        pool.settle(idle=1, waiting=1)
        assert not fifth.done()

        pool.release(held.pop())
        held.append(fifth.result(60))
        for sandbox in held:
            pool.release(sandbox)


def test_a_pool_that_grows_serves_who_waited_for_a_share() -> None:
    require("bwrap")
    with WarmPool(PoolSettings(size=1, capacity=5, patience=60)) as pool:
        held = [pool.acquire("greedy") for _ in range(4)]
        fifth = pool.in_background(pool.acquire, "greedy")
        pool.settle(idle=1, waiting=1)
        pool.resize(PoolSettings(size=1, capacity=10, patience=60))
        for sandbox in [*held, fifth.result(60)]:
            pool.release(sandbox)
