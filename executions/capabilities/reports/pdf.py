"""A report as a PDF, with the fonts that its text needs."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import IO, Any

from reportlab.lib.pagesizes import A4
from reportlab.pdfbase import pdfmetrics
from reportlab.pdfbase.ttfonts import TTFont
from reportlab.pdfgen.canvas import Canvas

from executions.capabilities.reports.reading import REMOVED
from executions.capabilities.reports.signing import Signed
from providers.hidden_characters import visible

# Latin, Greek, Cyrillic and signs; then what GB 2312 and JIS X 0208 have of Chinese and Japanese.
MONO, CJK = "CofferdamMono", "CofferdamCJK"
_FILES = {MONO: "DejaVuSansMono.ttf", CJK: "NotoSansSC-subset.ttf"}
_PILED = ("Mn", "Me")


@cache
def register() -> None:
    """Have reportlab know both fonts."""
    for name, file in _FILES.items():
        pdfmetrics.registerFont(TTFont(name, Path(__file__).with_name("fonts") / file))


def spelled(text: str) -> str:
    """One line of text as these fonts can show it."""
    return "".join(map(_spelled, visible(text).replace("\t", "    ").replace("\n", "[U+000A]")))


@lru_cache(maxsize=4096)
def _spelled(character: str) -> str:
    if character.isascii():
        return character
    is_piled = unicodedata.category(character) in _PILED
    return f"[U+{ord(character):04X}]" if is_piled or font_of(character) is None else character


@lru_cache(maxsize=4096)
def font_of(character: str) -> str | None:
    register()
    for name in _FILES:
        if ord(character) in pdfmetrics.getFont(name).face.charToGlyph:
            return name
    return None


@lru_cache(maxsize=4096)
def width_of(character: str, size: float) -> float:
    return float(pdfmetrics.stringWidth(character, font_of(character) or MONO, size))


def wrapped(text: str, size: float, most: float) -> Iterator[str]:
    """Spelled text in lines that are no wider than `most` points; an empty one is one line."""
    line: list[str] = []
    width = 0.0
    for character in text:
        more = width_of(character, size)
        if line and width + more > most:
            yield "".join(line)
            line, width = [], 0.0
        line.append(character)
        width += more
    yield "".join(line)


def in_fonts(text: str) -> Iterator[tuple[str, str]]:
    """Spelled text in pieces, each with the font that has it."""
    piece: list[str] = []
    current = MONO
    for character in text:
        font = font_of(character) or MONO
        if font != current and piece:
            yield current, "".join(piece)
            piece = []
        current = font
        piece.append(character)
    if piece:
        yield current, "".join(piece)


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
_SIZE, _SMALL_SIZE = 7.5, 7.0
_LINE, _SMALL_LINE = 10.5, 9.0
_LABEL = 90.0
# Where the texts of others stand in the line of a run.
_THEIRS = 372.0
_BAR_GREY, _QUIET, _RULE_GREY = 0.55, 0.35, 0.75
_HOW = {
    "erased": "erased by retention",
    "removed": "REMOVED without an erasure entry",
    "moved": "MOVED from its tenant",
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
            if paper.runs == 0:
                _runs_heading(paper)
            if name != "runs":
                _gone(paper, each)
            elif _needs_details(each):
                _run(paper, each)
            else:
                _line(paper, each)
    except _Full:
        paper.open_end()
        paper.heading(
            f"INCOMPLETE: this PDF is limited to {MOST_PAGES} pages. The JSON file has everything"
        )
    left = told["summary"]["runs"] + told["summary"]["gone"] - paper.runs
    if left > 0:
        paper.heading(f"{left} more runs are only in the JSON file")
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

    def summary(self, rows: Iterable[tuple[str, Any, bool]]) -> None:
        """A table of labels and values with a rule below each; True marks text of others."""
        for label, value, theirs in rows:
            self.fact(label, value, theirs=theirs)
            self.canvas.setStrokeGray(_RULE_GREY)
            self.canvas.line(_MARGIN, self.y + _LINE - 3, _WIDTH - _MARGIN, self.y + _LINE - 3)
            self.y -= 3

    def run_line(self, head: str, ours: str, theirs: str) -> None:
        """One run: a line of its own, then two columns, the right one with text of others."""
        left = list(wrapped(spelled(ours), _SMALL_SIZE, _THEIRS - _MARGIN - 12))
        right = [
            line
            for part in begun(theirs).split("\n")
            for line in wrapped(spelled(part), _SMALL_SIZE, _WIDTH - _MARGIN - _THEIRS - 8)
        ]
        self._room((1 + min(4, max(len(left), len(right)))) * _SMALL_LINE)
        self._draw(_MARGIN, head, _SMALL_SIZE)
        self.y -= _SMALL_LINE
        for number in range(max(len(left), len(right))):
            self._room(_SMALL_LINE)
            if number < len(left):
                self._draw(_MARGIN, left[number], _SMALL_SIZE, grey=_QUIET)
            if number < len(right):
                self._draw(_THEIRS + 6, right[number], _SMALL_SIZE)
                self._bar(_THEIRS, _SMALL_LINE)
            self.y -= _SMALL_LINE
        if cut := len(theirs) - len(begun(theirs)):
            self.note(f"{cut} more characters of this are in the JSON file.")
        self.y -= 3

    def rule(self) -> None:
        self._room(4 * _LINE)
        self.canvas.setStrokeGray(_RULE_GREY)
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

    def _bar(self, at: float, height: float = _LINE) -> None:
        self.canvas.setStrokeGray(_BAR_GREY)
        self.canvas.line(at, self.y - 2.5, at, self.y + height - 2.5)

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
    number = len(found["findings"]) + found["more_findings"]
    period = f"from {asked['since'] or 'the first run'} until {asked['until'] or 'now'}"
    paper.summary(
        (
            ("Tenant", asked["tenant"] or "all", False),
            ("Period", period, False),
            ("Runs", summary["runs"], False),
            *((f"  {name}", count, False) for name, count in sorted(summary["statuses"].items())),
            ("Missing runs", summary["gone"], False),
            ("Code and output", _counts(summary["bodies"]) or "none", False),
            (
                "Ledger check",
                "no problems found" if found["intact"] else f"{number} FINDINGS",
                False,
            ),
            ("Legal holds", len(told["holds"]) + told["more_holds"], False),
            ("Created at", told["made_at"], False),
            ("Created by", told["made_by"], True),
            ("Report", told["id"], False),
        )
    )
    if asked["executions"]:
        paper.fact("Requested", f"{len(asked['executions'])} executions by id")
    if told["truncated"]:
        paper.note(
            f"INCOMPLETE: the report ends after {told['truncated']} runs, and there are more. "
            "Request a smaller report."
        )
    if told["unknown"]:
        paper.note(f"{len(told['unknown'])} of the requested executions do not exist here:")
        _bounded(paper, told["unknown"], _MOST_LISTED, paper.note)
    paper.heading("Ledger check")
    paper.note(_verdict(found))
    paper.fact(
        "Entries", f"{found['entries']}, from {found['first_entry']} to {found['last_entry']}"
    )
    paper.fact("Runs compared", found["executions"])
    _bounded(
        paper, found["findings"], _MOST_FINDINGS, partial(_finding, paper), found["more_findings"]
    )
    paper.heading("Legal holds")
    if not told["holds"]:
        paper.note("None.")
    _bounded(paper, told["holds"], _MOST_LISTED, partial(_hold, paper), told["more_holds"])
    paper.heading("Configuration and policy versions")
    paper.note("Current rows. `manage.py verify_ledger` verifies them.")
    used = told["used"]
    _bounded(
        *(paper, used["configurations"], _MOST_LISTED),
        partial(_version, paper),
        used["more_configurations"],
    )
    _bounded(
        *(paper, used["policies"], _MOST_LISTED), partial(_policy, paper), used["more_policies"]
    )
    paper.heading("How to verify this report")
    paper.note("The last line of this PDF file holds its own signature. For the JSON file:")
    paper.fact("SHA-256", signed.digest)
    paper.fact("Signature", signed.signature)
    paper.fact("Signing key", signed.key_id)
    for key in told["keys"]:
        paper.fact("Public key", f"{key['public_key']} ({key['algorithm']}, {key['key_id']})")
    paper.note("Compare the key with a copy from another source: a forged report has a forged key.")
    paper.note("A bar marks text that the service did not write.")


def _verdict(found: Mapping[str, Any]) -> str:
    if found["intact"]:
        return (
            "INTACT: all entries are signed and in sequence, and all records match their entries."
        )
    number = len(found["findings"]) + found["more_findings"]
    return f"NOT INTACT: {number} findings."


def _finding(paper: _Paper, found: Mapping[str, Any]) -> None:
    paper.fact(f"Entry {found['entry']}", f"{found['kind']}: {found['detail']}", theirs=True)


def _hold(paper: _Paper, hold: Mapping[str, Any]) -> None:
    since = f"since {hold['since']}" if hold["since"] else "by the ledger; THE ROW IS MISSING"
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
        paper.note(f"{left} more are only in the JSON file.")


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{number} {name}" for name, number in sorted(counts.items()))


def _runs_heading(paper: _Paper) -> None:
    paper.heading("Runs")
    paper.note(
        "First line: time, id, status, exit code, ledger entry, start of the code hash. Second "
        "line: tenant, API key, provider and configuration version, isolation and sharing, "
        "language. Next to the bar: key name, runtime, data from the caller, error. Times are UTC. "
        "The JSON file has all fields."
    )
    paper.y -= _LINE * 0.5


def _needs_details(each: Mapping[str, Any]) -> bool:
    """Whether an auditor must see all fields: a finding, something removed, or code."""
    states = (*each["bodies"].values(), *(artifact["bytes"] for artifact in each["artifacts"]))
    return bool(each["problem"] or each["code"] or REMOVED in states)


def _line(paper: _Paper, each: Mapping[str, Any]) -> None:
    paper.runs += 1
    receipt = each["receipt"]
    head = [
        str(each["created_at"])[:19],
        each["id"],
        each["status"],
        "" if each["exit_code"] is None else f"exit {each['exit_code']}",
        f"entry {receipt['sequence']}" if receipt else "no entry",
        str(each["code_hash"]).removeprefix("sha256:")[:12],
        "legal hold" if each["held"] else "",
    ]
    key, version = each["api_key"], each["config_version"]
    ours = [
        each["tenant_slug"],
        key["prefix"],
        each["provider"] and f"{each['provider']} v{'-' if version is None else version}",
        " ".join(filter(None, (each["isolation"], each["sharing"]))),
        each["language"],
    ]
    asked = {**each["asked_by"], "subject": each["subject"]}
    theirs = [
        key["name"],
        each["runtime"],
        *(f"{name}: {value}" for name, value in asked.items() if value),
        f"approved: {each['policy']['approved']}"
        if each["policy"] and each["policy"]["approved"]
        else "",
        f"{each['error']['code']}: {each['error']['message']}" if each["error"] else "",
    ]
    paper.run_line(
        "  ".join(filter(None, head)),
        "  ".join(filter(None, ours)),
        "; ".join(filter(None, theirs)),
    )


def _gone(paper: _Paper, each: Mapping[str, Any]) -> None:
    paper.runs += 1
    receipt = each["receipt"]
    entry = f"entry {receipt['sequence']}" if receipt else "no entry"
    head = f"{str(each['finished_at'])[:19]}  {each['id']}  MISSING  {entry}"
    paper.run_line(head, f"{each['tenant_slug']}  record {_HOW[each['record']]}", "")


def _run(paper: _Paper, each: Mapping[str, Any]) -> None:
    paper.runs += 1
    paper.rule()
    paper.heading(f"{each['id']}  {each['status']}", 8.5)
    if each["problem"]:
        paper.fact("NOT INTACT", each["problem"], theirs=True)
    if each["held"]:
        paper.fact("Legal hold", "yes")
    paper.fact("Tenant", each["tenant_slug"])
    key = each["api_key"]
    paper.fact("API key", f"{key['prefix']} {key['name']}" if key["prefix"] else "", theirs=True)
    paper.fact("Client address", each["client_address"])
    asked = {**each["asked_by"], "subject": each["subject"], "request_id": each["request_id"]}
    for name, value in asked.items():
        paper.fact(name, value, theirs=True)
    paper.fact("Created", each["created_at"])
    paper.fact("Ran", f"{each['started_at'] or '-'} to {each['finished_at'] or '-'}")
    version = "-" if each["config_version"] is None else each["config_version"]
    paper.fact("Provider", f"{each['provider'] or '-'}, configuration version {version}")
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
    paper.fact("Stored", f"code: {each['bodies']['code']}; output: {each['bodies']['output']}")
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
