"""Code in a kept sandbox calls tools over the guest's channel, within bounds the guest cannot move."""

from __future__ import annotations

from providers.runtime.guest.protocol import MOST_CALLS, MOST_WAITING_CALLS
from tests.support.kept_guest import KeptGuest
from tests.tools.guest_tools import answer, answered, begun, calls, until_called

# Writes the frames that the runner writes, from the code that it runs.
FORGED = """
import os, tools
inside = tools.search.__closure__
mine = next(each.cell_contents for each in inside if hasattr(each.cell_contents, "_outputs"))
pack = mine._call.__func__.__globals__["wire"].pack
def write(said):
    os.write(4, pack({"type": "call", **mine._outputs.mark, **said}, [("arguments", b"{}")]))
"""


def test_a_call_goes_out_with_its_arguments_and_comes_back_as_a_value(kept: KeptGuest) -> None:
    number = begun(kept, "from tools import search\nprint(search(query='x', many=[1, None]))")
    [(call, name, arguments)] = until_called(kept, number)
    answer(kept, number, call, result={"found": ["é"]})

    assert (name, arguments) == ("search", {"query": "x", "many": [1, None]})
    assert kept.wait(number).stdout == "{'found': ['é']}\n"
    # The next cell has none, and a file of that name is its own.
    assert "No module named 'tools'" in kept.run("from tools import search").stderr
    assert "not a tool of this run" in kept.run("search(query='y')").stderr


def test_an_error_is_raised_and_can_be_caught(kept: KeptGuest) -> None:
    code = """
        from tools import search, ToolError
        try:
            search()
        except ToolError as error:
            print('told:', error)
        """

    assert answered(kept, begun(kept, code), error="no such index").stdout == (
        "told: no such index\n"
    )


def test_threads_call_side_by_side_and_answers_come_in_any_order(kept: KeptGuest) -> None:
    code = """
        import concurrent.futures, tools
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            print(list(pool.map(lambda n: tools.double(n=n), range(4))))
        """
    number = begun(kept, code, "double")
    for call, _, arguments in reversed(until_called(kept, number, 4)):
        answer(kept, number, call, result=arguments["n"] * 2)

    assert kept.wait(number).stdout == "[0, 2, 4, 6]\n"


def test_an_interrupt_reaches_a_call_that_waits_and_the_state_stays(kept: KeptGuest) -> None:
    number = begun(kept, "x = 1\nfrom tools import search\nsearch()")
    [(call, _, _)] = until_called(kept, number)
    kept.ask("interrupt", target="default")
    ended = kept.wait(number)
    # Too late, and for a run that is over.
    answer(kept, number, call, result="late")

    assert (ended.exit_code, ended.context_kept) == (130, True)
    again = begun(kept, "from tools import search\nprint(x, search())")
    assert answered(kept, again, result="own").stdout == "1 own\n"


def test_what_was_not_declared_is_refused_in_the_sandbox(kept: KeptGuest) -> None:
    code = (
        FORGED
        + """
for said in ({"name": "delete"}, {"call": "x"}, {"call": -1}, {"call": 2**60}):
    write({"call": 7, "name": "search", **said})
"""
    )
    ended = kept.wait(begun(kept, code))

    assert (ended.exit_code, ended.stderr) == (0, "")
    assert [header["event"] for header, _ in ended.events] == []


def test_the_bounds_are_the_guests_own(kept: KeptGuest) -> None:
    code = f"""
        from tools import search, ToolError
        told = set()
        try:
            search(query='x' * 40000)
        except ToolError as error:
            print(error)
        for _ in range({MOST_CALLS + 20}):
            try:
                search()
            except ToolError as error:
                told.add(str(error))
        print(told)
        """
    number = begun(kept, code)
    ended = answered(kept, number, result=None)

    assert "more than 32768 bytes" in ended.stdout
    assert f"a run can call tools at most {MOST_CALLS} times" in ended.stdout
    assert sum(header["event"] == "call" for header, _ in ended.events) == MOST_CALLS


def test_a_call_may_be_larger_than_what_a_run_may_show(kept: KeptGuest) -> None:
    small = {"result_bytes": 100, "rich_output_bytes": 100}
    number = begun(kept, "from tools import search\nprint(search(q='x' * 32000))", limits=small)

    assert answered(kept, number, result=1).stdout == "1\n"


def test_only_so_many_wait_at_once(kept: KeptGuest) -> None:
    code = f"""
        import threading, time, tools
        told = []
        def one():
            try:
                tools.search()
            except tools.ToolError as error:
                told.append(str(error))
        threads = [threading.Thread(target=one) for _ in range({MOST_WAITING_CALLS + 2})]
        for each in threads: each.start()
        while len(told) < 2: time.sleep(0.01)
        print(told, flush=True)
        for each in threads: each.join()
        tools.search()
        """
    number = begun(kept, code)
    found = until_called(kept, number, MOST_WAITING_CALLS)

    kept.read_until(lambda: any(h["event"] == "stdout" for h, _ in kept.events(number)))
    assert len(found) == len(calls(kept, number)) == MOST_WAITING_CALLS
    for call, _, _ in found:
        answer(kept, number, call, result=0)
    assert "already wait for their answers" in answered(kept, number, result=0).stdout


def test_a_fork_cannot_call(kept: KeptGuest) -> None:
    code = """
        import os, sys, tools
        if os.fork() == 0:
            try:
                tools.search()
            except tools.ToolError as error:
                os.write(1, f'{error}\\n'.encode())
            os._exit(0)
        os.wait()
        """

    ended = kept.wait(begun(kept, code))
    assert "not its forks" in ended.stdout
    assert ended.events == [] or all(h["event"] != "call" for h, _ in ended.events)


def test_who_floods_loses_his_context_alone(kept: KeptGuest) -> None:
    code = (
        FORGED
        + """
while True:
    write({"call": 1, "name": "none"})
"""
    )
    ended = kept.wait(begun(kept, code))

    assert (ended.exit_code, ended.context_kept) == (137, False)
    assert kept.run("print('there')").stdout == "there\n"


def test_an_answer_to_no_call_changes_nothing(kept: KeptGuest) -> None:
    number = begun(kept, "from tools import search\nprint(search())")
    [(call, _, _)] = until_called(kept, number)
    for other in (call + 1, 0, 10**30):
        answer(kept, number, other, result="forged")
    answer(kept, number, call, result="first")
    answer(kept, number, call, result="second")

    assert kept.wait(number).stdout == "first\n"


def test_other_languages_refuse_tools_by_name(kept: KeptGuest) -> None:
    kept.ask("context.create", language="bash", context="shell")
    refused = kept.wait(begun(kept, "true", context="shell"))

    assert (refused.header["field"], refused.failed) == ("tools", True)
