"""The simulation of docs/deployment/capacity.md keeps the laws of queues, and the page has its tables."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks import capacity
from benchmarks.capacity import (
    CASE,
    LEDGER,
    MEASURED,
    REUSED,
    Flow,
    Installation,
    Simulation,
    flows,
    loads,
    plan,
    pods,
    simulate,
    tables,
)
from tests.support.processes import ROOT

PAGE = ROOT / "docs" / "deployment" / "capacity.md"
SECONDS = 60.0
# Long enough for the means to be near to what they are in the end.
LONG = 2000.0


def simulated(flow: Flow, seconds: float, seed: int = 1, **servers: int | None) -> Simulation:
    simulation = Simulation(servers, seed)
    simulation.run([flow], seconds)
    return simulation


def test_utilisation_is_arrivals_times_service_time() -> None:
    simulation = simulated(Flow("job", 20.0, (("desk", 0.1),)), LONG, desk=4)
    assert simulation.reports["desk"].busy(LONG) == pytest.approx(20 * 0.1 / 4, rel=0.03)


def test_the_number_present_is_arrivals_times_stay() -> None:
    """Little's law, at each station of the whole installation."""
    found = simulate(MEASURED, REUSED, plan(MEASURED, REUSED), REUSED.peak, SECONDS)
    for name, report in found.reports.items():
        arrivals = report.arrivals / found.end
        stay = report.stays / report.arrivals
        assert report.area / found.end == pytest.approx(arrivals * stay, rel=1e-6), name


def test_one_server_waits_as_theory_says() -> None:
    """M/M/1: the mean wait is load / (1 - load) times the service time."""
    simulation = simulated(Flow("job", 8.0, (("desk", 0.1),)), LONG, desk=1)
    waits = simulation.reports["desk"].waits
    assert sum(waits) / len(waits) == pytest.approx(0.8 / 0.2 * 0.1, rel=0.15)


def test_nothing_is_lost_or_made() -> None:
    found = simulate(MEASURED, REUSED, plan(MEASURED, REUSED), REUSED.peak, SECONDS)
    assert {name: len(ends) for name, ends in found.ends.items()} == found.started
    assert all(count > 0 for count in found.started.values())
    for report in found.reports.values():
        assert report.arrivals == report.departures == len(report.waits)


def test_each_end_comes_after_its_services() -> None:
    route = (("first", 0.01), ("second", 0.02), ("first", 0.01))
    simulation = simulated(Flow("job", 10.0, route), SECONDS, first=1, second=1)
    served = sum(report.service_seconds for report in simulation.reports.values())
    waited = sum(sum(report.waits) for report in simulation.reports.values())
    assert sum(simulation.ends["job"]) == pytest.approx(served + waited)


@pytest.mark.parametrize("servers", [1, 3])
def test_a_doubled_station_is_half_as_busy(servers: int) -> None:
    flow = Flow("job", 5.0 * servers, (("desk", 0.1),))
    one, two = (simulated(flow, LONG, desk=count) for count in (servers, 2 * servers))
    half = one.reports["desk"].busy(LONG) / 2
    assert two.reports["desk"].busy(LONG) == pytest.approx(half, rel=0.05)


def test_a_station_without_a_bound_has_no_queue() -> None:
    simulation = simulated(Flow("job", 100.0, (("program", 1.0),)), SECONDS, program=None)
    report = simulation.reports["program"]
    assert report.most == 0
    assert not any(report.waits)


def test_a_queue_grows_where_more_arrives_than_is_served() -> None:
    overloaded = simulated(Flow("job", 20.0, (("desk", 0.1),)), SECONDS, desk=1)
    assert overloaded.reports["desk"].most > SECONDS * 10 / 2
    assert overloaded.end > SECONDS * 1.5


def test_a_seed_has_one_outcome() -> None:
    flow = Flow("job", 20.0, (("desk", 0.1), ("other", 0.2)))
    first, again, different = (
        simulated(flow, SECONDS, seed, desk=3, other=6) for seed in (7, 7, 8)
    )
    assert first.reports == again.reports
    assert first.reports != different.reports


def test_the_hours_of_a_day_have_all_its_executions() -> None:
    assert len(CASE.hours) == 24
    day = sum(CASE.rate(hour) * 3600 for hour in range(24))
    assert day == pytest.approx(CASE.executions)


def test_a_plan_leaves_no_station_too_busy_in_the_busiest_hour() -> None:
    for case in (CASE, REUSED):
        planned: Installation = plan(MEASURED, case)
        for station, load in loads(flows(MEASURED, case, case.peak)).items():
            if station in planned.servers:
                assert load / planned.servers[station] <= capacity.MOST_BUSY, station


def test_more_executions_need_no_less_of_anything() -> None:
    twice = replace(CASE, executions=2 * CASE.executions)
    smaller, larger = plan(MEASURED, CASE).servers, plan(MEASURED, twice).servers
    assert all(larger[station] >= count for station, count in smaller.items())
    assert larger[LEDGER] > smaller[LEDGER]


def test_sessions_that_sleep_have_no_pod() -> None:
    assert pods(replace(CASE, awake=0.0)) < pods(replace(CASE, awake=1.0)) - 99_000


def test_the_page_has_the_tables_of_the_program() -> None:
    page = PAGE.read_text(encoding="utf-8")
    for table in tables():
        assert table in page, f"run `python -m benchmarks.capacity`, and put this there:\n{table}"
