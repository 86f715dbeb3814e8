"""A process in which grammars are tried: what compiles for ever there is killed with it. Run by compile_check.py.

A grammar is compiled, and some texts are written by it with a vocabulary of single bytes: most of a lexer is made then.

It reads and writes frames: 4 bytes of length (big-endian), then UTF-8. In: a grammar as grammar_source.py writes it.
Out: why it cannot be compiled, empty if it can be. For a JSON schema that says which keyword, and where.
"""

import json
import random
import resource
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

SECONDS = 3  # of processor time that one grammar may take
MEMORY = 2**30  # bytes of address space
MAX_STATES = 50_000  # of a grammar's lexer, about 0.5 kB each
MAX_ITEMS_IN_ROW = 20_000  # of its parser; an object of 1,000 properties has 4,007
STEP_LEXER_FUEL = 100_000  # for one mask: 7 ms, or 70 ms where expressions are large
MASK_SECONDS = 0.5  # of a processor, for the masks of one text of TRIAL_BYTES
TRIAL_TEXTS, TRIAL_BYTES = 2, 48
MAX_VOCABULARY = 2**19  # ids that a grammar may name (<[7]>)
SLOW_MASKS = "its masks take too long to compute; simplify it"
NO_TEXT = "no text follows it"
_LIMITS = ("too many", "; max is ", "fuel")  # in the library's errors: another text would come to it as well
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
    why_not, masks_error = _compiler(), _mask_trial()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # its ends are no news, and a core is as large as the bound
    while (text := read_frame(sys.stdin.buffer)) is not None:
        used = resource.getrusage(resource.RUSAGE_SELF)
        hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
        resource.setrlimit(resource.RLIMIT_CPU, (int(used.ru_utime + used.ru_stime) + 1 + SECONDS, hard))
        write_frame(sys.stdout.buffer, compile_error(text, why_not) or masks_error(text))


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

    limits = parser_limits()

    def why_not(text: str) -> str:
        return one_line(llguidance.LLMatcher.validate_grammar(text, limits=limits))

    return why_not


def parser_limits() -> Any:
    """Returns the limits of every grammar, in a trial and in an engine."""
    import llguidance

    return llguidance.LLParserLimits(
        max_lexer_states=MAX_STATES, max_items_in_row=MAX_ITEMS_IN_ROW, step_lexer_fuel=STEP_LEXER_FUEL,
        verbose_errors=False,
    )  # fmt: skip


def one_line(error: str) -> str:
    """Returns the library's message on one line."""
    return " ".join(error.replace("<non-verbose/>", "").split())


def mask_error(error: str) -> str:
    """Returns the library's message about a first mask."""
    return NO_TEXT if "NoExtension" in error else one_line(error)


class _Bytes:
    """A vocabulary of single bytes and of tokens without text, in the form of llguidance.TokenizerWrapper."""

    is_tokenizer_wrapper, bos_token_id, eos_token_id = True, None, 256
    special_token_ids = (256,)

    def __init__(self) -> None:
        self.tokens = [*(bytes([value]) for value in range(256)), b"</s>", *[b""] * (MAX_VOCABULARY - 257)]

    def __call__(self, text: str) -> list[int]:
        return list(text.encode())


def _mask_trial() -> WhyNot:
    import llguidance

    tokens: Any = _Bytes()
    vocabulary, limits = llguidance.LLTokenizer(tokens, slices=[]), parser_limits()

    def error(text: str) -> str:
        compiled = llguidance.LLMatcher(vocabulary, text, log_level=0, limits=limits)
        return next(filter(None, (_write_text(compiled.deep_copy(), seed) for seed in range(TRIAL_TEXTS))), "")

    return error


def _write_text(matcher: Any, seed: int) -> str:
    """Writes a text at random -> why the grammar cannot be served; empty if it can."""
    draw, start = random.Random(seed), time.process_time()
    for place in range(TRIAL_BYTES):
        mask = matcher.compute_bitmask()
        if not matcher.is_error():
            allowed = [value for value in range(256) if mask[value >> 3] >> (value & 7) & 1]
            if not allowed:
                allowed = [_first(mask)]
            if allowed == [_Bytes.eos_token_id] or matcher.is_stopped():
                break
            matcher.consume_token(draw.choice(allowed))
        error = matcher.get_error() or ""
        if error and (place == 0 or any(each in error for each in _LIMITS)):
            return mask_error(error)
        if error:
            break
        if time.process_time() - start > MASK_SECONDS:
            return SLOW_MASKS
    return ""


def _first(mask: bytes) -> int:
    bits = int.from_bytes(mask, "little")
    return (bits & -bits).bit_length() - 1


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


def read_frame(pipe: BinaryIO) -> str | None:
    """Reads a frame; None at the end."""
    head = pipe.read(4)
    return None if len(head) < 4 else pipe.read(int.from_bytes(head, "big")).decode()


def write_frame(pipe: BinaryIO, text: str) -> None:
    """Writes a frame."""
    data = text.encode()
    pipe.write(len(data).to_bytes(4, "big") + data)
    pipe.flush()


if __name__ == "__main__":
    main()
