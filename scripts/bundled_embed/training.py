"""The student learns the teacher's vectors, and which of a batch's texts the teacher finds alike."""

from __future__ import annotations

import copy
import itertools
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from transformers import BertModel, PreTrainedTokenizerFast

from .student import LONGEST, WIDTH, pooled
from .texts import SEED, Subject


@dataclass(frozen=True)
class Recipe:
    steps: int = 600
    subjects: int = 48  # in a batch
    rate: float = 5e-4
    warm: int = 100  # steps until the rate is reached
    averaged: float = 0.005  # share of the newest weights in the average
    near: float = 5.0  # how much the teacher's vectors count,
    alike: float = 0.5  # which texts it finds alike,
    own: float = 0.25  # and finding what is said of the same subject
    sharp: float = 0.05  # temperature of the latter two
    kept: int = 50  # steps between two unfinished models


PARTS = 3  # that a batch is run in, by length: padding costs time
BAG = Recipe(steps=1000, subjects=256, rate=0.02)
LAYERS = Recipe()


def principal(vectors: torch.Tensor) -> torch.Tensor:
    """[teacher's width, WIDTH - 1]: the directions that keep most of the dot products, the weightiest first."""
    moments = vectors.T.double() @ vectors.double()
    return torch.linalg.eigh(moments).eigenvectors.flip(-1)[:, : WIDTH - 1].float()


@dataclass(frozen=True)
class Batch:
    ids: Sequence[Sequence[int]]
    taught: torch.Tensor  # [texts]: whether the teacher has read it
    wanted: torch.Tensor  # [taught, WIDTH - 1]
    subject: torch.Tensor  # [texts]: the place of each text's subject


class Material:
    """Subjects as token ids and wanted vectors."""

    def __init__(
        self, subjects: Sequence[Subject], wanted: dict[str, torch.Tensor], tokenizer: PreTrainedTokenizerFast
    ) -> None:
        texts = sorted({text for each in subjects for text in each.texts})
        found = tokenizer(texts, truncation=True, max_length=LONGEST)["input_ids"]
        self.ids = dict(zip(texts, found, strict=True))
        self.subjects, self.wanted = subjects, wanted

    def batches(self, size: int) -> Iterator[Batch]:
        """Without end. Half of each are subjects that the teacher has read, half are others if there are any."""
        rng = random.Random(SEED)
        read = [each for each in self.subjects if set(each.texts) <= self.wanted.keys()]
        rest = [each for each in self.subjects if not set(each.texts) <= self.wanted.keys()]
        half = size // 2 if len(rest) >= size else size
        more = _again(rest, size - half, rng) if half < size else itertools.repeat(())
        for some, others in zip(_again(read, half, rng), more, strict=False):
            said = [(text, place) for place, each in enumerate([*some, *others]) for text in each.texts]
            said.sort(key=lambda each: len(self.ids[each[0]]))
            taught = torch.tensor([text in self.wanted for text, _ in said])
            wanted = torch.stack([self.wanted[text] for text, _ in said if text in self.wanted])
            places = torch.tensor([place for _, place in said])
            yield Batch([self.ids[text] for text, _ in said], taught, wanted, places)


def _again(subjects: Sequence[Subject], size: int, rng: random.Random) -> Iterator[Sequence[Subject]]:
    """All of them in a new order, over and over. ValueError where they do not fill a batch."""
    if len(subjects) < size:
        raise ValueError(f"{len(subjects)} subjects do not fill a batch of {size}; raise --most and --taught")
    while True:
        order = rng.sample(subjects, len(subjects))
        yield from (order[begin : begin + size] for begin in range(0, len(order) - size + 1, size))


def layered(model: BertModel, ids: Sequence[Sequence[int]], rng: random.Random) -> torch.Tensor:
    """Texts begin at any place now and then, so that places that only long texts reach are learned, too."""
    found = []
    size = math.ceil(len(ids) / PARTS)
    for begin in range(0, len(ids), size):
        some = ids[begin : begin + size]
        longest = max(map(len, some))
        mask = torch.tensor([[1] * len(each) + [0] * (longest - len(each)) for each in some])
        padded = torch.tensor([[*each, *[0] * (longest - len(each))] for each in some])
        first = rng.randrange(LONGEST - longest + 1) if rng.random() < 0.25 else 0
        found.append(pooled(model, padded, mask, first))
    return torch.cat(found)


def loss_of(made: torch.Tensor, batch: Batch, recipe: Recipe) -> tuple[torch.Tensor, float]:
    """The loss, and the mean cosine between what was made and what is wanted."""
    taught = made[batch.taught]
    cosine = (taught[:, : WIDTH - 1] * batch.wanted).sum(-1).mean()
    theirs = _likeness(batch.wanted, recipe.sharp).softmax(-1)
    alike = torch.nn.functional.kl_div(_likeness(taught, recipe.sharp).log_softmax(-1), theirs, reduction="batchmean")
    same = (batch.subject.unsqueeze(0) == batch.subject.unsqueeze(1)).fill_diagonal_(False)
    found = (_likeness(made, recipe.sharp).log_softmax(-1) * same).sum(-1)[same.any(-1)]
    own = -(found / same.sum(-1)[same.any(-1)]).mean()
    loss = recipe.near * (1 - cosine) + recipe.alike * alike + recipe.own * own
    return loss, float(cosine.detach())


def _likeness(vectors: torch.Tensor, sharp: float) -> torch.Tensor:
    """[texts, texts]: of each to the others; none to itself."""
    return (vectors @ vectors.T / sharp).masked_fill(torch.eye(len(vectors), dtype=torch.bool), -1e4)


class Average:
    """The mean of the weights over the last hundreds of steps: what a falling rate would end with, at any time."""

    def __init__(self, model: torch.nn.Module, share: float) -> None:
        self.model, self.share = copy.deepcopy(model).eval(), share

    @torch.no_grad()
    def add(self, model: torch.nn.Module, step: int) -> None:
        share = max(self.share, 1 / (step + 1))
        for ours, theirs in zip(self.model.parameters(), model.parameters(), strict=True):
            ours.lerp_(theirs, share)


Run = Callable[[torch.nn.Module, Sequence[Sequence[int]], random.Random], torch.Tensor]


def train(
    model: torch.nn.Module,
    run: Run,
    material: Material,
    recipe: Recipe,
    keep: Callable[[BertModel], None] | None = None,
) -> torch.nn.Module:
    """The averaged model. `run` makes vectors of token ids."""
    decayed = [each for each in model.parameters() if each.ndim > 1]
    rest = [each for each in model.parameters() if each.ndim < 2]
    groups = [{"params": decayed, "weight_decay": 0.01}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=recipe.rate, betas=(0.9, 0.98), fused=True)
    rng, started, seen, average = random.Random(SEED), time.perf_counter(), 0.0, Average(model, recipe.averaged)
    for step, batch in zip(range(recipe.steps), material.batches(recipe.subjects), strict=False):
        for group in optimizer.param_groups:
            group["lr"] = recipe.rate * min(1.0, (step + 1) / recipe.warm)
        loss, cosine = loss_of(run(model, batch.ids, rng), batch, recipe)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        average.add(model, step)
        seen = cosine if step == 0 else 0.98 * seen + 0.02 * cosine
        if step % 20 == 0:
            print(
                f"{step}: cosine {seen:.4f}, loss {loss.item():.3f}, {time.perf_counter() - started:.0f} s", flush=True
            )
        if keep is not None and step % recipe.kept == recipe.kept - 1:
            keep(average.model)
    return average.model
