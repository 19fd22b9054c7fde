"""Whether the working tree is slower than a commit.

A machine changes its speed within minutes. So both serve at the same time, each round calls one and
then the other, and what counts is the ratio within a round.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from benchmarks.executions import PROGRAM, PYTHON, process_caller
from benchmarks.measure import Call, measure
from benchmarks.service import ROOT, Service, api_caller, http_caller, running_service
from benchmarks.sessions import CELL, opened

SINGLE, CELLS, THROUGHPUT = "a single run, ms", "a cell, ms", "8 callers, ms a run"
# What several rounds agree on, and beyond what the rounds differ among each other.
SLOWER = 1.05

Round = Mapping[str, float]


@dataclass(frozen=True)
class Comparison:
    """One figure of both sides: medians over the rounds, and the ratio within each round."""

    name: str
    base: float
    now: float
    ratios: Sequence[float]

    @property
    def ratio(self) -> float:
        return median(self.ratios)

    @property
    def is_slower(self) -> bool:
        """Whether it is clearly slower: at the median, and in all rounds but one."""
        others = sorted(self.ratios)[1:] or self.ratios
        return self.ratio > SLOWER and min(others) > 1


def compare(base: Sequence[Round], now: Sequence[Round]) -> list[Comparison]:
    """Compare the figures of the rounds, of which each has a figure by each name."""
    return [
        Comparison(
            name,
            median(each[name] for each in base),
            median(each[name] for each in now),
            [later[name] / former[name] for former, later in zip(base, now, strict=True)],
        )
        for name in base[0]
    ]


class Side:
    """One of the two services, with a session whose cells are called."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._session = opened(service)

    def measure(self, calls: int) -> Round:
        """One round: the median of single runs and of cells, and the mean of runs side by side."""
        single = measure(SINGLE, self._run, callers=1, calls=calls)
        cells = measure(CELLS, self._cell, callers=1, calls=calls)
        beside = measure(THROUGHPUT, self._run, callers=8, calls=4 * calls)
        return {
            SINGLE: single.p50_ms,
            CELLS: cells.p50_ms,
            THROUGHPUT: 1000 / beside.per_second,
        }

    def _run(self) -> Call:
        return api_caller(self._service, {"code": PROGRAM}, b'"stdout":"1\\n"')

    def _cell(self) -> Call:
        path = f"/api/v1/sessions/{self._session}/executions"
        headers = {"X-API-Key": self._service.api_key}
        content = json.dumps({"code": CELL}).encode()
        return http_caller(self._service.port, path, content, headers, b'"text/plain":"1"')


@contextmanager
def checkout(commit: str, folder: Path) -> Iterator[Path]:
    """The files of a commit, for as long as they are compared."""
    root = folder / "base"
    archive = subprocess.run(
        ["git", "archive", "--format=tar", commit], cwd=ROOT, check=True, capture_output=True
    ).stdout
    root.mkdir()
    subprocess.run(["tar", "-x", "-C", str(root)], input=archive, check=True)
    yield root


def main() -> None:
    parser = argparse.ArgumentParser(prog="make bench-quick ARGS=...", description=__doc__)
    parser.add_argument("--base", default="HEAD", metavar="COMMIT", help="compared with (HEAD)")
    parser.add_argument("--rounds", type=int, default=8, help="of each side (8)")
    parser.add_argument("--calls", type=int, default=60, help="of a kind in a round (60)")
    options = parser.parse_args()
    bare: list[float] = []
    base: list[Round] = []
    now: list[Round] = []
    with ExitStack() as held:
        folder = Path(held.enter_context(tempfile.TemporaryDirectory(prefix="cofferdam-bench-")))
        root = held.enter_context(checkout(options.base, folder))
        config: dict[str, object] = {"launcher": "bubblewrap", "pool_size": 8}

        def start(name: str, project: Path) -> Side:
            service = running_service(folder / name, config, root=project)
            return Side(held.enter_context(service))

        sides: list[tuple[Callable[[Round], None], Side]] = [
            (base.append, start("data-base", root)),
            (now.append, start("data-now", ROOT)),
        ]
        for number in range(options.rounds):
            print(f"round {number + 1} of {options.rounds} ...", file=sys.stderr)
            command = process_caller([PYTHON, "-c", PROGRAM])
            bare.append(measure("bare", command, callers=1, calls=20).p50_ms)
            for take, side in sides if number % 2 else reversed(sides):
                take(side.measure(options.calls))
    found = compare(base, now)
    print(f"{'':22} {options.base:>12.12} {'now':>8}  ratio, and its range over the rounds")
    for each in found:
        print(
            f"{each.name:22} {each.base:12.2f} {each.now:8.2f}  {each.ratio:.2f}, "
            f"{min(each.ratios):.2f} to {max(each.ratios):.2f}"
            f"{'  SLOWER' if each.is_slower else ''}"
        )
    single = next(each for each in found if each.name == SINGLE)
    print(f"a bare interpreter {median(bare):.2f} ms; a single run {single.now / median(bare):.2f}")
    if any(each.is_slower for each in found):
        sys.exit("The working tree is slower.")


if __name__ == "__main__":
    main()
