"""Pools at the level `tenant` in tests, and runs of one owner in them."""

from __future__ import annotations

from providers.runtime.pool.pool import PoolSettings
from tests.support.warm_pools import WarmPool

SHARED = PoolSettings(size=1, capacity=4, isolation="tenant", patience=60)


class Pair:
    """Runs of one owner in one and the same sandbox."""

    def __init__(self, pool: WarmPool, owner: str) -> None:
        self._pool = pool
        self._owner = owner
        self.sandboxes: list[int] = []

    def run(self, code: str, **how: object) -> str:
        sandbox = self._pool.acquire(self._owner)
        self.sandboxes.append(sandbox.number)
        try:
            result = self._pool.run_in(sandbox, code, **how)  # type: ignore[arg-type]
        finally:
            self._pool.release(sandbox)
        assert result.exit_code == 0, result.stderr
        return result.stdout

    @property
    def shared_one(self) -> bool:
        return len(set(self.sandboxes)) == 1
