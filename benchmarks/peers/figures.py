"""Summarizes measurements: rates, shares of the roofline, ratios of pairs, the table."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

GIGA = 1e9
OURS = "quintet"
BEFORE = "before"  # an older quintet

Result = Mapping[str, Any]  # what a worker answered


@dataclass(frozen=True)
class Run:
    """Prompts of one length, and the tokens that each is to give."""

    name: str
    requests: int
    prompt: int
    tokens: int

    @property
    def context(self) -> float:
        """Tokens that a decoded token looks back on, in the mean."""
        return self.prompt + self.tokens / 2


RUNS = (
    Run("decode-32", 1, 32, 33),
    Run("context-512", 1, 512, 33),
    Run("context-2048", 1, 2048, 33),
    Run("batch-16", 16, 128, 64),
)
# Of a second or so: a neighbour comes and goes within longer ones, and many pairs fit into a minute.
BRIEF = (Run("short-decode", 1, 32, 17), Run("short-prefill", 1, 256, 1), Run("short-batch", 16, 16, 9))
STARTUP = Run("startup", 1, 32, 1)  # in a fresh process


@dataclass(frozen=True)
class Figure:
    """A row of the table: one number of a run."""

    title: str
    run: str
    kind: str  # "decode" and "prefill" in tokens per second, "startup" in seconds, "memory" in GB

    @property
    def more_is_better(self) -> bool:
        return self.kind in ("decode", "prefill")

    def value(self, run: Run, result: Result) -> float:
        match self.kind:
            case "decode":
                return float(result["later_tokens"] / result["later_s"])
            case "prefill":
                return float(run.requests * run.prompt / result["first_s"])
            case "startup":
                return float(result["startup_s"])
            case "memory":
                return float(result["peak_rss_bytes"] / GIGA)
        raise ValueError(f"{self.kind!r} is no kind of figure")

    def ratio(self, ours: float, theirs: float) -> float:
        """Above 1 where ours is better."""
        return ours / theirs if self.more_is_better else theirs / ours


FIGURES = (
    Figure("decode, 32 tokens of context, tokens/s", "decode-32", "decode"),
    Figure("decode, 512 tokens of context, tokens/s", "context-512", "decode"),
    Figure("decode, 2,048 tokens of context, tokens/s", "context-2048", "decode"),
    Figure("prefill, 512 tokens, tokens/s", "context-512", "prefill"),
    Figure("prefill, 2,048 tokens, tokens/s", "context-2048", "prefill"),
    Figure("decode, 16 x (128 -> 64), tokens/s in all", "batch-16", "decode"),
    Figure("decode of 16 tokens, 32 tokens of context, tokens/s", "short-decode", "decode"),
    Figure("prefill, 256 tokens, tokens/s", "short-prefill", "prefill"),
    Figure("decode, 16 x (16 -> 9), tokens/s in all", "short-batch", "decode"),
    Figure("start-up to the first token, s", "startup", "startup"),
    Figure("peak memory up to the first token, GB", "startup", "memory"),
    Figure("peak memory of 16 x (128 -> 64), GB", "batch-16", "memory"),
)


@dataclass(frozen=True)
class Round:
    """Every setting measured once, in the order of `results`, after the bandwidth."""

    bits: str
    run: str
    read_gbs: float
    results: Mapping[str, Result]  # by a setting's label, such as "llama.cpp Q8_0"


@dataclass(frozen=True)
class Traffic:
    """Bytes that a decoded token has to read."""

    weights: int
    kv_per_token: int  # of context
    experts: float = 0.0  # share of the weights that are experts'
    chosen: float = 1.0  # share of the experts that a token meets

    def roofline(self, run: Run, read_gbs: float) -> float:
        """Tokens per second of all requests together, if memory were the only limit; each chooses its experts."""
        idle = self.experts * (1 - self.chosen) ** run.requests  # share of the weights that none asks for
        step = self.weights * (1 - idle) + run.requests * run.context * self.kv_per_token
        return run.requests * read_gbs * GIGA / step


def kv_token_bytes(config: Mapping[str, Any], element_bytes: int) -> int:
    """Keys and values of one token in all layers of attention, by config.json; a latent where attention keeps one."""
    if rank := config.get("kv_lora_rank"):
        return int(config["num_hidden_layers"] * (rank + config["qk_rope_head_dim"]) * element_bytes)
    if "num_key_value_heads" not in config:
        return 0
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    kinds = config.get("layer_types") or ["full_attention"] * config["num_hidden_layers"]
    layers = sum(kind.endswith("attention") and kind != "linear_attention" for kind in kinds)
    return int(2 * layers * config["num_key_value_heads"] * head_dim * element_bytes)


def chosen_share(config: Mapping[str, Any]) -> float:
    """Returns the share of the experts that a token is routed to; transformers 5 renamed the number of experts."""
    experts = config.get("num_experts") or config.get("num_local_experts")
    return float(config["num_experts_per_tok"] / experts) if experts else 1.0


FLOATS = f"{OURS} bf16"


def is_ours(label: str) -> bool:
    return label.split()[0] == OURS


@dataclass(frozen=True)
class Row:
    """One figure of all settings of the same bits."""

    figure: Figure
    run: Run
    rounds: Sequence[Round]

    def values(self, label: str) -> list[float]:
        return [self.figure.value(self.run, r.results[label]) for r in self.rounds if label in r.results]

    def labels(self) -> list[str]:
        """In order of their names' first appearance; every one has at least one value."""
        return list(dict.fromkeys(label for each in self.rounds for label in sorted(each.results)))

    def medians(self) -> dict[str, float]:
        return {label: statistics.median(self.values(label)) for label in self.labels()}

    def best_peer(self) -> str | None:
        peers = {label: median for label, median in self.medians().items() if not is_ours(label)}
        if not peers:
            return None
        return (max if self.figure.more_is_better else min)(peers, key=peers.__getitem__)

    def ratios(self, ours: str, peer: str) -> list[float]:
        """One for each round that has both."""
        both = [r.results for r in self.rounds if ours in r.results and peer in r.results]
        value = self.figure.value
        return [self.figure.ratio(value(self.run, r[ours]), value(self.run, r[peer])) for r in both]

    def share(self, label: str, traffic: Traffic) -> float | None:
        """The median share of the roofline; None for what memory does not bound."""
        if self.figure.kind != "decode":
            return None
        shares = [
            self.figure.value(self.run, r.results[label]) / traffic.roofline(self.run, r.read_gbs)
            for r in self.rounds
            if label in r.results
        ]
        return statistics.median(shares)


def rows(rounds: Sequence[Round], bits: str) -> Iterator[Row]:
    """The figures that were measured at those bits, in the table's order."""
    for figure in FIGURES:
        own = [each for each in rounds if each.bits == bits and each.run == figure.run and each.results]
        if own:
            yield Row(figure, next(run for run in (*RUNS, *BRIEF, STARTUP) if run.name == figure.run), own)


def summary(row: Row, traffic: Mapping[str, Traffic]) -> dict[str, Any]:
    """A row in numbers: medians, shares, and each of our settings' ratios to every peer."""
    labels = row.labels()
    ours = [x for x in labels if is_ours(x)]
    peers = [x for x in labels if not is_ours(x)] or [x for x in labels if x == FLOATS]
    pairs = {(mine, peer): row.ratios(mine, peer) for mine in ours for peer in peers}
    return {
        "figure": row.figure.title,
        "medians": row.medians(),
        "roofline_shares": {label: row.share(label, traffic[label]) for label in labels},
        "best_peer": row.best_peer(),
        "median_ratios": {f"{a} / {b}": statistics.median(found) for (a, b), found in pairs.items() if found},
    }


def table(rounds: Sequence[Round], bits: str, traffic: Mapping[str, Traffic]) -> str:
    """Markdown: a column for each setting, then for each of ours its ratio to the best peer (above 1: ours is better),
    or to itself before a change where that was measured, or without peers to ours in floats.

    A share in parentheses is of the roofline: the setting's own bytes of weights and context at the bandwidth measured
    in the same round. The range behind a ratio is that of its pairs.
    """
    found = list(rows(rounds, bits))
    labels = sorted({label for row in found for label in row.labels()}, key=lambda label: (not is_ours(label), label))
    ours = [label for label in labels if is_ours(label)]
    lines = [[bits, *labels, *(f"{label} / best peer" for label in ours)]]
    for row in found:
        cells = [_cell(row, label, traffic) for label in labels]
        lines.append([row.figure.title, *cells, *(_ratio(row, label) for label in ours)])
    return _markdown(lines)


def _cell(row: Row, label: str, traffic: Mapping[str, Traffic]) -> str:
    if label not in row.labels():
        return "-"
    share = row.share(label, traffic[label])
    return _number(row.medians()[label]) + ("" if share is None else f" ({share:.0%})")


def _ratio(row: Row, label: str) -> str:
    before = label.replace(OURS, BEFORE, 1)
    peer = before if before in row.labels() else row.best_peer() or FLOATS
    found = row.ratios(label, peer) if peer != label else []
    if not found:
        return "-"
    return f"{statistics.median(found):.2f} ({min(found):.2f}-{max(found):.2f}) of {peer}"


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _markdown(lines: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    padded = [[cell.ljust(width) for cell, width in zip(line, widths, strict=True)] for line in lines]
    padded.insert(1, ["-" * width for width in widths])
    return "\n".join("| " + " | ".join(line) + " |" for line in padded)
