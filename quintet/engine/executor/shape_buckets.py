"""The sizes that steps are padded to: planned once where a device wants fixed shapes, compiled once each."""

from collections.abc import Sequence

from quintet.interface.types import ShapeBucket

MIN_TOKENS = 16  # tokens of the smallest variant: fewer would save nothing that a device with fixed shapes could use


def plan_buckets(most: ShapeBucket) -> tuple[ShapeBucket, ...]:
    """16, 32, 64, ... tokens up to the most, which comes last; the number of tokens settles the other sizes.

    A step of T tokens has at most T requests and T rows of outputs, so one compilation per size serves prefill,
    decode and every mix of them. Rows of outputs come in fewer sizes, 16, 64, 256, ...: all that sampling can do is
    compiled for each. Tables are as wide as the longest request: kernels read only as far as a request goes.
    """
    sizes, rows = _powers(2, most.tokens), _powers(4, most.rows)
    return tuple(
        most._replace(
            tokens=size,
            requests=min(size, most.requests),
            rows=next(r for r in rows if r >= min(size, most.rows)),
        )
        for size in sizes
    )


def _powers(step: int, most: int) -> list[int]:
    """MIN_TOKENS, step times that, ... and the most itself last."""
    sizes = [MIN_TOKENS]
    while sizes[-1] < most:
        sizes.append(min(sizes[-1] * step, most))
    return [*sizes[:-1], most]


def padding_waste(buckets: Sequence[ShapeBucket]) -> tuple[float, float]:
    """Share of a step's tokens that is padding: (on average over all sizes of step, at worst)."""
    padded = []
    first = 1
    for bucket in buckets:
        padded += [1 - tokens / bucket.tokens for tokens in range(first, bucket.tokens + 1)]
        first = bucket.tokens + 1
    return sum(padded) / len(padded), max(padded)


def describe(buckets: Sequence[ShapeBucket]) -> str:
    """Describes what is compiled, and what it costs in padding."""
    plain = [bucket for bucket in buckets if bucket.inputs == buckets[0].inputs]  # the others have their sizes
    average, worst = padding_waste(plain)
    sizes, last = ", ".join(str(bucket.tokens) for bucket in plain), plain[-1]
    pages = " + ".join(map(str, last.pages)) or "no"
    return (
        f"{len(buckets)} compilations, for steps of {sizes} tokens (at most {last.requests} requests, {last.rows} "
        f"rows of logits, {pages} pages each); padding {average:.0%} of a step on average, {worst:.0%} at worst"
    )
