"""The pool service of the installation: started by who needs it first, shared, and found again."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from providers.errors import ProviderUnavailable, RateLimited, SandboxError
from providers.local import service as local_service
from providers.local.provider import LocalProvider, LocalSandbox
from providers.local.service import start as start_process
from providers.runtime.guest import wire
from providers.runtime.service import operations
from providers.runtime.service.unix_socket import (
    alone,
    answers,
    connect,
    is_taken,
    runs_path,
    socket_path,
)
from providers.sandbox import Sandbox
from providers.services.health import _look_at
from providers.values import Event, ExecutionResult, Job, SandboxSpec
from tests.conftest import require
from tests.support.processes import ROOT
from tests.support.sandboxes import Local, wait_until_gone
from tests.support.waiting import wait_until

CONFIG = {"launcher": "bubblewrap", "pool_size": 1, "max_sandboxes": 3, "queue_timeout": 60}


@pytest.fixture
def data_dir(settings: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """One of its own, whose service is a process."""
    require("bwrap")
    settings.DATA_DIR = tmp_path
    monkeypatch.setattr(local_service, "start", start_process)
    yield tmp_path
    if (process := local_service._started.pop(runs_path(tmp_path), None)) is not None:
        process.terminate()
        process.wait(60)


@contextmanager
def opened(**config: Any) -> Iterator[LocalProvider]:
    provider = LocalProvider()
    provider.initialize(LocalProvider.check_config({**CONFIG, **config}))
    with closing(provider):
        yield provider


def take(provider: LocalProvider, owner: str = "alice") -> Sandbox:
    return provider.open(SandboxSpec("python"), owner)


def run(provider: LocalProvider, code: str = "print(1)") -> str:
    sandbox = take(provider)
    try:
        return sandbox.run(Job(code)).stdout
    finally:
        sandbox.close()


def process_of(data_dir: Path) -> subprocess.Popen[bytes]:
    return local_service._started[runs_path(data_dir)]


def busy(provider: LocalProvider) -> int:
    found: int = provider.health_check().details["busy"]
    return found


def test_who_needs_it_first_starts_it_and_all_others_share_it(data_dir: Path) -> None:
    with opened() as first, opened() as second:
        sandbox = take(first)
        assert sandbox.run(Job("print('ran')")).stdout == "ran\n"
        kept = second.open(SandboxSpec("python", kept=True), "bob")
        assert busy(first) == busy(second) == 1
        with pytest.raises(RateLimited), opened(queue_timeout=1) as third, ExitStack() as stack:
            for _ in range(3):
                stack.callback(take(third).close)
        kept.close()
        lock = process_of(data_dir)
    assert lock.poll() is None


def test_a_sandbox_that_is_closed_at_once_takes_nothing_from_the_next_run(
    data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_closed = threading.Event()
    note_the_end = LocalSandbox._end_run

    def note_late(sandbox: LocalSandbox, result: Future[ExecutionResult]) -> None:
        """The caller has the result before the sandbox knows of its end."""
        assert is_closed.wait(60)
        note_the_end(sandbox, result)

    monkeypatch.setattr(LocalSandbox, "_end_run", note_late)
    with opened() as provider:
        assert provider._service is not None
        pool = provider._service._holding
        sandbox = take(provider)
        assert sandbox.run(Job("print(1)")).stdout == "1\n"
        following = provider.submit_open(SandboxSpec("python"), "bob")
        assert sandbox.close()
        is_closed.set()
        with closing(following.result(60)) as other:
            assert other.run(Job("print(2)")).stdout == "2\n"
        assert provider._service._holding is pool
        assert len(provider._service._open) == 2


def test_one_that_was_killed_is_started_again_for_the_next_run(data_dir: Path) -> None:
    with opened() as provider:
        assert run(provider) == "1\n"
        killed = process_of(data_dir)
        killed.kill()
        killed.wait(60)
        assert run(provider, "print(2)") == "2\n"
        assert process_of(data_dir).pid != killed.pid


def test_one_that_stays_takes_the_place_of_one_that_was_started_on_the_way(
    data_dir: Path,
) -> None:
    with opened() as provider:
        assert run(provider) == "1\n"
        former = process_of(data_dir)
        command = [sys.executable, "manage.py", "pool", "--no-port"]
        environment = os.environ | {"DATA_DIR": str(data_dir)}
        with subprocess.Popen(
            command, env=environment, cwd=ROOT, stdout=subprocess.PIPE
        ) as lasting:
            try:
                assert former.wait(60) == 0
                assert lasting.stdout is not None
                assert b"pool.sock" in lasting.stdout.readline()
                assert is_taken(socket_path(data_dir))
                assert run(provider, "print(2)") == "2\n"
                assert process_of(data_dir) is former
            finally:
                lasting.terminate()
    assert not socket_path(data_dir).exists()


def test_what_ran_in_one_that_was_killed_may_have_run(data_dir: Path) -> None:
    has_begun = threading.Event()

    def tell(event: Event) -> None:
        has_begun.set()

    with opened() as provider:
        sandbox = take(provider)
        code = "import time\nprint(1, flush=True)\ntime.sleep(600)"
        result = sandbox.submit_run(Job(code, timeout=900), tell)
        assert has_begun.wait(60)
        process_of(data_dir).kill()
        with pytest.raises(ProviderUnavailable, match="ended during the run") as caught:
            result.result(60)
        assert caught.value.started
        assert not caught.value.nothing_ran


def test_it_ends_after_its_last_use_and_not_before(
    data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened() as provider:
        assert run(provider) == "1\n"
    assert process_of(data_dir).wait(120) == 0
    assert not answers(socket_path(data_dir))
    assert "Traceback" not in (data_dir / "run/pool.log").read_text()


def test_one_that_does_not_start_is_told_with_its_log(
    data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_service, "START_SECONDS", 0.5)
    with (
        alone(socket_path(data_dir)),
        pytest.raises(ProviderUnavailable, match=r"pool\.log says why"),
        opened(),
    ):
        pass


def test_where_something_else_starts_it_it_is_waited_for(
    data_dir: Path, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.POOL_AUTOSTART = False
    monkeypatch.setattr(local_service, "START_SECONDS", 0.5)
    with pytest.raises(ProviderUnavailable, match=r"manage.py pool --no-port"), opened():
        pass
    assert runs_path(data_dir) not in local_service._started
    monkeypatch.setattr(local_service, "START_SECONDS", 60)
    later = threading.Timer(0.2, start_process, [runs_path(data_dir)])
    later.start()
    with opened() as provider:
        assert run(provider) == "1\n"
    later.join()


def test_all_who_wait_for_a_service_that_does_not_come_wait_for_the_same_try(
    data_dir: Path, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened() as provider:
        settings.POOL_AUTOSTART = False
        process_of(data_dir).kill()
        process_of(data_dir).wait(60)
        monkeypatch.setattr(local_service, "START_SECONDS", 2.0)
        began = time.monotonic()
        takes = [provider.submit_open(SandboxSpec("python"), "alice") for _ in range(30)]
        for each in takes:
            with pytest.raises(ProviderUnavailable):
                each.result(60)
        # One after the other they would take a minute.
        assert time.monotonic() - began < 30


def test_a_service_that_was_killed_while_it_was_full_is_not_full(data_dir: Path) -> None:
    with opened(max_sandboxes=1) as provider:
        take(provider)
        wait_until(provider.is_full, seconds=60)
        process_of(data_dir).kill()
        wait_until(lambda: not provider.is_full(), seconds=60)


def test_a_run_that_comes_while_the_service_ends_waits_for_the_next_one(data_dir: Path) -> None:
    with opened() as provider:
        busy_one = take(provider)
        result = busy_one.submit_run(Job("import time\ntime.sleep(2)\nprint('whole')"))
        former = process_of(data_dir)
        former.terminate()
        assert run(provider, "print('next')") == "next\n"
        assert result.result(60).stdout == "whole\n"
        assert former.wait(60) == 0


def test_a_defect_of_the_service_before_the_code_proves_that_none_ran(
    own: Local, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(own.service.manager, "create_in", fail)
    with pytest.raises(ProviderUnavailable, match="Its log has the reason") as caught:
        take(own.provider)
    assert caught.value.may_fall_back


def test_a_look_at_its_health_has_no_figures_which_its_processes_tell(
    settings: Any, tmp_path: Path
) -> None:
    require("bwrap")
    error, enforced, figures = _look_at("local", dict(CONFIG))
    assert error is None
    assert "memory" in enforced
    assert "capacity" not in figures


def test_unused_connections_are_bounded(own: Local, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_service, "MOST_IDLE", 1)
    sandboxes = [take(own.provider) for _ in range(3)]
    for sandbox in sandboxes:
        assert sandbox.run(Job("print(1)")).stdout == "1\n"
    service = own.provider._service
    assert service is not None
    wait_until(lambda: len(service._open) == 2, seconds=60)


def test_a_client_that_dies_gives_back_what_it_has(own: Local) -> None:
    """Also while its program runs."""
    connection = Raw(own)
    taken = connection.take()
    wait_until(lambda: own.stats()["busy"] == 1, seconds=60)
    job = Job("import time\ntime.sleep(600)", timeout=900)
    connection.send(operations.run_to_frame(job, language="python", stream=False))
    wait_until(own.is_running, seconds=60)
    connection.close()
    own.assert_nothing_is_left()
    assert taken["runtime"] == "bubblewrap"


class Raw:
    """A connection to the service, for what no client of ours sends."""

    def __init__(self, local: Local) -> None:
        path = Path(local._folder.name)
        self.socket: socket.socket = connect(runs_path(path), 60)
        self._parser = wire.Parser(wire.REQUEST_LIMIT)
        self._frames: list[Any] = []
        self._pool = next(iter(local.service.manager._open.values())).name

    def send(self, frame: bytes) -> None:
        self.socket.sendall(frame)

    def receive(self) -> dict[str, Any]:
        """The next frame's header; {} when the service has ended the connection."""
        while not self._frames:
            data = self.socket.recv(1 << 16)
            if not data:
                return {}
            self._frames += self._parser.feed(data)
        header, parts = self._frames.pop(0)
        if header["event"] == "error":
            return {**header, **json.loads(parts["error"])["error"]}
        return dict(header)

    def ask(self, **header: Any) -> dict[str, Any]:
        self.send(operations.frame(header))
        return self.receive()

    def take(self) -> dict[str, Any]:
        return self.ask(op="take", pool=self._pool, template="python", owner="alice")

    def close(self) -> None:
        self.socket.close()


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ({"op": "destroy"}, "Unknown operation"),
        ({}, "Unknown operation"),
        ({"op": "take", "pool": "x", "template": "python"}, "no such pool"),
        ({"op": "stats"}, "no such pool"),
        ({"op": "hold"}, "Not JSON"),
        ({"op": "run"}, "timeout"),
        ({"op": "run", "timeout": 1, "anything": 1}, "Unknown field"),
    ],
)
def test_what_is_no_request_is_refused_and_the_connection_goes_on(
    own: Local, header: dict[str, Any], message: str
) -> None:
    with closing(Raw(own)) as connection:
        answer = connection.ask(**header)
        assert answer["event"] == "error"
        assert message in answer["message"]
        assert connection.take()["event"] == "done"


def test_a_connection_without_a_sandbox_runs_nothing(own: Local) -> None:
    with closing(Raw(own)) as connection:
        connection.send(operations.run_to_frame(Job("print(1)"), language="python"))
        answer = connection.receive()
        assert (answer["event"], answer["started"]) == ("error", False)


def test_a_sandbox_that_was_not_used_goes_back_when_another_one_is_taken(own: Local) -> None:
    with closing(Raw(own)) as connection:
        first, second = connection.take(), connection.take()
        assert first["sandbox"] != second["sandbox"]
        wait_until(lambda: own.stats()["busy"] == 1, seconds=60)


def test_what_is_no_frame_ends_its_connection_alone(own: Local) -> None:
    with closing(Raw(own)) as connection:
        connection.send(b"\xff" * 100)
        assert connection.receive() == {}
    assert own.run("print(1)").stdout == "1\n"


def test_a_client_that_does_not_read_holds_up_no_other(own: Local) -> None:
    with closing(Raw(own)) as connection:
        connection.take()
        job = Job("import sys\nfor _ in range(100_000): print('x' * 1000)", timeout=60)
        connection.send(operations.run_to_frame(job, language="python", stream=True))
        for _ in range(3):
            assert own.run("print(1)").stdout == "1\n"


def test_a_refused_program_leaves_its_sandbox_usable(own: Local) -> None:
    sandbox = take(own.provider)
    with pytest.raises(SandboxError) as caught:
        sandbox.run(Job("1", context="x"))
    assert caught.value.nothing_ran
    assert sandbox.run(Job("print(1)")).stdout == "1\n"
    assert sandbox.close()


def test_nothing_of_a_killed_service_is_left(data_dir: Path) -> None:
    from tests.support.sandboxes import family

    with opened() as provider:
        assert run(provider) == "1\n"
        process = process_of(data_dir)
        running = family(process.pid)
        assert running
        os.kill(process.pid, signal.SIGKILL)
        process.wait(60)
        wait_until_gone(running)
