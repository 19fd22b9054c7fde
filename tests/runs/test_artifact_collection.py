"""What a program leaves in artifacts/ comes back, and nothing else can be made to."""

from __future__ import annotations

from dataclasses import replace

import pytest

from providers.values import ExecutionResult, RunLimits
from tests.conftest import require
from tests.support.sandboxes import Local, long_enough


def contents(result: ExecutionResult) -> dict[str, bytes]:
    return {artifact.name: artifact.content for artifact in result.artifacts}


def skipped(result: ExecutionResult) -> dict[str, str]:
    return dict(result.metadata.get("artifacts_skipped", []))


def test_files_and_folders_come_back(local: Local) -> None:
    code = r"""
        import os
        os.makedirs("artifacts/a/b")
        open("artifacts/one.txt", "w").write("é")
        open("artifacts/a/b/two.bin", "wb").write(bytes(range(256)) * 1000)
        open("artifacts/empty", "w")
        open("outside.txt", "w").write("not this one")
    """
    result = local.run(code)
    assert contents(result) == {
        "one.txt": "é".encode(),
        "a/b/two.bin": bytes(range(256)) * 1000,
        "empty": b"",
    }
    assert skipped(result) == {}


@pytest.mark.parametrize(
    ("name", "mime_type"),
    [
        ("chart.png", "image/png"),
        ("table.csv", "text/csv"),
        ("page.html", "text/html"),
        ("data.json", "application/json"),
        ("picture.svg", "image/svg+xml"),
        ("paper.pdf", "application/pdf"),
        ("nothing", "application/octet-stream"),
        ("odd.thing", "application/octet-stream"),
    ],
)
def test_the_type_comes_from_the_name(bubblewrap: Local, name: str, mime_type: str) -> None:
    result = bubblewrap.run(f"open('artifacts/{name}', 'w').write('<html>')")
    assert [artifact.mime_type for artifact in result.artifacts] == [mime_type]


@pytest.mark.parametrize(
    ("language", "code"),
    [
        ("bash", "echo 1 > artifacts/x; exit 3"),
        ("nodejs", "require('fs').writeFileSync('artifacts/x', '1\\n'); process.exit(3)"),
        ("python", "open('artifacts/x', 'w').write('1\\n'); raise SystemExit(3)"),
    ],
)
def test_every_language_leaves_artifacts_even_when_it_fails(
    bubblewrap: Local, language: str, code: str
) -> None:
    if language == "nodejs":
        require("node")
    result = bubblewrap.run(code, language)
    assert (result.exit_code, contents(result)) == (3, {"x": b"1\n"})


def test_what_was_left_before_the_deadline_comes_back(bubblewrap: Local) -> None:
    code = "with open('artifacts/x', 'w') as file: file.write('1')\nwhile True: pass"
    result = long_enough(
        lambda seconds: bubblewrap.run(code, timeout=seconds),
        lambda result: bool(result.artifacts),
        0.4,
    )
    assert (result.timed_out, contents(result)) == (True, {"x": b"1"})


@pytest.mark.parametrize(
    "target",
    ["/etc/passwd", "/proc/1/environ", "/proc/self/status", "../secret", "/", "nowhere", "loop", "/dev/zero"],
)  # fmt: skip
def test_a_link_is_never_followed(local: Local, target: str) -> None:
    code = f"""
        import os
        open("secret", "w").write("secret")
        os.symlink({target!r}, "artifacts/loop")
        open("artifacts/plain", "w").write("plain")
    """
    result = local.survive(code)
    assert contents(result) == {"plain": b"plain"}
    assert skipped(result) == {"loop": "a symbolic link: links are not followed"}


def test_a_linked_folder_is_not_entered(bubblewrap: Local) -> None:
    code = """
        import os
        os.mkdir("elsewhere")
        open("elsewhere/secret", "w").write("secret")
        os.symlink("../elsewhere", "artifacts/folder")
    """
    assert contents(bubblewrap.run(code)) == {}


@pytest.mark.parametrize(
    "swap",
    [
        "os.symlink('/etc', 'artifacts')",
        "os.symlink('elsewhere', 'artifacts')",
        "open('artifacts', 'w').write('a file')",
        "os.mkfifo('artifacts')",
        "None",
    ],
)
def test_the_folder_itself_may_be_anything(local: Local, swap: str) -> None:
    code = f"""
        import os
        os.rmdir("artifacts")
        os.mkdir("elsewhere")
        open("elsewhere/secret", "w").write("secret")
        {swap}
    """
    result = local.survive(code)
    assert (result.exit_code, contents(result)) == (0, {})


def test_only_regular_files_are_read(local: Local) -> None:
    code = """
        import os, socket
        os.mkfifo("artifacts/pipe")
        socket.socket(socket.AF_UNIX).bind("artifacts/socket")
        os.mkdir("artifacts/folder")
        open("artifacts/plain", "w").write("plain")
        os.link("artifacts/plain", "artifacts/hard")
    """
    result = local.survive(code)
    assert contents(result) == {"plain": b"plain", "hard": b"plain"}
    assert skipped(result) == dict.fromkeys(("pipe", "socket"), "not a regular file")


def test_what_nobody_may_read_is_left_out(bubblewrap: Local) -> None:
    code = """
        import os
        os.mkdir("artifacts/folder")
        open("artifacts/folder/inside", "w").write("x")
        open("artifacts/file", "w").write("x")
        os.chmod("artifacts/folder", 0)
        os.chmod("artifacts/file", 0)
    """
    result = bubblewrap.survive(code)
    assert contents(result) == {}
    assert skipped(result) == dict.fromkeys(("folder/", "file"), "unreadable")


def test_too_many_files_are_cut_off(bubblewrap: Local) -> None:
    code = "for n in range(30): open(f'artifacts/{n:02}', 'w').write(str(n))"
    result = bubblewrap.run(code)
    assert sorted(contents(result)) == [f"{number:02}" for number in range(20)]
    reason = "too many files: at most 20 are kept"
    assert skipped(result) == {f"{number:02}": reason for number in range(20, 30)}


def test_of_more_files_than_can_be_named_the_number_is_told(bubblewrap: Local) -> None:
    result = bubblewrap.run("for n in range(200): open(f'artifacts/{n:03}', 'w').close()")
    told = result.metadata["artifacts_skipped"]
    assert [name for name, _ in told] == [*(f"{number:03}" for number in range(20, 70)), ""]
    assert told[-1] == ["", "and 130 more"]


def test_a_flood_of_files_does_not_cost_the_verdict(local: Local) -> None:
    code = """
        import os
        os.mkdir("artifacts/many")
        for n in range(4000): open(f"artifacts/many/{n}", "w").close()
        print("done")
    """
    result = local.survive(code, timeout=60)
    assert (result.exit_code, result.stdout) == (0, "done\n")
    assert len(result.artifacts) == 20


def test_a_file_that_is_too_large_is_left_out(local: Local) -> None:
    code = """
        open("artifacts/fits", "wb").write(b"x" * (10 << 20))
        open("artifacts/over", "wb").write(b"x" * ((10 << 20) + 1))
    """
    result = local.run(code)
    assert {name: len(content) for name, content in contents(result).items()} == {"fits": 10 << 20}
    assert skipped(result) == {"over": "too large: at most 10485760 bytes are kept"}


def test_all_files_together_are_bounded(bubblewrap: Local) -> None:
    code = "for n in 'abc': open(f'artifacts/{n}', 'wb').write(b'x' * (8 << 20))"
    result = bubblewrap.run(code)
    assert sorted(contents(result)) == ["a", "b"]
    reason = "too large: at most 20971520 bytes are kept in total for all files"
    assert skipped(result) == {"c": reason}


def test_a_sparse_file_is_as_large_as_it_says(bubblewrap: Local) -> None:
    result = bubblewrap.run("open('artifacts/sparse', 'wb').truncate(60 << 20)")
    assert skipped(result) == {"sparse": "too large: at most 10485760 bytes are kept"}


def test_the_bounds_of_the_request_hold(bubblewrap: Local) -> None:
    limits = replace(RunLimits(), artifact_count=1, artifact_bytes=3)
    code = "for name, text in (('a', '1234'), ('b', '123'), ('c', '1')): open(f'artifacts/{name}', 'w').write(text)"  # fmt: skip
    result = bubblewrap.run(code, limits=limits)
    assert contents(result) == {"b": b"123"}
    assert skipped(result) == {
        "a": "too large: at most 3 bytes are kept",
        "c": "too many files: at most 1 are kept",
    }


CONTROLS = {
    r"a\nb": r"a\x0ab", r"\xff": r"\xff", r"a\x1bb": r"a\x1bb", r"\x7f": r"\x7f",
    r"\xed\xa0\x80": r"\xed\xa0\x80", r"\xc2\x85": r"\xc2\x85", r"\\xff": r"\x5cxff",
}  # fmt: skip


@pytest.mark.parametrize(("name", "told"), CONTROLS.items())
@pytest.mark.parametrize("kind", ["file", "folder"])
def test_a_name_that_no_line_may_hold_is_told_with_escapes(
    bubblewrap: Local, name: str, told: str, kind: str
) -> None:
    inside = "/inside" if kind == "folder" else ""
    path = f"b'artifacts/{name}{inside}'"
    code = f"""
        import os
        os.makedirs(os.path.dirname({path}), exist_ok=True)
        open({path}, "w").write("x")
        open("artifacts/plain", "w").write("plain")
    """
    result = bubblewrap.survive(code)
    assert contents(result) == {"plain": b"plain", f"{told}{inside}": b"x"}
    assert skipped(result) == {}


def test_two_names_that_are_not_text_stay_two(local: Local) -> None:
    code = r"for name in (b'\xff', b'\xfe'): open(b'artifacts/' + name, 'wb').write(name)"
    assert contents(local.run(code)) == {r"\xff": b"\xff", r"\xfe": b"\xfe"}


def test_odd_names_that_are_text_are_kept(local: Local) -> None:
    names = ["é🚢 x.txt", "-rf", "a..b", "...", "%2e%2e", "'\"<b>", "x" * 255, "artifact:x"]
    # Signs that no one sees, of other spaces, and such as turn text around are data.
    names += [f"a{sign}b" for sign in "\u3000\u202f\u00a0\u200d\u00ad\ufeff\u202e\u2028\U000e0041"]
    code = f"for name in {names!r}: open('artifacts/' + name, 'w').write('x')"
    assert sorted(contents(local.run(code))) == sorted(names)


def test_deep_folders_are_not_followed_for_ever(bubblewrap: Local) -> None:
    code = """
        import os
        path = "artifacts"
        for depth in range(8):
            open(f"{path}/file{depth}", "w").write("x")
            path += "/d"
            os.mkdir(path)
    """
    result = bubblewrap.survive(code)
    assert set(contents(result)) == {f"{'d/' * depth}file{depth}" for depth in range(5)}
    reason = "too deep: a kept file has at most 4 folders above it"
    assert skipped(result) == {f"{'d/' * depth}file{depth}": reason for depth in range(5, 8)}


def test_a_file_that_keeps_growing_is_seen_as_it_was_at_the_end(bubblewrap: Local) -> None:
    code = """
        import os, time
        if os.fork() == 0:
            os.setsid()
            with open("artifacts/log", "w", buffering=1) as file:
                while True:
                    file.write("line\\n")
                    time.sleep(0.001)
        time.sleep(0.2)
    """
    log = contents(bubblewrap.survive(code))["log"]
    assert log
    assert set(log.splitlines()) == {b"line"}


MAKES_THE_FOLDER = {
    "os.makedirs": "import os\nos.makedirs('artifacts')\nopen('artifacts/x', 'w').write('text')",
    "os.mkdir": "import os\nos.mkdir('artifacts', 0o700)\nopen('artifacts/x', 'w').write('text')",
    "pathlib": "import pathlib\np = pathlib.Path.cwd() / 'artifacts'\np.mkdir()\n(p / 'x').write_text('text')",
    "below it": "import os\nos.makedirs('artifacts/a')\nos.rename('artifacts/a', 'artifacts/b')\nopen('artifacts/x', 'w').write('text')\nos.rmdir('artifacts/b')",
    "copied": "import os, shutil\nos.mkdir('a'); open('a/x', 'w').write('text')\nshutil.copytree('a', 'artifacts')",
    "nodejs": "const fs = require('fs'); fs.mkdirSync('artifacts'); fs.writeFileSync('artifacts/x', 'text')",
    "nodejs module": "import { mkdir, writeFile } from 'node:fs/promises'\nawait mkdir('artifacts'); await writeFile('artifacts/x', 'text')",
}  # fmt: skip


@pytest.mark.parametrize(("name", "code"), MAKES_THE_FOLDER.items(), ids=MAKES_THE_FOLDER)
def test_a_program_may_make_the_folder_itself(bubblewrap: Local, name: str, code: str) -> None:
    language = name.partition(" ")[0] if name.startswith("nodejs") else "python"
    if language == "nodejs":
        require("node")
    result = bubblewrap.run(code, language)
    assert [(each.name, each.content) for each in result.artifacts] == [("x", b"text")], (
        result.stderr
    )


def test_a_folder_that_is_the_programs_own_is_made_once(bubblewrap: Local) -> None:
    code = """
        import os
        for path in ('artifacts', 'artifacts', 'own', 'own'):
            try:
                os.mkdir(path)
                print('made', path)
            except FileExistsError as error:
                print(error)
        os.makedirs('artifacts')
    """
    result = bubblewrap.run(code)
    assert result.stdout == (
        "made artifacts\n[Errno 17] File exists: 'artifacts'\n"
        "made own\n[Errno 17] File exists: 'own'\n"
    )
    assert "FileExistsError" in result.stderr
    assert "job" not in result.stderr
