"""Cells take what notebook code expects: commands, magics, IPython's modules, a running loop."""

from __future__ import annotations

import time

import pytest

from providers.runtime.guest.notebook import is_quiet, plain
from tests.support.kept_guest import KeptGuest


@pytest.mark.parametrize(
    "code",
    ["x = '''\n!ls\n%time 1\n'''", "a = 5 \\\n  % 3", "b = (7\n %2)", "def f(): pass", "# !ls"],
)
def test_what_is_python_stays_as_it_is(code: str) -> None:
    assert plain(code) == code


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("\n    x = 1\n    if x:\n        y = 2\n", "\nx = 1\nif x:\n    y = 2\n"),
        ("  \n\t\tx = 1\n\n\t\tx", "  \nx = 1\n\nx"),
        # Within a text what begins with it loses it too, as in IPython, and nothing else does.
        ("  x = '''\n   a\n b\n'''", "x = '''\n a\n b\n'''"),
        ("    x = 1\n  y = 2", "x = 1\n  y = 2"),
        # What is Python is no text of somebody's that lies within another.
        ("    # c\ndef f():\n    return 1", "    # c\ndef f():\n    return 1"),
        ("x = 1\n    y = 2", "x = 1\n    y = 2"),
        ("   \n  ", "   \n  "),
    ],
)
def test_the_indentation_of_the_first_line_is_taken_off_all(code: str, expected: str) -> None:
    assert plain(code) == expected


def test_lines_of_a_notebook_become_python_and_keep_their_places() -> None:
    code = "!a \\\n  b\ny = !c {y}\nif y:\n    %time f(1)\nname?\nz = = 1"

    lines = plain(code).split("\n")

    assert lines[0] == "get_ipython().system('a   b')" or lines[0] == "get_ipython().system('a  b')"
    assert lines[1] == ""
    assert lines[2] == "y = get_ipython().getoutput('c {y}')"
    assert lines[4] == "    get_ipython().run_line_magic('time', 'f(1)')"
    assert lines[5] == "get_ipython().run_line_magic('pinfo', 'name')"
    assert lines[6] == "z = = 1"


@pytest.mark.parametrize(
    ("code", "line", "column", "quiet"),
    [
        ("x;", 1, 1, True),
        ("(x\n);  # c", 1, 2, True),
        ("'é';", 1, 4, True),
        ("x  # a;b", 1, 1, False),
        ("x", 1, 1, False),
    ],
)
def test_a_semicolon_behind_the_last_expression_is_found(
    code: str, line: int, column: int, quiet: bool
) -> None:
    assert is_quiet(code, line, column) is quiet


def test_a_semicolon_suppresses_the_value(kept: KeptGuest) -> None:
    assert kept.run("41 + 1;").shown == []
    assert kept.run("'a;b'").shown == ["'a;b'"]


def test_indented_cells_run(kept: KeptGuest) -> None:
    ran = kept.run(
        """
    names = [1, 2]
    for each in names:
        !echo {each}
    text = '''
      a
    b'''
    names, text
    """,
        keeps_indent=True,
    )
    magic = kept.run("\n    %%writefile a.txt\n    abc\n      def\n", keeps_indent=True)
    timed = kept.run("\n    %%time\n    z = 20\n    z * 2\n", keeps_indent=True)

    assert (ran.exit_code, ran.stdout) == (0, "1\n2\n"), ran.stderr
    assert ran.shown == ["([1, 2], '\\n  a\\nb')"]
    assert (magic.exit_code, timed.shown) == (0, ["40"])
    assert kept.run("open('a.txt').read()").shown == ["'abc\\n  def\\n'"]


def test_what_an_indented_cell_raises_shows_its_lines(kept: KeptGuest) -> None:
    ran = kept.run("\n    x = 0\n    y = 1 / x\n", keeps_indent=True)
    faulty = kept.run("\n    x = 0\n    y = = x\n", keeps_indent=True)

    assert "\n    y = 1 / x\n" in ran.stderr
    marks = ran.stderr.splitlines()[-3:-1]
    # Interpreters since 3.11 mark the place, below what failed.
    if "^" in marks[1]:
        assert marks[1] == "        ~~^~~"
    assert "line 3\n    y = = x\n        ^\nSyntaxError" in faulty.stderr


def test_commands_print_and_give_their_lines(kept: KeptGuest) -> None:
    ran = kept.run("name = 'there'\n!echo hi {name} $name; echo fault >&2")
    lines = kept.run("y = !echo a; echo b\ny, y.n")
    shells = kept.run("for i in range(2):\n    !echo $i")

    assert (ran.stdout, ran.stderr) == ("hi there there\n", "fault\n")
    assert lines.shown == ["(['a', 'b'], 'a\\nb')"]
    assert shells.stdout == "0\n1\n"


def test_bash_cells_run_and_tell_their_failure(kept: KeptGuest) -> None:
    ran, failed = kept.run("%%bash\necho hello\n"), kept.run("%%bash\nexit 3")

    assert (ran.exit_code, ran.stdout) == (0, "hello\n")
    assert failed.exit_code == 1
    assert "CalledProcessError" in failed.stderr


def test_magics_of_notebooks_do_what_they_say(kept: KeptGuest) -> None:
    timed = kept.run("%%time\nz = 20\nz * 2")
    written = kept.run("%%writefile a.txt\nabc\ndef\n")
    captured = kept.run("%%capture out\nprint('in')")

    assert (timed.shown, "Wall time:" in timed.stdout) == (["40"], True)
    assert written.stdout == "Writing a.txt\n"
    assert kept.run("open('a.txt').read()").shown == ["'abc\\ndef\\n'"]
    assert captured.stdout == ""
    assert kept.run("str(out)").shown == ["'in\\n'"]
    assert kept.run("%matplotlib inline\n%load_ext autoreload\nz").shown == ["20"]
    assert "%nowhere" in kept.run("%nowhere").stderr


def test_pip_fails_at_once_without_a_network(kept: KeptGuest) -> None:
    for code in ("%pip install nothing-like-it", "!pip install nothing-like-it"):
        ran = kept.run(code, timeout=60)

        assert "No matching distribution found for nothing-like-it" in ran.stderr, ran.stderr
        assert ran.stderr.count("Retrying") == 0
        assert "externally-managed" not in ran.stderr


def test_modules_of_ipython_show_by_our_way(kept: KeptGuest) -> None:
    shown = kept.run("from IPython.display import display, HTML, Image\ndisplay(HTML('<b>x</b>'))")
    kinds = kept.run("import IPython\nIPython.get_ipython() is get_ipython()")
    raw = kept.run("display({'text/html': '<p>'}, raw=True)")
    image = kept.run("Image(b'\\x89PNG...')")

    assert shown.parts["output:0:text/html"] == b"<b>x</b>"
    assert kinds.shown == ["True"]
    assert raw.parts["output:0:text/html"] == b"<p>"
    assert image.parts["output:0:image/png"] == b"\x89PNG..."


PLOTLY = """
import os, sys
os.makedirs('plotly/io')
open('plotly/__init__.py', 'w').close()
open('plotly/basedatatypes.py', 'w').write('''
class BaseFigure:
    def to_json(self): return '{"data": []}'
    def to_html(self, full_html, include_plotlyjs): return '<div>chart</div>'
    def show(self):
        import plotly.io as pio
        pio.show(self)
''')
open('plotly/io/__init__.py', 'w').write('def show(figure): raise RuntimeError("no browser")')
import plotly.basedatatypes
plotly.basedatatypes.BaseFigure().show()
"""


def test_a_figure_of_plotly_is_shown(kept: KeptGuest) -> None:
    ran = kept.run(PLOTLY)

    assert ran.exit_code == 0, ran.stderr
    assert ran.parts["output:0:text/html"] == b"<div>chart</div>"
    assert ran.parts["output:0:application/vnd.plotly.v1+json"] == b'{"data":[]}'


PILLOW = """
import os, sys
os.makedirs('PIL')
open('PIL/__init__.py', 'w').close()
open('PIL/Image.py', 'w').write('''
class Image:
    def save(self, fp, format=None, **options):
        if hasattr(fp, 'write'): fp.write(b'picture')
        else: open(fp, 'wb').write(b'picture')
    def show(self): raise RuntimeError('no screen')
    def _repr_png_(self): return b'png'
''')
from PIL.Image import Image
Image().save('a.png')
"""


def test_a_picture_of_pillow_is_shown_where_it_is_saved_under_a_name(kept: KeptGuest) -> None:
    named = kept.run(PILLOW)
    buffered = kept.run("import io\nImage().save(io.BytesIO(), 'png')")
    shown = kept.run("Image().show()")

    assert named.exit_code == 0, named.stderr
    assert named.parts["output:0:image/png"] == b"png"
    assert kept.run("open('a.png', 'rb').read()").shown == ["b'picture'"]
    assert buffered.shown == []
    assert shown.parts["output:0:image/png"] == b"png"


MATPLOTLIB = """
import os
os.makedirs('matplotlib')
open('matplotlib/__init__.py', 'w').close()
open('matplotlib/font_manager.py', 'w').write('''
import logging
logger = logging.getLogger(__name__)
logger.warning('Matplotlib is building the font cache; this may take a moment.')
logger.warning('findfont: Font family %r not found.', 'SimHei')
''')
os.makedirs('mpl_toolkits/mplot3d')
open('mpl_toolkits/mplot3d/__init__.py', 'w').write('ours = True')
import sys, types
sys.modules['mpl_toolkits'] = other = types.ModuleType('mpl_toolkits')
other.__path__ = ['/elsewhere/mpl_toolkits']
import matplotlib.font_manager
from mpl_toolkits.mplot3d import ours
"""


def test_a_first_plot_tells_nothing_of_font_caches_and_other_versions(kept: KeptGuest) -> None:
    ran = kept.run(MATPLOTLIB)

    assert (ran.exit_code, ran.stderr) == (0, "findfont: Font family 'SimHei' not found.\n")
    assert kept.run("ours").shown == ["True"]


def test_tasks_are_made_without_await_and_go_on_between_cells(kept: KeptGuest) -> None:
    kept.run(
        """
        import asyncio
        done = []
        async def work():
            await asyncio.sleep(0)
            done.append(True)
            return 'worked'
        task = asyncio.create_task(work())
        asyncio.run(asyncio.sleep(0))
        """
    )

    # No cell awaits it; the next one may come before the loop has had its turn.
    deadline = time.monotonic() + 60
    while kept.run("done").shown != ["[True]"]:
        assert time.monotonic() < deadline
    assert kept.run("await task").shown == ["'worked'"]


def test_other_loops_run_in_a_cell(kept: KeptGuest) -> None:
    ran = kept.run(
        """
        import asyncio
        async def one(): return 1
        loop = asyncio.get_event_loop()
        found = [
            asyncio.run(one()),
            loop.run_until_complete(one()),
            asyncio.new_event_loop().run_until_complete(one()),
            asyncio.get_event_loop() is loop is asyncio.get_running_loop(),
        ]
        found
        """
    )

    assert ran.shown == ["[1, 1, 1, True]"]
    assert kept.run("asyncio.get_event_loop() is loop, await one()").shown == ["(True, 1)"]


def test_what_a_task_raises_ends_no_context(kept: KeptGuest) -> None:
    kept.run(
        "import asyncio\nx = 1\nasync def f(): raise SystemExit(3)\nt = asyncio.create_task(f())"
    )
    kept.run("asyncio.get_event_loop().call_soon(lambda: 1 / 0)")

    assert kept.run("x").shown == ["1"]
    assert kept.run("await asyncio.sleep(0, 2)").shown == ["2"]


@pytest.mark.parametrize(
    "code",
    [
        "import sys; sys.stdout.close(); sys.stderr.close()",
        "import io, sys; w = io.TextIOWrapper(sys.stdout.buffer); sys.stdout = sys.__stdout__; del w",
        "import io, sys; sys.stdout = io.TextIOWrapper(sys.stdout.detach())",
        "import io, sys; sys.stdout = io.StringIO()",
        "import sys; sys.stdout = None; sys.__stdout__ = None",
        "import sys; del sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__",
        "import os; os.close(1); os.close(2)",
        "import os; null = os.open('/dev/null', os.O_WRONLY); os.dup2(null, 1); os.dup2(null, 2)",
    ],
)
def test_a_lost_stdout_is_there_for_the_next_cell(kept: KeptGuest, code: str) -> None:
    kept.run(code)
    ran = kept.run("import sys\nprint('heard')\nprint('too', file=sys.stderr)")

    assert (ran.exit_code, ran.stdout, ran.stderr) == (0, "heard\n", "too\n")


def test_what_c_code_prints_is_its_cells(kept: KeptGuest) -> None:
    assert kept.run("import ctypes\nn = ctypes.CDLL(None).printf(b'text')").stdout == "text"
    assert kept.run("print('next')").stdout == "next\n"


def test_what_writes_on_to_stdout_stays_around_it(kept: KeptGuest) -> None:
    kept.run(
        """
        import sys
        class Tee:
            def __init__(self, out): self.out, self.log = out, []
            def write(self, text):
                self.log.append(text)
                return self.out.write(text)
            def flush(self): self.out.flush()
        sys.stdout = Tee(sys.stdout)
        """
    )
    ran = kept.run("print('seen')\n!echo by a command\nsys.stdout.log[:1]")

    assert (ran.stdout, ran.shown) == ("seen\nby a command\n", ["['seen']"])
