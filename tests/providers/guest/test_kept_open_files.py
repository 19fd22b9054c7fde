"""What a cell leaves open: others see what was written to it, and it is closed with its context."""

from __future__ import annotations

import gzip
import time

import pytest

from tests.conftest import require
from tests.support.kept_guest import Guests, KeptGuest


@pytest.mark.parametrize(
    "write",
    [
        "f = open('artifacts/x', 'w')\nf.write('text')",
        "f = open('artifacts/x', 'wb')\nf.write(b'text')",
        "import csv\nf = open('artifacts/x', 'w', newline='')\ncsv.writer(f).writerow(['text'])",
        "f = open('artifacts/x', 'w')\nf.write('text')\n1 / 0",
        "f = open('artifacts/x', 'w')\nf.write('text')\nexit()",
    ],
    ids=["text", "binary", "csv", "exception", "exit"],
)
def test_a_file_that_stays_open_is_an_artifact(kept: KeptGuest, write: str) -> None:
    first = kept.run(write)
    assert first.artifacts["x"].strip() == b"text"
    second = kept.run("f.write(b'!' if 'b' in f.mode else '!')\nf.closed")
    assert second.shown == ["False"]
    assert second.artifacts["x"].split() in ([b"text!"], [b"text", b"!"])


def test_what_is_written_between_cells_is_not_lost_with_the_context(kept: KeptGuest) -> None:
    kept.ask("context.create", context="other", language="python")
    code = """
        import gzip
        class A:
            def __del__(self): open('released', 'w').write('text')
        a = A()
        g = gzip.open('g.gz', 'wt')
        g.write('text')
        import atexit
        atexit.register(lambda: open('exit', 'w').write('text'))
    """
    assert kept.run(code, context="other").exit_code == 0
    assert kept.ask("context.destroy", context="other").header["found"] is True
    listed = "import os; sorted(os.listdir())"
    assert kept.run(listed).shown == ["['artifacts', 'exit', 'g.gz', 'released']"]
    content = kept.run("import gzip; gzip.open('g.gz', 'rt').read()")
    assert content.shown == ["'text'"]


def test_a_restart_ends_a_context_as_a_program(kept: KeptGuest) -> None:
    kept.run("class A:\n    def __del__(self): open('released', 'w').write('text')\na = A()")
    assert not kept.ask("context.restart", context="default").failed
    assert kept.run("open('released').read()").shown == ["'text'"]


def test_an_end_that_takes_too_long_is_cut(kept: KeptGuest) -> None:
    kept.run("import threading, time\nthreading.Thread(target=time.sleep, args=(600,)).start()")
    began = time.monotonic()
    assert not kept.ask("context.restart", context="default").failed
    assert time.monotonic() - began < 20
    assert kept.run("1 + 1").shown == ["2"]


def test_a_run_may_come_while_its_context_ends(kept: KeptGuest) -> None:
    kept.run("import atexit, time\natexit.register(time.sleep, 600)\nx = 1")
    restarted = kept.begin("context.restart", context="default")
    assert "NameError" in kept.run("x").stderr
    assert not kept.wait(restarted).failed


def test_text_without_a_newline_is_streamed_at_once(guests: Guests) -> None:
    languages = {
        "python": ("print('text', end='')\nimport time; time.sleep(600)"),
        "bash": "printf text; sleep 600",
        "nodejs": "process.stdout.write('text'); await new Promise(() => setInterval(() => 0, 1e6))",
    }
    require("node")
    kept = guests.kept()
    for language, code in languages.items():
        kept.ask("context.create", context=language, language=language)
        number = kept.begin_run(code, context=language, timeout=60)
        kept.read_until(lambda number=number: bool(kept.events(number)))  # type: ignore[misc]
        header, parts = kept.events(number)[0]
        assert (header["event"], parts) == ("stdout", {"data": b"text"})
        kept.ask("interrupt", target=language)
        assert kept.wait(number).stdout == "text"


def test_a_gzip_file_that_is_open_is_not_changed_by_other_cells(kept: KeptGuest) -> None:
    kept.run("import gzip\ng = gzip.open('g.gz', 'wb')\ng.write(b'text')")
    for _ in range(3):
        kept.run("g.write(b'text')")
    kept.run("g.close()")
    data = kept.run("open('g.gz', 'rb').read().hex()").shown[0].strip("'")
    assert gzip.decompress(bytes.fromhex(data)) == b"text" * 4
