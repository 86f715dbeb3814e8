"""Small models with adapters (LoRA), of which several are in one batch, against models with merged weights."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from quintet.conformance.check import Trial, check, require
from quintet.conformance.harness.random_adapters import merged, random_adapter, with_extras
from quintet.conformance.harness.reference_model import Tiny
from quintet.conformance.harness.subject import Subject
from quintet.conformance.harness.traffic import logits_tolerance, plain_dtype
from quintet.conformance.harness.worker_runner import WorkerRunner, random_prompts
from quintet.conformance.sections.adapters import require_lora
from quintet.layers.lora import LoRAMatrices
from quintet.layers.lora_step import LoRASizes
from quintet_tools.checkpoints.tiny import FAMILIES, VOCAB, variant

SIZES = LoRASizes(max_loras=2, max_rank=8)
MODELS = ("llama", "gemma2")
# adapters of four requests in each turn: 1 and 2 in slots, 0: none. Then their lengths, and their tokens in each step
TURNS = ((1, 0, 2, 1), (2, 1, 0, 1), (0, 2, 1, 2))
LENGTHS = (21, 14, 9, 3)
STEPS = ((11, 9, 8, 2), (8, 4, 1, 1), (1, 1, 0, 0), (1, 0, 0, 0))
APART = 0.1  # of the logits' size: the least that adapters of such sizes change


@check("adapters.merged")
def merged_weights(subject: Subject) -> Iterator[Trial]:
    """Logits of several adapters and none in one batch, and once another adapter was written over one of them."""
    for family in MODELS[: 1 if subject.facts.static_shapes else None]:
        yield Trial(f"{family}: two adapters and none in a batch", partial(_merged, subject, family), ("lora",))


def _merged(subject: Subject, family: str) -> None:
    require_lora(subject)
    tiny, dtype = variant(family, next(iter(FAMILIES[family]))), plain_dtype(subject.facts)
    runner = subject.runner(tiny, dtype, lora=SIZES)
    first, second = random_adapter(tiny, 1, SIZES.max_rank), random_adapter(tiny, 2, 3, skipped="k_proj")
    _write(runner, 1, first)
    _write(runner, 2, second)
    references = {0: tiny, 1: merged(tiny, first), 2: merged(tiny, second)}
    probe = random_prompts(0, LENGTHS[:1], VOCAB)[0]
    plain, *others = (each.logits(probe) for each in references.values())
    changed = [float((each - plain).norm() / plain.norm()) for each in others]
    require(min(changed) > APART, "the adapters change too little to tell anything")
    for turn, slots in enumerate(TURNS):  # by the third, a step that is recorded is run again
        _compare(runner, dtype, [references[slot] for slot in slots], slots, f"turn {turn + 1}")
    third = random_adapter(tiny, 3, 5, skipped="mlp")
    _write(runner, 1, third)
    references[1] = merged(tiny, third)
    for slots in TURNS:
        what = "after another adapter was written over the first"
        _compare(runner, dtype, [references[slot] for slot in slots], slots, what)
    _compare(runner, dtype, [tiny] * len(LENGTHS), (0,) * len(LENGTHS), "without adapters")


@check("adapters.extras")
def magnitudes_biases_and_embeddings(subject: Subject) -> Iterator[Trial]:
    """Logits of an adapter that has more than A and B beside products, one that has not, and none, in one batch."""
    family = MODELS[0]
    yield Trial(f"{family}: magnitudes, biases and an embedding", partial(_extras, subject, family), ("lora",))


def _extras(subject: Subject, family: str) -> None:
    require_lora(subject)
    tiny, dtype = variant(family, next(iter(FAMILIES[family]))), plain_dtype(subject.facts)
    runner = subject.runner(tiny, dtype, lora=SIZES)
    first, second = (random_adapter(tiny, seed, rank) for seed, rank in ((1, SIZES.max_rank), (2, 3)))
    for adapters in ((with_extras(tiny, first, 4), second), (first, with_extras(tiny, second, 5))):
        for slot, adapter in enumerate(adapters, 1):
            _write(runner, slot, adapter)
        references = {0: tiny, 1: merged(tiny, adapters[0]), 2: merged(tiny, adapters[1])}
        for turn, slots in enumerate(TURNS):
            _compare(runner, dtype, [references[slot] for slot in slots], slots, f"turn {turn + 1}")


def _write(runner: WorkerRunner, slot: int, adapter: Mapping[str, LoRAMatrices]) -> None:
    assert runner.worker.lora is not None
    packed = runner.worker.lora.pack(adapter, runner.worker.main.checkpoint_reader())
    runner.worker.lora.write(runner.worker.platform, slot - 1, packed)
    runner.extras = runner.extras - {slot} | ({slot} if packed.has_extras else set())


def _compare(
    runner: WorkerRunner, dtype: torch.dtype, references: Sequence[Tiny], slots: Sequence[int], what: str
) -> None:
    ids = random_prompts(sum(slot * 3**place for place, slot in enumerate(slots)), LENGTHS, VOCAB)
    runner.adapters = dict(enumerate(slots))
    wants = [model.logits(each) for model, each in zip(references, ids, strict=True)]
    for key, (got, want) in enumerate(zip(_in_steps(runner, ids), wants, strict=True)):
        off = float((got - want).abs().max().nan_to_num(torch.inf))
        limit = 2 * logits_tolerance(dtype) * float(want.std())
        message = f"{what}, request {key}, adapter {slots[key]}: logits are off by {off:.3g}"
        require(off <= limit, f"{message}; {limit:.3g} is allowed")


def _in_steps(runner: WorkerRunner, ids: Sequence[Sequence[int]]) -> list[Tensor]:
    """The logits of every token of every request."""
    found: dict[int, list[Tensor]] = {key: [] for key in range(len(ids))}
    done = [0] * len(ids)
    for counts in STEPS:
        chunks = {key: ids[key][done[key] : done[key] + count] for key, count in enumerate(counts) if count}
        for key, logits in runner.step(chunks).items():
            found[key].append(logits)
            done[key] += len(logits)
    assert done == list(LENGTHS), "all tokens are computed"
    for key in found:
        runner.finish(key)
    return [torch.cat(rows) for rows in found.values()]
