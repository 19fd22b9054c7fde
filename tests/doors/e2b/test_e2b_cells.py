"""E2B's code interpreter runs cells in contexts, and names what they show as it always has."""

from __future__ import annotations

import pytest
from e2b import NotFoundException, SandboxException, TimeoutException
from e2b_code_interpreter import Sandbox

from tests.support.e2b_door import opened, records
from tests.support.site import Site
from tests.support.waiting import wait_until

RICH = """
class Rich:
    def _repr_html_(self): return "<b>h</b>"
    def _repr_markdown_(self): return "**m**"
    def _repr_svg_(self): return "<svg/>"
    def _repr_png_(self): return b"png"
    def _repr_jpeg_(self): return b"jpeg"
    def _repr_pdf_(self): return b"pdf"
    def _repr_latex_(self): return "$l$"
    def _repr_json_(self): return {"j": 1}
    def _repr_mimebundle_(self, **_): return {"application/x-own+json": {"o": 1}}
    def __repr__(self): return "rich"
Rich()
"""


def test_a_cell_has_a_value_prints_and_keeps_what_it_made(sandbox: Sandbox) -> None:
    printed: list[str] = []
    first = sandbox.run_code(
        "import sys\nx = 41\nprint('out')\nprint('err', file=sys.stderr)\nx + 1",
        on_stdout=lambda message: printed.append(message.line),
    )
    assert (first.text, first.error) == ("42", None)
    assert (first.logs.stdout, first.logs.stderr) == (["out\n"], ["err\n"])
    assert printed == ["out\n"]
    assert first.execution_count is not None
    second = sandbox.run_code("import os; x, os.environ['OWN']", envs={"OWN": "1"})
    assert second.text == "(41, '1')"
    assert second.execution_count == first.execution_count + 1
    assert sandbox.run_code("y = 1").text is None
    assert sandbox.run_code("").results == []
    shown = sandbox.run_code("display(1); display(2); 3").results
    assert [(each.text, each.is_main_result) for each in shown] == [
        ("1", False),
        ("2", False),
        ("3", True),
    ]


def test_a_cell_that_misses_a_module_is_advised_on_stderr(sandbox: Sandbox) -> None:
    ended = sandbox.run_code("import no_such_package")
    assert ended.error is not None
    assert ended.error.name == "ModuleNotFoundError"
    assert "Advice" not in ended.error.traceback
    told = "".join(ended.logs.stderr)
    assert told.startswith("Advice: There is no module 'no_such_package'.")


@pytest.mark.parametrize(
    ("code", "language", "text"),
    [
        ("'bar'", "python", "bar"),
        ('"it\'s"', "python", "it's"),
        (r"'a\nb'", "python", r"a\nb"),
        ("''", "python", ""),
        ("['a']", "python", "['a']"),
        ("display('shown')", "python", "shown"),
        ("await Promise.resolve('bar')", "javascript", "bar"),
    ],
)
def test_a_text_is_told_without_its_quotes(
    sandbox: Sandbox, code: str, language: str, text: str
) -> None:
    (result,) = sandbox.run_code(code, language=language).results

    assert result.text == text


def test_indented_cells_run_and_have_their_value(sandbox: Sandbox) -> None:
    run = sandbox.run_code(
        """
        for n in range(2):
            print(n)
        n
        """
    )

    assert (run.text, run.error) == ("1", None)
    assert "".join(run.logs.stdout) == "0\n1\n"


def test_a_text_that_is_cut_says_so_itself_and_on_stderr(sandbox: Sandbox) -> None:
    said = "cut: the first 200000 characters are kept"
    for code, language in (("'x' * 300_000", "python"), ("'x'.repeat(300_000)", "javascript")):
        run = sandbox.run_code(code, language=language)

        assert run.text is not None
        assert run.text.endswith(f"x\n[{said}]")
        assert "".join(run.logs.stderr) == f"[output 1: text/plain was {said}]\n"
    large = sandbox.run_code("display({'text/plain': 'it', 'text/html': 'x' * 2**24}, raw=True)")
    assert [(each.text, each.html) for each in large.results] == [("it", None)]
    assert "[output 1: text/html was left out: too large" in "".join(large.logs.stderr)


def test_what_is_left_out_stands_in_the_logs(sandbox: Sandbox) -> None:
    run = sandbox.run_code(
        "import os\nos.symlink('x', 'artifacts/link')\nfor n in range(22): display(n)"
    )
    assert (len(run.results), run.error) == (20, None)
    assert "".join(run.logs.stderr).splitlines() == [
        "[file link was left out: a symbolic link: links are not followed]",
        "[output 21 was left out: too many outputs: at most 20 are kept]",
        "[output 22 was left out: too many outputs: at most 20 are kept]",
    ]
    assert sandbox.run_code("1").logs.stderr == []


def test_rich_values_have_their_names(sandbox: Sandbox) -> None:
    (rich,) = sandbox.run_code(RICH).results
    assert (rich.text, rich.html, rich.markdown, rich.svg) == (
        "rich",
        "<b>h</b>",
        "**m**",
        "<svg/>",
    )
    assert (rich.png, rich.jpeg, rich.pdf) == ("cG5n", "anBlZw==", "cGRm")
    assert (rich.latex, rich.json) == ("$l$", {"j": 1})
    assert rich.extra == {"application/x-own+json": {"o": 1}}


@pytest.mark.parametrize(
    ("code", "json"),
    [
        ("[1, 'é', None, 0.5, float('nan'), (2, [])]", [1, "é", None, 0.5, None, [2, []]]),
        ("{'a': {1: True}, None: {False: 2**64 - 1}}", {"a": {"1": True}, "null": {"false": 2**64 - 1}}),
        ("import numpy, datetime\n[numpy.arange(2), numpy.float64(1), datetime.date(2020, 1, 2)]", [[0, 1], 1.0, "2020-01-02"]),
        ("import dataclasses\n@dataclasses.dataclass\nclass D:\n  x: int\n[D(3)]", [{"x": 3}]),
        # What is in it has none, or it is no list and no dict.
        ("[object()]", None),
        ("[{(1, 2): 3}]", None),
        ("[2**64]", None),
        ("x = []\nx.append(x)\nx", None),
        ("list(range(20_001))", None),
        ("(1, 2)", None),
        ("'[1]'", None),
    ],
)  # fmt: skip
def test_a_list_or_a_dict_has_its_json(sandbox: Sandbox, code: str, json: object) -> None:
    (shown,) = sandbox.run_code(code).results

    assert (shown.json, shown.is_main_result) == (json, True)
    assert shown.text


# As smolagents tells an agent's answer: the name decides.
MADE_IN_A_FUNCTION = """
def answer():
    class Answered(BaseException):
        pass
    raise Answered("safe:42")
answer()
"""


@pytest.mark.parametrize(
    ("code", "language", "name", "value"),
    [
        ("print('before')\n1/0", "python", "ZeroDivisionError", "division by zero"),
        ("a b c", "python", "SyntaxError", "invalid syntax"),
        (MADE_IN_A_FUNCTION, "python", "Answered", "safe:42"),
        ("nowhere", "javascript", "ReferenceError", "nowhere is not defined"),
        ("exit 3", "bash", "Error", "exit status 3"),
        (
            "raise RuntimeError('worker failed:\\nValueError: bad input')",
            "python",
            "RuntimeError",
            "worker failed:\nValueError: bad input",
        ),
        (
            "class NotFound(Exception): pass\nraise NotFound('no row\\nfor id 7')",
            "python",
            "NotFound",
            "no row\nfor id 7",
        ),
        ("import sys; sys.exit('usage: prog FILE')", "python", "SystemExit", "usage: prog FILE"),
        (
            "raise ExceptionGroup('g', [ValueError(1)])",
            "python",
            "ExceptionGroup",
            "g (1 sub-exception)",
        ),
        (
            "throw new AggregateError([new Error('a')], 'all')",
            "javascript",
            "AggregateError",
            "all",
        ),
    ],
)
def test_what_ends_a_cell_is_its_error(
    sandbox: Sandbox, code: str, language: str, name: str, value: str
) -> None:
    error = sandbox.run_code(code, language=language).error
    assert error is not None
    assert (error.name, error.value) == (name, value)


def test_a_traceback_is_told_once(sandbox: Sandbox) -> None:
    ended = sandbox.run_code("import sys\nprint('before', file=sys.stderr)\nraise ValueError('x')")
    assert ended.error is not None
    assert ended.error.traceback.endswith("ValueError: x\n")
    assert "".join(ended.logs.stderr) == "before\n"
    odd = sandbox.run_code("x = = 1")
    assert odd.error is not None
    assert (odd.error.name, odd.logs.stderr) == ("SyntaxError", [])
    caught = sandbox.run_code(
        "import traceback\ntry: 1 / 0\nexcept Exception: traceback.print_exc()\nraise KeyError('k')"
    )
    assert caught.error is not None
    assert caught.error.name == "KeyError"
    assert "ZeroDivisionError" in "".join(caught.logs.stderr)
    assert "KeyError" not in "".join(caught.logs.stderr)


def test_lines_of_a_notebook_have_their_main_value(sandbox: Sandbox) -> None:
    (shown,) = sandbox.run_code("y = !echo a\ny").results
    assert (shown.text, shown.is_main_result) == ("['a']", True)
    assert sandbox.run_code("41 + 1;").results == []
    (html,) = sandbox.run_code(
        "from IPython.display import display, HTML\ndisplay(HTML('<b>x</b>'))"
    ).results
    assert (html.html, html.is_main_result) == ("<b>x</b>", False)


def test_contexts_are_made_listed_restarted_and_removed(sandbox: Sandbox) -> None:
    made = sandbox.create_code_context(cwd="/home/user/sub", language="python")
    assert sandbox.run_code("import os; z = 1; os.getcwd()", context=made).text == "/home/user/sub"
    assert sandbox.run_code("const a = 5; a * 2", language="javascript").text == "10"
    assert sandbox.run_code("a * 3", language="js").text == "15"
    assert (
        sandbox.run_code("enum N { three = 3 }; let n: N = N.three; n", language="ts").text == "3"
    )
    wrong = sandbox.run_code("const c: number = ;", language="ts").error
    assert wrong is not None
    assert wrong.name == "SyntaxError"
    assert sandbox.run_code("echo hi", language="bash").logs.stdout == ["hi\n"]
    known = {each.language for each in sandbox.list_code_contexts()}
    assert {"python", "javascript", "bash"} <= known
    sandbox.restart_code_context(made)
    error = sandbox.run_code("z", context=made).error
    assert error is not None
    assert error.name == "NameError"
    sandbox.remove_code_context(made)
    with pytest.raises(NotFoundException):
        sandbox.run_code("z", context=made)
    with pytest.raises(NotFoundException):
        sandbox.remove_code_context(made)
    with pytest.raises(SandboxException):
        sandbox.create_code_context(language="fortran")


def test_a_new_sandbox_has_a_context_of_python_and_one_of_javascript(door: Site) -> None:
    with opened() as sandbox:
        python, javascript = sandbox.list_code_contexts()
        assert (python.language, javascript.language) == ("python", "javascript")
        assert javascript.cwd == python.cwd
        # Nothing has run in it, so there is nothing to begin anew and nothing to end.
        sandbox.restart_code_context(javascript)
        sandbox.remove_code_context(javascript)
        assert sandbox.run_code("const a = 5; a", context=javascript).text == "5"
        assert sandbox.run_code("a * 2", language="javascript").text == "10"
        made = sandbox.create_code_context()
        listed = sandbox.list_code_contexts()
        assert [each.id for each in listed] == [python.id, javascript.id, made.id]
        sandbox.remove_code_context(javascript)
        assert sandbox.run_code("typeof a", language="javascript").text == "undefined"


def test_who_leaves_a_cell_stops_it_and_keeps_the_context(door: Site, sandbox: Sandbox) -> None:
    sandbox.run_code("kept = 7")
    with pytest.raises(TimeoutException):
        sandbox.run_code("import time; time.sleep(600)", timeout=1)
    wait_until(lambda: records(door)[0]["status"] == "cancelled", 60)
    assert sandbox.run_code("kept").text == "7"
