"""Gemma 4's assistants beside a small random Gemma 4: drafts are those of transformers' class, and no token changes."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Gemma4AssistantConfig,
    Gemma4AssistantForCausalLM,
    Gemma4TextConfig,
)

from quintet import LLM, SamplingParams
from quintet.engine.spec_decode.draft_head import DraftHeadProposer
from quintet.engine.spec_decode.draft_reader import DraftReaderProposer
from quintet_tools.checkpoints.random_weights import scatter
from quintet_tools.checkpoints.tiny import variant
from tests.e2e.spec_decode.test_draft_heads import SETTINGS, VOCAB, prompts, stats

SLIDING, FULL = "sliding_attention", "full_attention"


class Files(NamedTuple):
    """A model and an assistant on disk, and both by transformers."""

    target: Path
    head: Path
    model: Any
    assistant: Any


def sharing_modes(config: Gemma4TextConfig) -> list[str | None]:
    """Returns which layers keep K and V for others, and which read those. transformers 5.23 refuses assistants, of
    which all layers read, and has models of which none reads keep nothing for them."""
    kinds, count = config.layer_types, config.num_hidden_layers
    first = count - config.num_kv_shared_layers
    last = {kind: index for index, kind in enumerate(kinds[:first])}
    return ["reuse" if at >= first else "store" if at in last.values() else None for at in range(count)]


@pytest.fixture(autouse=True)
def _assistants_are_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Gemma4TextConfig, "kv_sharing_modes", property(sharing_modes))


def written(folder: Path, kind: str, ordered: bool) -> Files:
    raw = json.loads((variant("gemma4_text", kind).folder / "config.json").read_text())
    raw |= {name: VOCAB for name in ("vocab_size", "vocab_size_per_layer_input") if raw.get(name)}
    layers = [SLIDING, FULL, FULL]
    text = {
        **raw, "hidden_size": 24, "intermediate_size": 40, "layer_types": layers, "num_hidden_layers": len(layers),
        "num_kv_shared_layers": len(layers), "num_attention_heads": 2 * raw["num_attention_heads"],
        "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0, "use_double_wide_mlp": False,
        "enable_moe_block": False,
    }  # fmt: skip
    if "per_layer_config" in raw:
        wide = next(each for each in raw["per_layer_config"].values())
        text["per_layer_config"] = {str(at): wide for at, each in enumerate(layers) if each == FULL}
    with torch.random.fork_rng():
        torch.manual_seed(2)
        whole = AutoConfig.for_model(**raw)
        model = AutoModelForCausalLM.from_config(whole, experts_implementation="eager").float().eval()
        config = Gemma4AssistantConfig(
            text_config=text, backbone_hidden_size=raw["hidden_size"], use_ordered_embeddings=ordered,
            num_centroids=12, centroid_intermediate_top_k=2,
        )  # fmt: skip
        assistant = Gemma4AssistantForCausalLM(config).float().eval()
        for each in (model, assistant):
            scatter(each)
        if ordered:
            assistant.masked_embedding.token_ordering.copy_(torch.randperm(VOCAB))
    model.save_pretrained(folder / "model")
    assistant.save_pretrained(folder / "head")
    return Files(folder / "model", folder / "head", model, assistant)


def drafts(files: Files, ids: list[int], count: int) -> list[int]:
    """Tokens after these by transformers, as its candidate generator draws them; without its cache. Behind a window an
    assistant here sees what the model's next token sees; transformers counts two more."""
    model, assistant = files.model, files.assistant
    assistant.config.get_text_config().sliding_window = model.config.sliding_window - 2
    with torch.inference_mode():
        out = model(torch.tensor([ids[:-1]]), output_hidden_states=True, return_shared_kv_states=True, use_cache=False)
        state, token, found = out.hidden_states[-1][:, -1:], torch.tensor([ids[-1:]]), list[int]()
        for _ in range(count):
            pair = torch.cat([model.get_input_embeddings()(token), state], -1)
            step = assistant(
                inputs_embeds=pair, position_ids=torch.tensor([[len(ids) - 1]]), shared_kv_states=out.shared_kv_states
            )
            token, state = step.logits.argmax(-1), step.last_hidden_state
            found.append(int(token))
    return found


@pytest.mark.parametrize(
    ("kind", "ordered", "ranks"),
    [("plain", False, 1), ("plain", True, 1), ("experts, keys as values", False, 1),
     pytest.param("plain", False, 2, marks=pytest.mark.slow)],
)  # fmt: skip
def test_the_drafts_are_those_of_transformers_class(
    tmp_path: Path, kind: str, ordered: bool, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = written(tmp_path, kind, ordered)
    proposed: list[tuple[list[int], list[int]]] = []
    whole = DraftReaderProposer.propose

    def noted(self: DraftHeadProposer, room: Any) -> None:
        whole(self, room)
        proposed.extend((list(r.token_ids), list(r.draft_tokens)) for r, most in room if most)

    monkeypatch.setattr(DraftReaderProposer, "propose", noted)
    params = SamplingParams(temperature=0, max_tokens=14, ignore_eos=True, detokenize=False)
    spec = {"speculative_config": {"method": "mtp", "model": str(files.head), "num_speculative_tokens": 3}}
    settings = {**SETTINGS, "tensor_parallel_size": ranks}
    with LLM(str(files.target), **settings, **spec) as ours, LLM(str(files.target), **settings) as theirs:
        found = [llm.generate(prompts()[:3], params) for llm in (ours, theirs)]
        counts = stats(ours).spec_decode
        assert counts.num_draft_tokens > counts.num_accepted_tokens
    tokens = [[list(each.outputs[0].token_ids) for each in answers] for answers in found]
    assert tokens[0] == tokens[1]
    assert len(proposed) > 10 and any(len(ids) > files.model.config.sliding_window + 3 for ids, _ in proposed)
    right = sum(each == drafts(files, ids, len(each)) for ids, each in proposed)
    assert right == len(proposed), f"{right} of {len(proposed)}"


@pytest.mark.parametrize(("kv", "computed"), [("auto", False), ("fp8", True), ("int8", False)])
def test_the_tokens_are_those_without_it(tmp_path: Path, kv: str, computed: bool) -> None:
    """Greedy and sampled, with few pages, prefixes that are found, and chunks."""
    files = written(tmp_path, "plain", ordered=computed)
    sizes = {"num_pages": 30, "max_num_batched_tokens": 24, "max_model_len": 128}
    settings = {**SETTINGS, **sizes, "kv_cache_dtype": kv, "calculate_kv_scales": computed}
    spec = {"speculative_config": {"model": str(files.head), "num_speculative_tokens": 3}}
    with LLM(str(files.target), **settings) as theirs, LLM(str(files.target), **settings, **spec) as ours:
        for how in ({"temperature": 0}, {"temperature": 0.8, "seed": 3}):
            params = SamplingParams(max_tokens=30, ignore_eos=True, detokenize=False, **how)
            found = [[list(o.outputs[0].token_ids) for o in llm.generate(prompts(), params)] for llm in (ours, theirs)]
            assert found[0] == found[1], how
            ours._client.engine.check_integrity()  # type: ignore[attr-defined]
        assert stats(ours).spec_decode.num_draft_tokens > 0 and stats(ours).scheduler.num_preemptions > 0
        engines = [llm._client.engine for llm in (ours, theirs)]  # type: ignore[attr-defined]
        layouts = [each._runner.ranks.workers[0].kv_cache_layout for each in engines]
        assert layouts[0] == layouts[1], "an assistant keeps nothing"


def test_assistants_of_other_models_are_refused(tmp_path: Path) -> None:
    files = written(tmp_path, "plain", ordered=False)
    raw = json.loads((files.head / "config.json").read_text())

    def refusal(target: Path = files.target, method: str = "gemma4_mtp", **change: Any) -> str:
        (files.head / "config.json").write_text(json.dumps(raw | change))
        spec = {"method": method, "model": str(files.head), "num_speculative_tokens": 3}
        with pytest.raises(ValueError) as refused:
            LLM(str(target), **SETTINGS, speculative_config=spec)
        return str(refused.value)

    assert "holds a head for method 'gemma4_mtp', not 'eagle3'" in refusal(method="eagle3")
    assert "is Gemma 4's assistant, and the model is llama" in refusal(variant("llama", "plain").folder)
    assert "has backbone_hidden_size 64, and the model 48" in refusal(backbone_hidden_size=64)
    assert "7 clusters, of which 2 are chosen" in refusal(use_ordered_embeddings=True, num_centroids=7)
    assert "0 clusters, of which 2 are chosen" in refusal(use_ordered_embeddings=True, num_centroids=0)
    text = raw["text_config"] | {"num_attention_heads": 4, "num_key_value_heads": 2}
    assert "reads 2 KV heads of 16 features, and the model's layers have 3 of 16" in refusal(text_config=text)
