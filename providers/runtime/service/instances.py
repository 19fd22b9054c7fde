"""The sandboxes of the service that callers have in their hands."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from providers.runtime.pool.kept import Kept
from providers.runtime.pool.sandbox import Sandbox
from providers.runtime.service.lines import Line


@dataclass(eq=False)
class Instance:
    """A sandbox in a caller's hands. It runs one job, then it is gone."""

    instance_id: str
    template: str
    sandbox: Sandbox
    line: Line
    client: str = ""
    used: bool = False
    kept: Kept | None = None
    forget: Callable[[asyncio.Future[None]], None] | None = None

    @property
    def runtime(self) -> str:
        return self.sandbox.runtime

    @property
    def sharing(self) -> str:
        return self.sandbox.sharing
