"""The steps that are captured, so that few graphs serve all: the engine pads to them."""

from collections.abc import Sequence

from quintet.config import EngineConfig
from quintet.interface.types import ShapeBucket

MAX_CAPTURED_TOKENS = 512  # tokens of a captured decode step, and of the steps with prompts that are captured ahead
# Tokens of a captured step with prompts. On an H100 the host takes 1.5 ms a layer for an eager step: 50 ms for Llama
# 3.1 8B, as long as 2,048 tokens take the device; 43 ms for Qwen3-0.6B, as long as some 10,000.
MAX_MIXED = 8192
STEPS = ((1024, 64), (2048, 128), (4096, 256), (MAX_MIXED, 512))  # up to so many tokens, a size every so many
# Rows of a large step's outputs, where drafts may want one for each token: logits of 8,192 would take gigabytes.
MAX_ROWS = 512
FEW = 16  # requests beside a prompt's tokens; then as many as there may be: attention has a program for each
MIN_PAGES = 64  # columns of a captured table; then four times as many each: a longer request seldom asks anew


def decode_sizes(most: int) -> tuple[int, ...]:
    """1, 2, 4, every 8 to 64, 16 to 128, 32 to 256, then 64: from 32 on, a fifth is padding at most."""
    sizes = [
        1,
        2,
        4,
        *range(8, 64, 8),
        *range(64, 128, 16),
        *range(128, 256, 32),
        *range(256, MAX_CAPTURED_TOKENS + 1, 64),
    ]
    most = min(most, MAX_CAPTURED_TOKENS)
    return (*(size for size in sizes if size < most), most)


def mixed_sizes(most: int) -> tuple[int, ...]:
    """16, 32, every 64 to 1024, 128 to 2048, 256 to 4096, 512 to 8192: few tokens take as long as the weights do; from
    256 on a fifth is padding at most, and from 448 on, where padding takes the device time, an eighth."""
    sizes = [16, 32]
    for last, step in STEPS:
        sizes += range(sizes[-1] // step * step + step, last + 1, step)
    most = min(most, MAX_MIXED)
    return (*(size for size in sizes if size < most), most)


def capture_sizes(config: EngineConfig) -> tuple[int, ...]:
    """Returns the sizes of decode steps to capture, in order: the configured ones that can occur, or our own."""
    if config.enforce_eager:
        return ()
    if config.capture_sizes:
        return tuple(size for size in config.capture_sizes if size <= config.max_num_seqs)
    return decode_sizes(min(config.max_num_seqs, config.max_capture_size or MAX_CAPTURED_TOKENS))


def mixed_capture_sizes(config: EngineConfig) -> tuple[int, ...]:
    """The same of steps in which some request brings more tokens."""
    if config.enforce_eager or not config.capture_prompts:
        return ()
    if config.capture_sizes:
        return tuple(size for size in config.capture_sizes if 1 < size <= config.step_tokens)
    return mixed_sizes(min(config.step_tokens, config.max_capture_size or MAX_MIXED))


def sizes_with_planners(config: EngineConfig, sizes: Sequence[int]) -> tuple[int, ...]:
    """Those of steps with prompts where a planner's kernels have the others, which run eagerly: unless sizes were asked
    for, these are expected to be the faster ones for many tokens."""
    asked = config.capture_sizes or config.max_capture_size
    return tuple(size for size in sizes if asked or size <= MAX_CAPTURED_TOKENS)


def sizes_captured_late(config: EngineConfig, buckets: Sequence[ShapeBucket]) -> frozenset[int]:
    """Tokens of the steps that are not captured ahead. Sizes that a user names are few; of our own there are hundreds,
    and capturing a large one when it first comes is no longer than the step."""
    return frozenset(each.tokens for each in buckets if each.tokens > MAX_CAPTURED_TOKENS and not config.capture_sizes)


def capture_size_warnings(config: EngineConfig) -> list[str]:
    """Returns warnings about configured sizes that serve no step, or only steps with prompts."""
    if config.enforce_eager:
        return []
    decode, mixed = capture_sizes(config), mixed_capture_sizes(config)
    none = [size for size in config.capture_sizes if size not in decode and size not in mixed]
    rare = [size for size in config.capture_sizes if size not in decode and size in mixed]
    seqs, tokens = f"max_num_seqs is {config.max_num_seqs}", f"max_num_batched_tokens {config.step_tokens}"
    steps = f", {tokens}" if config.capture_prompts else "; steps with prompts are not captured"
    warnings = [f"capture_sizes {none} serve no step: {seqs}{steps}"] if none else []
    return [*warnings, *([f"capture_sizes {rare} are of steps with prompts alone: {seqs}"] if rare else [])]


def table_width(pages: int) -> int:
    """Columns of the captured table that holds so many."""
    width = MIN_PAGES
    while width < pages:
        width *= 4
    return width


def table_widths(pages: int) -> tuple[int, ...]:
    """All that requests of up to so many pages bring."""
    widths = [MIN_PAGES]
    while widths[-1] < pages:
        widths.append(table_width(widths[-1] + 1))
    return tuple(widths)


def decode_buckets(most: ShapeBucket, sizes: Sequence[int]) -> tuple[ShapeBucket, ...]:
    """Steps of one token per request, of these sizes, the largest first: it shapes the pool that all share.

    The tables of all groups grow with the same requests. A model that keeps nothing does not decode.
    """
    return tuple(
        ShapeBucket(size, size, size, pages, decode=True)
        for size in (reversed(sizes) if most.pages else ())
        for pages in _tables(most)
    )


def mixed_buckets(most: ShapeBucket, sizes: Sequence[int], drafts: bool = False) -> tuple[ShapeBucket, ...]:
    """Steps in which some request brings more than one token, of these sizes, the largest first. Fewer requests than
    tokens, so that none looks like a decode step; a row of outputs for each, or for each token if `drafts`, 512 at
    most then where there are fewer requests."""
    found = []
    for size in reversed([size for size in sizes if 1 < size <= most.tokens] if most.pages else ()):
        fullest = min(most.requests, size - 1)
        for requests in sorted({min(FEW, fullest), fullest}, reverse=True):
            rows = min(max(requests, min(size, MAX_ROWS)) if drafts else requests, most.rows)
            found += [ShapeBucket(size, requests, rows, pages) for pages in _tables(most)]
    return tuple(found)


def _tables(most: ShapeBucket) -> list[tuple[int, ...]]:
    """Columns of all groups' tables that bring every width of a captured one, and no more than there may be."""
    widths = table_widths(max(most.pages, default=0))
    return [tuple(min(width, pages) for pages in most.pages) for width in widths]
