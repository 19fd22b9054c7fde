"""The commands of docs/bridge.md and of its example in Go, and the bridge as a process."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import require
from tests.support.deployment_pages import blocks_of
from tests.support.processes import ROOT, clean_environment
from tests.support.site import MANAGE, Site
from tests.support.wire_server import eventually

# However busy the machine is.
SECONDS = 240

# Its fields and their types, to which Go reads the keys of the same letters.
RAGFLOW = """package main

import ("encoding/json"; "fmt"; "os")

type SandboxResponse struct {
	Stdout           string
	Stderr           string
	Returned         string
	ExitCode         int
	StructuredResult map[string]any
	Metadata         map[string]any
}

func main() {
	var response SandboxResponse
	if err := json.NewDecoder(os.Stdin).Decode(&response); err != nil {
		panic(err)
	}
	fmt.Printf("%q %q %v", response.Stdout, response.Returned, response.Metadata["result_value"])
}
"""


def begin(site: Site, *command: str, **extra: str) -> subprocess.Popen[bytes]:
    pipe = subprocess.PIPE
    said = {"CODE_EXEC_API_KEY": site.alice, "LOG_LEVEL": "WARNING"}
    environment = clean_environment(site.data_dir, **said, **extra)
    return subprocess.Popen(
        command, env=environment, cwd=ROOT, stdin=pipe, stdout=pipe, stderr=pipe
    )


def shell(site: Site, text: str, **extra: str) -> subprocess.Popen[bytes]:
    return begin(site, "sh", "-euc", text.replace(".venv/bin/python", sys.executable), **extra)


def end(process: subprocess.Popen[bytes]) -> tuple[int, list[Any]]:
    """Its exit code and its answers, which must be all that it printed."""
    out, err = process.communicate(timeout=SECONDS)
    assert b"Traceback" not in err, err.decode()
    return process.returncode, [json.loads(line) for line in out.splitlines()]


@pytest.fixture(scope="module")
def answers(streaming_site: Site) -> list[tuple[int, list[Any]]]:
    """What each command of the page ends with, and what it prints."""
    processes = [
        shell(streaming_site, block.text) for block in blocks_of(ROOT / "docs" / "bridge.md")
    ]
    return [end(process) for process in processes]


def test_the_commands_of_the_page_do_what_it_says(answers: list[tuple[int, list[Any]]]) -> None:
    (code, [single]), (four, [four_answer]), (served, both) = answers
    assert (code, single["stdout"], single["returned"]) == (0, "doubling\n", '{"twice":42}')
    assert list(single) == ["stdout", "stderr", "returned", "artifacts", "error", "metadata"]
    assert single["metadata"]["receipt"]["tenant"] == "wonderland"
    assert (four, four_answer["returned"]) == (0, "42")
    by_id = {each["id"]: each for each in both}
    assert (served, len(both), by_id["a"]["stdout"]) == (0, 2, "42\n")
    assert by_id["b"]["stderr"].endswith("ZeroDivisionError: division by zero\n")


def test_one_that_is_told_to_stop_answers_and_records_what_ran(streaming_site: Site) -> None:
    process = begin(streaming_site, *MANAGE, "code_exec", "--serve")
    assert process.stdin is not None
    process.stdin.write(b'{"id": 1, "code": "import time; time.sleep(60) # bridged"}\n')
    process.stdin.flush()

    def statuses(status: str) -> int:
        path = streaming_site.data_dir / "cofferdam.sqlite3"
        with closing(sqlite3.connect(path, timeout=20)) as database:
            ours = "code LIKE '%# bridged' AND status = ?"
            counting = f"SELECT count(*) FROM executions_execution WHERE {ours}"
            return int(database.execute(counting, [status]).fetchone()[0])

    assert eventually(lambda: statuses("running") == 1, SECONDS)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=SECONDS)
    [answer] = [json.loads(line) for line in out.splitlines()]
    assert process.returncode == 0, err.decode()
    assert (answer["id"], answer["error"]["code"]) == (1, "SB009")
    assert (statuses("running"), statuses("error")) == (0, 1)


def test_nothing_but_answers_comes_on_standard_output(tmp_path: Path) -> None:
    program = """
import django, os, subprocess, sys
django.setup()
from executions.doors.bridge import Answers, take_standard_streams
requests, answers = take_standard_streams()
print("printed", flush=True)
os.write(1, b"written\\n")
subprocess.run(["sh", "-c", "cat; echo of a child"], check=True)
subprocess.run(["sh", "-c", f"! echo of a thief >&{answers}"], check=True, stderr=subprocess.DEVNULL)
Answers(answers).write({"read": os.read(requests, 99).decode(), "in": "a\\n\\r\\u2028\\ud800"})
"""
    settings = {"DJANGO_SETTINGS_MODULE": "sandbox_site.settings"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        input=b"request",
        env=clean_environment(tmp_path, **settings),
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    assert done.stdout == b'{"read":"request","in":"a\\n\\r\\u2028\\ud800"}\n'
    assert done.stderr == b"printed\nwritten\nof a child\n"


def test_the_example_in_go_is_built_and_runs(
    streaming_site: Site, answers: list[tuple[int, list[Any]]], tmp_path: Path
) -> None:
    require("go")
    go = {name: os.environ[name] for name in ("GOROOT", "GOCACHE") if name in os.environ}
    go = {"GOCACHE": str(tmp_path / "cache"), **go, "CGO_ENABLED": "0", "GOTOOLCHAIN": "local"}
    [block] = blocks_of(ROOT / "examples" / "code_exec" / "README.md")
    out, err = shell(streaming_site, block.text, OUT=str(tmp_path), **go).communicate(
        timeout=SECONDS
    )
    assert out.decode().splitlines() == [
        '{"name":"go","sum":1} 400000 bytes by file',
        *(f'{{"name":"go","sum":{number}}} 5 bytes inline' for number in (2, 3, 4)),
        "failed 1",
        "refused: code_exec: SB002: language: Must be one of: bash, javascript, nodejs, python.",
        "left: context deadline exceeded",
    ], err.decode()

    (tmp_path / "main.go").write_text(RAGFLOW)
    [answer] = answers[0][1]
    read = shell(streaming_site, f"go run {tmp_path}/main.go", **go).communicate(
        json.dumps(answer).encode(), timeout=SECONDS
    )
    assert read[0].decode() == '"doubling\\n" "{\\"twice\\":42}" map[twice:42]', read[1].decode()
