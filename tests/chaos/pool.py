"""A pool service of its own, and the Docker engine below it: both are started again when killed."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

from tests.support.docker_engine import PrivateEngine
from tests.support.processes import ROOT, end_tree

RESTART_SECONDS = 1.0
STOP_SECONDS = 60.0


class PoolService:
    """`manage.py pool`, started again whenever it ends, as systemd does."""

    def __init__(self, environment: dict[str, str], launcher: str, log: Path) -> None:
        self.port = int(environment["POOL_PORT"])
        self.endpoint = f"http://127.0.0.1:{self.port}"
        self._environment = environment
        self._launcher = launcher
        self._log = log
        self._goes_on = True
        # When it was sent a signal that ends it.
        self.hits: list[float] = []
        self._process: subprocess.Popen[bytes] | None = None
        self._keeper = threading.Thread(target=self._keep, name="pool", daemon=True)

    def start(self) -> None:
        self._keeper.start()

    def stop(self) -> None:
        self._goes_on = False
        process = self._process
        if process is not None and process.poll() is None:
            process.terminate()
        if self._keeper.is_alive():
            self._keeper.join(STOP_SECONDS)
        if process is not None and process.poll() is None:
            process.kill()

    def hit(self, number: signal.Signals) -> str:
        """Send it a signal. What was hit, "" where it does not run just now."""
        process = self._process
        if process is None or process.poll() is not None:
            return ""
        self.hits.append(time.time())
        with suppress(ProcessLookupError):
            os.kill(process.pid, number)
        return f"{number.name} pool"

    def _keep(self) -> None:
        with self._log.open("ab") as stream:
            while self._goes_on:
                self._process = subprocess.Popen(
                    [sys.executable, str(ROOT / "manage.py"), "pool", "--launcher", self._launcher],
                    env=self._environment,
                    stdin=subprocess.DEVNULL,
                    stdout=stream,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
                self._process.wait()
                if self._goes_on:
                    time.sleep(RESTART_SECONDS)


class Engine(PrivateEngine):
    """One that is killed, and comes back with what it kept."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        super().__init__(folder)
        self.hits: list[float] = []
        self.start()
        self.install_small_image()

    def start(self) -> None:
        """Also where a killed one has left what keeps the next from starting. An engine ends the
        containers that it finds at its start; this one forgets them with its folder.
        """
        for shim in self._shims():
            end_tree(shim)
        for place in (self.folder / "exec" / "netns").glob("*"):
            subprocess.run(["umount", "--lazy", place], check=False, capture_output=True)
        shutil.rmtree(self.folder / "exec", ignore_errors=True)
        super().start()

    def stop(self) -> None:
        """For good. A killed one has left its data mounted on itself."""
        super().stop()
        for shim in self._shims():
            end_tree(shim)
        data = self.folder / "data"
        subprocess.run(["umount", "--recursive", "--lazy", data], check=False, capture_output=True)

    def outage(self, seconds: float) -> str:
        self.hits.append(time.time())
        self.kill()
        time.sleep(seconds)
        self.start()
        return f"SIGKILL engine, away for {seconds:g} s"

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait(60)
            self._process = None

    def _shims(self) -> list[int]:
        """The processes that hold containers of this engine, whether it knows of them or not."""
        found, place = [], f"{self.folder}/exec"
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                command = (folder / "cmdline").read_bytes().decode(errors="replace")
                if "containerd-shim" in command.partition("\0")[0] and place in command:
                    found.append(int(folder.name))
        return found
