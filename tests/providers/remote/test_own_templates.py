"""A remote service's own templates, which stand for those of the installation by their names."""

from __future__ import annotations

import pytest

from providers.aliyun_codeinterpreter.provider import AliyunCodeInterpreterProvider
from providers.e2b.provider import E2BProvider
from providers.errors import InvalidConfiguration, SandboxError
from providers.remote.templates import read_templates
from providers.values import SandboxSpec
from tests.support.agentrun_server import AgentRunServer
from tests.support.e2b_server import E2BServer
from tests.support.remote_providers import aliyun_config, e2b_config, open_aliyun, open_e2b

SCIENCE = SandboxSpec(digest="a" * 64, template_name="science")


def test_e2b_is_asked_for_the_one_of_the_name(e2b_server: E2BServer) -> None:
    provider = open_e2b(e2b_server, templates="science=my-science, web=team/web:v2")
    assert provider.has_own_template("science")
    sandbox = provider.open(SCIENCE, "wonderland")
    plain = provider.open(SandboxSpec(), "wonderland")
    used = [each.template for each in e2b_server.sandboxes.values()]
    sandbox.close()
    plain.close()
    assert used == ["my-science", "code-interpreter-v1"]


def test_aliyun_is_asked_for_the_one_of_the_name(aliyun_server: AgentRunServer) -> None:
    provider = open_aliyun(aliyun_server, templates="science=code-science")
    with pytest.raises(SandboxError, match="template does not exist"):
        provider.open(SCIENCE, "wonderland")
    aliyun_server.templates.add("code-science")
    assert provider.open(SCIENCE, "wonderland").close()


def test_a_template_that_is_not_named_is_refused(e2b_server: E2BServer) -> None:
    provider = open_e2b(e2b_server, templates="web=web")
    assert not provider.has_own_template("science")
    for name in ("science", ""):
        with pytest.raises(InvalidConfiguration, match="templates of the configuration") as caught:
            provider.open(SandboxSpec(digest="a" * 64, template_name=name), "wonderland")
        assert caught.value.field == "template"
    assert e2b_server.sandboxes == {}


@pytest.mark.parametrize(
    "text", ["science", "science=", "=x", "Science=x", "science=x;y", "a=b,a=c", "a=b c"]
)
def test_what_is_no_list_of_pairs_is_refused_by_its_field(
    text: str, e2b_server: E2BServer, aliyun_server: AgentRunServer
) -> None:
    for kind, config in (
        (E2BProvider, e2b_config(e2b_server)),
        (AliyunCodeInterpreterProvider, aliyun_config(aliyun_server)),
    ):
        with pytest.raises(InvalidConfiguration, match=r"^templates: "):
            kind.check_config({**config, "templates": text})


def test_pairs_are_read() -> None:
    assert read_templates("a=b, c=d/e:1\nf.g=H") == {"a": "b", "c": "d/e:1", "f.g": "H"}
    assert read_templates(None) == read_templates("") == {}
