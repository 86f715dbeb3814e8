"""Qwen's encoders, of pictures in any size."""

from collections.abc import Mapping

from quintet.gguf.cursor import Array
from quintet.gguf.mmproj.projector import Entries, Projector, activation, vision_entries
from quintet.gguf.mmproj.siglip import unswapped
from quintet.gguf.model import GGUFModel
from quintet.gguf.names import ArchitectureNames, Computed

FRAMES = 2  # of a video, in a patch; a picture is two equal ones
WINDOW = 112  # pixels of Qwen2.5's windows, where the file names no size
_GELU = {"ffn_up": "fc1", "ffn_down": "fc2"}
_GATED = {"ffn_gate": "gate_proj", "ffn_up": "up_proj", "ffn_down": "down_proj"}
_LINEAR = {"ffn_up": "linear_fc1", "ffn_down": "linear_fc2"}
_TOKENS = {
    "image_token_id": ("<|image_pad|>",), "video_token_id": ("<|video_pad|>",),
    "vision_start_token_id": ("<|vision_start|>",), "vision_end_token_id": ("<|vision_end|>",),
}  # fmt: skip


def _names(
    mmproj: GGUFModel, products: Mapping[str, str], ends: Mapping[str, str], computed: Mapping[str, Computed]
) -> ArchitectureNames:
    layer = {"attn_out": "attn.proj", "attn_qkv": "attn.qkv", "ln1": "norm1", "ln2": "norm2"}
    layer |= {name: f"mlp.{module}" for name, module in products.items()}
    joined = {
        f"attn.qkv.{last}": Computed("rows", tuple(f"attn_{each}.{last}" for each in "qkv"))
        for last in ("weight", "bias")
    }
    patches = Computed("frames", ("patch_embd.weight", "patch_embd.weight.1"))
    return ArchitectureNames(
        unswapped(mmproj, layer), {"patch_embd": "model.visual.patch_embed.proj", **ends}, "model.visual.blocks",
        computed={**joined, "/model.visual.patch_embed.proj.weight": patches, **computed},
    )  # fmt: skip


def _merger(norm: str, first: str, second: str) -> Mapping[str, str]:
    return {"post_ln": norm, "mm.0": first, "mm.2": second}


_QWEN2_MERGER = _merger("model.visual.merger.ln_q", "model.visual.merger.mlp.0", "model.visual.merger.mlp.2")


def _qwen3_names(mmproj: GGUFModel) -> ArchitectureNames:
    merger = "model.visual.merger"
    ends = {**_merger(f"{merger}.norm", f"{merger}.linear_fc1", f"{merger}.linear_fc2"),
            "position_embd": "model.visual.pos_embed"}  # fmt: skip
    for number, layer in enumerate(_deep_layers(mmproj)):
        own = f"model.visual.deepstack_merger_list.{number}"
        ends |= {f"deepstack.{layer}.{name}": f"{own}.{module}" for name, module in (
            ("norm", "norm"), ("fc1", "linear_fc1"), ("fc2", "linear_fc2"))}  # fmt: skip
    return _names(mmproj, _LINEAR, ends, {})


def _deep_layers(mmproj: GGUFModel) -> list[int]:
    """Returns the layers whose rows are added behind the text model's first ones."""
    marked = mmproj.metadata.get(f"{mmproj.prefix}.is_deepstack_layers")
    found = [at for at, each in enumerate(marked) if each] if isinstance(marked, Array) else []
    if found and found[-1] >= mmproj.required_number("block_count"):
        raise ValueError(f"{mmproj.path}: is_deepstack_layers names layers that it has not; fetch it again")
    return found


def _common(mmproj: GGUFModel) -> Entries:
    """Entries under the names that all three share."""
    sizes = vision_entries(mmproj)
    return {
        "depth": sizes["num_hidden_layers"], "num_heads": sizes["num_attention_heads"],
        "patch_size": sizes["patch_size"], "spatial_merge_size": _merge(mmproj), "temporal_patch_size": FRAMES,
        "hidden_size": sizes["hidden_size"], "intermediate_size": sizes["intermediate_size"],
        "out_hidden_size": mmproj.shape("mm.2.weight", 2)[0],
    }  # fmt: skip


def _merge(mmproj: GGUFModel) -> int:
    return mmproj.required_number("spatial_merge_size", 2)


def _qwen2(mmproj: GGUFModel) -> Entries:
    sizes = _common(mmproj)
    width, inner, out = (sizes.pop(name) for name in ("hidden_size", "intermediate_size", "out_hidden_size"))
    if inner % width:
        raise ValueError(f"{mmproj.path}: layers of {inner} are no multiple of its width, {width}; fetch it again")
    vision = {**sizes, "embed_dim": width, "hidden_size": out, "mlp_ratio": inner // width}
    return {"vision_config": {**vision, "hidden_act": activation(mmproj, "gelu")}}


def _qwen25(mmproj: GGUFModel) -> Entries:
    every, sizes = mmproj.required_number("n_wa_pattern"), _common(mmproj)
    whole = list(range(every - 1, sizes["depth"], every))
    window = {"window_size": mmproj.required_number("window_size", WINDOW), "fullatt_block_indexes": whole}
    return {"vision_config": {**sizes, **window, "hidden_act": "silu"}}


def _qwen3(mmproj: GGUFModel) -> Entries:
    deep = {"num_position_embeddings": mmproj.shape("position_embd.weight", 2)[0],
            "deepstack_visual_indexes": _deep_layers(mmproj)}  # fmt: skip
    return {"vision_config": {**_common(mmproj), **deep, "hidden_act": activation(mmproj, "gelu_pytorch_tanh")}}


def _sizes(mmproj: GGUFModel, least: int, most: int) -> Entries:
    """`least`, `most`: pixels of a picture in the published settings."""
    bounds = {
        "shortest_edge": mmproj.required_number("image_min_pixels", least),
        "longest_edge": mmproj.required_number("image_max_pixels", most),
    }
    patch = {"patch_size": mmproj.required_number("patch_size"), "merge_size": _merge(mmproj)}
    return {"size": bounds, **patch, "temporal_patch_size": FRAMES}


def _qwen2_sizes(mmproj: GGUFModel) -> Entries:
    return _sizes(mmproj, 4 * 28**2, 16384 * 28**2)


def _qwen3_sizes(mmproj: GGUFModel) -> Entries:
    return _sizes(mmproj, 64 * 32**2, 16384 * 32**2)


QWEN: Mapping[str, Projector] = {
    "qwen2vl_merger": Projector(
        {"qwen2_vl_text": "qwen2_vl"}, lambda mmproj: _names(mmproj, _GELU, _QWEN2_MERGER, {}), _qwen2,
        ("mm.2.weight", 0), _TOKENS, "Qwen2VLProcessor", "Qwen2VLImageProcessorPil", lambda mmproj: {}, _qwen2_sizes,
    ),
    "qwen2.5vl_merger": Projector(
        {"qwen2_vl_text": "qwen2_5_vl"}, lambda mmproj: _names(mmproj, _GATED, _QWEN2_MERGER, {}), _qwen25,
        ("mm.2.weight", 0), _TOKENS, "Qwen2_5_VLProcessor", "Qwen2VLImageProcessorPil", lambda mmproj: {},
        _qwen2_sizes, text_types={"qwen2_vl_text": "qwen2_5_vl_text"},
    ),
    "qwen3vl_merger": Projector(
        {"qwen3_vl_text": "qwen3_vl", "qwen3_vl_moe_text": "qwen3_vl_moe", "qwen3_5_text": "qwen3_5",
         "qwen3_5_moe_text": "qwen3_5_moe"},
        _qwen3_names, _qwen3, ("mm.2.weight", 0), _TOKENS, "Qwen3VLProcessor", "Qwen2VLImageProcessorPil",
        lambda mmproj: {}, _qwen3_sizes,
    ),
}  # fmt: skip
