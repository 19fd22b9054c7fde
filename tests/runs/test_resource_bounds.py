"""Processes, memory and disk are bounded, and running into a bound has the right verdict."""

from __future__ import annotations

import pytest

from tests.conftest import require
from tests.support.sandboxes import Local, long_enough


@pytest.mark.parametrize(
    ("language", "code"),
    [
        (
            "python",
            "import os\nprint('before')\nwhile True:\n    try: os.fork()\n    except OSError: pass",
        ),
        ("bash", "echo before; f() { f | f & }; while :; do f; done"),
    ],
)
def test_a_fork_bomb_is_bounded_and_timed_out(bubblewrap: Local, language: str, code: str) -> None:
    result = long_enough(
        lambda seconds: bubblewrap.survive(code, language, timeout=seconds),
        lambda result: bool(result.stdout),
        1,
    )
    assert result.timed_out or result.exit_code != 0
    assert result.stdout.startswith("before\n")


def test_processes_are_bounded(bubblewrap: Local) -> None:
    code = """
        import os, time
        started = 0
        try:
            for _ in range(200):
                if os.fork() == 0:
                    time.sleep(100)
                started += 1
        except OSError as error:
            print(started, error.errno)
    """
    result = bubblewrap.survive(code)
    started, number = result.stdout.split()
    assert 40 < int(started) < 64
    assert int(number) == 11


def test_gvisor_survives_a_fork_bomb(gvisor: Local) -> None:
    code = """
        import os
        while True:
            try: os.fork()
            except OSError: pass
    """
    result = gvisor.survive(code, timeout=1)
    assert result.timed_out or result.out_of_memory


MEMORY_BOMBS = {
    "one process": ("python", "kept = []\nwhile True: kept.append(b'x' * 5_000_000)"),
    "children": (
        "python",
        """
        import os, sys, time
        children = []
        for _ in range(20):
            pid = os.fork()
            if pid == 0:
                kept = b"x" * 40_000_000
                time.sleep(5)
                os._exit(0)
            children.append(pid)
        sys.exit(any(os.waitpid(child, 0)[1] for child in children))
        """,
    ),
    "shared mapping": ("python", "import mmap\nm = mmap.mmap(-1, 1 << 30)\nwhile True: m.write(b'x' * 1_000_000)"),
    "javascript buffers": ("nodejs", "const kept = []; for (;;) kept.push(Buffer.alloc(5e6, 1))"),
    "javascript objects": ("nodejs", "const kept = []; for (;;) kept.push({ a: [1, 2, 3], b: {} })"),
}  # fmt: skip


@pytest.mark.parametrize(("language", "code"), MEMORY_BOMBS.values(), ids=MEMORY_BOMBS)
def test_using_too_much_memory_is_the_verdict(bubblewrap: Local, language: str, code: str) -> None:
    if language == "nodejs":
        require("node")
    result = bubblewrap.survive(code, language)
    assert (result.out_of_memory, result.timed_out, result.exit_code) == (True, False, None)


def test_gvisor_sees_too_much_memory_in_use(gvisor: Local) -> None:
    result = gvisor.survive("kept = []\nwhile True: kept.append(b'x' * 5_000_000)")
    assert (result.out_of_memory, result.timed_out, result.exit_code) == (True, False, None)


def test_memory_that_is_only_asked_for_is_no_offence(bubblewrap: Local) -> None:
    result = bubblewrap.run("import mmap\nm = mmap.mmap(-1, 1 << 30)\nprint(len(m))")
    assert (result.exit_code, result.stdout) == (0, f"{1 << 30}\n")


def test_a_huge_allocation_is_a_memory_error_of_the_program(bubblewrap: Local) -> None:
    result = bubblewrap.run("print('before')\nx = bytearray(1 << 40)")
    assert (result.exit_code, result.stdout) == (1, "before\n")
    assert "MemoryError" in result.stderr


@pytest.mark.parametrize("folder", ["/workspace", "/tmp", "/dev/shm"])
def test_a_full_disk_is_an_error_of_the_program(local: Local, folder: str) -> None:
    code = f"""
        written = 0
        try:
            for number in range(4):
                with open(f"{folder}/{{number}}", "wb") as file:
                    for _ in range(30):
                        written += file.write(b"x" * 1_000_000)
        except OSError as error:
            print(error.errno, written)
    """
    result = local.survive(code)
    number, written = result.stdout.split()
    assert int(number) == 28
    assert 90_000_000 < int(written) < 106_000_000


def test_all_places_together_cannot_hold_more_than_the_memory(bubblewrap: Local) -> None:
    code = """
        for folder in ("/workspace", "/tmp", "/dev/shm"):
            for number in range(3):
                with open(f"{folder}/{number}", "wb") as file:
                    for _ in range(32):
                        file.write(b"x" * 1_000_000)
    """
    result = bubblewrap.survive(code)
    assert (result.out_of_memory, result.exit_code) == (True, None)


def test_a_file_cannot_grow_without_end(bubblewrap: Local) -> None:
    code = """
        with open("/tmp/large", "wb", buffering=0) as file:
            try:
                while True: file.write(b"x" * 1_000_000)
            except OSError as error:
                print(error.errno, file.tell())
    """
    result = bubblewrap.run(code)
    number, size = result.stdout.split()
    assert (int(number), int(size)) == (27, 64 * 1024 * 1024)
