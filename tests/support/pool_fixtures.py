"""A pool service that the tests of one module share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.pool_service import PoolService, running


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PoolService]:
    """A service over bubblewrap that a module's tests share."""
    log = tmp_path_factory.mktemp("pool") / "log"
    with running(log, SANDBOX_EXECUTOR_MANAGER_POOL_SIZE="3", SANDBOX_TIMEOUT="2s") as service:
        yield service
