"""The cache of Pods follows a server that forgets, errs and breaks off, and asks it seldom."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from providers.runtime.launchers.kubernetes import cache as module
from providers.runtime.launchers.kubernetes.api import Api, ApiFailure
from providers.runtime.launchers.kubernetes.cache import PodCache


def pod(name: str, version: int, phase: str = "Running") -> dict[str, Any]:
    metadata = {"name": name, "uid": name, "resourceVersion": str(version)}
    return {"metadata": metadata, "status": {"phase": phase}}


class Server:
    """An API server over a real socket. `watches` has what each watch is answered with in turn: a
    status, or events, after which the connection is held, ended or broken off."""

    def __init__(self) -> None:
        self.pods: list[dict[str, Any]] = []
        self.version = 1
        self.page = 500
        self.lists: list[dict[str, str]] = []
        self.versions: list[str] = []
        self.watches: list[int | list[dict[str, Any] | str]] = []
        self.over = asyncio.Event()
        # Those that are accepted, where any is asked for.
        self.tokens: set[str] = set()

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if self.tokens and request.headers.get("Authorization") not in self.tokens:
            return web.json_response({"reason": "Unauthorized", "message": "no"}, status=401)
        if "watch" in request.query:
            return await self._watch(request)
        self.lists.append(dict(request.query))
        start = int(request.query.get("continue", 0))
        metadata: dict[str, Any] = {"resourceVersion": str(self.version)}
        if start + self.page < len(self.pods):
            metadata["continue"] = str(start + self.page)
        return web.json_response(
            {"metadata": metadata, "items": self.pods[start : start + self.page]}
        )

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        self.versions.append(request.query["resourceVersion"])
        script = self.watches.pop(0) if self.watches else []
        if isinstance(script, int):
            return web.json_response({"reason": "Expired", "message": "too old"}, status=script)
        stream = web.StreamResponse()
        await stream.prepare(request)
        for event in script:
            if event == "end":
                return stream
            if event == "break":
                assert request.transport is not None
                request.transport.abort()
                return stream
            await stream.write(json.dumps(event).encode() + b"\n")
        await self.over.wait()
        return stream


@asynccontextmanager
async def served(folder: Path) -> AsyncIterator[tuple[Server, PodCache]]:
    server = Server()
    application = web.Application()

    async def answer(request: web.Request) -> web.StreamResponse:
        return await server.answer(request)

    application.router.add_get("/api/v1/namespaces/sandboxes/pods", answer)
    runner = web.AppRunner(application)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    kubeconfig = folder / "kubeconfig"
    kubeconfig.write_text(
        json.dumps(
            {
                "clusters": [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{port}"}}],
                "users": [{"name": "u", "user": {"token": "secret"}}],
                "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
                "current-context": "x",
            }
        )
    )
    api = Api("sandboxes", kubeconfig)
    await api.open()
    cache = PodCache(api, "app=sandbox")
    try:
        yield server, cache
    finally:
        cache.close()
        server.over.set()
        await api.close()
        await runner.cleanup()


Story = Callable[[Server, PodCache], Coroutine[Any, Any, None]]


def play(folder: Path, story: Story) -> None:
    async def main() -> None:
        async with served(folder) as (server, cache), asyncio.timeout(60):
            await story(server, cache)

    asyncio.run(main())


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PAUSE_SECONDS", 0.0)


def has_phase(phase: str) -> Callable[[dict[str, Any] | None], bool]:
    return lambda pod: pod is not None and pod["status"]["phase"] == phase


def test_events_change_what_the_list_has(tmp_path: Path) -> None:
    async def story(server: Server, cache: PodCache) -> None:
        server.pods = [pod("a", 1), pod("b", 1)]
        server.watches = [
            [
                {"type": "MODIFIED", "object": pod("a", 2, "Failed")},
                {"type": "ADDED", "object": pod("c", 3)},
                {"type": "DELETED", "object": pod("b", 4)},
            ]
        ]
        await cache.open()
        await cache.wait("a", has_phase("Failed"))
        await cache.wait("c", has_phase("Running"))
        assert await cache.wait("b", lambda pod: pod is None) is None
        assert cache.lists == 1

    play(tmp_path, story)


def test_a_long_list_comes_in_pages(tmp_path: Path) -> None:
    async def story(server: Server, cache: PodCache) -> None:
        server.pods, server.page = [pod(f"p{number}", 1) for number in range(7)], 3
        await cache.open()
        assert len(list(cache)) == 7
        assert [query.get("continue") for query in server.lists] == [None, "3", "6"]

    play(tmp_path, story)


def test_a_bookmark_moves_the_version_on_from_which_the_next_watch_goes_on(tmp_path: Path) -> None:
    async def story(server: Server, cache: PodCache) -> None:
        bookmark = {"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": "70"}}}
        server.watches = [[bookmark, "end"], [{"type": "ADDED", "object": pod("a", 71)}]]
        await cache.open()
        await cache.wait("a", has_phase("Running"))
        assert (server.versions[:2], cache.lists) == (["1", "70"], 1)

    play(tmp_path, story)


@pytest.mark.parametrize(
    "forgets",
    [
        410,
        [{"type": "ERROR", "object": {"code": 410, "reason": "Expired", "message": "too old"}}],
    ],
    ids=["status", "event"],
)
def test_a_version_that_is_too_old_begins_anew_with_a_list(tmp_path: Path, forgets: Any) -> None:
    async def story(server: Server, cache: PodCache) -> None:
        server.pods = [pod("a", 1)]
        second: list[dict[str, Any] | str] = [{"type": "ADDED", "object": pod("c", 91)}]
        server.watches = [forgets, second]
        await cache.open()
        # Meanwhile one is gone, and another one came.
        server.pods, server.version = [pod("b", 90)], 90
        await cache.wait("c", has_phase("Running"))
        assert cache.lists == 2
        assert cache.get("b") is not None
        assert cache.get("a") is None
        assert server.versions[:2] == ["1", "90"]

    play(tmp_path, story)


@pytest.mark.parametrize(
    "failure",
    [
        500,
        307,
        ["break"],
        [{"type": "ADDED", "object": {}}],
        [{"type": "ADDED", "object": None}],
        [{"kind": "Status"}],
        ["no event"],
    ],
    ids=["status", "redirect", "cut", "empty", "nothing", "another", "text"],
)
def test_what_happened_while_the_server_was_gone_is_in_the_next_list(
    tmp_path: Path, failure: Any
) -> None:
    async def story(server: Server, cache: PodCache) -> None:
        server.pods = [pod("a", 1)]
        server.watches = [failure, failure, failure]
        await cache.open()
        server.pods, server.version = [], 5
        assert await cache.wait("a", lambda pod: pod is None) is None
        assert (cache.failure, cache.lists >= 2) == ("", True)

    play(tmp_path, story)


def test_who_waits_and_leaves_is_forgotten(tmp_path: Path) -> None:
    async def story(server: Server, cache: PodCache) -> None:
        await cache.open()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await cache.wait("never", has_phase("Running"))
        assert cache._waiting == {}

    play(tmp_path, story)


def test_a_server_that_forgets_every_version_is_not_asked_without_a_pause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []
    sleep, here = asyncio.sleep, threading.get_ident()

    async def note(seconds: float) -> None:
        # Loops of other threads of this process have the same `asyncio`.
        if threading.get_ident() != here:
            await sleep(seconds)
            return
        if seconds:
            pauses.append(seconds)
        await sleep(0)

    monkeypatch.setattr(module, "PAUSE_SECONDS", 1.0)
    monkeypatch.setattr("providers.runtime.launchers.kubernetes.cache.asyncio.sleep", note)

    async def story(server: Server, cache: PodCache) -> None:
        server.watches = [410] * 6
        server.watches.append([{"type": "ADDED", "object": pod("a", 2)}])
        await cache.open()
        await cache.wait("a", has_phase("Running"))

    play(tmp_path, story)
    assert len(pauses) == 5
    assert pauses[-1] > pauses[0]


def test_a_pod_that_was_made_while_a_list_was_read_is_not_taken_for_deleted(tmp_path: Path) -> None:
    async def story(server: Server, cache: PodCache) -> None:
        server.pods, server.page = [pod(f"p{number}", 1) for number in range(4)], 2
        server.watches = [410]
        await cache.open()
        answer = server.answer

        async def answer_late(request: web.Request) -> web.StreamResponse:
            if "continue" in request.query:
                cache.put(pod("new", 5))
                cache.put(pod("gone", 1))
            return await answer(request)

        server.answer = answer_late  # type: ignore[method-assign]
        await cache.wait("p0", lambda _: cache.lists >= 2)
        assert cache.get("new") is not None
        # This one was made before the list, and is not in it.
        assert cache.get("gone") is None

    play(tmp_path, story)


def test_as_many_sandboxes_can_be_attached_as_a_pool_may_have(tmp_path: Path) -> None:
    async def story(server: Server, cache: PodCache) -> None:
        await cache.open()
        connector = cache._api._session.connector
        assert connector is not None
        assert connector.limit == 0

    play(tmp_path, story)


def test_credentials_that_have_expired_are_read_anew(tmp_path: Path) -> None:
    async def story(server: Server, cache: PodCache) -> None:
        token = tmp_path / "token"
        token.write_text("first")
        described = json.loads((tmp_path / "kubeconfig").read_text())
        described["users"] = [{"name": "u", "user": {"tokenFile": str(token)}}]
        (tmp_path / "kubeconfig").write_text(json.dumps(described))
        api = Api("sandboxes", tmp_path / "kubeconfig")
        await api.open()
        try:
            server.tokens = {"Bearer first"}
            await api.call("GET", api.pods)
            server.tokens = {"Bearer second"}
            with pytest.raises(ApiFailure) as raised:
                await api.call("GET", api.pods)
            assert raised.value.status == 401
            token.write_text("second")
            await api.call("GET", api.pods)
        finally:
            await api.close()

    play(tmp_path, story)
