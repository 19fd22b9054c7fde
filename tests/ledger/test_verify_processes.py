"""A verification with several processes, in a process that has no other thread."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import ROOT, clean_environment
from tests.support.site import bootstrapped

_VERIFY = """
import json, os, sys, threading
from dataclasses import asdict
os.environ["DJANGO_SETTINGS_MODULE"] = "sandbox_site.settings"
import django
django.setup()
from executions.ledger import verification
from executions.ledger.append import append
from executions.ledger.models import LedgerEntry

forks = []
os.register_at_fork(after_in_parent=lambda: forks.append(threading.active_count()))
verification.CHUNK = 2
for number in range(9):
    append("note", str(number), {})


def verified(processes):
    before = len(forks)
    found = verification.verify(processes=processes, since_verified="since" in sys.argv)
    return {**asdict(found), "forks": len(forks) - before}


verification.verify()
append("note", "later", {})
end = threading.Event()
if "thread" in sys.argv:
    threading.Thread(target=end.wait).start()
if "altered" in sys.argv:
    LedgerEntry.objects.filter(kind="note").order_by("-sequence").update(signature="")
print(json.dumps([verified(1), verified(2)]))
end.set()
"""
_CONNECTIONS = """
import json, os
os.environ["DJANGO_SETTINGS_MODULE"] = "sandbox_site.settings"
import django
django.setup()
from executions.kernel.ordered_work import map_in_order
from executions.tenants.models import Tenant


def count(number):
    return Tenant.objects.count(), os.getpid()


before = Tenant.objects.count()
counted = list(map_in_order(count, range(4), 2))
Tenant.objects.create(slug="another")
print(json.dumps([before, counted, Tenant.objects.count(), os.getpid()]))
"""


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    bootstrapped(tmp_path / "data")
    return tmp_path / "data"


def printed(data_dir: Path, program: str, *arguments: str) -> Any:
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env=clean_environment(data_dir, LOG_LEVEL="CRITICAL"),
        cwd=ROOT,
        check=True,
        stdout=subprocess.PIPE,
        timeout=120,
    )
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    "arguments", [(), ("altered",), ("since",), ("since", "altered"), ("thread",)]
)
def test_several_processes_find_the_same_as_one(data_dir: Path, arguments: tuple[str, ...]) -> None:
    """Beside another thread none is forked."""
    alone, together = printed(data_dir, _VERIFY, *arguments)
    assert (alone.pop("forks"), together.pop("forks")) == (0, 0 if "thread" in arguments else 2)
    assert together == alone
    assert bool(alone["findings"]) == ("altered" in arguments)


def test_each_process_has_a_connection_of_its_own(data_dir: Path) -> None:
    before, counted, after, parent = printed(data_dir, _CONNECTIONS)
    assert {number for number, _ in counted} == {before}
    assert parent not in {pid for _, pid in counted}
    # The connection of the process that forked still answers.
    assert after == before + 1
