"""The sizes that steps are padded to on a device that wants fixed shapes: planned once, compiled once each."""

from collections.abc import Sequence

from quintet.types import Bucket

LEAST = 16  # tokens of the smallest bucket: fewer would save nothing that a device with fixed shapes could use


def plan_buckets(most: Bucket) -> tuple[Bucket, ...]:
    """16, 32, 64, ... tokens up to the most, which comes last; the number of tokens settles the other sizes.

    A step of T tokens has at most T requests and T rows of logits, so one compilation per size serves prefill,
    decode and every mix of them. Rows of logits come in fewer sizes, 16, 64, 256, ...: all that sampling can do is
    compiled for each. The page table is as wide as the longest request: kernels read only as far as a request goes.
    """
    sizes, rows = _powers(2, most.tokens), _powers(4, most.rows)
    return tuple(
        Bucket(size, min(size, most.requests), next(r for r in rows if r >= min(size, most.rows)), most.pages)
        for size in sizes
    )


def _powers(step: int, most: int) -> list[int]:
    """LEAST, step times that, ... and the most itself last."""
    sizes = [LEAST]
    while sizes[-1] < most:
        sizes.append(min(sizes[-1] * step, most))
    return [*sizes[:-1], most]


def waste(buckets: Sequence[Bucket]) -> tuple[float, float]:
    """Share of a step's tokens that is padding: (on average over all sizes of step, at worst)."""
    padded = []
    first = 1
    for bucket in buckets:
        padded += [1 - tokens / bucket.tokens for tokens in range(first, bucket.tokens + 1)]
        first = bucket.tokens + 1
    return sum(padded) / len(padded), max(padded)


def describe(buckets: Sequence[Bucket]) -> str:
    """What is compiled, and what it costs in padding."""
    average, worst = waste(buckets)
    sizes = ", ".join(str(bucket.tokens) for bucket in buckets)
    last = buckets[-1]
    return (
        f"{len(buckets)} compilations, for steps of {sizes} tokens (at most {last.requests} requests, {last.rows} rows "
        f"of logits, {last.pages} pages each); padding {average:.0%} of a step on average, {worst:.0%} at worst"
    )
