"""What a look at Python code finds, and that no text can hurt whoever looks."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from executions.capabilities.policies import capability
from executions.capabilities.policies.analysis import LOOKED, MOST, TOO_MUCH, UNPARSED, analyse
from executions.capabilities.policies.capability import Rules, may_be_python, own_modules
from executions.capabilities.policies.service import policy_from, presets

DENY: dict[str, Any] = {
    "mode": "deny",
    "imports": ["os", "subprocess", "socket"],
    "except": ["os.path"],
    "calls": ["eval", "compile", "os.system", "os.exec*", "os.rename", "open:write", ".write_text"],
}
CALLS = {"calls": DENY["calls"]}
ALLOW = {"mode": "allow", "imports": ["math", "numpy", "os.path"], "own": ["helper"]}


def found(code: str, rules: dict[str, Any]) -> list[tuple[int, str, str]]:
    outcome, findings = analyse(code, rules)
    assert outcome == LOOKED
    return findings


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("import os as o\n\no.system('id')", (3, "call", "os.system")),
        ("from os import system as s\ns('id')", (2, "call", "os.system")),
        ("__import__('os').system('id')", (1, "call", "os.system")),
        ("import importlib as i\ni.import_module('os').system('')", (2, "call", "os.system")),
        ("import os\ngetattr(os, 'sys' + 'tem')('id')", (2, "call", "os.system")),
        ("import os\nrun = os.system\nagain = run\nagain('id')", (4, "call", "os.system")),
        ("from os import *\nsystem('id')", (2, "call", "os.system")),
        ("import sys\nsys.modules['os'].system('id')", (2, "call", "os.system")),
        ("import os\nos.__dict__['system']('id')", (2, "call", "os.system")),
        ("import builtins as b\nb.eval('1')", (2, "call", "eval")),
        ("e = eval\ne('1')", (2, "call", "eval")),
        ("import os\nos.execvp('sh', [])", (2, "call", "os.execvp")),
        ("open('x', 'w')", (1, "call", "open")),
        ("open('x', mode=how)", (1, "call", "open")),
        ("Path('x').write_text('')", (1, "call", ".write_text")),
        # In a session the import may have been in an earlier cell.
        ("os.system('id')", (1, "call", "os.system")),
    ],
)
def test_a_call_is_found_by_whatever_name_it_is_made(
    code: str, expected: tuple[int, str, str]
) -> None:
    assert found(code, CALLS) == [expected]


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("import subprocess", (1, "import", "subprocess")),
        ("if 1:\n    from socket import socket as s", (2, "import", "socket.socket")),
        ("import os.path, socket", (1, "import", "socket")),
        ("__import__('socket')", (1, "import", "socket")),
        ("import os\n\nprint(os.environ)", (3, "import", "os.environ")),
        ("import os\nf(os)", (2, "import", "os")),
        ("from os import environ", (1, "import", "os.environ")),
    ],
)
def test_a_denied_module_is_found_and_what_is_excepted_of_it_is_not(
    code: str, expected: tuple[int, str, str]
) -> None:
    assert found(code, DENY) == [expected]


@pytest.mark.parametrize(
    "code",
    [
        "60*60",
        "import re\nre.compile('x')",
        "df.rename(columns={})",
        "import os\nos.path.join('a', 'b')",
        "from os import path\npath.join('a')",
        "import os.path as p\np.join('a')",
        "open('x').read()",
        "def compile(a): ...\ncompile(1)",
        "model.eval()",
        "'os.system'  # eval('x')",
        "import ossaudio, subprocesses",
        "from . import os",
    ],
)
def test_honest_code_passes(code: str) -> None:
    assert found(code, DENY) == []


def test_an_allowlist_takes_what_is_named_and_what_came_with_the_code() -> None:
    code = "from __future__ import annotations\nimport math, numpy.linalg, helper\nimport os.path\n"
    assert found(f"{code}from os import path\n__import__('math')", ALLOW) == []
    assert found("import os", ALLOW) == [(1, "import", "os")]
    assert found("from os import path, system", ALLOW) == [(1, "import", "os.system")]
    assert found("__import__(name)", ALLOW) == [(1, "import", "a name that is not in the text")]
    # A file is no way to what Python has under its name.
    files = ["helper.py", "pack/mod.py", "data.csv", "os.py", "subprocess/__init__.py"]
    assert own_modules(files) == ["helper", "pack"]


def test_templates_are_looked_at_as_python_and_known_languages_are_not() -> None:
    languages = ("python", "datascience", "nodejs", "bash", "command", "r")
    assert [each for each in languages if may_be_python(each)] == ["python", "datascience"]


@pytest.mark.parametrize("name", presets())
def test_honest_code_passes_every_preset_and_dangerous_code_none(name: str) -> None:
    policy = policy_from(name)
    policy.clean_fields()
    rules = dict(Rules(policy).of_code)
    honest = "import math, os, re, json\nre.compile('a')\nos.path.join('a', 'b')\n60*60\n"
    assert found(f"{honest}import pandas as pd\ndf = pd.read_csv('x')\ndf.rename()", rules) == []
    for code in ("import os\nos.system('id')", "import subprocess", "import socket", "eval(x)"):
        assert found(code, rules), code


# Only assertions on what is answered: how long it takes is bounded by processor time.
@pytest.mark.parametrize(
    ("code", "outcome"),
    [
        ("(" * 100_000, UNPARSED),
        ("\0", UNPARSED),
        ("def", UNPARSED),
        ("9" * 5000, UNPARSED),
        ("\udc80", UNPARSED),
        ("", LOOKED),
        ("-" * 100_000 + "1", TOO_MUCH),
        ("a" + ".a" * 100_000, TOO_MUCH),
        ("x = 1\n" * 100_000, TOO_MUCH),
        ("é" * 200_000, TOO_MUCH),
        # The parser looks at each piece for itself, in seconds and without a pause.
        ('f"' + "{a}" * 80_000 + '"', TOO_MUCH),
    ],
)
def test_hostile_text_ends_a_look_and_nothing_else(code: str, outcome: str) -> None:
    assert capability.look(code, DENY) == (outcome, [])
    assert capability.look("eval(x)", DENY) == (LOOKED, [(1, "call", "eval")])


WORDS = ["import os", "os", "eval", "(", ")", "=", ".", "\n", " ", "from os import *", "*", "'os'"]
WORDS += ["__import__", "getattr", "lambda a:", "sys.modules[", "]", "def os():", "as", "\0", "é"]


@settings(max_examples=150, deadline=None)
@given(st.one_of(st.text(), st.lists(st.sampled_from(WORDS)).map("".join)), st.booleans())
def test_any_text_is_judged_and_nothing_is_raised(code: str, allows: bool) -> None:
    outcome, findings = analyse(code, ALLOW if allows else DENY)
    assert outcome in (LOOKED, UNPARSED, TOO_MUCH)
    assert len(findings) <= MOST
    assert all(line >= 0 and len(name) <= 210 for line, _, name in findings)


def test_a_process_that_looks_ends_with_its_owner_and_one_that_has_ended_is_replaced() -> None:
    done = subprocess.run(capability._COMMAND, stdin=subprocess.DEVNULL, timeout=300, check=True)
    assert done.returncode == 0
    capability.look("1", DENY)
    capability._analysts._idle[-1]._process.kill()
    capability._analysts._idle[-1]._process.wait()
    assert capability.look("eval(x)", DENY) == (LOOKED, [(1, "call", "eval")])


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("x = 1\n!ls", [(2, "call", "os.system"), (2, "import", "subprocess")]),
        ("%%bash\nls", [(1, "call", "os.system"), (1, "import", "subprocess")]),
        ("y = !ls\nimport os", [(1, "call", "os.system"), (1, "import", "subprocess"), (2, "import", "os")]),
        ("%%time\n\nimport os", [(3, "import", "os")]),
        ("%time __import__('os')", [(1, "import", "os")]),
        ("%matplotlib inline\nx = '!ls'", []),
        ("%%time\n!ls", [(2, "call", "os.system"), (2, "import", "subprocess")]),
        ("%%capture --no-stderr out\n%time import os", [(1, "import", "os")]),
        ("%%timeit -n 10 -r 3\nimport os", [(2, "import", "os")]),
        ("%timeit -n 1 f()\nimport os", [(2, "import", "os")]),
        ("%time a b c\nimport os", [(2, "import", "os")]),
        ("ip = get_ipython()\nip.system('ls')", [(2, "call", "os.system"), (2, "import", "subprocess")]),
        ("import IPython as i\ni.get_ipython().magic('sx ls')", [(2, "call", "os.system"), (2, "import", "subprocess")]),
        ("get_ipython().magic('%matplotlib inline')\nget_ipython().magic('time import os')", [(1, "import", "os")]),
        ("import shutil as os\n%time os.rmtree('x')", []),
    ],
)  # fmt: skip
def test_what_notebooks_write_is_looked_at(code: str, expected: list[tuple[int, str, str]]) -> None:
    rules = {"mode": "deny", "imports": ["os", "subprocess"], "except": [], "calls": ["os.system"]}

    assert analyse(code, rules) == (LOOKED, expected)
    # A process of its own has the same module.
    assert capability.look(code, rules) == (LOOKED, expected)
