"""Plots and rich values come back as MIME bundles: bounded, checked, and apart from the text."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator

import pytest

from providers.runtime.guest.display import CHART
from providers.runtime.pool import claims
from providers.runtime.pool.claims import read_outputs
from providers.values import RunLimits
from tests.conftest import require
from tests.support.rich import image_size, require_module
from tests.support.sandboxes import long_enough
from tests.support.warm_pools import WarmPool


@pytest.fixture(scope="module")
def pool() -> Iterator[WarmPool]:
    require("bwrap")
    with WarmPool() as pool:
        yield pool


PLOT = "import matplotlib.pyplot as plt\nplt.plot([1, 2, 1])\n"


@pytest.fixture
def plotting(pool: WarmPool) -> WarmPool:
    require_module("matplotlib")
    return pool


def test_an_open_figure_comes_back_at_the_end(plotting: WarmPool) -> None:
    result = plotting.run(PLOT + "print('drawn')", timeout=60)
    assert (result.exit_code, result.stdout) == (0, "drawn\n")
    (output,) = result.outputs
    assert output["text/plain"].startswith("<Figure size 640x480")
    width, height = image_size(output["image/png"])
    assert width > 300
    assert height > 200


def test_show_shows_what_is_open_and_closes_it(plotting: WarmPool) -> None:
    code = PLOT + "plt.show()\nprint(plt.get_fignums())\nplt.figure(); plt.plot([1]); plt.show()"
    result = plotting.run(code, timeout=60)
    assert (result.exit_code, result.stdout) == (0, "[]\n")
    assert len(result.outputs) == 2
    assert "non-interactive" not in result.stderr


def test_show_imported_by_name_works_too(plotting: WarmPool) -> None:
    code = "from matplotlib.pyplot import plot, show\nplot([1, 2])\nshow(block=True)"
    assert len(plotting.run(code, timeout=60).outputs) == 1


def test_figures_come_in_the_order_they_were_made(plotting: WarmPool) -> None:
    code = """
        import matplotlib.pyplot as plt
        for width in (3, 6, 9):
            plt.figure(figsize=(width, 2)).add_subplot()
        def main():
            return "done"
    """
    result = plotting.run(code, timeout=60)
    assert result.result == "done"
    widths = [image_size(output["image/png"])[0] for output in result.outputs]
    assert widths == sorted(widths)
    assert len(widths) == 3


def test_an_empty_figure_is_no_output(plotting: WarmPool) -> None:
    assert plotting.run("import matplotlib.pyplot as plt\nplt.figure()", timeout=60).outputs == []


def test_a_figure_drawn_before_an_error_is_not_lost(plotting: WarmPool) -> None:
    result = plotting.run(PLOT + "1 / 0", timeout=60)
    assert result.exit_code == 1
    assert "ZeroDivisionError" in result.stderr
    assert len(result.outputs) == 1


def test_a_displayed_figure_is_not_shown_twice(plotting: WarmPool) -> None:
    result = plotting.run(PLOT + "display(plt.gcf())", timeout=60)
    assert [sorted(output) for output in result.outputs] == [[CHART, "image/png", "text/plain"]]


def test_matplotlib_is_not_imported_for_code_that_does_not_use_it(pool: WarmPool) -> None:
    code = "import sys; display(1); print([m for m in sys.modules if m.startswith('matplotlib')])"
    assert pool.run(code).stdout == "[]\n"


def test_a_data_frame_is_displayed_as_a_table(pool: WarmPool) -> None:
    require_module("pandas")
    code = "import pandas\ndisplay(pandas.DataFrame({'name': ['Ada'], 'n': [1]}))"
    (output,) = pool.run(code, timeout=60).outputs
    assert "<table" in output["text/html"]
    assert "Ada" in output["text/html"]
    assert "Ada" in output["text/plain"]


RICH = """
class Rich:
    def _repr_html_(self): return "<b>h\\u00e9</b>"
    def _repr_png_(self): return b"\\x89PNG not quite"
    def _repr_json_(self): return {"a": [1, None]}
    def _repr_latex_(self): return None
    def _repr_markdown_(self): return ("*m*", {"isolated": True})
    def __repr__(self): return "Rich()"
"""


def test_every_representation_of_a_value_is_there(pool: WarmPool) -> None:
    result = pool.run(RICH + "display(Rich(), 'text')\nprint('printed')")
    assert result.stdout == "printed\n"
    assert result.outputs == [
        {
            "text/html": "<b>hé</b>",
            "text/markdown": "*m*",
            "text/plain": "Rich()",
            "image/png": base64.b64encode(b"\x89PNG not quite").decode(),
            "application/json": {"a": [1, None]},
        },
        {"text/plain": "'text'"},
    ]


def test_the_last_value_of_a_prompt_is_rich_and_printed(pool: WarmPool) -> None:
    result = pool.run(RICH + "Rich()", entrypoint="repl")
    assert result.stdout == "Rich()\n"
    assert [sorted(output) for output in result.outputs] == [
        ["application/json", "image/png", "text/html", "text/markdown", "text/plain"]
    ]
    assert pool.run("1 + 1", entrypoint="repl").outputs == []


def test_a_bundle_of_the_values_own_is_taken(pool: WarmPool) -> None:
    code = """
        class Chart:
            def _repr_mimebundle_(self, include=None, exclude=None):
                data = {"application/vnd.chart.v1+json": {"x": 1}, "image/png": "aGVsbG8=\\n"}
                return data, {"image/png": {"width": 1}}
        display(Chart())
    """
    (output,) = pool.run(code).outputs
    assert output["application/vnd.chart.v1+json"] == {"x": 1}
    assert base64.b64decode(output["image/png"]) == b"hello"


def test_a_representation_that_fails_is_told_and_the_others_count(pool: WarmPool) -> None:
    code = """
        class Broken:
            def _repr_html_(self): raise KeyError("no")
            def _repr_json_(self): return {1, 2}
            def _repr_svg_(self): return "<svg/>"
            def __repr__(self): raise ValueError("nor this")
        display(Broken())
        print("goes on")
    """
    result = pool.run(code)
    assert (result.exit_code, result.stdout) == (0, "goes on\n")
    (output,) = result.outputs
    assert output["image/svg+xml"] == "<svg/>"
    assert "ValueError" in output["text/plain"]
    assert "text/html" not in output
    assert "Broken._repr_html_(): KeyError" in result.stderr


def test_what_was_displayed_before_the_deadline_is_kept(pool: WarmPool) -> None:
    result = long_enough(
        lambda seconds: pool.run("display('early')\nwhile True: pass", timeout=seconds),
        lambda result: bool(result.outputs),
        0.5,
    )
    assert result.timed_out
    assert result.outputs == [{"text/plain": "'early'"}]


def test_number_and_size_are_bounded(pool: WarmPool) -> None:
    many = pool.run("for n in range(30): display(n)", rich_output_count=5)
    assert many.outputs == [{"text/plain": str(n)} for n in range(5)]
    assert many.metadata["outputs_skipped"] == [
        [f"output {n}", "too many outputs: at most 5 are kept"] for n in range(6, 31)
    ]
    code = """
        class Big:
            def __init__(self, size): self.size = size
            def _repr_html_(self): return "x" * self.size
            def __repr__(self): return "Big"
        for size in (4000, 7000, 5000, 100_000_000): display(Big(size))
        def main(): return "the result is not lost"
    """
    large = pool.run(code, rich_output_bytes=10_000)
    # What it is stays said, where the rest of it has no room.
    assert [(len(each.get("text/html", "")), each["text/plain"]) for each in large.outputs] == [
        (size, "Big") for size in (4000, 0, 5000, 0)
    ]
    reason = "too large: at most 10000 bytes are kept in total for all outputs"
    assert large.metadata["outputs_skipped"] == [
        ["output 2: text/html", reason],
        ["output 4: text/html", reason],
    ]
    assert large.result == "the result is not lost"
    bare = "display({'text/html': 'x' * 20_000}, raw=True)\ndisplay('y' * 20_000)\ndisplay(1)"
    none = pool.run(bare, rich_output_bytes=10_000)
    assert none.outputs == [{"text/plain": "1"}]
    assert none.metadata["outputs_skipped"] == [["output 1", reason], ["output 2", reason]]


def test_a_text_that_is_cut_says_so_itself(pool: WarmPool) -> None:
    (output,) = (result := pool.run("display('x' * 300_000)")).outputs
    reason = "cut: the first 200000 characters are kept"
    assert output["text/plain"] == f"'{'x' * 199_999}\n[{reason}]"
    assert result.metadata["outputs_skipped"] == [["output 1: text/plain", reason]]


def test_children_and_threads_do_not_break_the_outputs(pool: WarmPool) -> None:
    code = """
        import os, threading
        if os.fork() == 0:
            display("of a child")
            os._exit(0)
        os.wait()
        threads = [threading.Thread(target=display, args=("x" * 5000,)) for _ in range(15)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
    """
    result = pool.run(code)
    assert result.exit_code == 0, result.stderr
    assert [len(output["text/plain"]) for output in result.outputs] == [5002] * 15


def test_code_may_have_a_display_of_its_own(pool: WarmPool) -> None:
    result = pool.run("def display(x): print('mine', x)\ndisplay(1)")
    assert (result.stdout, result.outputs) == ("mine 1\n", [])


HOSTILE = """
    import json, os
    def frame(header):
        text = json.dumps(header).encode()
        os.write(4, len(text).to_bytes(4, "big") + text)
    for parts in ([["x" * 300, 0]], [["\\udcff", 0]], [[f"a/b{n}", 0] for n in range(50)], []):
        frame({"type": "output", "parts": parts})
    frame({"type": "output", "parts": [["../../etc/passwd", 0], ["text/html:evil", 0]]})
    print("ended")
"""


def test_forged_outputs_harm_nothing(pool: WarmPool) -> None:
    result = pool.run(HOSTILE)
    assert (result.exit_code, result.stdout, result.outputs) == (0, "ended\n", [])


CLAIMS = {
    "too many": ({f"output:{n}:text/plain": b"x" for n in range(30)}, 20),
    "too large": ({"output:0:text/plain": b"x" * 9_000_000}, 0),
    "not a MIME type": ({"output:0:html": b"x", "output:0:../x": b"x", "output:0:": b"x"}, 0),
    "no number": ({"output:x:text/plain": b"x", "output:-1:text/plain": b"x"}, 0),
    "not JSON": ({"output:0:application/json": b"{", "output:1:application/json": b"NaN"}, 0),
    "lone surrogate": ({"output:0:application/json": b'"\\ud800"'}, 0),
    "too deep": ({"output:0:application/json": b"[" * 100_000}, 0),
    "not UTF-8": ({"output:0:text/html": b"\xff\0"}, 1),
}


@pytest.mark.parametrize(("parts", "accepted"), CLAIMS.values(), ids=CLAIMS)
def test_the_host_believes_no_claim_unchecked(parts: dict[str, bytes], accepted: int) -> None:
    assert len(read_outputs(parts, RunLimits())) == accepted


def test_values_are_counted_before_any_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "MOST_VALUES", 20)
    read: list[bytes] = []

    def parse(text: bytes) -> object:
        read.append(text)
        return json.loads(text)

    monkeypatch.setattr(claims, "parse_json", parse)
    few, many = b'["[[[,,,,,,,,,,,,,,,,,,,,,,,,", 1]', b"[" + b",".join([b"[]"] * 12) + b"]"
    parts = {
        "output:0:application/json": many,
        "output:0:text/plain": b"x",
        "output:1:application/vnd.x+json": few,
        "output:2:application/json": b"[1]",
        "output:3:application/json": b"[" + b",".join([b"1"] * 16) + b"]",
    }
    shown = read_outputs(parts, RunLimits())
    assert shown == [
        {"text/plain": "x"},
        {"application/vnd.x+json": json.loads(few)},
        {"application/json": [1]},
    ]
    assert many not in read


def test_text_is_made_safe_to_keep() -> None:
    outputs = read_outputs({"output:0:text/html": b"\xff\0ok"}, RunLimits())
    assert outputs == [{"text/html": "\ufffd\ufffdok"}]
