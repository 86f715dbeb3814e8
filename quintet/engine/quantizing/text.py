"""What an original and its quantized model are compared on: a file's text, or what the original says."""

from pathlib import Path

from quintet.config import EngineConfig
from quintet.engine.hub import load_model_config, resolve_model, resolve_tokenizer
from quintet.engine.lengths import model_length
from quintet.engine.llm import LLM
from quintet.engine.quantizing.samples import sequences
from quintet.engine.tokenizer import load_tokenizer
from quintet.sampling_params import SamplingParams

SEED = 1


def held_out(config: EngineConfig, file: str | None, count: int, length: int) -> list[list[int]]:
    """Sequences of tokens, `count` of `length` at most; without a file those that the model draws, its end ignored."""
    folder = resolve_model(config)
    length = min(length, model_length(load_model_config(folder).get_text_config()))
    tokenizer = load_tokenizer(resolve_tokenizer(config, folder))
    if file is not None:
        return sequences(Path(file), tokenizer, count, length)
    start = tokenizer.encode("")[:1] or list(tokenizer.eos_ids[:1]) or [0]
    # ends of text are said and gone on from, so that sequences are long; penalties and top-k of the model do not count
    drawn = [
        SamplingParams(temperature=1.0, top_p=1.0, top_k=0, max_tokens=length - 1, seed=SEED + each, ignore_eos=True)
        for each in range(count)
    ]
    with LLM(config.model, device=config.device, max_model_len=length, use_tqdm=False) as llm:
        found = llm.generate([{"prompt_token_ids": start}] * count, drawn, use_tqdm=False)
    return [[*start, *each.outputs[0].token_ids] for each in found if len(each.outputs[0].token_ids) > 1]
