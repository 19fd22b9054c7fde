"""What a provider of session sandboxes promises, each promise as a check in a real one: cells and
contexts, tool calls, changes and archives of files, and limits, which are obeyed or refused, never
dropped. A provider may be stricter, never laxer. Which checks are made follows from the
capabilities.
"""

from __future__ import annotations

import io
import json
import tarfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from queue import SimpleQueue
from typing import Any

from providers.base import (
    ARGUMENTS,
    ARTIFACTS,
    COMMANDS,
    ENVIRONMENT,
    GUARDED,
    INTERRUPTS,
    KEPT,
    MEMORY,
    PROCESSES,
    TOOLS,
    WATCHING,
    WORKSPACE,
)
from providers.conformance import Check, CheckFailed, Probe, expect, expect_in, expect_refusal
from providers.errors import (
    INVALID_CONFIGURATION,
    UNAVAILABLE,
    InvalidConfiguration,
    KeptSandboxLost,
)
from providers.sandbox import DEFAULT_CONTEXT, KeptSandbox, Process
from providers.values import (
    Command,
    Event,
    ExecutionResult,
    Job,
    RunLimits,
    SandboxLimits,
    SandboxSpec,
    ToolCall,
)

KEPT_CHECKS: list[Check] = []

_Verify = Callable[[KeptSandbox, Probe, str], None]
_REFUSED, _UNAVAILABLE = INVALID_CONFIGURATION.code, UNAVAILABLE.code


def _check(name: str, capability: str = KEPT, **codes: str) -> Callable[[_Verify], _Verify]:
    def register(verify: _Verify) -> _Verify:
        def in_a_kept_sandbox(probe: Probe, code: str) -> None:
            with _kept(probe) as sandbox:
                verify(sandbox, probe, code)

        given = codes or {"python": ""}
        KEPT_CHECKS.append(Check(f"kept: {name}", given, in_a_kept_sandbox, capability))
        return verify

    return register


@contextmanager
def _kept(probe: Probe) -> Iterator[KeptSandbox]:
    environment = {"PROMISED": "kept"} if ENVIRONMENT in probe.provider.capabilities else {}
    spec = SandboxSpec(probe.language, kept=True, environment=environment)
    sandbox = probe.provider.open(spec, "contract")
    try:
        if not isinstance(sandbox, KeptSandbox):
            raise CheckFailed(f"open: a {type(sandbox).__name__} is not a KeptSandbox")
        yield sandbox
    finally:
        sandbox.close()


def _run(sandbox: KeptSandbox, code: str, timeout: float = 10) -> ExecutionResult:
    return sandbox.run(Job(code, timeout=timeout))


def _say(sandbox: KeptSandbox, code: str, context: str = "") -> str:
    """What a cell prints. Raises CheckFailed when it fails."""
    result = sandbox.run(Job(code, context=context))
    expect(f"exit code of {code!r} ({result.stderr[-200:]})", result.exit_code, 0)
    return result.stdout


@_check(
    "a context keeps the state that runs leave",
    python="x = 41|print(x + 1)",
    javascript="var x = 41|console.log(x + 1)",
    bash="x=41|echo $((x + 1))",
)
def _keeps(sandbox: KeptSandbox, probe: Probe, code: str) -> None:
    first, second = code.split("|")
    _say(sandbox, first)
    result = _run(sandbox, second)
    expect("stdout", result.stdout, "42\n")
    expect("context kept", result.metadata.get("context_kept"), True)


@_check("another holder of its ref has the same sandbox", python="x = 42|print(x)")
def _attaches(sandbox: KeptSandbox, probe: Probe, code: str) -> None:
    first, second = code.split("|")
    _say(sandbox, first)
    again = probe.provider.attach(sandbox.ref)
    expect("stdout", _say(again, second), "42\n")
    again.renew(60)


@_check("all code and commands have the environment", ENVIRONMENT)
def _environment(sandbox: KeptSandbox, probe: Probe, code: str) -> None:
    expect("stdout", _say(sandbox, "import os\nprint(os.environ['PROMISED'])"), "kept\n")
    echo = Command(shell="echo $PROMISED")  # noqa: S604  the sandbox's own
    expect("stdout of a command", _ended(sandbox, echo)[1], b"kept\n")


@_check("an error keeps the state")
def _survives(sandbox: KeptSandbox, probe: Probe, code: str) -> None:
    failed = _run(sandbox, "x = 42\n1/0")
    expect("exit code", failed.exit_code, 1)
    expect_in("stderr", "ZeroDivisionError", failed.stderr)
    expect("stdout", _say(sandbox, "print(x)"), "42\n")


@_check("returns the value of a cell's last expression")
def _echoes(sandbox: KeptSandbox, probe: Probe, code: str) -> None:
    events: list[Event] = []
    result = sandbox.run(Job("print('one')\n40 + 2"), events.append)
    expect("text", [output.get("text/plain") for output in result.outputs], ["42"])
    expect("events", sorted(event.type for event in events), ["output", "stdout"])


@_check("calls main() in a context where arguments are given, and only there")
def _calls_main(sandbox: KeptSandbox, probe: Probe, code: str) -> None:
    defined = "base = 40\ndef main(n):\n    return base + n"
    expect("without", sandbox.run(Job(defined)).has_result, False)
    result = sandbox.run(Job(defined, arguments={"n": 2}))
    expect("result", (result.has_result, result.result, result.stderr), (True, 42, ""))


@_check(
    "code calls tools, and continues with their answers",
    TOOLS,
    python="import tools\nfor n in (1, 2): print(tools.double(n=n)['is'])",
    javascript="import { double } from 'tools'\n"
    "for (const n of [1, 2]) console.log((await double({ n })).is)",
)
def _calls_tools(sandbox: KeptSandbox, probe: Probe, code: str) -> None:
    calls_tools(sandbox, code)


@_check("a deadline ends the run, and the result says whether the context is kept")
def _times_out(sandbox: KeptSandbox, probe: Probe, code: str) -> None:
    _say(sandbox, "x = 42")
    result = _run(sandbox, "print('begun', flush=True)\nwhile True: pass", timeout=1)
    expect("verdict", (result.timed_out, result.exit_code), (True, None))
    found = _run(sandbox, "x").exit_code == 0
    expect("context kept", result.metadata.get("context_kept"), found)
    if INTERRUPTS in probe.provider.capabilities:
        expect("state", found, True)


@_check(
    "an interrupt ends the run and keeps the state",
    INTERRUPTS,
    python="x = 42\nprint('on', flush=True)\nimport time\ntime.sleep(60)|print(x)",
)
def _interrupts(sandbox: KeptSandbox, probe: Probe, code: str) -> None:
    first, second = code.split("|")
    runs = threading.Event()
    interrupted: list[bool] = []

    def interrupt_when_it_runs() -> None:
        runs.wait(30)
        interrupted.append(probe.provider.attach(sandbox.ref).interrupt())

    # Not one of `providers.threads`: it is joined here, and ends with this check.
    thread = threading.Thread(target=interrupt_when_it_runs)
    thread.start()
    result = sandbox.run(Job(first, timeout=30), lambda event: runs.set())
    thread.join()
    expect("interrupted", interrupted, [True])
    expect("exit code", (result.exit_code, result.timed_out), (130, False))
    expect("stdout", _run(sandbox, second).stdout, "42\n")
    expect("with nothing to interrupt", sandbox.interrupt(), False)


@_check("a run that does not stop loses its context, and no other")
def _loses(sandbox: KeptSandbox, probe: Probe, code: str) -> None:
    sandbox.contexts.create("python", context_id="other")
    _say(sandbox, "x = 42", "other")
    deaf = "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nx = 1\n"
    result = _run(sandbox, f"{deaf}print('begun', flush=True)\nwhile True: pass", timeout=1)
    expect("timed out", (result.timed_out, result.exit_code), (True, None))
    expect("context kept", result.metadata.get("context_kept"), False)
    expect("the next run", _say(sandbox, "print('x' in globals())"), "False\n")
    expect("the other", _say(sandbox, "print(x)", "other"), "42\n")


@_check("contexts are created, listed, restarted and ended", python="x = 1")
def _contexts(sandbox: KeptSandbox, probe: Probe, code: str) -> None:
    created = sandbox.contexts.create(probe.language, context_id="second")
    expect("id", created.id, "second")
    sandbox.run(Job(code, context="second"))
    names = {context.id for context in sandbox.contexts.list()}
    expect("contexts", names, {DEFAULT_CONTEXT, "second"})
    sandbox.contexts.restart("second")
    result = sandbox.run(Job("print('x' in globals())", context="second"))
    expect("after a restart", result.stdout, "False\n")
    expect("ended", sandbox.contexts.destroy("second"), True)
    expect("ended again", sandbox.contexts.destroy("second"), False)
    try:
        sandbox.run(Job(code, context="second"))
    except InvalidConfiguration:
        return
    raise CheckFailed("a run in a context that was ended: it was no error")


@_check("contexts of several languages exist together, each with its own state", python="x = 40")
def _mixes(sandbox: KeptSandbox, probe: Probe, code: str) -> None:
    offered = probe.provider.get_supported_languages()
    keeping = {"python": "x = 41", "nodejs": "var x = 42", "bash": "x=43"}
    telling = {"python": "print(x)", "nodejs": "console.log(x)", "bash": "echo $x"}
    languages = [language for language in keeping if language in offered]
    _run(sandbox, code)
    for language in languages:
        created = sandbox.contexts.create(language, context_id=f"in {language}")
        expect("created", created.id, f"in {language}")
        _say(sandbox, keeping[language], created.id)
    told = {each: _say(sandbox, telling[each], f"in {each}") for each in languages}
    wanted = {"python": "41\n", "nodejs": "42\n", "bash": "43\n"}
    expect("state", told, {each: wanted[each] for each in languages})
    expect("the first context", _run(sandbox, "print(x)").stdout, "40\n")


@_check("a reset ends everything but the files")
def _resets(sandbox: KeptSandbox, probe: Probe, code: str) -> None:
    _say(sandbox, "x = 1\nopen('left.txt', 'w').write('it')")
    has_processes = PROCESSES in probe.provider.capabilities
    if has_processes:
        started = sandbox.processes.start(Command(argv=["sleep", "60"]))
    sandbox.reset()
    expect("state", _say(sandbox, "print('x' in globals())"), "False\n")
    expect("the file", _say(sandbox, "print(open('left.txt').read())"), "it\n")
    if has_processes:
        running = [each.pid for each in sandbox.processes.list() if each.exit_code is None]
        expect("the process", started.pid in running, False)


@_check("commands take input, have streams of their own, and are signalled", PROCESSES)
def _processes(sandbox: KeptSandbox, probe: Probe, code: str) -> None:
    shell = "read line; echo out $line; echo err >&2; printf '\\377'; exit 3"
    started = sandbox.processes.start(Command(shell=shell, stdin=True))
    sandbox.processes.write(started.pid, b"given\n", close=True)
    ended, stdout, stderr = _followed(sandbox, started)
    expect("ended", (ended.exit_code, stdout, stderr), (3, b"out given\n\xff", b"err\n"))
    sleeping = sandbox.processes.start(Command(argv=["sleep", "60"]))
    listed = {each.pid for each in sandbox.processes.list() if each.exit_code is None}
    expect("listed", sleeping.pid in listed, True)
    expect("signalled", sandbox.processes.signal(sleeping.pid, "SIGTERM"), True)
    expect("exit code", _followed(sandbox, sleeping)[0].exit_code, 143)
    expect("signalled again", sandbox.processes.signal(sleeping.pid, "SIGTERM"), False)


@_check("a command has a terminal where it is given one", PROCESSES)
def _terminals(sandbox: KeptSandbox, probe: Probe, code: str) -> None:
    size = _ended(sandbox, Command(argv=["stty", "size"], pty=(132, 43)))[1]
    expect("its size", size.strip(), b"43 132")


@_check("commands run to their end, within their time", COMMANDS)
def _runs_to_the_end(sandbox: KeptSandbox, probe: Probe, code: str) -> None:
    sandbox.files.make_directory("below")
    shell = "pwd; echo $GIVEN; echo err >&2; exit 3"
    given = Command(shell=shell, cwd="below", environment={"GIVEN": "it's"}, timeout=10)
    told = _ended(sandbox, given)
    expect("ended", (told[0], told[2]), (3, b"err\n"))
    expect("stdout", told[1].split(b"/")[-1], b"below\nit's\n")
    words = Command(argv=["printf", "%s|", "a b", "$HOME", "x=1", "'"], timeout=10)
    expect("words", _ended(sandbox, words), (0, b"a b|$HOME|x=1|'|", b""))
    late = sandbox.processes.start(Command(argv=["sleep", "60"], timeout=1))
    seen = sandbox.processes.follow(late.pid, lambda event: None)
    expect("late", (seen.exit_code, seen.ended_by_us), (137, "timeout"))
    process = sandbox.processes.start(Command(argv=["sleep", "60"], timeout=10))
    running = [one.pid for one in sandbox.processes.list() if one.exit_code is None]
    expect("running", running, [process.pid])
    expect("found", sandbox.processes.signal(process.pid, "SIGTERM"), True)
    seen = sandbox.processes.follow(process.pid, lambda event: None)
    expect("exit code", seen.exit_code, 143)
    expect("found again", sandbox.processes.signal(process.pid, "SIGTERM"), False)


@_check("files are written, read in part, listed, moved and removed", WORKSPACE)
def _has_files(sandbox: KeptSandbox, probe: Probe, code: str) -> None:
    files = sandbox.files
    content = bytes(range(256)) * 300
    files.write("data/in.bin", [content[:1000], content[1000:]])
    expect("read", b"".join(files.read("data/in.bin")), content)
    expect("a piece", b"".join(files.read("data/in.bin", 1000, 5)), content[1000:1005])
    expect("seen by code", _say(sandbox, "print(len(open('data/in.bin', 'rb').read()))"), "76800\n")
    expect("made", files.make_directory("data/sub"), True)
    expect("made again", files.make_directory("data/sub"), False)
    files.move("data/in.bin", "data/sub/out.bin")
    expect("depth 1", [one.path for one in files.list("data")], ["data/sub"])
    found = [(one.path, one.type) for one in files.list("data", depth=2)]
    expect("depth 2", found, [("data/sub", "directory"), ("data/sub/out.bin", "file")])
    told = files.stat("data/sub/out.bin")
    expect("size", told and (told.type, told.size), ("file", len(content)))
    expect("nothing there", files.stat("nothing"), None)
    expect("removed", (files.remove("data"), files.remove("data")), (True, False))
    expect_refusal("reading nothing", _REFUSED, lambda: list(files.read("nowhere")))
    for path in ("../outside", "/../etc/passwd", "a/../../b", "a\0b"):
        expect_refusal(f"stat of {path!r}", _REFUSED, partial(files.stat, path))


@_check("files have their modes, and links lead nowhere outside", GUARDED)
def _guards(sandbox: KeptSandbox, probe: Probe, code: str) -> None:
    expect("mode", sandbox.files.write("private", [b"it"], mode=0o600).mode, 0o600)
    _say(sandbox, "import os\nos.symlink('/etc', 'out')")
    found = sandbox.files.stat("out")
    expect("the link", found and (found.type, found.target), ("symlink", "/etc"))
    expect_refusal("through it", _REFUSED, lambda: list(sandbox.files.read("out/passwd")))


@_check("folders go in and out as archives", WORKSPACE)
def _archives(sandbox: KeptSandbox, probe: Probe, code: str) -> None:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        member = tarfile.TarInfo(".inner/x.txt")
        member.size, member.mode = 2, 0o600
        archive.addfile(member, io.BytesIO(b"it"))
        link = tarfile.TarInfo("link")
        link.type, link.linkname = tarfile.SYMTYPE, ".inner/x.txt"
        archive.addfile(link)
    expect("taken", sandbox.files.write_archive([packed.getvalue()], "folder") >= 2, True)
    seen = "import os\nos.chdir('folder')\nprint(oct(os.stat('link').st_mode), open('link').read())"
    expect("seen by code", _say(sandbox, seen), "0o100600 it\n")
    back = io.BytesIO(b"".join(sandbox.files.read_archive("folder")))
    with tarfile.open(fileobj=back) as archive:
        names = {name.removeprefix("./") for name in archive.getnames()}
    expect("made", {".inner/x.txt", "link"} <= names, True)


@_check("an archive of single paths has those that exist", WORKSPACE)
def _archives_some(sandbox: KeptSandbox, probe: Probe, code: str) -> None:
    archives_single_paths(sandbox)


@_check("changes since a mark are reported, and removals", WORKSPACE)
def _tells_changes(sandbox: KeptSandbox, probe: Probe, code: str) -> None:
    tells_changes(sandbox)


@_check("changes are reported to watchers", WATCHING, python="open('new.txt', 'w').close()")
def _watches(sandbox: KeptSandbox, probe: Probe, code: str) -> None:
    changes = sandbox.files.watch()
    _run(sandbox, code)
    for change in changes:
        if change is not None and change.path == "new.txt":
            expect("change", change.type in ("created", "modified"), True)
            return
    raise CheckFailed("watch: it ended without the change")


@_check("it reports its memory use", MEMORY, python="data = b'x' * (64 << 20)")
def _tells_memory(sandbox: KeptSandbox, probe: Probe, code: str) -> None:
    before = sandbox.state().memory_bytes
    _run(sandbox, code)
    after = sandbox.state().memory_bytes
    if before is None or after is None or not 60 << 20 < after - before < 128 << 20:
        raise CheckFailed(f"memory: {before!r}, and {after!r} with 64 MiB more")


@_check("a closed sandbox is gone for every holder")
def _ends(sandbox: KeptSandbox, probe: Probe, code: str) -> None:
    ref = sandbox.ref
    other = probe.provider.attach(ref)
    expect("closed", (sandbox.close(), sandbox.close()), (True, False))
    expect_refusal("a run", _UNAVAILABLE, lambda: other.run(Job("1")))
    expect_refusal("a list", _UNAVAILABLE, other.contexts.list)
    try:
        probe.provider.attach(ref)
    except KeptSandboxLost:
        return
    raise CheckFailed("attaching: it was not reported as lost")


def _ended(sandbox: KeptSandbox, command: Command) -> tuple[int | None, bytes, bytes]:
    """Exit code, stdout and stderr of a command."""
    ended, stdout, stderr = _followed(sandbox, sandbox.processes.start(command))
    return ended.exit_code, stdout, stderr


def _followed(sandbox: KeptSandbox, process: Process) -> tuple[Process, bytes, bytes]:
    events: list[Event] = []
    ended = sandbox.processes.follow(process.pid, events.append)
    stdout, stderr = (
        b"".join(event.data for event in events if event.type == stream)
        for stream in ("stdout", "stderr")
    )
    return ended, stdout, stderr


def calls_tools(sandbox: KeptSandbox, code: str) -> None:
    """`code` prints what `double` comes to for 1 and for 2."""
    calls: SimpleQueue[ToolCall | None] = SimpleQueue()
    told: list[object] = []

    def answer_them() -> None:
        for call in iter(calls.get, None):
            asked = json.loads(call.arguments)
            answer = json.dumps({"result": {"is": asked["n"] * 2}}).encode()
            told.append((call.name, asked, sandbox.answer("asks", call.number, answer)))

    # Not one of `providers.threads`: it is joined here, and ends with this check.
    thread = threading.Thread(target=answer_them)
    thread.start()
    try:
        job = Job(code, tools=["double"], run="asks")
        # Whoever is told of an event must not wait.
        result = sandbox.run(job, lambda event: calls.put(event.call) if event.call else None)
    finally:
        calls.put(None)
        thread.join()
    expect("stdout", (result.stdout, result.stderr), ("2\n4\n", ""))
    expect("calls", told, [("double", {"n": n}, True) for n in (1, 2)])
    expect("answered without a call", sandbox.answer("asks", 1, b'{"result":0}'), False)


_BEFORE = "import os\nopen('kept', 'w').close()\nopen('gone', 'w').close()\nos.mkdir('d')"
_AFTER = (
    "open('kept', 'w').write('more')\nopen('d/new', 'w').close()\n"
    "os.symlink('kept', 'link')\nos.remove('gone')"
)


def tells_changes(sandbox: KeptSandbox) -> None:
    """What is new, changed and gone since a mark is told, and all where the mark is unknown."""
    expect("exit code", sandbox.run(Job(_BEFORE)).exit_code, 0)
    began = sandbox.files.changes()
    expect("complete without a mark", (began.complete, list(began.removed)), (True, []))
    known = {entry.path: entry.type for entry in began.entries}
    for path, kind in (("kept", "file"), ("gone", "file"), ("d", "directory")):
        expect(f"type of {path}", known.get(path), kind)
    expect("exit code", sandbox.run(Job(_AFTER)).exit_code, 0)
    for thorough in (False, True):
        since = sandbox.files.changes(began.mark, thorough=thorough)
        told = {entry.path: entry for entry in since.entries}
        sizes = [told[path].size if path in told else None for path in ("kept", "d/new")]
        expect("sizes", sizes, [4, 0])
        expect("the link", "link" in told, True)
        expect("the removed file, as an entry", "gone" in told, False)
        expect("the removed file, as removed", "gone" in since.removed, not since.complete)
    stranger = sandbox.files.changes("an unknown mark")
    expect("complete with an unknown mark", stranger.complete, True)
    found = {entry.path for entry in stranger.entries} & {"kept", "gone", "d", "d/new", "link"}
    expect("all entries", found, {"kept", "d", "d/new", "link"})


def archives_single_paths(sandbox: KeptSandbox) -> None:
    """An archive of single paths has those that are there, and nothing else."""
    # Too large to be held in memory until it is known to be whole.
    large = bytes(range(256)) * 8192
    for name, content in (("a/one", b"1"), ("a/two", b"2"), ("three", large)):
        sandbox.files.write(name, iter([content]))
    packed = b"".join(sandbox.files.read_archive("", ["a", "gone", "three", "a/one"]))
    found: dict[str, bytes | None] = {}
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        for member in archive:
            read = archive.extractfile(member)
            found[member.name] = None if read is None else read.read()
    expect("names", list(found), ["a", "three", "a/one"])
    expect("contents", (found["a"], found["three"] == large, found["a/one"]), (None, True, b"1"))


MIB = 1 << 20

# For each limit of a sandbox: less than any provider has, and a program that goes beyond BOUND.
# It prints `beyond` where nothing keeps it from that.
_SANDBOX: dict[str, tuple[int, str]] = {
    "memory_bytes": (
        64 * MIB,
        # A provider may give its own processes some beside what the program has.
        "import time\ndata = b'x' * (BOUND * 3 // 2)\ntime.sleep(0.5)\nprint('beyond')",
    ),
    "workspace_bytes": (
        4 * MIB,
        "piece = b'x' * (1 << 20)\n"
        "for number in range(BOUND // (1 << 20) + 1):\n"
        "    with open(f'piece-{number}', 'wb') as file:\n"
        "        file.write(piece)\n"
        "print('beyond')",
    ),
    "file_bytes": (
        1 * MIB,
        "piece = b'x' * (1 << 20)\n"
        "with open('large', 'wb') as file:\n"
        "    for _ in range(BOUND // (1 << 20) + 1):\n"
        "        file.write(piece)\n"
        "print('beyond')",
    ),
    "processes": (
        8,
        "import os, signal, time\n"
        "born = []\n"
        "try:\n"
        "    for _ in range(BOUND):\n"
        "        child = os.fork()\n"
        "        if child == 0:\n"
        "            time.sleep(60)\n"
        "        born.append(child)\n"
        "    print('beyond')\n"
        "finally:\n"
        "    for child in born:\n"
        "        os.kill(child, signal.SIGKILL)",
    ),
    "open_files": (32, "files = [open('/dev/null') for _ in range(BOUND)]\nprint('beyond')"),
}


def _sandbox_check(name: str) -> Check:
    small, code = _SANDBOX[name]

    def verify(probe: Probe, code: str) -> None:
        # What is small may be refused; where it is not, it has to hold. The usual one holds anyway,
        # for whoever names it and for whoever names nothing.
        usual: int = getattr(SandboxLimits(), name)
        for bound in (small, usual):
            try:
                sandbox = probe.open(SandboxLimits(**{name: bound}))
            except InvalidConfiguration as refusal:
                _expect_named(refusal, name)
                continue
            sandbox.close()
            result = probe.run(
                code.replace("BOUND", str(bound)), within=SandboxLimits(**{name: bound})
            )
            if "beyond" in result.stdout:
                raise CheckFailed(f"{name}: {bound} was requested, and the program had more")

    return Check(f"applies or refuses {name} of a sandbox", {"python": code}, verify)


def _expect_named(refusal: InvalidConfiguration, name: str) -> None:
    if refusal.field not in (name, "limits"):
        raise CheckFailed(f"{name}: it is refused, but the error names {refusal.field!r}")


def _run_check(
    name: str, bound: int, code: str, fits: Callable[[ExecutionResult], bool], capability: str = ""
) -> Check:
    def verify(probe: Probe, code: str) -> None:
        limits: dict[str, Any] = {name: bound}
        try:
            result = probe.run(code, limits=RunLimits(**limits))
        except InvalidConfiguration as refusal:
            _expect_named(refusal, name)
            return
        if not fits(result):
            raise CheckFailed(f"{name}: {bound} was requested, and the result is {result!r:.300}")

    return Check(f"applies or refuses {name} of a run", {"python": code}, verify, capability)


def _is_refused_value(result: ExecutionResult) -> bool:
    return not result.has_result and result.exit_code == 1


def _files(result: ExecutionResult) -> Sequence[int]:
    return [len(artifact.content) for artifact in result.artifacts]


_THREE_FILES = "for name in 'abc':\n    open(f'artifacts/{name}', 'w').write('x' * 1000)"
_THREE_OUTPUTS = "for _ in range(3):\n    display('x' * 1000)"


def _fits_outputs(result: ExecutionResult, bound: int) -> bool:
    return sum(len(str(text)) for each in result.outputs for text in each.values()) <= bound


LIMIT_CHECKS = [
    *(_sandbox_check(name) for name in _SANDBOX),
    _run_check("output_bytes", 500, "print('x' * 1000)", lambda run: len(run.stdout) <= 500),
    _run_check(
        "result_bytes", 500, "def main():\n    return 'x' * 1000", _is_refused_value, ARGUMENTS
    ),
    _run_check(
        "artifact_count", 2, _THREE_FILES, lambda run: len(_files(run)) == 2, capability=ARTIFACTS
    ),
    _run_check(
        "artifact_bytes", 999, _THREE_FILES, lambda run: not _files(run), capability=ARTIFACTS
    ),
    _run_check(
        "artifacts_total_bytes",
        2500,
        _THREE_FILES,
        lambda run: sum(_files(run)) == 2000,
        capability=ARTIFACTS,
    ),
    _run_check("rich_output_count", 2, _THREE_OUTPUTS, lambda run: len(run.outputs) <= 2),
    _run_check("rich_output_bytes", 2500, _THREE_OUTPUTS, lambda run: _fits_outputs(run, 2500)),
]
