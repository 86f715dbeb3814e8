"""Small multimodal models whose text model has no class of its own in transformers."""

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForImageTextToText

from quintet_tools.checkpoints.random_weights import scatter
from quintet_tools.checkpoints.tiny import Tiny, folder_of_all, hushed

PIXTRAL = {
    "model_type": "pixtral", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
    "num_attention_heads": 2, "image_size": 28, "patch_size": 7,
}  # fmt: skip
VISION = {
    "hidden_size": 32, "intermediate_size": 48, "depth": 1, "num_heads": 2, "image_size": 28, "patch_size": 7,
    "out_hidden_size": 48, "projection_intermediate_size": 48,
}  # fmt: skip
WRAPPERS: dict[str, dict[str, Any]] = {  # by model_type: the vision tower
    "glm5_next": VISION,
    "mistral_large4": PIXTRAL,
}
LACKING = {"glm5_next": ("first_k_dense_replace", "rope_parameters")}  # entries that its text model refuses


def make_wrapper(family: str, text: Mapping[str, Any], seed: int = 0) -> Tiny:
    """A model of such a text model, with the tower that its files have beside it."""
    with torch.random.fork_rng(), hushed():
        torch.manual_seed(seed)
        lacking = LACKING.get(family, ())
        own = {name: value for name, value in text.items() if name not in lacking}
        text_config = {"model_type": f"{family}_text", **own}
        config = AutoConfig.for_model(family, text_config=text_config, vision_config=WRAPPERS[family])
        plain = {"attn_implementation": "eager", "experts_implementation": "eager"}
        model = AutoModelForImageTextToText.from_config(config, **plain).float().eval()
        scatter(model)
        folder = Path(tempfile.mkdtemp(dir=folder_of_all().name))
        model.save_pretrained(folder)
        return Tiny(folder, AutoConfig.from_pretrained(folder).get_text_config(), model)
