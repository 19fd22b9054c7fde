"""What came of every method of every SDK, as the page shows it."""

from __future__ import annotations

import os
import re

from tests.e2b_sdks.published import SDKS, Walk
from tests.support.processes import ROOT

PAGE = ROOT / "docs" / "e2b.md"
BEGIN = "<!-- made by tests/doors/e2b/test_e2b_sdks.py: RENEW=table writes it -->\n"
END = "<!-- end -->\n"

# How a method that works differs from E2B's own. The walks hold what is said of refusals.
DIFFERS = {
    "Sandbox.create": "templates are this service's; `mcp`, `volume_mounts` are refused; `network` has "
    "hosts and all traffic",
    "Sandbox.connect": "resumes with files, without memory",
    "Sandbox.pause": "keeps files, not memory",
    "Sandbox.beta_pause": "keeps files, not memory",
    "Sandbox.get_metrics": "now alone: the past is not kept",
    "Sandbox.create_snapshot": "keeps files, not memory",
    "Sandbox.fork": "begins with files, without memory",
    "Sandbox.get_host": "names an address that is not served",
    "Sandbox.get_mcp_url": "names an address that is not served",
    "Sandbox.update_network": "hosts and all traffic; no ranges of addresses, no `rules`",
    "Sandbox.run_code": "no Java and no R; Python without IPython itself, whose lines are taken",
    "commands.run": "as `user` alone; no login files",
    "commands.connect": "hears what comes from then on",
    "commands.stream_input": "is taken when all of it was sent",
    "pty.stream_input": "is taken when all of it was sent",
}
# These say that a person is not there whose file they ask for.
OTHER_REFUSALS = {"Sandbox.get_mcp_token": "There is no user 'root' here"}
NOT_IMPLEMENTED, NONE_TO_ASK = "not implemented here", "There is no volume to ask it of."


def snake(name: str) -> str:
    """The name that both languages share."""
    group, _, method = name.partition(".")
    told = re.sub(r"(?<=[a-z0-9])([A-Z])", lambda found: f"_{found[1].lower()}", method)
    # A terminal's input is called otherwise in JavaScript.
    return f"{group}.{'send_stdin' if told == 'send_input' else told}"


def held(walks: list[Walk]) -> None:
    """Raises AssertionError where a refusal is not one that is meant."""
    for walk in walks:
        for method, outcome in walk.outcomes.items():
            expected = OTHER_REFUSALS.get(snake(method), NOT_IMPLEMENTED)
            is_meant = outcome in ("works", NONE_TO_ASK) or expected in outcome
            assert is_meant, f"{walk.sdk.name}: {method}: {outcome}"


def table(walks: list[Walk]) -> str:
    """The rows, and the two marks around them. Written into the page with RENEW=table."""
    by_name = [{snake(name): said for name, said in walk.outcomes.items()} for walk in walks]
    names = sorted({name for each in by_name for name in each}, key=_order)
    head = ["method", *(walk.sdk.name for walk in walks), "how it differs"]
    rows = [head, ["---"] * len(head)]
    for name in names:
        marks = [_mark(name, each.get(name)) for each in by_name]
        how = DIFFERS.get(name, "") if "works" in {each.get(name) for each in by_name} else ""
        rows.append([f"`{name}`", *marks, how])
    made = "".join(f"| {' | '.join(row)} |\n" for row in rows)
    text = f"{BEGIN}\n{made}\n{END}"
    if os.environ.get("RENEW") == "table":
        page = PAGE.read_text(encoding="utf-8")
        before, rest = page.split(BEGIN)
        PAGE.write_text(before + text + rest.split(END)[1], encoding="utf-8")
    assert len(walks) == len(SDKS)
    return text


def columns(walks: list[Walk]) -> dict[str, dict[str, str]]:
    """What the page is to say of each method, by the name of the SDK that was walked through."""
    return {
        walk.sdk.name: {
            snake(name): _mark(snake(name), outcome) for name, outcome in walk.outcomes.items()
        }
        for walk in walks
    }


def columns_of_page(text: str) -> dict[str, dict[str, str]]:
    """The same, as the page has it."""
    made = text.partition(BEGIN)[2].partition(END)[0]
    head, _, *rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in made.splitlines() if line
    ]
    return {
        sdk: {row[0].strip("`"): row[at] for row in rows if row[at]}
        for at, sdk in enumerate(head)
        if 0 < at < len(head) - 1
    }


_GROUPS = ("Sandbox", "SandboxPaginator", "files", "watch", "commands", "handle", "pty", "git")


def _order(name: str) -> tuple[int, str]:
    group = name.partition(".")[0]
    return (_GROUPS.index(group) if group in _GROUPS else len(_GROUPS)), name


def _mark(name: str, outcome: str | None) -> str:
    if outcome is None:
        return ""
    if outcome != "works":
        return "not there"
    return "differs" if name in DIFFERS else "works"
