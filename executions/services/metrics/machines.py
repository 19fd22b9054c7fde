"""Pools and hosts, as each process last said with its beat, and as services said of theirs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from executions.services.metrics.exposition import Family

_STATES = ("busy", "idle", "kept", "creating", "ending")


def of_pools(processes: list[dict[str, Any]], health: list[dict[str, Any]]) -> Iterator[Family]:
    """`process` is who has the pool: empty for a service's, which all processes share."""
    capacity = Family("cofferdam_pool_capacity", "gauge", "Maximum number of sandboxes of a pool.")
    sandboxes = Family("cofferdam_pool_sandboxes", "gauge", "Sandboxes of a pool, by state.")
    waiting = Family("cofferdam_pool_waiting", "gauge", "Callers that wait for a sandbox.")
    started = Family("cofferdam_pool_started_total", "counter", "Sandboxes started.")
    failed = Family("cofferdam_pool_start_failures_total", "counter", "Starts that failed.")
    restarts = Family(
        "cofferdam_pool_restarts_total", "counter", "Sandboxes that ended unused and were replaced."
    )
    refused = Family(
        "cofferdam_pool_refused_total", "counter", "Callers refused because the pool was full."
    )
    creation = Family(
        "cofferdam_pool_creation_seconds",
        "gauge",
        "Time to make a sandbox: median of the last 100.",
    )
    runtime = Family("cofferdam_pool_runtime_info", "gauge", "Runtime that isolates the sandboxes.")
    for provider, process, found in _pools(processes, health):
        labels = {"provider": provider, "process": process}
        capacity.add(found.get("capacity"), **labels)
        for state in _STATES:
            sandboxes.add(found.get(state), **labels, state=state)
        waiting.add(found.get("waiting"), **labels)
        started.add(found.get("started"), **labels)
        failed.add(found.get("failed"), **labels)
        restarts.add(found.get("restarts"), **labels)
        refused.add(found.get("refused"), **labels)
        milliseconds = found.get("creation_ms")
        creation.add(None if milliseconds is None else milliseconds / 1000, **labels)
        if "runtime" in found:
            runtime.add(1, **labels, runtime=found["runtime"])
    yield from (capacity, sandboxes, waiting, started, failed, restarts, refused, creation, runtime)


def _pools(
    processes: list[dict[str, Any]], health: list[dict[str, Any]]
) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for row in processes:
        pools = (row["figures"] or {}).get("pools", {})
        for provider, found in sorted(pools.items()):
            yield provider, f"{row['instance']} {row['kind']} {row['pid']}", found
    for row in health:
        if "capacity" in (row["figures"] or {}):
            yield row["provider_id"], "", row["figures"]


def of_hosts(processes: list[dict[str, Any]]) -> Iterator[Family]:
    """One of each instance, by the process that began last."""
    load = Family("cofferdam_host_load1", "gauge", "Load of the host over a minute.")
    processors = Family("cofferdam_host_processors", "gauge", "Processors of the host.")
    memory = Family("cofferdam_host_memory_bytes", "gauge", "Memory of the host.")
    memory_free = Family(
        "cofferdam_host_memory_free_bytes", "gauge", "Available memory of the host."
    )
    disk = Family("cofferdam_host_disk_bytes", "gauge", "The disk of DATA_DIR.")
    disk_free = Family("cofferdam_host_disk_free_bytes", "gauge", "Free space of this disk.")
    for instance, found in hosts(processes).items():
        for family, name in (
            (load, "load1"),
            (processors, "processors"),
            (memory, "memory_bytes"),
            (memory_free, "memory_free_bytes"),
            (disk, "disk_bytes"),
            (disk_free, "disk_free_bytes"),
        ):
            family.add(found.get(name), instance=instance)
    yield from (load, processors, memory, memory_free, disk, disk_free)


def hosts(processes: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """The figures of each host by its name; `processes` are in order, the newest first."""
    found: dict[str, dict[str, float]] = {}
    for row in processes:
        if host := (row["figures"] or {}).get("host"):
            found.setdefault(row["instance"], host)
    return found
