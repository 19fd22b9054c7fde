"""What is broken at random, and how."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.chaos.hosts import Host, Server
from tests.chaos.pool import Engine, PoolService


@dataclass
class Scene:
    """All that can be broken."""

    hosts: list[Host]
    postgres: Server
    redis: Server
    chance: random.Random
    pool: PoolService | None = None
    engine: Engine | None = None

    def hits(self) -> dict[str, list[float]]:
        """When what holds the sandboxes was hit, by what it is."""
        found = {"pool": self.pool, "engine": self.engine}
        return {kind: each.hits for kind, each in found.items() if each is not None}


Fault = Callable[[Scene], str]


def _hit(kind: str, number: signal.Signals) -> Fault:
    return lambda scene: scene.chance.choice(scene.hosts).hit(kind, number, scene.chance)


def _pause(scene: Scene) -> str:
    kind = scene.chance.choice(("web", "worker"))
    host = scene.chance.choice(scene.hosts)
    return host.pause(kind, scene.chance.choice((2.0, 20.0)), scene.chance)


def _stop_postgres(scene: Scene) -> str:
    number = scene.chance.choice((signal.SIGINT, signal.SIGQUIT))
    return scene.postgres.outage(number, scene.chance.uniform(0.5, 5.0))


def _stop_redis(scene: Scene) -> str:
    return scene.redis.outage(signal.SIGKILL, scene.chance.uniform(0.5, 5.0))


def _hit_pool(number: signal.Signals) -> Fault:
    return lambda scene: scene.pool.hit(number) if scene.pool else ""


def _kill_engine(scene: Scene) -> str:
    return scene.engine.outage(scene.chance.uniform(0.5, 5.0)) if scene.engine else ""


def _fill_disk(scene: Scene) -> str:
    """The last host's own: what it keeps beside the database."""
    host = scene.hosts[-1]
    ballast = Path(host.environment["DATA_DIR"]) / "ballast"
    try:
        with ballast.open("wb") as stream:
            while True:
                stream.write(b"\0" * 65536)
                stream.flush()
    except OSError:
        time.sleep(scene.chance.uniform(1.0, 5.0))
    finally:
        ballast.unlink(missing_ok=True)
    return f"the disk of {host.name} was full"


FAULTS: dict[str, Fault] = {
    "kill-web": _hit("web", signal.SIGKILL),
    "kill-master": _hit("master", signal.SIGKILL),
    "kill-worker": _hit("worker", signal.SIGKILL),
    "kill-cluster": _hit("cluster", signal.SIGKILL),
    "kill-up": _hit("up", signal.SIGKILL),
    "kill-pool": _hit_pool(signal.SIGKILL),
    "kill-engine": _kill_engine,
    "term-web": _hit("web", signal.SIGTERM),
    "term-master": _hit("master", signal.SIGTERM),
    "term-worker": _hit("worker", signal.SIGTERM),
    "term-cluster": _hit("cluster", signal.SIGTERM),
    "term-up": _hit("up", signal.SIGTERM),
    "term-pool": _hit_pool(signal.SIGTERM),
    "pause": _pause,
    "postgres": _stop_postgres,
    "redis": _stop_redis,
    "disk": _fill_disk,
}
