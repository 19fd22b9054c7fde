from csp.decorators import csp_update
from django.contrib import admin
from django.urls import include, path
from django.views.generic import RedirectView
from drf_spectacular.views import SpectacularSwaggerSplitView

from executions.admin import pages  # noqa: F401  registers the pages
from executions.admin.frame import mark_pages
from executions.capabilities.dashboard.admin import figures_view, pool_view
from executions.capabilities.playground.admin import Playground
from sandbox_site.authenticator import authenticator
from sandbox_site.description import DescriptionView
from sandbox_site.health import healthz, readyz
from sandbox_site.login import login, logout, own_password
from sandbox_site.metrics import metrics

admin.autodiscover()
mark_pages()

# Swagger UI writes styles into its page; its script is served from a file of its own.
docs = csp_update({"style-src": ["'unsafe-inline'"]})(
    SpectacularSwaggerSplitView.as_view(url_name="schema")
)

handler400 = "executions.middleware.bad_request"
handler404 = "executions.middleware.not_found"
handler500 = "executions.middleware.server_error"

urlpatterns = [
    path("", RedirectView.as_view(pattern_name="admin:index"), name="home"),
    path("healthz", healthz, name="healthz"),
    path("readyz", readyz, name="readyz"),
    path("metrics", metrics, name="metrics"),
    path("admin/figures/", admin.site.admin_view(figures_view), name="dashboard-figures"),
    path("admin/pool/", admin.site.admin_view(pool_view), name="pool-utilisation"),
    path("admin/authenticator/", admin.site.admin_view(authenticator), name="authenticator"),
    path("admin/playground/", include(Playground(admin.site).urls)),
    path("admin/login/", login, name="login"),
    path("admin/logout/", logout, name="logout"),
    path("admin/password_change/", admin.site.admin_view(own_password), name="own-password"),
    path("admin/", admin.site.urls),
    path("api/schema", DescriptionView.as_view(), name="schema"),
    path("api/docs", docs, name="docs"),
    path("", include("executions.doors.native.urls")),
]
