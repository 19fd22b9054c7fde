"""What an interpreter imports before anybody waits for it."""

import os
import select
import sys

from . import reseed

# What agents' code imports most, loaded one by one while nobody waits. A request cuts it short.
COMMON = (
    *(CHEAP := ("_ast", "json", "re", "collections", "math", "datetime", "time", "itertools")),
    *(ALSO_CHEAP := ("functools", "string", "io")),
    *("traceback", "typing", "pathlib", "csv"),
    *(ACTIVE := ("random", "statistics", "subprocess")),
)
IDLE_DELAY_MS = 250


class Missing(Exception):
    """A module that the template names cannot be imported. Says which, and why."""


def load(modules: "list[str]") -> None:
    """Import what a template names. Raises Missing."""
    if not modules:
        return
    load_site()
    set_environment()
    for module in modules:
        try:
            __import__(module)
        except BaseException as error:
            reason = f"{type(error).__name__}: {error}"
            raise Missing(f"the module {module!r} cannot be preloaded: {reason}") from error
    reseed.find_generators()


def load_common() -> None:
    """Import what programs import most, and complete `sys.path`."""
    load_site()
    for module in COMMON:
        __import__(module)


def load_cheap() -> None:
    """The same without what makes every copy of this process dearer under gVisor, where the memory
    that is copied is most of what a copy costs."""
    load_site()
    for module in (*CHEAP, *ALSO_CHEAP):
        __import__(module)


def load_passive() -> None:
    """The same without what acts on every fork: `random` seeds anew, `threading` counts anew.

    A bare fork took 0.5 ms, and 0.8 with `subprocess`, which loads `threading`. The child imports
    them itself when it has time to.
    """
    load_site()
    for module in COMMON:
        if module not in ACTIVE:
            __import__(module)


def use_the_wait(job: int) -> None:
    """The same, but a module at a time while nothing is to be read from `job`."""
    poll = select.poll()
    poll.register(job, select.POLLIN)
    if poll.poll(IDLE_DELAY_MS):
        return
    load_site()
    for module in COMMON:
        if poll.poll(0):
            return
        __import__(module)


def load_site() -> None:
    """What `-I -S` left out when the interpreter started: site-packages and exit()."""
    if "site" not in sys.modules:
        import site

        site.main()


def set_environment() -> None:
    """Have matplotlib, should it be imported, draw without a display, and keep its files in /tmp.

    Not in the home folder, which is the workspace.
    """
    os.environ.setdefault("MPLBACKEND", "agg")
    if "TMPDIR" in os.environ:
        os.environ.setdefault("MPLCONFIGDIR", os.environ["TMPDIR"] + "/.matplotlib")
