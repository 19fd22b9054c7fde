"""What a remote provider writes of its service: an account, and the sandboxes that it has there.

All methods may raise whatever the service's SDK raises: `RemoteProvider` calls them under a
deadline of its own, and `AccountClient.translate` makes a SandboxError of it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy
from dataclasses import dataclass
from typing import Any, Self, TypeVar

from providers.errors import (
    ConnectionFailed,
    KeptSandboxLost,
    ProviderUnavailable,
    SandboxError,
)
from providers.remote.bounded import CancelToken
from providers.remote.deadline import DeadlinePassed, call_within
from providers.remote.output import Output
from providers.sandbox import Context, Files, Processes

T = TypeVar("T")

# For every call but those that run code.
REQUEST_SECONDS = 30.0

# How long a kept sandbox lasts that nobody has renewed: what is lost right after it was made is
# not ours to find, because any process may go on with it.
KEPT_SECONDS = 900

NOTE_CHARACTERS = 256 * 1024


@dataclass(frozen=True)
class CreateRequest:
    """The sandbox to be made. `seconds` is how long it lasts without a word from us. Where
    `SandboxDriver.renew` cannot change that later, one that is kept needs KEPT_SECONDS.

    `name` is what the service must tell of it when it lists sandboxes: it says whose it is.
    `template` is the service's own name of one; without it, that of the configuration.
    """

    name: str
    language: str
    seconds: int
    kept: bool = False
    environment: Mapping[str, str] | None = None
    template: str = ""


@dataclass(frozen=True)
class Cell:
    """Code for an interpreter: that of a context, or in a sandbox for one run any for `language`.

    Output goes to `output` as it comes. `seconds` may be told to the service, and are watched by
    who calls. `cut` may be given to what can be broken off in the middle.
    """

    text: str
    language: str
    output: Output
    seconds: float
    context: str = ""
    environment: Mapping[str, str] | None = None
    cut: CancelToken | None = None


class SandboxGone(ProviderUnavailable):
    """The service says that the sandbox itself is not there any more."""


class SandboxDriver(ABC):
    """One sandbox of the service. `ref` is its name there, by which others can connect to it."""

    ref: str

    @abstractmethod
    def run(self, cell: Cell) -> int:
        """Run it and return its exit code: 0, 1 for an uncaught exception, or what it said."""

    # What follows is needed for the capability in brackets.

    def write(self, path: str, content: bytes) -> None:
        """[FILES] Put a file into the workspace, with its folders."""
        raise NotImplementedError

    def prepare(self) -> None:
        """[ARTIFACTS] Make the folder `artifacts` in the workspace."""

    def artifacts(self) -> Iterable[tuple[str, int]]:
        """[ARTIFACTS] Names of what is below `artifacts` but folders, relative to it, and sizes in
        bytes: `output.NOT_REGULAR` for what is no regular file."""
        return ()

    def read(self, path: str, longest: int) -> bytes | None:
        """[ARTIFACTS] A file of the workspace; None when it is longer than `longest` bytes."""
        raise NotImplementedError

    def note(self) -> str:
        """[KEPT] What `keep_note` was last given in this sandbox, "" for nothing.

        Of what code has put in its stead, NOTE_CHARACTERS at most, or any other text.
        """
        raise NotImplementedError

    def keep_note(self, text: str) -> None:
        """[KEPT] Keep a text of at most NOTE_CHARACTERS in the sandbox, out of the workspace.

        It tells of the contexts. Code may change it, and so lose its own.
        """
        raise NotImplementedError

    def create_context(self, language: str, cwd: str) -> Context:
        """[KEPT] A new interpreter, under the service's id."""
        raise NotImplementedError

    def contexts(self) -> Sequence[Context]:
        """[KEPT] Those that the service lists."""
        raise NotImplementedError

    def destroy_context(self, context_id: str) -> bool:
        """[KEPT] End an interpreter. False when it was not there."""
        raise NotImplementedError

    def restart_context(self, context_id: str, language: str, cwd: str) -> str:
        """[KEPT] Have an empty interpreter in its stead. The id that it has now."""
        raise NotImplementedError

    def settle(self, context_id: str, language: str) -> bool:
        """[KEPT] After a call was cut: whether the interpreter stopped, with its state, in 1 s."""
        raise NotImplementedError

    def renew(self, seconds: float) -> None:
        """[KEPT] Have it last for so long from now on."""
        raise NotImplementedError

    def files(self, service: AccountClient) -> Files | None:
        """[KEPT] The workspace, None where the service has no such interface."""
        return None

    def processes(self, service: AccountClient) -> Processes | None:
        """[KEPT] The commands, None where the service has no such interface."""
        return None


class AccountClient(ABC):
    """One account of a service. `label` is its name in messages, `place` where it is."""

    label: str
    place: str = ""

    @abstractmethod
    def create(self, wanted: CreateRequest) -> SandboxDriver:
        """Make a sandbox."""

    @abstractmethod
    def end(self, ref: str) -> bool:
        """End a sandbox. False when it was not there."""

    @abstractmethod
    def listed(self) -> Iterable[tuple[str, str]]:
        """All sandboxes of the account that have a name of ours: `ref` and `CreateRequest.name`."""

    def end_named(self, name: str) -> bool:
        """End what was made under `CreateRequest.name`, whose `ref` nobody has heard.

        Returns whether it was ended.
        """
        found = [ref for ref, told in self.listed() if told == name]
        return bool(found) and all(map(self.end, found))

    @abstractmethod
    def check(self) -> None:
        """One small request that needs working credentials."""

    @abstractmethod
    def translate(self, error: Exception, *, creating: bool) -> SandboxError:
        """The SandboxError for what the SDK raised. Never with a credential in it.

        `creating` says that a sandbox was asked for. `answered` is to be "status" where the service
        answered with a status, see `SandboxError`.
        """

    def connect(self, ref: str) -> SandboxDriver:
        """[KEPT] A sandbox that another process has made. Raises SandboxGone."""
        raise NotImplementedError

    def connected(self) -> AbstractContextManager[None]:
        """Around every call, in the thread that makes it."""
        return nullcontext()

    def details(self) -> dict[str, Any]:
        """What a health check shows of the account, and the metadata of each sandbox."""
        return {}

    # Not to be overridden: how the above is called.

    # Whether it is asked for a kept sandbox.
    _says_lost = False

    def of_kept(self) -> Self:
        """The same account, as a kept sandbox asks it: where that is gone, it is lost."""
        one = copy(self)
        vars(one)["_says_lost"] = True
        return one

    def ask(
        self,
        function: Callable[..., T],
        *arguments: Any,
        creating: bool = False,
        running: bool = False,
        counted: bool = False,
        seconds: float | None = None,
        too_late: Callable[[T], None] | None = None,
    ) -> T:
        """Call what asks the service, within `seconds` (REQUEST_SECONDS), and translate.

        `counted` is for what may be refused while too many such calls have not ended in their time:
        see `call_within`. Raises SandboxError, and DeadlinePassed only where `seconds` are given.
        """

        def called() -> T:
            with self.translated(creating=creating, running=running):
                return function(*arguments)

        line = f"{self.label} at {self.place}" if counted else ""
        limit = REQUEST_SECONDS if seconds is None else seconds
        try:
            return call_within(limit, called, too_late=too_late, line=line)
        except DeadlinePassed:
            if seconds is not None:
                raise
            error = ConnectionFailed(f"{self.label} does not answer within {limit:g} s.")
            error.started = running
            raise error from None

    @contextmanager
    def translated(self, *, creating: bool = False, running: bool = False) -> Iterator[None]:
        """Turn whatever the SDK raises within the block into a SandboxError.

        `running` says that code was being handed over, or had been. It then counts as started,
        whatever was answered: in a sandbox the code itself may be who answers.
        """
        try:
            with self.connected():
                yield
        except DeadlinePassed:
            raise
        except SandboxError as error:
            raise self._told(error, running) from None
        except Exception as error:
            # Not chained: the SDK's frames hold credentials.
            raise self._told(self.translate(error, creating=creating), running) from None

    def _told(self, error: SandboxError, running: bool) -> SandboxError:
        if isinstance(error, SandboxGone) and self._says_lost:
            error = KeptSandboxLost(error.message, started=error.started)
        error.started = error.started or running
        return error
