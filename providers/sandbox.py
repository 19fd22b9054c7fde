"""What a provider hands out: a sandbox, and what one that stays can do besides running code.

Every method may be called from any thread and raises `SandboxError` (see `providers.errors`) and
nothing else for what can go wrong outside our own code.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Literal

from providers import waiting
from providers.errors import InvalidConfiguration
from providers.network import Attempts, Network
from providers.values import Command, Emit, Event, ExecutionResult, Job

# The most folders in each other that a path of a workspace has.
MOST_DEPTH = 64
# What a file of ours is called while it is being written, or waits to be removed. No caller hears
# of one.
INTERNAL = ".cofferdam-"
# What the workspace is called in a sandbox: an absolute path below one of these is one of its own.
WORKSPACE_NAMES = ("/workspace", "/home/user")
# The context that a kept sandbox has from the start, in the language of its template.
DEFAULT_CONTEXT = "default"


class Sandbox(ABC):
    """One sandbox in a caller's hands, for one owner.

    `metadata` may hold `runtime` (the tool that isolates), `isolation` and `sharing` (see
    `providers.isolation`).
    """

    ref: str
    metadata: dict[str, Any]

    @abstractmethod
    def run(self, job: Job, emit: Emit | None = None) -> ExecutionResult:
        """Run code and wait for its end, at most `job.timeout` seconds and one more.

        Whatever this raises counts as raised by a run that may have started, and is tried nowhere
        else. What proves the contrary is raised within `errors.before_the_code`. Once the code has
        ended there is a result: what fails after that is a note in its metadata.
        """

    @abstractmethod
    def close(self) -> bool:
        """End the sandbox and all in it. False when it was not there, which is no error."""

    # The same for callers who have something else to do meanwhile. What is awaited may go on in any
    # thread, and must not use the database. A provider that can wait without a thread overrides
    # them; for the others threads wait.

    def submit_run(self, job: Job, emit: Emit | None = None) -> Future[ExecutionResult]:
        """`run`, begun."""
        return waiting.submit(lambda: self.run(job, emit))

    def submit_close(self) -> Future[bool]:
        """`close`, begun."""
        return waiting.submit(self.close)


def tell_afterwards(result: ExecutionResult, emit: Emit | None) -> ExecutionResult:
    """Emit what a run has put out, for a provider that learns of it only when the run has ended."""
    if emit is not None:
        if result.stdout:
            emit(Event("stdout", result.stdout.encode()))
        if result.stderr:
            emit(Event("stderr", result.stderr.encode()))
        for output in result.outputs:
            emit(Event("output", output=output))
    return result


@dataclass(frozen=True)
class Context:
    """An interpreter that keeps its state between runs. `cwd` is below the workspace."""

    id: str
    language: str
    cwd: str = ""


@dataclass(frozen=True)
class Process:
    """A command in a kept sandbox. `pid` is never used twice in one sandbox.

    `exit_code` is 128 + n for a signal n, None while it runs. `ended_by_us` says which deadline or
    bound ended it ("" when none did).
    """

    pid: int
    argv: Sequence[str]
    cwd: str = ""
    exit_code: int | None = None
    ended_by_us: Literal["", "timeout", "memory", "closed"] = ""


@dataclass(frozen=True)
class FileEntry:
    """What stands under a path. `modified` is seconds since 1970 by its clock.

    `path` is as given by the sandbox's file system, where a name that is not UTF-8 has surrogate
    escapes. `target` is what a symbolic link says. `end` is where one leads that was asked for by
    an absolute path, where it leads anywhere. `metadata` is what was put down beside the file.
    """

    path: str
    type: Literal["file", "directory", "symlink", "other"]
    size: int = 0
    mode: int = 0
    modified: float = 0.0
    target: str = ""
    end: FileEntry | None = None
    metadata: Mapping[str, str] = field(default_factory=dict, hash=False)


@dataclass(frozen=True)
class Changes:
    """What of a workspace is not as it was, since a caller last asked.

    `mark` is to be given next time. `entries` are new or changed, `removed` is each path that is
    gone, those below a folder that is gone among them, and perhaps one that came and went since;
    both are sorted. A folder is told when it came or has another mode, not for what is in it. Who
    takes `removed` from what was there and then puts `entries` in has what is there now. With
    `complete` the entries are all that there is, and `removed` is empty. What changes during the
    look is told now or the next time.

    `unseen` are folders that cannot be looked into now: of what is below them nothing is told, also
    not with `complete`, and nothing of it counts as gone. "" is the whole workspace.
    """

    mark: str
    entries: Sequence[FileEntry]
    removed: Sequence[str] = ()
    complete: bool = False
    unseen: Sequence[str] = ()


@dataclass(frozen=True)
class FileChange:
    """Something that happened below a watched folder. `attributes` is a change of mode, owner or
    times alone. What was moved has its `former` path; `entry` is what stands there, where that is
    known."""

    type: Literal["created", "modified", "deleted", "moved", "attributes"]
    path: str
    former: str = ""
    entry: FileEntry | None = None


class Contexts(ABC):
    """The interpreters of a kept sandbox. The first is `DEFAULT_CONTEXT`."""

    @abstractmethod
    def create(self, language: str, cwd: str = "", context_id: str = "") -> Context:
        """A new one, under `context_id` or an id of the sandbox's choice."""

    @abstractmethod
    def list(self) -> Sequence[Context]:
        """Those that are there now."""

    @abstractmethod
    def destroy(self, context_id: str) -> bool:
        """End one. False when it was not there."""

    @abstractmethod
    def restart(self, context_id: str) -> Context:
        """End its interpreter and start an empty one under the same id."""


class Processes(ABC):
    """The commands of a kept sandbox. Some output is kept for whoever follows later."""

    @abstractmethod
    def start(self, command: Command) -> Process:
        """Start it and return at once."""

    @abstractmethod
    def list(self) -> Sequence[Process]:
        """Those that run, and those that ended lately."""

    @abstractmethod
    def follow(self, pid: int, emit: Emit, after: int = 0) -> Process:
        """Hand over its output from the byte `after` on, as it comes, until the process ends.

        `after` counts the bytes of both streams as they came. What is no longer kept is left out.
        """

    @abstractmethod
    def write(self, pid: int, data: bytes, *, close: bool = False) -> None:
        """To its standard input. Waits while the process does not read, 30 s at most."""

    @abstractmethod
    def signal(self, pid: int, name: str) -> bool:
        """Send a signal such as SIGTERM to it and its group. False when it has ended."""

    @abstractmethod
    def resize(self, pid: int, columns: int, rows: int) -> None:
        """Give its terminal another size."""

    def submit_follow(self, pid: int, emit: Emit, after: int = 0) -> Future[Process]:
        """`follow`, begun."""
        return waiting.submit(lambda: self.follow(pid, emit, after))


def below_workspace(path: str, names: Sequence[str] = WORKSPACE_NAMES) -> str | None:
    """A path relative to the workspace, also of an absolute one below it by one of its names. None
    for what lies elsewhere. A relative path is given back as it is."""
    if not path.startswith("/"):
        return path
    whole = "/" + "/".join(part for part in path.split("/") if part not in ("", "."))
    for name in names:
        if whole == name or whole.startswith(f"{name}/"):
            return whole[len(name) + 1 :]
    return None


def is_internal(path: str) -> bool:
    """Whether it is ours, or below what is: see `INTERNAL`."""
    return any(part.startswith(INTERNAL) for part in path.split("/"))


class Files(ABC):
    """The files of a kept sandbox. A path is relative to its workspace, and then no link is
    followed and no operation leaves that; or it is absolute, and leads where it leads a program in
    there. A provider may refuse the second where it lies outside of the workspace.

    Raises InvalidConfiguration with the field `path` for a path that is none or is not there.
    """

    @abstractmethod
    def list(self, path: str = "", depth: int = 1) -> Sequence[FileEntry]:
        """What is in a folder, `depth` levels deep, sorted by path."""

    @abstractmethod
    def stat(self, path: str) -> FileEntry | None:
        """One entry, the link itself where it is one; None where there is nothing."""

    @abstractmethod
    def read(self, path: str, offset: int = 0, length: int | None = None) -> Iterator[bytes]:
        """A regular file's bytes, in pieces. What is not a regular file is refused."""

    @abstractmethod
    def write(
        self,
        path: str,
        content: Iterable[bytes],
        *,
        mode: int | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> FileEntry:
        """Put a file there, folders included. Readers see the former file or the whole new one.

        `metadata` is put down beside it, in place of what was there; refused where nothing can be.
        """

    @abstractmethod
    def make_directory(self, path: str) -> bool:
        """Make a folder and those above it. False when it was there."""

    @abstractmethod
    def move(self, source: str, target: str) -> FileEntry:
        """Rename. What was at `target` is replaced only where both are files."""

    @abstractmethod
    def remove(self, path: str) -> bool:
        """Remove a file, or a folder and all in it. False when it was not there."""

    @abstractmethod
    def watch(self, path: str = "") -> Iterator[FileChange | None]:
        """What changes below a folder from now on, until the iterator is closed.

        None comes every few seconds while there is nothing, so that who has had enough can leave.
        """

    def changes(self, mark: str = "", *, thorough: bool = False) -> Changes:
        """What is new, changed or gone in the whole workspace since `mark` was given out.

        Any number of callers may have any marks; one that is unknown has all that there is told.
        What a kernel notices may do to know of changes, which a write through a memory mapping is
        not; with `thorough` every file is looked at. A provider without a memory of changes tells
        all, always.
        """
        found = [each for each in self.list("", MOST_DEPTH) if not is_internal(each.path)]
        return Changes("", found, complete=True)

    @abstractmethod
    def read_archive(self, path: str = "", only: Sequence[str] = ()) -> Iterator[bytes]:
        """A folder as a tar archive, links as links.

        With `only` just these paths of the folder, each by itself and without what is in it, in
        their order. One that is gone, cannot be read, or changes while it is read is left out,
        where without `only` it fails the archive.
        """

    @abstractmethod
    def write_archive(self, content: Iterable[bytes], path: str = "") -> int:
        """Unpack a tar archive below a folder; how many entries. None leaves the folder."""


@dataclass(frozen=True)
class SandboxState:
    """What a kept sandbox says of itself, and what is in it. What is not known is None.

    `memory_bytes` is in use now, `cpu_seconds` all processor time since it was started, and
    `disk_bytes` what its files take of `disk_total_bytes`.
    """

    contexts: Sequence[Context] = ()
    processes: Sequence[Process] = ()
    memory_bytes: int | None = None
    cpu_seconds: float | None = None
    disk_bytes: int | None = None
    disk_total_bytes: int | None = None
    details: dict[str, Any] = field(default_factory=dict)


class KeptSandbox(Sandbox):
    """A sandbox that stays until it is closed, and runs many jobs for its one owner.

    `provider.attach(ref)` gives it back in another process or after a restart. Runs of one context
    follow one another; whoever comes while one runs waits. Those of different contexts run side by
    side.
    """

    contexts: Contexts
    processes: Processes
    files: Files

    @abstractmethod
    def interrupt(self, context_id: str = DEFAULT_CONTEXT, run: str = "") -> bool:
        """Stop what runs in a context and keep its state. False when nothing ran.

        `run` means the job of this name alone: nothing happens to the next one where it has ended,
        and where it has not begun it never will. What has not stopped a second later loses its
        context, which starts again empty.
        """

    def answer(self, run: str, call: int, answer: bytes) -> bool:
        """Answer a call of a tool by the job of this name, with JSON: {"result": value} or
        {"error": text}. False where that is not under way. Needs TOOLS.
        """
        raise InvalidConfiguration("tools: This sandbox does not accept answers.", field="tools")

    def change_network(self, network: Network | None) -> None:
        """Let it reach these hosts from now on. Connections that are no longer allowed end."""
        raise InvalidConfiguration("network: This sandbox has no network.", field="network")

    def take_attempts(self) -> Attempts:
        """The attempts to reach a host that have ended, and that no result and no former call of
        this has told."""
        return Attempts()

    @abstractmethod
    def reset(self) -> None:
        """End every process and context, and start an empty default one. Files stay."""

    @abstractmethod
    def renew(self, seconds: float) -> None:
        """Keep it for so long from now on, should nobody say so again."""

    @abstractmethod
    def state(self) -> SandboxState:
        """What it holds now."""
