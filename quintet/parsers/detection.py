"""Finds the parsers that fit a checkpoint, by its chat template and its family."""

from collections.abc import Collection

from quintet.parsers.registry import REASONING_PARSERS, TOOL_PARSERS, P, Registry


def detect(
    template: str, model_type: str | None = None, special_tokens: Collection[str] = ()
) -> tuple[str | None, str | None]:
    """(name of the tool parser, name of the reasoning parser), each None where nothing speaks for one.

    A parser fits if the template has the texts that it writes; of several that fit, one of the model's family, else
    the one with the most telling signs. Without a template its special tokens stand for it.
    """
    text = template or "\n".join(special_tokens)
    return _fitting(TOOL_PARSERS, text, model_type or ""), _fitting(REASONING_PARSERS, text, model_type or "")


def _fitting(registry: Registry[P], text: str, model_type: str) -> str | None:
    fitting = [
        (name, parser)
        for name, parser in registry.items()
        if any(all(sign in text for sign in signs) for signs in parser.signs)
    ]
    of_family = [name for name, parser in fitting if model_type.startswith(parser.families)]
    return next(iter(of_family or [name for name, _ in fitting]), None)
