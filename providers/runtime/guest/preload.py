"""What an interpreter imports before anybody waits for it.

New randomness after a fork: what was seeded before it is the same in every sandbox.

Only what is loaded already is touched, and nothing is imported. The standard library's `random`
and OpenSSL notice a fork themselves; that they did is not left to them. A generator that a library
keeps in C is not found here: its library may register `os.register_at_fork(after_in_child=...)`,
which runs in every sandbox.
"""

import gc
import os
import select
import sys

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
    find_generators()


def load_common(*, loads_packages: bool = True) -> None:
    """Import what programs import most, and complete `sys.path` where that `loads_packages`.

    Completing it can run code of packages.
    """
    if loads_packages:
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


def find_own_packages(*, makes_folder: bool) -> None:
    """Have this interpreter import what its program installs, before all else of the same name.

    It is where pip puts packages that it must not put beside those that are there, which other
    interpreters of the program know by themselves. A folder that is made after the first import
    would not be looked at, so with `makes_folder` it is made.
    """
    release = "python%d.%d" % sys.version_info[:2]
    own = os.path.join(os.path.expanduser("~"), ".local", "lib", release, "site-packages")
    if own in sys.path:
        return
    if makes_folder:
        try:
            os.makedirs(own, exist_ok=True)
        except OSError:
            # The program has something else there, or no room, and pip will say so.
            return
    elif not os.path.isdir(own):
        return
    others = (at for at, path in enumerate(sys.path) if path.endswith("-packages"))
    sys.path.insert(next(others, len(sys.path)), own)


def set_environment() -> None:
    """Have matplotlib, should it be imported, draw without a display, and keep its files in /tmp.

    Not in the home folder, which is the workspace.
    """
    os.environ.setdefault("MPLBACKEND", "agg")
    if "TMPDIR" in os.environ:
        os.environ.setdefault("MPLCONFIGDIR", os.environ["TMPDIR"] + "/.matplotlib")


# Found where modules were preloaded, and kept for all that come of this process: what is frozen
# (`gc.freeze`) is found by no later look. A look through all objects takes tens of ms.
_generators: "list[object]" = []


def find_generators() -> None:
    """Remember the generators that preloaded modules keep, wherever they keep them."""
    kinds = _kinds()
    if kinds:
        gc.collect()
        found = (each for each in gc.get_objects() if isinstance(each, kinds))
        known = {id(each) for each in _generators}
        for each in found:
            # `secrets` and the like have nothing to seed.
            if id(each) not in known and type(each).__name__ != "SystemRandom":
                _generators.append(each)


def reseed() -> None:
    """Give everything that was seeded before a seed of its own. Costs 0.1 ms with numpy."""
    if "random" in sys.modules:
        sys.modules["random"].seed()
    numpy = sys.modules.get("numpy.random.mtrand")
    if numpy is not None:
        # Its functions belong to this one, which is no object that `gc` knows of.
        _seed(numpy._rand)
    for generator in _generators:
        _seed(generator)
    if "uuid" in sys.modules:
        sys.modules["uuid"]._node = None  # type: ignore[attr-defined]
        sys.modules["uuid"]._last_timestamp = None  # type: ignore[attr-defined]
    if "tempfile" in sys.modules:
        sys.modules["tempfile"]._name_sequence = None  # type: ignore[attr-defined]
    if "_ssl" in sys.modules:
        sys.modules["_ssl"].RAND_add(os.urandom(32), 32.0)
    if "multiprocessing.process" in sys.modules:
        sys.modules["multiprocessing.process"].current_process().authkey = os.urandom(32)
    if "torch" in sys.modules:
        sys.modules["torch"].seed()


def _kinds() -> "tuple[type, ...]":
    kinds = []
    for module, names in (
        ("random", ("Random",)),
        ("numpy.random.mtrand", ("RandomState",)),
        ("numpy.random.bit_generator", ("BitGenerator",)),
    ):
        if module in sys.modules:
            kinds += [getattr(sys.modules[module], name) for name in names]
    return tuple(kinds)


def _seed(generator: object) -> None:
    bits = getattr(generator, "_bit_generator", generator)
    if hasattr(bits, "random_raw"):
        # Its seed too, of which others are made (`spawn`).
        type(bits).__init__(bits)
    if hasattr(generator, "seed"):
        # The older ones keep half of a pair of numbers as well.
        generator.seed()
