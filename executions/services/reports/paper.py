"""A report as a PDF, for reading. Every run is in the JSON file, whose signature it begins with.

What others than the service wrote (names, messages, code) is set apart by a bar at its left on
every line, which nothing in it can draw, so no text can pass for one of the report's own lines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import IO, Any

from reportlab.lib.pagesizes import A4
from reportlab.pdfgen.canvas import Canvas

from executions.services.reports.fonts import MONO, in_fonts, register, spelled, wrapped
from executions.services.reports.signing import Signed

# A PDF is held in memory while it is written.
MOST_RUNS = 2000
MOST_PAGES = 3000
# Of each code, and of every other text that others wrote.
MOST_CODE_CHARACTERS = 4000
MOST_CODE_LINES = 200
_SAY_EVERY = 20
_MOST_FINDINGS = 100
_MOST_LISTED = 200
_WIDTH, _HEIGHT = A4
_MARGIN = 48.0
_BOTTOM = 56.0
_SIZE = 7.5
_LINE = 10.5
_LABEL = 90.0
_BAR_GREY, _QUIET = 0.55, 0.35
_HOW = {
    "erased": "erased by retention",
    "removed": "REMOVED without an erasure",
    "moved": "TAKEN from its tenant",
}


def write(
    file: IO[bytes],
    told: Mapping[str, Any],
    signed: Signed,
    kept: Iterable[tuple[str, Mapping[str, Any]]],
    said: Callable[[str], None] = lambda progress: None,
) -> None:
    """`told` is what the document says beside its runs, `kept` the first of these."""
    paper = _Paper(file, told["id"], said)
    try:
        _front(paper, told, signed)
        for name, each in kept:
            if name != "runs":
                _gone(paper, each)
            else:
                _run(paper, each)
    except _Full:
        paper.open_end()
        paper.heading(
            f"NOT ALL: this PDF is cut after {MOST_PAGES} pages. What it was telling is in the "
            "JSON file as a whole"
        )
    left = told["summary"]["runs"] + told["summary"]["gone"] - paper.runs
    if left > 0:
        paper.heading(f"{left} more runs are in the JSON file and not in this PDF")
    paper.end()


def begun(text: str) -> str:
    """As much of a text as the PDF has."""
    return "\n".join(text[:MOST_CODE_CHARACTERS].split("\n")[:MOST_CODE_LINES])


class _Full(Exception):
    """There are as many pages as there may be."""


class _Paper:
    """Lines from the top of a page to its bottom, and then on the next one."""

    def __init__(self, file: IO[bytes], report_id: str, said: Callable[[str], None]) -> None:
        register()
        self.said = said
        self.has_bound = True
        self.report_id = report_id
        self.runs = 0
        self.page = 0
        self.canvas = Canvas(file, pagesize=A4, pageCompression=1, invariant=1)
        self.canvas.setTitle(f"Audit report {report_id}")
        self.canvas.setAuthor("Cofferdam")
        self._begin_page()

    def heading(self, text: str, size: float = 10.5) -> None:
        self._room(3 * _LINE)
        self.y -= _LINE * 0.8
        for line in wrapped(spelled(text), size, _WIDTH - 2 * _MARGIN):
            self._draw(_MARGIN, line, size)
            self.y -= size * 1.35

    def rule(self) -> None:
        self._room(4 * _LINE)
        self.canvas.setStrokeGray(0.75)
        self.canvas.line(_MARGIN, self.y + _LINE * 0.5, _WIDTH - _MARGIN, self.y + _LINE * 0.5)
        self.y -= _LINE * 0.6

    def note(self, text: str) -> None:
        """A line of the report itself, across the page."""
        for line in wrapped(spelled(text), _SIZE, _WIDTH - 2 * _MARGIN):
            self._room(_LINE)
            self._draw(_MARGIN, line)
            self.y -= _LINE

    def fact(self, label: str, value: Any, *, theirs: bool = False) -> None:
        """A label and its value; `theirs` where the value is text of others."""
        if value in (None, ""):
            return
        at = _MARGIN + _LABEL
        whole = str(value)
        shown = begun(whole) if theirs else whole
        for number, text in enumerate(shown.split("\n") if theirs else [whole]):
            for part, line in enumerate(wrapped(spelled(text), _SIZE, _WIDTH - _MARGIN - at - 8)):
                self._room(_LINE)
                if number == part == 0:
                    self._draw(_MARGIN, label, grey=_QUIET)
                self._draw(at + 6 if theirs else at, line)
                if theirs:
                    self._bar(at)
                self.y -= _LINE
        if cut := len(whole) - len(shown):
            self.note(f"{cut} more characters of this are in the JSON file.")

    def code(self, text: str) -> None:
        """Of others, with the numbers of its lines."""
        number_width = 30.0
        at = _MARGIN + number_width
        for number, source in enumerate(text.replace("\r\n", "\n").split("\n"), 1):
            for part, line in enumerate(wrapped(spelled(source), _SIZE, _WIDTH - _MARGIN - at - 8)):
                self._room(_LINE)
                if part == 0:
                    self._draw(_MARGIN, f"{number:>5}", grey=_QUIET)
                self._draw(at + 6, line)
                self._bar(at)
                self.y -= _LINE

    def open_end(self) -> None:
        """Begin the last page, which has room beyond the bound."""
        self.has_bound = False
        self.canvas.showPage()
        self._begin_page()

    def end(self) -> None:
        self._room(3 * _LINE)
        self.y -= _LINE
        self._draw(_MARGIN, f"End of the report: {self.page} pages.")
        self.canvas.showPage()
        self.canvas.save()

    def _room(self, height: float) -> None:
        if self.y - height < _BOTTOM:
            if self.has_bound and self.page >= MOST_PAGES:
                raise _Full
            self.canvas.showPage()
            self._begin_page()

    def _begin_page(self) -> None:
        self.page += 1
        if self.page % _SAY_EVERY == 0:
            self.said(f"{self.page} pages of the PDF written")
        self.y = _BOTTOM - 24
        self._draw(
            _MARGIN, f"Cofferdam audit report {self.report_id}, page {self.page}", grey=_QUIET
        )
        self.y = _HEIGHT - _MARGIN

    def _bar(self, at: float) -> None:
        self.canvas.setStrokeGray(_BAR_GREY)
        self.canvas.line(at, self.y - 2.5, at, self.y + _LINE - 2.5)

    def _draw(self, x: float, text: str, size: float = _SIZE, grey: float = 0.0) -> None:
        out = self.canvas.beginText(x, self.y)
        out.setFillGray(grey)
        out.setFont(MONO, size)
        for font, piece in in_fonts(text):
            out.setFont(font, size)
            out.textOut(piece)
        self.canvas.drawText(out)


def _front(paper: _Paper, told: Mapping[str, Any], signed: Signed) -> None:
    asked, summary, found = told["asked"], told["summary"], told["verification"]
    paper.heading("Audit report", 16)
    paper.fact("Report", told["id"])
    paper.fact("Made at", told["made_at"])
    paper.fact("Made by", told["made_by"], theirs=True)
    paper.fact("Tenant", asked["tenant"] or "all")
    paper.fact(
        "Runs made", f"from {asked['since'] or 'the beginning'} until {asked['until'] or 'now'}"
    )
    if asked["executions"]:
        paper.fact("Asked for", f"{len(asked['executions'])} executions by their ids")
    paper.heading("What the ledger says")
    paper.note(_verdict(found))
    paper.fact(
        "Entries read", f"{found['entries']}, from {found['first_entry']} to {found['last_entry']}"
    )
    paper.fact("Runs compared", found["executions"])
    _bounded(
        paper, found["findings"], _MOST_FINDINGS, partial(_finding, paper), found["more_findings"]
    )
    paper.heading("What is in it")
    if told["truncated"]:
        paper.note(
            f"NOT ALL: the report ends after {told['truncated']} runs, and there are more. Ask for "
            "less at a time."
        )
    paper.fact("Runs", summary["runs"])
    paper.fact("Records gone", summary["gone"] or None)
    paper.fact("Outcomes", _counts(summary["statuses"]))
    paper.fact("Code, output", _counts(summary["bodies"]))
    if told["unknown"]:
        paper.note(f"{len(told['unknown'])} of the executions asked for are not known here:")
        _bounded(paper, told["unknown"], _MOST_LISTED, paper.note)
    paper.heading("Legal holds")
    if not told["holds"]:
        paper.note("None.")
    _bounded(paper, told["holds"], _MOST_LISTED, partial(_hold, paper), told["more_holds"])
    paper.heading("Configuration and policy versions in use")
    paper.note("As their rows are now. `manage.py verify_ledger` proves these rows.")
    used = told["used"]
    _bounded(
        *(paper, used["configurations"], _MOST_LISTED),
        partial(_version, paper),
        used["more_configurations"],
    )
    _bounded(
        *(paper, used["policies"], _MOST_LISTED), partial(_policy, paper), used["more_policies"]
    )
    paper.heading("How to check it")
    paper.note(
        "This PDF ends with a line that holds its own signature. Of the JSON file beside it:"
    )
    paper.fact("SHA-256", signed.digest)
    paper.fact("Signature", signed.signature)
    paper.fact("By the key", signed.key_id)
    for key in told["keys"]:
        paper.fact("Public key", f"{key['public_key']} ({key['algorithm']}, {key['key_id']})")
    paper.note(
        "Compare the key with one that you were given elsewhere: a forger would print his own."
    )
    paper.note("Text that others than the service wrote has a bar at its left.")


def _verdict(found: Mapping[str, Any]) -> str:
    if found["intact"]:
        return (
            "INTACT: these entries are signed and in sequence, and these records are what they say."
        )
    number = len(found["findings"]) + found["more_findings"]
    return f"NOT INTACT: {number} findings."


def _finding(paper: _Paper, found: Mapping[str, Any]) -> None:
    paper.fact(f"Entry {found['entry']}", f"{found['kind']}: {found['detail']}", theirs=True)


def _hold(paper: _Paper, hold: Mapping[str, Any]) -> None:
    since = f"since {hold['since']}" if hold["since"] else "by the ledger; ITS ROW IS GONE"
    paper.fact("On hold", f"{hold['tenant']}: {hold['execution'] or 'everything'}, {since}")
    paper.fact("", hold["reason"], theirs=True)


def _policy(paper: _Paper, policy: Mapping[str, Any]) -> None:
    told = f"version {policy['version']}: {policy['name']}"
    paper.fact(f"Policy {policy['id']}", told, theirs=True)


def _version(paper: _Paper, each: Mapping[str, Any]) -> None:
    paper.fact(
        "Provider", f"{each['provider']} version {each['version']}, {each['hash'] or 'unknown'}"
    )
    if each["hash"]:
        approved = f", approved by {each['approved_by']}" if each["approved_by"] else ""
        paper.fact("", f"{each['made_at']} by {each['made_by']}{approved}", theirs=True)
        paper.fact("", each["reason"], theirs=True)


def _bounded(
    paper: _Paper,
    values: list[Any],
    most: int,
    show: Callable[[Any], None],
    more: int = 0,
) -> None:
    for value in values[:most]:
        show(value)
    if left := max(0, len(values) - most) + more:
        paper.note(f"{left} more of these are not in this PDF.")


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{number} {name}" for name, number in sorted(counts.items()))


def _gone(paper: _Paper, each: Mapping[str, Any]) -> None:
    paper.runs += 1
    paper.rule()
    paper.heading(f"{each['id']}  record {_HOW[each['record']]}", 8.5)
    paper.fact("Tenant", each["tenant_slug"])
    paper.fact("Ended", each["finished_at"])
    _receipt(paper, each["receipt"])


def _run(paper: _Paper, each: Mapping[str, Any]) -> None:
    paper.runs += 1
    paper.rule()
    paper.heading(f"{each['id']}  {each['status']}", 8.5)
    if each["problem"]:
        paper.fact("NOT INTACT", each["problem"], theirs=True)
    if each["held"]:
        paper.fact("Legal hold", "it is kept from erasure")
    paper.fact("Tenant", each["tenant_slug"])
    key = each["api_key"]
    paper.fact("By the key", f"{key['prefix']} {key['name']}" if key["prefix"] else "", theirs=True)
    paper.fact("From", each["client_address"])
    asked = {**each["asked_by"], "subject": each["subject"], "request_id": each["request_id"]}
    for name, value in asked.items():
        paper.fact(name, value, theirs=True)
    paper.fact("Made", each["created_at"])
    paper.fact("Ran", f"{each['started_at'] or '-'} to {each['finished_at'] or '-'}")
    version = "-" if each["config_version"] is None else each["config_version"]
    paper.fact("Where", f"{each['provider'] or '-'}, configuration version {version}")
    paper.fact("Runtime", each["runtime"], theirs=True)
    paper.fact("Isolation", f"{each['isolation'] or '-'}, {each['sharing'] or '-'}")
    if each["policy"]:
        policy = each["policy"]
        paper.fact("Policy", f"{policy['id'] or '-'} version {policy['version'] or '-'}")
        approved = policy["approved"]
        paper.fact("Approved", approved if approved is None else str(approved), theirs=True)
    paper.fact("Language", f"{each['language']}, {each['entrypoint']}, {each['mode']}")
    if each["error"]:
        error = each["error"]
        paper.fact("Error", f"{error['code']}: {error['message']}", theirs=True)
    exit_code = "-" if each["exit_code"] is None else each["exit_code"]
    paper.fact("Outcome", f"{each['status']}, exit code {exit_code}")
    paper.fact("Bodies", f"code: {each['bodies']['code']}; output: {each['bodies']['output']}")
    paper.fact("Code hash", each["code_hash"])
    for artifact in each["artifacts"]:
        facts = f"{artifact['size_bytes']} bytes, {artifact['hash']}, {artifact['bytes']}"
        paper.fact("Artifact", f"{artifact['name']} ({facts})", theirs=True)
    _receipt(paper, each["receipt"])
    if each["code"]:
        paper.code(each["code"])
        if each.get("code_cut"):
            paper.note(f"{each['code_cut']} more characters of the code are in the JSON file.")


def _receipt(paper: _Paper, receipt: Mapping[str, Any] | None) -> None:
    if receipt is None:
        paper.fact("Receipt", "none")
        return
    paper.fact(
        "Receipt", f"entry {receipt['sequence']} of {receipt['at']}, key {receipt['key_id']}"
    )
    paper.fact("", receipt["signature"])
