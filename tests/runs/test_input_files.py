"""Files that are sent along are there when the code runs, and can be put nowhere else."""

from __future__ import annotations

import hashlib

import pytest

from providers.errors import InvalidConfiguration
from providers.values import InputFile
from tests.conftest import require
from tests.support.sandboxes import Local


def test_files_are_there_before_the_code_runs(local: Local) -> None:
    files = [
        InputFile("data.csv", b"a,b\n1,2\n"),
        InputFile("deep/er/bytes", bytes(range(256))),
        InputFile("é🚢 x", b""),
    ]
    code = """
        print(open("data.csv").read(), open("deep/er/bytes", "rb").read() == bytes(range(256)))
        print(repr(open("é🚢 x").read()))
    """
    result = local.run(code, files=files)
    assert result.stdout == "a,b\n1,2\n True\n''\n"


@pytest.mark.parametrize(
    ("language", "code"),
    [
        ("bash", "cat in/x"),
        ("nodejs", "process.stdout.write(require('fs').readFileSync('in/x'))"),
        ("nodejs", "import fs from 'fs'\nprocess.stdout.write(fs.readFileSync('in/x'))"),
        ("python", "print(open('in/x').read(), end='')"),
    ],
)
def test_every_language_finds_them(bubblewrap: Local, language: str, code: str) -> None:
    if language == "nodejs":
        require("node")
    assert bubblewrap.run(code, language, files=[InputFile("in/x", b"content")]).stdout == "content"


@pytest.mark.parametrize(
    ("language", "code", "module"),
    [
        ("python", "import helper\nprint(helper.VALUE)", InputFile("helper.py", b"VALUE = 5")),
        ("nodejs", "console.log(require('./helper').value)", InputFile("helper.js", b"exports.value = 5")),
        ("nodejs", "import { value } from './helper.mjs'\nconsole.log(value)", InputFile("helper.mjs", b"export const value = 5")),
    ],
)  # fmt: skip
def test_code_can_import_what_was_sent(
    bubblewrap: Local, language: str, code: str, module: InputFile
) -> None:
    if language == "nodejs":
        require("node")
    assert bubblewrap.run(code, language, files=[module]).stdout == "5\n"


def test_large_files_arrive_whole(local: Local) -> None:
    content = bytes(range(256)) * 4096 * 30
    code = "import hashlib\nprint(hashlib.sha256(open('large', 'rb').read()).hexdigest())"
    result = local.run(code, files=[InputFile("large", content)])
    assert result.stdout.strip() == hashlib.sha256(content).hexdigest()


def test_files_can_be_changed_and_belong_to_the_program(local: Local) -> None:
    code = """
        import os
        open("d/x", "a").write("!")
        os.rename("d/x", "d/y")
        print(open("d/y").read(), os.stat("d/y").st_uid == os.getuid())
    """
    assert local.run(code, files=[InputFile("d/x", b"x")]).stdout == "x! True\n"


def test_a_file_in_artifacts_comes_back(bubblewrap: Local) -> None:
    result = bubblewrap.run("", files=[InputFile("artifacts/x", b"1")])
    assert [(one.name, one.content) for one in result.artifacts] == [("x", b"1")]


@pytest.mark.parametrize(
    "path",
    [
        "../x", "/etc/x", "/workspace/x", "a/../../x", "..", ".", "", "a//b", "a/", "a/./b",
        "artifacts",
        "a\0b", "\ud800",
    ],
)  # fmt: skip
def test_a_path_that_leads_elsewhere_names_the_field(bubblewrap: Local, path: str) -> None:
    with pytest.raises(InvalidConfiguration) as caught:
        bubblewrap.run("print(1)", files=[InputFile(path, b"x")])
    assert caught.value.field == "files"


def test_more_than_can_be_sent_names_the_field(bubblewrap: Local) -> None:
    many = [InputFile("x" * 200 + str(number), b"") for number in range(2000)]
    large = [InputFile(str(number), b"x" * (45 << 20)) for number in range(3)]
    for files in (many, large):
        with pytest.raises(InvalidConfiguration) as caught:
            bubblewrap.run("print(1)", files=files)
        assert caught.value.field == "files"


def test_the_largest_files_leave_the_memory_to_the_program() -> None:
    require("bwrap")
    local = Local("bubblewrap", pool_size=1, max_memory="128m")
    files = [InputFile("1", b"x" * (40 << 20))]
    codes = {
        "python": "x = bytearray(50 << 20)\nprint(len(x))",
        "bash": "wc -c < 1",
        "nodejs": "console.log(Buffer.alloc(30 << 20, 1).length)",
    }
    try:
        for language, code in codes.items():
            if language == "nodejs":
                require("node")
            result = local.run(code, language, files=files)
            assert (result.exit_code, result.stderr) == (0, ""), language
    finally:
        local.close()


def test_a_name_that_no_file_can_have_is_refused(bubblewrap: Local) -> None:
    with pytest.raises(InvalidConfiguration, match="at most 255 bytes") as refused:
        bubblewrap.run("", files=[InputFile("x" * 300, b"x")])
    assert refused.value.field == "files"


@pytest.mark.parametrize("language", ["python", "nodejs", "bash"])
def test_files_that_cannot_be_written_are_told(bubblewrap: Local, language: str) -> None:
    if language == "nodejs":
        require("node")
    files = [InputFile("a", b"x"), InputFile("a/b", b"x")]
    result = bubblewrap.survive("", language, files=files)
    assert (result.exit_code, result.stdout, result.timed_out) == (1, "", False)
    assert result.stderr.startswith("The input files cannot be written: ")
    assert "runner" not in result.stderr
