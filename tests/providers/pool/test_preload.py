"""A template's modules are there before the code is, and a missing one is told clearly."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from providers.errors import CreationFailed
from providers.runtime.pool.pool import PoolSettings
from providers.runtime.pool.template import Template
from tests.conftest import require
from tests.support.rich import require_module
from tests.support.warm_pools import WarmPool


@pytest.fixture(scope="module")
def science() -> Iterator[WarmPool]:
    """Sandboxes in bubblewrap with pandas and matplotlib preloaded."""
    require("bwrap")
    require_module("pandas")
    require_module("matplotlib")
    template = Template("python", "python", preload=("pandas", "matplotlib.pyplot"))
    with WarmPool(PoolSettings(size=2, capacity=4), {"python": template}) as pool:
        yield pool


def test_a_preloaded_module_is_there_before_the_program(science: WarmPool) -> None:
    code = """
        import sys
        there = "pandas" in sys.modules
        import pandas
        frame = pandas.DataFrame({"a": [1, 2], "b": [3.5, 4.5]})
        def main():
            return [there, float(frame.b.sum())]
    """
    assert science.run(code).result == [True, 8.0]


def test_a_preloaded_plot_is_drawn(science: WarmPool) -> None:
    code = "import matplotlib.pyplot as plt\nplt.plot([1, 2, 1])\nplt.show()"
    result = science.run(code)
    assert (result.exit_code, result.stderr) == (0, "")
    (output,) = result.outputs
    assert sorted(output) == ["application/vnd.cofferdam.chart+json", "image/png", "text/plain"]


def test_a_run_with_preloaded_modules_sees_nothing_of_the_loading(science: WarmPool) -> None:
    code = "import os; print(sorted(os.listdir()), os.listdir('/tmp'), os.listdir('/dev/shm'))"
    result = science.run(code)
    assert result.stdout == "['artifacts', 'main.py'] [] []\n"
    assert result.stderr == ""


def test_tenant_runs_find_the_modules_again_each_time(science: WarmPool) -> None:
    settings = PoolSettings(size=1, capacity=4, isolation="tenant")
    template = Template("python", "python", preload=("pandas",))
    with WarmPool(settings, {"python": template}) as pool:
        code = "import sys; print('pandas' in sys.modules)\nimport pandas\npandas.left = True"
        check = "import pandas; print(hasattr(pandas, 'left'))"
        assert pool.run(code, "alice").stdout == "True\n"
        assert pool.run(check, "alice").stdout == "False\n"
        assert pool.stats()["kept"] == 1


def test_a_missing_module_fails_the_start_and_is_named() -> None:
    require("bwrap")
    template = Template("python", "python", preload=("json", "no_such_module"))
    with WarmPool(PoolSettings(size=1, patience=60), {"python": template}) as pool:
        with pytest.raises(CreationFailed) as failure:
            pool.acquire()
        assert "'no_such_module'" in failure.value.message
        assert "ModuleNotFoundError" in failure.value.message
        assert failure.value.code == "SB004"
        assert failure.value.retry_after
        assert "no_such_module" in pool.stats()["templates"]["python"]["failing"]


def test_a_template_that_fails_does_not_disturb_another() -> None:
    require("bwrap")
    templates = {
        "python": Template("python", "python"),
        "broken": Template("broken", "python", preload=("no_such_module",)),
    }
    with WarmPool(PoolSettings(size=1, patience=60), templates) as pool:
        with pytest.raises(CreationFailed):
            pool.acquire(template="broken")
        assert pool.run("print('served')").stdout == "served\n"


def test_without_preload_nothing_of_it_is_there() -> None:
    require("bwrap")
    with WarmPool() as pool:
        code = (
            "import sys; print([m for m in ('pandas', 'numpy', 'matplotlib') if m in sys.modules])"
        )
        assert pool.run(code).stdout == "[]\n"


def test_the_environment_needs_no_display() -> None:
    require("bwrap")
    with WarmPool() as pool:
        code = "import os; print(os.environ['MPLBACKEND'], os.environ['MPLCONFIGDIR'])"
        assert pool.run(code).stdout == "agg /tmp/.matplotlib\n"
