"""Renders chat templates as transformers does, with bounds: a template comes with a model, so it is not trusted.

The sandbox (Jinja's ImmutableSandboxedEnvironment) keeps a template from Python's objects. It sets no limit to time or
memory, so here loops, macros and comparisons are counted, and whatever makes text or lists pays for their size first.
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
from jinja2.meta import find_undeclared_variables
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from quintet.chat.history import TemplateRefused

MAX_TEMPLATE = 2**17  # characters of a template; the longest known has under 2**16
MAX_SIZE = 2**24  # of any one value; characters of text: 4 times a context of 1M tokens
MAX_TOTAL = 2**30  # of all that a rendering makes, which is also the most memory that it can hold
MAX_TURNS = 2_000_000  # of loops, macros and comparisons together
MAX_SECONDS = 10.0
_ITEM = 8  # what an entry of a list or dict counts as, in characters
_MAX_BITS = 1024  # of an integer
_AMPLIFIERS = frozenset(
    "batch center expandtabs format format_map indent join ljust replace rjust slice translate wordwrap zfill".split()
)
_HTML = ("striptags", "urlize", "xmlattr", "random")  # filters that no chat needs
_WIDTH = re.compile(r"\d{5}|\*|\{[^{}]*\{")  # a width of five digits, or one that is computed, in a format


class _Generation(jinja2.ext.Extension):
    """{% generation %} marks the assistant's part for training; here it is passed through."""

    tags = {"generation"}

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


class _CostCounter(NodeTransformer):
    """Rewrites a template so that what may run long counts a turn, and what makes a value pays for it."""

    def _counted(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_call("turn", nodes.Const(None, lineno=node.lineno)), lineno=node.lineno))
        return node

    visit_For = visit_Macro = visit_CallBlock = visit_Block = _counted

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        return nodes.And(_call("turn", nodes.Const(None, lineno=node.lineno)), node, lineno=node.lineno)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _call("glue", nodes.List(node.nodes, lineno=node.lineno))

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        return _call("paid", node) if isinstance(node.arg, nodes.Slice) else node

    def visit_List(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        items = node.items if isinstance(node, (nodes.List, nodes.Tuple)) else [pair.value for pair in node.items]
        fixed = all(isinstance(item, nodes.Const) for item in items)
        return node if fixed or getattr(node, "ctx", "load") != "load" else _call("paid", node)

    visit_Tuple = visit_Dict = visit_List


def _call(name: str, subject: nodes.Expr) -> nodes.Expr:
    """Builds a call as a filter: the cheapest call that the compiler makes."""
    return nodes.Filter(subject, name, [], [], None, None, lineno=subject.lineno)


class _Environment(ImmutableSandboxedEnvironment):
    """One rendering: it keeps count, so it is not shared."""

    intercepted_binops = frozenset("+ * ** %".split())

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, "jinja2.ext.loopcontrols"],
            finalize=self._show,
        )
        self.filters = {name: self._bounded(name, each) for name, each in self.filters.items() if name not in _HTML}
        self.filters["tojson"] = self._bounded("tojson", _to_json)
        self.filters |= {"turn": self._turn, "glue": self._glue, "paid": self._paid}
        del self.globals["lipsum"]  # writes text without bound
        self.globals |= {
            "raise_exception": _raise,
            "strftime_now": _now,
            "dict": _Dict(self._paid),
            "namespace": _Namespace,
        }
        self._turns = self._spent = 0
        self._deadline = time.thread_time() + MAX_SECONDS  # of its own: others may keep the machine busy

    def _spend(self, size: int) -> None:
        self._spent += size
        if size > MAX_SIZE or self._spent > MAX_TOTAL:
            raise SecurityError(f"it makes text or lists of more than {min(size, MAX_SIZE)} characters")

    @jinja2.pass_context  # so that the compiler does not take it for a constant
    def _turn(self, context: Any, subject: Any) -> bool:
        self._turns += 1
        if self._turns > MAX_TURNS:
            raise SecurityError(f"it goes through loops, macros and comparisons more than {MAX_TURNS} times")
        if time.thread_time() > self._deadline:
            raise SecurityError(f"it runs longer than {MAX_SECONDS:g} s")
        return True

    @jinja2.pass_context
    def _paid(self, context: Any, subject: Any) -> Any:
        """The value itself, once its size is paid for."""
        self._spend(_size(subject))
        return subject

    @jinja2.pass_context
    def _glue(self, context: Any, subject: list[Any]) -> str:
        self._spend(_size(subject))
        return "".join(map(str, subject))

    def _show(self, value: Any) -> Any:
        if not isinstance(value, str):
            self._spend(_size(value))
        return value

    def concat(self, parts: Iterable[str]) -> str:
        parts = list(parts)
        self._spend(sum(map(len, parts)))
        return "".join(parts)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        self._spend(_worst_binop(operator, left, right))
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Functions, macros, and the methods of text, which may multiply it."""
        subject = getattr(__obj, "__self__", None)
        if isinstance(subject, str):
            args = _materialized(args)
            __self._spend(_worst_call(__obj.__name__, subject, args, kwargs))
        return super().call(__context, __obj, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """str.format, which the sandbox replaces by its own: that one must pay as well."""
        function = super().wrap_str_format(value)
        if function is None:
            return None

        def paying(*args: Any, **kwargs: Any) -> str:
            self._spend(_worst_call("format", value.__self__, args, kwargs))
            return function(*args, **kwargs)

        return paying

    def _bounded(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """A filter that pays first. Those that want a context get it as their first argument."""
        skip = 1 if hasattr(function, "jinja_pass_arg") else 0

        def bounded(*args: Any, **kwargs: Any) -> Any:
            subject, *rest = args[skip:] if name in ("length", "count") else _materialized(args[skip:])
            self._spend(_worst_call(name, subject, rest, kwargs))
            return function(*args[:skip], subject, *rest, **kwargs)

        # keeps jinja_pass_arg; functools.wraps would copy names too, 50 times for each rendering
        bounded.__dict__.update(getattr(function, "__dict__", {}))
        return bounded


def _materialized(args: Iterable[Any]) -> tuple[Any, ...]:
    """Generators as lists, so that they can be measured."""
    return tuple(list(each) if hasattr(each, "__next__") else each for each in args)


def _size(value: Any) -> int:
    """Characters of all text within, and _ITEM for every other thing; looks no further than MAX_SIZE.

    A list that holds one list twice counts it twice: written out, it is.
    """
    total, stack = 0, [value]
    while stack and total <= MAX_SIZE:
        each = stack.pop()
        total += _ITEM
        if isinstance(each, str):
            total += len(each)
        elif isinstance(each, Mapping):
            stack += each.keys()
            stack += each.values()
        elif isinstance(each, (list, tuple, set, type({}.values()), type({}.items()))):
            stack += each
    return total


def _factor(value: Any) -> int:
    """Returns how often an argument may multiply its text: the argument is a width, or what replaces a character."""
    if isinstance(value, (int, float)):
        return int(min(abs(value), 2 * MAX_SIZE))
    return len(value) if isinstance(value, str) else _size(value)


def _worst_call(name: str, subject: Any, args: Iterable[Any], kwargs: Mapping[str, Any]) -> int:
    """Returns an upper bound of the result's size, when a filter or a method of text is called."""
    size = _size(subject)
    if name not in _AMPLIFIERS:
        return size
    if name in ("format", "format_map"):
        _check_format(str(subject))
    return size * max([1, *map(_factor, args), *map(_factor, kwargs.values())])


def _worst_binop(operator: str, left: Any, right: Any) -> int:
    sized = (str, list, tuple)
    if operator == "+":
        return _size(left) + _size(right) if isinstance(left, sized) else 0
    if operator == "%" and isinstance(left, str):
        _check_format(left)
        return len(left) + _size(right) * (left.count("%") + 1)
    if operator == "*" and (isinstance(left, sized) or isinstance(right, sized)):
        text, count = (left, right) if isinstance(left, sized) else (right, left)
        return _size(text) * _factor(count)
    if operator in ("*", "**") and isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() * abs(right) if operator == "**" else left.bit_length() + right.bit_length()
        if bits > _MAX_BITS:
            raise SecurityError(f"it computes a number of more than {_MAX_BITS} bits")
    return 0


def _check_format(text: str) -> None:
    if _WIDTH.search(text):
        raise SecurityError(f"it formats text with a width that is computed or over 9999: {text[:80]!r}")


# ---------------------------------------------------------------------------- what transformers gives to its templates


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Jinja's own would escape for HTML."""
    if indent is not None and _factor(indent) > 16:
        raise SecurityError("it indents JSON by more than 16")
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: Any) -> None:
    raise jinja2.exceptions.TemplateError(str(message))


def _now(form: str) -> str:
    if len(form) > 256 or re.search(r"%[^a-zA-Z%]*\d", form):  # C knows widths
        raise SecurityError(f"it formats the time by {form[:80]!r}")
    return datetime.now().strftime(form)


class _Dict:
    """dict without its attributes."""

    def __init__(self, paid: Callable[[Any, Any], Any]) -> None:
        self._paid = paid

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._paid(None, dict(*args, **kwargs))

    def fromkeys(self, *args: Any) -> Any:
        return self._paid(None, dict.fromkeys(*args))


class _Namespace(jinja2.utils.Namespace):
    """A namespace that takes no attribute with an underscore in front, and does not print what it holds."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # so that a template may name an attribute `self`
        attributes = dict(*args[1:], **kwargs)
        for name in attributes:
            _check_name(name)
        jinja2.utils.Namespace.__init__(args[0], attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)

    def __repr__(self) -> str:
        return "<Namespace>"


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"it sets the attribute {name!r} of a namespace; names may not begin with an underscore")


# ------------------------------------------------------------------------------------------------------------ rendering


@functools.lru_cache(maxsize=64)
def template_variables(source: str) -> frozenset[str]:
    """The names that a template reads and does not set itself; empty if it cannot be read."""
    try:
        return frozenset(find_undeclared_variables(_Environment().parse(source)))
    except (jinja2.exceptions.TemplateError, RecursionError):
        return frozenset()


@functools.lru_cache(maxsize=64)
def _compile(source: str) -> CodeType:
    if len(source) > MAX_TEMPLATE:
        raise ValueError(f"the chat template has {len(source)} characters; the limit is {MAX_TEMPLATE}")
    environment = _Environment()
    return environment.compile(_CostCounter().visit(environment.parse(source)))


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
        raise TemplateRefused(
            f"the chat template needs something that was not given: {error}; "
            "complete the messages, or give it in chat_template_kwargs"
        ) from error
    except jinja2.exceptions.TemplateError as error:  # raise_exception() in the template
        raise TemplateRefused(f"the chat template refuses these messages: {error}") from error
    except RecursionError as error:
        raise ValueError("the chat template nests too deep; use another template") from error
    except Exception as error:  # an expression in the template may fail in any way
        if isinstance(error, ValueError) and str(error).startswith("the chat template"):
            raise
        raise TemplateRefused(
            f"the chat template fails on these messages: {type(error).__name__}: {error}; "
            "check the form of the messages and tools, or use another template"
        ) from error
