"""Text on pages: of hostile writers, made fit to be looked at, and of empty lists."""

from __future__ import annotations

from dataclasses import dataclass

from providers.hidden_characters import spelled_length
from providers.hidden_characters import visible as visible

MAX_CHARACTERS = 100_000
MAX_LINE = 2_000
_STEP = 1_000


@dataclass(frozen=True)
class Shown:
    """Text to show, and what was left out of it."""

    text: str
    cut_characters: int = 0
    cut_lines: int = 0

    @property
    def note(self) -> str:
        parts = []
        if self.cut_lines:
            lines = "1 long line is" if self.cut_lines == 1 else f"{self.cut_lines} long lines are"
            parts.append(f"{lines} shortened.")
        if self.cut_characters:
            rest = self.cut_characters
            left = "1 more character is" if rest == 1 else f"{rest:,} more characters are"
            parts.append(f"{left} not shown.")
        return " ".join(parts)


def shown(text: str, most: int = MAX_CHARACTERS) -> Shown:
    """`text` as a page may hold it: harmless, of bounded length, in lines of bounded length."""
    kept = text[:most].replace("\r\n", "\n")
    cut = max(0, len(text) - most)
    fits = _fitting(kept, most)
    cut, kept = cut + len(kept) - fits, kept[:fits]
    lines = kept.split("\n")
    long = [number for number, line in enumerate(lines) if len(line) > MAX_LINE]
    for number in long:
        line = lines[number]
        lines[number] = f"{line[:MAX_LINE]}… [{len(line) - MAX_LINE} more characters]"
    return Shown(visible("\n".join(lines)), cut, len(long))


def _fitting(text: str, most: int) -> int:
    """How many of its characters fit, where those that cannot be seen are spelled out."""
    size = 0
    for start in range(0, len(text), _STEP):
        piece = text[start : start + _STEP]
        size += spelled_length(piece)
        if size > most:
            return start
    return len(text)


def in_time(milliseconds: float) -> str:
    """A duration in the units that a person would use."""
    if 0 < milliseconds < 1:
        return "under 1 ms"
    if milliseconds < 1000:
        return f"{milliseconds:.0f} ms"
    if milliseconds < 60_000:
        return f"{milliseconds / 1000:.2f} s"
    minutes, seconds = divmod(round(milliseconds / 1000), 60)
    if minutes < 60:
        return f"{minutes} min {seconds} s"
    return f"{minutes // 60} h {minutes % 60} min"


EMPTY = {
    "executions.execution": "No executions yet. Run a program in the playground, with "
    "POST /api/v1/executions, or with `manage.py execute`.",
    "executions.session": "No sessions yet. POST /api/v1/sessions opens one.",
    "executions.schedule": "No schedules yet. POST /api/v1/schedules creates one.",
    "executions.snapshot": "No snapshots yet. POST /api/v1/sessions/{id}/snapshot creates one.",
    "executions.ledgerentry": "No entries yet. Every run and every change adds one.",
    "executions.process": "No processes yet. `manage.py up` starts them.",
    "executions.policy": "No policies. Everything is allowed that the providers allow. A policy "
    "can restrict, warn or require approval, for one tenant or all.",
    "executions.approval": "No approvals yet. Runs appear here if a policy requires approval.",
    "executions.budget": "No budgets. Spending is not limited.",
    "executions.spending": "No spending yet. Costs are counted for providers with a price.",
    "executions.spendingalert": "No alerts. No budget is close to its limit.",
    "executions.alert": "No alerts.",
    "executions.auditexport": "No export. Set AUDIT_EXPORT_URL to send the ledger to a collector.",
    "executions.tenant": "No tenants. Runs and API keys belong to a tenant.",
    "executions.apikey": "No API keys. Agents need one to run code.",
    "executions.webhooksecret": "No webhook secrets. A tenant needs one to receive webhooks.",
    "executions.webhookdelivery": "No webhook deliveries yet.",
    "executions.legalhold": "No legal holds. Retention erases old data.",
    "executions.toolcall": "No tool calls yet.",
    "executions.report": "No reports yet.",
    "executions.ledgercheck": "No verifications yet.",
    "providers.providerconfig": "No providers. Add one to run code.",
    "providers.configversion": "No versions yet. Each change creates one.",
    "providers.pendingchange": "No pending changes. With TWO_PERSON_RULE=true, changes wait here "
    "for a second administrator.",
    "providers.providerprice": "No prices. Costs are not counted.",
    "providers.route": "No routes. All runs use the active provider. A route names several "
    "providers, for one tenant or all.",
    "providers.circuitbreaker": "No provider is out of service.",
    "auth.group": "No roles. `manage.py migrate` creates the three.",
    "axes.accessattempt": "No failed sign-ins.",
}
