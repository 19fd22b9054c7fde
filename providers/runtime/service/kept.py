"""The service's HTTP for kept sandboxes: thin handlers over `registry`."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import aclosing
from typing import Any

from aiohttp import web

from providers.errors import (
    InvalidConfiguration,
    ProviderUnavailable,
    SandboxError,
    before_the_code,
)
from providers.runtime.pool.kept import STREAMS, WRITES, Kept
from providers.runtime.pool.protocol import Frame
from providers.runtime.service import messages, operations
from providers.runtime.service.pool_manager import PoolManager
from providers.runtime.service.registry import LEASE_SECONDS, PoolSpec, Session, lease
from providers.runtime.service.relay import Incoming, Relay, relay_run, relayed

logger = logging.getLogger(__name__)


class KeptHandlers:
    """What is done with the sandboxes under /v1/sandboxes."""

    def __init__(
        self, manager: PoolManager, knows_the_settings: Callable[[web.Request], bool]
    ) -> None:
        self._registry = manager.registry
        self._network = manager.network
        self._knows_the_settings = knows_the_settings

    def routes(self) -> list[web.RouteDef]:
        one = "/v1/sandboxes/{ref}"
        return [
            web.post("/v1/sandboxes", self.create),
            web.get("/v1/sandboxes", self.list),
            web.get(one, self.look),
            web.patch(one, self.renew),
            web.delete(one, self.close),
            web.post(one + "/operations", self.operate),
        ]

    async def create(self, request: web.Request) -> web.StreamResponse:
        if not self._knows_the_settings(request):
            return settings_unknown()
        body = await _object(request)
        template, owner = body.get("template", "python"), body.get("owner", "")
        if not isinstance(template, str) or not isinstance(owner, str) or not owner:
            raise InvalidConfiguration("template and owner must be strings.", field="owner")
        pool = body.get("pool")
        session = await self._registry.keep(
            template,
            owner,
            lease(body.get("seconds", LEASE_SECONDS)),
            messages.environment(body.get("environment") or {}),
            operations.sandbox_limits(body.get("limits")),
            None if pool is None else PoolSpec.from_json(pool),
            messages.network(body.get("network")),
            messages.digest(body.get("digest")),
        )
        answer = _json(_described(session), 201)
        try:
            await answer.prepare(request)
            await answer.write_eof()
        except BaseException:
            # Nobody has heard of it.
            self._registry.sessions.remove(session)
            raise
        return answer

    async def list(self, request: web.Request) -> web.Response:
        owner = request.query.get("owner")
        found = [each for each in self._registry.sessions.all() if owner in (None, each.owner)]
        return _json({"sandboxes": [_described(each) for each in found]})

    async def look(self, request: web.Request) -> web.Response:
        return _json(_described(await self._session(request)))

    async def renew(self, request: web.Request) -> web.Response:
        session = await self._session(request)
        session.renew(lease((await _object(request)).get("seconds")))
        return _json(_described(session))

    async def close(self, request: web.Request) -> web.Response:
        self._registry.sessions.remove(await self._session(request))
        return web.Response(status=204)

    async def operate(self, request: web.Request) -> web.StreamResponse:
        session = await self._session(request)
        kept = session.kept
        incoming = Incoming(request.content)
        first = await incoming.first()

        async def work(relay: Relay) -> None:
            try:
                if first[0].get("op") == "network":
                    await self._change_network(session, first)
                    await relay.send({"event": "done"})
                else:
                    await _operate(kept, first, incoming, relay)
            except SandboxError:
                await incoming.leave()
                raise

        return await relayed(request, work)

    async def _change_network(self, session: Session, first: Frame) -> None:
        access, given = session.kept.sandbox.network, first[1].get("network")
        network = None if given is None else messages.network(messages.loads(given))
        if network is None:
            await access.close()
        else:
            await session.kept.open_network(self._network, network, session.owner)

    async def _session(self, request: web.Request) -> Session:
        return await self._registry.session(request.match_info["ref"])


async def _operate(kept: Kept, first: Frame, incoming: Incoming, relay: Relay) -> None:
    header, parts = first
    name = header.get("op")
    if not isinstance(name, str):
        raise InvalidConfiguration("op: Must be a string.", field="op")
    if name == "run":
        try:
            await _run(kept, first, relay)
        except SandboxError as error:
            # Callers run it again on our word.
            error.started = error.started or not error.nothing_ran
            raise
    elif name == "interrupt":
        context, run = header.get("context"), header.get("run", "")
        if not isinstance(context, str) or not isinstance(run, str):
            raise InvalidConfiguration("context and run must be strings.", field="context")
        await relay.send({"event": "done", "stopped": await kept.interrupt(context, run)})
    elif name == "answer":
        run, call = header.get("run"), header.get("call")
        if not isinstance(run, str) or type(call) is not int:
            raise InvalidConfiguration("run must be a string and call a number.", field="call")
        told = kept.answer(run, call, parts.get("data", b""))
        await relay.send({"event": "done", "told": told})
    elif name == "memory":
        await relay.send({"event": "done", **await kept.usage()})
    elif name == "stdin":
        pid = header.get("pid")
        if type(pid) is not int:
            raise InvalidConfiguration("pid: Must be a whole number.", field="pid")
        close = header.get("close") is True
        await kept.write_stdin(pid, parts.get("data", b""), close=close)
        await relay.send({"event": "done"})
    elif name in STREAMS:
        fields, given = operations.fields_of(header), operations.parts_of(first)
        async with aclosing(kept.stream(name, fields, given)) as frames:
            async for frame in frames:
                await relay.pass_on(frame)
    elif name in WRITES:
        fields = operations.fields_of(header)
        await relay.pass_on(await kept.write(name, fields, incoming.pieces()))
    elif name == "attempts":
        await kept.sandbox.network.sync()
        attempts = kept.sandbox.network.take_attempts()
        await relay.send({"event": "done"}, [("attempts", messages.dumps(attempts.to_json()))])
    else:
        fields = operations.fields_of(header)
        if name == "spawn":
            own = messages.environment(fields.get("environment") or {})
            fields["environment"] = kept.sandbox.network.extend(own)
        await relay.pass_on(await kept.ask(name, fields))


async def _run(kept: Kept, first: Frame, relay: Relay) -> None:
    """A run, with its events as they come. It is interrupted when its client leaves."""
    with before_the_code():
        job = operations.run_from_frame(first)
    await relay_run(relay, lambda put: kept.run(job, put, detach=first[0].get("detach") is True))


def settings_unknown() -> web.Response:
    """Told to a client whose settings we have never seen."""
    error = ProviderUnavailable("The service was restarted and needs its settings.")
    return _json(messages.error_to_json(error), messages.SETTINGS_UNKNOWN)


def _described(session: Session) -> dict[str, Any]:
    """Times are seconds from now."""
    sandbox = session.kept.sandbox
    now = time.monotonic()
    return {
        "ref": session.ref,
        "owner": session.owner,
        "template": sandbox.template.name,
        "runtime": sandbox.runtime,
        "sharing": "session",
        "busy": session.kept.busy,
        "idle_seconds": round(session.idle_seconds, 3),
        "age_seconds": round(now - session.opened_at, 3),
        "expires_in": round(session.expires_at - now, 3),
    }


async def _object(request: web.Request) -> dict[str, Any]:
    body = messages.loads_small(await request.read() or b"{}")
    if not isinstance(body, dict):
        raise InvalidConfiguration("body: Must be a JSON object.", field="body")
    return body


def _json(body: Any, status: int = 200) -> web.Response:
    return web.Response(body=messages.dumps(body), status=status, content_type="application/json")
