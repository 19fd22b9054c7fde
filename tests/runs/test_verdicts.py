"""However a program ends, its verdict is right, comes in time, and nothing of it is left."""

from __future__ import annotations

import resource

import pytest

from providers.values import ExecutionResult
from tests.conftest import require
from tests.support.sandboxes import GRACE_SECONDS, Local, long_enough

ENDLESS = {
    "loop": "print('before')\nwhile True: pass",
    "sleep": "print('before')\nimport time\ntime.sleep(1000)",
    "ignores every signal": """
        import signal, time
        print("before")
        for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
            signal.signal(number, signal.SIG_IGN)
        while True:
            time.sleep(1)
    """,
    "thread that never ends": """
        import threading, time
        print("before")
        threading.Thread(target=lambda: time.sleep(1000)).start()
    """,
    "stopped by itself": "print('before')\nimport os\nos.kill(os.getpid(), 19)",
    "children that ignore SIGTERM": """
        import os, signal, time
        print("before")
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        for _ in range(5):
            if os.fork() == 0:
                os.setsid()
        while True:
            time.sleep(1)
    """,
}


@pytest.mark.parametrize("code", ENDLESS.values(), ids=ENDLESS)
def test_what_never_ends_is_timed_out_and_keeps_its_output(bubblewrap: Local, code: str) -> None:
    deadlines = []

    def run(seconds: float) -> ExecutionResult:
        deadlines.append(seconds)
        return bubblewrap.survive(code, timeout=seconds)

    result = long_enough(run, lambda result: bool(result.stdout), 0.4)
    assert (result.timed_out, result.out_of_memory, result.exit_code) == (True, False, None)
    assert result.stdout == "before\n"
    assert deadlines[-1] - 0.1 < result.execution_time < deadlines[-1] + GRACE_SECONDS


@pytest.mark.parametrize("name", ["loop", "children that ignore SIGTERM"])
def test_gvisor_times_out_what_never_ends(gvisor: Local, name: str) -> None:
    result = long_enough(
        lambda seconds: gvisor.survive(ENDLESS[name], timeout=seconds),
        lambda result: bool(result.stdout),
        0.6,
    )
    assert (result.timed_out, result.exit_code, result.stdout) == (True, None, "before\n")


@pytest.mark.parametrize(
    ("language", "code"),
    [
        ("bash", "echo before; trap '' TERM; while :; do :; done"),
        ("bash", "echo before; (trap '' TERM HUP; setsid sleep 1000) & sleep 1000"),
        ("nodejs", "console.log('before'); for (;;);"),
        ("nodejs", "console.log('before'); setInterval(() => {}, 1000)"),
        ("nodejs", "console.log('before'); async function main () { await new Promise(() => setInterval(() => {}, 9)) }"),
    ],
)  # fmt: skip
def test_other_languages_are_timed_out_too(bubblewrap: Local, language: str, code: str) -> None:
    if language == "nodejs":
        require("node")
    result = long_enough(
        lambda seconds: bubblewrap.survive(code, language, timeout=seconds),
        lambda result: bool(result.stdout),
        0.6,
    )
    assert (result.timed_out, result.exit_code, result.stdout) == (True, None, "before\n")


DAEMON = """
    import os, time
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.chdir("/")
            os.closerange(0, 64)
            time.sleep(1000)
        os._exit(0)
    os.wait()
    print("main is done")
"""


def test_a_daemon_ends_with_the_program_that_started_it(local: Local) -> None:
    result = local.survive(DAEMON)
    assert (result.exit_code, result.stdout, result.timed_out) == (0, "main is done\n", False)
    assert result.execution_time < 5


def test_a_daemon_of_a_shell_script_ends_with_it(bubblewrap: Local) -> None:
    result = bubblewrap.survive("setsid nohup sleep 1000 & disown; echo done", "bash")
    assert (result.exit_code, result.stdout) == (0, "done\n")


@pytest.mark.parametrize(
    ("language", "code", "exit_code"),
    [
        ("python", "import sys; sys.exit(124)", 124),
        ("python", "import sys; sys.exit(137)", 137),
        ("python", "import sys; sys.exit(256 + 3)", 3),
        ("python", "import sys; sys.exit('a reason')", 1),
        ("python", "raise ValueError", 1),
        ("python", "import os; os._exit(7)", 7),
        ("python", "import os; os.abort()", 134),
        ("python", "import os; os.kill(os.getpid(), 9)", 137),
        ("python", "import os; os.kill(os.getpid(), 15)", 143),
        ("python", "import ctypes; ctypes.string_at(0)", 139),
        ("bash", "exit 124", 124),
        ("bash", "kill -9 $$", 137),
        ("bash", "kill -SEGV $$", 139),
        ("bash", "no-such-command-at-all", 127),
        ("nodejs", "process.exit(124)", 124),
        ("nodejs", "process.exitCode = 137", 137),
        ("nodejs", "process.abort()", 134),
        ("nodejs", "process.kill(process.pid, 'SIGKILL')", 137),
        ("nodejs", "throw new Error('x')", 1),
    ],
)
def test_an_exit_code_is_an_exit_code_and_no_verdict(
    bubblewrap: Local, language: str, code: str, exit_code: int
) -> None:
    if language == "nodejs":
        require("node")
    result = bubblewrap.run(code, language)
    assert result.exit_code == exit_code
    assert not result.timed_out
    assert not result.out_of_memory


@pytest.mark.parametrize(
    ("code", "exit_code"),
    [
        ("import sys; sys.exit(137)", 137),
        ("import ctypes; ctypes.string_at(0)", 139),
        ("import os; os._exit(7)", 7),
    ],
)
def test_gvisor_tells_exit_codes(gvisor: Local, code: str, exit_code: int) -> None:
    result = gvisor.run(code)
    assert (result.exit_code, result.timed_out, result.out_of_memory) == (exit_code, False, False)


def test_infinite_output_is_cut_and_timed_out(local: Local) -> None:
    result = long_enough(
        lambda seconds: local.survive("while True: print('x' * 1000)", timeout=seconds),
        lambda result: result.stdout_truncated,
        0.6,
    )
    assert (result.timed_out, result.stdout_truncated, result.stderr_truncated) == (
        True,
        True,
        False,
    )
    assert len(result.stdout) == 200_000


def test_a_line_of_one_gibibyte_is_cut_and_does_not_fill_our_memory(bubblewrap: Local) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    code = """
        import os
        part = b"x" * (1 << 20)
        for _ in range(1024):
            done = 0
            while done < len(part):
                done += os.write(1, part[done:])
        os.write(2, b"all written")
    """
    result = bubblewrap.survive(code, timeout=30)
    assert (result.exit_code, result.stderr, result.stdout_truncated) == (0, "all written", True)
    assert result.stdout == "x" * 200_000
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 20_000


def test_output_exactly_at_the_bound_is_whole(bubblewrap: Local) -> None:
    result = bubblewrap.run("import sys; sys.stdout.write('x' * 200_000)")
    assert (len(result.stdout), result.stdout_truncated) == (200_000, False)
    result = bubblewrap.run("import sys; sys.stderr.write('x' * 200_001)")
    assert (len(result.stderr), result.stderr_truncated) == (200_000, True)


def test_output_that_is_no_text_is_shown_with_replacements(local: Local) -> None:
    result = local.run(r"import os; os.write(1, b'a\xff\0b\xc3')")
    assert result.stdout == "a��b�"


def test_a_character_at_the_bound_is_not_torn_into_an_error(bubblewrap: Local) -> None:
    result = bubblewrap.run("print('é' * 200_000)")
    assert result.stdout_truncated
    assert set(result.stdout) == {"é"}


def test_standard_input_is_at_its_end(local: Local) -> None:
    result = local.run("import sys\nprint(repr(sys.stdin.read()))\ninput()")
    assert result.stdout == "''\n"
    assert result.exit_code == 1
    assert "EOFError" in result.stderr


def test_a_shell_reads_nothing_from_standard_input(bubblewrap: Local) -> None:
    result = bubblewrap.run('read line; echo "$? [$line]"', "bash")
    assert result.stdout == "1 []\n"


def test_closing_every_descriptor_does_not_change_the_verdict(local: Local) -> None:
    result = local.survive("import os\nprint('before')\nos.closerange(0, 1000)")
    assert (result.exit_code, result.stdout, result.timed_out) == (0, "before\n", False)
    result = local.survive("import os, sys\nos.closerange(0, 1000)\nsys.exit(3)")
    assert result.exit_code == 3


def test_a_program_without_descriptors_still_meets_its_deadline(bubblewrap: Local) -> None:
    result = bubblewrap.survive("import os\nos.closerange(0, 1000)\nwhile True: pass", timeout=0.4)
    assert result.timed_out


@pytest.mark.parametrize("target", ["1", "-1", "0", "os.getppid()"])
def test_killing_whatever_it_can_name_hurts_only_the_program(local: Local, target: str) -> None:
    code = f"""
        import os
        try:
            os.kill({target}, 9)
        except (PermissionError, ProcessLookupError):
            pass
        print("still here")
    """
    result = local.survive(code)
    # With 0 it names its own process group, and under gVisor -1 includes itself.
    alive = (result.exit_code, result.stdout) == (0, "still here\n")
    assert alive or (result.exit_code == 137 and target in ("0", "-1"))
    assert (result.timed_out, result.out_of_memory) == (False, False)


def test_a_forked_child_that_runs_on_to_the_end_reports_nothing(local: Local) -> None:
    code = """
        import os, time
        def main():
            pid = os.fork()
            if pid:
                os.waitpid(pid, 0)
                time.sleep(0.1)
                return "parent"
            return "child"
    """
    result = local.survive(code)
    assert (result.exit_code, result.result) == (0, "parent")


def test_exit_functions_and_threads_run_to_their_end(local: Local) -> None:
    code = """
        import atexit, threading, time
        atexit.register(print, "exit function")
        def work():
            time.sleep(0.2)
            print("thread")
        threading.Thread(target=work).start()
        print("main")
    """
    result = local.run(code)
    assert (result.exit_code, result.stdout) == (0, "main\nthread\nexit function\n")


@pytest.mark.parametrize("end", ["sys.stdout.close()", "sys.stdout = None", "sys.stderr.close()"])
def test_a_program_may_be_done_with_its_output(bubblewrap: Local, end: str) -> None:
    result = bubblewrap.run(f"import sys\nprint('before')\n{end}")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "before\n", "")


@pytest.mark.parametrize(
    "code",
    [
        "import sys; sys.stderr.close(); sys.exit('a reason')",
        "import sys; sys.stderr.close(); 1 / 0",
        "import sys; sys.stderr = None; 1 / 0",
        "import sys\ndef main(): sys.stderr.close(); return {1}",
        "import sys\nsys.excepthook = None\n1 / 0",
        "import os\nos._exit = None\n1 / 0",
    ],
)
def test_a_program_that_breaks_its_own_surroundings_just_fails(
    bubblewrap: Local, code: str
) -> None:
    result = bubblewrap.run(code)
    assert (result.exit_code, result.stdout) == (1, "")
    assert "runner" not in result.stderr
    assert "zygote" not in result.stderr


def test_output_that_cannot_be_written_at_the_end_is_told(bubblewrap: Local) -> None:
    code = (
        "import os, sys\nsys.stdout.reconfigure(line_buffering=False, write_through=False)\n"
        "print('lost')\nos.close(1)"
    )
    result = bubblewrap.run(code)
    assert (result.exit_code, result.stdout) == (120, "")
    assert "Bad file descriptor" in result.stderr
    assert "runner" not in result.stderr


def test_handlers_of_the_end_run_in_javascript(bubblewrap: Local) -> None:
    require("node")
    code = """
        process.on('beforeExit', () => console.log('before exit'))
        process.on('exit', (code) => { for (let i = 0; i < 100; i++) console.log('exit', code) })
        setTimeout(() => console.log('timer'), 50)
        console.log('script')
    """
    result = bubblewrap.run(code, "nodejs")
    assert result.exit_code == 0
    assert result.stdout == "script\ntimer\nbefore exit\n" + "exit 0\n" * 100


def test_an_exit_handler_may_still_change_the_exit_code(bubblewrap: Local) -> None:
    require("node")
    result = bubblewrap.run("process.on('exit', () => { process.exitCode = 9 })", "nodejs")
    assert result.exit_code == 9


def test_all_output_before_an_end_by_error_arrives(bubblewrap: Local) -> None:
    require("node")
    code = "console.log('x'.repeat(150_000)); console.error('y'.repeat(150_000)); null.x"
    result = bubblewrap.run(code, "nodejs")
    assert result.exit_code == 1
    assert result.stdout == "x" * 150_000 + "\n"
    assert result.stderr.startswith("y" * 150_000 + "\n")
    assert "TypeError" in result.stderr


def test_an_exception_in_an_exit_function_is_seen(bubblewrap: Local) -> None:
    result = bubblewrap.run("import atexit\natexit.register(lambda: 1 / 0)")
    assert "ZeroDivisionError" in result.stderr


def test_many_runs_at_once_do_not_mix(bubblewrap: Local) -> None:
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(8) as threads:
        results = list(threads.map(lambda n: bubblewrap.run(f"print({n})").stdout, range(40)))
    assert results == [f"{number}\n" for number in range(40)]
    bubblewrap.assert_nothing_is_left()
