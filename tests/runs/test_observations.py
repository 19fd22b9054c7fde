"""What is seen of hostile code: in its record, on its page, in the figures; and who may say so."""

from __future__ import annotations

import asyncio
import platform
from typing import Any

import pytest
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext

from executions.capabilities.observability.metrics import collect
from executions.ledger.verification import verify
from executions.runs.models import Execution
from executions.runs.results import kinds_in
from executions.tenants.service import AUDITOR
from providers.runtime.launchers.docker_guest import ProcessLimit
from providers.runtime.pool.cgroup import ResourceUsage
from providers.runtime.pool.claims import observed
from providers.values import KINDS, OBSERVATIONS
from tests.conftest import Caller
from tests.support.docker_engine import Containers
from tests.support.execution_rows import LIST, make_rows, shown
from tests.support.hostile_guests import served
from tests.support.kept_guest import KeptGuest
from tests.support.lying_provider import Liar
from tests.support.roles import member
from tests.support.routing import last_execution
from tests.support.running import run
from tests.support.sandboxes import Local

pytestmark = pytest.mark.one_database

# A call by the second set of numbers, which the filter ends a process for.
FOREIGN_CALL = "import ctypes; ctypes.CDLL(None).syscall(0x40000000 | 39); print('not reached')"
OWN_SIGNAL = "import os, signal; os.kill(os.getpid(), signal.SIGSYS)"
# As many processes as there may be, which then rest: a busy machine makes them too.
MANY_PROCESSES = """
import os, time
try:
    while os.fork(): pass
except OSError: pass
time.sleep(60)
"""
MANY_THREADS = """
import threading
for _ in range(1100):
    one = threading.Thread(target=int)
    one.start()
    one.join()
"""
MEMORY_BOMB = "held = []\nwhile True: held.append(bytearray(8 << 20))"


def seen(metadata: dict[str, Any]) -> list[tuple[str, str]]:
    return [(each["kind"], each["seen_by"]) for each in metadata.get(OBSERVATIONS, [])]


def test_a_call_of_a_foreign_kind_is_seen_by_the_signal_that_ends_it(bubblewrap: Local) -> None:
    if platform.machine() != "x86_64":
        pytest.skip("only there is a second set of numbers")
    result = bubblewrap.survive(FOREIGN_CALL)
    assert (result.exit_code, result.stdout) == (159, "")
    assert result.metadata[OBSERVATIONS] == [
        {"kind": "sigsys", "seen_by": "supervisor", "count": 1}
    ]


def test_an_orphan_is_seen_and_a_child_that_its_parent_waits_for_is_not(bubblewrap: Local) -> None:
    orphan = f"""
import os, time
ends, told = os.pipe()
if os.fork() == 0:
    parent = os.getpid()
    if os.fork() == 0:
        os.write(told, str(os.getpid()).encode())
        while os.getppid() == parent: time.sleep(0.01)
        {OWN_SIGNAL}
    os._exit(0)
os.wait()
orphan = int(os.read(ends, 20))
while os.path.exists(f'/proc/{{orphan}}'): time.sleep(0.01)
"""
    assert seen(bubblewrap.run(orphan).metadata) == [("sigsys", "supervisor")]
    child = f"import os\nif os.fork() == 0:\n    {OWN_SIGNAL}\nprint(os.wait()[1])"
    result = bubblewrap.run(child)
    assert (result.stdout, seen(result.metadata)) == ("31\n", [])


def test_an_exit_code_a_refused_call_and_ordinary_code_are_no_observation(
    bubblewrap: Local,
) -> None:
    for code in (
        "import os; os._exit(159)",
        "import ctypes; assert ctypes.CDLL(None).ptrace(0, 0, 0, 0) == -1",
        "import subprocess; subprocess.run(['true'], check=True)",
        "import concurrent.futures as c; list(c.ThreadPoolExecutor(8).map(abs, range(99)))",
    ):
        assert OBSERVATIONS not in bubblewrap.run(code).metadata, code


def test_processes_are_seen_at_their_limit_and_a_neighbour_with_nothing(
    bubblewrap: Local,
) -> None:
    result = bubblewrap.survive(MANY_PROCESSES, timeout=5)
    (found,) = result.metadata[OBSERVATIONS]
    assert (found["kind"], found["seen_by"]) == ("process_limit", "supervisor")
    assert 62 <= found["count"] <= 64
    assert OBSERVATIONS not in bubblewrap.run("print(1)").metadata


def test_one_process_after_the_other_is_a_burst(bubblewrap: Local) -> None:
    result = bubblewrap.run(MANY_THREADS, timeout=60)
    (found,) = result.metadata[OBSERVATIONS]
    assert (found["kind"], result.exit_code) == ("process_burst", 0)
    assert found["count"] >= 1100


def test_a_container_of_runc_is_seen_by_the_kernel_outside_of_it(under_runc: Containers) -> None:
    result = under_runc.run(MANY_PROCESSES, timeout=5, processes=32)
    (found,) = result.metadata[OBSERVATIONS]
    assert (found["kind"], found["seen_by"]) == ("process_limit", "host")


def test_a_cell_is_seen_by_the_signal_that_ends_its_interpreter(kept: KeptGuest) -> None:
    assert kept.run(OWN_SIGNAL).header["sigsys"] == 1
    assert kept.run("import os; os._exit(159)").header["sigsys"] == 0


def test_what_the_kernel_refused_in_an_earlier_run_is_not_said_of_a_later_one(
    tmp_path: Any,
) -> None:
    limit = ProcessLimit(tmp_path)
    assert limit.refused() == 0
    (tmp_path / "pids.events").write_text("max 7\n")
    assert limit.refused() == 7


# A supervisor that was taken over.
LIES: tuple[dict[str, Any], ...] = (
    {"sigsys": -1},
    {"sigsys": True},
    {"sigsys": "1"},
    {"sigsys": 1.5},
    {"sigsys": [1]},
    {"processes_left": 10**400},
    {"processes_started": {"kind": "sigsys"}},
    {"observations": [{"kind": "sigsys", "seen_by": "host", "count": 1}]},
)


@pytest.mark.parametrize("lie", LIES, ids=str)
def test_a_lying_guest_says_nothing_in_the_name_of_the_host(lie: dict[str, Any]) -> None:
    script = f"say(READY)\nheader, parts = listen()\nsay(answer(header, **{lie!r}))\ntime.sleep(99)"
    result = asyncio.run(served(script))
    assert all(witness == "supervisor" for _, witness in seen(result.metadata))
    counts = [each["count"] for each in result.metadata.get(OBSERVATIONS, [])]
    assert all(0 < count <= 2**31 for count in counts)


def test_what_the_host_saw_goes_before_what_a_guest_says_or_keeps_silent_about() -> None:
    host = ResourceUsage(refused_processes=3)
    expected = [{"kind": "process_limit", "seen_by": "host", "count": 3}]
    assert observed({}, host, 64) == observed({"processes_left": 64}, host, 64) == expected
    # A sandbox that may have so few is at its limit with what is always there.
    assert observed({"processes_left": 1}, ResourceUsage(), 1) == []


def test_a_provider_can_have_no_other_kinds_recorded(liar: Liar, alice: Caller) -> None:
    sound = {"kind": "sigsys", "seen_by": "host", "count": 2}
    claimed: list[Any] = [
        {"kind": "x" * 999, "seen_by": "host", "count": 1},
        {**sound, "tenant": "elsewhere"},
        {**sound, "count": 9},
        {"kind": "process_burst", "seen_by": "another", "count": 1},
        {"kind": ["process_limit"], "seen_by": "host", "count": 1},
        "sigsys",
    ]
    liar.answers(metadata={OBSERVATIONS: claimed})
    answer = run(alice, "print(1)").json()
    assert answer["observations"] == [sound]
    assert last_execution().observed == "sigsys"
    for nothing in ("sigsys", {"kind": "sigsys"}, None, 7, []):
        liar.answers(metadata={OBSERVATIONS: nothing})
        assert run(alice, "print(1)").json()["observations"] == []
        assert last_execution().observed is None


@pytest.mark.django_db
def test_the_record_has_it_for_its_tenant_alone_and_the_ledger_binds_it(
    local_active: None, alice: Caller, bob: Caller, charlie: Caller
) -> None:
    ran = run(alice, OWN_SIGNAL).json()
    found = [{"kind": "sigsys", "seen_by": "supervisor", "count": 1}]
    assert (ran["status"], ran["exit_code"], ran["observations"]) == ("failed", 159, found)
    assert run(charlie, "print(1)").json()["observations"] == []
    path = f"/api/v1/executions/{ran['id']}"
    assert [who.client.get(path).status_code for who in (alice, bob, charlie)] == [200, 200, 404]

    families = {family.name: family for family in collect(with_tenants=False)}
    counted = families["cofferdam_observations_total"].samples
    assert counted == [("", {"provider": "local", "kind": "sigsys"}, 1.0)]
    auditor = member(AUDITOR)
    page = auditor.get(f"{LIST}{ran['id']}/change/").content.decode()
    assert "sigsys: 1 processes ended by SIGSYS" in page
    assert "seen by the supervisor" in page

    assert verify().is_intact
    record = Execution.objects.get(pk=ran["id"])
    del record.meta[OBSERVATIONS]
    record.save(update_fields=["meta"])
    assert not verify().is_intact


@pytest.mark.django_db
def test_the_list_is_filtered_by_kind_from_an_index(admin_client: Client) -> None:
    make_rows(20)
    (denied,) = make_rows(1, observed="sigsys")
    (burst,) = make_rows(1, observed="process_limit process_burst")
    assert shown(admin_client, observed="any") == {str(denied.pk), str(burst.pk)}
    assert shown(admin_client, observed="process_burst") == {str(burst.pk)}
    assert len(shown(admin_client)) == 22
    with CaptureQueriesContext(connection) as queries:
        shown(admin_client, observed="any")
    (text,) = [
        query["sql"]
        for query in queries
        if '"observed" IS NOT NULL' in query["sql"] and "ORDER BY" in query["sql"]
    ]
    with connection.cursor() as cursor:
        if connection.vendor == "postgresql":
            cursor.execute("SET LOCAL enable_seqscan = off")
        explain = "EXPLAIN QUERY PLAN" if connection.vendor == "sqlite" else "EXPLAIN"
        cursor.execute(f"{explain} {text}")
        assert "execution_observed" in str(cursor.fetchall())


def test_every_kind_fits_the_column() -> None:
    every = [{"kind": kind, "seen_by": "host", "count": 1} for kind in KINDS]
    kinds = kinds_in({OBSERVATIONS: every})
    assert kinds is not None
    assert kinds.split() == list(KINDS)
    assert len(kinds) <= 64


@pytest.mark.django_db
def test_repeated_memory_and_time_are_verdicts_and_no_observation_of_a_run(
    local_active: None, alice: Caller
) -> None:
    for code, status in ((MEMORY_BOMB, "out_of_memory"), ("while True: pass", "timed_out")):
        answer = run(alice, code, timeout=2 if status == "timed_out" else 30).json()
        assert (answer["status"], answer["observations"]) == (status, [])
