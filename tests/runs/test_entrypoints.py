"""What is called, what is run from top to bottom, and whose line numbers a traceback shows."""

from __future__ import annotations

import pytest

from providers.errors import InvalidConfiguration
from providers.values import InputFile
from tests.conftest import require
from tests.support.sandboxes import Local

CALLS_ITSELF = {
    "plainly": "def main():\n    print('called')\nmain()",
    "behind the guard": "def main():\n    print('called')\nif __name__ == '__main__':\n    main()",
    "with asyncio": "import asyncio\nasync def main():\n    print('called')\nasyncio.run(main())",
    "for the exit code": "import sys\ndef main():\n    print('called')\nsys.exit(main())",
    "in a loop": "def main():\n    print('called')\nfor _ in range(1):\n    x = [main()]",
    "in a with block": "import io\ndef main():\n    print('called')\nwith io.StringIO():\n    main()",
    "by handing it on": "import functools\ndef main():\n    print('called')\nfunctools.partial(main)()",
    "in a thread": "import threading\ndef main():\n    print('called')\nthreading.Thread(target=main).start()",
}  # fmt: skip

LEAVES_IT_TO_US = {
    "function": "def main():\n    return 'value'",
    "coroutine": "async def main():\n    return 'value'",
    "lambda": "main = lambda: 'value'",
    "called by another": "def main():\n    return 'value'\ndef other():\n    return main()",
    "called by a method": "def main():\n    return 'value'\nclass A:\n    def go(self): main()",
    "decorated": "import functools\ndef main():\n    return 'value'\nmain = functools.cache(main)",
    "awaits": "import asyncio\nasync def main():\n    await asyncio.sleep(0)\n    return 'value'",
    "class of a callable": "class Main:\n    def __call__(self): return 'value'\nmain = Main()",
}


@pytest.mark.parametrize("code", CALLS_ITSELF.values(), ids=CALLS_ITSELF)
def test_a_main_that_the_code_calls_is_called_once(bubblewrap: Local, code: str) -> None:
    result = bubblewrap.run(code)
    assert (result.stdout, result.exit_code, result.has_result) == ("called\n", 0, False)


@pytest.mark.parametrize("code", LEAVES_IT_TO_US.values(), ids=LEAVES_IT_TO_US)
def test_a_main_that_the_code_does_not_call_is_called(bubblewrap: Local, code: str) -> None:
    result = bubblewrap.run(code)
    assert (result.result, result.has_result, result.exit_code) == ("value", True, 0), result.stderr


def test_code_without_main_is_a_script(local: Local) -> None:
    result = local.run("print(__name__, __file__)\ndomain = 1")
    assert (result.stdout, result.has_result) == ("__main__ /workspace/main.py\n", False)


def test_main_does_not_run_what_is_behind_the_guard(bubblewrap: Local) -> None:
    code = "def main(): return __name__\nif __name__ == '__main__': print('as a script', main())"
    result = bubblewrap.run(code, entrypoint="main")
    assert (result.result, result.stdout) == ("main", "")
    result = bubblewrap.run(code, entrypoint="script")
    assert (result.has_result, result.stdout) == (False, "as a script __main__\n")


@pytest.mark.parametrize(
    ("language", "code"),
    [("python", "print('kept')\nmain = 3"), ("nodejs", "console.log('kept')")],
)
def test_asking_for_a_main_that_is_not_there_is_an_error_of_the_program(
    bubblewrap: Local, language: str, code: str
) -> None:
    if language == "nodejs":
        require("node")
    result = bubblewrap.run(code, language, entrypoint="main")
    assert (result.exit_code, result.stdout) == (1, "kept\n")
    assert "defines no function main()" in result.stderr


def test_a_shell_script_has_no_main(bubblewrap: Local) -> None:
    with pytest.raises(InvalidConfiguration) as caught:
        bubblewrap.run("main() { :; }", "bash", entrypoint="main")
    assert caught.value.field == "entrypoint"


def test_script_does_not_call_main(bubblewrap: Local) -> None:
    result = bubblewrap.run("def main(): print('no')\nprint(arguments)", arguments={"a": 1}, entrypoint="script")  # fmt: skip
    assert result.stdout == "{'a': 1}\n"


def test_repl_shows_the_value_of_the_last_expression(local: Local) -> None:
    result = local.run("x = 20\nx + 1\nx + 2", entrypoint="repl")
    assert (result.stdout, result.exit_code) == ("22\n", 0)


@pytest.mark.parametrize(
    ("code", "shown"),
    [("None", ""), ("x = 1", ""), ("'é'", "'é'\n"), ("", ""), ("print('p')", "p\n")],
)
def test_repl_shows_nothing_else(bubblewrap: Local, code: str, shown: str) -> None:
    assert bubblewrap.run(code, entrypoint="repl").stdout == shown


FAILING = {
    "statement": ("x = 1\n\nraise ValueError('é')", "line 3, in <module>"),
    "syntax": ("x = 1\ny = [\n", "line 2"),
    "thread": ("import threading\ndef work():\n    1 / 0\nthreading.Thread(target=work).start()", "line 3, in work"),
    "cause": ("try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    raise ValueError from e", "line 4, in <module>"),
    "recursion": ("def f():\n    f()\nf()", "line 2, in f"),
    "null": ("x = 1\ny = 'a\0b'", "null byte"),
}  # fmt: skip

FAILING_MAINS = {
    "main": ("def main():\n    x = 1\n    return 1 / 0", "line 3, in main"),
    "coroutine": ("async def main():\n    x = 1\n    raise ValueError('é')", "line 3, in main"),
    "task": ("import asyncio\nasync def f():\n    raise ValueError\nasync def main():\n    async with asyncio.TaskGroup() as g:\n        g.create_task(f())", "line 3, in f"),
}  # fmt: skip


@pytest.mark.parametrize("entrypoint", ["auto", "script", "repl"])
@pytest.mark.parametrize(("code", "expected"), FAILING.values(), ids=FAILING)
def test_a_traceback_has_the_callers_lines_and_none_of_ours(
    bubblewrap: Local, code: str, expected: str, entrypoint: str
) -> None:
    result = bubblewrap.run(code, entrypoint=entrypoint)
    assert result.exit_code == (0 if "Thread" in code else 1)
    assert_shows_only(expected, result.stderr)


@pytest.mark.parametrize(("code", "expected"), FAILING_MAINS.values(), ids=FAILING_MAINS)
def test_a_traceback_from_main_has_none_of_our_lines_either(
    local: Local, code: str, expected: str
) -> None:
    result = local.run(code)
    assert result.exit_code == 1
    assert_shows_only(expected, result.stderr)


def assert_shows_only(expected: str, traceback: str) -> None:
    assert expected in traceback
    for own in ("_runner", "cofferdam", "supervisor", "zygote", "node:internal"):
        assert own not in traceback


def test_a_traceback_shows_the_source_even_after_leaving_the_folder(bubblewrap: Local) -> None:
    result = bubblewrap.run("import os\nos.chdir('/')\nraise ValueError  # this line")
    assert "raise ValueError  # this line" in result.stderr


def test_wrong_arguments_are_told_without_a_line_of_ours(bubblewrap: Local) -> None:
    result = bubblewrap.run("def main(a): pass", arguments={"b": 1})
    assert result.exit_code == 1
    assert "main() got an unexpected keyword argument 'b'" in result.stderr
    assert "runner" not in result.stderr


JAVASCRIPT_CALLS_ITSELF = {
    "plainly": "function main () { console.log('called') }\nmain()",
    "with await": "import fs from 'fs'\nasync function main () { console.log('called') }\nawait main()",
    "in a function expression": "async function main () { console.log('called') }\n(async () => { await main() })()",
    "with then": "async function main () { console.log('called') }\nmain().then(() => {}).catch(console.error)",
    "behind the guard": "function main () { console.log('called') }\nif (require.main === module) main()",
    "constant": "const main = async () => { console.log('called') }\nmain()",
    "by handing it on": "function main () { console.log('called') }\nsetTimeout(main, 10)",
}  # fmt: skip

JAVASCRIPT_LEAVES_IT_TO_US = {
    "function": "function main () { return 'value' }",
    "promise": "function main () { return Promise.resolve('value') }",
    "coroutine": "async function main () { return 'value' }",
    "constant": "const main = () => 'value'",
    "function expression": "let main = async function () { return 'value' }",
    "module": "import fs from 'node:fs'\nexport async function main () { return fs.existsSync('/') && 'value' }",
    "default export": "import 'node:fs'\nexport default function main () { return 'value' }",
    "exported constant": "import 'node:fs'\nexport const main = () => 'value'",
    "top-level await": "const it = await Promise.resolve('value')\nfunction main () { return it }",
    "exported the old way": "function main () { return 'value' }\nmodule.exports = { main }",
    "called by another": "function main () { return 'value' }\nfunction other () { main() }",
    "with a shebang": "#!/usr/bin/env node\nfunction main () { return 'value' }",
}  # fmt: skip


@pytest.mark.parametrize("code", JAVASCRIPT_CALLS_ITSELF.values(), ids=JAVASCRIPT_CALLS_ITSELF)
def test_a_javascript_main_that_the_code_calls_is_called_once(bubblewrap: Local, code: str) -> None:
    require("node")
    result = bubblewrap.run(code, "javascript")
    assert (result.stdout, result.exit_code, result.has_result) == ("called\n", 0, False), (
        result.stderr
    )


@pytest.mark.parametrize(
    "code", JAVASCRIPT_LEAVES_IT_TO_US.values(), ids=JAVASCRIPT_LEAVES_IT_TO_US
)
def test_a_javascript_main_that_the_code_does_not_call_is_called(
    bubblewrap: Local, code: str
) -> None:
    require("node")
    result = bubblewrap.run(code, "javascript")
    assert (result.result, result.has_result, result.exit_code) == ("value", True, 0), result.stderr


@pytest.mark.parametrize("code", ["function main (a) { return a.n + 1 }", "export const main = (a) => a.n + 1"])  # fmt: skip
def test_gvisor_runs_javascript_too(gvisor: Local, code: str) -> None:
    require("node")
    assert gvisor.run(code, "javascript", arguments={"n": 1}).result == 2


@pytest.mark.parametrize(
    "code",
    [
        "console.log(arguments.n)",
        "'use strict'\nconsole.log(arguments.n)",
        "import 'node:fs'\nconsole.log(arguments.n)",
        "function main () {}\nconsole.log(arguments.n)\nmain()",
    ],
)
def test_a_javascript_script_sees_its_arguments(bubblewrap: Local, code: str) -> None:
    require("node")
    result = bubblewrap.run(code, "javascript", arguments={"n": 5})
    assert (result.stdout, result.exit_code) == ("5\n", 0), result.stderr


JAVASCRIPT_FAILING = {
    "script": ("const x = 1\n\nthrow new Error('é')", "main.js:3"),
    "main": ("function main () {\n  null.x\n}", "main.js:2"),
    "coroutine": ("async function main () {\n  await null\n  null.x\n}", "main.js:3"),
    "syntax": ("let x = 1\nlet y = {;", "main.js:2"),
    "module": ("import 'node:fs'\n\nnull.x", "main.mjs:3"),
    "module syntax": ("import 'node:fs'\nconst x = 1\nlet x = {;", "SyntaxError"),
    "timer": ("setTimeout(() => {\n  null.x\n}, 10)", "main.js:2"),
    "rejection": ("Promise.reject(new Error('left alone'))", "main.js:1"),
    "shebang": ("#!/usr/bin/env node\nnull.x", "main.js:2"),
    "no error at all": ("throw 'only a string'", "only a string"),
}


@pytest.mark.parametrize(("code", "expected"), JAVASCRIPT_FAILING.values(), ids=JAVASCRIPT_FAILING)
def test_a_javascript_stack_has_the_callers_lines_and_none_of_ours(
    bubblewrap: Local, code: str, expected: str
) -> None:
    require("node")
    result = bubblewrap.run(code, "nodejs")
    assert result.exit_code == 1
    assert_shows_only(expected, result.stderr)


def test_a_javascript_script_with_arguments_has_the_callers_lines_too(bubblewrap: Local) -> None:
    require("node")
    result = bubblewrap.run("const x = 1\nnull.x", "nodejs", arguments={"a": 1})
    assert_shows_only("main.js:2", result.stderr)


def test_what_a_javascript_main_printed_arrives_whole(bubblewrap: Local) -> None:
    require("node")
    result = bubblewrap.run("function main () { console.log('x'.repeat(190_000)); return 1 }", "nodejs")  # fmt: skip
    assert (result.stdout, result.result) == ("x" * 190_000 + "\n", 1)


def test_a_shell_script_gets_its_arguments_as_json(local: Local) -> None:
    result = local.run('echo "$ARGUMENTS $0"; exit 3', "bash", arguments={"a": [1, "é"]})
    assert (result.stdout, result.exit_code) == ('{"a":[1,"é"]} main.sh\n', 3)


TAKES_ARGUMENTS = {
    "beside a guard": "def main(n): return n\nif __name__ == '__main__': print('guard', main(0))",
    "in an if": "if True:\n    def main(n): return n",
    "in a try": "try:\n    import nope\nexcept ImportError:\n    def main(n): return n",
    "imported": "from helper import main",
    "imported by another name": "from helper import other as main",
    "imported with all": "from helper import *",
    "a class": "class main(list):\n    def __init__(self, n): self.append(n)",
    "annotated": "from collections.abc import Callable\nmain: Callable = lambda n: n",
    "called without them": "def main(n=1): return n\nmain()",
}
HELPER = InputFile("helper.py", b"def main(n): return n\nother = main")


@pytest.mark.parametrize("code", TAKES_ARGUMENTS.values(), ids=TAKES_ARGUMENTS)
def test_who_sends_arguments_has_main_called(bubblewrap: Local, code: str) -> None:
    result = bubblewrap.run(code, arguments={"n": 5}, files=[HELPER])
    assert (result.result in (5, [5]), result.stdout, result.exit_code) == (True, "", 0), (
        result.stderr
    )


@pytest.mark.parametrize(
    "code",
    [
        "print(arguments['n'])",
        "def main(n): print(n)\nmain(**arguments)",
        "def main(n): print(n)\nif __name__ == '__main__': main(arguments['n'])",
        "def work(): print(globals()['arguments']['n'])\nwork()",
    ],
)
def test_code_may_take_its_arguments_itself(bubblewrap: Local, code: str) -> None:
    result = bubblewrap.run(code, arguments={"n": 5})
    assert (result.stdout, result.has_result, result.exit_code) == ("5\n", False, 0)


@pytest.mark.parametrize(
    ("language", "code"), [("python", "print('ran')"), ("nodejs", "console.log('ran')")]
)
def test_arguments_that_nobody_took_are_an_error(
    bubblewrap: Local, language: str, code: str
) -> None:
    if language == "nodejs":
        require("node")
    result = bubblewrap.run(code, language, arguments={"n": 5})
    assert (result.exit_code, result.stdout) == (1, "ran\n")
    assert "the arguments were not used" in result.stderr
    assert "Traceback" not in result.stderr
    assert bubblewrap.run(code, language, arguments={}).exit_code == 0


JAVASCRIPT_TAKES_ARGUMENTS = {
    "exports.main": "exports.main = (a) => a.n",
    "module.exports": "module.exports = { main (a) { return a.n } }",
    "module.exports.main": "module.exports.main = function (a) { return a.n }",
    "beside a guard": "function main (a) { return a.n }\nif (require.main === module) console.log(main({}))",
    "in a block": "if (true) { function main (a) { return a.n } }",
    "in a try": "try { var main = (a) => a.n } catch {}",
    "required": "const { main } = require('./helper')",
    "imported": "import { main } from './helper.js'",
    "exported by another name": "function run (a) { return a.n }\nexport { run as main }",
    "called without them": "function main (a = {}) { return a.n }\nmain()",
}  # fmt: skip


@pytest.mark.parametrize(
    "code", JAVASCRIPT_TAKES_ARGUMENTS.values(), ids=JAVASCRIPT_TAKES_ARGUMENTS
)
def test_who_sends_arguments_has_a_javascript_main_called(bubblewrap: Local, code: str) -> None:
    require("node")
    helper = InputFile("helper.js", b"exports.main = (a) => a.n")
    result = bubblewrap.run(code, "nodejs", arguments={"n": 5}, files=[helper])
    assert (result.result, result.stdout, result.exit_code) == (5, "", 0), result.stderr


OWN_FILES = {
    "python": ("import main\nprint(main.x)\ndef f(): null\nf()", "main.py", b"x = 5", "main_2.py"),
    "javascript": ("console.log(require('./main').x); null.y", "main.js", b"exports.x = 5", "main_2.js"),
    "modules": ("import { x } from './main.mjs'\nconsole.log(x); null.y", "main.mjs", b"export const x = 5", "main_2.mjs"),
    "bash": ("source ./main.sh; nosuch", "main.sh", b"echo 5", "main_2.sh"),
    "a folder": ("print(open('main.py/x').read()); null", "main.py/x", b"5", "main_2.py"),
}  # fmt: skip


@pytest.mark.parametrize(("code", "path", "content", "own"), OWN_FILES.values(), ids=OWN_FILES)
def test_a_file_of_the_programs_name_is_the_callers(
    bubblewrap: Local, code: str, path: str, content: bytes, own: str
) -> None:
    language = {"py": "python", "py/x": "python", "sh": "bash"}.get(
        path.partition(".")[2], "nodejs"
    )
    if language == "nodejs":
        require("node")
    result = bubblewrap.run(code, language, files=[InputFile(path, content)])
    assert result.stdout == "5\n", result.stderr
    assert own in result.stderr


@pytest.mark.parametrize(
    ("language", "code"),
    [
        ("python", "import os; print(os.environ['PWD'], os.getcwd())"),
        ("nodejs", "console.log(process.env.PWD, process.cwd())"),
        ("bash", 'printenv PWD | tr "\\n" " "; pwd'),
    ],
)
def test_the_working_folder_is_in_the_environment(local: Local, language: str, code: str) -> None:
    if language == "nodejs":
        require("node")
    assert local.run(code, language).stdout == "/workspace /workspace\n"
