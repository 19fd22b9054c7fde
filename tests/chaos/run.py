"""One course of faults: start everything, break it, let it come to rest, judge."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg

from tests.chaos.callers import Callers
from tests.chaos.conversations import Conversations
from tests.chaos.faults import FAULTS, Scene
from tests.chaos.hosts import LOCAL, Host, Server, configure, environment_of
from tests.chaos.pool import Engine, PoolService
from tests.chaos.shares import Memory, judge_shares
from tests.chaos.talk_verdict import fault_explains_loss, judge_talks, processes_left
from tests.chaos.verdict import Verdict, Watch, judge
from tests.chaos.witness import Seen, Witness, Written
from tests.support.docker_engine import SMALL_IMAGE
from tests.support.servers import Servers

PAUSE_SECONDS = (1.0, 4.0)
START_SECONDS = 60.0
REST_SECONDS = 25.0
SCHEDULE_SECONDS = 90.0
# Of the host whose disk is filled, and what it wants to be free: with the default it would run nothing.
DISK_BYTES, DISK_RESERVE_MIB = 64 * 1024 * 1024, 16

# What runs the code: the hosts themselves, without isolation, or a pool service.
LAUNCHERS = ("none", "bubblewrap", "docker")

_OPEN_RECORDS = "SELECT COUNT(*) FROM executions_execution WHERE finished_at IS NULL"
_HELD_SANDBOXES = (
    "SELECT COUNT(*) FROM executions_session WHERE closed_at IS NOT NULL AND released_at IS NULL"
)


@contextmanager
def open_folder(*, keep: bool = False) -> Iterator[Path]:
    """A folder that other users may pass through: PostgreSQL, and what runs."""
    folder = Path(tempfile.mkdtemp(prefix="chaos.", dir="/var/tmp"))
    folder.chmod(0o711)
    try:
        yield folder
    finally:
        if not keep:
            shutil.rmtree(folder)


def run(
    folder: Path,
    servers: Servers,
    *,
    seconds: float,
    callers: int,
    seed: int,
    kinds: Iterable[str],
    longest: float = 3.0,
    launcher: str = "none",
    pause: tuple[float, float] = PAUSE_SECONDS,
    conversations: int = 0,
    faults: int = 0,
    tenants: int = 3,
    max_running: int = 100,
    tell: Callable[[str], None] = lambda line: None,
) -> Verdict:
    """Faults of these kinds at random, for so long and so many. The second host's clock is minutes
    ahead.

    `launcher` is one of LAUNCHERS; what is a pool's or an engine's breaks where there is one. So
    many `conversations` are held at once, which needs a pool: it keeps their sandboxes. Callers
    are shared out among `tenants`, each of which may run `max_running` at once.
    """
    servers.run_sql("CREATE DATABASE chaos")
    database_url = servers.database_url("chaos")
    postgres, redis = Server("postgres", servers), Server("redis", servers)
    (folder / "shared").mkdir()
    postgres.outage(signal.SIGINT, 0)  # with a setting that keeps every commit
    shared = {"DATABASE_URL": database_url, "STORAGE_URL": str(folder / "shared")}
    hosts = _hosts(folder, servers.environment | shared)
    scene = Scene(hosts, postgres, redis, random.Random(seed))
    witness: Witness = Written(folder / "outside") if launcher == "none" else Seen()
    try:
        provider = LOCAL if launcher == "none" else _open_pool(scene, folder, launcher)
        keys = configure(hosts[0], provider, tenants, max_running)
        shutil.copy(folder / "one" / "secrets.env", folder / "two" / "secrets.env")
        (folder / "two" / "secrets.env").chmod(0o600)
        watch, memory = Watch(database_url), Memory(hosts)
        urls = [host.url for host in hosts]
        load = Callers(urls, keys, witness, threads=callers, longest=longest, seed=seed)
        talks = Conversations(urls, keys, threads=conversations, longest=longest, seed=seed)
        for host in hosts:
            host.start()
        for host in hosts:
            _wait_until_up(host)
        watch.start()
        memory.start()
        load.start()
        talks.start()
        _break(scene, list(kinds), seconds, faults, pause, tell)
        for host in hosts:
            _wait_until_up(host)
        tell("no more faults; callers finish")
        load.stop()
        talks.stop()
        _wait_until_closed(database_url)
        watch.stop()
        memory.stop()
        tell("both hosts are stopped in order")
        for host in hosts:
            host.stop()
        verdict = judge(load.calls, witness, database_url, watch, hosts, postgres)
        judge_shares(verdict, load.calls, watch.most_running, max_running, memory)
        if conversations:
            explains = fault_explains_loss(launcher, scene.hits())
            judge_talks(verdict, talks.talks, database_url, explains)
    finally:
        for host in hosts:
            host.stop()
        if scene.pool is not None:
            scene.pool.stop()
        if scene.engine is not None:
            scene.engine.stop()
        witness.stop()
        subprocess.run(["umount", folder / "two"], check=False)
    left = [f"{kind} {pids}" for host in hosts for kind, pids in host.processes().items()]
    left += processes_left() if conversations else []
    verdict.wrong += [f"still running: {what}" for what in left]
    return verdict


def _hosts(folder: Path, shared: dict[str, str]) -> list[Host]:
    hosts = []
    for name in ("one", "two"):
        home = folder / name
        home.mkdir()
        environment = environment_of(name, home, shared, skewed=name == "two")
        if name == "two":
            size = f"size={DISK_BYTES}"
            subprocess.run(["mount", "-t", "tmpfs", "-o", size, "tmpfs", home], check=True)
            environment["DISK_RESERVE_MIB"] = str(DISK_RESERVE_MIB)
        hosts.append(Host(name, environment, folder / f"{name}.log"))
    return hosts


def _open_pool(scene: Scene, folder: Path, launcher: str) -> tuple[str, dict[str, Any]]:
    """One pool service for both hosts, over an engine of its own where it is one of containers."""
    home = folder / "pool"
    home.mkdir()
    environment = environment_of("pool", home, {}, skewed=False)
    environment |= {"PATH": os.environ["PATH"], "MINIMUM_ISOLATION": "namespaces"}
    config: dict[str, Any] = {"pool_size": 2, "max_retries": 0, "max_sandboxes": 64}
    if launcher == "docker":
        scene.engine = Engine(folder / "engine")
        environment["DOCKER_HOST"] = scene.engine.url
        config |= {f"base_{name}_image": SMALL_IMAGE for name in ("python", "nodejs", "bash")}
    scene.pool = PoolService(environment, launcher, folder / "pool.log")
    scene.pool.start()
    for host in scene.hosts:
        # An address of this machine's is allowed where it is the pool's own.
        host.environment["POOL_PORT"] = environment["POOL_PORT"]
    return "self_managed", config | {"endpoint": scene.pool.endpoint}


def _break(
    scene: Scene,
    kinds: list[str],
    seconds: float,
    faults: int,
    pause: tuple[float, float],
    tell: Callable[[str], None],
) -> None:
    """Each kind in turn, in a random order, until the time is over and so many were done."""
    chance = scene.chance
    until = time.monotonic() + seconds
    left = chance.sample(kinds, len(kinds))
    rounds = done = 0
    while not rounds or time.monotonic() < until or done < faults:
        time.sleep(chance.uniform(*pause))
        what = FAULTS[left.pop()](scene)
        if not left:
            rounds += 1
            left = chance.sample(kinds, len(kinds))
        if what:
            done += 1
            tell(f"{max(0, until - time.monotonic()):4.0f} s left, {done} faults: {what}")


def _wait_until_up(host: Host) -> None:
    until = time.monotonic() + START_SECONDS
    while time.monotonic() < until:
        try:
            with urllib.request.urlopen(f"{host.url}/healthz", timeout=5):
                return
        except OSError:
            time.sleep(0.1)
    raise RuntimeError(f"{host.name} did not come up:\n{host.log.read_text()[-3000:]}")


def _wait_until_closed(database_url: str) -> None:
    """Until no row is open and no sandbox is held, or as long as that may be so."""
    until = time.monotonic() + REST_SECONDS
    with psycopg.connect(database_url, autocommit=True) as connection:
        for query in (_OPEN_RECORDS, _HELD_SANDBOXES):
            while time.monotonic() < until:
                found = connection.execute(query).fetchone()
                if found is not None and not found[0]:
                    break
                time.sleep(0.2)
            # What could not be ended at once is for the schedule, once a minute.
            until += SCHEDULE_SECONDS
