"""The training loop: first the tower alone, by what lies under its patches, and then talks about pictures."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

import numpy as np
import torch
import torch.nn.functional as F
from bundled.tokenizer import CONTROL, Form, build
from bundled.training import Muon, encode, rate
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from transformers import (
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    PreTrainedTokenizerFast,
    SiglipVisionConfig,
)

from . import talks
from .pictures import COLOURS, SHAPES, SIDE, Picture, draw

PATCH = 12  # pixels of a side
GRID = SIDE // PATCH
IMAGE = "<image>"
FORM = Form(
    vocab_size=640, pieces=r" ?\p{L}+|\d| ?[^\s\p{L}\d]+|\s+", control=(*CONTROL, IMAGE),
    template=Path(__file__).with_name("chat_template.jinja"),
)  # fmt: skip
SHARPNESS = 0.5  # of the first attention to neighbours
KINDS = (*SHAPES, *map(str, range(10)))  # 0 is nothing, for kinds and colours under a patch
TINTS = tuple(COLOURS)


@dataclass(frozen=True)
class Recipe:
    """Decides the weights, with the threads and the versions of libraries."""

    steps: int = 1800
    tower_steps: int = 1100  # of these, in which the tower learns alone
    easy_steps: int = 300  # of these, with one large thing in each picture
    batch: int = 40  # conversations of a step; of pictures alone, twice as many
    turns: int = 6
    seed: int = 11
    warmup: int = 40
    matrix_lr: float = 0.02
    other_lr: float = 2e-3
    weight_decay: float = 0.02
    patches: float = 0.3  # weight of the loss of patches beside that of answers


# a second warm-up and decay over fresh pictures makes exact what the first leaves inexact
CYCLES = (
    Recipe(),
    Recipe(steps=600, tower_steps=0, easy_steps=0, seed=12, patches=0.0, matrix_lr=0.012, other_lr=1e-3),
)


@dataclass(frozen=True)
class Batch:
    """Pictures and conversations about them."""

    pixels: Tensor  # [pictures, 3, SIDE, SIDE], from -1 to 1
    kinds: Tensor  # [pictures, GRID * GRID]: 0 for nothing, or 1 + the place in KINDS
    tints: Tensor  # the same of TINTS
    input_ids: Tensor  # [conversations, T]
    labels: Tensor  # [conversations, T], already shifted; -100 where nothing is learned


def build_tokenizer(seed: int) -> PreTrainedTokenizerFast:
    """Returns a tokenizer of the questions and answers."""
    rng = Random(seed)
    texts = [*talks.OTHER, *talks.SYSTEMS, talks.UNKNOWN, talks.NO_PICTURE, *TINTS, *SHAPES] * 3
    for _ in range(600):
        picture = draw(rng)
        texts += [text for _ in range(12) for text in (talks.turn(picture, rng).question, talks.described(picture))]
    return build(texts, FORM)


def model_config(tokenizer: PreTrainedTokenizerFast) -> LlavaConfig:
    ids = tokenizer.convert_tokens_to_ids
    text = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=128, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=1024, rms_norm_eps=1e-5, rope_theta=10000.0,
        tie_word_embeddings=True, bos_token_id=ids("<s>"), eos_token_id=[ids("</s>"), ids("<|end|>")],
        pad_token_id=ids("<pad>"), initializer_range=0.03,
    )  # fmt: skip
    vision = SiglipVisionConfig(
        hidden_size=128, intermediate_size=384, num_hidden_layers=4, num_attention_heads=4, image_size=SIDE,
        patch_size=PATCH, vision_use_head=False,
    )  # fmt: skip
    return LlavaConfig(
        vision_config=vision, text_config=text, image_token_index=ids(IMAGE), image_seq_length=GRID**2,
        vision_feature_layer=-1, vision_feature_select_strategy="full", tie_word_embeddings=True,
    )  # fmt: skip


def pixels_of(picture: Picture) -> np.ndarray:
    """Returns [3, SIDE, SIDE] bytes."""
    return np.asarray(picture.seen()).transpose(2, 0, 1)


def as_input(pixels: Tensor) -> Tensor:
    return pixels.float() / 127.5 - 1


def patches_of(picture: Picture) -> np.ndarray:
    """Returns [2, GRID * GRID]: the kind and the colour of the thing in whose box a patch's middle lies."""
    found = np.zeros((2, GRID, GRID), dtype=np.int64)
    for thing in picture.things:
        half_x, half_y = max(thing.width, 1 / GRID) / 2, max(thing.height, 1 / GRID) / 2
        columns = [i for i in range(GRID) if abs((i + 0.5) / GRID - thing.x) <= half_x]
        rows = [i for i in range(GRID) if abs((i + 0.5) / GRID - thing.y) <= half_y]
        found[0][np.ix_(rows, columns)] = 1 + KINDS.index(thing.kind)
        found[1][np.ix_(rows, columns)] = 1 + TINTS.index(thing.colour)
    return found.reshape(2, -1)


@dataclass(frozen=True)
class Drawn(Dataset):
    """Batches by number: the same ones whichever process draws them."""

    tokenizer: PreTrainedTokenizerFast
    recipe: Recipe

    def __len__(self) -> int:
        return self.recipe.steps

    def __getitem__(self, step: int) -> Batch:
        recipe, rng = self.recipe, Random(f"{self.recipe.seed} {step}")
        if step < recipe.tower_steps:
            pictures, rows = [draw(rng, easy=step < recipe.easy_steps) for _ in range(2 * recipe.batch)], []
        else:
            talked = [self._talk(rng) for _ in range(recipe.batch)]
            pictures = [picture for found, _ in talked for picture in found]
            rows = [row for _, row in talked]
        width = max((len(ids) for ids, _ in rows), default=0)
        pad = self.tokenizer.pad_token_id
        marks = torch.from_numpy(np.stack([patches_of(picture) for picture in pictures]))
        return Batch(
            torch.from_numpy(np.stack([pixels_of(picture) for picture in pictures])), marks[:, 0], marks[:, 1],
            torch.tensor([ids + [pad] * (width - len(ids)) for ids, _ in rows]),
            torch.tensor([labels + [-100] * (width - len(labels)) for _, labels in rows]),
        )  # fmt: skip

    def _talk(self, rng: Random) -> tuple[list[Picture], tuple[list[int], list[int]]]:
        """Returns pictures and a conversation about them, as tokens and labels."""
        count = rng.choices((0, 1, 2), (4, 88, 8))[0]
        pictures = [draw(rng) for _ in range(count)]
        messages = talks.talk(pictures, rng, self.recipe.turns if count else 2)
        return pictures, encode(*render(messages, self.tokenizer), self.tokenizer)


def render(messages: list[dict[str, object]], tokenizer: PreTrainedTokenizerFast) -> tuple[str, list[tuple[int, int]]]:
    """Returns the text of a conversation, with as many marks as a picture has patches, and the spans of its answers."""
    text, spans = tokenizer.apply_chat_template(messages, tokenize=False).replace(IMAGE, IMAGE * GRID**2), []
    start = "<|assistant|>"
    at = text.find(start)
    while at >= 0:
        end = text.index("<|end|>", at) + len("<|end|>")
        spans.append((at + len(start), end))
        at = text.find(start, end)
    return text, spans


NEAR = (
    ((0, 1), (0, -1), (1, 0), (-1, 0)),
    ((1, 1), (1, -1), (-1, 1), (-1, -1)),
    ((0, 2), (0, -2), (2, 0), (-2, 0)),
)
"""Rows and columns between a patch and the one that it attends to at the start, for each head of the first layers."""


@torch.no_grad()
def look_near(model: LlavaForConditionalGeneration) -> None:
    """Makes heads of the first layers attend to neighbouring patches at the start, as a convolution does, from which
    a tower learns shapes in fewer pictures."""
    tower = model.model.vision_tower
    width = model.config.vision_config.hidden_size // model.config.vision_config.num_attention_heads
    rates = torch.pi / GRID * torch.arange(1, width // 4 + 1)

    def code(at: Tensor) -> Tensor:
        angles = at[:, None] * rates
        return torch.cat([angles.cos(), angles.sin()], -1)

    places = torch.arange(GRID**2)
    codes = torch.cat([code(places // GRID), code(places % GRID)], -1)
    tower.embeddings.position_embedding.weight[:, :width] = codes
    for layer, offsets in zip(tower.encoder.layers, NEAR, strict=False):
        attention = layer.self_attn
        for head, offset in enumerate(offsets):
            own = slice(head * width, (head + 1) * width)
            for weight in (attention.q_proj.weight, attention.k_proj.weight):
                weight[own] *= 0.1
                weight[own, :width] = 0.0
            attention.k_proj.weight[own, :width] = SHARPNESS * torch.eye(width)
            attention.q_proj.weight[own, :width] = SHARPNESS * torch.block_diag(*(turn(rates * by) for by in offset))


def turn(angles: Tensor) -> Tensor:
    """Returns [2F, 2F]: what adds the angles to a code of F cosines and F sines."""
    cos, sin = angles.cos().diag(), angles.sin().diag()
    return torch.cat([torch.cat([cos, -sin], 1), torch.cat([sin, cos], 1)])


class Seer(nn.Module):
    """The model, and two heads that read a patch's kind and colour while it is trained."""

    def __init__(self, model: LlavaForConditionalGeneration) -> None:
        super().__init__()
        self.model = model
        width = model.config.vision_config.hidden_size
        self.kinds, self.tints = nn.Linear(width, 1 + len(KINDS)), nn.Linear(width, 1 + len(TINTS))

    def losses(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Returns the losses of patches and of answers; that of answers is 0 without conversations."""
        whole = self.model.model
        tower = whole.vision_tower(as_input(batch.pixels), output_hidden_states=True).hidden_states[-1]
        patches = _loss(self.kinds(tower), batch.kinds) + _loss(self.tints(tower), batch.tints)
        if not batch.input_ids.numel():
            return patches, torch.zeros(())
        embeds = whole.get_input_embeddings()(batch.input_ids)
        places = batch.input_ids == self.model.config.image_token_id
        rows = whole.multi_modal_projector(tower).flatten(0, 1)
        embeds = embeds.masked_scatter(places[..., None], rows)
        hidden = whole.language_model(inputs_embeds=embeds, use_cache=False).last_hidden_state
        learned = batch.labels != -100
        return patches, F.cross_entropy(self.model.lm_head(hidden[learned]), batch.labels[learned])


def _loss(logits: Tensor, wanted: Tensor) -> Tensor:
    """Returns the cross-entropy of patches; those with nothing under them count less."""
    losses = F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction="none")
    weights = 0.15 + 0.85 * (wanted.flatten() > 0).float()
    return (losses * weights).sum() / weights.sum()


def _optimizers(seer: Seer, recipe: Recipe) -> tuple[Muon, torch.optim.AdamW]:
    shapes: dict[torch.Size, list[Tensor]] = {}
    others = []
    for name, parameter in seer.named_parameters():
        if parameter.ndim == 2 and "embed" not in name:
            shapes.setdefault(parameter.shape, []).append(parameter)
        else:
            others.append(parameter)
    muon = Muon(list(shapes.values()), lr=recipe.matrix_lr, weight_decay=recipe.weight_decay)
    return muon, torch.optim.AdamW(others, lr=recipe.other_lr, betas=(0.9, 0.98), weight_decay=0.0, fused=True)


def batches(tokenizer: PreTrainedTokenizerFast, recipe: Recipe) -> Iterator[Batch]:
    """Yields the batches of all steps; another process draws them."""
    return iter(DataLoader(Drawn(tokenizer, recipe), batch_size=None, num_workers=1, prefetch_factor=8))


def train(
    tokenizer: PreTrainedTokenizerFast,
    recipe: Recipe,
    start: LlavaForConditionalGeneration | None = None,
    checkpoint: Callable[[LlavaForConditionalGeneration], None] | None = None,
) -> LlavaForConditionalGeneration:
    """Trains a new model, or goes on with `start`."""
    torch.manual_seed(recipe.seed)
    if start is None:
        start = LlavaForConditionalGeneration(model_config(tokenizer))
        look_near(start)
    seer = Seer(start).train()
    muon, adam = _optimizers(seer, recipe)
    seen, said, began = 0.0, 0.0, time.time()
    for step, batch in enumerate(batches(tokenizer, recipe)):
        for group in muon.param_groups:
            group["lr"] = recipe.matrix_lr * rate(step, recipe)
        adam.param_groups[0]["lr"] = recipe.other_lr * rate(step, recipe)
        patches, answers = seer.losses(batch)
        seer.zero_grad(set_to_none=False)
        (patches if not answers.requires_grad else answers + recipe.patches * patches).backward()
        for parameter in seer.parameters():  # what a step does not use has a gradient of zeros, too
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        nn.utils.clip_grad_norm_(seer.parameters(), 1.0)
        muon.step()
        adam.step()
        seen, said = 0.95 * seen + 0.05 * patches.item(), 0.95 * said + 0.05 * answers.item()
        if step % 20 == 19:
            print(f"step {step + 1}/{recipe.steps}  patches {seen:.4f}  answers {said:.4f}  "
                  f"{time.time() - began:.0f} s", flush=True)  # fmt: skip
        if checkpoint and step % 200 == 199:
            checkpoint(seer.model)
    return seer.model.eval()
