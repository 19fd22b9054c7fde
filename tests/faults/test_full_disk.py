"""A disk that is really full: what runs ends in order, what can be recorded is, the rest is told."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.faults.away_site import Site, wait_for
from tests.support.processes import Service
from tests.support.required import missing

FILLING = "filling"


@pytest.fixture(scope="module")
def small_disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[int], Path]]:
    """Mounts file systems of some MiB. Only root may."""
    mounted: list[Path] = []

    def mount(mebibytes: int) -> Path:
        place = tmp_path_factory.mktemp("disk")
        size = f"size={mebibytes}m,mode=700"
        command = ["mount", "-t", "tmpfs", "-o", size, "tmpfs", str(place)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            missing(f"cannot mount: {done.stderr}")
        mounted.append(place)
        return place

    yield mount
    for place in mounted:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


@dataclass(frozen=True)
class Disks:
    """A running service and the small disks that it has, all of them with room."""

    site: Site
    service: Service
    data: Path
    database: Path
    artifacts: Path


@pytest.fixture(scope="module")
def on_one_disk(
    small_disk: Callable[[int], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Disks]:
    """All that it keeps is on one disk, of which it wants 8 MiB to be free."""
    disk = small_disk(48)
    site = Site(tmp_path_factory.mktemp("one-disk"), disk / "data", {"DISK_RESERVE_MIB": "8"})
    with site.up() as service:
        yield Disks(site, service, disk, disk, disk)


@pytest.fixture(scope="module")
def on_disks_of_their_own(
    small_disk: Callable[[int], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Disks]:
    """Its database and its artifacts have a disk each."""
    folder = tmp_path_factory.mktemp("disks")
    database, artifacts = small_disk(16), small_disk(16)
    url = f"sqlite:///{database / 'database.sqlite3'}"
    site = Site(folder, folder / "data", {"DATABASE_URL": url})
    (site.data_dir / "artifacts").symlink_to(artifacts)
    with site.up() as service:
        yield Disks(site, service, site.data_dir, database, artifacts)


@pytest.fixture
def disks(on_one_disk: Disks) -> Iterator[Disks]:
    yield on_one_disk
    free(on_one_disk.data)


@pytest.fixture
def other_disks(on_disks_of_their_own: Disks) -> Iterator[Disks]:
    yield on_disks_of_their_own
    free(on_disks_of_their_own.database)
    free(on_disks_of_their_own.artifacts)


def fill(place: Path, leave: int = 0) -> None:
    """Use up the disk but for `leave` bytes."""
    disk = os.statvfs(place)
    with (place / FILLING).open("ab", buffering=0) as stream, suppress(OSError):
        left = disk.f_bavail * disk.f_frsize - leave
        while left > 0:
            left -= stream.write(b"x" * min(left, 65536))


def free(place: Path) -> None:
    (place / FILLING).unlink(missing_ok=True)


def test_new_runs_are_refused_before_it_is_full_and_those_that_run_are_recorded(
    disks: Disks,
) -> None:
    site, disk = disks.site, disks.data
    running = site.begin("recorded", output="'x' * 150_000")
    fill(disk, leave=6 * 1024 * 1024)
    wait_for(lambda: site.run("pass").status == 503)
    refused = site.run("pass")
    assert refused.body["error"]["code"] == "SB009"
    assert "DATA_DIR is nearly full" in refused.body["error"]["message"]
    wait_for(lambda: '"alert": "disk_nearly_full"' in disks.service.output)
    ready = site.ask("/readyz")
    assert (ready.status, ready.body["reasons"]) == (503, ["disk"])

    site.let_go("recorded")
    answer = running.result()
    assert (answer.status, len(answer.body["stdout"])) == (200, 150_001)
    free(disk)
    wait_for(lambda: site.run("pass").status == 200)
    assert site.ask("/readyz").status == 200
    assert site.times_run("recorded") == 1
    site.assert_in_order()


def test_a_result_that_nothing_has_room_for_is_recorded_as_lost(disks: Disks) -> None:
    site, disk = disks.site, disks.data
    # What another test has filled is noticed to be free again.
    wait_for(lambda: site.run("pass").status == 200)
    running = site.begin("lost", output="'x' * 150_000")
    fill(disk)
    site.let_go("lost")
    answer = running.result()
    assert (answer.status, answer.body["error"]["ran"]) == (503, True), answer.text
    assert "its result is lost" in answer.body["error"]["message"]
    assert '"alert": "result_lost"' in disks.service.output

    free(disk)
    record = site.ended(answer.body["id"])
    assert (record["status"], record["error"]["code"]) == ("error", "SB009")
    assert "its result is lost" in record["error"]["message"]
    assert record["receipt"] is not None
    assert site.times_run("lost") == 1
    site.assert_in_order()


def test_a_full_disk_of_the_database_leaves_the_result_in_the_journal(other_disks: Disks) -> None:
    site, disk = other_disks.site, other_disks.database
    running = site.begin("sync", output="'x' * 150_000")
    fill(disk)
    site.let_go("sync")
    answer = running.result()
    assert (answer.status, answer.body["error"]["ran"]) == (503, True), answer.text
    assert "The result is kept" in answer.body["error"]["message"]
    assert site.journal
    refused = site.run("pass" + " " * 100_000)
    assert (refused.status, refused.body["error"]["ran"]) == (503, False), refused.text
    looked = site.ask(f"/api/v1/executions/{answer.body['id']}")
    assert (looked.status, looked.body.get("status")) == (200, "running"), looked.text

    free(disk)
    record = site.ended(answer.body["id"])
    assert (record["status"], len(record["stdout"])) == ("succeeded", 150_001)
    assert site.times_run("sync") == 1
    site.assert_in_order()


def test_an_artifact_that_finds_no_room_costs_the_artifact_alone(other_disks: Disks) -> None:
    site = other_disks.site
    fill(other_disks.artifacts)
    answer = site.run(
        "import os\nos.makedirs('artifacts', exist_ok=True)\n"
        "open('artifacts/a', 'wb').write(b'x' * 500_000)\nprint('kept')"
    )
    assert (answer.status, answer.body["error"]["code"]) == (503, "SB009"), answer.text
    record = site.record(answer.body["id"])
    assert (record["status"], record["stdout"]) == ("error", "kept\n")
    assert "artifacts could not be stored" in record["error"]["message"]
    site.assert_in_order()
