"""A BERT checkpoint as a GGUF file that llama.cpp embeds with. Texts are token ids: its vocabulary is numbers."""

import json
from pathlib import Path

import gguf
import numpy as np
from safetensors.numpy import load_file

TYPES = {"F32": gguf.GGMLQuantizationType.F32, "F16": gguf.GGMLQuantizationType.F16,
         "BF16": gguf.GGMLQuantizationType.BF16, "Q8_0": gguf.GGMLQuantizationType.Q8_0}  # fmt: skip


def write(checkpoint: Path, target: Path, kind: str) -> None:
    """Matrices in the type `kind`; vectors, and what is looked up by position, in float32."""
    config = json.loads((checkpoint / "config.json").read_text())
    writer = gguf.GGUFWriter(target, "bert")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_layer_norm_eps(config["layer_norm_eps"])
    writer.add_causal_attention(False)
    writer.add_pooling_type(gguf.PoolingType.MEAN)
    writer.add_tokenizer_model("bert")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    writer.add_token_list(words + [f"\u2581w{i}" for i in range(config["vocab_size"] - len(words))])
    writer.add_token_type_count(config["type_vocab_size"])
    for add, place in ((writer.add_bos_token_id, 2), (writer.add_sep_token_id, 3), (writer.add_unk_token_id, 1),
                       (writer.add_pad_token_id, 0), (writer.add_mask_token_id, 4)):  # fmt: skip
        add(place)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.BERT, config["num_hidden_layers"])
    for name, tensor in load_file(checkpoint / "model.safetensors").items():
        new = names.get_name(name.removeprefix("bert."), try_suffixes=(".weight", ".bias"))
        if new is None or "pooler" in name:
            continue
        plain = tensor.ndim == 1 or "position" in name or "token_type" in name
        fmt = TYPES["F32" if plain else kind]
        writer.add_tensor(new, gguf.quantize(tensor.astype(np.float32), fmt), raw_dtype=fmt)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
