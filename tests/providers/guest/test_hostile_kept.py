"""What a program in a kept sandbox does to be believed, to stay, or to hold up the others."""

from __future__ import annotations

import os
import time

import pytest

from providers.runtime.guest.capture import ORDER_LIMIT, Order
from providers.runtime.guest.protocol import STOP_SECONDS
from tests.support.kept_guest import Guests, KeptGuest
from tests.support.process_bounds import bound_on_processes

# How much later than it must a context may be lost on a busy machine.
MARGIN = 40.0


def other_works(kept: KeptGuest) -> None:
    """A second context is undisturbed, and so is the first after what became of it."""
    kept.ask("context.create", language="python", context="other")
    assert kept.run("'other'", context="other").shown == ["'other'"]
    assert kept.run("'here'").shown == ["'here'"]


@pytest.mark.parametrize(
    "code",
    [
        "def f():\n    try:\n        while True: time.sleep(0.01)\n    except BaseException:\n        f()\nimport time\nf()",
        "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nwhile True: pass",
        "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)",
        "import os\nos.closerange(3, 256)\nwhile True: pass",
    ],
)
def test_what_will_not_stop_loses_its_context(kept: KeptGuest, code: str) -> None:
    kept.run("x = 1")
    began = time.monotonic()
    late = kept.run(code, timeout=0.3)

    assert time.monotonic() - began < 0.3 + STOP_SECONDS + MARGIN
    assert (late.exit_code, late.header["timed_out"], late.context_kept) == (None, True, False)
    assert "NameError" in kept.run("x").stderr
    other_works(kept)


def test_what_will_not_be_interrupted_loses_its_context_and_its_descendants(
    kept: KeptGuest,
) -> None:
    number = kept.begin_run(
        """
        import signal, subprocess, time
        subprocess.Popen(['sleep', '4321'])
        subprocess.Popen(['sh', '-c', 'trap "" INT TERM; while :; do sleep 0.1; done'])
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        print('deaf', flush=True)
        while True: time.sleep(1)
        """
    )
    kept.read_until(lambda: bool(kept.events(number)))
    kept.ask("interrupt", target="default")
    lost = kept.wait(number)

    assert (lost.exit_code, lost.context_kept) == (130, False)
    left = kept.run(
        "import os\n[p for p in os.listdir('/proc') if p.isdigit() and b'sleep' in open(f'/proc/{p}/cmdline', 'rb').read()]"
    )
    assert left.shown == ["[]"]


def test_a_loss_that_nobody_heard_of_is_told_with_the_next_run(kept: KeptGuest) -> None:
    """A run that was given up, as when its caller has left, has no one to be told."""
    deaf = "import signal, time\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nprint('deaf', flush=True)\nwhile True: time.sleep(1)"
    kept.run("x = 1")
    number = kept.begin_run(deaf)
    kept.read_until(lambda: bool(kept.events(number)))
    kept.send({"op": "stop", "target": number})
    assert kept.wait(number).context_kept is False
    # Nor does one that is given up as well take the news with it.
    number = kept.begin_run("print('here', flush=True)\nimport time; time.sleep(60)")
    kept.read_until(lambda: bool(kept.events(number)))
    kept.send({"op": "stop", "target": number})
    kept.wait(number)

    assert kept.run("'x' in globals()").context_kept is False
    assert kept.run("1").context_kept is True


def test_reports_of_an_older_run_are_dropped(kept: KeptGuest) -> None:
    """A fork of the first run answers again and again, in the words of the runner."""
    kept.run(
        """
        import gc, os, sys, time
        outputs = next(o for o in gc.get_objects() if type(o).__name__ == 'Outputs')
        wire = sys.modules['_cofferdam.wire']
        frame = wire.pack({'type': 'done', 'number': outputs.mark['number'], 'exit_code': 42}, [('result', b'"forged"')])
        shown = wire.pack({'type': 'output', **outputs.mark}, [('text/plain', b'forged')])
        if os.fork() == 0:
            while True:
                os.write(4, shown + frame)
                time.sleep(0.001)
        """
    )
    for _ in range(10):
        ran = kept.run("'true'")
        assert (ran.exit_code, ran.result, ran.shown) == (0, "", ["'true'"])


def test_a_run_that_forges_its_own_end_gains_no_time(kept: KeptGuest) -> None:
    """What it says of itself is believed; it is stopped where the next run meets its deadline."""
    forged = kept.run(
        """
        import gc, os, sys
        outputs = next(o for o in gc.get_objects() if type(o).__name__ == 'Outputs')
        outputs.report(sys.modules['_cofferdam.wire'].pack({'type': 'done', 'exit_code': 0, **outputs.mark}, []))
        while True:
            try:
                while True: outputs._process
            except KeyboardInterrupt: outputs._process
        """
    )
    following = kept.run("'too late'", timeout=0.3)

    assert forged.exit_code == 0
    assert (following.header["timed_out"], following.context_kept, following.shown) == (
        True,
        False,
        [],
    )
    other_works(kept)


def test_whoever_kills_all_others_is_told_of(kept: KeptGuest) -> None:
    kept.ask("context.create", language="python", context="victim")
    kept.run("x = 1", context="victim")

    assert kept.run("import os; os.kill(-1, 9)").exit_code == 0
    # Its first run may still be given to what is about to end.
    assert kept.run("1", context="victim").context_kept is False
    assert kept.run("'x' in globals()", context="victim").shown == ["False"]


def test_a_report_for_another_context_is_nobodys(kept: KeptGuest) -> None:
    kept.ask("context.create", language="python", context="victim")
    running = kept.begin_run("import time; time.sleep(0.5); 'own'", context="victim")
    kept.run(
        """
        import os, sys
        wire = sys.modules['_cofferdam.wire']
        for pid in os.listdir('/proc'):
            if pid.isdigit():
                for fd in range(64):
                    try:
                        target = os.open(f'/proc/{pid}/fd/{fd}', os.O_WRONLY | os.O_NONBLOCK)
                        os.write(target, wire.pack({'type': 'done', 'number': 0, 'exit_code': 42}, []))
                    except OSError:
                        pass
        """
    )
    # Whoever shares a user can spoil the other's pipe, but not speak with its voice.
    first, then = kept.wait(running), kept.run("'own'", context="victim")
    assert 42 not in (first.exit_code, then.exit_code)
    # Whose job was spoilt has lost its context with that run. The next has a new one.
    kept.run("1")
    assert kept.run("'own'", context="victim").shown == ["'own'"]
    assert kept.run("1").exit_code == 0


def test_rubbish_on_the_report_costs_the_context_alone(kept: KeptGuest) -> None:
    ran = kept.run("import os\nos.write(4, b'\\xff' * 100)\nwhile True: pass")

    assert (ran.exit_code, ran.context_kept, ran.header["timed_out"]) == (137, False, False)
    other_works(kept)


def test_an_endless_result_costs_the_context_alone(kept: KeptGuest) -> None:
    ran = kept.run(
        """
        import os
        head = b'{"type":"done","parts":[["result",900000000]]}'
        os.write(4, len(head).to_bytes(4, 'big') + head)
        while True: os.write(4, b'x' * 65536)
        """
    )

    assert (ran.exit_code, ran.context_kept) == (137, False)
    other_works(kept)


@pytest.mark.parametrize("code", ["import os\nos.closerange(3, 256)", "import os\nos._exit(7)"])
def test_a_program_that_cuts_itself_off_loses_its_context_at_once(
    kept: KeptGuest, code: str
) -> None:
    began = time.monotonic()
    ran = kept.run(code)

    assert time.monotonic() - began < MARGIN
    assert (ran.exit_code, ran.context_kept) == (7 if "_exit" in code else 0, False)
    other_works(kept)


def test_replaced_builtins_and_calls_are_the_programs_own_loss(kept: KeptGuest) -> None:
    kept.run(
        """
        import builtins, os
        def broken(*_, **__): raise RuntimeError('broken')
        for name in ('write', 'read', 'fstat', 'getpid', '_exit', 'fork'): setattr(os, name, broken)
        for name in ('len', 'map', 'open', 'repr', 'isinstance', 'print', 'eval', 'compile'): setattr(builtins, name, broken)
        """,
        timeout=1,
    )
    kept.run("1", timeout=1)
    kept.ask("context.restart", context="default")
    other_works(kept)


def test_a_context_that_dies_between_runs_is_told_of(kept: KeptGuest) -> None:
    kept.ask("context.create", language="python", context="other")
    (number,) = kept.run("x = 1\nimport os; os.getpid()").shown
    kept.run(
        f"import os, time; os.kill({number}, 9)\nwhile os.path.exists('/proc/{number}'): time.sleep(0.01)",
        context="other",
        timeout=60,
    )
    ran = kept.run("'x' in globals()")

    assert (ran.shown, ran.context_kept) == (["False"], False)
    assert kept.run("1").context_kept is True


def test_output_without_end_between_runs_holds_up_nothing(kept: KeptGuest) -> None:
    kept.run(
        """
        import os, threading
        def flood():
            while True: os.write(2, b'y' * 4096)
        threading.Thread(target=flood, daemon=True).start()
        """
    )
    for _ in range(5):
        ran = kept.run("print('said')", limits={"output_bytes": 10_000})
        assert (ran.stdout, ran.exit_code) == ("said\n", 0)
        assert len(ran.stderr) <= 10_000


def test_one_stream_is_read_while_the_other_floods(kept: KeptGuest) -> None:
    ran = kept.run(
        "import sys\nfor _ in range(200): sys.stderr.write('e' * 10_000)\nprint('end')",
        limits={"output_bytes": 10_000},
    )

    assert (ran.stdout, len(ran.stderr)) == ("end\n", 10_000)


def test_turns_between_the_streams_are_told_up_to_a_bound() -> None:
    order = Order()
    for turn in range(5000):
        order.add(1 + turn % 2, 3)

    assert order.entries[:2] == [[1, 3], [2, 3]]
    assert (len(order.entries), order.is_cut) == (ORDER_LIMIT, True)


@pytest.mark.parametrize(
    "code",
    [
        "import threading, time\nfor _ in range(10_000): threading.Thread(target=time.sleep, args=(60,), daemon=True).start()",
        "import os, time\nfor _ in range(10_000):\n    if os.fork() == 0:\n        time.sleep(60); os._exit(0)",
    ],
)
def test_ten_thousand_of_anything_end_at_the_bound(kept: KeptGuest, code: str) -> None:
    assert kept.run(code).exit_code == 1

    kept.ask("reset")
    other_works(kept)


@pytest.mark.parametrize("counted", [True, False])
def test_used_up_memory_costs_the_context_that_uses_it(
    guests: Guests, monkeypatch: pytest.MonkeyPatch, counted: bool
) -> None:
    """Where no cgroup counts it the supervisor looks, and says so; else the kernel's host knows."""
    if not counted:
        monkeypatch.setattr(guests.launcher, "_cgroups", None)
    elif guests.launcher._cgroups is None:  # type: ignore[attr-defined]
        pytest.skip("needs the right to cgroups")
    kept = guests.kept(memory_bytes=128 * 2**20)
    kept.ask("context.create", language="python", context="other")
    kept.run("y = 'kept'", context="other")
    ran = kept.run("x = bytearray(100 * 2**20)\nwhile True: x += bytes(2**20)", timeout=60)

    assert ran.header["out_of_memory"] is not counted
    assert (ran.exit_code, ran.context_kept) == (137 if counted else None, False)
    assert kept.run("y", context="other").shown == ["'kept'"]
    assert kept.run("1").shown == ["1"]


def test_an_input_file_in_whose_way_a_pipe_stands_holds_up_one_run(kept: KeptGuest) -> None:
    kept.run("import os; os.mkfifo('in'); x = 1")
    late = kept.run("'not run'", ("file:in", b"data"), timeout=0.3)

    assert (late.header["timed_out"], late.context_kept, late.shown) == (True, True, [])
    assert kept.run("x").shown == ["1"]


def test_whoever_writes_an_input_file_holds_no_way_to_the_host(kept: KeptGuest) -> None:
    kept.ask("context.create", language="python", context="other")
    kept.run("import os; os.mkfifo('in')")
    writing = kept.begin_run("None", ("file:in", b"data"), timeout=2)
    seen = kept.run(
        """
        import os, time
        def links():
            for pid in os.listdir('/proc'):
                try:
                    for fd in os.listdir(f'/proc/{pid}/fd'):
                        yield os.readlink(f'/proc/{pid}/fd/{fd}')
                except OSError: continue
        found = set()
        for _ in range(30):
            found.update(links()); time.sleep(0.01)
        sorted(link for link in found if link.startswith('socket:'))
        """,
        context="other",
    )

    assert seen.shown == ["[]"]
    assert kept.wait(writing).header["timed_out"] is True


def test_an_input_file_that_cannot_be_written_is_refused(kept: KeptGuest) -> None:
    kept.run("import os; os.mkdir('in')")
    refused = kept.run("1", ("file:in", b"data"))

    assert (refused.failed, refused.header["field"]) == (True, "files")
    assert kept.run("1").shown == ["1"]


def test_an_input_file_that_no_process_is_left_to_write_costs_that_run_alone(
    guests: Guests,
) -> None:
    kept = guests.kept()
    kept.run("x = 1")
    (pid,) = guests.supervisors()
    with bound_on_processes(pid) as bound:
        before = os.listdir(f"/proc/{pid}/fd")
        bound("now")
        refused = kept.run("x", ("file:in", b"data"), timeout=0.1)
        bound("max")
        left = os.listdir(f"/proc/{pid}/fd")
    assert (refused.failed, refused.header["code"]) == (True, "exhausted")
    assert left == before
    # For longer than what was refused might have gone on.
    code = f"import time; time.sleep({STOP_SECONDS + 0.5}); x"
    assert kept.run(code, ("file:in", b"data")).shown == ["1"]


def test_artifacts_that_change_while_they_are_taken_lead_nowhere(kept: KeptGuest) -> None:
    kept.run(
        """
        import os, threading
        os.makedirs('artifacts/d'); os.makedirs('other'); os.makedirs('hidden')
        open('hidden/secret', 'w').write('secret')
        def swap():
            while True:
                try:
                    os.rename('artifacts/d', 'other/d'); os.symlink('../hidden', 'artifacts/d')
                    os.unlink('artifacts/d'); os.rename('other/d', 'artifacts/d')
                    os.mkfifo('artifacts/pipe'); os.unlink('artifacts/pipe')
                    open('artifacts/pipe', 'w').close(); os.unlink('artifacts/pipe')
                except OSError: pass
        threading.Thread(target=swap, daemon=True).start()
        """
    )
    for _ in range(15):
        ran = kept.run("None")
        assert ran.exit_code == 0
        assert not any(b"secret" in content for content in ran.artifacts.values())
