"""Chat templates, for what may never see one: their renderer, and with it Jinja, is imported at the first."""

from collections.abc import Mapping
from typing import Any


def render_template(template: str, variables: Mapping[str, Any]) -> str:
    from quintet.chat import template as renderer

    return renderer.render_template(template, variables)


def template_variables(template: str) -> frozenset[str]:
    from quintet.chat import template as renderer

    return renderer.template_variables(template)
