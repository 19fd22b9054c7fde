"""RAGFlow's executor_manager, as the bridge falls back to it: a client of its `POST /run`.

No provider of the admin's: there is nothing to configure but the host, and it is asked only where
no provider is configured. Our own pool service answers the same contract.
"""

from __future__ import annotations

import base64
import json
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from urllib.parse import urlsplit

import urllib3
from urllib3.exceptions import ConnectTimeoutError, HTTPError, NewConnectionError

from providers import slices
from providers.base import ARGUMENTS, ARTIFACTS, Health, SandboxProvider
from providers.errors import (
    BlockedByPolicy,
    ConnectionFailed,
    InvalidConfiguration,
    ProviderUnavailable,
    RateLimited,
    before_the_code,
)
from providers.isolation import NAMESPACES
from providers.languages import normalize_language, offered_names
from providers.manager import Lease
from providers.sandbox import Sandbox, tell_afterwards
from providers.values import ArtifactFile, Emit, ExecutionResult, Job, SandboxSpec

logger = logging.getLogger(__name__)

PORT = 9385
CONNECT_SECONDS = 3.0
# It begins to count when it has a container, for which it waits ten seconds itself.
SLACK_SECONDS = 20.0
HEALTH_SECONDS = 5.0
LANGUAGES = ("python", "nodejs")
# Ten artifacts of 10 MiB in base64, and both streams.
MOST_ANSWER_BYTES = 192 * 1024 * 1024

TIME, MEMORY = "time", "memory"
_UNSAFE = "Code is unsafe"
_BUSY = "no_available_container"


@contextmanager
def _lent(host: str) -> Iterator[Lease]:
    provider = ExecutorManagerProvider()
    provider.initialize({"host": host})
    try:
        yield Lease(provider, provider.id, 0)
    finally:
        provider.close()


def route_to(host: str) -> Callable[..., AbstractContextManager[Lease]]:
    """Lends the executor of `host`, or of `host:port`."""
    return lambda *, wait=True: _lent(host)


class ExecutorManagerProvider(SandboxProvider):
    id = "executor_manager"
    name = "RAGFlow's executor"
    capabilities = frozenset({ARGUMENTS, ARTIFACTS})
    knows_at_once = True

    def initialize(self, config: Mapping[str, Any]) -> bool:
        place = urlsplit(f"http://{config['host']}")
        self._pool = urllib3.HTTPConnectionPool(
            place.hostname or "", place.port or PORT, retries=False
        )
        return True

    @property
    def isolation(self) -> str:
        # It runs containers, and does not say of which kind.
        return NAMESPACES

    @property
    def sharing(self) -> str:
        # Nor whom they served before.
        return ""

    def open(self, spec: SandboxSpec, owner: str) -> Sandbox:
        if spec.kept or spec.limits or spec.environment:
            raise InvalidConfiguration("RAGFlow's executor can only run code.")
        return _ExecutorSandbox(self._pool)

    def health_check(self) -> Health:
        try:
            answer = self._pool.request("GET", "/healthz", timeout=HEALTH_SECONDS, redirect=False)
        except HTTPError as error:
            return Health(False, f"It does not answer: {type(error).__name__}.")
        return Health(answer.status == 200, "" if answer.status == 200 else f"HTTP {answer.status}")

    def get_supported_languages(self) -> list[str]:
        return offered_names(LANGUAGES)

    def close(self) -> None:
        self._pool.close()


class _ExecutorSandbox(Sandbox):
    """A place in the executor, which has one for whoever comes."""

    def __init__(self, pool: urllib3.HTTPConnectionPool) -> None:
        self.ref, self.metadata = "executor-manager", {"runtime": "executor_manager"}
        self._pool = pool

    def run(self, job: Job, emit: Emit | None = None) -> ExecutionResult:
        with before_the_code():
            body = json.dumps(
                {
                    "code_b64": base64.b64encode(job.code.encode()).decode(),
                    "language": _language(job),
                    "arguments": dict(job.arguments or {}),
                }
            )
        return tell_afterwards(result_of(self._ask(body, job.timeout)), emit)

    def close(self) -> bool:
        return True

    def _ask(self, body: str, seconds: float) -> dict[str, Any]:
        timeout = urllib3.Timeout(connect=CONNECT_SECONDS, read=seconds + SLACK_SECONDS)
        try:
            answer = self._pool.request(
                "POST",
                "/run",
                body=body,
                headers={"Content-Type": "application/json"},
                timeout=timeout,
                redirect=False,
                preload_content=False,
            )
            # As it came: what is compressed could be of any size.
            data = answer.read(MOST_ANSWER_BYTES + 1, decode_content=False)
        except (NewConnectionError, ConnectTimeoutError) as error:
            logger.info("RAGFlow's executor cannot be reached: %s", error)
            with before_the_code():
                raise ConnectionFailed(
                    "RAGFlow's executor does not answer. Start it, correct SANDBOX_HOST, or "
                    "configure a provider in the admin."
                ) from None
        except HTTPError as error:
            logger.info("connection to RAGFlow's executor broken: %s", error)
            raise _unclear("The connection to RAGFlow's executor broke.") from None
        if answer.status == 422:
            with before_the_code():
                raise InvalidConfiguration("RAGFlow's executor refuses the request.")
        try:
            told = json.loads(data) if len(data) <= MOST_ANSWER_BYTES else None
        except (ValueError, RecursionError):
            told = None
        if answer.status != 200 or not isinstance(told, dict):
            raise _unclear(f"RAGFlow's executor answered with HTTP {answer.status}, no result.")
        return told


def result_of(told: Mapping[str, Any]) -> ExecutionResult:
    """What an answer of `POST /run` says. Raises SandboxError where no code has come to an end."""
    status, detail = told.get("status"), told.get("detail")
    if status == "program_runner_error":
        _raise_unrun(detail, told.get("stderr"))
    limit = told.get("resource_limit_type") if status == "resource_limit_exceeded" else None
    code = told.get("exit_code")
    returned = told.get("result")
    value = returned if isinstance(returned, dict) and returned.get("present") is True else None
    milliseconds = told.get("time_used_ms")
    artifacts = told.get("artifacts") or []
    if not isinstance(artifacts, list):
        raise _unclear("RAGFlow's executor answered with invalid artifacts.")
    return ExecutionResult(
        stdout=_text(told.get("stdout")),
        stderr=_text(told.get("stderr")),
        exit_code=None if limit or not isinstance(code, int) else code,
        execution_time=milliseconds / 1000 if isinstance(milliseconds, int | float) else 0.0,
        metadata={"runtime": "executor_manager", "executor_status": _text(status)},
        timed_out=limit == TIME,
        out_of_memory=limit == MEMORY,
        has_result=value is not None,
        result=value.get("value") if value is not None else None,
        artifacts=[_artifact(each) for each in artifacts],
    )


def _raise_unrun(detail: Any, problem: Any) -> None:
    with before_the_code():
        if detail == _UNSAFE:
            raise BlockedByPolicy(f"RAGFlow's executor refuses the code. {_text(problem)}")
        if detail == _BUSY:
            raise RateLimited("RAGFlow's executor has no free container.", retry_after=5.0)
    raise _unclear("RAGFlow's executor failed.")


def _language(job: Job) -> str:
    language = normalize_language(job.language)
    if language not in LANGUAGES:
        raise InvalidConfiguration("RAGFlow's executor runs Python and JavaScript.")
    if job.files:
        raise InvalidConfiguration("RAGFlow's executor does not accept files.", field="files")
    if job.environment:
        problem = "RAGFlow's executor sets no variables for code."
        raise InvalidConfiguration(problem, field="environment")
    if job.entrypoint == "script":
        problem = "RAGFlow's executor runs only main()."
        raise InvalidConfiguration(problem, field="entrypoint")
    return language


def _artifact(told: Any) -> ArtifactFile:
    try:
        content = slices.decoded(told["content_b64"])
        return ArtifactFile(str(told["name"]), str(told["mime_type"]), content)
    except (AttributeError, TypeError, KeyError, ValueError):
        raise _unclear("RAGFlow's executor answered with an invalid artifact.") from None


def _unclear(problem: str) -> ProviderUnavailable:
    return ProviderUnavailable(f"{problem} The code may have run.", started=True)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""
