"""How much of a pool one owner may hold, so that there is something left for the next.

An owner may hold four times what is free: alone 13 of 16, two of them 7 each, three of them 4. So
nobody has to know who else there is, or to take anything back (dynamic thresholds, as switches
share their buffers: Choudhury and Hahne, IEEE/ACM Transactions on Networking, 1998). Up to four
sandboxes are all anybody's: to hold one of so few back would cost more than it saves.
"""

from __future__ import annotations

import math
from collections import Counter

TIMES_FREE = 4


class Shares:
    """Counts what each owner holds of the sandboxes of one pool."""

    def __init__(self) -> None:
        self._held: Counter[str] = Counter()

    @property
    def held(self) -> int:
        return self._held.total()

    def give(self, owner: str) -> None:
        self._held[owner] += 1

    def take_back(self, owner: str) -> None:
        self._held[owner] -= 1
        if not self._held[owner]:
            del self._held[owner]

    def more_for(self, owner: str, capacity: int) -> int:
        """How many more of a pool of this capacity the owner may be given now."""
        free = capacity - self._held.total()
        return max(0, math.ceil((TIMES_FREE * free - self._held[owner]) / (TIMES_FREE + 1)))
