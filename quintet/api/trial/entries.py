"""Names of config.json entries that a small copy changes, by their meaning, with the small values."""

from collections.abc import Mapping

VOCAB, POSITIONS, HIDDEN, HEADS, HEAD, KV_HEADS = 128, 256, 64, 4, 16, 2
EXPERTS, CHOSEN = 8, 2
WINDOW = 8  # tokens; less than the longer prompt

LAYERS = (
    "num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "num_decoder_layers", "num_blocks",
    "encoder_layers", "num_encoder_layers", "num_layers_per_stack",
)  # fmt: skip
# entry -> the largest value; smaller values and those below 1 stay. Lists and lists of lists: each number in them
LARGEST: Mapping[str, int] = {
    **dict.fromkeys(
        ("vocab_size", "vocab_size_per_layer_input", "decoder_vocab_size", "unpadded_vocab_size",
         "ngram_vocab_size_base"),
        VOCAB,
    ),
    **dict.fromkeys(
        ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "model_max_length", "context_length",
         "max_sequence_length", "seq_length", "max_target_positions", "max_source_positions", "max_context_len"),
        POSITIONS,
    ),
    **dict.fromkeys(
        ("hidden_size", "n_embd", "d_model", "embedding_dim", "emb_dim", "lru_width", "word_embed_proj_dim",
         "embedding_size", "input_embedding_size", "output_embedding_size", "ple_embed_dim"),
        HIDDEN,
    ),
    **dict.fromkeys(
        ("intermediate_size", "ffn_dim", "d_ff", "dff", "dim_ff", "n_inner", "ffn_hidden_size", "inner_hidden_size",
         "decoder_ffn_dim", "encoder_ffn_dim", "intermediate_size_mlp", "dense_intermediate_size", "feed_forward_size",
         "d_inner", "prompt_mid_dim"),
        96,
    ),
    **dict.fromkeys(
        ("moe_intermediate_size", "expert_ffn_hidden_size", "shared_expert_intermediate_size",
         "shared_intermediate_size", "shared_experts_intermediate_size", "moe_shared_expert_intermediate_size"),
        48,
    ),
    **dict.fromkeys(
        ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_routed_experts"), EXPERTS
    ),
    **dict.fromkeys(
        ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "moe_top_k", "top_k_experts",
         "num_selected_experts"),
        CHOSEN,
    ),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"), 2),
    **dict.fromkeys(("n_group", "num_expert_group"), 2),
    **dict.fromkeys(
        ("sliding_window", "sliding_window_size", "window_size", "attention_window_size", "local_attention",
         "keep_window_size"),
        WINDOW,
    ),
    **dict.fromkeys(
        ("attention_chunk_size", "floor_scale", "log_scaling_n_floor", "chunk_size", "mamba_chunk_size",
         "index_block_size", "block_size", "state_size", "ssm_state_size", "mamba_d_state", "kv_lora_rank",
         "o_lora_rank", "hidden_size_per_layer_input", "rel_extent", "local_attn_chunk_length",
         "lsh_attn_chunk_length"),
        16,
    ),
    **dict.fromkeys(("time_step_rank", "mamba_dt_rank"), 4),
    **dict.fromkeys(("laurel_rank", "hc_lowrank", "adapter_rank", "gated_norm_rank", "d_rel"), 8),
    "q_lora_rank": 24,
    "index_topk": 64,  # above the longest request of a trial
    "zero_expert_num": 4,
    "block_multiple_of": 32,
    "router_hidden_size": 32,
    "o_groups": 2,
    "split_ngram_parts": 4,
    **dict.fromkeys(("n_groups", "mamba_n_groups", "mamba_ngroups"), 2),
    # periods: one layer in two is of the other kind
    **dict.fromkeys(
        ("attn_layer_period", "expert_layer_period", "sliding_window_pattern", "_sliding_window_pattern",
         "no_rope_layer_interval", "full_attention_interval", "global_attn_every_n_layers", "layer_group_size",
         "interleave_moe_layer_step", "decoder_sparse_step"),
        2,
    ),
    **dict.fromkeys(("attn_layer_offset", "expert_layer_offset"), 1),
    **dict.fromkeys(("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers"), 0),
}  # fmt: skip
QUERY_HEADS = (
    "num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads", "encoder_attention_heads",
    "num_decoder_attention_heads", "num_encoder_attention_heads", "attention_heads", "swa_num_attention_heads",
    "index_n_heads", "linear_num_value_heads", "linear_num_heads",
)  # fmt: skip
# entry of key-value heads -> the entry of query heads in the same layer, under the name that is common to all families
KEY_HEADS: Mapping[str, str] = {
    "num_key_value_heads": "num_attention_heads",
    "num_kv_heads": "num_attention_heads",
    "kv_n_heads": "num_attention_heads",
    "num_query_groups": "num_attention_heads",
    "multi_query_group_num": "num_attention_heads",
    "swa_num_key_value_heads": "swa_num_attention_heads",
    "num_global_key_value_heads": "num_attention_heads",
    "linear_num_key_heads": "linear_num_value_heads",
}
# features of a head
HEAD_SIZES: Mapping[str, int] = {
    **dict.fromkeys(
        ("head_dim", "swa_head_dim", "attention_head_size", "kv_channels", "dim_head", "d_head", "linear_key_head_dim",
         "linear_value_head_dim", "linear_head_dim", "query_pre_attn_scalar", "qk_nope_head_dim", "qk_rope_head_dim",
         "v_head_dim"),
        HEAD,
    ),
    **dict.fromkeys(("global_head_dim", "index_head_dim", "attention_head_dim", "qk_head_dim"), 2 * HEAD),
}  # fmt: skip
# entries that some classes read as they are, None too -> what None means in a small copy
IF_NONE: Mapping[str, int] = {"head_dim": HEAD, "num_key_value_heads": HEADS}
# of Mamba: heads * features = expand * hidden size
MAMBA_HEADS = ("mamba_n_heads", "mamba_num_heads")
MAMBA_HEAD_SIZES = ("mamba_d_head", "mamba_head_dim", "mamba_headdim")
# lists of layer numbers
LAYER_NUMBERS = (
    "moe_layers", "mlp_only_layers", "hybrid_layer_ids", "attn_layer_indices", "cross_attention_layers",
    "ple_layer_ids", "full_attn_idxs",
)  # fmt: skip
# the first layers, and the last ones, that are of another kind
FIRST_LAYERS = ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index", "max_window_layers")
LAST_LAYERS = ("num_kv_shared_layers",)
# lists whose length is not the number of layers
OTHER_LISTS = ("eos_token_id", "time_step_limit", "mrope_section", "short_factor", "long_factor", "architectures")
TOKEN_IDS: Mapping[str, int] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
# dicts whose entries are changed alike
NESTED = (
    "rope_parameters", "rope_scaling", "full_attention", "sliding_attention", "ffn_config", "attn_config",
    "main", "compress",
)  # fmt: skip
# what a random copy has no use for
DROPPED = (
    "transformers_version", "_name_or_path", "architectures", "quantization_config", "auto_map", "id2label", "label2id",
    "compression_config", "torch_dtype", "dtype", "task_specific_params",
)  # fmt: skip
