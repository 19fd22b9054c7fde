"""What an empty list says: what it will show, and how to get there."""

from __future__ import annotations

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
