"""Figures of matplotlib and plotly, without importing either for programs that do not use it."""

import os
import sys

TYPE_CHECKING = False  # as in typing, which is too dear to import here
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

PYPLOT, PLOTLY = "matplotlib.pyplot", "plotly.io"


def hook(show: "Callable[[], None]", display: "Callable[[object], None]") -> None:
    """Have `plt.show()` call `show`, and the like of plotly and Pillow `display`, now or as soon as
    the program imports them."""

    def show_all(*_: object, **__: object) -> None:
        # A function, because pyplot gives it a signature.
        show()

    def show_one(value: object, *_: object, **__: object) -> None:
        display(value)

    when_imported("matplotlib", _be_quiet)
    when_imported(PYPLOT, lambda module: setattr(module, "show", show_all))
    when_imported(PLOTLY, lambda module: setattr(module, "show", show_one))
    when_imported("PIL.Image", lambda module: setattr(module.Image, "show", show_one))


def _be_quiet(matplotlib: "Any") -> None:
    """Keep off standard error what a first plot would say of the machine."""
    import logging

    def is_wanted(record: "logging.LogRecord") -> bool:
        # Each new sandbox looks for its fonts once, which is no fault.
        return "building the font cache" not in str(record.msg)

    logging.getLogger("matplotlib.font_manager").addFilter(is_wanted)
    # Debian's matplotlib loads its own part of this package, with which a newer one does not work.
    toolkits: "Any" = sys.modules.get("mpl_toolkits")
    above = os.path.dirname(os.path.dirname(matplotlib.__file__))
    if toolkits is not None and os.path.isdir(beside := os.path.join(above, "mpl_toolkits")):
        toolkits.__path__ = [beside, *(each for each in toolkits.__path__ if each != beside)]


def show_saved(display: "Callable[[object], None]") -> None:
    """Have `display` called with each picture of Pillow that the program saves under a name, as
    E2B's interpreter does. Not with those of matplotlib, whose figures are shown as such."""

    def act(module: "Any") -> None:
        save = module.Image.save

        def save_and_show(image: "Any", fp: "Any", *given: "Any", **options: "Any") -> None:
            save(image, fp, *given, **options)
            caller = sys._getframe(1).f_globals.get("__name__", "")
            if isinstance(fp, (str, os.PathLike)) and not str(caller).startswith("matplotlib."):
                display(image)

        save_and_show.__name__ = "save"
        save_and_show.__doc__ = save.__doc__
        module.Image.save = save_and_show

    when_imported("PIL.Image", act)


def when_imported(name: str, act: "Callable[[Any], None]") -> None:
    """Have `act` called with a module, now or as soon as the program imports it."""
    if name in sys.modules:
        act(sys.modules[name])
        return
    found = next((each for each in sys.meta_path if isinstance(each, _Hooks)), None)
    if found is None:
        found = _Hooks()
        sys.meta_path.insert(0, found)
    found.acts.setdefault(name, []).append(act)


class _Hooks:
    """Waits in the import system for some modules, and for nothing else."""

    def __init__(self) -> None:
        self.acts: "dict[str, list[Callable[[Any], None]]]" = {}

    def find_spec(self, name: str, path: object = None, target: object = None) -> "Any":
        acts = self.acts.pop(name, None)
        if acts is None:
            return None
        import importlib.util

        spec: Any = importlib.util.find_spec(name)
        if spec is None:
            # It may come later.
            self.acts[name] = acts
        else:
            execute = spec.loader.exec_module

            def execute_and_act(module: "Any") -> None:
                execute(module)
                for act in acts:
                    act(module)

            spec.loader.exec_module = execute_and_act
        return spec


def is_plotly(value: object) -> bool:
    """Whether it is a figure of plotly."""
    module = sys.modules.get("plotly.basedatatypes")
    return module is not None and isinstance(value, module.BaseFigure)


def plotly_bundle(figure: "Any") -> "dict[str, object]":
    """A figure of plotly as its data, and as a page that loads plotly's script from elsewhere."""
    import json

    return {
        "application/vnd.plotly.v1+json": json.loads(figure.to_json()),
        "text/html": figure.to_html(full_html=False, include_plotlyjs="cdn"),
    }


def is_figure(value: object) -> bool:
    module = sys.modules.get("matplotlib.figure")
    return module is not None and isinstance(value, module.Figure)


def open_figures() -> "list[Any]":
    """The figures that pyplot has open and something was drawn in, oldest first."""
    helpers = sys.modules.get("matplotlib._pylab_helpers")
    if helpers is None or PYPLOT not in sys.modules:
        return []
    managers = sorted(helpers.Gcf.get_all_fig_managers(), key=lambda manager: manager.num)
    figures = [manager.canvas.figure for manager in managers]
    # A figure without anything in it has one child, its background.
    return [figure for figure in figures if len(figure.get_children()) > 1]


def close_figures() -> None:
    if PYPLOT in sys.modules:
        sys.modules[PYPLOT].close("all")


def png(figure: "Any") -> bytes:
    """The figure as a PNG of its own resolution, trimmed to what is drawn."""
    import io

    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", bbox_inches="tight")
    return buffer.getvalue()
