"""Text on which an original and its quantized model are compared: a file's, or what the original generates."""

from pathlib import Path

from quintet.api.llm import LLM
from quintet.config import EngineConfig
from quintet.hub.max_model_len import model_length
from quintet.hub.resolve import load_model_config, resolve_model, resolve_tokenizer
from quintet.quantize.samples import sequences
from quintet.sampling_params import SamplingParams
from quintet.tokenizers.tokenizer import load_tokenizer

SEED = 1


def held_out(config: EngineConfig, file: str | None, count: int, length: int) -> list[list[int]]:
    """Sequences of tokens, `count` of `length` at most; without a file those that the model draws, its end ignored."""
    folder = resolve_model(config)
    length = min(length, model_length(load_model_config(folder).get_text_config()))
    tokenizer = load_tokenizer(resolve_tokenizer(config, folder))
    if file is not None:
        return sequences(Path(file), tokenizer, count, length)
    start = tokenizer.encode("")[:1] or list(tokenizer.eos_ids[:1]) or [0]
    # generation goes on after an end of text, so that sequences are long; penalties and top-k of the model do not count
    drawn = [
        SamplingParams(temperature=1.0, top_p=1.0, top_k=0, max_tokens=length - 1, seed=SEED + each, ignore_eos=True)
        for each in range(count)
    ]
    with LLM(config.model, device=config.device, max_model_len=length, use_tqdm=False) as llm:
        found = llm.generate([{"prompt_token_ids": start}] * count, drawn, use_tqdm=False)
    return [[*start, *each.outputs[0].token_ids] for each in found if len(each.outputs[0].token_ids) > 1]
