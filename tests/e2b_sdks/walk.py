"""Every method of E2B's Python SDK, by whichever version is there: `walk.py sync`, `walk.py async`.

Prints a line of JSON for each method: its name and `works`, or `refused` with what was said. The
calls are written once, for both: what the synchronous SDK returns is not waited for.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import re
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from importlib.metadata import version
from typing import Any
from uuid import uuid4

import e2b
import e2b_code_interpreter as interpreter

IS_SYNC = sys.argv[1] == "sync"
PREFIX = "" if IS_SYNC else "Async"
Sandbox: Any = getattr(interpreter, f"{PREFIX}Sandbox")
Template: Any = getattr(e2b, f"{PREFIX}Template")
Volume: Any = getattr(e2b, f"{PREFIX}Volume")
Secret: Any = getattr(e2b, f"{PREFIX}Secret")

FIGURE = """
import matplotlib.pyplot as plt, pandas
plt.plot([1, 2], [3, 4], label="l")
plt.show()
pandas.DataFrame({"a": [1, 2]})
"""
# Of the builder of templates only these ask the service.
ASKING = ("alias_exists", "assign_tags", "build", "build_in_background", "exists")
ASKING += ("get_build_status", "get_tags", "remove_tags")
# Where a terminal or a folder is looked at until something has come.
SECONDS = 60


async def got(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value


def public(kind: Any, group: str, *, only: tuple[str, ...] = ()) -> set[str]:
    """The methods of a class. What is no function is data."""
    found = set()
    for name in dir(kind):
        member = inspect.getattr_static(kind, name)
        is_method = callable(getattr(member, "__get__", None)) and not isinstance(member, property)
        if not name.startswith("_") and is_method and (not only or name in only):
            found.add(f"{group}.{name}")
    return found


told: set[str] = set()


def tell(name: str, outcome: str, said: str = "") -> None:
    told.add(name)
    print(json.dumps({"method": name, "outcome": outcome, "said": said}), flush=True)


async def refused(names: str, call: Callable[[], Any]) -> None:
    """These are not there, which the call is told in so many words."""
    try:
        await got(call())
    except Exception as error:
        for name in names.split():
            tell(name, "refused", f"{type(error).__name__}: {error}")
        return
    raise AssertionError(f"{names}: was not refused")


@contextmanager
def raises(kind: type[BaseException]) -> Iterator[list[Any]]:
    """The older SDK's environment has no pytest."""
    found: list[Any] = []
    try:
        yield found
    except kind as error:
        found.append(error)
        return
    raise AssertionError(f"no {kind.__name__}")


def works(names: str) -> None:
    for name in names.split():
        tell(name, "works")


async def until(look: Callable[[], Any]) -> Any:
    end = time.monotonic() + SECONDS
    while not (found := await got(look())):
        assert time.monotonic() < end, "nothing has come"
        await asyncio.sleep(0.05)
    return found


async def walk_sandboxes() -> Any:
    sandbox = await got(
        Sandbox.create(timeout=300, metadata={"walk": sys.argv[2]}, envs={"OF_SANDBOX": "1"})
    )
    works("Sandbox.create")
    number = sandbox.sandbox_id
    assert await got(sandbox.is_running())
    works("Sandbox.is_running")
    again = await got(Sandbox.connect(number, timeout=200))
    assert (await got(again.get_info())).metadata == {"walk": sys.argv[2]}
    works("Sandbox.connect Sandbox.get_info")
    await got(sandbox.set_timeout(280))
    works("Sandbox.set_timeout")
    metrics = (await got(sandbox.get_metrics()))[0]
    assert metrics.mem_used > 0
    works("Sandbox.get_metrics")
    query = e2b.SandboxQuery(metadata={"walk": sys.argv[2]})
    pages = Sandbox.list(query=query, limit=1)
    seen = []
    while pages.has_next:
        seen += await got(pages.next_items())
    assert [each.sandbox_id for each in seen] == [number]
    works("Sandbox.list SandboxPaginator.next_items")
    assert number in sandbox.get_host(3000)
    works("Sandbox.get_host")
    sandbox.get_mcp_url()
    works("Sandbox.get_mcp_url")
    await refused("Sandbox.get_mcp_token", sandbox.get_mcp_token)
    snapshot = (await got(sandbox.create_snapshot())).snapshot_id
    taken = await got(sandbox.list_snapshots().next_items())
    assert [each.snapshot_id for each in taken] == [snapshot]
    assert await got(Sandbox.delete_snapshot(snapshot))
    assert not await got(Sandbox.delete_snapshot(snapshot))
    works("Sandbox.create_snapshot Sandbox.delete_snapshot")
    works("Sandbox.list_snapshots SnapshotPaginator.next_items")
    (fork,) = await got(sandbox.fork())
    await got(fork.kill())
    works("Sandbox.fork")
    await got(sandbox.update_network({"deny_out": ["0.0.0.0/0"]}))
    works("Sandbox.update_network")
    return sandbox


async def walk_files(sandbox: Any) -> None:
    files = sandbox.files
    assert (await got(files.write("a/one.txt", "1"))).path == "/home/user/a/one.txt"
    both = [{"path": "a/two", "data": b"\x00\xff"}, {"path": "/home/user/a/b/three", "data": "3"}]
    assert len(await got(files.write_files(both))) == 2
    assert await got(files.read("~/a/one.txt")) == "1"
    assert bytes(await got(files.read("a/two", format="bytes"))) == b"\x00\xff"
    streamed = await got(files.read("a/two", format="stream"))
    pieces = list(streamed) if IS_SYNC else [each async for each in streamed]
    assert b"".join(pieces) == b"\x00\xff"
    await got(files.write("packed", "p" * 100_000, gzip=True))
    assert await got(files.read("packed", gzip=True)) == "p" * 100_000
    await got(files.write("whole", b"w" * 1000, use_octet_stream=True))
    assert (await got(files.get_info("whole"))).size == 1000
    names = {each.name for each in await got(files.list("a", depth=2))}
    assert names == {"one.txt", "two", "b", "three"}
    assert await got(files.exists("a/b/three"))
    assert await got(files.make_dir("made"))
    assert not await got(files.make_dir("made"))
    assert (await got(files.rename("a/two", "made/two"))).path == "/home/user/made/two"
    await got(files.remove("a"))
    assert not await got(files.exists("a"))
    works("files.write files.write_files files.read files.get_info files.list files.exists")
    works("files.make_dir files.rename files.remove")
    seen: list[Any] = []
    if IS_SYNC:
        watch = files.watch_dir("made")
    else:
        watch = await files.watch_dir("made", on_event=seen.append)
    await got(files.write("made/new", "n"))

    def look() -> list[Any]:
        if IS_SYNC:
            seen.extend(watch.get_new_events())
        return [each for each in seen if each.name == "new"]

    await until(look)
    await got(watch.stop())
    works("files.watch_dir watch.stop")
    if IS_SYNC:
        works("watch.get_new_events")


def walk_links(sandbox: Any) -> None:
    put = sandbox.upload_url("linked.txt", use_signature_expiration=60)
    body = (
        b'--x\r\nContent-Disposition: form-data; name="file"; filename="l"\r\n\r\nlinked\r\n--x--'
    )
    headers = {"Content-Type": "multipart/form-data; boundary=x"}
    urllib.request.urlopen(urllib.request.Request(put, body, headers), timeout=60).close()
    with urllib.request.urlopen(sandbox.download_url("linked.txt"), timeout=60) as answer:
        assert answer.read() == b"linked"
    works("Sandbox.upload_url Sandbox.download_url")


async def walk_commands(sandbox: Any) -> None:
    commands, heard = sandbox.commands, []
    script = "echo $OF_SANDBOX $OWN; pwd; echo e >&2"
    done = await got(
        commands.run(script, envs={"OWN": "2"}, cwd="/home/user/made", on_stdout=heard.append)
    )
    assert (done.stdout, done.stderr, done.exit_code) == ("1 2\n/home/user/made\n", "e\n", 0)
    assert "".join(heard) == done.stdout
    with raises(e2b.CommandExitException) as failed:
        await got(commands.run("exit 3", user="user"))
    assert failed[0].exit_code == 3
    works("commands.run")
    talking = await got(commands.run("read a; echo got $a; cat", background=True, stdin=True))
    assert talking.pid in {each.pid for each in await got(commands.list())}
    await got(commands.send_stdin(talking.pid, "abc\n"))
    await got(talking.send_stdin("more"))
    await got(talking.close_stdin())
    assert (await got(talking.wait())).stdout == "got abc\nmore"
    works("commands.list commands.send_stdin handle.send_stdin handle.close_stdin handle.wait")
    left = await got(commands.run("read a; echo late", background=True, stdin=True))
    await got(left.disconnect())
    found = await got(commands.connect(left.pid))
    await got(commands.close_stdin(left.pid))
    assert (await got(found.wait())).stdout == "late\n"
    works("handle.disconnect commands.connect commands.close_stdin")
    for kill in (commands.kill, None):
        sleeps = await got(commands.run("sleep 600", background=True))
        assert await got(kill(sleeps.pid) if kill else sleeps.kill())
        # It ends a moment after the signal.
        with raises(e2b.CommandExitException):
            await got(sleeps.wait())
    assert not await got(sleeps.kill())
    works("commands.kill handle.kill")
    if hasattr(commands, "stream_input"):
        fed = await got(commands.run("cat", background=True, stdin=True))
        await feed(commands, fed.pid, ["de", "f"])
        await got(commands.close_stdin(fed.pid))
        assert (await got(fed.wait())).stdout == "def"
        works("commands.stream_input")


async def feed(of: Any, pid: int, pieces: list[Any]) -> None:
    if IS_SYNC:
        of.stream_input(pid, pieces)
        return
    handle = of.stream_input(pid)
    for piece in pieces:
        await handle.send(piece)
    await handle.close()


async def walk_terminals(sandbox: Any) -> None:
    pty = sandbox.pty
    size = e2b.PtySize(rows=20, cols=60)
    shown: list[bytes] = []
    options = {} if IS_SYNC else {"on_data": shown.append}
    terminal = await got(pty.create(size, **options))
    await got(pty.resize(terminal.pid, e2b.PtySize(rows=31, cols=91)))
    await got(terminal.disconnect())
    again = await got(pty.connect(terminal.pid, **options))
    await got(pty.send_stdin(terminal.pid, b"stty size\n"))
    if hasattr(pty, "stream_input"):
        await feed(pty, terminal.pid, [b"echo str", b"eamed\n"])
    await got(pty.send_stdin(terminal.pid, b"exit\n"))
    await got(again.wait(on_pty=shown.append) if IS_SYNC else again.wait())
    assert b"31 91" in b"".join(shown), shown
    works("pty.create pty.resize pty.connect pty.send_stdin")
    if hasattr(pty, "stream_input"):
        assert b"streamed" in b"".join(shown)
        works("pty.stream_input")
    last = await got(pty.create(size, **options))
    assert await got(pty.kill(last.pid))
    works("pty.kill")


async def walk_git(sandbox: Any) -> None:
    git, at = sandbox.git, "/home/user/repository"
    await got(git.init(f"{at}.git", bare=True))
    await got(git.init(at, initial_branch="main"))
    await got(git.configure_user("A", "a@example.org"))
    await got(git.set_config("core.autocrlf", "false", scope="local", path=at))
    assert await got(git.get_config("core.autocrlf", scope="local", path=at)) == "false"
    await got(sandbox.files.write(f"{at}/a.txt", "a"))
    await got(git.add(at))
    await got(git.commit(at, "first"))
    assert (await got(git.status(at))).current_branch == "main"
    await got(git.create_branch(at, "other"))
    await got(git.checkout_branch(at, "main"))
    await got(git.delete_branch(at, "other", force=True))
    assert (await got(git.branches(at))).branches == ["main"]
    await got(sandbox.files.write(f"{at}/a.txt", "b"))
    await got(git.restore(at, ["a.txt"]))
    assert await got(sandbox.files.read(f"{at}/a.txt")) == "a"
    await got(git.reset(at, mode="hard"))
    await got(git.remote_add(at, "origin", f"file://{at}.git"))
    assert await got(git.remote_get(at, "origin"))
    await got(git.push(at, "origin", "main"))
    await got(git.pull(at, "origin", "main"))
    await got(git.clone("file:///home/user/repository.git", path="/home/user/cloned"))
    await got(git.dangerously_authenticate("u", "p", host="git.example.org"))
    works(" ".join(sorted(public(type(git), "git"))))


async def walk_cells(sandbox: Any) -> None:
    printed: list[str] = []
    first = await got(
        sandbox.run_code(
            "import sys\nx = 41\nprint('out')\nprint('err', file=sys.stderr)\nx + 1",
            on_stdout=lambda message: printed.append(message.line),
        )
    )
    assert (first.text, first.error, printed) == ("42", None, ["out\n"])
    assert first.logs.stderr == ["err\n"]
    own = "import os; x, os.environ['OWN']"
    assert (await got(sandbox.run_code(own, envs={"OWN": "1"}))).text == "(41, '1')"
    assert (await got(sandbox.run_code("1/0"))).error.name == "ZeroDivisionError"
    if IS_SYNC:
        # The same classes in both, and the dearest cell.
        drawn = await got(sandbox.run_code(FIGURE))
        assert drawn.error is None, drawn.error
        shown, frame = drawn.results
        assert shown.png
        assert shown.chart.elements[0].points == [(1, 3), (2, 4)]
        assert (frame.data, frame.is_main_result) == ({"a": [1, 2]}, True)
    for language, code, said in (
        ("javascript", "const a = 5; a * 2", "10"),
        ("typescript", "const b: number = 5; b * 2", "10"),
    ):
        ran = await got(sandbox.run_code(code, language=language))
        assert (ran.text, ran.error) == (said, None), ran.error
    assert (await got(sandbox.run_code("echo hi", language="bash"))).logs.stdout == ["hi\n"]
    works("Sandbox.run_code")
    made = await got(sandbox.create_code_context(cwd="/home/user/made", language="python"))
    where = await got(sandbox.run_code("import os; z = 1; os.getcwd()", context=made))
    assert where.text == "/home/user/made"
    assert made.id in {each.id for each in await got(sandbox.list_code_contexts())}
    await got(sandbox.restart_code_context(made))
    assert (await got(sandbox.run_code("z", context=made))).error.name == "NameError"
    await got(sandbox.remove_code_context(made))
    works("Sandbox.create_code_context Sandbox.list_code_contexts")
    works("Sandbox.restart_code_context Sandbox.remove_code_context")


async def walk_end(sandbox: Any) -> None:
    await got(sandbox.files.write("kept.txt", "kept"))
    assert await got(sandbox.pause())
    assert not await got(sandbox.beta_pause())
    works("Sandbox.pause Sandbox.beta_pause")
    again = await got(Sandbox.connect(sandbox.sandbox_id))
    assert await got(again.files.read("kept.txt")) == "kept"
    assert await got(again.kill())
    assert not await got(again.kill())
    works("Sandbox.kill")


async def walk_secrets() -> None:
    name = "of-" + re.sub("[^a-z0-9]", "-", sys.argv[2].lower())
    made = await got(Secret.create(name, "a value of it"))
    works("Secret.create")
    assert name in [each.name for each in await got(Secret.list().next_items())]
    works("Secret.list")
    assert (await got(Secret.get_info(made.secret_id))).name == name
    works("Secret.get_info")
    assert (await got(Secret.update(name, "another value"))).version == made.version + 1
    works("Secret.update")
    assert await got(Secret.destroy(name))
    works("Secret.destroy")
    assert not await got(Secret.exists(name))
    works("Secret.exists")


async def walk_others() -> None:
    """What is not there at all: one call for each that can be made without one of them."""
    await refused("Volume.create", lambda: Volume.create("v"))
    await refused("Volume.connect", lambda: Volume.connect("v"))
    await refused("Volume.list", Volume.list)
    await refused("Volume.get_info", lambda: Volume.get_info("v"))
    await refused("Volume.destroy", lambda: Volume.destroy("v"))
    for name in sorted(public(Volume, "Volume") - told):
        tell(name, "refused", "There is no volume to ask it of.")


async def walk_templates() -> None:
    name = f"walk-{uuid4().hex[:12]}"
    assert not await got(Template.exists(name))
    assert not await got(Template.alias_exists(name))
    works("Template.exists Template.alias_exists")
    made = Template().from_base_image().set_envs({"OF_TEMPLATE": "1"})
    await got(Template.build(made, name))
    works("Template.build")
    info = await got(Template.build_in_background(made, name))
    works("Template.build_in_background")

    async def is_ready() -> bool:
        status = await got(Template.get_build_status(info))
        assert status.status.value != "error", status.reason
        return bool(status.status.value == "ready")

    await until(is_ready)
    works("Template.get_build_status")
    await got(Template.assign_tags(name, ["stable"]))
    assert [each.tag for each in await got(Template.get_tags(name))] == ["stable"]
    await got(Template.remove_tags(name, ["stable"]))
    assert await got(Template.get_tags(name)) == []
    works("Template.assign_tags Template.get_tags Template.remove_tags")
    async with made_of(name) as sandbox:
        said = await got(sandbox.commands.run("echo $OF_TEMPLATE"))
        assert said.stdout == "1\n"


@asynccontextmanager
async def made_of(template: str) -> AsyncIterator[Any]:
    sandbox = await got(Sandbox.create(template, timeout=300))
    try:
        yield sandbox
    finally:
        await got(sandbox.kill())


async def walk() -> None:
    versions = [version("e2b"), version("e2b-code-interpreter")]
    sandbox = await walk_sandboxes()
    try:
        handle = await got(sandbox.commands.run("true", background=True))
        await got(handle.wait())
        await got(sandbox.files.make_dir("empty"))
        nothing = {} if IS_SYNC else {"on_event": print}
        watch = await got(sandbox.files.watch_dir("empty", **nothing))
        await got(watch.stop())
        methods = public(Sandbox, "Sandbox") | public(type(sandbox.commands), "commands")
        methods |= public(type(sandbox.pty), "pty") | public(type(sandbox.files), "files")
        methods |= public(type(sandbox.git), "git") | public(type(handle), "handle")
        methods |= public(type(watch), "watch") | public(Template, "Template", only=ASKING)
        methods |= public(Volume, "Volume") | public(Secret, "Secret")
        # These ask nobody: they make what a template is then asked for with.
        methods -= {"Secret.fill", "Secret.iam_token"}
        methods |= {"SandboxPaginator.next_items", "SnapshotPaginator.next_items"}
        print(json.dumps({"versions": versions, "methods": sorted(methods)}), flush=True)
        await walk_files(sandbox)
        walk_links(sandbox)
        await walk_commands(sandbox)
        await walk_terminals(sandbox)
        await walk_git(sandbox)
        await walk_cells(sandbox)
        await walk_end(sandbox)
        await walk_secrets()
        await walk_templates()
    finally:
        await got(sandbox.kill())
    await walk_others()


if __name__ == "__main__":
    asyncio.run(walk())
