"""JavaScript in a kept sandbox calls tools as Python does, with promises."""

from __future__ import annotations

import pytest

from tests.conftest import require
from tests.support.kept_guest import Guests, KeptGuest
from tests.tools.guest_tools import answer, answered, begun, until_called


@pytest.fixture
def node(guests: Guests) -> KeptGuest:
    require("node")
    return guests.kept("nodejs")


def test_a_call_goes_out_with_its_arguments_and_its_answer_is_awaited(node: KeptGuest) -> None:
    code = "const { search } = require('tools')\nawait search({ query: 'x', many: [1, null] })"
    number = begun(node, code)
    [(call, name, arguments)] = until_called(node, number)
    for other in (call + 1, 0, 10**15):
        answer(node, number, other, result="forged")
    answer(node, number, call, result={"found": ["é"]})
    answer(node, number, call, result="second")

    assert (name, arguments) == ("search", {"query": "x", "many": [1, None]})
    assert node.wait(number).shown == ["{ found: [ 'é' ] }"]
    # The next cell has none, and a file of that name is its own.
    assert "Cannot find module 'tools'" in node.run("require('tools')").stderr
    assert "not a tool of this run" in node.run("await search({})").stderr
    node.run("require('fs').writeFileSync('tools.js', 'module.exports = 5')")
    assert node.run("require('./tools')").shown == ["5"]


def test_an_error_is_thrown_and_can_be_caught(node: KeptGuest) -> None:
    code = """
        import * as tools from 'tools'
        try {
          await tools.search()
        } catch (error) {
          console.log(error instanceof tools.ToolError, error.name, error.message)
        }
        """

    assert answered(node, begun(node, code), error="no such index").stdout == (
        "true ToolError no such index\n"
    )


def test_calls_go_out_side_by_side_and_answers_come_in_any_order(node: KeptGuest) -> None:
    code = """
        const { double } = require('tools')
        console.log(await Promise.all([0, 1, 2, 3].map((n) => double({ n }))))
        """
    number = begun(node, code, "double")
    for call, _, arguments in reversed(until_called(node, number, 4)):
        answer(node, number, call, result=arguments["n"] * 2)

    assert node.wait(number).stdout == "[ 0, 2, 4, 6 ]\n"


def test_main_calls_tools(node: KeptGuest) -> None:
    code = "const { search } = require('tools')\nconst main = ({ a }) => search({ a })"
    number = node.begin_run(code, ("arguments", b'{"a":1}'), tools=["search"])

    assert answered(node, number, result=[2]).result == "[2]"


def test_an_interrupt_reaches_a_call_that_waits_and_the_state_stays(node: KeptGuest) -> None:
    number = begun(node, "const x = 1\nconst { search } = require('tools')\nawait search()")
    [(call, _, _)] = until_called(node, number)
    node.ask("interrupt", target="default")
    ended = node.wait(number)
    # Too late, and for a run that is over.
    answer(node, number, call, result="late")

    assert (ended.exit_code, ended.context_kept) == (130, True)
    again = begun(node, "console.log(x, await search())")
    assert answered(node, again, result="own").stdout == "1 own\n"


def test_what_is_no_json_or_too_much_is_refused_in_the_sandbox(node: KeptGuest) -> None:
    code = """
        const { search } = require('tools')
        for (const given of [[1], null, 'x', { n: NaN }, { n: 1n }, { q: 'x'.repeat(40000) }]) {
          await search(given).catch((error) => console.log(error.message.slice(0, 30)))
        }
        """
    ended = node.wait(begun(node, code))

    assert ended.stdout == "the arguments of search are no\n" * 5 + (
        "the arguments of search are mo\n"
    )
    assert all(header["event"] != "call" for header, _ in ended.events)


def test_another_thread_or_process_cannot_call(node: KeptGuest) -> None:
    code = """
        const { Worker } = require('worker_threads')
        const asks = "try { require('tools').search() } catch (error) { console.log(error.code) }"
        await new Promise((resolve) => new Worker(asks, { eval: true }).on('exit', resolve))
        require('child_process').spawnSync(process.execPath, ['-e', asks], { stdio: 'inherit' })
        """
    number = begun(node, code)
    ended = node.wait(number)

    assert ended.stdout == "MODULE_NOT_FOUND\n" * 2
    assert all(header["event"] != "call" for header, _ in ended.events)
