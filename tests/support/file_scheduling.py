"""How files of tests are dealt out to processes, which goes on where one of them has died.

pytest-xdist 3.8 deals out anew what the dead process had done, too. Nothing comes back of that, so
that those who are given it wait for ever, some tests before the end (its issues 1327 and 1378).
"""

from __future__ import annotations

from typing import Any

import pytest
from xdist.scheduler import LoadFileScheduling


class FileScheduling(LoadFileScheduling):  # type: ignore[misc]
    def remove_node(self, node: Any) -> str | None:
        """Deal out what the process has left, without the test that it died of; return that."""
        left = _unfinished(self.assigned_work.pop(node))
        if not left:
            return None
        tests = next(iter(left.values()))
        fatal: str = next(name for name, is_done in tests.items() if not is_done)
        tests[fatal] = True
        self.workqueue.update(_unfinished(left))
        for other in self.assigned_work:
            self._reschedule(other)
        return fatal

    def schedule(self) -> None:
        super().schedule()
        # A process begins a test once it knows the next one.
        for node in self.nodes:
            self._reschedule(node)


def _unfinished(work: dict[str, dict[str, bool]]) -> dict[str, dict[str, bool]]:
    return {name: tests for name, tests in work.items() if not all(tests.values())}


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: Any, log: Any) -> FileScheduling | None:
    """pytest's hook, of the controlling process."""
    return FileScheduling(config, log) if config.getvalue("dist") == "loadfile" else None
