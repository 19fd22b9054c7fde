"""Kept containers outlive their pool's process: the next one finds them as they were."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from functools import cache
from typing import Any

import docker
import pytest

from providers.errors import (
    ConnectionFailed,
    KeptSandboxLost,
    ProviderUnavailable,
    RateLimited,
    SandboxError,
)
from providers.runtime.guest import wire
from providers.sandbox import KeptSandbox
from providers.values import Command, Event, Job, SandboxSpec
from tests.support.outlived import Place, opened_place
from tests.support.pool_service import name_of
from tests.support.required import missing
from tests.support.waiting import wait_until

LONG = "import time\nprint('on', flush=True)\ntime.sleep(120)"


@pytest.fixture(scope="module")
def places(
    engine: docker.DockerClient, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], Place]]:
    """One for each runtime: opened with the first test that asks, and cleared after each."""
    with ExitStack() as held:

        @cache
        def place_of(runtime: str) -> Place:
            if runtime not in engine.info()["Runtimes"]:
                missing(f"the engine has no runtime {runtime}")
            folder = tmp_path_factory.mktemp(runtime)
            return held.enter_context(opened_place(folder, runtime, engine))

        yield place_of


@pytest.fixture(params=["runc", "runsc"])
def place(request: pytest.FixtureRequest, places: Callable[[str], Place]) -> Iterator[Place]:
    found = places(request.param)
    yield found
    found.clear()


@pytest.fixture
def runc_place(places: Callable[[str], Place]) -> Iterator[Place]:
    found = places("runc")
    yield found
    found.clear()


def begin(sandbox: KeptSandbox, code: str) -> tuple[threading.Thread, list[Any]]:
    """Run it in a thread; what came of it is put into the list. It has begun."""
    has_begun, ends = threading.Event(), []

    def run() -> None:
        try:
            ends.append(sandbox.run(Job(code, timeout=180), lambda _: has_begun.set()))
        except SandboxError as error:
            ends.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    assert has_begun.wait(60)
    return thread, ends


@pytest.mark.parametrize(
    ("place", "number"),
    [
        ("runc", signal.SIGTERM),
        pytest.param("runsc", signal.SIGKILL, marks=pytest.mark.slow),
    ],
    indirect=["place"],
)
def test_what_a_sandbox_holds_is_there_after_its_pool(place: Place, number: signal.Signals) -> None:
    sandbox = place.keep(environment={"SECRET": "sesame"})
    sandbox.run(Job("import os\nx = 41"))
    sandbox.files.write("kept.txt", [b"content"])
    sandbox.contexts.create("bash", context_id="shell")
    sandbox.run(Job("y=7", language="bash", context="shell"))
    pid = sandbox.processes.start(
        Command(shell="n=0; while :; do echo line $n; n=$((n+1)); sleep 0.1; done")
    ).pid
    (container,) = place.kept_containers()

    place.restart(number)

    assert [each["ref"] for each in place.described()] == [name_of(sandbox)]
    assert sandbox.run(Job("print(x + 1, os.environ['SECRET'])")).stdout == "42 sesame\n"
    assert sandbox.run(Job("echo $y", language="bash", context="shell")).stdout == "7\n"
    assert b"".join(sandbox.files.read("kept.txt")) == b"content"
    heard = bytearray()

    def take(event: Event) -> None:
        heard.extend(event.data)
        if b"line 15\n" in heard:
            sandbox.processes.signal(pid, "SIGKILL")

    ended = sandbox.processes.follow(pid, take)
    assert (ended.exit_code, heard.startswith(b"line 0\nline 1\n")) == (137, True)
    assert [one.id for one in place.kept_containers()] == [container.id]
    assert "sesame" not in str(container.attrs)
    assert not any(b"sesame" in path.read_bytes() for path in place.folder.rglob("*.json"))

    assert sandbox.close()
    wait_until(lambda: container.id not in [one.id for one in place.containers()], seconds=60)
    assert place.memory.all() == []


@pytest.mark.parametrize(
    ("place", "number"),
    # The first does not wait for what runs.
    [
        ("runc", signal.SIGQUIT),
        pytest.param("runsc", signal.SIGKILL, marks=pytest.mark.slow),
    ],
    indirect=["place"],
)
def test_a_cell_that_runs_when_the_pool_ends_is_told_and_the_next_one_runs(
    place: Place, number: signal.Signals
) -> None:
    sandbox = place.keep()
    sandbox.run(Job("x = 1"))
    thread, ends = begin(sandbox, LONG)

    place.restart(number)

    thread.join(60)
    (error,) = ends
    assert isinstance(error, ProviderUnavailable)
    assert not isinstance(error, KeptSandboxLost)
    assert error.started
    # The command that ran would go on for longer than this one has.
    assert sandbox.run(Job("print(x)", timeout=60)).stdout == "1\n"


def attach(container: Any) -> socket.socket:
    """As any user of the engine may, who has no marker."""
    wanted = {"stdin": 1, "stdout": 1, "stderr": 1, "stream": 1}
    attached = container.attach_socket(params=wanted)
    return socket.socket(fileno=os.dup(attached.fileno()))


HALVES = {
    "a length": b"\0\0",
    "half a header": (5000).to_bytes(4, "big") + b'{"op":',
    "half a part": wire.pack({"op": "file.write", "id": 1, "path": "x"}, [("data", b"x" * 999)])[
        :-9
    ],
    "no frame": b"\xff" * 64,
    "a forged resumption": secrets.token_bytes(32)
    + wire.pack({"op": "resume", "id": 1, "echo": "00" * 32, "seconds": 1e6}, []),
}


def test_half_a_frame_of_the_former_pool_is_dropped(runc_place: Place) -> None:
    place = runc_place
    kept = {name: place.keep(f"owner {name}") for name in list(HALVES)[:3]}
    found = {}
    for number, (name, sandbox) in enumerate(kept.items()):
        sandbox.run(Job(f"x = {number}"))
        ref = {each.ref: each.container for each in place.memory.all()}[name_of(sandbox)]
        found[name] = place.engine.containers.get(ref)
    place.stop(signal.SIGKILL)
    for half in HALVES.values():
        for container in found.values():
            with attach(container) as stream:
                stream.sendall(half)
    # Each has the last word of another.
    for name, container in found.items():
        with attach(container) as stream:
            stream.sendall(HALVES[name])
    place.start()

    printed = [sandbox.run(Job("print(x)")).stdout for sandbox in kept.values()]
    assert printed == ["0\n", "1\n", "2\n"]


def test_what_was_changed_or_is_a_strangers_is_not_taken_over(runc_place: Place) -> None:
    place = runc_place
    changed, replaced, ended, fine = (place.keep(f"owner {n}") for n in range(4))
    by_ref = {each.ref: each for each in place.memory.all()}
    containers = {ref: place.engine.containers.get(each.container) for ref, each in by_ref.items()}
    place.stop(signal.SIGKILL)
    containers[name_of(changed)].update(mem_limit="1g", memswap_limit="1g")
    containers[name_of(ended)].kill()
    # The same labels, and the name of one that is kept: nothing that a label says makes it ours.
    model = containers[name_of(replaced)]
    name = model.name
    model.remove(force=True)
    stranger = place.engine.containers.run(
        model.attrs["Config"]["Image"],
        ["sleep", "1000"],
        entrypoint="",
        name=name,
        labels=model.labels,
        detach=True,
        stdin_open=True,
        network_mode="none",
    )
    # Not even where what is remembered is said to be of it.
    forged = replace(by_ref[name_of(replaced)], container=stranger.id)
    place.memory.save(forged)
    place.start()

    wait_until(lambda: len(place.described()) == 1, seconds=60)
    assert fine.run(Job("print(1)")).stdout == "1\n"
    for lost in (changed, replaced, ended):
        with pytest.raises(KeptSandboxLost, match="was restarted"):
            lost.run(Job("print(1)"))
    wait_until(lambda: len(place.kept_containers()) == 1, seconds=60)
    assert [each.ref for each in place.memory.all()] == [name_of(fine)]


def test_a_lease_goes_on_while_there_is_no_pool(runc_place: Place) -> None:
    place = runc_place
    short, long = place.keep("alice"), place.keep("bob")
    short.renew(3)
    long.renew(500)
    left = {name_of(sandbox): sandbox for sandbox in (short, long)}
    wait_until(lambda: {round(each.seconds, -1) for each in place.memory.all()} == {0, 500}, 60)
    place.stop(signal.SIGKILL)
    stopped = time.monotonic()
    wait_until(lambda: min(each.left for each in place.memory.all()) < 0, 60)
    place.start()

    (described,) = place.described()
    assert described["ref"] == name_of(long)
    assert described["expires_in"] < 500 - (time.monotonic() - stopped) + 1
    with pytest.raises(KeptSandboxLost):
        left[name_of(short)].run(Job("1"))
    wait_until(lambda: len(place.kept_containers()) == 1, seconds=60)
    assert [each.ref for each in place.memory.all()] == [name_of(long)]


def test_of_two_pools_one_takes_over_and_the_other_says_try_again(runc_place: Place) -> None:
    place = runc_place
    sandbox = place.keep()
    sandbox.run(Job("x = 1"))
    place.stop(signal.SIGKILL)
    another = place.memory
    assert another.take()
    place.start(COMING_SECONDS=0.5)

    with pytest.raises(ConnectionFailed) as refused:
        sandbox.run(Job("print(x)"))
    assert (refused.value.code, refused.value.retry_after) == ("SB003", 2)
    assert refused.value.nothing_ran
    assert place.described() == []
    another.let_go()
    assert at_hand(lambda: sandbox.run(Job("print(x)"))).stdout == "1\n"


def at_hand(ask: Callable[[], Any]) -> Any:
    """What is answered; on a busy machine the new pool may need more time than it asks for once."""
    while True:
        try:
            return ask()
        except ConnectionFailed as error:
            if not error.nothing_ran or "is not available yet" not in error.message:
                raise


def test_who_asks_while_the_pool_restarts_is_waited_for(
    runc_place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("providers.self_managed.client.WAIT_SECONDS", 120.0)
    place = runc_place
    sandbox = place.keep()
    sandbox.run(Job("x = 1"))
    place.stop(signal.SIGTERM)
    with ThreadPoolExecutor(2) as executor:
        cell = executor.submit(at_hand, lambda: sandbox.run(Job("print(x)")))
        attached = executor.submit(at_hand, lambda: place.provider.attach(sandbox.ref))
        place.start()
        assert cell.result(60).stdout == "1\n"
        assert attached.result(60).ref == sandbox.ref


def test_nobody_waits_for_a_pool_that_stays_away(
    runc_place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("providers.self_managed.client.WAIT_SECONDS", 0.2)
    sandbox = runc_place.keep()
    runc_place.stop(signal.SIGKILL)

    for _ in range(3):
        with pytest.raises(ConnectionFailed) as refused:
            sandbox.run(Job("1"))
        assert (refused.value.code, refused.value.retry_after) == ("SB003", 5)


def test_a_pool_that_stops_leaves_what_is_kept_and_nothing_else(runc_place: Place) -> None:
    place = runc_place
    kept, closed = place.keep("alice"), place.keep("bob")
    single = place.provider.open(SandboxSpec(), "alice")
    assert closed.close()
    before = {one.id for one in place.containers()}
    place.stop(signal.SIGTERM)

    (container,) = place.kept_containers()
    (remembered,) = place.memory.all()
    assert (remembered.ref, remembered.container) == (name_of(kept), container.id)
    with pytest.raises(SandboxError):
        single.run(Job("1"))
    # A busy engine may not have ended the others in time; the next pool does.
    place.start()
    wait_until(lambda: before & {one.id for one in place.containers()} == {container.id}, 60)
    files = list((place.folder / "data" / "kept").rglob("*"))
    assert all(each.stat().st_mode & 0o077 == 0 for each in files if each.suffix == ".json")


def test_what_was_found_counts_under_the_settings_that_come_later(runc_place: Place) -> None:
    place = runc_place
    with place.another_client(runtime="auto", max_sandboxes=4, max_memory="128m") as provider:
        first = provider.open(SandboxSpec(kept=True), "alice")
        place.restart(signal.SIGKILL)
        assert [each["ref"] for each in place.described()] == [name_of(first)]
        assert place.pool.stats()["capacity"] != 4
        second = provider.open(SandboxSpec(kept=True), "alice")
        assert place.pool.stats()["capacity"] == 4
        with pytest.raises(RateLimited, match="at most 2 can exist"):
            provider.open(SandboxSpec(kept=True), "alice")
        assert place.pool.stats()["busy"] == 2
        assert first.close()
        assert second.close()
        wait_until(lambda: not place.kept_containers(), seconds=60)
        assert place.pool.stats()["busy"] == 0


REACHES = """
import os
# Its own output it may reach there too.
own = {(os.fstat(number).st_dev, os.fstat(number).st_ino) for number in (0, 1, 2)}
reached = []
for number in range(256):
    for flags in (os.O_RDONLY, os.O_WRONLY, os.O_RDWR):
        try:
            fd = os.open(f"/proc/1/fd/{number}", flags | os.O_NONBLOCK)
        except OSError:
            continue
        found = os.fstat(fd)
        is_own = found.st_uid == os.getuid() or (found.st_dev, found.st_ino) in own
        if os.readlink(f"/proc/self/fd/{fd}") != "/dev/null" and not is_own:
            reached.append(number)
        os.close(fd)
print(reached)
"""


def test_a_program_has_no_way_to_what_the_pools_say(place: Place) -> None:
    """Neither before nor after its guest was found: there it could hear the marker."""
    sandbox = place.keep()
    assert sandbox.run(Job(REACHES)).stdout == "[]\n"
    place.restart(signal.SIGKILL)
    assert sandbox.run(Job(REACHES)).stdout == "[]\n"
