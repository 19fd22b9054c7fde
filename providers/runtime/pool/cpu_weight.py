"""Sandboxes that are being made, or are over, yield the processors to those that run something.

By the kernel's own scheduling: every sandbox's group has a weight, which is small unless something
of a caller's runs in it. The group above them has the sum of theirs, so that beside the service a
sandbox counts like one process, however many there are. Nothing is held back while a processor has
nothing else to do.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

# By version of cgroups: the file, the weight of one that runs (the kernel's default), that of one
# that yields, and the largest that the kernel takes.
_FILES = {1: ("cpu.shares", 1024, 128, 262_144), 2: ("cpu.weight", 100, 12, 10_000)}


class Weights:
    """Those of the groups below `parent`."""

    def __init__(self, parent: Path, version: int) -> None:
        """Raises OSError where the kernel weighs nothing there."""
        self.parent = parent
        self._name, self._full, self._small, self._most = _FILES[version]
        self._yields: dict[Path, bool] = {}
        # Until there is a pool, somebody waits for each: it is tried whether any can be made.
        self._hurried = True
        self._sum = 0
        (parent / self._name).write_text(str(self._full))

    def add(self, group: Path) -> None:
        """A new group, which yields from the start."""
        self._yields[group] = True
        self._weigh(group)

    def set(self, group: Path, *, yields: bool) -> None:
        """Whether this one yields, from now on."""
        if self._yields.get(group, yields) != yields:
            self._yields[group] = yields
            self._weigh(group)

    def hurry(self, *, is_wanted: bool) -> None:
        """While somebody waits for what is being made, nothing yields."""
        if is_wanted != self._hurried:
            self._hurried = is_wanted
            for group in [each for each, yields in self._yields.items() if yields]:
                self._weigh(group)

    def forget(self, group: Path) -> None:
        """One that is about to be removed."""
        if self._yields.pop(group, None) is not None:
            self._weigh_parent()

    def _weigh(self, group: Path) -> None:
        # What has ended meanwhile weighs nothing.
        with contextlib.suppress(OSError):
            (group / self._name).write_text(str(self._weight(group)))
        self._weigh_parent()

    def _weight(self, group: Path) -> int:
        yields = self._yields[group] and not self._hurried
        return self._small if yields else self._full

    def _weigh_parent(self) -> None:
        total = sum(self._weight(group) for group in self._yields)
        total = min(self._most, max(self._small, total))
        if total != self._sum:
            self._sum = total
            with contextlib.suppress(OSError):
                (self.parent / self._name).write_text(str(total))
