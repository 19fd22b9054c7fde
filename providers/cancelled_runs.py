"""Runs that were interrupted before they began: one that comes afterwards must not begin."""

from __future__ import annotations

import threading

from providers.errors import ProviderUnavailable

# So many are remembered. Among them are those that had ended already, which nobody begins again.
REMEMBERED = 256


class CancelledRuns:
    """The names of such runs, the latest of them."""

    def __init__(self) -> None:
        self._names: dict[str, None] = {}
        self._lock = threading.Lock()

    def note(self, run: str) -> None:
        with self._lock:
            self._names[run] = None
            if len(self._names) > REMEMBERED:
                del self._names[next(iter(self._names))]

    def refuse(self, run: str) -> None:
        """Raises ProviderUnavailable for a run that was given up. To be asked before it begins."""
        if run in self._names:
            raise ProviderUnavailable("The run was interrupted before it began.")
