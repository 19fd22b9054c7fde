"""A Python context: what one cell leaves behind is there for the next, whatever became of it."""

from __future__ import annotations

import pytest

from tests.support.kept_guest import Guests, KeptGuest
from tests.support.sandboxes import long_enough


def test_names_stay_and_the_last_value_is_shown(kept: KeptGuest) -> None:
    first = kept.run("x = 20\ndef twice(): return 2 * x\nprint('said')")
    second = kept.run("x += 1\ntwice()")
    third = kept.run("_ + 1")

    assert (first.exit_code, first.stdout, first.shown) == (0, "said\n", [])
    assert (second.stdout, second.shown, second.context_kept) == ("", ["42"], True)
    assert third.shown == ["43"]


def test_an_exception_keeps_the_state_and_names_the_callers_own_lines(kept: KeptGuest) -> None:
    failed = kept.run("before = 1\n\ndef f():\n    return 1 / 0\nf()\n")

    assert (failed.exit_code, failed.context_kept) == (1, True)
    lines = failed.stderr.splitlines()
    assert lines[:3] == [
        "Traceback (most recent call last):",
        '  File "<cell 1>", line 5, in <module>',
        "    f()",
    ]
    assert "python_context" not in failed.stderr
    assert lines[-1] == "ZeroDivisionError: division by zero"
    assert kept.run("before").shown == ["1"]


def test_a_later_cell_can_call_what_fails_in_an_earlier_one(kept: KeptGuest) -> None:
    kept.run("\n\ndef f():\n    raise KeyError('here')")

    assert '"<cell 1>", line 4, in f\n    raise KeyError' in kept.run("f()").stderr


def test_exit_ends_the_cell_alone(kept: KeptGuest) -> None:
    kept.run("x = 1")

    assert kept.run("exit(3)\nprint('not reached')").exit_code == 3
    assert kept.run("import sys; sys.exit('a reason')").stderr == "a reason\n"
    after = kept.run("x")
    assert (after.shown, after.context_kept) == (["1"], True)


def test_main_is_called_only_where_arguments_are_given(kept: KeptGuest) -> None:
    defined = kept.run("def main(a): return [a]")
    called = kept.run("", ("arguments", b'{"a":7}'))
    own = kept.run("async def main(a): return a", ("arguments", b'{"a":8}'))

    assert (defined.result, called.result, own.result) == ("", "[7]", "8")


def test_a_cell_with_arguments_calls_its_own_main_alone(kept: KeptGuest) -> None:
    given = ("arguments", b'{"a":7}')
    kept.run("def main(a): return ['earlier', a]")
    other = kept.run("x = 1", given)
    takes = kept.run("arguments['a']", given)
    guard = kept.run(
        "if True:\n    def main(a): return a\nif __name__ == '__main__': print(main('guard'))",
        given,
    )
    hands_on = kept.run("def main(a): print(a)\nmain(**arguments)", given)

    assert (other.exit_code, other.result) == (1, "")
    assert "the arguments were not used" in other.stderr
    assert (takes.shown, takes.result, takes.exit_code) == (["7"], "", 0)
    assert (guard.result, guard.stdout) == ("7", "")
    assert (hands_on.stdout, hands_on.result) == ("7\n", "")
    assert kept.run("x").shown == ["1"]


def test_await_works_at_the_top_and_tasks_go_on_in_later_cells(kept: KeptGuest) -> None:
    kept.run(
        """
        import asyncio
        async def later():
            await asyncio.sleep(0)
            return 'later'
        made = await asyncio.sleep(0, asyncio.get_running_loop().create_task(later()))
        """
    )

    assert kept.run("await made").shown == ["'later'"]
    assert kept.run("asyncio.run(later())").shown == ["'later'"]


def test_what_subprocesses_and_threads_print_is_captured(kept: KeptGuest) -> None:
    ran = kept.run(
        """
        import subprocess, threading
        subprocess.run(['sh', '-c', 'echo child; echo fault >&2'])
        thread = threading.Thread(target=print, args=('thread',))
        thread.start()
        thread.join()
        """
    )

    assert (ran.stdout, ran.stderr) == ("child\nthread\n", "fault\n")


def test_a_fork_that_runs_on_answers_for_nothing(kept: KeptGuest) -> None:
    ran = kept.run(
        "import os\nchild = os.fork()\nprint('child' if child == 0 else 'parent', flush=True)\nif child: os.waitpid(child, 0)\nchild == 0"
    )
    after = kept.run("'undisturbed'")

    assert sorted(ran.stdout.split()) == ["child", "parent"]
    assert ran.shown == ["False"]
    assert after.shown == ["'undisturbed'"]


@pytest.mark.parametrize(
    "waits",
    [
        "time.sleep(60)",
        "await asyncio.sleep(60)",
        "asyncio.run(asyncio.sleep(60))",
        "subprocess.run(['sleep', '60'])",
        "threading.Event().wait()",
    ],
)
def test_an_interrupt_stops_the_cell_and_keeps_the_state(kept: KeptGuest, waits: str) -> None:
    kept.run("import asyncio, subprocess, threading, time\nkept = 'kept'")
    number = kept.begin_run(f"print('running', flush=True)\n{waits}")
    kept.read_until(lambda: bool(kept.events(number)))

    assert kept.ask("interrupt", target="default").header["stopped"] is True
    ended = kept.wait(number)
    assert (ended.exit_code, ended.context_kept, ended.header["timed_out"]) == (130, True, False)
    assert kept.run("kept, await asyncio.sleep(0, 1)").shown == ["('kept', 1)"]
    assert kept.ask("interrupt", target="default").header["stopped"] is False


def test_an_interrupt_in_the_middle_of_a_report_keeps_the_state(kept: KeptGuest) -> None:
    kept.run("x = 'kept'")
    for _ in range(5):
        number = kept.begin_run(
            "while True: display('y' * 90_000)", limits={"rich_output_bytes": 2**30}, credit=10**9
        )
        kept.read_until(lambda number=number: len(kept.events(number)) > 3)
        kept.ask("interrupt", target="default")
        ended = kept.wait(number)
        assert (ended.exit_code, ended.context_kept) == (130, True)

    assert kept.run("x").shown == ["'kept'"]


def test_text_comes_before_the_outputs_that_follow_it(kept: KeptGuest) -> None:
    number = kept.begin_run("for n in range(20):\n    print(n)\n    display(n)", credit=10**9)
    kept.read_until(lambda: kept.is_over(number))

    text, outputs = b"", 0
    for header, parts in kept.events(number)[:-1]:
        if header["event"] == "output":
            assert b"%d\n" % outputs in text
            outputs += 1
        else:
            text += parts["data"]
    assert outputs == 20


def test_an_interrupt_before_the_first_line_is_not_lost(kept: KeptGuest) -> None:
    padding = b"#" * 2_000_000
    number = kept.begin_run("import time; time.sleep(60)", ("padding", padding))
    kept.ask("interrupt", target="default")

    assert (kept.wait(number).exit_code, kept.run("1").context_kept) == (130, True)


def test_a_deadline_stops_the_cell_and_keeps_the_state(kept: KeptGuest) -> None:
    late = long_enough(
        lambda seconds: kept.run_late("n = 5", "print('begun')\nwhile True: n += 1", seconds),
        lambda late: bool(late.stdout),
        0.3,
    )

    assert (late.exit_code, late.header["timed_out"], late.context_kept) == (None, True, True)
    assert kept.run("n > 5").shown == ["True"]


def test_a_program_that_only_interrupts_itself_has_not_timed_out(kept: KeptGuest) -> None:
    ran = kept.run("raise KeyboardInterrupt")

    assert (ran.exit_code, ran.header["timed_out"], ran.context_kept) == (1, False, True)


def test_input_files_are_there_wherever_the_cell_stands(kept: KeptGuest) -> None:
    kept.run("import os; os.makedirs('below'); os.chdir('below')")

    ran = kept.run("print(open('/workspace/data/in').read())", ("file:data/in", b"given"))

    assert ran.stdout == "given\n"


def test_artifacts_are_what_this_run_added_or_changed(kept: KeptGuest) -> None:
    first = kept.run(
        "open('artifacts/a', 'w').write('1')\nopen('artifacts/b', 'w').write('1')\nNone"
    )
    second = kept.run(
        "open('artifacts/b', 'w').write('22')\nopen('artifacts/c', 'w').write('3')\nNone"
    )

    assert first.artifacts == {"a": b"1", "b": b"1"}
    assert second.artifacts == {"b": b"22", "c": b"3"}
    assert kept.run("1").artifacts == {}


def test_the_order_of_both_streams_is_told(kept: KeptGuest) -> None:
    ran = kept.run(
        """
        import os, time
        os.write(1, b'one'); time.sleep(0.1); os.write(2, b'two'); time.sleep(0.1); os.write(1, b'three')
        None
        """
    )

    assert ran.header["order"] == [[1, 3], [2, 3], [1, 5]]
    assert [(event["event"], parts["data"]) for event, parts in ran.events] == [
        ("stdout", b"one"),
        ("stderr", b"two"),
        ("stdout", b"three"),
    ]


def test_output_beyond_the_limit_is_dropped_and_flagged(kept: KeptGuest) -> None:
    ran = kept.run("print('x' * 5000)", limits={"output_bytes": 1000})

    assert (ran.stdout, ran.header["stdout_truncated"]) == ("x" * 1000, True)
    assert kept.run("print(1)").stdout == "1\n"


def test_a_runs_environment_is_its_own(guests: Guests) -> None:
    guest = guests.warm()
    guest.keep(environment={"ALWAYS": "a"})
    look = "import os\nos.environ.get('ALWAYS'), os.environ.get('ONCE')"

    assert guest.run(look, environment={"ONCE": "o"}).shown == ["('a', 'o')"]
    assert guest.run(look).shown == ["('a', None)"]
