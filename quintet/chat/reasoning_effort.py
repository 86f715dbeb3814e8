"""Reasoning settings of a request: on or off, effort and budget, and the chat template's variables for them."""

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

from quintet.chat.lazy_template import render_template, template_variables
from quintet.chat.validation import object_of, one_of
from quintet.sampling_params import ParameterError

SWITCHES = ("enable_thinking", "thinking")  # template variables that turn reasoning on or off
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
_KINDS = ("disabled", "enabled", "adaptive", "between_tools")  # Anthropic's; here those that follow say the same
_DISPLAYS = ("summarized", "omitted")  # nothing is summarized
_PROBE = [{"role": "user", "content": "Hello"}]


def read_effort(given: Any, where: str) -> str | None:
    """Raises ParameterError that names the place."""
    return None if given is None else str(one_of(given, where, EFFORTS))


class ReasoningSettings(NamedTuple):
    """Reasoning settings of a request."""

    enabled: bool | None = None  # None: as the template has it
    budget: int | None = None  # most tokens
    visible: bool = True
    effort: str | None = None

    def with_effort(self, effort: str | None) -> "ReasoningSettings":
        """Adds an effort, which turns reasoning on or off if nothing else does."""
        on = effort != "none" if self.enabled is None and effort is not None else self.enabled
        return self._replace(enabled=on, effort=effort)


def read_thinking(given: Any, where: str) -> ReasoningSettings:
    """True, false, or {"type": ..., "budget_tokens": ..., "display": ...}. Raises ParameterError."""
    if given is None or isinstance(given, bool):
        return ReasoningSettings(given)
    object_of(given, where, ("type", "budget_tokens", "display"))
    kind = one_of(given.get("type"), f"{where}.type", _KINDS)
    budget, display = given.get("budget_tokens"), given.get("display")
    if budget is not None and (isinstance(budget, bool) or not isinstance(budget, int) or not 0 <= budget < 2**31):
        raise ParameterError(f"{where}.budget_tokens", f"must be a whole number of tokens, not {str(budget)[:80]!r}")
    if display is not None:
        one_of(display, f"{where}.display", _DISPLAYS)
    return ReasoningSettings(kind != "disabled", budget, display != "omitted")


def reasoning_variables(template: str, thinks: bool | None, effort: str | None = None) -> dict[str, Any]:
    """Returns the variables that turn reasoning on or off and set its effort, if the template reads them."""
    known = template_variables(template)
    variables: dict[str, Any] = {} if thinks is None else {name: thinks for name in SWITCHES if name in known}
    if effort not in (None, "none") and "reasoning_effort" in known:
        variables["reasoning_effort"] = effort
    return variables


def may_reason(template: str, template_kwargs: Mapping[str, Any] | None) -> bool:
    """Returns whether a template with these variables lets the model think: it cannot forbid it, or does not."""
    switches = [name for name in SWITCHES if name in template_variables(template)]
    switched_on = [bool(template_kwargs[name]) for name in switches if template_kwargs and name in template_kwargs]
    return all(switched_on) if switched_on else all(_reasons_by_default(template, name) for name in switches)


@functools.lru_cache(maxsize=64)
def _reasons_by_default(template: str, switch: str) -> bool:
    """Returns whether the template lets the model think if the switch is not set: tried, not guessed."""

    def rendered(**variables: Any) -> str:
        fixed = {"messages": _PROBE, "tools": None, "add_generation_prompt": True}
        return render_template(template, {**fixed, **variables})

    try:
        return rendered() == rendered(**{switch: True})
    except ValueError:
        return True
