"""`manage.py pool`: the instance API and its limits."""

from __future__ import annotations

import asyncio
import base64
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from providers.errors import ProviderUnavailable
from providers.runtime.service.launchers import LauncherChoice
from providers.runtime.service.pool_manager import PoolManager
from providers.runtime.service.settings import ServiceSettings
from providers.values import Job
from tests.conftest import require
from tests.support.docker_engine import eventually
from tests.support.pool_service import (
    SLEEP,
    Answer,
    PoolService,
    assert_error,
    disconnected_run,
    running,
)
from tests.support.processes import (
    ROOT,
    STOP_SECONDS,
    clean_environment,
    command_line,
    free_port,
    started,
)

pytest_plugins = ["tests.support.pool_fixtures"]

OWNERS = ("alice", "bob", "charlie")
BRIEF = ServiceSettings(pool_size=1, max_lifetime=0.5)


def test_an_instance_from_its_creation_to_its_end(pool: PoolService) -> None:
    created = pool.ask("POST", "/v1/instances", {"template": "python", "owner": "alice"})
    assert created.status == 201
    assert created.body == {
        "instance_id": created.body["instance_id"],
        "runtime": "bubblewrap",
        "sharing": "execution",
        "template": "python",
    }
    code = (
        "import os\n"
        "def main(n):\n"
        "    print('out'); os.write(2, b'err')\n"
        "    open('artifacts/a.txt', 'wb').write(open('in/x.bin', 'rb').read())\n"
        "    return {'n': n}"
    )
    content = base64.b64encode(b"\0binary").decode()
    answer = pool.run(
        created.body["instance_id"],
        code,
        arguments={"n": 1},
        entrypoint="auto",
        files=[{"path": "in/x.bin", "content_base64": content}],
        limits={"output_bytes": 1000},
    )
    assert answer.status == 200, answer
    result = answer.body
    assert (result["stdout"], result["stderr"], result["exit_code"]) == ("out\n", "err", 0)
    assert (result["has_result"], result["result"]) == (True, {"n": 1})
    assert (result["timed_out"], result["out_of_memory"], result["outputs"]) == (False, False, [])
    assert result["metadata"]["runtime"] == "bubblewrap"
    assert result["metadata"]["limits"]["memory_bytes"] == 256 << 20
    assert 0 < result["execution_time"] < 10
    expected = {"name": "a.txt", "mime_type": "text/plain", "content_base64": content}
    assert result["artifacts"] == [expected]


def test_deleting_ends_what_runs(pool: PoolService) -> None:
    instance_id = pool.create()
    with ThreadPoolExecutor(1) as executor:
        running_code = executor.submit(pool.run, instance_id, SLEEP, timeout=60)
        pool.wait_until_it_sleeps()
        assert pool.ask("DELETE", f"/v1/instances/{instance_id}").status == 204
        assert_error(running_code.result(60), 503, "SB009", started=True)
    assert pool.ask("DELETE", f"/v1/instances/{instance_id}").status == 404
    pool.wait_for(lambda stats: stats["busy"] == 0 and stats["instances"] == 0)


def test_an_instance_runs_one_job_only(pool: PoolService) -> None:
    instance_id = pool.create()
    assert pool.run(instance_id).body["stdout"] == "ran\n"
    assert_error(pool.run(instance_id), 503, "SB009", started=True)
    busy = pool.create()
    with disconnected_run(pool, busy, SLEEP):
        pool.wait_until_it_sleeps()
        assert_error(pool.run(busy), 503, "SB009", started=True)


def test_no_instance_is_there_for_two_owners(pool: PoolService) -> None:
    look = "import os\nprint(os.path.exists('/tmp/secret'))\nopen('/tmp/secret', 'w').write('x')"
    for _ in range(2):
        instances = {owner: pool.create(owner=owner) for owner in OWNERS}
        assert len(set(instances.values())) == len(OWNERS)
        for instance_id in instances.values():
            assert pool.run(instance_id, look).body["stdout"] == "False\n"


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PoolService]:
    """A service with one sandbox, by the settings that each test puts into force."""
    log = tmp_path_factory.mktemp("narrow") / "log"
    with running(log, SANDBOX_EXECUTOR_MANAGER_POOL_SIZE="1") as service:
        yield service


def put(pool: PoolService, **settings: int) -> None:
    settings = {"pool_size": 1, "max_sandboxes": 1, "queue_timeout": 60, **settings}
    assert pool.ask("PUT", "/v1/settings", settings).status == 200
    pool.wait_until_healthy()


def test_owners_of_a_shared_pool_wait_in_turn(narrow: PoolService) -> None:
    """Ten requests of one owner do not put those of the others behind them."""
    put(narrow)
    ended: list[str] = []
    held = narrow.create(owner="alice")

    def one(owner: str) -> None:
        narrow.run(narrow.create(owner=owner))
        ended.append(owner)

    with ThreadPoolExecutor(12) as executor:
        for _ in range(10):
            executor.submit(one, "alice")
        narrow.wait_for(lambda stats: stats["waiting"] == 10)
        for owner in ("bob", "charlie"):
            executor.submit(one, owner)
        narrow.wait_for(lambda stats: stats["waiting"] == 12)
        narrow.run(held)
    assert len(ended) == 12
    assert set(ended[:-6]) == set(OWNERS)


def test_a_client_that_disconnects_has_its_sandbox_destroyed(pool: PoolService) -> None:
    before = pool.stats()["instances"]
    connection = disconnected_run(pool, pool.create(), SLEEP)
    pool.wait_until_it_sleeps()
    connection.close()
    pool.wait_for(lambda stats: stats["busy"] == 0 and stats["instances"] == before)
    assert pool.run(pool.create()).body["stdout"] == "ran\n"


def test_a_client_that_disconnects_while_waiting_costs_no_sandbox(narrow: PoolService) -> None:
    put(narrow)
    instance_id = narrow.create()
    host, port = narrow.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as waiting:
        waiting.sendall(b"POST /v1/instances HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}")
        narrow.wait_for(lambda stats: stats["waiting"] == 1)
    narrow.wait_for(lambda stats: stats["waiting"] == 0)
    narrow.run(instance_id)
    assert narrow.run(narrow.create()).body["stdout"] == "ran\n"


def test_40_requests_at_once_on_a_pool_of_2(narrow: PoolService) -> None:
    put(narrow, pool_size=2, max_sandboxes=2, queue_size=20)

    def one(number: int) -> tuple[str, Answer]:
        owner = OWNERS[number % 3]
        created = narrow.ask("POST", "/v1/instances", {"template": "python", "owner": owner})
        if created.status != 201:
            return "refused", created
        return "ran", narrow.run(created.body["instance_id"], f"print({number})")

    with ThreadPoolExecutor(40) as executor:
        answers = list(executor.map(one, range(40)))

    ran = [(n, answer) for n, (kind, answer) in enumerate(answers) if kind == "ran"]
    assert len(ran) >= 20
    for number, answer in ran:
        assert (answer.status, answer.body["stdout"]) == (200, f"{number}\n")
    for kind, answer in answers:
        if kind == "refused":
            assert_error(answer, 429, "SB008", started=False)
            assert int(answer.headers["Retry-After"]) >= 1
    narrow.wait_for(lambda stats: stats["idle"] == 2 and stats["busy"] == 0)


def test_a_full_pool_is_told_in_ragflow_s_words(narrow: PoolService) -> None:
    put(narrow)
    held = narrow.create()
    put(narrow, queue_timeout=1)
    answer = narrow.ragflow("def main():\n    return 1")
    assert answer.status == 200
    assert answer.body["status"] == "program_runner_error"
    assert answer.body["exit_code"] == -10
    assert answer.body["detail"] == "no_available_container"
    assert answer.body["stderr"] == "Container pool is busy"
    narrow.run(held)


def test_an_instance_nobody_uses_is_destroyed(tmp_path: Path) -> None:
    """In this process, where its life may be shorter than a provider can ask for."""
    require("bwrap")

    async def scenario() -> None:
        manager = PoolManager(LauncherChoice("bubblewrap", tmp_path, "test"), BRIEF)
        manager.open()
        try:
            instance = await manager.create("python", "alice")
            assert manager.stats()["instances"] == 1
            await eventually(lambda: manager.stats()["instances"] == 0, 40)
            with pytest.raises(ProviderUnavailable, match=r"it was not used for 0\.5 s") as refused:
                await manager.run(instance.instance_id, Job("print(1)"))
            assert (refused.value.code, refused.value.started) == ("SB009", False)
        finally:
            await manager.close()

    asyncio.run(scenario())


def test_a_warm_sandbox_that_is_killed_is_never_handed_out(pool: PoolService) -> None:
    pool.wait_for(lambda stats: stats["idle"] >= 3 and stats["creating"] == 0)
    before = pool.stats()
    below = pool.service.look()
    # Of a sandbox the first process has the supervisor's argument; killing it ends the others.
    tools = {pid for pid in below if b"bwrap" in command_line(pid)}
    zygotes = {pid for pid in below if parent(pid) in tools}
    sandboxes = [pid for pid in below if parent(pid) in zygotes]
    assert len(sandboxes) >= before["idle"]
    for pid in sandboxes:
        os.kill(pid, signal.SIGKILL)
    pool.wait_for(lambda stats: stats["started"] >= before["started"] + before["idle"])
    for _ in range(3):
        assert pool.run(pool.create()).body["stdout"] == "ran\n"


def parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[1])
    except OSError:
        # It has ended meanwhile.
        return 0


def test_the_health_is_true(tmp_path: Path) -> None:
    """Without an engine nothing can run, and that is what is said."""
    port = free_port()
    environment = clean_environment(
        tmp_path / "data", PORT=str(port), DOCKER_HOST=f"unix://{tmp_path}/none.sock"
    )
    command = [sys.executable, "manage.py", "pool", "--launcher", "docker", "--port", str(port)]
    with started(command, environment, ROOT, tmp_path / "log") as service:
        pool = PoolService(service)
        deadline = time.monotonic() + 60
        while True:
            try:
                health = pool.ask("GET", "/healthz")
                if "Docker" in str(health.body):
                    break
            except OSError:
                pass  # it does not listen yet
            assert time.monotonic() < deadline, service.output
            time.sleep(0.05)
        assert health.status == 503
        created = pool.ask("POST", "/v1/instances", {})
        assert_error(created, 503, "SB009", started=False)
        assert "Docker" in created.body["error"]["message"]
        assert pool.ragflow("def main(): pass").body["exit_code"] == -3
        code, seconds = pool.terminate()
        assert (code, seconds < STOP_SECONDS) == (0, True)


def test_it_uses_no_database(narrow: PoolService) -> None:
    put(narrow)
    assert narrow.run(narrow.create()).status == 200
    assert narrow.data_dir.is_dir()
    assert not list(narrow.data_dir.glob("*.sqlite3*"))


def test_a_taken_port_is_named(pool: PoolService, tmp_path: Path) -> None:
    port = pool.url.rpartition(":")[2]
    refused = subprocess.run(
        [sys.executable, "manage.py", "pool", "--launcher", "bubblewrap", "--port", port],
        env=clean_environment(tmp_path / "data"),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert refused.returncode == 1
    assert f"port {port}" in refused.stderr
