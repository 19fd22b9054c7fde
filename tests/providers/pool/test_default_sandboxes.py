"""How many sandboxes there are where nobody has said so: as many as the machine's memory holds."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from providers.local.provider import LocalProvider, by_machine
from providers.runtime.pool import cgroup
from providers.runtime.pool.cgroup import machine_memory
from providers.runtime.service import settings as service
from providers.runtime.service.settings import FIELDS, ServiceSettings
from providers.schema import validate
from tests.conftest import require
from tests.support.docker_engine import missing
from tests.support.raw_http import Answer, ask
from tests.support.site import EXECUTIONS, prepare, serving

MIB = 1 << 20
# Of what the kernel killed in a group, on either version.
COUNTERS = ("memory.events", "memory.oom_control")
UNSET: dict[str, Any] = validate(LocalProvider.config_fields, {})


@pytest.mark.parametrize(
    ("total", "number", "memory", "warm"),
    [
        (512, 2, "128m", 2),
        (1024, 2, "256m", 2),
        (2048, 5, "256m", 4),
        (4096, 13, "256m", 4),
        (65_536, 16, "256m", 4),
    ],
)
def test_local_sandboxes_fit_into_the_machine(
    total: int, number: int, memory: str, warm: int
) -> None:
    found = by_machine(UNSET, total * MIB)
    assert (found["max_sandboxes"], found["max_memory"], found["pool_size"]) == (
        number,
        memory,
        warm,
    )


def test_what_somebody_chose_holds_on_any_machine() -> None:
    chosen = UNSET | {"max_sandboxes": 40, "max_memory": "1g", "pool_size": 8}
    assert by_machine(chosen, 512 * MIB) == chosen
    assert by_machine(UNSET | {"max_sandboxes": 2}, 512 * MIB)["max_sandboxes"] == 4


@pytest.mark.parametrize(("total", "number"), [(512, 2), (1024, 2), (4096, 13), (65_536, 32)])
def test_containers_fit_into_the_machine_of_the_service(
    total: int, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "machine_memory", lambda: total * MIB)
    found = ServiceSettings.from_config({})
    assert (found.max_sandboxes, found.pool_size) == (number, min(10, number))
    assert found.most_kept >= 1
    assert ServiceSettings.from_config({"max_sandboxes": 64}).max_sandboxes == 64


def test_pods_are_as_many_whatever_memory_the_pools_machine_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(service, "machine_memory", lambda: 1024 * MIB)
    assert ServiceSettings.from_config({}).max_sandboxes == 2
    assert ServiceSettings.from_config({}, shares_memory=False).max_sandboxes == 32
    assert FIELDS["max_sandboxes"].default is None


@pytest.mark.parametrize("version", [1, 2])
def test_a_group_around_the_service_counts_as_its_machine(version: int, tmp_path: Path) -> None:
    proc, root = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text("MemTotal:  8388608 kB\nMemFree: 1 kB\n")
    top, name, nothing = root / "memory", "memory.limit_in_bytes", str(2**63 - 4096)
    line = "4:memory:/outer/inner\n"
    if version == 2:
        top, name, nothing, line = root, "memory.max", "max", "0::/outer/inner\n"
    (proc / "self/cgroup").write_text(line)
    inner = top / "outer/inner"
    inner.mkdir(parents=True)
    if version == 2:
        (root / "cgroup.controllers").write_text("memory\n")
    (inner / name).write_text(nothing)
    assert machine_memory(root, proc) == 8192 * MIB
    (inner.parent / name).write_text(str(1024 * MIB))
    assert machine_memory(root, proc) == 1024 * MIB


@contextmanager
def _group(memory_bytes: int) -> Iterator[Path]:
    """A memory group of this machine's, for a whole service."""
    parent = cgroup.CgroupParent.create() if os.geteuid() == 0 else None
    if parent is None:
        missing("a group with a bound on memory needs root")
    try:
        made = parent.new(memory_bytes)
        yield made.path
        made.remove_now()
    finally:
        parent.remove()


def test_ten_callers_on_a_machine_of_one_gib_are_all_answered(tmp_path: Path) -> None:
    """Ten of 150 MiB each are more than it has: they take turns, and nothing is killed."""
    require("bwrap")
    prepared = prepare(
        tmp_path / "data", provider=("local", {"queue_timeout": 120}), SANDBOX_MAX_RUNNING="20"
    )
    code = "import time\nheld = b'x' * (150 * 2**20)\ntime.sleep(0.5)\nprint(len(held) >> 20)"
    answers: list[Answer] = []
    with _group(1024 * MIB) as group:
        enter = ["/bin/sh", "-c", 'echo $$ > "$0/cgroup.procs"; exec "$@"', str(group)]
        command = [*enter, sys.executable, "manage.py", "up"]
        with serving(prepared, tmp_path / "log", command, SANDBOX_MAX_RUNNING="20") as site:
            body = {"code": code, "timeout": 60}
            callers = [
                threading.Thread(
                    target=lambda: answers.append(
                        ask(site.service, "POST", EXECUTIONS, body, key=site.alice)
                    )
                )
                for _ in range(10)
            ]
            for caller in callers:
                caller.start()
            for caller in callers:
                caller.join(300)
            counted = next(path for name in COUNTERS if (path := group / name).exists()).read_text()
    assert [json.loads(answer.body).get("stdout") for answer in answers] == ["150\n"] * 10
    assert dict(line.split() for line in counted.splitlines())["oom_kill"] == "0"
