"""A process in which xgrammar compiles: what takes too long there is ended with it. Run by xgrammar_backend.py.

It reads and writes frames: 4 bytes of length (big-endian), then UTF-8. In: first the vocabulary, then grammars as
[kind, source, options]. Out: READY, or "-" and why the library does not start; then for each grammar "+" and what it
was compiled to, or "-" and why it cannot be.
"""

import json
import resource
import sys
from pathlib import Path
from typing import Any

from quintet.structured_output.compile_worker import one_line, read_frame, write_frame

SECONDS = 3  # of processor time that one grammar may take
MEMORY = 2 * 2**30  # bytes of address space beyond those of the start
MAX_GRAMMAR = 32 * 2**20  # bytes of a compiled grammar; compile_cache.MAX_GROWTH, which it is remembered at
READY = "+ready"


def main() -> None:
    """Compiles grammars from standard input until it ends."""
    vocabulary = read_frame(sys.stdin.buffer)
    if vocabulary is None:
        return
    try:
        import xgrammar

        info = xgrammar.TokenizerInfo.deserialize_json(vocabulary)
        compiler: Any = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
    except Exception as error:  # the library's own kinds, and those of loading it
        write_frame(sys.stdout.buffer, f"-{type(error).__name__}: {one_line(str(error))}")
        return
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY,) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    write_frame(sys.stdout.buffer, READY)
    while (text := read_frame(sys.stdin.buffer)) is not None:
        used = resource.getrusage(resource.RUSAGE_SELF)
        hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
        resource.setrlimit(resource.RLIMIT_CPU, (int(used.ru_utime + used.ru_stime) + 1 + SECONDS, hard))
        write_frame(sys.stdout.buffer, _answer(compiler, *json.loads(text)))


def _answer(compiler: Any, kind: str, source: str, options: dict[str, Any]) -> str:
    try:
        if kind == "json_schema":
            separators = options.pop("separators")
            compiled = compiler.compile_json_schema(source, separators=separators and tuple(separators), **options)
        elif kind == "regex":
            compiled = compiler.compile_regex(source)
        else:
            compiled = compiler.compile_grammar(source)
    except Exception as error:  # the library raises its own kinds
        return "-" + one_line(str(error).rpartition("] ")[2] if "/project/" in str(error) else str(error))
    if (size := compiled.memory_size_bytes) > MAX_GRAMMAR:
        return (
            f"-it takes {size / 2**20:.0f} MiB when it is compiled, and {MAX_GRAMMAR // 2**20} are served; simplify it"
        )
    return "+" + str(compiled.serialize_json())


if __name__ == "__main__":
    main()
