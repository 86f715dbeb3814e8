"""Heads that draft a block in one step: the drafts are those of their authors' formulas, and no token changes."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention, silu
from transformers import LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from quintet import LLM, SamplingParams
from quintet.engine.spec_decode.draft_block import DraftBlockProposer
from tests.e2e.spec_decode.test_draft_heads import (
    CONFIG,
    DRAFT_VOCAB,
    HEADS,
    LAYERS,
    SETTINGS,
    VOCAB,
    WIDTH,
    Files,
    prompts,
    rms,
    spec,
    stats,
)  # fmt: skip

MASK, DIM, DEPTH, RANK = 95, WIDTH // HEADS, 2, 6
ROTARY = LlamaRotaryEmbedding(CONFIG)


def layer_shapes(name: str, reads: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{name}.self_attn.q_proj.weight": (WIDTH, reads),
        f"{name}.self_attn.k_proj.weight": (WIDTH // 2, reads),
        f"{name}.self_attn.v_proj.weight": (WIDTH // 2, reads),
        f"{name}.self_attn.o_proj.weight": (WIDTH, WIDTH),
        f"{name}.mlp.gate_proj.weight": (64, WIDTH),
        f"{name}.mlp.up_proj.weight": (64, WIDTH),
        f"{name}.mlp.down_proj.weight": (WIDTH, 64),
        f"{name}.input_layernorm.weight": (WIDTH,),
        f"{name}.post_attention_layernorm.weight": (WIDTH,),
    }


def head_tensors(kind: str) -> dict[str, Tensor]:
    torch.manual_seed(3)
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (WIDTH, 3 * WIDTH), "norm.weight": (WIDTH,)}
    for at in range(DEPTH):
        shapes |= layer_shapes(f"layers.{at}", 2 * WIDTH if kind == "peagle" and at == 0 else WIDTH)
    if kind == "peagle":
        shapes |= {"layers.0.hidden_norm.weight": (WIDTH,), "lm_head.weight": (DRAFT_VOCAB, WIDTH)}
        shapes |= {"embed_tokens.weight": (VOCAB, WIDTH), "mask_hidden": (1, 1, 3 * WIDTH)}
    else:
        shapes["hidden_norm.weight"] = (WIDTH,)
        shapes |= {f"layers.{at}.self_attn.{part}_norm.weight": (DIM,) for at in range(DEPTH) for part in "qk"}
    if kind.startswith("dspark"):
        shapes |= {"markov_head.markov_w1.weight": (VOCAB, RANK), "confidence_head.proj.weight": (1, WIDTH)}
        drawn = DRAFT_VOCAB if kind == "dspark" else VOCAB
        shapes |= {"markov_head.markov_w2.weight": (drawn, RANK)}
        shapes |= {"lm_head.weight": (DRAFT_VOCAB, WIDTH)} if kind == "dspark" else {}
    made = {name: torch.randn(shape) * 0.3 + (len(shape) == 1) for name, shape in shapes.items()}
    if kind in ("peagle", "dspark"):
        made["d2t"] = torch.randperm(VOCAB)[:DRAFT_VOCAB].sort().values - torch.arange(DRAFT_VOCAB)
    return made


def entries_of(kind: str) -> dict[str, Any]:
    """The head's config.json: of the speculators library, or as DFlash's authors write it."""
    layer = {**CONFIG.to_dict(), "num_hidden_layers": DEPTH}
    if kind == "peagle":
        own = {"draft_vocab_size": DRAFT_VOCAB, "eagle_aux_hidden_state_layer_ids": list(LAYERS)}
        return {"speculators_model_type": kind, "transformer_layer_config": layer, "mask_token_id": MASK, **own}
    layer |= {"model_type": "qwen3", "head_dim": DIM, "use_sliding_window": False}
    if kind in ("dflash", "dspark"):
        own = {"aux_hidden_state_layer_ids": list(LAYERS), "block_size": 4, "sample_from_anchor": False}
        own |= (
            {"markov_rank": RANK, "markov_head_type": "vanilla", "draft_vocab_size": DRAFT_VOCAB}
            if kind == "dspark"
            else {}
        )
        return {"speculators_model_type": kind, "transformer_layer_config": layer, "mask_token_id": MASK, **own}
    if kind == "dspark, its authors'":
        own = {"mask_token_id": MASK, "target_layer_ids": [at - 1 for at in LAYERS], "markov_rank": RANK}
        return {**layer, **own, "architectures": ["Qwen3DSparkModel"], "block_size": 4}
    own = {"mask_token_id": MASK, "target_layer_ids": [at - 1 for at in LAYERS]}
    return {**layer, "architectures": ["DFlashDraftModel"], "block_size": 4, "dflash_config": own}


def written(folder: Path, kind: str) -> Files:
    torch.manual_seed(0)
    model = LlamaForCausalLM(CONFIG).eval()
    for weight in model.parameters():
        weight.data = torch.randn_like(weight) * 0.25 + (weight.dim() == 1)
    model.save_pretrained(folder / "model")
    head, tensors = folder / "head", head_tensors(kind)
    head.mkdir()
    save_file(tensors, head / "model.safetensors")
    (head / "config.json").write_text(json.dumps(entries_of(kind)))
    return Files(folder / "model", head, model, tensors)


class Reference:
    """The formulas of speculators 0.9's P-EAGLE and DFlash over a whole text, without a cache."""

    def __init__(self, files: Files) -> None:
        self.files, self.t = files, files.tensors

    def drafts(self, ids: list[int], count: int) -> list[int]:
        """`count` tokens after these."""
        model, t = self.files.model, self.t
        with torch.inference_mode():
            out = model(torch.tensor([ids]), output_hidden_states=True)
            taps = torch.cat([out.hidden_states[at][0] for at in LAYERS], -1)[:-1]
            if "mask_hidden" in t:
                best = self.peagle(taps, ids, count).argmax(-1)
                return (best + t["d2t"][best]).tolist()
            if "markov_head.markov_w1.weight" in t:
                return self.dspark(taps, ids, count)
            found: list[int] = model.lm_head(self.dflash(taps, ids, count)).argmax(-1).tolist()
        return found

    def dspark(self, taps: Tensor, ids: list[int], count: int) -> list[int]:
        """A DFlash's block, of which the authors' draws at its first token, too; each token depends on the last one."""
        t, found = self.t, list[int]()
        anchored = "d2t" not in t  # as speculators writes them, a mask draws the token of its place
        states = self.dflash(taps, ids, count - anchored, count)
        for state in states:
            before = torch.tensor([*ids, *found][-1])
            head = t["lm_head.weight"] if "d2t" in t else self.files.model.lm_head.weight
            logits = state @ head.T + t["markov_head.markov_w1.weight"][before] @ t["markov_head.markov_w2.weight"].T
            best = int(logits.argmax())
            found.append(best + int(t["d2t"][best]) if "d2t" in t else best)
        return found

    def peagle(self, taps: Tensor, ids: list[int], count: int) -> Tensor:
        """Logits of a block: masks behind the pairs of a token and the hidden state before it."""
        t = self.t
        x = torch.cat([taps, t["mask_hidden"][0].expand(count - 1, -1)]) @ t["fc.weight"].T
        embeds = t["embed_tokens.weight"][torch.tensor([*ids[1:], *[MASK] * (count - 1)])]
        normed = rms(embeds, t["layers.0.input_layernorm.weight"]), rms(x, t["layers.0.hidden_norm.weight"])
        x = self.finish(0, x, self.attend(0, torch.cat(normed, -1), causal=True))
        for at in range(1, DEPTH):
            x = self.finish(at, x, self.attend(at, rms(x, t[f"layers.{at}.input_layernorm.weight"]), causal=True))
        return rms(x, t["norm.weight"])[-count:] @ t["lm_head.weight"].T

    def dflash(self, taps: Tensor, ids: list[int], count: int, last: int | None = None) -> Tensor:
        """Normalised hidden states of a block: the last token and masks, which see one another and what is before; of
        its last ones, by default of the masks."""
        t = self.t
        before = rms(taps @ t["fc.weight"].T, t["hidden_norm.weight"])
        x = self.files.model.model.embed_tokens(torch.tensor([ids[-1], *[MASK] * count]))
        for at in range(DEPTH):
            both = torch.cat([before, rms(x, t[f"layers.{at}.input_layernorm.weight"])])
            x = self.finish(at, x, self.attend(at, both, causal=False)[len(before) :])
        return rms(x, t["norm.weight"])[-(last or count) :]

    def attend(self, at: int, x: Tensor, causal: bool) -> Tensor:
        t, name, count = self.t, f"layers.{at}.self_attn", len(x)
        q, k, v = ((x @ t[f"{name}.{part}_proj.weight"].T).view(1, count, -1, DIM).transpose(1, 2) for part in "qkv")
        if f"{name}.q_norm.weight" in t:
            q, k = rms(q, t[f"{name}.q_norm.weight"]), rms(k, t[f"{name}.k_norm.weight"])
        q, k = apply_rotary_pos_emb(q, k, *ROTARY(x, torch.arange(count)[None]))
        k, v = (each.repeat_interleave(2, 1) for each in (k, v))
        out = scaled_dot_product_attention(q, k, v, is_causal=causal)
        return out.transpose(1, 2).reshape(count, WIDTH) @ t[f"{name}.o_proj.weight"].T

    def finish(self, at: int, x: Tensor, attended: Tensor) -> Tensor:
        t, name = self.t, f"layers.{at}"
        x = x + attended
        y = rms(x, t[f"{name}.post_attention_layernorm.weight"])
        gate, up = (y @ t[f"{name}.mlp.{part}.weight"].T for part in ("gate_proj", "up_proj"))
        return x + (silu(gate) * up) @ t[f"{name}.mlp.down_proj.weight"].T


@pytest.mark.parametrize("kind", ["peagle", "dflash", "dflash, its authors'", "dspark", "dspark, its authors'"])
def test_the_drafts_are_those_of_the_authors_formulas(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In steps of one request and of four, with prompts in chunks, and after drafts that were refused."""
    files = written(tmp_path, kind)
    wanted, proposed, steps = Reference(files), list[tuple[list[int], list[int]]](), list[int]()
    whole, run = DraftBlockProposer.propose, DraftBlockProposer._run_blocks

    def noted(self: DraftBlockProposer, room: Any) -> None:
        whole(self, room)
        proposed.extend((list(r.token_ids), list(r.draft_tokens)) for r, most in room if most)

    def counted(self: DraftBlockProposer, *given: Any) -> Any:
        steps.append(1)
        return run(self, *given)

    monkeypatch.setattr(DraftBlockProposer, "propose", noted)
    monkeypatch.setattr(DraftBlockProposer, "_run_blocks", counted)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False)
    with LLM(str(files.target), **SETTINGS, max_num_batched_tokens=40, **spec(files)) as llm:
        llm.generate(prompts(), params)
        llm._client.engine.check_integrity()  # type: ignore[attr-defined]
        assert len(steps) <= stats(llm).steps.num_steps, "one step of the head for each of the model's"
    assert sum(bool(drafts) for _, drafts in proposed) > 15
    for ids, drafts in proposed:
        assert not drafts or drafts == wanted.drafts(ids, len(drafts)), ids
    assert {len(drafts) for _, drafts in proposed} >= {1, 2, 3}


@pytest.mark.parametrize("kind", ["peagle", "dflash", "dspark"])
def test_the_tokens_are_those_without_it(tmp_path: Path, kind: str) -> None:
    """Greedy and sampled, with few pages, prefixes that are found, and chunks."""
    files = written(tmp_path, kind)
    settings = {**SETTINGS, "num_pages": 14, "max_num_batched_tokens": 24, "max_model_len": 128}
    with LLM(str(files.target), **settings) as theirs, LLM(str(files.target), **settings, **spec(files)) as ours:
        for how in ({"temperature": 0}, {"temperature": 0.8, "seed": 3}, {"temperature": 1, "top_k": 8, "seed": 4}):
            params = SamplingParams(max_tokens=30, ignore_eos=True, detokenize=False, **how)
            found = [[list(o.outputs[0].token_ids) for o in llm.generate(prompts(), params)] for llm in (ours, theirs)]
            assert found[0] == found[1], how
            ours._client.engine.check_integrity()  # type: ignore[attr-defined]
        assert stats(ours).spec_decode.num_draft_tokens > 0 and stats(ours).scheduler.num_preemptions > 0


@pytest.mark.parametrize("kind", ["peagle", "dflash"])
def test_two_ranks_propose_and_change_nothing(tmp_path: Path, kind: str) -> None:
    files = written(tmp_path, kind)
    settings = {**SETTINGS, "tensor_parallel_size": 2}
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False)
    with LLM(str(files.target), **settings) as theirs, LLM(str(files.target), **settings, **spec(files)) as ours:
        found = [[list(o.outputs[0].token_ids) for o in llm.generate(prompts(), params)] for llm in (ours, theirs)]
        assert found[0] == found[1] and stats(ours).spec_decode.num_draft_tokens > 0


def test_heads_that_compute_otherwise_are_refused(tmp_path: Path) -> None:
    files = written(tmp_path, "dflash, its authors'")
    entries = json.loads((files.head / "config.json").read_text())
    for change, why in (
        ({"dflash_config": {**entries["dflash_config"], "causal": True}}, "draft heads with causal are not supported"),
        ({"dflash_config": {"target_layer_ids": [0, 1, 3]}}, "mask_token_id is None, not a token below 96"),
        (
            {"architectures": ["DFlash2DraftModel"]},
            "draft heads of class 'DFlash2DraftModel' are not supported; use",
        ),
        ({"architectures": ["XPressDraftModel"]}, "draft heads of class 'XPressDraftModel' are not supported; use"),
        (
            {"speculators_model_type": "dspar"},
            "'dspar' is not supported; heads of type 'eagle3', 'peagle', 'dflash' and",
        ),
        ({"sample_from_anchor": True}, "draft heads with sample_from_anchor are not supported"),
    ):
        (files.head / "config.json").write_text(json.dumps(entries | change))
        with pytest.raises(ValueError, match=why):
            LLM(str(files.target), **SETTINGS, **spec(files))
