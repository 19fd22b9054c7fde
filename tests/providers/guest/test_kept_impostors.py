"""Programs of one kept sandbox have one user. None of them can speak with another's voice."""

from __future__ import annotations

import ctypes

import pytest

from providers.runtime.guest.protocol import CREDIT
from providers.runtime.pool.kept import Kept
from providers.values import ExecutionResult, Job
from tests.support.docker_engine import Containers
from tests.support.kept_guest import KeptGuest

if ctypes.CDLL(None).syscall(444, None, 0, 1) < 2:
    pytest.skip("needs a kernel with Landlock", allow_module_level=True)

# Takes the job of every other interpreter out of its pipe, and answers in its place.
THIEF = """
import os, re, sys, threading, time
wire = sys.modules['_cofferdam.wire']
def others():
    return [pid for pid in os.listdir('/proc') if pid.isdigit() and int(pid) not in (1, os.getpid())]
def forge(pid, job):
    number = int(re.search(rb'"number":([0-9]+)|^([0-9]+) ', job).group().strip(b'"number: '))
    for fd in os.listdir(f'/proc/{pid}/fd'):
        if os.readlink(f'/proc/{pid}/fd/{fd}').startswith('pipe:') and int(fd) > 3:
            voice = os.open(f'/proc/{pid}/fd/{fd}', os.O_WRONLY | os.O_NONBLOCK)
            os.write(voice, wire.pack({'type': 'began', 'number': number}, []))
            os.write(voice, wire.pack({'type': 'done', 'number': number, 'exit_code': 42}, []))
def steal():
    while True:
        for pid in others():
            for fd in (3, 250):
                try:
                    pipe = os.open(f'/proc/{pid}/fd/{fd}', os.O_RDONLY | os.O_NONBLOCK)
                    try:
                        if job := os.read(pipe, 65536): forge(pid, job)
                    finally:
                        os.close(pipe)
                except OSError: pass
threading.Thread(target=steal, daemon=True).start()
"""
# What of other programs can be opened.
OPENS = """
import os
found = set()
for pid in os.listdir('/proc'):
    if pid.isdigit() and int(pid) not in (1, os.getpid()):
        for name in ('mem', 'environ', 'fd/1', 'fd/3', 'fd/4', 'fd/250', 'fd/251'):
            for flag in (os.O_RDONLY, os.O_WRONLY):
                try: os.close(os.open(f'/proc/{pid}/{name}', flag | os.O_NONBLOCK))
                except OSError: continue
                found.add(name)
print(*found)
"""
ENDS = {"python": "exit(7)", "nodejs": "process.exit(7)", "bash": "exit 7"}


@pytest.mark.parametrize("language", ENDS)
def test_no_context_answers_for_another(kept: KeptGuest, language: str) -> None:
    kept.ask("context.create", language=language, context="victim")
    kept.run(THIEF)
    for _ in range(5):
        assert kept.run(ENDS[language], context="victim").exit_code == 7


def test_no_context_reads_or_changes_the_memory_of_another(kept: KeptGuest) -> None:
    for language in ENDS:
        kept.ask("context.create", language=language, context=language)
    assert kept.run(OPENS).stdout == "\n"


def test_no_program_prints_in_the_name_of_another(kept: KeptGuest) -> None:
    pid = kept.ask("spawn", shell="read line", stdin=True).header["pid"]
    kept.run(
        """
        import os
        for pid in os.listdir('/proc'):
            if pid.isdigit() and int(pid) not in (1, os.getpid()):
                try: os.write(os.open(f'/proc/{pid}/fd/1', os.O_WRONLY | os.O_NONBLOCK), b'forged')
                except OSError: continue
        """
    )
    kept.ask("stdin", ("data", b"end\n"), pid=pid, close=True)
    assert kept.wait(kept.begin("follow", pid=pid, credit=CREDIT)).events == []


def test_what_a_program_has_started_is_its_own(kept: KeptGuest) -> None:
    """It may still look into its children, and move files between folders."""
    ran = kept.run(
        """
        import os, subprocess
        child = subprocess.Popen(['sleep', '60'], env={'A': 'own'})
        while b'sleep' not in open(f'/proc/{child.pid}/cmdline', 'rb').read(): pass
        seen = open(f'/proc/{child.pid}/environ').read()
        child.kill()
        os.makedirs('a/b'); open('a/b/file', 'w').close(); os.rename('a/b/file', 'file'); os.link('file', 'a/file')
        open('/dev/stdout', 'w').write('said'); os.rename('file', 'a/b/again')
        seen
        """
    )
    assert (ran.shown, ran.stdout) == (["'A=own\\x00'"], "said")


def test_in_a_container_no_context_speaks_for_another(containers: Containers) -> None:
    """Under gVisor, which has no Landlock, they are kept from the pipes all the same. The
    environment of another is read: docs/security.md."""
    sandbox, call = containers.start(), containers.loop.call
    try:
        kept = call(Kept.open(sandbox, {}, {"python": ["/usr/bin/python3"], "bash": ["/bin/bash"]}))

        def run(code: str, context: str = "default") -> ExecutionResult:
            return call(kept.run(Job(code, context=context), lambda frame: None))

        for language in ("python", "bash"):
            call(kept.ask("context.create", {"language": language, "context": language}))
        opened = set(run(OPENS).stdout.split())
        under_gvisor = containers.settings.runtime == "runsc"
        assert opened <= ({"environ"} if under_gvisor else set())
        run(THIEF)
        for language in ("python", "bash"):
            assert [run(ENDS[language], language).exit_code for _ in range(3)] == [7] * 3
    finally:
        call(sandbox.destroy())
