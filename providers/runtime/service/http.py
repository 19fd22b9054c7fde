"""The service's HTTP: who may connect, by the address alone before anything is read, and thin
handlers over the PoolManager.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import logging
import tempfile
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any, cast

from aiohttp import web

from providers.errors import (
    ConnectionFailed,
    InvalidConfiguration,
    ProviderUnavailable,
    SandboxError,
)
from providers.runtime.service import messages, operations, ragflow
from providers.runtime.service.kept import KeptHandlers, settings_unknown
from providers.runtime.service.pool_manager import PoolManager
from providers.runtime.service.relay import in_thread_if_large, relay_run, relayed, result_text
from providers.runtime.service.settings import ServiceSettings, settings_digest
from providers.templates.store import DEFAULT_MOST_BYTES

logger = logging.getLogger(__name__)

LARGEST_BODY = 128 * 1024 * 1024

READ_AT_ONCE = 2
_PIECE_BYTES = 1 << 18

OPEN_PATHS = ("/", "/healthz")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Service:
    """The handlers. A handler is cancelled when its client disconnects."""

    def __init__(self, manager: PoolManager, token: str) -> None:
        self.manager = manager
        self._token = token
        self._pushed: set[str] = set()
        self._reading = asyncio.Semaphore(READ_AT_ONCE)

    def application(self) -> web.Application:
        app = web.Application(
            client_max_size=LARGEST_BODY,
            middlewares=[_errors_as_json, self._authenticated, _no_browsers],
        )
        app.add_routes(
            [
                web.get("/", self.health),
                web.get("/healthz", self.health),
                web.post("/run", self.ragflow_run),
                web.post("/v1/instances", self.create),
                web.post("/v1/instances/{id}/run", self.run),
                web.delete("/v1/instances/{id}", self.destroy),
                web.put("/v1/settings", self.change_settings),
                web.patch("/v1/credentials", self.change_credentials),
                web.get("/v1/stats", self.stats),
                web.get("/v1/templates/{digest}", self.find_template),
                web.put("/v1/templates/{digest}", self.store_template),
                *KeptHandlers(self.manager, self.knows_the_settings).routes(),
            ]
        )
        return app

    async def _read(self, text: bytes, work: Callable[[], Any]) -> Any:
        """What the work makes of a request's body: of a large one on a thread, a few at once."""
        if len(text) <= messages.LARGE:
            return work()
        async with self._reading:
            return await asyncio.to_thread(work)

    @web.middleware
    async def _authenticated(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if self._token and request.path not in OPEN_PATHS:
            given = request.headers.get("Authorization", "").removeprefix("Bearer ")
            if not hmac.compare_digest(given.encode(), self._token.encode()):
                error = ConnectionFailed("The pool service demands its bearer token.")
                return _json(
                    messages.error_to_json(error), 401, headers={"WWW-Authenticate": "Bearer"}
                )
        return await handler(request)

    async def health(self, request: web.Request) -> web.Response:
        if problem := self.manager.problem():
            return _json({"status": "error", "detail": problem}, 503)
        return _json({"status": "ok"})

    async def stats(self, request: web.Request) -> web.Response:
        return _json(self.manager.stats())

    async def find_template(self, request: web.Request) -> web.Response:
        digest = messages.digest(request.match_info["digest"])
        if not await asyncio.to_thread(self.manager.store.folder, digest):
            error = InvalidConfiguration("template: It is not here.", field="template")
            return _json(messages.error_to_json(error), 404)
        return _json({})

    async def store_template(self, request: web.Request) -> web.Response:
        """The body is what `TemplateStore.pack` yields. Its digest says whether it is that."""
        digest = messages.digest(request.match_info["digest"])
        left = DEFAULT_MOST_BYTES
        with tempfile.TemporaryFile(dir=self.manager.data_dir) as file:
            async for piece in request.content.iter_chunked(_PIECE_BYTES):
                left -= len(piece)
                if left < 0:
                    raise InvalidConfiguration("template: It is too large.", field="template")
                await asyncio.to_thread(file.write, piece)
            file.seek(0)
            await asyncio.to_thread(self.manager.store.receive, digest, file)
        return _json({})

    async def change_settings(self, request: web.Request) -> web.Response:
        config = _as_object(await _body(request), "body")
        settings = ServiceSettings.from_config(config, shares_memory=self.manager.shares_memory)
        await self.manager.apply(settings)
        self._pushed.add(settings_digest(config))
        return _json(self.manager.stats())

    async def change_credentials(self, request: web.Request) -> web.Response:
        changes = messages.credential_changes(await _body(request))
        await self.manager.network.change_credentials(changes)
        return _json({})

    async def create(self, request: web.Request) -> web.Response:
        if not self.knows_the_settings(request):
            return settings_unknown()
        body = await _body(request)
        template, owner, config, network, digest = "python", "", None, None, ""
        if isinstance(body, dict):
            template, owner = body.get("template", template), body.get("owner", owner)
            config = body.get("settings")
            network = messages.network(body.get("network"))
            digest = messages.digest(body.get("digest"))
        if not isinstance(template, str) or not isinstance(owner, str):
            raise InvalidConfiguration("template and owner must be strings.", field="template")
        if config is None:
            instance = await self.manager.create(template, owner, network, digest)
        else:
            settings = ServiceSettings.from_config(_as_object(config, "settings"))
            instance = await self.manager.create_apart(settings, template, owner, network)
        instance.client = request.headers.get(messages.CLIENT_HEADER, "")
        answer = _json(
            {
                "instance_id": instance.instance_id,
                "runtime": instance.runtime,
                "sharing": instance.sharing,
                "template": instance.template,
            },
            201,
        )
        try:
            await answer.prepare(request)
            await answer.write_eof()
        except BaseException:
            # Nobody has heard of it.
            self.manager.destroy(instance.instance_id)
            raise
        return answer

    def knows_the_settings(self, request: web.Request) -> bool:
        """Whether what the client expects to be in force was ever pushed to us."""
        expected = request.headers.get(messages.SETTINGS_HEADER)
        return not expected or expected in self._pushed

    async def run(self, request: web.Request) -> web.StreamResponse:
        text = await request.read()
        timeout = self.manager.settings.timeout
        job = await self._read(
            text, lambda: messages.job_from_json(messages.loads_request(text), timeout)
        )
        instance_id = request.match_info["id"]
        if request.headers.get("Accept") == operations.MEDIA_TYPE:
            return await relayed(
                request,
                lambda relay: relay_run(
                    relay,
                    lambda put: self.manager.run(
                        instance_id, job, lambda event: put(operations.frame_of_event(event))
                    ),
                ),
            )
        try:
            result = await self.manager.run(instance_id, job)
        except SandboxError as error:
            # Callers run it elsewhere on our word.
            error.started = error.started or not error.nothing_ran
            raise
        return web.Response(body=await result_text(result), content_type="application/json")

    async def destroy(self, request: web.Request) -> web.Response:
        instance_id = request.match_info["id"]
        if not self.manager.destroy(instance_id):
            error = ProviderUnavailable(f"There is no instance {instance_id!r}.")
            return _json(messages.error_to_json(error), 404)
        return web.Response(status=204)

    async def ragflow_run(self, request: web.Request) -> web.Response:
        text = await request.read()
        timeout = self.manager.settings.timeout
        try:
            job = await self._read(text, lambda: ragflow.parse(text, timeout))
        except ragflow.Refused as refused:
            return _json({"detail": [refused.detail]}, 422)
        try:
            instance = await self.manager.create(job.language)
            result = await self.manager.run(instance.instance_id, job)
        except SandboxError as error:
            return _json(ragflow.failure(error), headers=_retry_after(error))
        except Exception:
            logger.exception("a run failed inside the service")
            return _json(ragflow.unhandled())
        size = sum(len(artifact.content) for artifact in result.artifacts) + len(result.stdout)
        answer = await in_thread_if_large(size, lambda: messages.dumps(ragflow.answer(result)))
        return web.Response(body=answer, content_type="application/json")


@web.middleware
async def _errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except InvalidConfiguration as error:
        body = messages.error_to_json(error)
        return _json(body | {"errors": error.errors}, error.http_status)
    except SandboxError as error:
        return _json(messages.error_to_json(error), error.http_status, headers=_retry_after(error))
    except web.HTTPException as error:
        refused = InvalidConfiguration(f"{request.method} {request.path}: {error.reason}.")
        return _json(messages.error_to_json(refused), error.status)
    except Exception:
        logger.exception("%s %s failed inside the service", request.method, request.path)
        failed = ProviderUnavailable(
            "The pool service failed. Its log has the reason.", started=True
        )
        return _json(messages.error_to_json(failed), 500)


@web.middleware
async def _no_browsers(request: web.Request, handler: Handler) -> web.StreamResponse:
    """A web page must not run code here through its visitor's browser, which always names it."""
    if "Origin" in request.headers and request.method != "GET":
        raise web.HTTPForbidden(reason="This service is not for browsers")
    return await handler(request)


async def _body(request: web.Request) -> Any:
    return messages.loads_small(await request.read() or b"{}")


def _as_object(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InvalidConfiguration(f"{name}: Must be a JSON object.", field=name)
    return value


def _json(body: Any, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(
        body=messages.dumps(body), status=status, headers=headers, content_type="application/json"
    )


def _retry_after(error: SandboxError) -> dict[str, str]:
    if error.retry_after is None:
        return {}
    return {"Retry-After": str(max(1, round(error.retry_after)))}


@dataclass(frozen=True)
class AllowedAddresses:
    """Networks that may connect; none named: all."""

    networks: tuple[ipaddress.IPv4Network | ipaddress.IPv6Network, ...] = ()

    @classmethod
    def of(cls, networks: Iterable[str], *, only_loopback: bool) -> AllowedAddresses:
        """From POOL_ALLOWED_ADDRESSES. Where it is empty `only_loopback` decides."""
        named = tuple(networks) or (("127.0.0.0/8", "::1/128") if only_loopback else ())
        return cls(tuple(ipaddress.ip_network(text) for text in named))

    def __contains__(self, host: object) -> bool:
        if not self.networks:
            return True
        address = ipaddress.ip_address(str(host).partition("%")[0])
        if isinstance(address, ipaddress.IPv6Address):
            # A socket that listens on both families shows IPv4 so.
            address = address.ipv4_mapped or address
        return any(address in network for network in self.networks)


class Gate(asyncio.Protocol):
    """Hands a new connection on, or breaks it off. Nothing is read from it until then."""

    def __init__(
        self, allowed: AllowedAddresses, make_protocol: Callable[[], asyncio.BaseProtocol]
    ) -> None:
        self._allowed = allowed
        self._make_protocol = make_protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        peer = transport.get_extra_info("peername")
        if not peer or peer[0] not in self._allowed:
            logger.warning("a connection from %s is refused", peer[0] if peer else "nowhere")
            cast("asyncio.Transport", transport).abort()
            return
        protocol = self._make_protocol()
        transport.set_protocol(protocol)
        protocol.connection_made(transport)
