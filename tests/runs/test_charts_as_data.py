"""Figures and data frames come back as data beside their pictures, whatever drew them."""

from __future__ import annotations

from typing import Any

import pytest

from providers.runtime.guest.display import CHART, COLUMNS
from tests.conftest import require
from tests.support.rich import require_module
from tests.support.warm_pools import WarmPool

FIGURES = """
import datetime as dt
import matplotlib.pyplot as plt

def figure(title):
    axes = plt.figure().add_subplot()
    axes.set_title(title)
    return axes

line = figure("line")
line.plot([1, 2, 3], [4, 5, float("nan")], label="named")
line.plot([1, 2], [3, 3])
line.axhline(3)
line.set_xlabel("Time (s)")
line.set_ylabel("speed [m/s]")
dates = figure("dates")
dates.plot([dt.date(2020, 1, 1), dt.date(2020, 2, 1)], [1, 1000])
dates.set_yscale("log")
scatter = figure("scatter")
scatter.scatter(["a", "b"], [3, 4], label="points")
bar = figure("bar")
bar.bar([-0.2, 0.8], [1, 2], 0.4, label="A", yerr=[0.1, 0.1])
bar.bar([0.2, 1.2], [3, 4], 0.4, label="B")
bar.set_xticks([0, 1], ["p", "q"])
lying = figure("lying")
lying.barh(["x", "y"], [1, 2])
lying.set_xlabel("value")
pie = figure("pie")
pie.pie([1, 3], labels=["a", "b"])
box = figure("box")
box.boxplot([[1, 2, 3, 4, 20], [2, 3, 4, 5, 6]])
flat = figure("flat")
flat.boxplot([[1, 2, 3, 4, 20]], vert=False, patch_artist=True, showmeans=True)
together, (left, right) = plt.subplots(1, 2)
together.suptitle("together")
left.plot([1])
right.pie([1])
figure("image").imshow([[1, 2]])
figure("large").plot(range(30_000))
"""

FRAMES = """
import pandas
frame = pandas.DataFrame({
    "n": [1.5, None], "day": pandas.to_datetime(["2020-01-01", None]), 7: ["x", {1}],
    "whole": [1, 2], "flag": [True, False]})
display(frame)
display(pandas.DataFrame({"n": range(30_000)}))
"""

BOX = {"min": 1.0, "first_quartile": 2.0, "median": 3.0, "third_quartile": 4.0, "max": 4.0}


@pytest.fixture(scope="module")
def charts() -> dict[str, Any]:
    """By title, as one program has drawn them."""
    require("bwrap")
    require_module("matplotlib")
    require_module("pandas")
    with WarmPool() as pool:
        result = pool.run(FIGURES + FRAMES, timeout=60, rich_output_count=20)
        # Where there is no room for both, the picture stays.
        code = "import matplotlib.pyplot as plt\nplt.plot(range(9000))"
        (narrow,) = pool.run(code, timeout=60, rich_output_bytes=60_000).outputs
    assert result.stderr == ""
    found = [(each.get(CHART), "image/png" in each) for each in result.outputs]
    told = {str((chart or {}).get("title")): chart for chart, _ in found}
    assert sum(drawn for _, drawn in found) == 11
    told["frames"] = [each.get(COLUMNS) for each in result.outputs if "text/html" in each]
    told["narrow"] = narrow
    return told


def test_lines_have_their_points_their_names_and_their_axes(charts: dict[str, Any]) -> None:
    line = charts["line"]
    assert (line["type"], line["x_label"], line["x_unit"]) == ("line", "Time (s)", "s")
    assert (line["y_unit"], line["x_scale"], line["y_scale"]) == ("m/s", "linear", "linear")
    assert len(line["x_ticks"]) == len(line["x_tick_labels"])
    assert line["elements"] == [
        {"label": "named", "points": [[1, 4.0], [2, 5.0], [3, None]]},
        {"label": "Line 1", "points": [[1, 3], [2, 3]]},
    ]
    dates = charts["dates"]
    assert (dates["x_scale"], dates["y_scale"]) == ("datetime", "log")
    assert dates["elements"][0]["points"] == [["2020-01-01", 1], ["2020-02-01", 1000]]
    assert dates["x_ticks"][0].startswith("2020-01-01T00:00:00")


def test_points_have_their_places(charts: dict[str, Any]) -> None:
    scatter = charts["scatter"]
    assert (scatter["type"], scatter["x_scale"]) == ("scatter", "categorical")
    assert scatter["x_tick_labels"] == ["a", "b"]
    assert scatter["elements"] == [{"label": "points", "points": [[0.0, 3.0], [1.0, 4.0]]}]


def test_bars_have_the_name_that_stands_below_them(charts: dict[str, Any]) -> None:
    told = [(each["group"], each["label"], each["value"]) for each in charts["bar"]["elements"]]
    assert told == [("A", "p", 1), ("A", "q", 2), ("B", "p", 3), ("B", "q", 4)]
    lying = charts["lying"]
    assert (lying["type"], lying["y_label"]) == ("bar", "value")
    assert [(each["label"], each["value"]) for each in lying["elements"]] == [("x", 1), ("y", 2)]


def test_wedges_have_their_angles(charts: dict[str, Any]) -> None:
    told = [(each["label"], round(each["angle"], 3)) for each in charts["pie"]["elements"]]
    assert (charts["pie"]["type"], told) == ("pie", [("a", 90.0), ("b", 270.0)])


def test_boxes_have_their_quartiles_however_they_lie(charts: dict[str, Any]) -> None:
    box, other = charts["box"]["elements"]
    assert (charts["box"]["type"], box) == (
        "box_and_whisker",
        {"label": "1", **BOX, "outliers": [20.0]},
    )
    assert (other["median"], other["outliers"]) == (4.0, [])
    assert charts["flat"]["elements"] == [{"label": "1", **BOX, "outliers": [20.0]}]


def test_figures_of_several_charts_have_all_of_them(charts: dict[str, Any]) -> None:
    both = charts["together"]
    assert (both["type"], [each["type"] for each in both["elements"]]) == (
        "superchart",
        ["line", "pie"],
    )


def test_what_is_no_chart_or_too_much_is_a_picture(charts: dict[str, Any]) -> None:
    assert charts["image"] == {"type": "unknown", "title": "image", "elements": []}
    assert "large" not in charts
    assert set(charts["narrow"]) == {"image/png", "text/plain"}


def test_data_frames_have_their_columns(charts: dict[str, Any]) -> None:
    small, large = charts["frames"]
    assert small == {
        "n": [1.5, None],
        "day": ["2020-01-01T00:00:00", None],
        "7": ["x", "{1}"],
        "whole": [1, 2],
        "flag": [True, False],
    }
    assert large is None


ODD_CELLS = """
import numpy, pandas

class Odd:
    def item(self): raise RuntimeError("no item")
    def __str__(self): return "odd"

frame = pandas.DataFrame({
    "id": [1, 2, 3],
    "vec": [numpy.array([0.5, float("nan")]), pandas.Series([1, 2]), numpy.array([])],
    "odd": [Odd(), b"x", {"a": (1, float("inf"))}],
    "deep": [numpy.zeros((2, 2), dtype=int), pandas.DataFrame({"x": [1]}), [1, {2}]],
})
display(frame)
display(pandas.DataFrame([[1, 2, 3, 4]], columns=["a", "a", "a.1", 7]))
display(pandas.DataFrame({"large": [numpy.zeros(30_000), list(range(30_000)), 1]}))
"""


def test_an_odd_cell_loses_no_other_and_two_columns_of_one_name_stay_two() -> None:
    require("bwrap")
    require_module("pandas")
    with WarmPool() as pool:
        result = pool.run(ODD_CELLS, timeout=60)
    assert result.stderr == ""
    cells, named, large = [output[COLUMNS] for output in result.outputs]
    assert cells["id"] == [1, 2, 3]
    assert cells["vec"] == [[0.5, None], [1, 2], []]
    assert cells["odd"] == ["odd", "b'x'", {"a": [1, None]}]
    assert cells["deep"][0] == [[0, 0], [0, 0]]
    assert cells["deep"][2] == "[1, {2}]"
    assert named == {"a": [1], "a.2": [2], "a.1": [3], "7": [4]}
    assert [len(str(each)) <= 1000 for each in large["large"]] == [True, True, True]
