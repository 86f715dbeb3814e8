"""Embeddings that stand in the place of a prompt's tokens: checked, and brought to the bytes that a request carries."""

from typing import Any


def embeds_bytes(given: Any, width: int, name: str) -> bytes:
    """A tensor [T, width], or [1, T, width] as transformers' embeddings are, in float32, bfloat16 or float16 -> its
    float32 row by row. `width` is the model's. ValueError says what is wrong with it."""
    import torch  # a process that admits token ids alone needs none

    what = f"{name}: 'prompt_embeds'"
    if not isinstance(given, torch.Tensor):
        raise ValueError(f"{what} must be a torch tensor [tokens, {width}], not {type(given).__name__}")
    if given.layout is not torch.strided or given.is_quantized or given.is_meta:
        raise ValueError(f"{what} must be a dense tensor of floats, not {given.dtype} laid out as {given.layout}")
    if given.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"{what} must be in float32, bfloat16 or float16, not {given.dtype}")
    shape = given.shape[1:] if given.dim() == 3 and given.shape[0] == 1 else given.shape
    if len(shape) != 2 or shape[1] != width or not shape[0]:
        raise ValueError(f"{what} must be [tokens, {width}], with one token at least, not {list(given.shape)}")
    rows = given.detach().reshape(shape).cpu().float()
    if not bool(rows.isfinite().all()):
        raise ValueError(f"{what} must be finite numbers")
    return rows.contiguous().numpy().tobytes()
