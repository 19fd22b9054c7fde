"""How the admin looks, and what its pages may load."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from django.utils.functional import lazy

from sandbox_site import __version__

# The settings import this module, also in processes that serve no page: they are spared Django's
# templates and models.
if TYPE_CHECKING:
    from django.http import HttpRequest

# Nothing inline and nothing from elsewhere: what a stored output or name smuggles into a page
# cannot run. See docs/admin.md for what the theme needed to get along with it.
POLICY: dict[str, Any] = {
    "DIRECTIVES": {
        "default-src": ["'none'"],
        "script-src": ["'self'"],
        "style-src": ["'self'"],
        "img-src": ["'self'", "data:"],
        "font-src": ["'self'"],
        "connect-src": ["'self'"],
        "base-uri": ["'none'"],
        "form-action": ["'self'"],
        "frame-ancestors": ["'none'"],
    }
}


def version(request: HttpRequest) -> dict[str, str]:
    """Give every template the version of the service, which the foot of a page shows."""
    return {"cofferdam_version": __version__}


def _address_of(name: str) -> str:
    from django.urls import NoReverseMatch, reverse

    try:
        return reverse(name)
    except NoReverseMatch:
        # The capability of the page is not installed, and the item is not shown.
        return ""


_link = lazy(_address_of, str)


def _icon(request: HttpRequest) -> str:
    from django.templatetags.static import static

    return static("admin_ui/icon.svg")


def _may_see(app: str, model: str, viewed: str = "") -> Callable[[HttpRequest], bool]:
    """Also whether there is a page: a capability that is not installed has none. `viewed` is the
    model whose rows it shows, where that is another one."""

    def may_see(request: HttpRequest) -> bool:
        from django.apps import apps
        from django.contrib import admin

        is_there = admin.site.is_registered(apps.get_model(app, model))
        return is_there and request.user.has_perm(f"{app}.view_{viewed or model}")

    return may_see


def _is_spending(request: HttpRequest) -> bool:
    """The comparison has an item of its own, below the address of this one."""
    spending, comparison = "/executions/spending/", "/executions/spending/comparison/"
    return spending in request.path and comparison not in request.path


def _item(title: str, icon: str, model: str, app: str, badge: str = "") -> dict[str, Any]:
    """`badge` is of `capabilities.dashboard.admin`: how much of it calls for attention."""
    shown = {"badge": f"executions.capabilities.dashboard.admin.{badge}_badge"} if badge else {}
    return {
        **shown,
        "title": title,
        "icon": icon,
        "link": _link(f"admin:{app}_{model}_changelist"),
        "permission": _may_see(app, model),
    }


def _group(title: str, *items: dict[str, Any], is_open: bool = False) -> dict[str, Any]:
    """Closed unless one of its pages is shown or calls for attention, or `is_open`."""
    return {"title": title, "open": is_open, "items": list(items)}


UNFOLD: dict[str, Any] = {
    "SITE_TITLE": "Cofferdam",
    "SITE_HEADER": "Cofferdam",
    "SITE_SUBHEADER": "Sandbox control",
    "SITE_SYMBOL": "shield_lock",
    "SITE_FAVICONS": [
        {
            "rel": "icon",
            "type": "image/svg+xml",
            "href": _icon,
        }
    ],
    "SITE_URL": None,
    "SHOW_HISTORY": True,
    "SHOW_VIEW_ON_SITE": False,
    # Served as a style sheet of our own, static/admin_ui/admin.css.
    "COLORS": {},
    "ACCOUNT": {
        "navigation": [{"title": "Authenticator", "link": _link("authenticator")}],
    },
    "DASHBOARD_CALLBACK": "executions.capabilities.dashboard.admin.dashboard_context",
    "LOGIN": {"form": "sandbox_site.login.LoginForm"},
    "SIDEBAR": {
        "show_search": False,
        "show_all_applications": True,
        "navigation": [
            {
                "items": [
                    {
                        "title": "Dashboard",
                        "icon": "monitoring",
                        "link": _link("admin:index"),
                    }
                ],
            },
            _group(
                "Run",
                _item("Executions", "terminal", "execution", "executions"),
                {
                    "title": "Playground",
                    "icon": "play_circle",
                    "link": _link("playground"),
                    "permission": lambda request: (
                        request.user.has_perm("executions.use_playground")
                        and request.user.has_perm("executions.view_execution")
                    ),
                },
                {
                    **_item("Threads", "smart_toy", "thread", "executions"),
                    "permission": _may_see("executions", "thread", "execution"),
                },
                _item("Sessions", "forum", "session", "executions"),
                _item("Snapshots", "photo_library", "snapshot", "executions"),
                _item("Schedules", "schedule", "schedule", "executions"),
                _item("Approvals", "approval", "approval", "executions", "approvals"),
                _item("Tool calls", "build", "toolcall", "executions", "calls"),
                _item("Network attempts", "lan", "networkattempt", "executions"),
                _item("Webhook deliveries", "outbox", "webhookdelivery", "executions"),
                is_open=True,
            ),
            _group(
                "Audit",
                _item("Ledger", "link", "ledgerentry", "executions"),
                _item("Verifications", "verified", "ledgercheck", "executions", "ledger"),
                _item("Reports", "lab_profile", "report", "executions"),
                _item("Legal holds", "gavel", "legalhold", "executions"),
                _item("Audit exports", "upload", "auditexport", "executions"),
                _item("Admin actions", "fact_check", "logentry", "admin"),
            ),
            _group(
                "Providers",
                _item("Providers", "dns", "providerconfig", "providers", "unhealthy"),
                _item("Routes", "alt_route", "route", "providers"),
                _item(
                    "Circuit breakers",
                    "electrical_services",
                    "circuitbreaker",
                    "providers",
                    "breakers",
                ),
                {
                    "title": "Compare providers",
                    "icon": "compare_arrows",
                    "link": _link("admin:executions_comparison"),
                    "permission": _may_see("executions", "spending"),
                },
                _item("Prices", "sell", "providerprice", "providers"),
            ),
            _group(
                "Tenants",
                _item("Tenants", "domain", "tenant", "executions"),
                _item("API keys", "key", "apikey", "executions"),
                _item("Policies", "policy", "policy", "executions"),
                _item("Templates", "inventory_2", "template", "executions"),
                _item("Network lists", "public", "networklist", "executions"),
                _item("Network credentials", "vpn_key", "networkcredential", "executions"),
                _item("Webhook secrets", "webhook", "webhooksecret", "executions"),
                {
                    **_item("Spending", "payments", "spending", "executions"),
                    "active": _is_spending,
                },
                _item("Budgets", "savings", "budget", "executions", "budgets"),
                _item("Spending alerts", "price_change", "spendingalert", "executions"),
            ),
            _group(
                "System",
                _item("Alerts", "notifications", "alert", "executions", "alerts"),
                _item("Pending changes", "how_to_reg", "pendingchange", "providers", "changes"),
                _item("Configuration versions", "history", "configversion", "providers"),
                _item("Processes", "memory", "process", "executions", "queue"),
                _item("Users", "person", "user", "auth"),
                _item("Roles", "group", "group", "auth"),
            ),
        ],
    },
}
