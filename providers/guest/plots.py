"""matplotlib's open figures, without importing matplotlib for programs that do not use it."""

import sys

TYPE_CHECKING = False  # as in typing, which is too dear to import here
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

PYPLOT = "matplotlib.pyplot"


def hook(show: "Callable[[], None]") -> None:
    """Have `plt.show()` call `show`, now or as soon as the program imports pyplot."""

    def show_all(*_: object, **__: object) -> None:
        # A function, because pyplot gives it a signature.
        show()

    if PYPLOT in sys.modules:
        vars(sys.modules[PYPLOT])["show"] = show_all
    else:
        sys.meta_path.insert(0, _Hook(show_all))


class _Hook:
    """Waits in the import system for pyplot, and for nothing else."""

    def __init__(self, show: "Callable[..., None]") -> None:
        self._show = show

    def find_spec(self, name: str, path: object = None, target: object = None) -> "Any":
        if name != PYPLOT:
            return None
        import importlib.util

        sys.meta_path.remove(self)
        spec: Any = importlib.util.find_spec(name)
        if spec is not None:
            execute = spec.loader.exec_module

            def execute_and_hook(module: "Any") -> None:
                execute(module)
                module.show = self._show

            spec.loader.exec_module = execute_and_hook
        return spec


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
