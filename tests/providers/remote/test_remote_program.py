"""A Python program on a remote service runs as in the local guest: by the text of its runner."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from providers.aliyun_codeinterpreter.provider import AliyunCodeInterpreterProvider
from providers.e2b.provider import E2BProvider
from providers.remote.output import Output, result_of
from providers.remote.programs import build_call, build_program
from providers.runtime.guest import program as program_file
from providers.values import ExecutionResult, RunLimits
from tests.support.remote_providers import run
from tests.support.sandboxes import Local

PROGRAMS = {
    "a script pickles a class of its own": (
        "import pickle\n"
        "class Point:\n    x = 1\n"
        "# This is the main thing.\n"
        "print(pickle.loads(pickle.dumps(Point())).x)"
    ),
    "a script asks whether it is the main one": (
        "if __name__ == '__main__':\n    print('main', __file__.endswith('main.py'))"
    ),
    "a script runs an event loop of its own": (
        "import asyncio\nasync def main():\n    print('looped')\nasyncio.run(main())"
    ),
    "main pickles a class of its module": (
        "import pickle\n"
        "class Point:\n    x = 1\n"
        "def main():\n    return pickle.loads(pickle.dumps(Point())).x"
    ),
    "main is a coroutine": (
        "import asyncio\nasync def main():\n    await asyncio.sleep(0)\n    return [1, None]"
    ),
    "main returns a value nested too deeply": (
        "def main():\n    value = []\n    for _ in range(100_000):\n        value = [value]\n"
        "    return value"
    ),
    "main returns half a character": "def main():\n    return '\\ud800'",
    "main returns too much": "def main():\n    return 'x' * 2_000_000",
    "main raises": "def main():\n    raise ValueError('bad')",
    "main leaves with a text": "import sys\ndef main():\n    sys.exit('gone')",
    "main reads its own source": "def main():\n    return open('main.py').read()[:8]",
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_ends_as_it_does_in_the_guest(
    name: str, e2b: E2BProvider, bubblewrap: Local
) -> None:
    assert _told(run(e2b, PROGRAMS[name])) == _told(run(bubblewrap.provider, PROGRAMS[name]))


def test_every_service_gets_the_same_text(aliyun: AliyunCodeInterpreterProvider) -> None:
    assert run(aliyun, PROGRAMS["a script pickles a class of its own"]).stdout == "1\n"


def _told(result: ExecutionResult) -> dict[str, Any]:
    return {
        "exit_code": result.exit_code,
        "stdout": result.stdout,
        # Which folder the program lies in is all that may differ.
        "stderr": result.stderr.replace("/workspace/", ""),
        "result": (result.has_result, result.result),
    }


def test_a_kernel_in_whose_event_loop_a_program_ran_goes_on(tmp_path: Path) -> None:
    """As ipykernel runs cells: within a task of a running loop."""
    program = build_program(
        PROGRAMS["main is a coroutine"], "python", "main", {}, top_level_await=True
    )
    cell = tmp_path / "cell.py"
    cell.write_text(program.text)
    kernel = (
        "import asyncio, sys\n"
        "async def cell():\n"
        "    exec(compile(open(sys.argv[1]).read(), 'cell', 'exec'), {})\n"
        "    await asyncio.sleep(0)\n"
        "    assert asyncio.current_task().get_name() == 'cell'\n"
        "    assert asyncio.get_event_loop() is asyncio.get_running_loop()\n"
        "async def kernel():\n"
        "    await asyncio.create_task(cell(), name='cell')\n"
        "asyncio.run(kernel())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", kernel, cell], cwd=tmp_path, capture_output=True, text=True
    )
    assert (done.stderr, done.returncode) == ("", 0)
    output = Output(program.mark, RunLimits())
    output.stdout(done.stdout)
    assert result_of(output, program, 0, 0.1, {}).result == [1, None]


def test_one_file_is_sent_as_it_is() -> None:
    program = build_program("def main(): ...", "python", "main", {}, top_level_await=True)
    texts = [
        node.value
        for node in ast.walk(ast.parse(program.text))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    assert Path(program_file.__file__).read_text() in texts
    assert len(program.text) < 24_000


def test_the_file_that_is_sent_runs_by_itself(tmp_path: Path) -> None:
    """In an interpreter that has nothing of ours and no package."""
    code = (
        "import runpy, sys\n"
        "runpy.run_path(sys.argv[1])['run_in_kernel']"
        "('def main(x): return x + 1', 'main', '{\"x\":1}', 100, '|', False)"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code, program_file.__file__],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.stderr == ""
    assert json.loads(done.stdout.strip("|\n")) == {"exit_code": 0, "result": 2}


def test_a_call_leaves_a_kernel_its_names(tmp_path: Path) -> None:
    cell = tmp_path / "cell.py"
    cell.write_text(build_call("python", {"x": 1}, top_level_await=True).text)
    kernel = (
        "import pathlib, sys\n"
        "def main(x): return x\n"
        "run, before = 1, None\n"
        "before = {**globals()}\n"
        "exec(compile(pathlib.Path(sys.argv[1]).read_text(), 'cell', 'exec'))\n"
        "changed = [name for name, each in globals().items() if before.get(name) is not each]\n"
        "assert set(changed) == {'__cofferdam__', 'before'}, changed\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", kernel, cell], cwd=tmp_path, capture_output=True, text=True
    )
    assert (done.stderr, done.returncode) == ("", 0)
