"""The training loop: micro-batches of like length on two replicas, Muon for matrices, AdamW for the rest."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from .circuit import initialise
from .samples import draw_sample, first_sample, hard_sample, render, source


@dataclass(frozen=True)
class Recipe:
    """What decides the weights. The learning rates are peaks: a linear warm-up leads there, a linear decay away."""

    steps: int = 1100
    seed: int = 5
    micro_tokens: int = 1152  # per micro-batch; each replica takes one of them in each step
    replicas: int = 2
    early: float = 0.08  # the part of training that sees short samples only
    hard: float = 0.0  # the part of the later samples that is drawn from what is hard
    max_tokens: int = 640  # longer samples are dropped
    warmup: int = 60
    matrix_lr: float = 0.02
    other_lr: float = 1.5e-3
    weight_decay: float = 0.02


# What a cycle leaves inexact, another warm-up and decay over fresh samples makes exact; the third sees more of it.
CYCLES = (
    Recipe(),
    Recipe(steps=1400, seed=6, early=0.0, matrix_lr=0.014, other_lr=1e-3),
    Recipe(steps=600, seed=7, early=0.0, hard=0.65, warmup=30, matrix_lr=0.012, other_lr=1e-3),
)


@dataclass(frozen=True)
class MicroBatch:
    input_ids: torch.Tensor  # [B, T]
    labels: torch.Tensor  # [B, T], already shifted; -100 where nothing is learnt


Loss = Callable[[nn.Module, MicroBatch], torch.Tensor]


def model_config(tokenizer: PreTrainedTokenizerFast) -> LlamaConfig:
    ids = tokenizer.convert_tokens_to_ids
    return LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=256,
        intermediate_size=640,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        rope_theta=10000.0,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=ids("<s>"),
        eos_token_id=[ids("</s>"), ids("<|end|>")],
        pad_token_id=ids("<pad>"),
        initializer_range=0.03,
    )


def encode(text: str, spans: list[tuple[int, int]], tokenizer: PreTrainedTokenizerFast) -> tuple[list[int], list[int]]:
    """(input ids, labels shifted by one): a token is learnt when it starts inside a span."""
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    labels, place = [], iter([*spans, (len(text) + 1, len(text) + 1)])
    low, high = next(place)
    for token, (start, _) in zip(encoded["input_ids"], encoded["offset_mapping"], strict=True):
        while start >= high:
            low, high = next(place)
        labels.append(token if start >= low else -100)
    return encoded["input_ids"][:-1], labels[1:]


def collate(rows: list[tuple[list[int], list[int]]], pad: int) -> MicroBatch:
    """Pads on the right; attention is causal, so the padding needs no mask."""
    width = max(len(ids) for ids, _ in rows)
    ids = torch.tensor([ids + [pad] * (width - len(ids)) for ids, _ in rows])
    labels = torch.tensor([labels + [-100] * (width - len(labels)) for _, labels in rows])
    return MicroBatch(ids, labels)


def micro_batches(tokenizer: PreTrainedTokenizerFast, recipe: Recipe) -> Iterator[MicroBatch]:
    """Endless: pools of samples, sorted by length with some noise, cut at `micro_tokens`, shuffled."""
    s, served, early = source(recipe.seed), 0, recipe.early * recipe.steps * recipe.replicas
    while True:
        draw = first_sample if served < early else draw_sample
        draws = (hard_sample if recipe.hard and s.rng.random() < recipe.hard else draw for _ in range(1500))
        pool = [encode(*render(each(s), tokenizer), tokenizer) for each in draws]
        pool = [row for row in pool if len(row[0]) <= recipe.max_tokens]
        pool.sort(key=lambda row: len(row[0]) * s.rng.uniform(0.9, 1.1))
        batches, rows, width = [], [], 0
        for row in pool:
            width = max(width, len(row[0]))
            if rows and width * (len(rows) + 1) > recipe.micro_tokens:
                batches.append(rows)
                rows, width = [], len(row[0])
            rows.append(row)
        served += len(batches)
        s.rng.shuffle(batches)  # the last, unfinished batch of a pool is dropped
        yield from (collate(rows, tokenizer.pad_token_id) for rows in batches)


def orthogonal(update: torch.Tensor) -> torch.Tensor:
    """Newton-Schulz towards the nearest semi-orthogonal matrix; [N, R, C] with R <= C (Jordan et al., Muon)."""
    x = update / (update.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x


class Muon(torch.optim.Optimizer):
    """Momentum whose update is orthogonalised; a group is handled as one stack, so its matrices are of one shape."""

    def __init__(self, groups: list[list[torch.Tensor]], lr: float, weight_decay: float, momentum: float = 0.95):
        settings = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum}
        super().__init__([{"params": params} for params in groups], settings)

    @torch.no_grad()
    def step(self):
        list(map(self.update, self.param_groups))

    @torch.no_grad()
    def update(self, group: dict) -> None:
        params = group["params"]
        grads = torch.stack([p.grad for p in params])
        state = self.state[params[0]]
        if not state:
            state["momentum"] = torch.zeros_like(grads)
        state["momentum"].lerp_(grads, 1 - group["momentum"])
        update = grads.lerp(state["momentum"], group["momentum"])
        rows, columns = update.shape[-2:]
        update = orthogonal(update.mT).mT if rows > columns else orthogonal(update)
        scale = group["lr"] * max(1.0, rows / columns) ** 0.5
        for p, u in zip(params, update, strict=True):
            p.mul_(1 - group["lr"] * group["weight_decay"]).add_(u, alpha=-scale)


def optimizers(model: nn.Module, recipe: Recipe) -> tuple[Muon, torch.optim.AdamW]:
    shapes: dict[torch.Size, list[torch.Tensor]] = {}
    others = []
    for name, p in model.named_parameters():
        if p.ndim == 2 and "embed" not in name:
            shapes.setdefault(p.shape, []).append(p)
        else:
            others.append(p)
    return (
        Muon(list(shapes.values()), lr=recipe.matrix_lr, weight_decay=recipe.weight_decay),
        # A large eps: else the tiny gradients of tokens that do not occur become full steps, all in one direction.
        torch.optim.AdamW(others, lr=recipe.other_lr, betas=(0.9, 0.98), eps=1e-4, weight_decay=0.0, fused=True),
    )


def rate(step: int, recipe: Recipe) -> float:
    """Linear warm-up, flat, then linear to zero over the last two thirds, where exactness comes from."""
    left = (recipe.steps - step) / (0.65 * recipe.steps)
    return min(1.0, (step + 1) / recipe.warmup, left)


def next_token_loss(model: LlamaForCausalLM, batch: MicroBatch) -> torch.Tensor:
    """Mean cross-entropy; only the positions that are learnt pay for the vocabulary's logits."""
    hidden = model.model(input_ids=batch.input_ids, use_cache=False).last_hidden_state
    learnt = batch.labels != -100
    return F.cross_entropy(model.lm_head(hidden[learnt]).float(), batch.labels[learnt])


class Replicas:
    """Copies of one model that share its weights; each works on its own micro-batch in a thread of its own.

    One thread per replica meets the others once a step, where threads inside each operation would meet at each one.
    """

    def __init__(self, model: nn.Module, count: int, loss: Loss):
        self.loss, self.models = loss, [model, *(copy.deepcopy(model) for _ in range(count - 1))]
        for other in self.models[1:]:
            for mine, shared in zip(other.parameters(), model.parameters(), strict=True):
                mine.data = shared.data
        self.pool = ThreadPoolExecutor(count, initializer=torch.set_num_threads, initargs=(1,))

    def backward(self, batches: list[MicroBatch]) -> float:
        """Leaves the mean gradient in the first model; returns the mean loss."""
        losses = list(self.pool.map(self.run, self.models, batches))
        first, *rest = ([p.grad for p in model.parameters()] for model in self.models)
        for grads in rest:
            torch._foreach_add_(first, grads)
        torch._foreach_div_(first, float(len(self.models)))
        return sum(losses) / len(losses)

    def run(self, model: nn.Module, batch: MicroBatch) -> float:
        model.zero_grad()
        loss = self.loss(model, batch)
        loss.backward()
        return loss.item()


def train(
    tokenizer: PreTrainedTokenizerFast,
    recipe: Recipe,
    start: nn.Module | None = None,
    checkpoint: Callable[[nn.Module], None] | None = None,
    every: int = 100,
    loss_of: Loss = next_token_loss,
) -> nn.Module:
    """One cycle, from `start` or from a new chat model."""
    torch.manual_seed(recipe.seed)
    torch.set_num_threads(1)
    if start is None:
        start = LlamaForCausalLM(model_config(tokenizer))
        initialise(start)
    model = start.train()
    replicas, batches = Replicas(model, recipe.replicas, loss_of), micro_batches(tokenizer, recipe)
    muon, adam = optimizers(model, recipe)
    average, began = 0.0, time.time()
    for step in range(recipe.steps):
        for group in muon.param_groups:
            group["lr"] = recipe.matrix_lr * rate(step, recipe)
        adam.param_groups[0]["lr"] = recipe.other_lr * rate(step, recipe)
        loss = replicas.backward([next(batches) for _ in range(recipe.replicas)])
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        list(replicas.pool.map(muon.update, muon.param_groups))
        adam.step()
        average = 0.95 * average + 0.05 * loss if step else loss
        if step % 20 == 19:
            print(f"step {step + 1}/{recipe.steps}  loss {average:.4f}  {time.time() - began:.0f} s", flush=True)
        if checkpoint and step % every == every - 1:
            checkpoint(model)
    return model.eval()
