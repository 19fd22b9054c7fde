"""How far an installation goes: a simulation of its stations, with what was measured here.

An execution visits stations one after the other: web process, database, pool service, API server,
node, ledger. A station has servers that are alike, and one queue in order of arrival. What a server
takes for one visit varies as an exponential around its mean, arrivals are a Poisson process.
`python -m benchmarks.capacity` prints the tables of docs/deployment/capacity.md.

The inputs are figures of one run of the benchmarks (`MEASURED`), a day (`CASE`), and what the
installation has (`Installation`). What is not measured is in the case, and the page says so.
"""

from __future__ import annotations

import argparse
import heapq
import json
import random
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from math import ceil
from pathlib import Path
from typing import Any

_PODS = "control_plane"
_RUNS = "kubernetes"
_DATABASE = "database"


def _figure(benchmark: str, meaning: str) -> Any:
    """Declare a figure, the benchmark that prints it, and what it is."""
    return field(metadata={"benchmark": benchmark, "meaning": meaning})


@dataclass(frozen=True)
class Measured:
    """The figures of one run of the benchmarks. Times are ms of one processor, unless it says so.

    A run is one of many callers, which print a line, in a Pod that is kept and used again.
    """

    web_ms: float = _figure(_RUNS, "web process, a run")
    database_ms: float = _figure(_DATABASE, "PostgreSQL, a run")
    ledger_ms: float = _figure(_DATABASE, "the ledger, a run (by the clock)")
    pool_ms: float = _figure(_RUNS, "pool service, a run")
    api_ms: float = _figure(_RUNS, "API server, a run")
    etcd_ms: float = _figure(_RUNS, "etcd, a run")
    node_ms: float = _figure(_RUNS, "virtual node with runc, a run")
    pool_pod_ms: float = _figure(_RUNS, "pool service, a Pod")
    api_pod_ms: float = _figure(_RUNS, "API server, a Pod")
    etcd_pod_ms: float = _figure(_RUNS, "etcd, a Pod")
    scheduler_pod_ms: float = _figure(_RUNS, "scheduler, a Pod")
    node_pod_ms: float = _figure(_RUNS, "virtual node with runc, a Pod")
    api_patch_ms: float = _figure(_PODS, "API server, a label patch and its event")
    etcd_patch_ms: float = _figure(_PODS, "etcd, a label patch and its event")
    api_object_ms: float = _figure(_PODS, "API server, a custom object: created, status, deleted")
    etcd_object_ms: float = _figure(_PODS, "etcd, a custom object: created, status, deleted")
    renewal_ms: float = _figure(_PODS, "renewal of one session (by the clock)")
    pool_session_mib: float = _figure(_PODS, "MiB of the pool service, an awake session")
    api_session_mib: float = _figure(
        _PODS, "MiB of API server, etcd and controllers, an awake session"
    )
    record_bytes: float = _figure(_DATABASE, "bytes of PostgreSQL, a run with its ledger entry")
    ledger_bytes: float = _figure(_DATABASE, "bytes of the ledger in it")
    log_bytes: float = _figure(_DATABASE, "bytes of PostgreSQL's write-ahead log, a run")

    @classmethod
    def read(cls, folder: Path) -> Measured:
        """Read the figures that the benchmarks have written into a folder.

        What a Pod takes is the difference between a run with a fresh one and a run without.
        """
        runs, pods, database = (
            json.loads((folder / f"{name}.json").read_text()) for name in (_RUNS, _PODS, _DATABASE)
        )
        name = "POST /api/v1/executions, kubernetes, "
        kept, fresh = (runs["processor_ms"][name + each] for each in ("tenant", "execution"))
        control, sessions, run = pods["control_plane"], pods["kept"], database["run"]
        patch, thing = control["a patch, 16 callers"], control["a custom object"]
        memory = sessions["MiB more with the sessions"]
        ends = [each for each in database["rows"] if each["name"].startswith("the end of a record")]
        [locked] = [each for each in database["rows"] if "with the ledger's lock" in each["name"]]
        figures = {
            "web_ms": kept["web"],
            "database_ms": run["ms of the processors a run"]["PostgreSQL"],
            # Other work on the machine makes both longer.
            "ledger_ms": min(locked["p50_ms"], *(1000 / each["per_second"] for each in ends)),
            "pool_ms": kept["pool"],
            "api_ms": kept["API server"],
            "etcd_ms": kept["etcd"],
            "node_ms": kept["nodes"],
            "pool_pod_ms": fresh["pool"] - kept["pool"],
            "api_pod_ms": fresh["API server"] - kept["API server"],
            "etcd_pod_ms": fresh["etcd"] - kept["etcd"],
            "scheduler_pod_ms": fresh["scheduler"] - kept["scheduler"],
            "node_pod_ms": fresh["nodes"] - kept["nodes"],
            "api_patch_ms": patch["API server"],
            "etcd_patch_ms": patch["etcd"],
            "api_object_ms": thing["API server"],
            "etcd_object_ms": thing["etcd"],
            "renewal_ms": sessions["ms for one renewed session"],
            "pool_session_mib": memory["pool"] / sessions["sessions"],
            "api_session_mib": sum(memory[each] for each in ("API server", "etcd", "controllers"))
            / sessions["sessions"],
            "record_bytes": run["bytes a run"],
            "ledger_bytes": run["bytes a run, by table"]["executions_ledgerentry"],
            "log_bytes": run["bytes of log a run"],
        }
        return cls(**{name: round(value, 2) for name, value in figures.items()})


MEASURED = Measured(
    web_ms=6.81,
    database_ms=4.07,
    ledger_ms=1.6,
    pool_ms=2.42,
    api_ms=3.34,
    etcd_ms=0.52,
    node_ms=6.51,
    pool_pod_ms=12.93,
    api_pod_ms=21.69,
    etcd_pod_ms=5.55,
    scheduler_pod_ms=3.48,
    node_pod_ms=78.84,
    api_patch_ms=3.35,
    etcd_patch_ms=0.41,
    api_object_ms=6.36,
    etcd_object_ms=1.03,
    renewal_ms=0.58,
    pool_session_mib=0.47,
    api_session_mib=0.09,
    record_bytes=3976,
    ledger_bytes=1862,
    log_bytes=7369,
)


@dataclass(frozen=True)
class Case:
    """A day: what is asked of an installation, and how it is spread over the hours.

    `cells` is the share of the executions that run in a session, which keeps its Pod. `awake` is
    the share of the open sessions that have a Pod: the others sleep. `seconds` is how long a
    program lasts, of which it computes for `compute_seconds`. `runs_a_pod` is how many single runs
    a Pod serves before it is replaced: 1 where each has a fresh one. `objects_a_pod` is how many
    custom objects stand for a Pod: claim and sandbox in a cluster with agent-sandbox.
    """

    executions: int = 10_000_000
    sessions: int = 100_000
    cells: float = 0.5
    awake: float = 1.0
    session_hours: float = 4.0
    seconds: float = 1.0
    compute_seconds: float = 0.2
    runs_a_pod: float = 1.0
    objects_a_pod: int = 0
    # Relative to the mean hour: a quiet night, and twice the mean at 15 o'clock.
    hours: tuple[float, ...] = (
        *(0.4, 0.3, 0.2, 0.2, 0.2, 0.3, 0.5, 0.8),
        *(1.2, 1.6, 1.8, 1.7, 1.5, 1.7, 1.9, 2.0),
        *(1.8, 1.6, 1.2, 1.0, 0.8, 0.6, 0.4, 0.3),
    )

    @property
    def peak(self) -> int:
        """The hour with the most executions."""
        return self.hours.index(max(self.hours))

    def rate(self, hour: int) -> float:
        """Return the executions a second in an hour."""
        return self.executions / 86_400 * self.hours[hour] * 24 / sum(self.hours)

    def pod_rate(self, hour: int) -> float:
        """Return the Pods that are created a second in an hour: for runs, and for sessions."""
        single = self.rate(hour) * (1 - self.cells) / self.runs_a_pod
        weight = self.hours[hour] * 24 / sum(self.hours)
        return single + self.sessions / (self.session_hours * 3600) * weight


# How many runs of a tenant a Pod serves where it is used again.
REUSES = 100
CASE = Case()
REUSED = Case(awake=0.1, runs_a_pod=REUSES)

# A lease of a session is ten minutes, and its Pod is told of it when a third of that is over.
LEASE_SECONDS = 600.0
NOTE_SECONDS = LEASE_SECONDS / 3
# How often a kubelet renews the Lease of its node.
SIGN_SECONDS = 10.0
# Of a pool service, whose *Max containers* is 1000: the rest is for single runs.
SESSIONS_A_POOL = 800
# What Kubernetes is made for: a node, and a cluster.
PODS_A_NODE, PODS_A_CLUSTER = 110, 150_000
# What a Pod requests: 256 MiB for its program, and 64 for its supervisor.
POD_MIB = 320
# Beyond it waiting times grow faster than the load.
MOST_BUSY = 0.7

WEB, DATABASE, LEDGER, POOL = "web processes", "database", "ledger", "pool services"
API, ETCD, SCHEDULER, NODES = "API servers", "etcd", "scheduler", "nodes"
PROGRAM = "program"
# What there can be more of. Of etcd's leader and of the scheduler one processor is counted.
GROWTH = {
    WEB: "more processes",
    DATABASE: "more processors of one primary",
    LEDGER: "one in each installation",
    POOL: "more services",
    API: "more servers, more processors",
    ETCD: "one leader in each cluster",
    SCHEDULER: "one in each cluster",
    NODES: "more nodes",
}


@dataclass(frozen=True)
class Flow:
    """What arrives at a rate a second, and the stations that it visits, with seconds at each."""

    name: str
    rate: float
    route: tuple[tuple[str, float], ...]


@dataclass(frozen=True)
class Installation:
    """How many servers each station has: processes, or processors of the database, the API servers
    and the nodes."""

    servers: Mapping[str, int]


def flows(measured: Measured, case: Case, hour: int) -> list[Flow]:
    """Return what arrives in an hour, and where it goes."""
    m = measured
    execution = (
        (WEB, m.web_ms / 2000),
        (DATABASE, m.database_ms / 1000),
        (POOL, m.pool_ms / 1000),
        (API, m.api_ms / 1000),
        (ETCD, m.etcd_ms / 1000),
        (NODES, m.node_ms / 1000 + case.compute_seconds),
        (PROGRAM, case.seconds - case.compute_seconds),
        (LEDGER, m.ledger_ms / 1000),
        (WEB, m.web_ms / 2000),
    )
    pod = (
        (POOL, m.pool_pod_ms / 1000),
        (API, (m.api_pod_ms + case.objects_a_pod * m.api_object_ms) / 1000),
        (ETCD, (m.etcd_pod_ms + case.objects_a_pod * m.etcd_object_ms) / 1000),
        (SCHEDULER, m.scheduler_pod_ms / 1000),
        (NODES, m.node_pod_ms / 1000),
    )
    patch = ((API, m.api_patch_ms / 1000), (ETCD, m.etcd_patch_ms / 1000))
    return [
        Flow("execution", case.rate(hour), execution),
        Flow("Pod", case.pod_rate(hour), pod),
        Flow("note of a lease", case.sessions * case.awake / NOTE_SECONDS, patch),
        Flow("sign of a node", nodes(case) / SIGN_SECONDS, patch),
    ]


@dataclass
class Report:
    """What one station did: visits, their seconds, and how many were there.

    `area` is the time integral of the number present, `stays` the sum of the visits' seconds;
    `waits` has the seconds that each visit waited, `most` is the longest queue.
    """

    servers: int | None
    arrivals: int = 0
    departures: int = 0
    service_seconds: float = 0.0
    area: float = 0.0
    stays: float = 0.0
    most: int = 0
    waits: list[float] = field(default_factory=list)

    def busy(self, seconds: float) -> float:
        """Return the share of its servers' time in which they served, 0 without a bound."""
        return self.service_seconds / (self.servers * seconds) if self.servers else 0.0


@dataclass
class _Visit:
    flow: Flow
    began: float
    step: int = 0
    arrived: float = 0.0


class _Station:
    """Servers that are alike, and one queue. With None there is a server for everybody."""

    def __init__(self, servers: int | None) -> None:
        self.report = Report(servers)
        self.queue: deque[_Visit] = deque()
        self.in_service = 0
        self._present, self._changed_at = 0, 0.0

    def count(self, now: float, change: int) -> None:
        self.report.area += self._present * (now - self._changed_at)
        self._present += change
        self._changed_at = now

    @property
    def has_free_server(self) -> bool:
        return self.report.servers is None or self.in_service < self.report.servers


class Simulation:
    """Runs flows through stations for some seconds, then until nothing is left in them.

    `ends` has the seconds from arrival to end of what each flow sent, `end` the moment of the last.
    """

    def __init__(self, servers: Mapping[str, int | None], seed: int = 1) -> None:
        self._stations = {name: _Station(count) for name, count in servers.items()}
        self._random = random.Random(seed)
        self._events: list[tuple[float, int, Flow | None, _Visit | None]] = []
        self._number = 0
        self.started: dict[str, int] = {}
        self.ends: dict[str, list[float]] = {}
        self.end = 0.0

    @property
    def reports(self) -> dict[str, Report]:
        return {name: station.report for name, station in self._stations.items()}

    def run(self, arriving: Sequence[Flow], seconds: float) -> dict[str, Report]:
        """Simulate so many seconds of arrivals. Return what each station did."""
        for each in arriving:
            self.started[each.name], self.ends[each.name] = 0, []
            if each.rate > 0:
                self._expect(self._random.expovariate(each.rate), each, None)
        while self._events:
            now, _, flow, visit = heapq.heappop(self._events)
            if visit is not None:
                self._depart(visit, now)
                self.end = now
            elif flow is not None and now < seconds:
                self._expect(now + self._random.expovariate(flow.rate), flow, None)
                self.started[flow.name] += 1
                self._arrive(_Visit(flow, now), now)
        return self.reports

    def _expect(self, moment: float, flow: Flow | None, visit: _Visit | None) -> None:
        self._number += 1
        heapq.heappush(self._events, (moment, self._number, flow, visit))

    def _arrive(self, visit: _Visit, now: float) -> None:
        station = self._stations[visit.flow.route[visit.step][0]]
        visit.arrived = now
        station.count(now, 1)
        station.report.arrivals += 1
        if station.has_free_server:
            self._serve(station, visit, now)
        else:
            station.queue.append(visit)
            station.report.most = max(station.report.most, len(station.queue))

    def _serve(self, station: _Station, visit: _Visit, now: float) -> None:
        mean = visit.flow.route[visit.step][1]
        seconds = self._random.expovariate(1 / mean) if mean > 0 else 0.0
        station.in_service += 1
        station.report.service_seconds += seconds
        station.report.waits.append(now - visit.arrived)
        self._expect(now + seconds, None, visit)

    def _depart(self, visit: _Visit, now: float) -> None:
        station = self._stations[visit.flow.route[visit.step][0]]
        station.count(now, -1)
        station.in_service -= 1
        station.report.departures += 1
        station.report.stays += now - visit.arrived
        if station.queue:
            self._serve(station, station.queue.popleft(), now)
        visit.step += 1
        if visit.step < len(visit.flow.route):
            self._arrive(visit, now)
        else:
            self.ends[visit.flow.name].append(now - visit.began)


def loads(arriving: Sequence[Flow]) -> dict[str, float]:
    """Return how many servers of each station are busy on average: arrivals x service time."""
    found: dict[str, float] = {}
    for flow in arriving:
        for station, seconds in flow.route:
            found[station] = found.get(station, 0.0) + flow.rate * seconds
    return found


def plan(measured: Measured, case: Case) -> Installation:
    """Return what the busiest hour of a case needs, where no server may be too busy."""
    needed = loads(flows(measured, case, case.peak))
    servers = {name: ceil(load / MOST_BUSY) for name, load in needed.items() if name != PROGRAM}
    servers[POOL] = max(servers[POOL], ceil(case.sessions * case.awake / SESSIONS_A_POOL))
    clusters = max(servers[ETCD], servers[SCHEDULER], ceil(pods(case) / PODS_A_CLUSTER))
    return Installation({**servers, ETCD: clusters, SCHEDULER: clusters})


def pods(case: Case) -> int:
    """Return how many Pods there are at once in the busiest hour: of awake sessions, and of runs
    that last, with as many warm ones."""
    running = case.rate(case.peak) * (1 - case.cells) * case.seconds
    return ceil(case.sessions * case.awake + 2 * running)


def nodes(case: Case) -> int:
    """Return how many nodes that is, by the number of Pods on each."""
    return ceil(pods(case) / PODS_A_NODE)


def simulate(
    measured: Measured, case: Case, installation: Installation, hour: int, seconds: float
) -> Simulation:
    """Simulate some seconds of an hour of a case."""
    servers: dict[str, int | None] = {**installation.servers, PROGRAM: None}
    simulation = Simulation(servers, seed=hour)
    simulation.run(flows(measured, case, hour), seconds)
    return simulation


# The tables of the page.

PEAK_SECONDS, HOUR_SECONDS = 60.0, 20.0


def tables() -> Iterator[str]:
    """Return the tables of the page, as Markdown."""
    yield measured_table(MEASURED)
    yield ends_table(MEASURED)
    yield case_table(MEASURED)
    yield peak_table(MEASURED, REUSED)
    yield day_table(MEASURED, REUSED)


def measured_table(measured: Measured) -> str:
    rows = [
        (
            each.metadata["meaning"],
            _number(getattr(measured, each.name)),
            each.metadata["benchmark"],
        )
        for each in fields(Measured)
    ]
    return _table(("ms, or what the line says", "measured", "by `benchmarks.`"), rows)


def ends_table(measured: Measured) -> str:
    """At which rate one server of each station has no time left, and how it grows."""
    one = Case(86_400, sessions=0, cells=0.0, compute_seconds=0.0, hours=(1.0,) * 24)
    reused, claimed = replace(one, runs_a_pod=REUSES), replace(one, objects_a_pod=2)
    # Without what nodes and sessions ask for by themselves.
    found = [loads(flows(measured, each, 0)[:2]) for each in (reused, one, claimed)]
    rows = [
        (station, *(_rate(each[station]) for each in found), growth)
        for station, growth in GROWTH.items()
    ]
    names = ("one of", f"{REUSES} runs in a Pod", "fresh Pods", "fresh Pods by claims", "grows by")
    return _table(names, rows)


def _rate(load: float) -> str:
    return f"{1 / load:,.0f}"


def case_table(measured: Measured) -> str:
    """What the case needs, with fresh Pods and all sessions awake, and as the page advises."""
    columns = [_needs(measured, case) for case in (CASE, REUSED)]
    rows = [(name, columns[0][name], columns[1][name]) for name in columns[0]]
    return _table(("", "a fresh Pod each, all sessions awake", "reused Pods, 10 % awake"), rows)


def _needs(measured: Measured, case: Case) -> dict[str, str]:
    servers = plan(measured, case).servers
    awake = case.sessions * case.awake
    day = case.executions
    return {
        "executions a second, busiest hour": f"{case.rate(case.peak):.0f}",
        "Pods created a second in that hour": f"{case.pod_rate(case.peak):.1f}",
        "Pods at once": f"{pods(case):,}",
        "web processes": f"{servers[WEB]:,}",
        "processors of PostgreSQL": f"{servers[DATABASE]:,}",
        "installations, by the ledger": f"{servers[LEDGER]:,}",
        "pool services": f"{servers[POOL]:,}",
        "clusters": f"{servers[ETCD]:,}",
        "processors of all API servers": f"{servers[API]:,}",
        "GiB of API servers and etcd, for sessions": _gib(awake * measured.api_session_mib),
        "GiB of pool services, for sessions": _gib(awake * measured.pool_session_mib),
        "processors of the nodes": f"{servers[NODES]:,}",
        "TiB of memory that Pods request": f"{pods(case) * POD_MIB / 1024**2:.1f}",
        "nodes, at 110 Pods each": f"{nodes(case):,}",
        "GB of PostgreSQL a day": f"{day * measured.record_bytes / 1e9:.0f}",
        "of it the ledger": f"{day * measured.ledger_bytes / 1e9:.0f}",
        "GB of write-ahead log a day": f"{day * measured.log_bytes / 1e9:.0f}",
        "patches of leases a second": f"{awake / NOTE_SECONDS:.0f}",
        "seconds of a round that renews all sessions": (
            f"{awake * measured.renewal_ms / 1000:.0f}"
        ),
    }


def peak_table(measured: Measured, case: Case) -> str:
    """A minute of the busiest hour, station by station."""
    found = simulate(measured, case, plan(measured, case), case.peak, PEAK_SECONDS)
    rows = []
    for name, report in found.reports.items():
        waits = sorted(report.waits)
        rows.append(
            (
                name,
                "any" if report.servers is None else f"{report.servers:,}",
                f"{report.busy(PEAK_SECONDS):.0%}" if report.servers else "",
                f"{report.area / found.end:.1f}",
                _ms(_percentile(waits, 0.5)),
                _ms(_percentile(waits, 0.99)),
                str(report.most),
            )
        )
    names = ("station", "servers", "busy", "present", "wait p50 ms", "p99", "longest queue")
    return _table(names, rows)


def day_table(measured: Measured, case: Case) -> str:
    """Some seconds of every third hour: how busy it is, and how long executions take."""
    installation = plan(measured, case)
    rows = []
    for hour in range(7, 24, 4):
        found = simulate(measured, case, installation, hour, HOUR_SECONDS)
        ends = sorted(found.ends["execution"])
        busy = {name: report.busy(HOUR_SECONDS) for name, report in found.reports.items()}
        busiest = max(busy, key=lambda name: busy[name])
        rows.append(
            (
                f"{hour}:00",
                f"{found.started['execution'] / HOUR_SECONDS:.0f}",
                f"{busiest}, {busy[busiest]:.0%}",
                f"{_percentile(ends, 0.5):.2f}",
                f"{_percentile(ends, 0.99):.2f}",
            )
        )
    return _table(("hour", "executions a second", "busiest", "s at p50", "p99"), rows)


def _percentile(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))] if ordered else 0.0


def _gib(mebibytes: float) -> str:
    return f"{mebibytes / 1024:.0f}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.1f}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:g}"


def _table(names: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [names, ["---"] * len(names), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.capacity", description=__doc__)
    parser.add_argument(
        "--read", type=Path, help="print MEASURED as the benchmarks have written it into a folder"
    )
    options = parser.parse_args()
    if options.read:
        print(f"MEASURED = {Measured.read(options.read)}")
        return
    for each in tables():
        print(f"{each}\n")


if __name__ == "__main__":
    main()
