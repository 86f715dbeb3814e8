"""Heads for multi-token prediction in a model's own checkpoint: the drafts are those of transformers' layers."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from quintet import LLM, SamplingParams
from quintet.engine.spec_decode.draft_head import DraftHeadProposer
from quintet_tools.checkpoints.tiny import variant
from tests.e2e.spec_decode.test_draft_heads import SETTINGS, prompts, stats


class Head(NamedTuple):
    """Names of a published head's tensors, and how it computes."""

    block: str
    embed_norm: str
    hidden_norm: str
    product: str
    last_norm: str | None  # None: the model's
    around_zero: bool = False  # norms are kept around 0
    hidden_first: bool = False
    feeds_normalized: bool = False


LAST = "model.layers.{L}"
DEEPSEEK = Head(LAST, f"{LAST}.enorm", f"{LAST}.hnorm", f"{LAST}.eh_proj", f"{LAST}.shared_head.norm")
QWEN = Head(
    "mtp.layers.0", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm", True, False, True
)
MTP = "model.mtp_layers.0"
MIMO = Head(
    MTP, f"{MTP}.token_layernorm", f"{MTP}.hidden_layernorm", f"{MTP}.input_proj", f"{MTP}.final_layernorm",
    hidden_first=True,
)  # fmt: skip
ERNIE = Head(
    "model.mtp_block.0", "model.mtp_emb_norm.0", "model.mtp_hidden_norm.0", "model.mtp_linear_proj.0", None,
    feeds_normalized=True,
)  # fmt: skip
HEADS = {"deepseek_v3": DEEPSEEK, "glm4_moe": DEEPSEEK, "qwen3_next": QWEN, "mimo": MIMO, "ernie4_5_moe": ERNIE}


class Files(NamedTuple):
    """A checkpoint with a head, transformers' model with the head's layer as its last, and the head's other tensors."""

    folder: Path
    model: Any
    parts: dict[str, Tensor]


def written(folder: Path, family: str) -> Files:
    """A small random model whose checkpoint holds a head, of which the layer is one of its own with other numbers."""
    head, source = HEADS[family], variant("qwen2" if family == "mimo" else family, "plain")
    torch.manual_seed(1)
    config = json.loads((source.folder / "config.json").read_text())
    tensors: dict[str, Tensor] = {}
    for file in sorted(source.folder.glob("*.safetensors")):
        tensors |= load_file(file)
    layers, width = config["num_hidden_layers"], config["hidden_size"]
    kinds = config.get("layer_types") or []
    at = {"qwen3_next": lambda: kinds.index("full_attention"), "ernie4_5_moe": lambda: 0}.get(
        family, lambda: layers - 1
    )()
    layer = {name: each for name, each in tensors.items() if name.startswith(f"model.layers.{at}.")}
    own = {}
    for name, each in layer.items():
        noise = torch.randn_like(each) * (0.3 if each.dim() > 1 else 0.1)
        own[name.removeprefix(f"model.layers.{at}.")] = each + noise
    parts = {
        name: torch.randn(width) * 0.1 + (not head.around_zero) for name in ("embed_norm", "hidden_norm", "last_norm")
    }
    parts["product"] = torch.randn(width, 2 * width) * 0.2
    if head.last_norm is None:
        parts["last_norm"] = tensors["model.norm.weight"].float()
    names = {part: f"{where.format(L=layers)}.weight" for part in parts if (where := getattr(head, part))}
    block = head.block.format(L=layers)
    (folder / "model").mkdir()
    own_type = {"model_type": "mimo", "architectures": ["MiMoForCausalLM"]} if family == "mimo" else {}
    (folder / "model" / "config.json").write_text(json.dumps(config | own_type))
    extra = {f"{block}.{name}": each for name, each in own.items()}
    extra |= {name: parts[part] for part, name in names.items()}
    save_file({**tensors, **extra}, folder / "model" / "model.safetensors")
    reference = folder / "reference"
    reference.mkdir()
    save_file(
        {**tensors, **{f"model.layers.{layers}.{name}": each for name, each in own.items()}},
        reference / "model.safetensors",
        {"format": "pt"},
    )
    config["num_hidden_layers"] = layers + 1
    if kinds:
        config["layer_types"] = [*kinds, "full_attention"]
    if config.get("mlp_layer_types"):
        config["mlp_layer_types"] = [*config["mlp_layer_types"], "sparse"]
    (reference / "config.json").write_text(json.dumps(config))
    return Files(
        folder / "model",
        AutoModelForCausalLM.from_pretrained(reference, dtype=torch.float32, experts_implementation="eager").eval(),
        parts,
    )


def drafts(files: Files, head: Head, ids: list[int], count: int) -> list[int]:
    """Tokens after these by the head's formulas, as many as `count`."""
    model = files.model
    block = model.model.layers[-1]
    eps = model.config.rms_norm_eps

    def norm(x: Tensor, part: str) -> Tensor:
        scaled = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
        return scaled * (files.parts[part] + head.around_zero)

    with torch.inference_mode():
        layers, model.model.layers = model.model.layers, model.model.layers[:-1]
        try:
            states = model.model(torch.tensor([ids]), use_cache=False).last_hidden_state[0][:-1]
        finally:
            model.model.layers = layers
        tokens, found = ids[1:], list[int]()
        for _ in range(count):
            embeds = model.model.embed_tokens(torch.tensor(tokens))
            pair = [norm(embeds, "embed_norm"), norm(states, "hidden_norm")]
            x = torch.cat(pair[::-1] if head.hidden_first else pair, -1) @ files.parts["product"].T
            places = torch.arange(len(tokens))[None]
            turns = model.model.rotary_emb(x[None], places)
            x = block(x[None], position_embeddings=turns, attention_mask=None, position_ids=places)
            x = (x[0] if isinstance(x, tuple) else x)[0][-1:]
            normalized = norm(x, "last_norm")
            found.append(int(model.lm_head(normalized)[0].argmax()))
            states = torch.cat([states, normalized if head.feeds_normalized else x])
            tokens = [*tokens, found[-1]]
    return found


@pytest.mark.parametrize(
    ("family", "ranks"),
    # qwen3_next's small model has three heads of keys
    [(each, 1) for each in HEADS]
    + [pytest.param(each, 2, marks=pytest.mark.slow) for each in HEADS if each != "qwen3_next"],
)
def test_the_drafts_are_those_of_transformers_layers(
    tmp_path: Path, family: str, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, head = written(tmp_path, family), HEADS[family]
    proposed: list[tuple[list[int], list[int]]] = []
    whole = DraftHeadProposer.propose

    def noted(self: DraftHeadProposer, room: Any) -> None:
        whole(self, room)
        proposed.extend((list(r.token_ids), list(r.draft_tokens)) for r, most in room if most)

    monkeypatch.setattr(DraftHeadProposer, "propose", noted)
    params = SamplingParams(temperature=0, max_tokens=14, ignore_eos=True, detokenize=False)
    spec = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 2}}
    settings = {**SETTINGS, "tensor_parallel_size": ranks}
    with LLM(str(files.folder), **settings, **spec) as ours, LLM(str(files.folder), **settings) as theirs:
        found = [llm.generate(prompts()[:3], params) for llm in (ours, theirs)]
        with_drafts, plain = stats(ours), stats(theirs).steps
        refused = with_drafts.spec_decode.num_draft_tokens - with_drafts.spec_decode.num_accepted_tokens
        assert refused > 0
        assert with_drafts.steps.num_tokens == plain.num_tokens + refused, "no token is computed twice"
    tokens = [[list(each.outputs[0].token_ids) for each in answers] for answers in found]
    assert tokens[0] == tokens[1]
    assert len(proposed) > 10
    right = sum(each == drafts(files, head, ids, len(each)) for ids, each in proposed)
    assert right == len(proposed), f"{right} of {len(proposed)}"


def test_a_checkpoint_without_a_head_is_refused() -> None:
    for family, why in (("deepseek_v3", "holds no model.layers"), ("llama", "llama models have no such head here")):
        with pytest.raises(ValueError, match=why):
            LLM(
                str(variant(family, "plain").folder),
                **SETTINGS,
                speculative_config={"method": "mtp", "num_speculative_tokens": 2},
            )
