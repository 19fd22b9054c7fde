"""`cofferdam` on the shell: pipes, exit codes, files, and what a hostile program prints."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from cofferdam import Cofferdam
from cofferdam.cli.main import main
from cofferdam.cli.output import Out, harmless
from cofferdam.saving import target_in

from tests.support.processes import ROOT, free_port
from tests.support.site import Site

COMMAND = (sys.executable, "-m", "cofferdam")
Shell = Callable[..., "subprocess.CompletedProcess[bytes]"]


@pytest.fixture(scope="module")
def environment(streaming_site: Site) -> dict[str, str]:
    return {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": str(ROOT / "clients" / "python"),
        "COFFERDAM_URL": streaming_site.service.url,
        "COFFERDAM_API_KEY": streaming_site.alice,
    }


@pytest.fixture
def shell(environment: dict[str, str], tmp_path: Path) -> Shell:
    def call(
        *arguments: str, stdin: bytes = b"", **extra: str
    ) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(
            [*COMMAND, *arguments],
            input=stdin,
            env=environment | extra,
            cwd=tmp_path,
            capture_output=True,
            timeout=300,
            check=False,
        )

    return call


@pytest.fixture
def here(environment: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """For calls of `main` in this process, which start no interpreter."""
    for name in ("COFFERDAM_URL", "COFFERDAM_API_KEY"):
        monkeypatch.setenv(name, environment[name])
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_bytes_go_through_and_the_exit_code_is_the_programs(shell: Shell, tmp_path: Path) -> None:
    code = b"import sys; sys.stdout.buffer.write(bytes(range(256))); print('no', file=sys.stderr); sys.exit(7)"
    done = shell("run", stdin=code)
    assert (done.returncode, done.stdout, done.stderr) == (7, bytes(range(256)), b"no\n")
    (tmp_path / "shout.js").write_text(
        "console.log(require('fs').readFileSync('in.txt', 'utf8').toUpperCase())"
    )
    (tmp_path / "names.txt").write_text("ada")
    done = shell("run", "shout.js", "--file", "in.txt=names.txt")
    assert (done.returncode, done.stdout) == (0, b"ADA\n")


@pytest.mark.parametrize(
    ("arguments", "exit_code", "said"),
    [
        (["-c", "while True: pass", "--timeout", "1"], 124, "SB005: "),
        (["-c", "print(1)", "--timeout", "400"], 125, "cofferdam: SB002: timeout: "),
        (["missing.py"], 125, "missing.py"),
        (["-c", "1", "--arguments", "[1]"], 125, "Must be a JSON object"),
        (["-c", "1", "-e", "NOT_SET_HERE"], 125, "--env: 'NOT_SET_HERE' is not set"),
        (["-c", "1", "--allow", "pypi.org"], 125, "SB002: network: This installation allows no"),
        (["-c", "1", "file.py"], 125, "not both"),
        (["-c", "1", "-l", "cobol"], 125, "SB002: "),
        (["--nonsense"], 125, "unrecognized arguments"),
        (["-c", "import os; os.kill(os.getpid(), 9)"], 137, ""),
        (["-c", "x = ['x' * 2**20 for _ in range(2**14)]"], 137, "SB006: "),
    ],
    ids=[
        "slow",
        "refused",
        "no file",
        "array",
        "variable",
        "network",
        "both",
        "cobol",
        "usage",
        "killed",
        "memory",
    ],
)
def test_what_did_not_end_by_itself_has_a_code_of_its_own(
    arguments: list[str], exit_code: int, said: str, here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    try:
        ended = main(["run", *arguments])
    except SystemExit as left:
        ended = int(left.code or 0)
    assert ended == exit_code
    assert said in capfd.readouterr().err


def test_variables_come_by_value_and_from_the_environment(
    here: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OWN", "own=1")
    code = "import os; print(os.environ['OWN'], os.environ['GIVEN'])"
    assert main(["run", "-c", code, "-e", "OWN", "--env", "GIVEN=a=b"]) == 0
    assert capfd.readouterr().out == "own=1 a=b\n"


def test_without_a_service_or_a_key_it_says_what_to_set(
    here: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COFFERDAM_API_KEY", "cfd_wrong")
    assert main(["session", "list", "--json"]) == 125
    told = capfd.readouterr()
    assert "cofferdam: unauthenticated: " in told.err
    assert json.loads(told.out)["error"]["code"] == "unauthenticated"
    monkeypatch.delenv("COFFERDAM_API_KEY")
    assert main(["run", "-c", "1"]) == 125
    assert "COFFERDAM_API_KEY: " in capfd.readouterr().err


def test_arguments_artifacts_and_the_record(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code = (
        "import pathlib\n"
        "def main(name, count, note):\n"
        "    pathlib.Path('artifacts/in').mkdir(parents=True)\n"
        "    pathlib.Path('artifacts/in/a.bin').write_bytes(b'\\x00\\xff')\n"
        "    return [name, count, note]\n"
    )
    given = ["-a", "name=ada", "-a", "count=3", "--arguments", '{"note": null}']
    assert main(["run", "-c", code, *given, "--artifacts", "out", "--json"]) == 0
    record = json.loads(capfd.readouterr().out)
    assert record["result"] == ["ada", 3, None]
    assert (here / "out" / "in" / "a.bin").read_bytes() == b"\x00\xff"

    # The record can be checked without the service, and an answer that was changed is found out.
    assert main(["keys"]) == 0
    (here / "keys.json").write_text(capfd.readouterr().out)
    (here / "answer.json").write_text(json.dumps(record))
    (here / "code.py").write_text(code)
    check = ["verify", "answer.json", "--keys", "keys.json", "--code", "code.py"]
    assert main([*check, "--artifact", "in/a.bin=out/in/a.bin"]) == 0
    assert capfd.readouterr().out.startswith("valid: entry ")
    (here / "answer.json").write_text(json.dumps(record | {"result": ["eve"]}))
    assert main(check) == 1
    assert "NOT VALID: result_hash" in capfd.readouterr().out
    (here / "answer.json").write_text("{}")
    assert main(check) == 2


def test_what_was_left_out_is_told_beside_the_output(
    here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code = "import os\nos.symlink('x', 'artifacts/a\\x1b')\nfor n in range(21): display(n)"
    assert main(["run", "-c", code]) == 0
    assert capfd.readouterr().err.splitlines() == [
        "cofferdam: a\\x1b was left out: a symbolic link: links are not followed",
        "cofferdam: output 21 was left out: too many outputs: at most 20 are kept",
    ]


def test_what_is_left_to_run_is_followed_and_found(
    here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code = "import time, sys\nfor n in range(3): print(n, flush=True); time.sleep(0.1)\nsys.exit(5)"
    assert main(["run", "--detach", "-c", code]) == 0
    execution_id = capfd.readouterr().out.strip()
    assert main(["logs", "-f", execution_id]) == 5
    assert capfd.readouterr().out == "0\n1\n2\n"
    assert main(["logs", execution_id]) == 5
    assert capfd.readouterr().out == "0\n1\n2\n"
    assert main(["logs", "-f", execution_id, "--json"]) == 5
    assert json.loads(capfd.readouterr().out)["id"] == execution_id


def test_a_session_and_its_files(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def said(*arguments: str) -> str:
        assert main(list(arguments)) == 0, capfd.readouterr().err
        return capfd.readouterr().out

    name = f"shell-{free_port()}"
    session_id = said("session", "open", "--name", name, "--idle", "300").strip()
    assert f"{session_id}  open   python" in said("session", "list", "--state", "open")
    said("session", "run", name, "-c", "x = 41")
    assert said("session", "run", session_id, "-c", "print(x + 1)") == "42\n"
    assert said("session", "run", name, "-c", "x + 1") == "42\n"
    assert said("session", "run", name, "-c", "print('seen')\n[x, 2]") == "seen\n[41, 2]\n"
    main_code = "def main(n):\n    return {'n': n}"
    assert said("session", "run", name, "-c", main_code, "-a", "n=2") == '{"n": 2}\n'
    said("session", "run", name, "-c", r"open('two\nlines\x1b[2J', 'w').close()")
    assert "two\\x0alines\\x1b[2J\n" in said("files", "ls", name)
    (here / "data.bin").write_bytes(bytes(range(256)))
    said("files", "put", name, "data.bin", "in/data.bin")
    assert "in/data.bin" in said("files", "ls", name, "in")
    listed = [json.loads(line) for line in said("files", "ls", name, "--json").splitlines()]
    assert {"in"} <= {each["path"] for each in listed}
    said("files", "get", name, "in/data.bin", "copy.bin")
    assert (here / "copy.bin").read_bytes() == bytes(range(256))
    # What does not come whole leaves what was there.
    assert main(["files", "get", name, "in/none", "copy.bin"]) == 125
    assert (here / "copy.bin").read_bytes() == bytes(range(256))
    assert sorted(path.name for path in here.iterdir()) == ["copy.bin", "data.bin"]
    said("files", "rm", name, "in")
    assert main(["files", "ls", name, "in"]) == 125
    said("session", "close", name)
    capfd.readouterr()
    assert main(["session", "run", name, "-c", "x"]) == 125
    assert "no open session" in capfd.readouterr().err


def test_ctrl_c_cancels_the_run(environment: dict[str, str], streaming_site: Site) -> None:
    process = subprocess.Popen(
        [*COMMAND, "run", "-c", "import time; print(1, flush=True); time.sleep(25)"],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"1\n"
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=300)
    assert (process.returncode, errors) == (130, b"")
    with Cofferdam(streaming_site.service.url, streaming_site.alice) as client:
        newest = next(iter(client.executions(limit="1")))
        assert client.wait(newest.id).status == "cancelled"


def test_a_terminal_is_not_given_what_it_would_obey(environment: dict[str, str]) -> None:
    code = r"print('\x1b]52;c;ZXZpbA==\x07safe\rover\u202etxt')"
    control, terminal = pty.openpty()
    done = subprocess.run(
        [*COMMAND, "run", "-c", code], env=environment, stdout=terminal, timeout=300, check=True
    )
    os.close(terminal)
    told = os.read(control, 10_000).decode()
    os.close(control)
    assert done.returncode == 0
    assert told == "\\x1b]52;c;ZXZpbA==\\x07safe\\x0dover\\x202etxt\r\n"
    assert harmless("\x9b2J\u2067") == "\\x9b2J\\x2067"
    assert harmless("täglich\t1\r\n\n") == "täglich\t1\r\n\n"


@pytest.mark.parametrize("name", ["../a", "/etc/a", "a/../../b", "", "..", "link/a", "a\\b"])
def test_no_name_leads_out_of_the_folder(name: str, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "link").symlink_to(tmp_path)
    with pytest.raises(ValueError, match="leads out of"):
        target_in(tmp_path / "out", name)
    assert target_in(tmp_path / "out", "a/b.txt") == tmp_path / "out" / "a" / "b.txt"


def test_a_value_without_a_text_is_named_by_what_it_is(capfd: pytest.CaptureFixture[str]) -> None:
    out = Out()
    out.stdout(b"half a line")
    out.value({"image/png": "...", "image/svg+xml": "..."})
    assert capfd.readouterr().out == "half a line\n<image/png, image/svg+xml>\n"


HELPS = (
    *("", "run", "logs", "keys", "verify"),
    *("session", "session open", "session list", "session run", "session close"),
    *("files", "files ls", "files get", "files put", "files rm"),
)


def test_every_command_has_help(capfd: pytest.CaptureFixture[str]) -> None:
    for arguments in map(str.split, HELPS):
        with pytest.raises(SystemExit) as left:
            main([*arguments, "--help"])
        assert left.value.code == 0
        usage = " ".join(["usage: cofferdam", *arguments])
        assert capfd.readouterr().out.startswith(usage)
