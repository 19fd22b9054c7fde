"""E2B's SDK reads, writes, lists, moves and watches files, from its home on, the workspace, and
wherever else the sandbox's user may."""

from __future__ import annotations

import io
import os

import httpx
import pytest
from e2b import (
    FileNotFoundException,
    FilesystemEventType,
    FileType,
    InvalidArgumentException,
    NotFoundException,
)
from e2b.exceptions import NotEnoughSpaceException
from e2b.sandbox.commands.command_handle import PtySize
from e2b_code_interpreter import Sandbox

from tests.support.e2b_door import native_of
from tests.support.raw_http import ask
from tests.support.site import Site
from tests.support.waiting import wait_until

NOT_OURS = ("/etc/passwd", "../../etc/passwd", "/home/user/../other/x", "~root/x", "/home/user2/x")


def test_files_are_written_in_every_way_and_read_by_every_name(sandbox: Sandbox) -> None:
    files = sandbox.files
    assert files.write("a/b.txt", "hello").path == "/home/user/a/b.txt"
    for name in ("a/b.txt", "/home/user/a/b.txt", "~/a/b.txt", "/workspace/a/b.txt", "a/./b.txt"):
        assert files.read(name) == "hello"
    written = files.write_files(
        [{"path": "/home/user/x/1", "data": "one"}, {"path": "2", "data": b"\xff\x00"}]
    )
    assert [each.path for each in written] == ["/home/user/x/1", "/home/user/2"]
    assert bytes(files.read("2", format="bytes")) == b"\xff\x00"
    files.write("streamed", io.BytesIO(b"z" * 200_000))
    assert len(files.read("streamed")) == 200_000
    files.write("packed", "p" * 10_000, gzip=True)
    assert files.read("packed", gzip=True) == "p" * 10_000


def test_names_that_are_not_text_stay_apart_and_are_read_by_what_is_told(sandbox: Sandbox) -> None:
    names = [b"\xfe", b"\xff", b"a\nb", "\u3000\u200d".encode()]
    sandbox.run_code(
        f"import os\nos.mkdir('odd')\nfor n in {names}: open(b'odd/' + n, 'wb').write(n)"
    )
    listed = {entry.name: entry.path for entry in sandbox.files.list("odd")}
    assert sorted(listed) == ["\\xfe", "\\xff", "a\\x0ab", "\u3000\u200d"]
    read = [bytes(sandbox.files.read(path, format="bytes")) for path in listed.values()]
    assert sorted(read) == sorted(names)


def test_a_file_that_may_not_be_read_is_refused_by_both_doors(door: Site, sandbox: Sandbox) -> None:
    sandbox.files.write("closed", "secret")
    sandbox.commands.run("chmod 000 closed")
    with pytest.raises(InvalidArgumentException, match="Permission denied"):
        sandbox.files.read("closed")
    path = f"{native_of(sandbox)}/files/content?path=closed"
    answer = ask(door.service, "GET", path, key=door.alice)
    assert (answer.status, answer.json["error"]["field"]) == (400, "path")
    sandbox.commands.run("chmod 600 closed")
    assert sandbox.files.read("closed") == "secret"


def test_folders_are_listed_made_moved_and_removed(sandbox: Sandbox) -> None:
    files = sandbox.files
    assert files.make_dir("d/e")
    assert not files.make_dir("d/e")
    files.write("d/e/f", "12345")
    sandbox.commands.run("ln -s f d/e/link")
    deep = {each.path: each for each in files.list("/home/user/d", depth=3)}
    assert set(deep) == {f"/home/user/d/{name}" for name in ("e", "e/f", "e/link")}
    file = deep["/home/user/d/e/f"]
    assert (file.size, file.permissions, file.owner) == (5, "-rw-r--r--", "user")
    link = files.get_info("d/e/link")
    assert (link.symlink_target, link.type) == ("/home/user/d/e/f", FileType.FILE)
    assert files.rename("d/e/f", "moved/to/f").path == "/home/user/moved/to/f"
    files.remove("moved")
    files.remove("moved")
    assert not files.exists("moved")
    with pytest.raises(FileNotFoundException):
        files.rename("moved", "other")
    with pytest.raises(FileNotFoundException):
        files.list("moved")
    with pytest.raises(FileNotFoundException):
        files.read("moved")
    with pytest.raises(InvalidArgumentException):
        files.list("d/e/link")


@pytest.mark.parametrize("path", NOT_OURS)
def test_nothing_is_changed_that_the_sandboxes_user_may_not_change(
    sandbox: Sandbox, path: str
) -> None:
    sandbox.files.write("mine", "x")
    for call in (
        lambda: sandbox.files.write(path, "x"),
        lambda: sandbox.files.rename("mine", path),
        lambda: sandbox.files.watch_dir(path),
    ):
        with pytest.raises((InvalidArgumentException, NotFoundException)):
            call()
    with pytest.raises(InvalidArgumentException):
        sandbox.files.remove("/etc/passwd")
    assert sandbox.files.read("mine") == "x"


def test_files_are_reached_wherever_the_sandboxes_user_is(sandbox: Sandbox) -> None:
    files = sandbox.files
    sandbox.commands.run("mkdir -p /tmp/a && echo plot >/tmp/a/plot.png")
    assert files.read("/tmp/a/plot.png") == "plot\n"
    assert files.write("/tmp/b/c", "1").path == "/tmp/b/c"
    assert sandbox.commands.run("cat /tmp/b/c; pwd", cwd="/tmp/b").stdout == "1/tmp/b\n"
    assert [each.path for each in files.list("/tmp/b")] == ["/tmp/b/c"]
    assert files.rename("/tmp/b/c", "from-tmp").path == "/home/user/from-tmp"
    assert files.read("from-tmp") == "1"
    assert files.exists("/tmp/a/plot.png")
    assert not files.exists("/tmp/b/c")
    assert {"/home", "/tmp", "/usr"} <= {each.path for each in files.list("/")}
    assert files.read("/etc/passwd").startswith("root:")
    assert "processor" in files.read("/proc/cpuinfo")
    watch = files.watch_dir("/tmp/b")
    files.write("/tmp/b/new", "x")
    wait_until(lambda: "new" in {each.name for each in watch.get_new_events()}, 60)
    watch.stop()
    link = sandbox.download_url("/tmp/a/plot.png", use_signature_expiration=60)
    assert httpx.get(link).text == "plot\n"
    sent = httpx.post(sandbox.upload_url("/tmp/a/up"), files={"file": ("up", b"sent")})
    assert sent.json()[0]["path"] == "/tmp/a/up"
    files.remove("/tmp/a")
    files.remove("/tmp/b")
    assert sandbox.commands.run("ls /tmp/a /tmp/b 2>/dev/null; true").stdout == ""


def test_a_link_leads_where_it_leads_a_program(sandbox: Sandbox) -> None:
    sandbox.commands.run("ln -sfn /etc out; ln -sfn /etc/passwd passwd; ln -sfn /proc/self me")
    assert sandbox.files.read("passwd") == sandbox.files.read("out/passwd")
    with pytest.raises(InvalidArgumentException):
        sandbox.files.write("out/mine", "x")
    # Of who reads for it nothing is read.
    for path in ("me/environ", "/proc/self/maps", "/proc/1/environ"):
        with pytest.raises(InvalidArgumentException):
            sandbox.files.read(path)
    for path in ("/dev/zero", "/dev/tty", "/tmp"):
        with pytest.raises(InvalidArgumentException):
            sandbox.files.read(path)


def test_the_metadata_of_a_file_is_told_of_it(sandbox: Sandbox) -> None:
    metadata = {"author": "me", "Two-Words": "y"}
    written = sandbox.files.write("noted", "x", metadata=metadata)
    assert written.metadata == {"author": "me", "two-words": "y"}
    assert sandbox.files.get_info("noted").metadata == written.metadata
    (listed,) = [each for each in sandbox.files.list(".") if each.name == "noted"]
    assert listed.metadata == written.metadata
    sandbox.files.rename("noted", "noted-too")
    assert sandbox.files.get_info("noted-too").metadata == written.metadata
    assert sandbox.files.write("noted-too", "z").metadata is None
    assert sandbox.files.get_info("noted-too").metadata is None


def test_programs_are_at_home(sandbox: Sandbox) -> None:
    assert sandbox.commands.run("pwd; /bin/pwd; echo ~ $HOME").stdout.split() == ["/home/user"] * 4
    code = "import os; print(os.getcwd(), os.path.expanduser('~'))"
    assert sandbox.run_code(code).logs.stdout == ["/home/user /home/user\n"]
    assert sandbox.run_code("pwd", language="bash").logs.stdout == ["/home/user\n"]
    made = sandbox.create_code_context(cwd="/tmp")
    assert made.cwd == "/tmp"
    assert sandbox.run_code("import os; print(os.getcwd())", context=made).logs.stdout == ["/tmp\n"]
    terminal = sandbox.pty.create(PtySize(rows=24, cols=80), cwd="/")
    sandbox.pty.send_stdin(terminal.pid, b"echo at:$PWD; exit\n")
    heard: list[bytes] = []
    terminal.wait(on_pty=heard.append)
    assert b"at:/\r\n" in b"".join(heard)


def test_changes_are_told_to_who_asks(sandbox: Sandbox) -> None:
    sandbox.files.make_dir("watched/deep")
    flat = sandbox.files.watch_dir("watched")
    deep = sandbox.files.watch_dir("watched", recursive=True)
    sandbox.files.write("watched/deep/new", "1")
    sandbox.files.write("watched/top", "1")
    seen: list[tuple[str, FilesystemEventType]] = []

    def has_seen(name: str) -> bool:
        seen.extend((each.name, each.type) for each in deep.get_new_events())
        return (name, FilesystemEventType.CREATE) in seen

    wait_until(lambda: has_seen("top"), 60)
    assert ("deep/new", FilesystemEventType.CREATE) in seen
    wait_until(lambda: "top" in {each.name for each in flat.get_new_events()}, 60)
    flat.stop()
    deep.stop()


def test_a_watch_whose_folder_is_gone_is_no_folder_where_nothing_happens(sandbox: Sandbox) -> None:
    sandbox.files.make_dir("brief")
    watch = sandbox.files.watch_dir("brief")
    sandbox.files.remove("brief")

    def is_over() -> bool:
        try:
            watch.get_new_events()
        except NotFoundException:
            return True
        return False

    wait_until(is_over, 60)


def test_links_that_are_signed_need_no_key(door: Site, sandbox: Sandbox) -> None:
    sandbox.files.write("linked", "by its link")
    for until in (None, 60):
        link = sandbox.download_url("linked", use_signature_expiration=until)
        assert httpx.get(link).text == "by its link"
    sent = httpx.post(sandbox.upload_url("up"), files={"file": ("up", b"sent by it")})
    assert sent.json()[0]["path"] == "/home/user/up"
    assert sandbox.files.read("up") == "sent by it"
    late = sandbox.download_url("linked", use_signature_expiration=-5)
    told = sandbox.download_url("linked", use_signature_expiration=60)
    number = told.rpartition("=")[2]
    for wrong in (
        late,
        told.replace("path=linked", "path=up"),
        told.replace(number, str(int(number) + 60)),
        told.replace(f"signature_expiration={number}", ""),
        told.replace("v1_", "v1_A"),
        sandbox.upload_url("linked"),
    ):
        assert httpx.get(wrong).status_code == 401, wrong
    assert httpx.post(sandbox.download_url("up"), files={"file": b"x"}).status_code == 401


def test_fifty_megabytes_and_no_more_than_there_is_room_for(sandbox: Sandbox) -> None:
    large = os.urandom(1024) * 50 * 1024
    sandbox.files.write("large", io.BytesIO(large))
    assert bytes(sandbox.files.read("large", format="bytes")) == large
    with pytest.raises(NotEnoughSpaceException):
        sandbox.files.write("second", large)
    sandbox.files.remove("large")
