"""The standby raises a beat while its process cannot, and neither too long nor without it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from django.conf import settings
from django.db import connection
from django.db.models.functions import Now

from executions.runs import standby
from executions.runs.heartbeat import Heartbeat
from executions.runs.models import Process
from executions.runs.standby import Standby
from executions.runs.standby_process import raise_beats
from sandbox_site import gunicorn_conf
from tests.support.processes import ROOT
from tests.support.sandboxes import children, command, wait_until_gone
from tests.support.waiting import wait_until


class Line:
    """The pipe between a process and its standby. `beat` ends it after so many beats."""

    def __init__(self, beats: int = 1) -> None:
        self.beats: list[str] = []
        self.reads, self._writes = os.pipe()
        self._most = beats

    def write(self, text: str) -> None:
        os.write(self._writes, text.encode())

    def beat(self, lease: str) -> None:
        self.beats.append(lease)
        if len(self.beats) == self._most:
            self.end()

    def end(self) -> None:
        os.close(self._writes)


def test_a_standby_beats_for_the_last_lease_that_it_was_told_of_once_nothing_more_comes() -> None:
    line = Line(beats=3)
    line.write("first\nsec")
    line.write("ond\nthi")
    raise_beats(line.reads, line.beat, silence_seconds=0.01)
    assert line.beats == ["second"] * 3


def test_a_standby_that_was_told_nothing_has_nothing_to_beat_for() -> None:
    line = Line()
    line.end()
    raise_beats(line.reads, line.beat, silence_seconds=0.01)
    assert line.beats == []


def test_a_standby_does_not_beat_for_a_process_that_is_silent_for_too_long() -> None:
    """As one that was stopped, or whose thread hangs: its runs are closed then."""
    line = Line(beats=1000)
    line.write("lease\n")
    moments = iter(range(0, 1000, 40))

    def now() -> float:
        moment = next(moments)
        if moment >= 600:
            line.end()
        return float(moment)

    raise_beats(line.reads, line.beat, silence_seconds=0.01, held_seconds=150, now=now)

    # Told at the moment 40; of the moments after it, those within 150 seconds.
    assert line.beats == ["lease"] * 3


@pytest.fixture
def row(transactional_db: None) -> Process:
    return Process.objects.create(instance="web-1", kind="web", pid=os.getpid())


@pytest.fixture
def beside(row: Process, monkeypatch: pytest.MonkeyPatch) -> Iterator[Standby]:
    monkeypatch.setattr(standby, "_RETRY_SECONDS", 0.0)
    monkeypatch.setattr(standby, "SILENCE_SECONDS", 0.05)
    found = Standby(connection.settings_dict, settings.LOGGING, 10)
    yield found
    found.stop()


def key(row: Process) -> str:
    return str(Process._meta.pk.get_db_prep_value(row.pk, connection))


def beat_of(row: Process) -> int:
    return Process.objects.get(pk=row.pk).beat


def test_a_silent_process_is_shown_to_live_and_its_last_own_sign_of_life_stays(
    row: Process, beside: Standby
) -> None:
    renewed_at = Process.objects.get().renewed_at
    beside.tell(key(row))
    wait_until(lambda: beat_of(row) >= 2, seconds=60)
    assert Process.objects.get().renewed_at == renewed_at


def test_a_lease_that_was_taken_gets_no_more_beats(row: Process, beside: Standby) -> None:
    other = Process.objects.create(instance="web-1", kind="web", pid=1)
    Process.objects.filter(pk=row.pk).update(ended_at=Now())
    beside.tell(key(row))
    first = beside.pid
    beside.tell(key(other))
    wait_until(lambda: beat_of(other) >= 1, seconds=60)
    assert beat_of(row) == 0
    assert beside.pid == first


def test_a_standby_that_was_killed_is_replaced(row: Process, beside: Standby) -> None:
    beside.tell(key(row))
    first = beside.pid
    assert first is not None
    os.kill(first, signal.SIGKILL)

    def is_replaced() -> bool:
        beside.tell(key(row))
        return beside.pid not in (None, first)

    wait_until(is_replaced, seconds=60)
    wait_until(lambda: beat_of(row) >= 1, seconds=60)


def test_a_process_that_serves_has_a_standby_which_ends_with_its_lease(
    transactional_db: None,
) -> None:
    keeper = Heartbeat(beat_seconds=0.02, look_seconds=0.01)
    keeper.begin(Process.Kind.WEB)
    wait_until(lambda: standbys_of(os.getpid()) != [], seconds=60)
    keeper.stop()
    assert standbys_of(os.getpid()) == []


def test_gunicorn_ends_no_worker_that_still_has_its_lease() -> None:
    assert gunicorn_conf.timeout >= standby.HELD_SECONDS


# What a shell starts in the background ignores two of these signals, and so does all that it starts:
# the standby begins with none of them ignored.
PARENT = """
import json, os, signal, sys
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT):
    signal.signal(number, signal.SIG_DFL)
from executions.runs import standby
from sandbox_site.logs import configuration
standby.SILENCE_SECONDS = 0.05
beside = standby.Standby(json.loads(sys.argv[1]), configuration("INFO", "json"), 10)
beside.tell("x")
print(beside.pid, flush=True)
signal.pause()
"""


NO_TABLE = '{"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}'


def test_a_standby_whose_database_refuses_says_so_as_the_service_does_and_goes_on() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, NO_TABLE],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    ) as parent:
        assert parent.stderr is not None
        lines = [json.loads(parent.stderr.readline()) for _ in range(2)]
        parent.kill()
    for line in lines:
        assert (line["level"], line["logger"]) == ("warning", "executions.runs.standby")
        assert "cannot send the lease's heartbeat: no such table" in line["message"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGQUIT])
def test_a_signal_to_all_does_not_end_a_standby_and_the_death_of_its_process_does(
    number: signal.Signals,
) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, NO_TABLE], cwd=ROOT, stdout=subprocess.PIPE
    )
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    try:
        wait_until(lambda: ignores(pid, number), seconds=60)
        os.kill(pid, number)
        assert standbys_of(parent.pid) == [pid]
    finally:
        parent.kill()
        parent.wait()
        parent.stdout.close()
    wait_until_gone({pid})


def ignores(pid: int, number: signal.Signals) -> bool:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    mask = next(line for line in lines if line.startswith("SigIgn:"))
    return bool(int(mask.split()[1], 16) >> (number - 1) & 1)


def standbys_of(pid: int) -> list[int]:
    return [child for child in children(pid) if "executions.runs.standby_process" in command(child)]
