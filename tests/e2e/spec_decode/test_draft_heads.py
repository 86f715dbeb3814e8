"""EAGLE heads beside a small random Llama: the drafts are those of the papers' formulas, and no token changes."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from quintet import LLM, SamplingParams
from quintet.engine.observability.stats import Stats
from quintet.engine.spec_decode.draft_head import DraftHeadProposer

VOCAB, WIDTH, HEADS, DRAFT_VOCAB = 96, 32, 4, 40
LAYERS = (1, 2, 4)
CONFIG = LlamaConfig(
    vocab_size=VOCAB,
    hidden_size=WIDTH,
    intermediate_size=64,
    num_hidden_layers=5,
    num_attention_heads=HEADS,
    num_key_value_heads=2,
    max_position_embeddings=256,
    tie_word_embeddings=False,
)
SETTINGS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "skip_tokenizer_init": True,
    "num_pages": 60,
    "use_tqdm": False,
}


class Files(NamedTuple):
    """A model, and a head for it, on disk and in transformers' classes."""

    target: Path
    head: Path
    model: LlamaForCausalLM
    tensors: dict[str, Tensor]


def head_tensors(third: bool) -> dict[str, Tensor]:
    torch.manual_seed(3)
    layer, reads = ("midlayer", 2 * WIDTH) if third else ("layers.0", WIDTH)
    shapes = {
        "fc.weight": (WIDTH, (3 if third else 2) * WIDTH),
        f"{layer}.self_attn.q_proj.weight": (WIDTH, reads),
        f"{layer}.self_attn.k_proj.weight": (WIDTH // 2, reads),
        f"{layer}.self_attn.v_proj.weight": (WIDTH // 2, reads),
        f"{layer}.self_attn.o_proj.weight": (WIDTH, WIDTH),
        f"{layer}.mlp.gate_proj.weight": (64, WIDTH),
        f"{layer}.mlp.up_proj.weight": (64, WIDTH),
        f"{layer}.mlp.down_proj.weight": (WIDTH, 64),
        f"{layer}.post_attention_layernorm.weight": (WIDTH,),
    }
    if third:
        shapes |= {f"{layer}.{name}.weight": (WIDTH,) for name in ("input_layernorm", "hidden_norm")}
        shapes |= {"norm.weight": (WIDTH,), "lm_head.weight": (DRAFT_VOCAB, WIDTH)}
    made = {name: torch.randn(shape) * 0.3 + (len(shape) == 1) for name, shape in shapes.items()}
    if third:
        kept = torch.randperm(VOCAB)[:DRAFT_VOCAB].sort().values
        made["d2t"] = kept - torch.arange(DRAFT_VOCAB)
    else:
        made["fc.bias"] = torch.randn(WIDTH) * 0.1
    return made


def written(folder: Path, method: str) -> Files:
    torch.manual_seed(0)
    model = LlamaForCausalLM(CONFIG).eval()
    for weight in model.parameters():
        weight.data = torch.randn_like(weight) * 0.25 + (weight.dim() == 1)
    model.save_pretrained(folder / "model")
    third, head = method != "eagle", folder / "head"
    head.mkdir()
    tensors, entries = head_tensors(third), {**CONFIG.to_dict(), "num_hidden_layers": 1}
    if method == "speculators":
        entries = {
            "speculators_model_type": "eagle3",
            "transformer_layer_config": entries,
            "draft_vocab_size": DRAFT_VOCAB,
            "eagle_aux_hidden_state_layer_ids": list(LAYERS),
            "norm_before_residual": True,
        }
        saved = {name.replace("midlayer", "layers.0"): tensor for name, tensor in tensors.items()}
    else:
        entries["architectures"] = ["LlamaForCausalLMEagle3" if third else "LlamaForCausalLMEagle"]
        if third:
            entries |= {
                "draft_vocab_size": DRAFT_VOCAB,
                "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(LAYERS)},
            }
        saved = tensors
    save_file(saved, head / "model.safetensors")
    (head / "config.json").write_text(json.dumps(entries))
    return Files(folder / "model", head, model, tensors)


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + CONFIG.rms_norm_eps) * weight


class Reference:
    """The formulas of EAGLE (Li et al. 2024) and EAGLE-3 (2025) over a whole text, without a cache."""

    def __init__(self, files: Files, third: bool, norm_before_residual: bool) -> None:
        self.files, self.third, self.before = files, third, norm_before_residual
        self.layer = "midlayer" if third else "layers.0"

    def drafts(self, ids: list[int], count: int) -> list[int]:
        """Up to `count` tokens after these."""
        model, t = self.files.model, self.files.tensors
        with torch.inference_mode():
            out = model(torch.tensor([ids]), output_hidden_states=True)
            if self.third:
                states = torch.cat([out.hidden_states[at][0] for at in LAYERS], -1)[:-1] @ t["fc.weight"].T
            else:
                states = out.hidden_states[-1][0][:-1]  # transformers normalises the last
            tokens, found = ids[1:], list[int]()
            for _ in range(count):
                logits, following = self.step(states, tokens)
                best = int(logits.argmax())
                found.append(int(best + t["d2t"][best]) if self.third else best)
                states, tokens = torch.cat([states, following[None]]), [*tokens, found[-1]]
        return found

    def step(self, states: Tensor, tokens: list[int]) -> tuple[Tensor, Tensor]:
        """States [T, H] and the token after each -> logits and state of the last."""
        t, embeds = self.files.tensors, self.files.model.model.embed_tokens(torch.tensor(tokens))
        name = self.layer
        if self.third:
            hidden = rms(states, t[f"{name}.hidden_norm.weight"])
            residual = hidden if self.before else states
            x = torch.cat([rms(embeds, t[f"{name}.input_layernorm.weight"]), hidden], -1)
        else:
            x = residual = torch.cat([embeds, states], -1) @ t["fc.weight"].T + t["fc.bias"]
        residual = residual + self.attend(x)
        y = rms(residual, t[f"{name}.post_attention_layernorm.weight"])
        gate, up = (y @ t[f"{name}.mlp.{part}.weight"].T for part in ("gate_proj", "up_proj"))
        x = residual + (torch.nn.functional.silu(gate) * up) @ t[f"{name}.mlp.down_proj.weight"].T
        if self.third:
            return rms(x[-1], t["norm.weight"]) @ t["lm_head.weight"].T, x[-1]
        return self.files.model.lm_head(x[-1]), x[-1]

    def attend(self, x: Tensor) -> Tensor:
        t, count, dim = self.files.tensors, len(x), WIDTH // HEADS
        q, k, v = (
            (x @ t[f"{self.layer}.self_attn.{part}_proj.weight"].T).view(1, count, -1, dim).transpose(1, 2)
            for part in "qkv"
        )
        cos, sin = LlamaRotaryEmbedding(CONFIG)(x, torch.arange(count)[None])
        q, k = apply_rotary_pos_emb(q, k, cos, sin)
        k, v = (each.repeat_interleave(2, 1) for each in (k, v))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return out.transpose(1, 2).reshape(count, WIDTH) @ t[f"{self.layer}.self_attn.o_proj.weight"].T


def stats(llm: LLM) -> Stats:
    made: Stats = llm._client.engine.stats()  # type: ignore[attr-defined]
    return made


def prompts() -> list[Any]:
    return [{"prompt_token_ids": [(7 * at + 3 * row) % 90 + 1 for at in range(21 + 9 * row)]} for row in range(4)]


def spec(files: Files, **entries: Any) -> dict[str, Any]:
    return {"speculative_config": {"model": str(files.head), "num_speculative_tokens": 3, **entries}}


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("method", ["eagle", "eagle3", "speculators"])
def test_the_drafts_are_those_of_the_papers(
    tmp_path: Path, method: str, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In steps of one request and of four, with prompts in chunks, and after drafts that were refused."""
    files = written(tmp_path, method)
    wanted = Reference(files, method != "eagle", method == "speculators")
    proposed: list[tuple[list[int], list[int]]] = []
    whole = DraftHeadProposer.propose

    def noted(self: DraftHeadProposer, room: Any) -> None:
        whole(self, room)
        proposed.extend((list(r.token_ids), list(r.draft_tokens)) for r, most in room if most)

    monkeypatch.setattr(DraftHeadProposer, "propose", noted)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False)
    settings = {**SETTINGS, "max_num_batched_tokens": 32, "tensor_parallel_size": ranks}
    with LLM(str(files.target), **settings, **spec(files)) as llm:
        llm.generate(prompts(), params)
        llm._client.engine.check_integrity()  # type: ignore[attr-defined]
    assert len(proposed) > 20
    for ids, drafts in proposed:
        assert drafts == wanted.drafts(ids, len(drafts)), ids
    assert {len(drafts) for _, drafts in proposed} >= {1, 2, 3}


@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_the_tokens_are_those_without_it(tmp_path: Path, method: str) -> None:
    """Greedy and sampled, with few pages, prefixes that are found, and chunks."""
    files = written(tmp_path, method)
    settings = {**SETTINGS, "num_pages": 14, "max_num_batched_tokens": 24, "max_model_len": 128}
    with LLM(str(files.target), **settings) as theirs, LLM(str(files.target), **settings, **spec(files)) as ours:
        for how in ({"temperature": 0}, {"temperature": 0.8, "seed": 3}, {"temperature": 1, "top_k": 8, "seed": 4}):
            params = SamplingParams(max_tokens=30, ignore_eos=True, detokenize=False, **how)
            for _ in range(2):
                found = [
                    [list(o.outputs[0].token_ids) for o in llm.generate(prompts(), params)] for llm in (ours, theirs)
                ]
                assert found[0] == found[1], how
                ours._client.engine.check_integrity()  # type: ignore[attr-defined]
        assert stats(ours).spec_decode.num_accepted_tokens > 0
        assert stats(ours).scheduler.num_preemptions > 0 and stats(ours).scheduler.prefix_hits > 0


def test_heads_of_other_models_are_refused(tmp_path: Path) -> None:
    files = written(tmp_path, "eagle3")
    entries = json.loads((files.head / "config.json").read_text())
    for change, why in (
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 9]}}, "the model has 5 layers"),
        ({"vocab_size": 97}, "the draft head has vocab_size 97, and the model 96"),
    ):
        (files.head / "config.json").write_text(json.dumps(entries | change))
        with pytest.raises(ValueError, match=why):
            LLM(str(files.target), **SETTINGS, **spec(files))
    (files.head / "config.json").write_text(json.dumps(entries))
    with pytest.raises(ValueError, match="holds a head for method 'eagle3', not 'eagle'"):
        LLM(str(files.target), **SETTINGS, **spec(files, method="eagle"))
    for method in ("mtp", "ernie_mtp", "longcat_flash_mtp"):
        with pytest.raises(ValueError, match="is no assistant of Gemma 4, .* leave speculative_config.model out, with"):
            LLM(str(files.target), **SETTINGS, **spec(files, method=method))


@pytest.mark.parametrize("method", ["eagle3", "speculators"])
def test_hostile_files_are_refused(tmp_path: Path, method: str) -> None:
    """Before anything is built from their numbers, whether the layer's entries stand at the top or inside."""
    files = written(tmp_path, method)
    entries = json.loads((files.head / "config.json").read_text())
    for change, why in (
        ({"num_hidden_layers": 10_000_000}, "num_hidden_layers is 10000000, not a whole number from 1 to 4096"),
        ({"hidden_size": 2**40}, "hidden_size is 1099511627776, not a whole number from 1 to 16777216"),
        ({"num_attention_heads": 4, "num_key_value_heads": 3}, "num_attention_heads is 4, no multiple of"),
    ):
        layer = {"transformer_layer_config": entries.get("transformer_layer_config", {}) | change}
        changed = entries | (layer if method == "speculators" else change)
        (files.head / "config.json").write_text(json.dumps(changed))
        with pytest.raises(ValueError, match=why):
            LLM(str(files.target), **SETTINGS, **spec(files))
