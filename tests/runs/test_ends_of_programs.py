"""A program ends as its interpreter would end it: what it left open is written out and released."""

from __future__ import annotations

import gzip
import io
import textwrap
import zipfile

import pytest

from tests.conftest import require
from tests.support.sandboxes import Local, long_enough


def left_by(local: Local, code: str, language: str = "python") -> dict[str, bytes]:
    result = local.run(code, language, timeout=30)
    return {file.name: file.content for file in result.artifacts}


UNCLOSED = {
    "open": "f = open('artifacts/x', 'w')\nf.write('text')",
    "binary": "f = open('artifacts/x', 'wb')\nf.write(b'text')",
    "print": "print('text', end='', file=open('artifacts/x', 'w'))",
    "module global": "f = open('artifacts/x', 'w')\ndef main():\n    f.write('text')",
    "sys.exit": "import sys\nf = open('artifacts/x', 'w')\nf.write('text')\nsys.exit(3)",
    "exception": "f = open('artifacts/x', 'w')\nf.write('text')\n1 / 0",
    "cycle": "class A: pass\na = A()\na.me, a.f = a, open('artifacts/x', 'w')\na.f.write('text')\ndel a",
    "daemon thread": """
        import threading, time
        f = open('artifacts/x', 'w')
        f.write('text')
        threading.Thread(target=lambda: f and time.sleep(60), daemon=True).start()
    """,
    "signal handler": """
        import signal
        f = open('artifacts/x', 'w')
        signal.signal(signal.SIGTERM, lambda *_: f.close())
        f.write('text')
    """,
    "builtin": "import builtins\nbuiltins.f = open('artifacts/x', 'w')\nf.write('text')",
    "exit function": "import atexit\nf = open('artifacts/x', 'w')\natexit.register(f.write, 'text')",
    "standard output": "import sys\nsys.stdout = open('artifacts/x', 'w')\nprint('text', end='')",
    "input of a process": """
        import subprocess
        shell = subprocess.Popen(['sh', '-c', 'cat > artifacts/x'], stdin=subprocess.PIPE)
        shell.stdin.write(b'text')
    """,
    "input of a shell": "import os\nos.popen('cat > artifacts/x', 'w').write('text')",
}  # fmt: skip


@pytest.mark.parametrize("code", UNCLOSED.values(), ids=UNCLOSED)
def test_a_file_that_is_not_closed_is_written(bubblewrap: Local, code: str) -> None:
    assert left_by(bubblewrap, code) == {"x": b"text"}


def test_so_it_is_under_gvisor(gvisor: Local) -> None:
    assert left_by(gvisor, UNCLOSED["open"]) == {"x": b"text"}
    assert left_by(gvisor, UNCLOSED["input of a process"]) == {"x": b"text"}


def test_archives_that_are_not_closed_are_whole(bubblewrap: Local) -> None:
    code = """
        import gzip, zipfile, tempfile
        g = gzip.open('artifacts/g.gz', 'wt')
        g.write('text')
        z = zipfile.ZipFile('artifacts/z.zip', 'w')
        z.writestr('name', 'text')
        t = tempfile.NamedTemporaryFile('w', dir='artifacts', prefix='kept', delete=False)
        t.write('text')
    """
    left = left_by(bubblewrap, code)
    assert gzip.decompress(left.pop("g.gz")) == b"text"
    assert zipfile.ZipFile(io.BytesIO(left.pop("z.zip"))).read("name") == b"text"
    assert list(left.values()) == [b"text"]


def test_a_module_of_the_program_is_released_too(bubblewrap: Local) -> None:
    code = """
        with open('helper.py', 'w') as file:
            file.write("f = open('artifacts/x', 'w')\\n"
                       "class A:\\n    def __del__(self): print('released', len)\\n"
                       "a = A()\\n")
        import helper
        helper.f.write('text')
    """
    result = bubblewrap.run(code)
    assert result.stdout == "released <built-in function len>\n"
    assert [file.content for file in result.artifacts] == [b"text"]


def test_finalisers_and_generators_have_their_turn(bubblewrap: Local) -> None:
    code = """
        names = ['still', 'there']
        class A:
            def __del__(self):
                print('__del__', *names)
        def work():
            try:
                yield 1
            finally:
                print('finally', *names)
        a, generator = A(), work()
        next(generator)
        print('end')
    """
    result = bubblewrap.run(code)
    first, *rest = result.stdout.splitlines()
    assert (first, sorted(rest)) == ("end", ["__del__ still there", "finally still there"])
    assert (result.exit_code, result.stderr) == (0, "")


@pytest.mark.parametrize(
    "stuck",
    ["while True: pass", "time.sleep(60)", "re.match('(a+)+b', 'a' * 60)"],
    ids=["loop", "sleep", "regular expression"],
)
def test_a_finaliser_that_does_not_end_is_cut(bubblewrap: Local, stuck: str) -> None:
    code = f"""
        import re, time
        f = open('artifacts/x', 'w')
        f.write('text')
        class A:
            def __del__(self):
                {stuck}
        a = A()
        def main():
            return 'value'
    """
    result = bubblewrap.run(textwrap.dedent(code), timeout=30)
    assert (result.exit_code, result.result, result.timed_out) == (0, "value", False)
    assert result.execution_time < 20
    assert [file.content for file in result.artifacts] == [b"text"]


@pytest.mark.parametrize(
    "odd",
    [
        "class T(io.TextIOWrapper):\n def flush(s): 1 / 0\nt = T(open('odd', 'wb'))",
        "class T(io.TextIOWrapper):\n buffer = property(lambda s: 1 / 0)\nt = T(open('odd', 'wb'))",
        "class T(io.BufferedWriter):\n def fileno(s): exit(5)\nt = T(io.FileIO('odd', 'w'))",
        "class M:\n def __getattr__(s, n): raise ImportError(n)\nsys.modules['odd'] = M()",
        "class M(type(sys)):\n def __getattribute__(s, n): 1 / 0\nsys.modules['odd'] = M('odd')",
        "del sys.__stdin__, sys.__stdout__",
        "del sys.stdout",
        "import gc\ngc.get_objects = os.listdir = os.fstat = None",
        "import builtins\nbuiltins.filter = builtins.setattr = None",
        "import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))",
    ],
)
def test_what_cannot_be_looked_at_is_no_fault_of_the_program(bubblewrap: Local, odd: str) -> None:
    code = f"import io, os, sys\nf = open('artifacts/x', 'w')\nf.write('text')\n{odd}\na = [1]"
    result = bubblewrap.run(code, timeout=30)
    assert (result.exit_code, result.stderr) == (0, "")
    assert [file.content for file in result.artifacts] == [b"text"]


def test_the_end_counts_to_the_deadline(bubblewrap: Local) -> None:
    code = "import atexit, time\natexit.register(time.sleep, 60)\nprint('before')"
    result = long_enough(
        lambda seconds: bubblewrap.run(code, timeout=seconds),
        lambda result: bool(result.stdout),
        1,
    )
    assert (result.timed_out, result.stdout) == (True, "before\n")


def test_what_c_code_has_printed_is_there(bubblewrap: Local) -> None:
    code = "import ctypes\nctypes.CDLL(None).printf(b'text')"
    assert bubblewrap.run(code).stdout == "text"


def test_a_crash_of_a_finaliser_is_the_programs(bubblewrap: Local) -> None:
    code = "import os\nclass A:\n    def __del__(self): os.abort()\na = A()"
    assert bubblewrap.run(code).exit_code == 134


@pytest.mark.parametrize("code", ["printf text > >(cat > artifacts/x)", "exec > >(cat > artifacts/x)\nprintf text"])  # fmt: skip
def test_pipes_of_a_shell_are_read_to_their_end(bubblewrap: Local, code: str) -> None:
    assert left_by(bubblewrap, code, "bash") == {"x": b"text"}


def test_a_process_that_waits_for_nothing_does_not_hold_the_answer_up(bubblewrap: Local) -> None:
    result = bubblewrap.run("import subprocess\nsubprocess.Popen(['sleep', '600'])", timeout=30)
    assert (result.exit_code, result.timed_out) == (0, False)
    bubblewrap.assert_nothing_is_left()


WITHOUT_NEWLINE = {
    "python": "print('text', end='')",
    "python bytes": "import sys\nsys.stdout.buffer.write(b'text')",
    "python stream": "import sys\nsys.stdout.write('text')",
    "nodejs": "process.stdout.write('text')",
    "bash": "printf text",
}
ENDS = {
    "python": {
        "os._exit": ("import os; os._exit(3)", 3),
        "crash": ("import os; os.kill(os.getpid(), 11)", 139),
        "deadline": ("import time; time.sleep(60)", None),
    },
    "nodejs": {
        "exit": ("process.reallyExit(3)", 3),
        "crash": ("process.kill(process.pid, 'SIGSEGV')\nwhile (true);", 139),
        "deadline": ("while (true);", None),
    },
    "bash": {
        "crash": ("kill -SEGV $$", 139),
        "deadline": ("sleep 60", None),
    },
}


@pytest.mark.parametrize(
    ("language", "code", "exit_code"),
    [
        pytest.param(name.split()[0], f"{write}\n{end}", exit_code, id=f"{name} {how}")
        for name, write in WITHOUT_NEWLINE.items()
        for how, (end, exit_code) in ENDS[name.split()[0]].items()
    ],
)
def test_text_without_a_newline_is_there_however_the_run_ends(
    bubblewrap: Local, language: str, code: str, exit_code: int | None
) -> None:
    if language == "nodejs":
        require("node")
    result = long_enough(
        lambda seconds: bubblewrap.run(code, language, timeout=seconds),
        lambda result: bool(result.stdout),
        2,
    )
    assert (result.stdout, result.exit_code) == ("text", exit_code)


def test_text_without_a_newline_is_there_when_memory_runs_out(bubblewrap: Local) -> None:
    code = "print('text', end='')\nx = []\nwhile True: x.append(b'x' * (1 << 24))"
    result = bubblewrap.run(code, timeout=30)
    assert (result.stdout, result.exit_code == 0, result.timed_out) == ("text", False, False)


def test_print_writes_as_before(bubblewrap: Local) -> None:
    code = r"""
        import io, pickle, sys
        print()
        print(1, None, 'é', sep='-', end='|\n')
        print('a', 'b', sep=None, end=None)
        print('to a file', file=(text := io.StringIO()))
        print(text.getvalue(), end='')
        print(pickle.loads(pickle.dumps(print)) is print, print)
        class Own:
            def write(self, text): sys.__stdout__.write(f'<{text}>')
        sys.stdout = Own()
        print('x', end='')
        sys.stdout = sys.__stdout__
        print()
        for wrong in ({'sep': 1}, {'end': 1}, {'nope': 1}):
            try:
                print('x', **wrong)
            except TypeError as error:
                print(type(error).__name__)
        print('error', file=sys.stderr, end='')
    """
    result = bubblewrap.run(code)
    assert result.stdout == (
        "\n1-None-é|\na b\nto a file\nTrue <built-in function print>\n<x><>\n"
        "TypeError\nTypeError\nTypeError\n"
    )
    assert result.stderr == "error"


def test_what_print_raises_has_the_callers_own_frames_alone(bubblewrap: Local) -> None:
    code = "class A:\n    def __str__(self): 1 / 0\nprint(A())"
    result = bubblewrap.run(code)
    assert "_cofferdam" not in result.stderr
    assert [line for line in result.stderr.splitlines() if line.startswith("  File")] == [
        '  File "main.py", line 3, in <module>',
        '  File "main.py", line 2, in __str__',
    ]
    assert result.exception is not None
    assert result.exception["traceback"] == result.stderr


def test_lines_of_threads_do_not_mix(bubblewrap: Local) -> None:
    code = """
        import threading
        def work(name):
            for number in range(200):
                print(name, number, name)
        threads = [threading.Thread(target=work, args=(name,)) for name in 'abcd']
        for thread in threads: thread.start()
        for thread in threads: thread.join()
    """
    lines = bubblewrap.run(code).stdout.splitlines()
    assert sorted(lines) == sorted(f"{n} {i} {n}" for n in "abcd" for i in range(200))
