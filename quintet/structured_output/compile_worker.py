"""A process in which grammars are tried: what compiles for ever there is killed with it. Run by trial.py.

It reads and writes frames: 4 bytes of length (big-endian), then UTF-8. In: a grammar as grammar_text.py writes it.
Out: why it cannot be compiled, empty if it can be. For a JSON schema that says which keyword, and where.
"""

import json
import resource
import sys
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

SECONDS = 3  # of processor time that one grammar may take
MEMORY = 2**30  # bytes of address space
MAX_STATES = 50_000  # of a grammar's lexer, 1 to 2 kB each
MAX_TRIALS = 200  # at parts of a schema, to find the one that is to blame

WhyNot = Callable[[str], str]

# Where a keyword holds schemas: itself one, a list of them, or some by name.
ONE = ("not", "if", "then", "else", "items", "contains", "additionalProperties", "unevaluatedItems",
        "unevaluatedProperties", "propertyNames", "additionalItems")  # fmt: skip
LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
NAMED = ("$defs", "definitions", "properties", "patternProperties", "dependentSchemas")
_SHARED = ("$defs", "definitions", "$schema", "$id", "x-guidance")  # what a part needs of the whole


def main() -> None:
    """Compiles grammars from standard input until it ends."""
    why_not = _compiler()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # its ends are no news, and a core is as large as the bound
    while (text := _read(sys.stdin.buffer)) is not None:
        used = resource.getrusage(resource.RUSAGE_SELF)
        hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
        resource.setrlimit(resource.RLIMIT_CPU, (int(used.ru_utime + used.ru_stime) + 1 + SECONDS, hard))
        _write(sys.stdout.buffer, compile_error(text, why_not))


def compile_error(text: str, why_not: WhyNot) -> str:
    """Returns why a grammar cannot be compiled, with the place in its JSON schema, if it is one; empty if it can."""
    why = why_not(text)
    schema = _schema_of(text) if why else None
    if not isinstance(schema, dict):
        return why
    looks = iter(range(MAX_TRIALS))

    def fails(part: dict[str, Any]) -> bool:
        return next(looks, None) is not None and bool(why_not(json.dumps({"grammars": [{"json_schema": part}]})))

    path, part = _deepest(schema, fails)
    keyword = _failing_keyword(part, fails)
    return f"{why} (at {'#' + ''.join(path)}{f', keyword {keyword!r}' if keyword else ''})"


def _compiler() -> WhyNot:
    import llguidance

    limits = llguidance.LLParserLimits(max_lexer_states=MAX_STATES, verbose_errors=False)

    def why_not(text: str) -> str:
        return " ".join(str(llguidance.LLMatcher.validate_grammar(text, limits=limits)).split())

    return why_not


def _schema_of(text: str) -> Any:
    try:
        [grammar] = json.loads(text)["grammars"]
    except (ValueError, KeyError, TypeError):
        return None
    return grammar.get("json_schema")


def _deepest(schema: dict[str, Any], fails: Callable[[dict[str, Any]], bool]) -> tuple[list[str], dict[str, Any]]:
    """(steps, the part there): a part that fails by itself, and none within it does."""
    path: list[str] = []
    shared = {key: schema[key] for key in _SHARED if key in schema}
    part, going = schema, True
    while going:
        going = False
        for step, inner in _parts(part):
            if isinstance(inner, dict) and fails({**shared, **inner}):
                path, part, going = [*path, step], inner, True
                break
    return path, {**shared, **part}


def _parts(schema: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yields the entries directly within a schema where schemas may stand, each behind its JSON pointer."""
    yield from ((f"/{key}", schema.get(key)) for key in ONE)
    for key in LISTS:
        if isinstance(schema.get(key), list):
            yield from ((f"/{key}/{index}", each) for index, each in enumerate(schema[key]))
    for key in NAMED:
        if isinstance(schema.get(key), dict):
            yield from ((f"/{key}/{_escaped(name)}", each) for name, each in schema[key].items())


def _failing_keyword(part: dict[str, Any], fails: Callable[[dict[str, Any]], bool]) -> str:
    """The keyword without which it would compile; empty if there is no such one."""
    for key in sorted(part, key=lambda key: key == "type"):  # without a type nearly all would
        if key not in _SHARED and not fails({name: value for name, value in part.items() if name != key}):
            return key
    return ""


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


def _read(pipe: BinaryIO) -> str | None:
    head = pipe.read(4)
    return None if len(head) < 4 else pipe.read(int.from_bytes(head, "big")).decode()


def _write(pipe: BinaryIO, text: str) -> None:
    data = text.encode()
    pipe.write(len(data).to_bytes(4, "big") + data)
    pipe.flush()


if __name__ == "__main__":
    main()
