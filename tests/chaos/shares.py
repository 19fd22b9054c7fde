"""What each of many tenants had: never more than its bound, as much as the others, and no memory."""

from __future__ import annotations

import statistics
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tests.chaos.callers import Call
from tests.chaos.hosts import Host
from tests.chaos.verdict import Verdict

SAMPLE_SECONDS = 2.0
# How far a tenant's share may be from the average one, once each has had so many answers: with
# fewer, chance alone reaches so far.
MOST_UNFAIR, LEAST_CALLS = 0.2, 100
# What the largest process of a kind may be, of what it was before; with fewer samples, a start and
# its end are compared.
MOST_GROWTH, LEAST_SAMPLES = 1.25, 60

_PAGE_KIB = 4


class Memory:
    """The resident size of the largest process of each kind, looked at every few seconds."""

    def __init__(self, hosts: Sequence[Host]) -> None:
        self._hosts = hosts
        self._goes_on = True
        self._sizes: dict[str, list[int]] = {}
        self._thread = threading.Thread(target=self._work, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._goes_on = False
        self._thread.join(10)

    def thirds(self, kind: str) -> tuple[int, int] | None:
        """KiB, as the median of the second and of the last third; None with too few samples."""
        sizes = self._sizes.get(kind, [])
        if len(sizes) < LEAST_SAMPLES:
            return None
        third = len(sizes) // 3
        return int(statistics.median(sizes[third:-third])), int(statistics.median(sizes[-third:]))

    def _work(self) -> None:
        while self._goes_on:
            for host in self._hosts:
                for kind, pids in host.processes().items():
                    if size := max(map(_resident_kib, pids)):
                        self._sizes.setdefault(kind, []).append(size)
            time.sleep(SAMPLE_SECONDS)


def judge_shares(
    verdict: Verdict,
    calls: Sequence[Call],
    most_running: Counter[str],
    max_running: int,
    memory: Memory,
) -> None:
    """`most_running` is what was seen of each tenant at once, `max_running` what it may have."""
    over = {slug: most for slug, most in most_running.items() if most > max_running}
    verdict.figures["most at once of a tenant"] = (
        f"{max(most_running.values(), default=0)} of {max_running}"
    )
    verdict.wrong += [f"{slug} had {most} at once" for slug, most in over.items()]
    served = Counter({call.tenant: 0 for call in calls})
    served.update(call.tenant for call in calls if call.outcome == "succeeded")
    average = statistics.mean(served.values())
    furthest = max(abs(number - average) for number in served.values()) / average if average else 0
    verdict.figures["succeeded for each tenant"] = (
        f"{min(served.values())} to {max(served.values())}, {furthest:.0%} from the average"
    )
    if average >= LEAST_CALLS and furthest > MOST_UNFAIR:
        verdict.wrong.append(f"a tenant's share was {furthest:.0%} from the average")
    for kind in ("web", "worker"):
        if (thirds := memory.thirds(kind)) is None:
            continue
        verdict.figures[f"memory of {kind}"] = f"{thirds[0]} KiB, then {thirds[1]} KiB"
        if thirds[1] > thirds[0] * MOST_GROWTH:
            verdict.wrong.append(f"{kind} grew from {thirds[0]} to {thirds[1]} KiB")


def _resident_kib(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE_KIB
    except OSError:
        return 0
