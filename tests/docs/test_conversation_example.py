"""examples/conversation does what its page says, over a restart of the service in the middle."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

import pytest

from providers.runtime.service.unix_socket import answers
from tests.conftest import require
from tests.support.deployment_pages import blocks_of
from tests.support.processes import ROOT, Service, started
from tests.support.required import missing
from tests.support.sessions import wait_for
from tests.support.site import MANAGE, prepare

EXAMPLE = ROOT / "examples" / "conversation"
PAUSED = "The service may be restarted now. Enter goes on.\n"
GONE = "The sandbox was gone: its files are back, its variables are not.\n"
BEFORE = (
    "1-read.py: succeeded\n418 time zones in 247 countries\n",
    "2-count.py: succeeded\n",
    "3-locate.py: failed\n",
    "ValueError: Antarctica/Syowa: -690022+0393524\n",
    "4-locate-all.py: succeeded\n418 places\n",
)


class Talk:
    """One program of the example, which stops in the middle."""

    def __init__(self, command: str, folder: Path, environment: dict[str, str]) -> None:
        self.folder = folder
        folder.mkdir()
        self._process = subprocess.Popen(
            ["sh", "-c", command],
            cwd=ROOT,
            env=environment | {"OUT": str(folder)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def until_the_pause(self) -> str:
        assert self._process.stdout is not None
        told = ""
        for line in self._process.stdout:
            told += line
            if line == PAUSED:
                return told
        raise AssertionError(told)

    def to_the_end(self) -> str:
        told, _ = self._process.communicate("\n", timeout=300)
        assert self._process.returncode == 0, told
        return told

    def assert_it_brought_the_result(self) -> None:
        found = json.loads((self.folder / "furthest.json").read_text())
        assert found == {"north": "Arctic/Longyearbyen", "south": "Antarctica/Vostok"}
        picture = (self.folder / "zones.png").read_bytes()
        assert picture.startswith(b"\x89PNG\r\n")
        assert int.from_bytes(picture[16:20]) == 1000


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    for program in ("bwrap", "curl"):
        require(program)
    chosen = ROOT / ".venv-packages" / "bin" / "python"
    python = chosen if chosen.exists() else "/usr/bin/python3"
    drawing = subprocess.run([python, "-c", "import matplotlib"], capture_output=True)
    if drawing.returncode != 0:
        missing("matplotlib is not there: manage.py packages installs it")
    site = prepare(tmp_path_factory.mktemp("conversation") / "data")
    environment = site.environment(API_KEY=site.alice)
    environment["URL"] = f"http://127.0.0.1:{environment['PORT']}"
    return site.data_dir, environment


@contextmanager
def running(
    command: str, *options: str, environment: dict[str, str], log: Path
) -> Iterator[Service]:
    """One command of the project, ended in order."""
    with started([*MANAGE, command, *options], environment, ROOT, log) as service:
        yield service
        service.look()
        os.kill(service.process.pid, signal.SIGTERM)
        service.wait_for_end()
        assert service.survivors() == []


def test_it_goes_on_after_a_restart_and_without_its_sandbox(
    prepared: tuple[Path, dict[str, str]], tmp_path: Path
) -> None:
    data_dir, environment = prepared
    *commands, pool_command = [block.text for block in blocks_of(EXAMPLE / "README.md")]
    pool_options = pool_command.removeprefix(".venv/bin/python manage.py ").split()
    socket = data_dir / "run" / "pool.sock"

    def pool(name: str) -> AbstractContextManager[Service]:
        return running(*pool_options, environment=environment, log=tmp_path / name)

    def service(name: str) -> AbstractContextManager[Service]:
        return running("up", environment=environment, log=tmp_path / name)

    with ExitStack() as last:
        with pool("first-pool"):
            wait_for(lambda: answers(socket))
            with service("first") as first:
                first.wait_until_ready()
                python = Talk(commands[0], tmp_path / "py", environment)
                curl = Talk(commands[1], tmp_path / "sh", environment)
                for talk in (python, curl):
                    told = talk.until_the_pause()
                    assert [part for part in BEFORE if part not in told] == []
            last.enter_context(service("second")).wait_until_ready()

            told = python.to_the_end()
            assert "5-furthest.py: succeeded" in told
            assert GONE not in told
            python.assert_it_brought_the_result()
        last.enter_context(pool("second-pool"))
        wait_for(lambda: answers(socket))

        told = curl.to_the_end()
        assert "5-furthest.py: failed" in told.partition(GONE)[0]
        assert "5-furthest.py: succeeded" in told.partition(GONE)[2]
        curl.assert_it_brought_the_result()
