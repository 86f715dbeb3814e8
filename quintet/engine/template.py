"""Renders chat templates as transformers does, with bounds: a template comes with a model, so nobody has read it.

The sandbox (Jinja's ImmutableSandboxedEnvironment) keeps a template from Python's objects. It sets no limit to time or
memory, so here every loop and macro counts its turns, and what multiplies text is checked before it runs.
"""

import functools
import json
import re
import time
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from types import CodeType
from typing import Any

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MAX_TEMPLATE = 2**20  # characters of a template; the longest known has under 2**16
MAX_CHARS = 2**26  # characters of any text, or items of any list, that a template makes: 64 times a context of 1M
MAX_TURNS = 2_000_000  # of loops and macros together
MAX_SECONDS = 10.0
_MAX_BITS = 1024  # of an integer
_AMPLIFIERS = frozenset(
    "batch center expandtabs format indent join ljust replace rjust slice translate wordwrap xmlattr zfill".split()
)
_WIDTH = re.compile(r"\d{5}|\*|\{[^{}]*\{")  # a width of five digits, or one that is computed, in a format


class _Generation(jinja2.ext.Extension):
    """{% generation %} marks the assistant's part for training; here it is passed through."""

    tags = {"generation"}

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


class _Count(NodeTransformer):
    """Makes every loop, macro and block count its turns, and `~` check the length of what it joins."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        return self._counted(node)

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        return self._counted(node)

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.Node:
        return self._counted(node)

    def visit_Block(self, node: nodes.Block) -> nodes.Node:
        return self._counted(node)

    def _counted(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(self._call("turn", [], node.lineno), lineno=node.lineno))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return self._call("glue", node.nodes, node.lineno)

    def _call(self, name: str, args: list[nodes.Expr], line: int) -> nodes.Call:
        function = nodes.EnvironmentAttribute(name, lineno=line)
        return nodes.Call(function, args, [], None, None, lineno=line)


class _Environment(ImmutableSandboxedEnvironment):
    """One rendering: it counts, so it is not shared."""

    intercepted_binops = frozenset("+ * ** %".split())

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"])
        self.filters = {**{name: _bounded(name, each) for name, each in self.filters.items()}, "tojson": _to_json}
        del self.globals["lipsum"]  # writes text without bound
        self.globals |= {"raise_exception": _raise, "strftime_now": _now, "dict": _Dict(), "namespace": _Namespace}
        self.concat = _join
        self._turns = 0
        self._deadline = time.monotonic() + MAX_SECONDS

    def turn(self) -> None:
        self._turns += 1
        if self._turns > MAX_TURNS:
            raise SecurityError(f"it goes through loops and macros more than {MAX_TURNS} times")
        if time.monotonic() > self._deadline:
            raise SecurityError(f"it runs longer than {MAX_SECONDS:g} s")

    def glue(self, *parts: Any) -> str:
        return _join(map(str, parts))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        _check_binop(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def call(self, context: Any, obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Methods of text and macros alike; `self` would hide the name that jinja gives to the environment."""
        subject = getattr(obj, "__self__", None)
        if isinstance(subject, str):
            args = _check_amplifier(obj.__name__, subject, args, kwargs)
        return super().call(context, obj, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """str.format reaches here with its text bound; the sandbox replaces it, we look at the text first."""
        wrapped = super().wrap_str_format(value)
        if wrapped is not None:
            _check_format(value.__self__)
        return wrapped


def _join(parts: Iterable[str]) -> str:
    parts = list(parts)
    _check_size(sum(map(len, parts)))
    return "".join(parts)


def _check_size(size: int) -> None:
    if size > MAX_CHARS:
        raise SecurityError(f"it makes a text or list of more than {MAX_CHARS} characters or items")


def _check_binop(operator: str, left: Any, right: Any) -> None:
    sizes = [len(each) if isinstance(each, (str, list, tuple)) else None for each in (left, right)]
    if operator == "+" and None not in sizes:
        _check_size(len(left) + len(right))
    elif operator == "%" and isinstance(left, str):
        _check_format(left)
        _check_size(_length(right) * (left.count("%") + 1))
    elif operator == "*" and sizes != [None, None]:
        _check_size((len(left) if sizes[0] is not None else left) * (len(right) if sizes[1] is not None else right))
    elif operator in ("*", "**") and isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() * abs(right) if operator == "**" else left.bit_length() + right.bit_length()
        if bits > _MAX_BITS:
            raise SecurityError(f"it computes a number of more than {_MAX_BITS} bits")


def _check_format(text: str) -> None:
    if _WIDTH.search(text):
        raise SecurityError(f"it formats text with a width that is computed or over 9999: {text[:80]!r}")


def _check_amplifier(name: str, subject: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """Refuses what would make too long a text, by the worst case. Returns the arguments, iterators made lists."""
    if name not in _AMPLIFIERS:
        return args
    if name in ("format", "format_map"):
        _check_format(str(subject))
    args = tuple(list(each) if hasattr(each, "__next__") else each for each in args)
    factor = max([1, *(_length(each) for each in (*args, *kwargs.values()))])
    _check_size(factor * (_length(subject) + 1))
    return args


def _length(value: Any) -> int:
    """How long a text the value may become, or make another."""
    if isinstance(value, (int, float)):
        return int(min(abs(value), 2 * MAX_CHARS))
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(map(_length, value.values()), len(value))
    return sum(map(_length, value), len(value)) if isinstance(value, (list, tuple)) else 1


def _bounded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter whose worst case is looked at first. Filters that want a context get it as their first argument."""
    if name not in _AMPLIFIERS:
        return function
    skip = 1 if hasattr(function, "jinja_pass_arg") else 0

    @functools.wraps(function)  # keeps jinja_pass_arg
    def bounded(*args: Any, **kwargs: Any) -> Any:
        subject, rest = args[skip], args[skip + 1 :]
        if hasattr(subject, "__next__"):
            subject = list(subject)
        rest = _check_amplifier(name, subject, rest, kwargs)
        return function(*args[:skip], subject, *rest, **kwargs)

    return bounded


# ---------------------------------------------------------------------------- what transformers gives to its templates


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Jinja's own would escape for HTML."""
    if _length(indent) > 16:
        raise SecurityError("it indents JSON by more than 16")
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: Any) -> None:
    raise jinja2.exceptions.TemplateError(str(message))


def _now(form: str) -> str:
    _check_format(form)
    _check_size(len(form) * 1000)
    return datetime.now().strftime(form)


class _Dict:
    """dict without its attributes."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(jinja2.utils.Namespace):
    """A namespace that takes no attribute with an underscore in front."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # so that a template may name an attribute `self`
        attributes = dict(*args[1:], **kwargs)
        for name in attributes:
            _check_name(name)
        jinja2.utils.Namespace.__init__(args[0], attributes)  # type: ignore[arg-type]

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"it sets the attribute {name!r} of a namespace; names may not begin with an underscore")


# ------------------------------------------------------------------------------------------------------------ rendering


@functools.lru_cache(maxsize=64)
def _compile(source: str) -> CodeType:
    if len(source) > MAX_TEMPLATE:
        raise ValueError(f"the chat template has {len(source)} characters; the limit is {MAX_TEMPLATE}")
    environment = _Environment()
    return environment.compile(_Count().visit(environment.parse(source)))


def render_template(source: str, variables: Mapping[str, Any]) -> str:
    """The text of a template. `variables` must be plain data: str, int, float, bool, None, list, dict.

    Raises ValueError that says what the template found wrong, or which bound it broke.
    """
    try:
        environment = _Environment()
        template = jinja2.Template.from_code(environment, _compile(source), environment.make_globals(None))
        return template.render(variables)
    except jinja2.exceptions.TemplateSyntaxError as error:
        raise ValueError(f"the chat template has an error in line {error.lineno}: {error.message}") from error
    except SecurityError as error:
        raise ValueError(f"the chat template was stopped: {error}; use another template") from error
    except jinja2.exceptions.UndefinedError as error:
        raise ValueError(
            f"the chat template needs something that was not given: {error}; "
            "complete the messages, or give it in chat_template_kwargs"
        ) from error
    except jinja2.exceptions.TemplateError as error:  # raise_exception() in the template
        raise ValueError(f"the chat template refuses these messages: {error}") from error
    except RecursionError as error:
        raise ValueError("the chat template nests too deep; use another template") from error
    except (TypeError, ValueError, LookupError, ArithmeticError, AttributeError, MemoryError) as error:
        if str(error).startswith("the chat template"):
            raise
        raise ValueError(
            f"the chat template fails on these messages: {type(error).__name__}: {error}; "
            "check the form of the messages and tools, or use another template"
        ) from error
