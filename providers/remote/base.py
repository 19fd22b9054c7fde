"""What all providers of remote services have in common: whose a sandbox is, how long it is waited
for, what becomes of one that nobody has heard of, and what of it is asked once.

A provider of another service is a configuration, an `AccountClient` and its `SandboxDriver`:
docs/write-a-remote-provider.md.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from threading import Lock
from types import MappingProxyType
from typing import Any, ClassVar
from uuid import uuid4

from providers.base import ENVIRONMENT, KEPT, Health, SandboxProvider
from providers.errors import (
    ConnectionFailed,
    InvalidConfiguration,
    KeptSandboxLost,
    NotInitialized,
    ProviderUnavailable,
    SandboxError,
)
from providers.remote.reclaim import end_later, is_known_orphan, process_tag
from providers.remote.sandbox import KeptRemoteSandbox, RemoteSandbox
from providers.remote.service import (
    KEPT_SECONDS,
    AccountClient,
    CreateRequest,
    SandboxDriver,
    SandboxGone,
)
from providers.remote.templates import read_templates
from providers.sandbox import KeptSandbox, Sandbox
from providers.values import SandboxSpec

# Beyond the longest run: starting, files before it, artifacts after it.
SPARE_SECONDS = 60

_PREFIX, _KEPT = "cofferdam-", "kept"


class RemoteProvider(SandboxProvider):
    """A provider whose sandboxes are a service's. Its configuration has an integer `timeout`.

    `languages` are those of the service, `aliases` our other names for them. `runtime` is the tool
    that isolates, `packages` what pip installs for the SDK. `awaits_at_top` says whether the
    service's JavaScript waits for an `await` outside of functions.
    """

    languages: ClassVar[tuple[str, ...]]
    aliases: ClassVar[Mapping[str, str]] = {"nodejs": "javascript"}
    runtime: ClassVar[str]
    packages: ClassVar[str] = ""
    awaits_at_top: ClassVar[bool] = False
    knows_at_once = True

    _service: AccountClient | None = None
    _timeout = 30
    _templates: Mapping[str, str] = MappingProxyType({})

    @abstractmethod
    def connect(self, config: Mapping[str, Any]) -> AccountClient:
        """The account of a configuration. Imports the SDK, and asks the service nothing."""

    def initialize(self, config: Mapping[str, Any]) -> bool:
        self._lock = Lock()
        self._open: dict[str, RemoteSandbox] = {}
        try:
            self._service = self.connect(config)
        except ImportError as error:
            raise ProviderUnavailable(
                f"The SDK of {self.name} is not installed ({error.name}). Install it: "
                f"pip install {self.packages}"
            ) from None
        self._timeout = config["timeout"]
        self._templates = read_templates(config.get("templates"))
        return True

    def has_own_template(self, name: str) -> bool:
        return name in self._templates

    @property
    def max_timeout(self) -> float | None:
        return float(self._timeout)

    def open(self, spec: SandboxSpec, owner: str) -> Sandbox:
        service, language = self.service, self.language(spec.template)
        if spec.limits is not None:
            raise InvalidConfiguration(
                f"limits: {self.name} decides the size of a sandbox. Leave the limits out, or "
                "choose another template in the configuration.",
                field="limits",
            )
        template = self._templates.get(spec.template_name, "")
        if spec.digest and not template:
            raise InvalidConfiguration(
                f"template: {self.name} has none for {spec.template_name!r}. Name it in the "
                "templates of the configuration.",
                field="template",
            )
        self.check_environment(spec.environment)
        if spec.kept and KEPT not in self.capabilities:
            raise self.lacks(KEPT)
        # A name of our own, so that what we do not hear about can still be ended.
        name = f"{_PREFIX}{_KEPT if spec.kept else process_tag()}-{uuid4().hex[:12]}"
        kept_for = math.ceil(spec.seconds or KEPT_SECONDS)
        seconds = kept_for if spec.kept else self._timeout + SPARE_SECONDS
        wanted = CreateRequest(name, language, seconds, spec.kept, spec.environment, template)
        try:
            machine = service.ask(
                service.create,
                wanted,
                creating=True,
                too_late=partial(_end_unwanted, service),
                counted=True,
            )
        except ConnectionFailed:
            # Whether it was created nobody has told us, and nobody else will end it: not even
            # when we have been closed meanwhile.
            end_later(partial(service.ask, service.end_named, name), name)
            raise
        if spec.kept:
            return self._kept(machine, language)
        sandbox = RemoteSandbox(self, machine)
        with self._lock:
            self._open[machine.ref] = sandbox
        return sandbox

    def attach(self, ref: str) -> KeptSandbox:
        if KEPT not in self.capabilities:
            raise self.lacks(KEPT)
        ref, _, language = ref.rpartition("/")
        try:
            machine = self.service.ask(self.service.connect, ref, counted=True)
        except SandboxGone as error:
            raise KeptSandboxLost(error.message) from None
        return self._kept(machine, language)

    def health_check(self) -> Health:
        try:
            self.service.ask(self.service.check, counted=True)
        except SandboxError as error:
            details = self._service.details() if self._service else {}
            said = {**details, "code": error.code}
            return Health(False, error.message, said, answered=error.answered)
        return Health(True, details=self.service.details())

    def get_supported_languages(self) -> list[str]:
        return [*self.languages, *(name for name in self.aliases if name == "nodejs")]

    def sweep(self) -> int:
        """End what processes that live no more have left behind, of this machine and, as far as is
        known of them, of others."""
        service = self.service
        ended = 0
        for ref, name in service.ask(lambda: list(service.listed())):
            tag, _, _ = name.removeprefix(_PREFIX).rpartition("-")
            if name.startswith(_PREFIX) and tag != _KEPT and is_known_orphan(tag):
                ended += service.ask(service.end, ref)
        return ended

    def close(self) -> None:
        """Ends what is open for one run. What is kept stays: whoever attaches to it goes on."""
        if self._service is None:
            return
        with self._lock:
            left = list(self._open)
        for ref in left:
            with suppress(SandboxError):
                self.end(ref)
        self._service = None

    # For our sandboxes.

    @property
    def service(self) -> AccountClient:
        if self._service is None:
            raise NotInitialized(f"The {self.name} provider is not initialized, or closed.")
        return self._service

    def language(self, name: str) -> str:
        """The service's name of a language. Raises InvalidConfiguration."""
        language = self.aliases.get(name, name)
        if language not in self.languages:
            raise InvalidConfiguration(
                f"language: Must be one of: {', '.join(self.languages)}.", field="language"
            )
        return language

    def check_environment(self, environment: Mapping[str, str]) -> None:
        if environment and ENVIRONMENT not in self.capabilities:
            raise InvalidConfiguration(
                f"environment: {self.name} sets no variables for code.", field="environment"
            )

    def end(self, ref: str) -> bool:
        """End a sandbox. What cannot be ended now is tried again behind our back."""
        service = self.service
        try:
            ended = service.ask(service.end, ref)
        except SandboxError:
            end_later(partial(self._end_at_last, ref), ref)
            raise
        with self._lock:
            self._open.pop(ref, None)
        return ended

    def _kept(self, machine: SandboxDriver, language: str) -> KeptSandbox:
        try:
            return KeptRemoteSandbox(self, machine, language)
        except SandboxError:
            with suppress(SandboxError):
                self.end(machine.ref)
            raise

    def _end_at_last(self, ref: str) -> bool:
        """Closing tries, too. Should both fail, the sandbox's own time ends it."""
        if self._service is None:
            return True
        self._service.ask(self._service.end, ref)
        with self._lock:
            self._open.pop(ref, None)
        return True


def _end_unwanted(service: AccountClient, machine: SandboxDriver) -> None:
    # It ends by itself when its time is up, so nothing is lost but money.
    with suppress(SandboxError):
        service.ask(service.end, machine.ref)
