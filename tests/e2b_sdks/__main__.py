"""Every SDK of E2B's through all of its methods, over one kind of sandbox (`make soak`)."""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.e2b_sdks.published import walk
from tests.e2b_sdks.table import held
from tests.support.processes import ROOT, clean_environment, free_port
from tests.support.site import MANAGE, prepare, serving

START_SECONDS = 120.0
_OF_A_POOL = {"max_memory": "1g", "timeout": 300}
# How each kind is configured. What comes in a cell is more than the usual sandbox has room for, and on
# a busy machine takes longer than the pool service usually lets a run take.
LAUNCHERS: dict[str, tuple[str, dict[str, object]]] = {
    "bubblewrap": ("local", {"launcher": "bubblewrap", "max_memory": "1g"}),
    "gvisor": ("local", {"launcher": "gvisor", "max_memory": "1g"}),
    "docker-runc": ("self_managed", {"runtime": "runc", **_OF_A_POOL}),
    "docker-gvisor": ("self_managed", {"runtime": "runsc", **_OF_A_POOL}),
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.e2b_sdks", description=__doc__)
    parser.add_argument("--launcher", choices=LAUNCHERS, default="bubblewrap")
    launcher = parser.parse_args().launcher
    provider, config = LAUNCHERS[launcher]
    extra = {"MINIMUM_ISOLATION": "namespaces", "POOL_PORT": str(free_port())}
    if provider == "self_managed":
        extra["DOCKER_HOST"] = os.environ.get("DOCKER_HOST", "unix:///var/run/docker.sock")
        config = {**config, "endpoint": f"http://127.0.0.1:{extra['POOL_PORT']}"}
    with tempfile.TemporaryDirectory(prefix="e2b-sdks.", dir="/var/tmp") as name:
        folder = Path(name)
        with (folder / "commands").open("w") as log:
            settings = {**config, "pool_size": 2, "max_sandboxes": 16}
            prepared = prepare(folder / "data", log, (provider, settings), **extra)
        with ExitStack() as held_open:
            if provider == "self_managed":
                environment = clean_environment(folder / "data", **extra)
                held_open.enter_context(_pool(environment, folder / "pool"))
            site = held_open.enter_context(serving(prepared, folder / "log", **extra))
            walks = walk(site)
    held(walks)
    for each in walks:
        assert each.called == each.methods, each.sdk.name
        counted = Counter(
            "works" if said == "works" else "not there" for said in each.outcomes.values()
        )
        print(f"{launcher}: {each.sdk.name}: {dict(counted)}")


@contextmanager
def _pool(environment: dict[str, str], log: Path) -> Iterator[None]:
    """Before the service, which waits for one of its own for a moment only."""
    with (
        log.open("wb") as stream,
        subprocess.Popen(
            [*MANAGE, "pool", "--launcher", "docker"],
            env=environment,
            cwd=ROOT,
            stdout=stream,
            stderr=stream,
        ) as process,
    ):
        try:
            until = time.monotonic() + START_SECONDS
            while not _listens(int(environment["POOL_PORT"])):
                assert time.monotonic() < until, log.read_text()
                time.sleep(0.1)
            yield
        finally:
            # In order, so that it takes its containers away.
            process.terminate()
            process.wait(START_SECONDS)


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


if __name__ == "__main__":
    main()
