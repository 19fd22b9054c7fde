"""Single runs for the processes of this installation, over a socket of their own.

What is asked for over a connection belongs to it: a pool, which stays open for as long as somebody
holds it, or one sandbox, which runs one job. Whoever closes the connection, or ends, gives it back.

Requests are frames of `providers.runtime.guest.wire` with an `op`:

    hold    a pool by `launcher`, `gvisor_platform` and `settings`; with `trial` its sizes stay as
            they are, and a new one has one sandbox. Answers `pool`, its name, and `runtime`,
            `languages`, and whether there is a `network`. From then on `full` is told whenever it
            changes.
    take    a sandbox of the `pool` for an `owner`; the part `network` is what it may reach, as
            `providers.network` writes it. Answers `sandbox`, `runtime` and `sharing`.
    run     the one job of the sandbox, as `operations` has it
    stats   the figures of a `pool`
    credentials  the part `changes` has other versions of credentials, for all sandboxes

Each is answered in its turn by frames with an `event`, as in `operations`.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections import deque
from collections.abc import Mapping
from typing import cast

from providers.errors import (
    InvalidConfiguration,
    ProviderUnavailable,
    SandboxError,
    before_the_code,
)
from providers.languages import offered_names
from providers.runtime.guest import wire
from providers.runtime.pool.protocol import Frame, Parts
from providers.runtime.service import messages, operations
from providers.runtime.service.pool_manager import Instance, PoolManager, Revision
from providers.runtime.service.registry import PoolSpec
from providers.runtime.service.relay import SEND_SECONDS, relay_run, result_text
from providers.runtime.service.templates import WITH_TEMPLATES, bases_of

logger = logging.getLogger(__name__)


class RunConnection(asyncio.Protocol):
    """One connection, and what its client has got over it."""

    _transport: asyncio.Transport

    def __init__(self, manager: PoolManager) -> None:
        self._manager = manager
        self._parser = wire.Parser(wire.REQUEST_LIMIT)
        self._requests: deque[Frame] = deque()
        self._work: asyncio.Task[None] | None = None
        self._can_send = asyncio.Event()
        self._can_send.set()
        self._pool: Revision | None = None
        self._instance: Instance | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        try:
            self._requests += self._parser.feed(data)
        except wire.FrameError as error:
            logger.warning("a client does not keep to the protocol: %s", error)
            self._transport.abort()
        self._begin()

    def pause_writing(self) -> None:
        self._can_send.clear()

    def resume_writing(self) -> None:
        self._can_send.set()

    def connection_lost(self, error: Exception | None) -> None:
        self._can_send.set()
        self._requests.clear()
        if self._work is not None:
            self._work.cancel()
        if self._instance is not None:
            self._manager.end(self._instance)
        if self._pool is not None:
            self._manager.leave(self._pool, self._tell_full)

    async def send(self, header: Mapping[str, object], parts: Parts = ()) -> None:
        """Raises TimeoutError where the client does not read."""
        self._write(header, parts)
        if not self._can_send.is_set():
            async with asyncio.timeout(SEND_SECONDS):
                await self._can_send.wait()

    def _write(self, header: Mapping[str, object], parts: Parts = ()) -> None:
        if not self._transport.is_closing():
            self._transport.write(wire.pack(dict(header), list(parts)))

    def _begin(self) -> None:
        if self._work is None and self._requests:
            request = self._requests.popleft()
            self._work = asyncio.get_running_loop().create_task(self._answer(request))
            self._work.add_done_callback(self._end)

    def _end(self, _: asyncio.Task[None]) -> None:
        self._work = None
        self._begin()

    async def _answer(self, request: Frame) -> None:
        name = str(request[0].get("op"))
        if name in ("hold", "take") and self._manager.is_draining:
            # The client comes to the next service, which is on its way.
            self._transport.abort()
            return
        work = {
            "hold": self._hold,
            "take": self._take,
            "run": self._run,
            "stats": self._stats,
            "credentials": self._change_credentials,
        }.get(name)
        try:
            if work is None:
                raise InvalidConfiguration("op: Unknown operation.", field="op")
            await work(request)
        except SandboxError as error:
            self._fail(error)
        except TimeoutError:
            self._transport.abort()
        except Exception:
            logger.exception("a request failed inside the service")
            self._fail(
                ProviderUnavailable(
                    "The pool service failed. Its log has the reason.", started=name == "run"
                )
            )

    def _fail(self, error: SandboxError) -> None:
        self._write({"event": "error"}, [("error", messages.dumps(messages.error_to_json(error)))])

    async def _hold(self, request: Frame) -> None:
        header, parts = request
        spec = PoolSpec.from_json(messages.loads(parts.get("pool", b"")))
        is_trial = header.get("trial") is True
        if self._pool is not None:
            raise InvalidConfiguration("hold: This connection holds a pool already.", field="op")
        pool = self._pool = await self._manager.hold(spec, self._tell_full, is_trial=is_trial)
        told = {
            "pool": pool.name,
            "runtime": pool.launcher.runtime,
            "languages": offered_names(pool.templates),
            "network": pool.launcher.has_network,
            "templates": pool.kind in WITH_TEMPLATES,
            "bases": bases_of(pool.kind),
        }
        self._write({"event": "done", **told})

    async def _change_credentials(self, request: Frame) -> None:
        changes = messages.credential_changes(messages.loads(request[1].get("changes", b"")))
        await self._manager.network.change_credentials(changes)
        self._write({"event": "done"})

    def _tell_full(self, is_full: bool) -> None:
        self._write({"event": "full", "full": is_full})

    async def _take(self, request: Frame) -> None:
        header = request[0]
        pool = self._manager.pool_named(str(header.get("pool")))
        if self._instance is not None:
            self._manager.end(self._instance)
            self._instance = None
        template, owner = str(header.get("template")), str(header.get("owner"))
        given = request[1].get("network")
        network = None if given is None else messages.network(messages.loads(given))
        digest = messages.digest(header.get("digest"))
        instance = self._instance = await self._manager.create_in(
            pool, template, owner, network, digest=digest
        )
        told = {
            "sandbox": f"{os.getpid()}-{instance.sandbox.number}",
            "runtime": instance.runtime,
            "sharing": instance.sharing,
        }
        self._write({"event": "done", **told})

    async def _run(self, request: Frame) -> None:
        with before_the_code():
            job = operations.run_from_frame(request)
            instance = self._instance
            if instance is None:
                raise ProviderUnavailable("This connection has no sandbox.")
        try:
            if request[0].get("stream") is True:
                await relay_run(
                    self,
                    lambda put: self._manager.run_in(
                        instance, job, lambda event: put(operations.frame_of_event(event))
                    ),
                )
                return
            result = await self._manager.run_in(instance, job)
        except SandboxError as error:
            # Callers run it elsewhere on our word.
            error.started = error.started or not error.nothing_ran
            raise
        finally:
            if instance.used:
                self._instance = None
        self._write({"event": "done"}, [("result", await result_text(result))])

    async def _stats(self, request: Frame) -> None:
        pool = self._manager.pool_named(str(request[0].get("pool")))
        self._write({"event": "done"}, [("stats", messages.dumps(self._manager.stats_of(pool)))])
