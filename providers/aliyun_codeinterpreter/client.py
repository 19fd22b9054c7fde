"""An Aliyun account: sandboxes through agentrun-sdk, each call with its own configuration."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from providers.addresses import rules
from providers.aliyun_codeinterpreter import sdk
from providers.aliyun_codeinterpreter.machine import AliyunMachine
from providers.aliyun_codeinterpreter.sdk import translate
from providers.errors import SandboxError
from providers.remote import service
from providers.remote.receiver import Receiver
from providers.remote.secret import Secret
from providers.remote.service import AccountClient, CreateRequest, SandboxGone

DEFAULT_TEMPLATE = "cofferdam"


@dataclass(frozen=True)
class Account(AccountClient):
    """Where and as whom the SDK is called. Empty endpoints leave the choice to the SDK's rules."""

    access_key_id: Secret
    access_key_secret: Secret
    account_id: str
    region: str
    data_endpoint: str = ""
    control_endpoint: str = ""
    receiver: Receiver = field(default_factory=lambda: Receiver(rules()))
    template: str = ""
    _templates: set[str] = field(default_factory=set, compare=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, compare=False, repr=False)

    label = "Aliyun"

    @property
    def place(self) -> str:  # type: ignore[override]
        return self.data_endpoint or self.region

    def config(self, seconds: float = 0) -> Any:
        """A configuration for one call, which may take `seconds`. Its repr shows the secret."""
        return sdk.Config(
            access_key_id=self.access_key_id.reveal(),
            access_key_secret=self.access_key_secret.reveal(),
            account_id=self.account_id,
            region_id=self.region,
            timeout=seconds or service.REQUEST_SECONDS,
            data_endpoint=self.data_endpoint or None,
            control_endpoint=self.control_endpoint or None,
        )

    def create(self, wanted: CreateRequest) -> AliyunMachine:
        """It ends by itself when nothing was run in it for so long. Our name is its id there."""
        created = sdk.SandboxClient(self.config()).create_sandbox(
            template_name=wanted.template or self.template or self._default_template(),
            sandbox_id=wanted.name,
            sandbox_idle_timeout_seconds=service.KEPT_SECONDS if wanted.kept else wanted.seconds,
            config=self.config(),
        )
        return AliyunMachine(self.config, created.sandbox_id or wanted.name)

    def connect(self, ref: str) -> AliyunMachine:
        try:
            sdk.SandboxClient(self.config()).get_sandbox(ref, config=self.config())
        except sdk.ResourceNotExistError:
            raise SandboxGone(f"There is no Aliyun sandbox {ref!r} any more.") from None
        return AliyunMachine(self.config, ref)

    def end(self, ref: str) -> bool:
        try:
            # The configuration is handed over: the SDK's own default is the environment's.
            sdk.Sandbox.delete_by_id(ref, config=self.config())
        except sdk.ResourceNotExistError:
            return False
        return True

    def end_named(self, name: str) -> bool:
        return self.end(name)

    def check(self) -> None:
        """Asks for a sandbox that cannot exist.

        Being told so proves network, signature and account, with no right to anything but reading
        sandboxes.
        """
        try:
            sdk.SandboxClient(self.config()).get_sandbox("cofferdam-health", config=self.config())
        except sdk.ResourceNotExistError:
            return

    def listed(self) -> Iterator[tuple[str, str]]:
        """Needs the control endpoint."""
        token = None
        while True:
            page = sdk.Sandbox.list(
                sdk.ListSandboxesInput(max_results=50, next_token=token),
                config=self._control_config(),
            )
            yield from ((one.sandbox_id,) * 2 for one in page.sandboxes if one.sandbox_id)
            token = page.next_token
            if not token:
                return

    def translate(self, error: Exception, *, creating: bool) -> SandboxError:
        return translate(error, [self.access_key_id, self.access_key_secret], creating=creating)

    def connected(self) -> AbstractContextManager[None]:
        return sdk.connections_to(self.receiver)

    def details(self) -> dict[str, Any]:
        return {"region": self.region}

    def _control_config(self) -> Any:
        """For the control plane, whose client takes the timeout for milliseconds."""
        return self.config(service.REQUEST_SECONDS * 1000)

    def _default_template(self) -> str:
        """The name of our own template, which is made the first time it is missing."""
        with self._lock:
            if DEFAULT_TEMPLATE not in self._templates:
                config = self._control_config()
                client = sdk.SandboxClient(config)
                try:
                    client.get_template(DEFAULT_TEMPLATE, config=config)
                except sdk.ResourceNotExistError:
                    wanted = sdk.TemplateInput(
                        template_name=DEFAULT_TEMPLATE,
                        template_type=sdk.TemplateType.CODE_INTERPRETER,
                    )
                    client.create_template(wanted, config=config)
                self._templates.add(DEFAULT_TEMPLATE)
        return DEFAULT_TEMPLATE
