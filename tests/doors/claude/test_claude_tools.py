"""The code that a call of a tool is, run by this machine's bash in a folder of the test's own."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from executions.doors.claude.tools import (
    MOST_MEDIA_BYTES,
    TOOLS,
    media_result,
    prepare,
    result_of,
)
from executions.runs.models import Execution
from providers.errors import InvalidConfiguration


def run(folder: Path, name: str, **given: Any) -> tuple[int, str]:
    """The exit code, and what was put out."""
    done = subprocess.run(
        ["bash", "-c", prepare(name, given).code],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=60,
        check=False,
    )
    return done.returncode, done.stdout.decode()


def test_a_file_is_written_with_its_folders_and_read(tmp_path: Path) -> None:
    text = 'one\ntwo \'quoted\' "$HOME" `id` \\n\nINPUT\nPROGRAM\n)"\n\r\nünï\u2028'
    code, said = run(tmp_path, "write", file_path="a/b.txt", content=text)
    assert (code, said) == (0, f"wrote {len(text)} characters to a/b.txt\n")
    assert (tmp_path / "a/b.txt").read_bytes() == text.encode()
    assert run(tmp_path, "read", file_path="a/b.txt") == (0, text)


@pytest.mark.parametrize(
    ("lines", "expected"),
    [([1, 1], "1\n"), ([2, 3], "2\n3\n"), ([3, 0], "3\n4"), ([0, 2], "1\n2\n"), ([9, 9], "")],
)
def test_a_part_of_a_file_is_read(tmp_path: Path, lines: list[int], expected: str) -> None:
    (tmp_path / "f").write_text("1\n2\n3\n4")
    assert run(tmp_path, "read", file_path="f", view_range=lines) == (0, expected)


def test_a_file_that_is_too_long_is_read_in_parts(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("x" * 99 + "\n" + "y" * 300_000)
    code, said = run(tmp_path, "read", file_path="f")
    assert code == 1
    assert "view_range" in said
    assert run(tmp_path, "read", file_path="f", view_range=[1, 1]) == (0, "x" * 99 + "\n")


def test_what_cannot_be_read_is_said(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    os.mkfifo(tmp_path / "fifo")
    assert run(tmp_path, "read", file_path="no") == (1, "read: no: No such file or directory\n")
    assert run(tmp_path, "read", file_path="binary") == (1, "read: binary: not UTF-8 text\n")
    assert run(tmp_path, "read", file_path="fifo") == (1, "read: fifo: not a regular file\n")
    assert run(tmp_path, "write", file_path=".", content="")[0] == 1


def test_a_text_is_replaced_only_where_it_is_unique(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"a\r\nb\r\na\r\n")
    given: dict[str, Any] = {"file_path": "f", "old_string": "a", "new_string": "c"}
    assert run(tmp_path, "edit", **given)[0] == 1
    assert path.read_bytes() == b"a\r\nb\r\na\r\n"
    assert run(tmp_path, "edit", **given, replace_all=True) == (0, "replaced 2 in f\n")
    assert path.read_bytes() == b"c\r\nb\r\nc\r\n"
    assert run(tmp_path, "edit", **given) == (1, "edit: old_string is not in f\n")


def test_files_are_found_the_newest_first(tmp_path: Path) -> None:
    for number, name in enumerate(("a.py", "d/b.py", "d/c.txt")):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("x")
        os.utime(path, (number, number))
    expected = f"{tmp_path}/d/b.py\n{tmp_path}/a.py\n"
    assert run(tmp_path, "glob", pattern="**/*.py") == (0, expected)
    assert run(tmp_path, "glob", pattern="*.py", path="d") == (0, f"{tmp_path}/d/b.py\n")
    assert run(tmp_path, "glob", pattern="*.no") == (0, "no matches\n")
    assert run(tmp_path, "glob", pattern="/etc/*")[0] == 1


def test_lines_are_found(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d/f").write_text("one\ntwo\n")
    (tmp_path / "binary").write_bytes(b"two\0")
    (tmp_path / "long").write_text("two" + "x" * 3000)
    assert run(tmp_path, "grep", pattern="^t.o") == (0, f"{tmp_path}/d/f:2:two\n")
    assert run(tmp_path, "grep", pattern="one", path="d/f") == (0, f"{tmp_path}/d/f:1:one\n")
    assert run(tmp_path, "grep", pattern="three") == (0, "no matches\n")
    assert run(tmp_path, "grep", pattern="(")[0] == 1
    assert run(tmp_path, "grep", pattern="x", path="no")[0] == 1


def test_many_lines_are_cut(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("x" * 1000 + "\n" + ("y" * 1000 + "\n") * 200)
    code, said = run(tmp_path, "grep", pattern="y")
    assert code == 0
    assert said.endswith("[output truncated]\n")
    assert len(said) < 130_000


def test_a_command_is_its_own_code() -> None:
    prepared = prepare("bash", {"command": "echo 1", "timeout_ms": 1500, "newer": True})
    assert (prepared.code, prepared.seconds, prepared.context) == ("echo 1", 1.5, "default")
    assert prepare("bash", {"restart": True}).code == ""


def test_a_picture_is_read_as_one() -> None:
    prepared = prepare("read", {"file_path": "a/B.PNG"})
    assert (prepared.media_type, prepared.media_path) == ("image/png", "a/B.PNG")
    (block,) = media_result("image/png", b"\x89PNG").content
    assert (block["type"], block["source"]["data"]) == ("image", "iVBORw==")
    assert media_result("application/pdf", b"").content[0]["type"] == "document"
    assert len(media_result("image/png", b"x" * MOST_MEDIA_BYTES).content[0]["source"]["data"]) == (
        5 * 1024 * 1024
    )


@pytest.mark.parametrize(
    ("name", "given", "field"),
    [
        ("bash", {}, "command"),
        ("bash", {"command": ""}, "command"),
        ("bash", {"command": 7}, "command"),
        ("bash", {"command": "x", "timeout_ms": -1}, "timeout_ms"),
        ("bash", {"command": "x", "timeout_ms": 10**12}, "timeout_ms"),
        ("bash", {"command": "x\0"}, "input"),
        ("bash", {"command": "\ud800"}, "input"),
        ("read", {}, "file_path"),
        ("read", {"file_path": ""}, "file_path"),
        ("read", {"file_path": "x" * 5000}, "file_path"),
        ("read", {"file_path": "x", "view_range": [1]}, "view_range"),
        ("read", {"file_path": "x", "view_range": ["1", "2"]}, "view_range.0"),
        ("read", {"file_path": "x.png", "view_range": [1, 2]}, "view_range"),
        ("read", {"file_path": "\udc80"}, "file_path"),
        ("write", {"file_path": "x"}, "content"),
        ("write", {"file_path": "x", "content": ["y"]}, "content"),
        ("edit", {"file_path": "x", "old_string": "", "new_string": "y"}, "old_string"),
        ("glob", {"pattern": ""}, "pattern"),
        ("grep", {"pattern": "x", "path": 3}, "path"),
    ],
)
def test_what_a_tool_cannot_take_names_its_field(
    name: str, given: dict[str, Any], field: str
) -> None:
    with pytest.raises(InvalidConfiguration) as error:
        prepare(name, given)
    assert error.value.field == field


def test_every_tool_is_prepared() -> None:
    assert set(TOOLS) == {"bash", "read", "write", "edit", "glob", "grep"}


@pytest.mark.parametrize(
    ("context", "begin", "end"), [("default", "", "zend"), ("files", "begin", "")]
)
def test_what_an_agent_is_told_is_bounded(context: str, begin: str, end: str) -> None:
    execution = Execution(
        stdout="begin" + "z" * 1_000_000 + "end",
        exit_code=0,
        status=Execution.Status.SUCCEEDED,
        context=context,
    )
    text = result_of(execution).text
    assert len(text) < 300_000
    assert text.startswith(f"[output truncated]\n{begin}")
    assert text.endswith(end)
