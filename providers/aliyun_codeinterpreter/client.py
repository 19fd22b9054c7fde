"""agentrun-sdk as the provider uses it: every call with its configuration, and translated."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from providers.addresses import rules
from providers.aliyun_codeinterpreter import sdk
from providers.aliyun_codeinterpreter.errors import translate
from providers.errors import ConnectionFailed, SandboxError
from providers.remote.deadline import DeadlinePassed, call_within
from providers.remote.receiver import Receiver
from providers.remote.secret import Secret

T = TypeVar("T")

REQUEST_SECONDS = 30.0
DEFAULT_TEMPLATE = "cofferdam"
HOME = "/home/user"


@dataclass(frozen=True)
class Account:
    """Where and as whom the SDK is called. Empty endpoints leave the choice to the SDK's rules."""

    access_key_id: Secret
    access_key_secret: Secret
    account_id: str
    region: str
    data_endpoint: str = ""
    control_endpoint: str = ""
    receiver: Receiver = field(default_factory=lambda: Receiver(rules()))
    _templates: set[str] = field(default_factory=set, compare=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, compare=False, repr=False)

    def config(self, seconds: float = 0) -> Any:
        """A configuration for one call, which may take `seconds`. Its repr shows the secret."""
        return sdk.Config(
            access_key_id=self.access_key_id.reveal(),
            access_key_secret=self.access_key_secret.reveal(),
            account_id=self.account_id,
            region_id=self.region,
            timeout=seconds or REQUEST_SECONDS,
            data_endpoint=self.data_endpoint or None,
            control_endpoint=self.control_endpoint or None,
        )

    def control_config(self) -> Any:
        """For the control plane, whose client takes the timeout for milliseconds."""
        return self.config(REQUEST_SECONDS * 1000)

    @contextmanager
    def translated(self, *, creating: bool = False, running: bool = False) -> Iterator[None]:
        """Turn whatever the SDK raises within the block into a SandboxError."""
        try:
            with sdk.connections_to(self.receiver):
                yield
        except (SandboxError, DeadlinePassed):
            raise
        except Exception as error:
            # Not chained: the SDK's frames hold the secret.
            secrets = [self.access_key_id, self.access_key_secret]
            told = translate(error, secrets, creating=creating, running=running)
            told.answered = "status" if getattr(error, "status_code", 0) else ""
            raise told from None

    def create(self, template: str, instance_id: str, idle_seconds: int) -> str:
        """A new sandbox that ends by itself when nothing was run in it for `idle_seconds`."""

        def create() -> str:
            created = sdk.SandboxClient(self.config()).create_sandbox(
                template_name=template or self._default_template(),
                sandbox_id=instance_id,
                sandbox_idle_timeout_seconds=idle_seconds,
                config=self.config(),
            )
            return created.sandbox_id or instance_id

        with self.translated(creating=True):
            return self._soon(create, too_late=self._delete_quietly)

    def delete(self, instance_id: str) -> bool:
        with self.translated():
            try:
                # The configuration is handed over: the SDK's own default is the environment's.
                self._soon(lambda: sdk.Sandbox.delete_by_id(instance_id, config=self.config()))
            except sdk.ResourceNotExistError:
                return False
        return True

    def check(self) -> None:
        """One signed request that the service answers only for a working account.

        It asks for a sandbox that cannot exist: being told so proves network, signature and
        account, with no right to anything but reading sandboxes. Raises SandboxError.
        """
        with self.translated():
            try:
                self._soon(
                    lambda: sdk.SandboxClient(self.config()).get_sandbox(
                        "cofferdam-health", config=self.config()
                    )
                )
            except sdk.ResourceNotExistError:
                return

    def listed(self) -> list[str]:
        """The ids of all sandboxes of the account. Needs the control endpoint."""
        with self.translated():
            return self._soon(lambda: list(self._pages()))

    def data(self, instance_id: str, seconds: float = 0) -> Any:
        """The sandbox's own interface: contexts, code and files."""
        return sdk.CodeInterpreterDataAPI(instance_id, config=self.config(seconds))

    def write(self, instance_id: str, path: str, content: bytes) -> None:
        """Put a file into the workspace. The SDK sends bytes from a file of this machine only."""
        with self.translated(), tempfile.TemporaryDirectory(prefix="cofferdam-") as folder:
            source = Path(folder) / "upload"
            source.write_bytes(content)
            self._soon(lambda: self.data(instance_id).upload_file(str(source), f"{HOME}/{path}"))

    def read(self, instance_id: str, path: str) -> bytes | None:
        with self.translated(), tempfile.TemporaryDirectory(prefix="cofferdam-") as folder:
            target = Path(folder) / "download"
            try:
                self._soon(
                    lambda: self.data(instance_id).download_file(f"{HOME}/{path}", str(target))
                )
            except Exception as error:
                if getattr(error, "status_code", None) == 404:
                    return None
                raise
            return target.read_bytes()

    def _pages(self) -> Iterator[str]:
        token = None
        while True:
            page = sdk.Sandbox.list(
                sdk.ListSandboxesInput(max_results=50, next_token=token),
                config=self.control_config(),
            )
            yield from (sandbox.sandbox_id for sandbox in page.sandboxes if sandbox.sandbox_id)
            token = page.next_token
            if not token:
                return

    def _default_template(self) -> str:
        """The name of our own template, which is made the first time it is missing."""
        with self._lock:
            if DEFAULT_TEMPLATE not in self._templates:
                config = self.control_config()
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

    def _delete_quietly(self, instance_id: str) -> None:
        # It ends by itself when it was idle for long enough.
        with suppress(SandboxError):
            self.delete(instance_id)

    def _soon(self, call: Callable[[], T], *, too_late: Callable[[T], None] | None = None) -> T:
        def checked() -> T:
            with sdk.connections_to(self.receiver):
                return call()

        try:
            return call_within(REQUEST_SECONDS, checked, too_late=too_late)
        except DeadlinePassed:
            raise ConnectionFailed(
                f"Aliyun does not answer within {REQUEST_SECONDS:g} s."
            ) from None
