"""A disk that is really full: what runs ends in order, what can be recorded is, the rest is told."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.faults.away_site import Site, wait_for
from tests.support.required import missing

FILLING = "filling"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """Mounts file systems of some MiB. Only root may."""
    mounted: list[Path] = []

    def mount(mebibytes: int) -> Path:
        place = tmp_path / f"disk-{len(mounted)}"
        place.mkdir()
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


def fill(place: Path, leave: int = 0) -> None:
    """Use up the disk but for `leave` bytes."""
    disk = os.statvfs(place)
    with (place / FILLING).open("ab", buffering=0) as stream, suppress(OSError):
        left = disk.f_bavail * disk.f_frsize - leave
        while left > 0:
            left -= stream.write(b"x" * min(left, 65536))


def free(place: Path) -> None:
    (place / FILLING).unlink()


def test_new_runs_are_refused_before_it_is_full_and_those_that_run_are_recorded(
    small_disk: Callable[[int], Path], tmp_path: Path
) -> None:
    disk = small_disk(48)
    site = Site(tmp_path, disk / "data", {"DISK_RESERVE_MIB": "8"})
    with site.up() as service:
        running = site.begin("sync", output="'x' * 150_000")
        fill(disk, leave=6 * 1024 * 1024)
        wait_for(lambda: site.run("pass").status == 503)
        refused = site.run("pass")
        assert refused.body["error"]["code"] == "SB009"
        assert "DATA_DIR is nearly full" in refused.body["error"]["message"]
        wait_for(lambda: '"alert": "disk_nearly_full"' in service.output)
        ready = site.ask("/readyz")
        assert (ready.status, ready.body["reasons"]) == (503, ["disk"])

        site.let_go("sync")
        answer = running.result()
        assert (answer.status, len(answer.body["stdout"])) == (200, 150_001)
        free(disk)
        wait_for(lambda: site.run("pass").status == 200)
        assert site.ask("/readyz").status == 200
        assert site.times_run("sync") == 1
        site.assert_in_order()


def test_a_full_disk_of_the_database_leaves_the_result_in_the_journal(
    small_disk: Callable[[int], Path], tmp_path: Path
) -> None:
    disk = small_disk(16)
    url = f"sqlite:///{disk / 'database.sqlite3'}"
    site = Site(tmp_path, tmp_path / "data", {"DATABASE_URL": url})
    with site.up():
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


def test_a_result_that_nothing_has_room_for_is_recorded_as_lost(
    small_disk: Callable[[int], Path], tmp_path: Path
) -> None:
    disk = small_disk(32)
    site = Site(tmp_path, disk / "data")
    with site.up() as service:
        running = site.begin("sync", output="'x' * 150_000")
        fill(disk)
        site.let_go("sync")
        answer = running.result()
        assert (answer.status, answer.body["error"]["ran"]) == (503, True), answer.text
        assert "what came of it is lost" in answer.body["error"]["message"]
        assert '"alert": "result_lost"' in service.output

        free(disk)
        record = site.ended(answer.body["id"])
        assert (record["status"], record["error"]["code"]) == ("error", "SB009")
        assert "what came of it is lost" in record["error"]["message"]
        assert record["receipt"] is not None
        assert site.times_run("sync") == 1
        site.assert_in_order()


def test_an_artifact_that_finds_no_room_costs_the_artifact_alone(
    small_disk: Callable[[int], Path], tmp_path: Path
) -> None:
    disk = small_disk(16)
    site = Site(tmp_path, tmp_path / "data")
    (site.data_dir / "artifacts").symlink_to(disk)
    with site.up():
        fill(disk)
        answer = site.run(
            "import os\nos.makedirs('artifacts', exist_ok=True)\n"
            "open('artifacts/a', 'wb').write(b'x' * 500_000)\nprint('kept')"
        )
        assert (answer.status, answer.body["error"]["code"]) == (503, "SB009"), answer.text
        record = site.record(answer.body["id"])
        assert (record["status"], record["stdout"]) == ("error", "kept\n")
        assert "artifacts could not be stored" in record["error"]["message"]
        site.assert_in_order()
