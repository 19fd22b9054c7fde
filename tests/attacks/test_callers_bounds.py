"""Whoever can send a request: taking everybody's places, filling the queue and the disk."""

from __future__ import annotations

import base64
import os
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.attacks.two_tenants import Scene, at_once, bytes_below, two_tenants, wait_until
from tests.support.pool_service import running
from tests.support.required import missing, require

SLEEPER = "import time\ntime.sleep({seconds})"


@pytest.fixture(autouse=True)
def bubblewrap() -> None:
    require("bwrap")


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    require("bwrap")
    with two_tenants(tmp_path_factory.mktemp("scene"), WEB_CONCURRENCY="2") as opened:
        yield opened


def test_forty_sleepers_of_one_tenant_take_ten_places_and_no_other_tenants(scene: Scene) -> None:
    """Over two web processes, which have the rows and nothing else in common."""
    with at_once(scene.greedy, 40, SLEEPER.format(seconds=20), timeout=60) as sleepers:
        wait_until(lambda: sum(sleeper.done() for sleeper in sleepers) >= 30)
        assert scene.greedy.how_many("running") == 10

        answer = scene.other.post("print('served')")

        assert (answer.status, answer.body["stdout"]) == (200, "served\n")
        assert sum(sleeper.done() for sleeper in sleepers) == 30  # none of them has ended yet
        refused = [sleeper.result() for sleeper in sleepers if sleeper.done()]
        for each in refused:
            assert (each.status, each.body["error"]["code"]) == (429, "SB008")
            assert int(each.headers["Retry-After"]) >= 1
            assert each.body["id"] is None
        assert scene.greedy.how_many("running") == 10


def test_beyond_its_bound_a_tenants_line_for_sandboxes_is_one_of_two(tmp_path: Path) -> None:
    """With a bound that an administrator raised beyond what the pool holds."""
    raised = "max_running=64"
    with (
        two_tenants(tmp_path, bounds=raised, WEB_THREADS="64") as scene,
        at_once(scene.greedy, 40, SLEEPER.format(seconds=4), timeout=60) as sleepers,
    ):
        # On a busy machine some have ended before the last has come.
        wait_until(lambda: sum(map(scene.greedy.how_many, ("succeeded", "running"))) == 40)
        ended = scene.greedy.how_many("succeeded")

        answer = scene.other.post("pass")

        # Its turn came with the first sandboxes that were free, not behind forty callers.
        assert answer.status == 200
        assert sum(sleeper.done() for sleeper in sleepers) < max(24, ended + 8)


def test_callers_past_the_service_do_not_take_the_whole_pool(tmp_path: Path) -> None:
    """RAGFlow's requests reach the pool service itself, and nobody counts rows for them."""
    with running(tmp_path / "log", SANDBOX_EXECUTOR_MANAGER_POOL_SIZE="1") as pool:
        settings = {"pool_size": 1, "max_sandboxes": 8, "queue_timeout": 60, "timeout": 30}
        assert pool.ask("PUT", "/v1/settings", settings).status == 200
        pool.wait_until_healthy()
        with ThreadPoolExecutor(20) as threads:
            sleepers = [
                threads.submit(pool.ragflow, "import time\ndef main():\n    time.sleep(10)")
                for _ in range(20)
            ]
            pool.wait_for(lambda stats: stats["busy"] == 7 and stats["waiting"] == 13)

            answer = pool.run(pool.create(owner="other"))

            assert answer.body["stdout"] == "ran\n"
            assert not any(sleeper.done() for sleeper in sleepers)
        assert {sleeper.result().body["status"] for sleeper in sleepers} == {"success"}


def test_sixty_queued_jobs_of_one_tenant_do_not_hold_up_anothers(scene: Scene) -> None:
    with at_once(scene.greedy, 60, SLEEPER.format(seconds=2), mode="async") as queued:
        jobs = [future.result().body["id"] for future in queued]
    wait_until(lambda: scene.greedy.how_many("running") == 4)

    mine = scene.other.post("print('served')", mode="async").body["id"]

    wait_until(lambda: scene.other.get(mine)["status"] == "succeeded")
    assert scene.greedy.how_many("queued") > 40
    assert scene.greedy.how_many("running") <= 4
    # And all of theirs are run, each once.
    wait_until(lambda: not scene.greedy.how_many("queued"))
    wait_until(lambda: not scene.greedy.how_many("running"))
    assert {scene.greedy.get(job)["status"] for job in jobs} == {"succeeded"}


def test_a_queue_filled_by_one_tenant_is_refused_and_open_to_another(tmp_path: Path) -> None:
    """Nothing leaves the queue meanwhile: no worker's thread may run the greedy one's."""
    with (
        two_tenants(tmp_path, bounds="max_queued=5, max_running=1") as scene,
        at_once(scene.greedy, 1, SLEEPER.format(seconds=15), timeout=60),
    ):
        wait_until(lambda: scene.greedy.how_many("running") == 1)
        statuses = [scene.greedy.post("pass", mode="async").status for _ in range(8)]
        assert statuses == [202] * 5 + [429] * 3
        assert scene.other.post("pass", mode="async").status == 202


def test_large_queued_requests_leave_nothing_on_the_disk(scene: Scene) -> None:
    content = base64.b64encode(os.urandom(12_000_000)).decode()
    files = [{"path": f"file{number}", "content_base64": content} for number in range(2)]
    before = bytes_below(scene.data_dir)
    jobs = [scene.greedy.post("pass", mode="async", files=files).body["id"] for _ in range(4)]
    for job in jobs:
        wait_until(lambda job=job: scene.greedy.get(job)["status"] == "succeeded")
    assert bytes_below(scene.data_dir) - before < 8_000_000


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    options = ["-t", "tmpfs", "-o", "size=96m", "tmpfs", str(folder)]
    if subprocess.run(["mount", *options], capture_output=True).returncode:
        missing("needs the right to mount a disk of its own")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_a_disk_that_fills_refuses_the_next_and_keeps_what_runs(
    tmp_path: Path, small_disk: Path
) -> None:
    ballast = small_disk / "ballast"
    artifact = "open('artifacts/kept', 'wb').write(b'x' * 1_000_000)"
    sleeper = f"{SLEEPER.format(seconds=8)}\n{artifact}\nprint('recorded')"
    with two_tenants(tmp_path, data_dir=small_disk / "data", DISK_RESERVE_MIB="32") as scene:
        with at_once(scene.greedy, 1, sleeper) as running:
            wait_until(lambda: scene.greedy.how_many("running") == 1)
            disk = os.statvfs(small_disk)
            ballast.write_bytes(bytes(disk.f_bavail * disk.f_frsize - 16 * 2**20))

            wait_until(lambda: scene.other.post("pass").status == 503)
            refused = scene.other.post("pass")
            queued = scene.other.post("pass", mode="async")
        for answer in (refused, queued):
            assert (answer.status, answer.body["error"]["code"]) == (503, "SB009")
            assert "DATA_DIR" in answer.body["error"]["message"]
            assert answer.body["id"] is None
        kept = running[0].result()
        assert (kept.status, kept.body["stdout"]) == (200, "recorded\n")
        assert [each["size_bytes"] for each in kept.body["artifacts"]] == [1_000_000]

        ballast.unlink()
        wait_until(lambda: scene.other.post("pass").status == 200)
