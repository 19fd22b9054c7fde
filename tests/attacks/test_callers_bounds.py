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


def test_sleepers_of_one_tenant_take_ten_places_and_no_other_tenants(scene: Scene) -> None:
    """Over two web processes, which have the rows and nothing else in common."""
    with at_once(scene.greedy, 16, SLEEPER.format(seconds=240), timeout=300) as sleepers:
        wait_until(lambda: sum(sleeper.done() for sleeper in sleepers) >= 6)
        assert scene.greedy.how_many("running") == 10

        answer = scene.other.post("print('served')")

        assert (answer.status, answer.body["stdout"]) == (200, "served\n")
        assert sum(sleeper.done() for sleeper in sleepers) == 6  # none of them has ended yet
        refused = [sleeper.result() for sleeper in sleepers if sleeper.done()]
        for each in refused:
            assert (each.status, each.body["error"]["code"]) == (429, "SB008")
            assert int(each.headers["Retry-After"]) >= 1
            assert each.body["id"] is None
        assert scene.greedy.how_many("running") == 10
        scene.greedy.cancel_all()


def test_beyond_its_bound_a_tenants_line_for_sandboxes_is_one_of_two(tmp_path: Path) -> None:
    """With a bound that an administrator raised beyond what the pool holds."""
    pool = {"pool_size": 4, "max_sandboxes": 4, "queue_timeout": 240}
    with (
        two_tenants(tmp_path, local=pool, has_worker=False, WEB_THREADS="64") as scene,
        at_once(scene.raised, 16, SLEEPER.format(seconds=2), timeout=60) as sleepers,
    ):
        # On a busy machine some have ended before the last has come.
        wait_until(lambda: sum(map(scene.raised.how_many, ("succeeded", "running"))) == 16)
        ended = scene.raised.how_many("succeeded")

        answer = scene.other.post("pass")

        # Its turn came with the first sandboxes that were free, not behind twelve callers.
        assert answer.status == 200
        assert sum(sleeper.done() for sleeper in sleepers) <= ended + 8
        scene.raised.cancel_all()


def test_callers_past_the_service_do_not_take_the_whole_pool(tmp_path: Path) -> None:
    """RAGFlow's requests reach the pool service itself, and nobody counts rows for them."""
    with running(tmp_path / "log", SANDBOX_EXECUTOR_MANAGER_POOL_SIZE="1") as pool:
        settings = {"pool_size": 1, "max_sandboxes": 5, "queue_timeout": 120, "timeout": 120}
        assert pool.ask("PUT", "/v1/settings", settings).status == 200
        pool.wait_until_healthy()

        def is_served_beside(seconds: float) -> bool:
            """Whether another caller is, before those that sleep for so long have ended."""
            code = f"import time\ndef main():\n    time.sleep({seconds})"
            with ThreadPoolExecutor(7) as threads:
                callers = [threads.submit(pool.ragflow, code) for _ in range(4)]

                def is_over() -> bool:
                    return any(caller.done() for caller in callers)

                pool.wait_for(lambda stats: stats["busy"] == 4 or is_over())
                callers += [threads.submit(pool.ragflow, "def main():\n    pass") for _ in range(3)]
                pool.wait_for(
                    lambda stats: (stats["busy"], stats["waiting"]) == (4, 3) or is_over()
                )

                answer = pool.run(pool.create(owner="other"))

                assert answer.body["stdout"] == "ran\n"
                is_first = not is_over()
            assert {caller.result().body["status"] for caller in callers} == {"success"}
            return is_first

        # A slow machine may need the time for which they sleep to let all of them in.
        assert is_served_beside(6) or is_served_beside(40)


def test_queued_jobs_of_one_tenant_do_not_hold_up_anothers(scene: Scene) -> None:
    codes = [SLEEPER.format(seconds=240)] * 4 + ["pass"] * 8
    jobs = [scene.greedy.post(code, mode="async", timeout=300).body["id"] for code in codes]
    wait_until(lambda: scene.greedy.how_many("running") == 4)

    mine = scene.other.post("print('served')", mode="async").body["id"]

    wait_until(lambda: scene.other.get(mine)["status"] == "succeeded")
    assert scene.greedy.how_many("queued") == 8
    assert scene.greedy.how_many("running") == 4
    # And all of theirs are run, each once.
    for sleeper in scene.greedy.ids("running"):
        scene.greedy.cancel(sleeper)
    wait_until(lambda: not scene.greedy.how_many("queued"))
    wait_until(lambda: not scene.greedy.how_many("running"))
    ended = [scene.greedy.get(job)["status"] for job in jobs]
    assert ended == ["cancelled"] * 4 + ["succeeded"] * 8


def test_a_queue_filled_by_one_tenant_is_refused_and_open_to_another(scene: Scene) -> None:
    """Nothing leaves the queue meanwhile: no worker's thread may run the greedy one's."""
    with at_once(scene.narrow, 1, SLEEPER.format(seconds=240), timeout=300):
        wait_until(lambda: scene.narrow.how_many("running") == 1)
        statuses = [scene.narrow.post("pass", mode="async").status for _ in range(8)]
        assert statuses == [202] * 5 + [429] * 3
        assert scene.other.post("pass", mode="async").status == 202
        scene.narrow.cancel_all()


def test_large_queued_requests_leave_nothing_on_the_disk(scene: Scene) -> None:
    content = base64.b64encode(os.urandom(12_000_000)).decode()
    files = [{"path": "file", "content_base64": content}]
    before = bytes_below(scene.data_dir)
    jobs = [scene.greedy.post("pass", mode="async", files=files).body["id"] for _ in range(2)]
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
    with two_tenants(
        tmp_path, data_dir=small_disk / "data", has_worker=False, DISK_RESERVE_MIB="32"
    ) as scene:
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
