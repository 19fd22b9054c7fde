"""JavaScript and bash keep their state between cells, as far as such interpreters can."""

from __future__ import annotations

import pytest

from tests.conftest import require
from tests.support.kept_guest import Guests, KeptGuest


@pytest.fixture
def node(guests: Guests) -> KeptGuest:
    require("node")
    return guests.kept("nodejs")


@pytest.fixture
def bash(guests: Guests) -> KeptGuest:
    return guests.kept("bash")


def test_an_interpreter_that_is_late_is_no_fault_of_who_asks_for_it(guests: Guests) -> None:
    guest = guests.warm()
    commands = {**guest._commands, "bash": ["/bin/bash", "-c", "exec sleep 60"]}
    assert not guest.keep(commands=commands, start_seconds=2).failed
    late = guest.ask("context.create", language="bash", context="late")

    assert (late.failed, late.header["code"]) == (True, "exhausted"), late.header
    assert "not ready within 2 s" in late.header["reason"]


def test_javascript_keeps_declarations_and_allows_them_again(node: KeptGuest) -> None:
    node.run("const x = 1; let y = [2]; class A { v () { return x } }; function f () { return y }")

    assert node.run("[x, f(), new A().v()]").shown == ["[ 1, [ 2 ], 1 ]"]
    assert node.run("const x = 5; x").shown == ["5"]
    assert node.run("_ + 1").shown == ["6"]


def test_javascript_awaits_and_imports(node: KeptGuest) -> None:
    assert node.run("const v = await Promise.resolve(3); v").shown == ["3"]
    assert node.run("Promise.resolve(4)").shown == ["4"]
    assert node.run("import { basename as b } from 'path'; b('/a/c') + v").shown == ["'c3'"]


def test_javascript_imports_where_node_has_no_name_for_its_loader(node: KeptGuest) -> None:
    """As in Node 18."""
    node.run("Object.defineProperty(require('vm'), 'constants', { value: undefined })")
    node.run("require('fs').writeFileSync('own.mjs', 'export const a = 7; export default 8')")

    assert node.run("import { basename as b } from 'path'; b('/a/c')").shown == ["'c'"]
    assert node.run("import own, { a } from './own.mjs'; [own, a]").shown == ["[ 8, 7 ]"]
    assert node.run("(await import('node:url')).URL.name").shown == ["'URL'"]
    assert node.run("const later = () => import('./own.mjs'); 1").shown == ["1"]
    assert node.run("(await later()).a").shown == ["7"]
    assert "nowhere.mjs" in node.run("await import('./nowhere.mjs')").stderr


def test_a_syntax_error_says_what_typescript_needs_where_nothing_knows_it(node: KeptGuest) -> None:
    if node.run("typeof require('module').stripTypeScriptTypes").shown == ["'function'"]:
        pytest.skip("this Node knows TypeScript")
    node.run("globalThis.require = () => { throw new Error('not here') }")
    ran = node.run("interface A { x: number }\nconst a: A = { x: 1 }; a")
    plain = node.run("let y = = 3")

    assert ran.exit_code == 1
    assert "SyntaxError: " in ran.stderr
    assert "(Debian: node-typescript), or Node 22.13 or newer" in ran.stderr
    assert b"node-typescript" in ran.parts["exception"]
    assert "TypeScript" not in plain.stderr


def test_a_text_of_javascript_is_whole_or_says_where_it_was_cut(node: KeptGuest) -> None:
    whole, long = node.run("'x'.repeat(150_000)"), node.run("['x'.repeat(300_000)]")
    reason = "cut: the first 200000 characters are kept"

    assert whole.shown == [f"'{'x' * 150_000}'"]
    (text,) = long.shown
    assert text.endswith(f"xx\n[{reason}]")
    assert len(text) == 200_000 + len(f"\n[{reason}]")
    assert long.header["outputs_skipped"] == [["output 1: text/plain", reason]]


def test_what_javascript_throws_keeps_the_state(node: KeptGuest) -> None:
    node.run("const x = 1")
    failed = node.run("\nfunction g () {\n  throw new TypeError('here')\n}\ng()")
    later = node.run(
        "setTimeout(() => { throw new Error('later') }, 1)\nawait new Promise((r) => setTimeout(r, 50))\nx"
    )

    assert (failed.exit_code, failed.context_kept) == (1, True)
    assert "TypeError: here" in failed.stderr
    assert "<cell 2>:3:9" in failed.stderr
    assert (later.exit_code, later.shown) == (0, ["1"])
    assert "Error: later" in later.stderr


def test_what_cannot_be_asked_what_it_is_ends_no_javascript(node: KeptGuest) -> None:
    proxy = "new Proxy(new Error('p'), {getPrototypeOf () { throw 1 }})"
    node.run(f"let x = 1; setTimeout(() => {{ throw {proxy} }}, 1)")
    node.run("await new Promise(resolve => setTimeout(resolve, 20))")

    assert node.run("x").shown == ["1"]


@pytest.mark.parametrize("end", ["end()", "destroy()"])
def test_a_stream_that_is_ended_is_there_for_the_next_cell_of_javascript(
    node: KeptGuest, end: str
) -> None:
    node.run(f"process.stdout.{end}; process.stderr.{end}; undefined")
    ran = node.run("console.log('heard'); console.error('too'); process.stdout.write('!'); 1")
    failed = node.run("throw new Error('said')")

    assert (ran.stdout, ran.stderr, ran.shown) == ("heard\n!", "too\n", ["1"])
    assert failed.stderr.startswith("Error: said")


def test_exit_ends_a_cell_of_javascript_alone(node: KeptGuest) -> None:
    node.run("const x = 1")

    assert node.run("process.exit(4); x = 2").exit_code == 4
    assert node.run("process.exitCode = 5; undefined").exit_code == 5
    assert node.run("x").shown == ["1"]


def test_javascript_calls_main_with_arguments(node: KeptGuest) -> None:
    ran = node.run("const main = async ({ a }) => ({ b: a })", ("arguments", b'{"a":1}'))

    assert ran.result == '{"b":1}'


@pytest.mark.parametrize(
    "code", ["while (true);", "await new Promise((r) => setTimeout(r, 60000))"]
)
def test_javascript_stops_at_its_deadline(node: KeptGuest, code: str) -> None:
    late = node.run_late("const x = 1", code)

    assert (late.exit_code, late.header["timed_out"], late.context_kept) == (None, True, True)
    assert node.run("x").shown == ["1"]


def test_javascript_that_loops_behind_an_await_stops_and_keeps_its_state(node: KeptGuest) -> None:
    loops = [
        "await 0; while (true) { try { while (true); } catch {} }",
        "while (true) await 0",
        "setTimeout(() => { while (true); }, 1); await new Promise(() => {})",
        "setImmediate(() => { while (true); }); await new Promise(() => {})",
        "process.nextTick(() => { while (true); }); await new Promise(() => {})",
    ]
    for number, code in enumerate(loops):
        # A machine that is too busy for a second loses the context, and says so.
        for _ in range(5):
            node.run(f"const x = {number}")
            late = node.run(code, timeout=0.1)
            assert (late.exit_code, late.header["timed_out"]) == (None, True)
            found = node.run("typeof x === 'undefined' ? 'lost' : x").shown
            assert found == ([f"{number}"] if late.context_kept else ["'lost'"])
            if late.context_kept:
                break
        else:
            raise AssertionError(code)


def test_bash_keeps_variables_functions_and_folder(bash: KeptGuest) -> None:
    bash.run(
        "x=1; list=(a 'b c'); f() { echo f$x; }; mkdir sub; cd sub; alias hey='echo hey'; export E=e"
    )
    ran = bash.run("f; pwd; echo ${#list[@]}; printenv E")

    assert ran.stdout == "f1\n/workspace/sub\n2\ne\n"


@pytest.mark.parametrize(
    ("ending", "code"), [("exit 3", 3), ("set -e\nfalse\necho not reached", 1), ("(exit 5)", 5)]
)
def test_what_ends_a_shell_ends_a_cell_of_bash_alone(
    bash: KeptGuest, ending: str, code: int
) -> None:
    bash.run("x='two\nlines'; f() { echo \"f $x\"; }; cd /tmp")
    ended = bash.run(ending)
    after = bash.run("f; pwd")

    assert (ended.exit_code, ended.context_kept, ended.stdout) == (code, True, "")
    assert (after.stdout, after.context_kept) == ("f two\nlines\n/tmp\n", True)


def test_bash_names_the_callers_own_lines(bash: KeptGuest) -> None:
    assert "line 3: missing_command: command not found" in bash.run("\n\nmissing_command").stderr
    assert "syntax error" in bash.run("if").stderr
    assert bash.run("echo goes on").stdout == "goes on\n"


@pytest.mark.parametrize("code", ["while :; do :; done", "sleep 60; echo not reached"])
def test_bash_stops_at_its_deadline(bash: KeptGuest, code: str) -> None:
    late = bash.run_late("x=1", code)

    assert (late.header["timed_out"], late.context_kept, late.stdout) == (True, True, "")
    assert bash.run("echo $x").stdout == "1\n"


def test_a_javascript_cell_with_arguments_calls_its_own_main_alone(node: KeptGuest) -> None:
    given = ("arguments", b'{"a":7}')
    node.run("function main ({ a }) { return ['earlier', a] }")
    other = node.run("var x = 1", given)
    exported = node.run("exports.main = ({ a }) => a", given)
    block = node.run("if (true) { var main = ({ a }) => [a] }", given)

    assert (other.exit_code, other.result) == (1, "")
    assert "the arguments were not used" in other.stderr
    assert (exported.result, block.result) == ("7", "[7]")
    assert node.run("arguments.a", given).shown == ["7"]


def test_bash_has_arguments_in_a_variable(bash: KeptGuest) -> None:
    assert bash.run("echo $ARGUMENTS", ("arguments", b'{"a":1}')).stdout == '{"a":1}\n'


def test_descriptors_that_scripts_use_are_theirs(bash: KeptGuest) -> None:
    ran = bash.run("exec 3>three 4>four; echo t >&3; echo f >&4; exec 3>&- 4>&-; cat three four")

    assert (ran.stdout, ran.context_kept) == ("t\nf\n", True)
    assert bash.run("echo on").stdout == "on\n"


def test_a_sandbox_of_another_language_has_python_too(bash: KeptGuest) -> None:
    bash.ask("context.create", language="python", context="python")
    ran = bash.run(
        "import os, sys\nsys.stdout.line_buffering, os.environ['MPLBACKEND']", context="python"
    )

    assert ran.shown == ["(True, 'agg')"]


def test_a_shell_without_a_path_still_runs_what_it_is_given(guests: Guests) -> None:
    kept = guests.kept("bash")
    kept.run("PATH=/nowhere; kept=1")
    assert kept.run("echo $kept; exit 3").stdout == "1\n"
    assert kept.run("echo $kept $PATH").stdout == "1 /nowhere\n"


def test_bash_has_the_environment_of_a_run_for_that_run_alone(bash: KeptGuest) -> None:
    bash.run("export SHOWN=before; list=(a b); unset GONE")
    given = {"TOKEN": "a b\n'\"$x\\é", "SHOWN": "meanwhile", "list": "one", "PATH": "/usr/bin:/bin"}
    show = 'printf "%s|" "$TOKEN" "$SHOWN" "${list[*]}"; sh -c \'printf "%s|" "$TOKEN" "$SHOWN"\''
    inner = bash.run(show, environment=given)
    assert inner.stdout == "a b\n'\"$x\\é|meanwhile|one|a b\n'\"$x\\é|meanwhile|", inner.stderr
    assert bash.run(show).stdout == "|before|a b||before|"
    for code in ("exit 3", "set -u; false", "kill -INT $$", "set -e; false"):
        bash.run(code, environment=given)
        bash.run("set +eu")
        assert bash.run(show).stdout == "|before|a b||before|", code
    refused = bash.run("true", environment={"a-b": "c"})
    assert (refused.failed, refused.header["field"]) == (True, "environment")


def test_the_working_folder_is_in_the_environment(guests: Guests) -> None:
    require("node")
    kept = guests.kept()
    codes = {
        "python": "import os; print(os.environ['PWD'], os.getcwd())",
        "nodejs": "console.log(process.env.PWD, process.cwd())",
        "bash": 'echo "$PWD" "$(pwd)"',
    }
    for language, code in codes.items():
        kept.ask("context.create", context=language, language=language, cwd="a/b")
        assert kept.run(code, context=language).stdout == "/workspace/a/b /workspace/a/b\n"
    assert kept.run(codes["python"]).stdout == "/workspace /workspace\n"
