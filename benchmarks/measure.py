"""Latency and throughput of anything that can be called, and how they are shown."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path

from benchmarks.processors import stolen_ms

Call = Callable[[], None]


@dataclass(frozen=True)
class Figures:
    """One row: milliseconds per call, and calls per second of all callers together.

    Of calls after pauses also how many had a whole machine: the kernel counted no time as stolen.
    """

    name: str
    callers: int
    calls: int
    p50_ms: float
    p95_ms: float
    p99_ms: float
    max_ms: float
    per_second: float
    paused: bool = False
    undisturbed: Figures | None = None


def measure(
    name: str,
    make_caller: Callable[[], Call],
    *,
    callers: int,
    calls: int,
    pause: float = 0,
    in_turn: Call | None = None,
) -> Figures:
    """Time `calls` calls, spread over `callers` threads that each call back to back.

    `make_caller` is called in each thread: it opens what one caller keeps open. Two calls per
    caller go before, uncounted. Before each call a caller waits for `pause` seconds. `in_turn` is
    what else is called, after the same pause, between one call and the next.
    """
    durations: list[float] = []
    undisturbed: list[float] = []
    failures: list[BaseException] = []
    ready = threading.Barrier(callers + 1)

    def work() -> None:
        try:
            call = make_caller()
            call()
            call()
            ready.wait()
            mine: list[float] = []
            for _ in range(calls // callers):
                if in_turn:
                    time.sleep(pause)
                    in_turn()
                time.sleep(pause)
                stolen = stolen_ms() if pause else 0
                began = time.perf_counter()
                call()
                mine.append((time.perf_counter() - began) * 1000)
                if pause and stolen_ms() == stolen:
                    undisturbed.append(mine[-1])
            durations.extend(mine)
        except BaseException as error:
            failures.append(error)
            ready.abort()

    threads = [threading.Thread(target=work) for _ in range(callers)]
    for thread in threads:
        thread.start()
    try:
        ready.wait()
        began = time.perf_counter()
    except threading.BrokenBarrierError:
        began = float("nan")
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - began
    if failures:
        raise failures[0]
    row = percentiles(name, callers, durations, seconds, paused=pause > 0)
    if not undisturbed:
        return row
    alone = percentiles("  of these, with nothing stolen", callers, undisturbed, paused=True)
    return replace(row, undisturbed=alone)


def percentiles(
    name: str,
    callers: int,
    durations: list[float],
    seconds: float | None = None,
    *,
    paused: bool = False,
) -> Figures:
    """The row of so many calls in milliseconds. Without `seconds` they came one by one."""
    durations = sorted(durations)
    seconds = seconds or sum(durations) / 1000

    def percentile(share: float) -> float:
        return durations[min(len(durations) - 1, int(len(durations) * share))]

    return Figures(
        name,
        callers,
        len(durations),
        round(percentile(0.50), 2),
        round(percentile(0.95), 2),
        round(percentile(0.99), 2),
        round(durations[-1], 2),
        round(len(durations) / seconds, 1),
        paused,
    )


def table(rows: list[Figures], baseline: Figures, paused: Figures | None = None) -> str:
    """The rows as text; the last column is the median as a multiple of the baseline's.

    `paused` is the baseline for what was called after pauses, which is slower for being so.
    """
    header = (
        f"{'':44} {'callers':>7} {'p50':>8} {'p95':>8} {'p99':>8} {'max':>8} {'per s':>7}  p50 x"
    )
    lines = [header, "-" * len(header)]
    for row in chain.from_iterable((row, row.undisturbed) for row in rows):
        if row is None:
            continue
        ratio = row.p50_ms / (paused if paused and row.paused else baseline).p50_ms
        lines.append(
            f"{row.name:44} {row.callers:7} {row.p50_ms:8.2f} {row.p95_ms:8.2f} {row.p99_ms:8.2f} "
            f"{row.max_ms:8.1f} {row.per_second:7.1f}  {ratio:.2f}"
        )
    return "\n".join(lines)


def write_json(path: Path, rows: list[Figures], extra: dict[str, object]) -> None:
    """Keep a run for a script to read."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**extra, "rows": [asdict(row) for row in rows]}, indent=2) + "\n")
