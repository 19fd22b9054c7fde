"""The API server: who we are there, single calls, and the stream of an attached container.

The official client reads the kubeconfig or the service account and keeps the credentials fresh.
Objects stay the JSON that they are.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import aiohttp
from kubernetes.aio import client, config

from providers.errors import (
    CreationFailed,
    InvalidConfiguration,
    ProviderUnavailable,
    RateLimited,
    SandboxError,
)

# Of a call that is not a watch.
CALL_SECONDS = 25.0
# How often the connection of an attached container is asked for a sign of life.
HEARTBEAT_SECONDS = 30.0
_PIECE_BYTES = 1 << 16
_COMPLAINT_BYTES = 2000
_STDIN, _STDOUT, _STDERR = range(3)
_PROTOCOL = "v4.channel.k8s.io"
_SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")

_UNAUTHORIZED = 401
# What stands for no answer: aiohttp asserts and complains where its session is being closed.
_NO_ANSWER = (
    *(aiohttp.ClientError, OSError, TimeoutError),
    *(config.ConfigException, AssertionError, RuntimeError),
)

MERGE = "application/merge-patch+json"
# agent-sandbox's API beside its Sandbox.
EXTENSIONS = "extensions.agents.x-k8s.io/v1beta1"

Object = dict[str, Any]


class ApiFailure(Exception):
    """The API server refused a call, or did not answer: then `status` is 0."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(f"{reason}: {message}" if reason else message)
        self.status, self.reason, self.message = status, reason, message

    @property
    def is_quota(self) -> bool:
        """Whether a ResourceQuota has no room for an object."""
        return self.status == 403 and "exceeded quota" in self.message


def error_of(failure: ApiFailure, what: str) -> SandboxError:
    """Return the error to raise for a call that failed. `what` is the call, such as `create pods`.

    A quota that is full, and a server that is busy, are rate limits: they are full, not broken.
    """
    message = failure.message[:500]
    if failure.is_quota:
        return RateLimited(
            f"Kubernetes: {message}. The namespace has no room for another sandbox now. Try again "
            "later, or raise its ResourceQuota."
        )
    if failure.status == 429:
        return RateLimited(f"Kubernetes: The API server is busy: {message}.")
    if failure.status == 401:
        return ProviderUnavailable(
            f"Kubernetes: The API server does not accept the credentials of the pool service: "
            f"{message}. Check the kubeconfig or the service account."
        )
    if failure.status == 403 and " cannot " in message:
        return ProviderUnavailable(
            f"Kubernetes: The pool service may not {what}: {message}. Give its account the rights "
            "of deploy/kubernetes/rbac.yaml."
        )
    if failure.status == 403:
        return ProviderUnavailable(
            f"Kubernetes: The cluster refuses to {what}: {message}. Change the policy, LimitRange "
            "or webhook of the namespace that does."
        )
    if failure.status == 404:
        return ProviderUnavailable(
            f"Kubernetes: Cannot {what}: {message}. Check the namespace of KUBERNETES_NAMESPACE."
        )
    if failure.status in (400, 409, 422):
        return CreationFailed(f"Kubernetes: cannot {what}: {message}")
    return ProviderUnavailable(
        f"Kubernetes: The API server does not answer: {message}. Check the kubeconfig, the network "
        "and the cluster."
    )


class Api:
    """A connection to one API server, for one event loop."""

    def __init__(self, namespace: str, kubeconfig: Path | None = None) -> None:
        """Without a namespace it is that of the kubeconfig or of the service account."""
        self.namespace = namespace
        self._kubeconfig = kubeconfig
        self._client: client.ApiClient | None = None

    async def open(self) -> None:
        """Find out which cluster it is, and as whom. Raises InvalidConfiguration."""
        if self._client is not None:
            return
        settings, found = await self._load()
        self.namespace = self.namespace or found
        self._client = client.ApiClient(settings)

    async def _load(self) -> tuple[client.Configuration, str]:
        """Return what the kubeconfig or the service account says now, and its namespace."""
        settings = client.Configuration()
        # How calls are repeated is for their callers to say.
        settings.retries = None
        # Each attached sandbox holds a connection.
        settings.connection_pool_maxsize = 0
        path = str(self._kubeconfig or os.environ.get("KUBECONFIG", ""))
        try:
            if path or not (_SERVICE_ACCOUNT / "token").exists():
                await config.load_kube_config(  # type: ignore[no-untyped-call]
                    config_file=path or None, client_configuration=settings
                )
                _, active = config.list_kube_config_contexts(path or None)  # type: ignore[no-untyped-call]
                found = active["context"].get("namespace", "default")
            else:
                config.load_incluster_config(  # type: ignore[no-untyped-call]
                    client_configuration=settings
                )
                found = (_SERVICE_ACCOUNT / "namespace").read_text().strip()
        except (config.ConfigException, OSError, ValueError, KeyError, TypeError) as error:
            raise InvalidConfiguration(
                f"KUBECONFIG: The cluster cannot be used: {error}. Mount a kubeconfig and name it "
                "in KUBECONFIG, or run the pool service in the cluster with a service account."
            ) from error
        return settings, found

    async def _renew_credentials(self) -> bool:
        """Read the credentials anew, which may have expired. Return whether they are others.

        The client keeps those of a service account fresh, and runs the plug-ins of a kubeconfig
        but once.
        """
        settings, _ = await self._load()
        known = self._open.configuration
        is_changed = bool(settings.api_key != known.api_key)
        known.api_key = settings.api_key
        return is_changed

    @property
    def is_open(self) -> bool:
        """Whether it is known which cluster it is."""
        return self._client is not None

    async def close(self) -> None:
        """Close every connection."""
        if self._client is not None:
            await self._client.close()  # type: ignore[no-untyped-call]
            self._client = None

    async def call(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        query: Mapping[str, str] | None = None,
        content_type: str = "application/json",
    ) -> Object:
        """Return the answer of a call. Raises ApiFailure."""
        for is_last in (False, True):
            try:
                async with self._answer(
                    method, path, body, query, content_type, CALL_SECONDS
                ) as answer:
                    found: Object = await answer.json(content_type=None)
                    return found
            except ApiFailure as error:
                if error.status != _UNAUTHORIZED or is_last or not await self._renew_credentials():
                    raise
        raise AssertionError("the second answer is the last")

    async def watch(self, path: str, query: Mapping[str, str]) -> AsyncIterator[Object]:
        """Return the events of a watch until the server ends it. Raises ApiFailure."""
        seconds = float(query["timeoutSeconds"]) + CALL_SECONDS
        async with self._answer("GET", path, None, query, "", seconds) as answer:
            async for line in answer.content:
                event: Object = json.loads(line)
                if event["type"] == "ERROR":
                    status = event["object"]
                    raise ApiFailure(
                        int(status.get("code") or 0),
                        str(status.get("reason") or ""),
                        str(status.get("message") or ""),
                    )
                yield event

    async def attach(self, pod: str, container: str) -> AttachedStream:
        """Attach to the input and output of a running container. Raises ApiFailure.

        Its credentials are those of the calls before it, which are renewed with them.
        """
        wanted = {"container": container, "stdin": "true", "stdout": "true", "stderr": "true"}
        url = f"{self.pods}/{pod}/attach?{urlencode(wanted)}"
        headers = await self._headers()
        try:
            async with asyncio.timeout(CALL_SECONDS):
                connection = await self._session.ws_connect(
                    f"{self._open.configuration.host}{url}",
                    headers=headers,
                    protocols=(_PROTOCOL,),
                    heartbeat=HEARTBEAT_SECONDS,
                    max_msg_size=0,
                    timeout=aiohttp.ClientWSTimeout(ws_close=1.0),
                )
        except aiohttp.WSServerHandshakeError as error:
            # The text of the answer is lost with the connection.
            said = f"the attach was answered with status {error.status}"
            raise ApiFailure(error.status, "", said) from error
        except _NO_ANSWER as error:
            raise ApiFailure(0, "", str(error) or type(error).__name__) from error
        return AttachedStream(connection)

    @property
    def pods(self) -> str:
        """The path of the namespace's Pods."""
        return f"/api/v1/namespaces/{self.namespace}/pods"

    @property
    def claims(self) -> str:
        """The path of the namespace's SandboxClaims."""
        return self.extension("sandboxclaims")

    def extension(self, kind: str) -> str:
        """Return the path of the namespace's objects of one of agent-sandbox's kinds."""
        return f"/apis/{EXTENSIONS}/namespaces/{self.namespace}/{kind}"

    @contextlib.asynccontextmanager
    async def _answer(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None,
        query: Mapping[str, str] | None,
        content_type: str,
        seconds: float,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        try:
            headers = await self._headers()
            if body is not None:
                headers["Content-Type"] = content_type
            async with self._session.request(
                method,
                f"{self._open.configuration.host}{path}",
                params=query,
                data=None if body is None else json.dumps(body),
                headers=headers,
                timeout=aiohttp.ClientTimeout(total=seconds),
                # It would have our credentials elsewhere.
                allow_redirects=False,
            ) as answer:
                if answer.status >= 300:
                    raise _failure(answer.status, await answer.text(errors="replace"))
                yield answer
        except ApiFailure:
            raise
        except (*_NO_ANSWER, ValueError) as error:
            raise ApiFailure(0, "", str(error) or type(error).__name__) from error

    @property
    def _open(self) -> client.ApiClient:
        if self._client is None:
            raise ApiFailure(0, "", "the launcher is closed")
        return self._client

    @property
    def _session(self) -> aiohttp.ClientSession:
        rest = self._open.rest_client
        if rest.pool_manager is None:
            rest.pool_manager = rest._create_pool_manager()
        return rest.pool_manager

    async def _headers(self) -> dict[str, str]:
        headers = {"Accept": "application/json"}
        await self._open.update_params_for_auth(headers, [], ["BearerToken"], "", "", None)
        return headers


def _failure(status: int, text: str) -> ApiFailure:
    try:
        told = json.loads(text)
        return ApiFailure(status, str(told.get("reason") or ""), str(told.get("message") or ""))
    except (ValueError, AttributeError):
        return ApiFailure(status, "", text[:500])


class AttachedStream:
    """The input and output of a container as one end of a socket pair.

    `end` is for its reader, who closes it. It ends when the container or the connection does.
    """

    def __init__(self, connection: aiohttp.ClientWebSocketResponse) -> None:
        self.end, self._ours = socket.socketpair()
        for each in (self.end, self._ours):
            each.setblocking(False)
        self.stderr = b""
        self.at_end: Callable[[], None] = lambda: None
        self._connection = connection
        self._tasks = [
            asyncio.ensure_future(self._receive()),
            asyncio.ensure_future(self._send()),
        ]
        for task in self._tasks:
            task.add_done_callback(self._release)

    @property
    def complaint(self) -> str:
        """The beginning of what was written to stderr, as text."""
        return self.stderr.decode("utf-8", "replace").strip()

    async def close(self) -> None:
        """Let go of the container, which goes on."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._connection.close()

    async def _receive(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            async for message in self._connection:
                if message.type != aiohttp.WSMsgType.BINARY or len(message.data) < 2:
                    continue
                kind, data = message.data[0], message.data[1:]
                if kind == _STDOUT:
                    await loop.sock_sendall(self._ours, data)
                elif kind == _STDERR and len(self.stderr) < _COMPLAINT_BYTES:
                    self.stderr += data[: _COMPLAINT_BYTES - len(self.stderr)]
        except OSError:
            # Its reader has left.
            pass
        finally:
            with contextlib.suppress(OSError):
                self._ours.shutdown(socket.SHUT_RDWR)

    async def _send(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while data := await loop.sock_recv(self._ours, _PIECE_BYTES):
                await self._connection.send_bytes(bytes([_STDIN]) + data)
        except (OSError, aiohttp.ClientError):
            # The connection is gone, which `_receive` sees.
            return
        await self._connection.close()

    def _release(self, _: asyncio.Task[None]) -> None:
        # Not while the loop still looks at it.
        if all(task.done() for task in self._tasks):
            self._ours.close()
            self.at_end()
