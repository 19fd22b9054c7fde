"""How long one tenant waits while another takes what it can get: without bounds and with them.

Forty calls that sleep, then another tenant's call; sixty queued jobs, then another tenant's job.
Without bounds means as it was before there were any: no bound on the greedy tenant, and for the
queue one job at a time in each worker, in the order they came. That order a tenant still has among
its own, so there the other's job is one more of the greedy tenant's.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import tempfile
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.service import Service, running_service

SLEEPERS = 40
JOBS = 60
_PATIENCE = 600


@dataclass(frozen=True)
class Wait:
    """Seconds that the other tenant waited, of each round, and what became of the greedy one's."""

    name: str
    seconds: list[float]
    alone: float
    accepted: int
    refused: int
    refused_seconds: float

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


@dataclass(frozen=True)
class Tenant:
    """Somebody with a key."""

    service: Service
    key: str

    def ask(self, path: str, body: dict[str, object] | None = None) -> tuple[int, Any, float]:
        """Status, answer and seconds."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.service.port}{path}",
            json.dumps(body).encode() if body is not None else None,
            {"X-API-Key": self.key, "Content-Type": "application/json"},
        )
        began = time.perf_counter()
        try:
            with urllib.request.urlopen(request, timeout=_PATIENCE) as answer:
                status, text = answer.status, answer.read()
        except urllib.error.HTTPError as error:
            status, text = error.code, error.read()
        return status, json.loads(text), time.perf_counter() - began

    def run(self, seconds: float, mode: str = "sync") -> tuple[int, Any, float]:
        code = f"import time\ntime.sleep({seconds})" if seconds else "pass"
        return self.ask("/api/v1/executions", {"code": code, "mode": mode, "timeout": 60})

    def wait_for(self, execution_id: str) -> float:
        """Seconds from when it was asked for until it ran."""
        while True:
            _, shown, _ = self.ask(f"/api/v1/executions/{execution_id}")
            if shown["status"] not in ("queued", "running"):
                return float(shown["timings"]["queue_ms"]) / 1000
            time.sleep(0.05)

    def is_idle(self) -> bool:
        return not any(
            self.ask(f"/api/v1/executions?status={status}&limit=1")[1]["results"]
            for status in ("queued", "running")
        )


def sleepers(name: str, greedy: Tenant, other: Tenant, seconds: float, rounds: int) -> Wait:
    """The other's call while forty of the greedy tenant's are under way."""
    alone = statistics.median(other.run(0)[2] for _ in range(5))
    waits, answers = [], []
    for _ in range(rounds):
        with ThreadPoolExecutor(SLEEPERS) as threads:
            futures = [threads.submit(greedy.run, seconds) for _ in range(SLEEPERS)]
            time.sleep(1)
            waits.append(_served(other.run(0)))
            answers += [future.result() for future in futures]
    refused = [took for status, _, took in answers if status != 200]
    return Wait(
        name,
        waits,
        alone,
        (len(answers) - len(refused)) // rounds,
        len(refused) // rounds,
        max(refused, default=0.0),
    )


def jobs(name: str, greedy: Tenant, other: Tenant, seconds: float, rounds: int) -> Wait:
    """The other's job behind sixty of the greedy tenant's."""
    alone = other.wait_for(other.run(0, "async")[1]["id"])
    waits, statuses = [], []
    for _ in range(rounds):
        with ThreadPoolExecutor(10) as threads:
            queued = list(threads.map(lambda _: greedy.run(seconds, "async"), range(JOBS)))
        statuses += [status for status, _, _ in queued]
        waits.append(other.wait_for(other.run(0, "async")[1]["id"]))
        while not greedy.is_idle():
            time.sleep(0.2)
    accepted = statuses.count(202)
    return Wait(name, waits, alone, accepted // rounds, (len(statuses) - accepted) // rounds, 0.0)


def _served(answered: tuple[int, Any, float]) -> float:
    status, answer, seconds = answered
    if status != 200:
        print(f"the other tenant was refused: {answer['error']}", file=sys.stderr)
    return seconds


def measure(options: argparse.Namespace) -> list[Wait]:
    """Both, without bounds and with them, each in a service of its own."""
    config: dict[str, object] = {"launcher": "bubblewrap"}
    rows = []
    for title, bounded in (("without bounds", False), ("with bounds", True)):
        print(f"measuring {title} ...", file=sys.stderr)
        former = {} if bounded else {"Q_THREADS": "1"}
        with (
            tempfile.TemporaryDirectory(prefix="cofferdam-bench-") as folder,
            running_service(Path(folder), config, **former) as service,
        ):
            unbounded = Tenant(service, service.api_key)
            first, second = (_new_tenant(service, slug) for slug in ("greedy", "other"))
            greedy = first if bounded else unbounded
            second.run(0)
            name = f"a call, beside {SLEEPERS} of {options.sleep:g} s, {title}"
            rows.append(sleepers(name, greedy, second, options.sleep, options.rounds))
            name = f"a job, behind {JOBS} of {options.job:g} s, {title}"
            other = second if bounded else greedy
            rows.append(jobs(name, greedy, other, options.job, options.rounds))
    return sorted(rows, key=lambda row: row.name.startswith("a job"))


def _new_tenant(service: Service, slug: str) -> Tenant:
    """With the bounds that a tenant has by default."""
    service.manage("create_tenant", slug)
    return Tenant(service, service.manage("create_api_key", slug, "--name", "bench"))


def table(rows: list[Wait]) -> str:
    names = f"{'alone':>8} {'waited':>8} {'worst':>8} {'ran':>4} {'refused':>8} {'in':>6}"
    header = f"{'seconds':52} {names}"
    lines = [header, "-" * len(header)]
    for row in rows:
        lines.append(
            f"{row.name:52} {row.alone:8.3f} {row.median:8.3f} {max(row.seconds):8.3f} "
            f"{row.accepted:4} {row.refused:8} {row.refused_seconds:6.2f}"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bounds", description=__doc__)
    parser.add_argument("--sleep", type=float, default=5, help="seconds of each call (5)")
    parser.add_argument("--job", type=float, default=1, help="seconds of each queued job (1)")
    parser.add_argument("--rounds", type=int, default=3, help="times each is measured (3)")
    parser.add_argument("--json", type=Path, default=Path("var/bench/bounds.json"))
    options = parser.parse_args()
    rows = measure(options)
    print(table(rows))
    options.json.parent.mkdir(parents=True, exist_ok=True)
    found = {"machine": platform.platform(), "rows": [asdict(row) for row in rows]}
    options.json.write_text(json.dumps(found, indent=2) + "\n")
    print(f"written to {options.json}", file=sys.stderr)


if __name__ == "__main__":
    main()
