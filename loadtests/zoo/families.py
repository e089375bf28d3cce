"""The model families of the tiny-model zoo: data only.

One entry a family that mlx-lm builds: the config that makes it tiny, the caches that it must then have, and how it
leaks in mlx-lm's own batch loop. Layer counts are chosen so that each kind of cache of the family occurs. Imported by
`loadtests.zoo`; never touches MLX. It is long because there are many families.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

Config = dict[str, Any]

CONTEXT = 32_768
WINDOW = 32  # sliding windows: small, so that short tests already wrap around

# Sizes that most families share under the same names; each family takes from it the names that it knows.
COMMON: Config = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 2048,
    "max_position_embeddings": CONTEXT,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
}

# Sizes that grow with the width of a model; head sizes stay.
WIDTHS = frozenset(
    {
        "block_dim",
        "block_ff_dim",
        "dense_intermediate_size",
        "expert_ffn_hidden_size",
        "ffn_hidden_size",
        "hidden_dim",
        "hidden_size",
        "index_n_heads",
        "intermediate_size",
        "intermediate_size_mlp",
        "linear_num_key_heads",
        "linear_num_value_heads",
        "mamba_d_ssm",
        "mamba_n_heads",
        "mamba_num_heads",
        "moe_intermediate_size",
        "moe_shared_expert_intermediate_size",
        "n_embd",
        "n_head",
        "n_inner",
        "num_attention_groups",
        "num_attention_heads",
        "num_heads",
        "num_key_value_heads",
        "num_kv_heads",
        "share_expert_dim",
        "shared_expert_intermediate_size",
        "shared_intermediate_size",
        "swa_num_attention_heads",
        "swa_num_key_value_heads",
    }
)
DEPTHS = frozenset({"num_hidden_layers", "num_layers", "n_layer"})


@dataclass(frozen=True, slots=True)
class Family:
    """One family, made tiny.

    Attributes:
        config: what makes it tiny, besides `COMMON`.
        caches: the caches of a fresh row, as `describe` of `loadtests.zoo` words them.
        leaks: live buffers a decode step that mlx-lm's BatchGenerator loses with one row.
        uneven: what rows of different length give when mlx-lm decodes them together: the text they give alone, another
            one, or an exception.
        fill: values for vectors, by the end of their name, where the class's own leave the model dull.
    """

    name: str
    model_type: str
    config: Config
    caches: str
    leaks: int = 0
    uneven: Literal["equal", "differs", "raises"] = "equal"
    fill: Config = field(default_factory=dict)

    @property
    def batches(self) -> bool:
        return self.uneven == "equal"


def _layers(sliding: int, full: int = 1) -> list[str]:
    return ["sliding_attention"] * sliding + ["full_attention"] * full


LINEAR: Config = {  # gated delta net layers
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
}
EXPERTS: Config = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
MLA: Config = {  # low-rank attention
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
}
DEEPSEEK: Config = {
    "moe_intermediate_size": 64,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
    "first_k_dense_replace": 1,
}
KDA: Config = {"num_heads": 4, "head_dim": 32, "short_conv_kernel_size": 4}  # Kimi's delta attention
KIMI: Config = MLA | {
    "model_max_length": CONTEXT,
    "num_experts": 4,
    "num_experts_per_token": 2,
    "num_shared_experts": 1,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 1,
    "mla_use_nope": True,
}
GRANITE: Config = {
    "attention_bias": False,
    "embedding_multiplier": 1.0,
    "attention_multiplier": 0.2,
    "logits_scaling": 1.0,
    "residual_multiplier": 1.0,
    "layer_types": ["mamba", "attention"] * 2,
    "mamba_n_heads": 4,
    "mamba_d_head": 32,
    "mamba_proj_bias": False,
    "mamba_d_state": 32,
    "mamba_d_conv": 4,
    "mamba_n_groups": 1,
    "mamba_conv_bias": True,
}
LONGCAT: Config = {
    "attention_method": "MLA",
    "zero_expert_type": "identity",
    "ffn_hidden_size": 128,
    "moe_topk": 2,
    "expert_ffn_hidden_size": 64,
    "n_routed_experts": 4,
    "zero_expert_num": 2,
    "num_layers": 4,
    "routed_scaling_factor": 1.0,
    "mla_scale_q_lora": True,
    "mla_scale_kv_lora": True,
    "attention_bias": False,
}

_ALL = [
    Family("llama", "llama", {}, "4 KVCache"),
    Family(
        "qwen3_5",
        "qwen3_5",
        {"text_config": COMMON | LINEAR | {"model_type": "qwen3_5_text"}},
        "3 ArraysCache, 1 KVCache",
        leaks=2,
    ),
    Family("smollm3", "smollm3", {"num_hidden_layers": 8}, "8 KVCache", leaks=2),
    Family(
        "gemma3_text",
        "gemma3_text",
        {"num_hidden_layers": 6, "sliding_window": WINDOW, "sliding_window_pattern": 3, "query_pre_attn_scalar": 32},
        "4 RotatingKVCache, 2 KVCache",
    ),
    Family(
        "gpt_oss",
        "gpt_oss",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": WINDOW, "layer_types": _layers(1) * 2},
        "2 RotatingKVCache, 2 KVCache",
    ),
    Family(
        "qwen3_next",
        "qwen3_next",
        LINEAR
        | EXPERTS
        | {
            "decoder_sparse_step": 1,
            "shared_expert_intermediate_size": 64,
            "mlp_only_layers": [],
            "partial_rotary_factor": 0.5,
        },
        "3 ArraysCache, 1 KVCache",
        leaks=2,
    ),
    Family(
        "falcon_h1",
        "falcon_h1",
        {
            "mamba_d_ssm": 128,
            "mamba_d_state": 32,
            "mamba_d_head": 32,
            "mamba_n_heads": 4,
            "tie_word_embeddings": True,
            "lm_head_multiplier": 1.0,
            "embedding_multiplier": 1.0,
        },
        "4 CacheList",
        leaks=3,
    ),
    Family(
        "nemotron_h",
        "nemotron_h",
        {
            "num_hidden_layers": 6,
            "hybrid_override_pattern": ["M", "*", "-", "M", "*", "-"],
            "attention_bias": False,
            "mamba_num_heads": 4,
            "mamba_head_dim": 32,
            "mamba_proj_bias": False,
            "ssm_state_size": 32,
            "conv_kernel": 4,
            "n_groups": 1,
            "mlp_bias": False,
            "layer_norm_epsilon": 1e-5,
            "use_bias": False,
            "use_conv_bias": True,
        },
        "2 ArraysCache, 2 KVCache",
        leaks=3,
    ),
    Family(
        "mamba2",
        "mamba2",
        {
            "num_heads": 4,
            "head_dim": 32,
            "state_size": 32,
            "layer_norm_epsilon": 1e-5,
            "conv_kernel": 4,
            "n_groups": 1,
            "use_bias": False,
            "use_conv_bias": True,
            "time_step_limit": [0.0, 100.0],
            "time_step_rank": "auto",
        },
        "4 ArraysCache",
        leaks=3,
    ),
    Family(
        "lfm2",
        "lfm2",
        {
            "norm_eps": 1e-5,
            "conv_bias": False,
            "conv_L_cache": 3,
            "block_dim": 64,
            "block_ff_dim": 128,
            "block_multiple_of": 32,
            "block_ffn_dim_multiplier": 1.0,
            "block_auto_adjust_ff_dim": False,
            "layer_types": ["conv", "full_attention"] * 2,
        },
        "2 ArraysCache, 2 KVCache",
        leaks=1,
    ),
    Family(
        "cohere2",
        "cohere2",
        {
            "head_dim": 16,
            "layer_norm_eps": 1e-5,
            "logit_scale": 1.0,
            "sliding_window": WINDOW,
            "sliding_window_pattern": 2,
        },
        "2 RotatingKVCache, 2 KVCache",
        leaks=2,
    ),
    Family(
        "kimi_linear",
        "kimi_linear",
        KIMI | {"linear_attn_config": KDA | {"kda_layers": [1], "full_attn_layers": [2, 3, 4]}},
        "1 ArraysCache, 3 KVCache",
        leaks=3,
    ),
    Family(
        "minimax_m3_vl",
        "minimax_m3_vl",
        {
            "text_config": COMMON
            | {
                "dense_intermediate_size": 128,
                "shared_intermediate_size": 64,
                "num_local_experts": 4,
                "num_experts_per_tok": 2,
                "moe_layer_freq": [0, 1, 1, 1],
                "sparse_attention_freq": [0, 1, 1, 1],
                "index_n_heads": 2,
                "index_head_dim": 32,
                "index_block_size": 16,
                "index_topk_blocks": 2,
            }
        },
        "4 CacheList",
        leaks=3,
        uneven="differs",  # its blocks of keys are cut over padded slots
    ),
    Family(
        "rwkv7",
        "rwkv7",
        {
            "norm_eps": 1e-5,
            "a_low_rank_dim": 16,
            "v_low_rank_dim": 16,
            "gate_low_rank_dim": 16,
            "decay_low_rank_dim": 16,
        },
        "4 ArraysCache",
    ),
    Family(
        "recurrent_gemma",
        "recurrent_gemma",
        {
            "attention_bias": False,
            "conv1d_width": 4,
            "logits_soft_cap": 30.0,
            "attention_window_size": WINDOW,
            "block_types": ["recurrent", "recurrent", "attention"],
        },
        "3 ArraysCache, 1 RotatingKVCache",
    ),
    Family(
        "deepseek_v32",
        "deepseek_v32",
        MLA | DEEPSEEK | {"index_head_dim": 32, "index_n_heads": 2, "index_topk": 16},
        "4 CacheList",
    ),
    Family(
        "llama4",
        "llama4",
        {
            "text_config": COMMON
            | {
                "model_type": "llama4_text",
                "attention_bias": False,
                "attention_chunk_size": 64,
                "interleave_moe_layer_step": 2,
                "intermediate_size_mlp": 128,
                "num_experts_per_tok": 1,
                "num_local_experts": 4,
                "rope_scaling": None,
                "use_qk_norm": True,
            }
        },
        "3 ChunkedKVCache, 1 KVCache",
        uneven="raises",
    ),
    Family(
        "gemma2",
        "gemma2",
        {"query_pre_attn_scalar": 32},
        "4 KVCache",
        uneven="raises",
        fill={"post_attention_layernorm.weight": 5.0, "post_feedforward_layernorm.weight": 5.0},
    ),
    Family(
        "granitemoehybrid",
        "granitemoehybrid",
        GRANITE,
        "2 ArraysCache, 2 KVCache",
        leaks=1,
    ),
    Family(
        "granitemoehybrid_nope",
        "granitemoehybrid",
        GRANITE | {"position_embedding_type": "nope"},
        "2 ArraysCache, 2 KVCache",
        leaks=3,
    ),
    Family(
        "jamba",
        "jamba",
        {
            "attn_layer_offset": 1,
            "attn_layer_period": 2,
            "expert_layer_offset": 1,
            "expert_layer_period": 2,
            "mamba_d_conv": 4,
            "mamba_d_state": 16,
            "mamba_expand": 2,
            "num_experts": 4,
            "num_experts_per_tok": 2,
        },
        "2 ArraysCache, 2 KVCache",
        leaks=2,
    ),
    Family(
        "exaone4",
        "exaone4",
        {
            "rope_scaling": None,
            "sliding_window": WINDOW,
            "sliding_window_pattern": "LLLG",
            "layer_types": _layers(3),
        },
        "3 RotatingKVCache, 1 KVCache",
        leaks=1,
    ),
    Family(
        "afmoe",
        "afmoe",
        EXPERTS | {"num_dense_layers": 1, "sliding_window": WINDOW, "layer_types": _layers(1) * 2},
        "2 RotatingKVCache, 2 KVCache",
        leaks=2,
    ),
    Family(
        "bailing_hybrid",
        "bailing_hybrid",
        EXPERTS
        | MLA
        | {
            "num_shared_experts": 1,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "layer_group_size": 2,
            "group_norm_size": 1,
            "routed_scaling_factor": 1.0,
        },
        "2 ArraysCache, 2 KVCache",
        leaks=1,
    ),
    Family(
        "bailing_moe_v3",
        "bailing_hybrid",
        EXPERTS
        | MLA
        | {
            "architectures": ["BailingMoeV3ForCausalLM"],
            "num_hidden_layers": 5,
            "num_shared_experts": 1,
            "moe_shared_expert_intermediate_size": 64,
            "n_group": 1,
            "topk_group": 1,
            "layer_group_size": 4,
        },
        "3 ArraysCache, 2 KVCache",
        leaks=2,
    ),
    Family(
        "exaone_moe",
        "exaone_moe",
        EXPERTS
        | {
            "num_shared_experts": 1,
            "sliding_window": WINDOW,
            "layer_types": _layers(3),
            "is_moe_layer": [False, True, True, True],
        },
        "3 RotatingKVCache, 1 KVCache",
        leaks=1,
    ),
    Family(
        "gear",  # transformers 5 doesn't know its layer types, so mlx-lm can't load its tokenizer
        "gear",
        {
            "num_hidden_layers": 6,
            "sliding_window": WINDOW,
            "layer_types": ["conv_mixer", "sliding_attention", "full_attention"] * 2,
        },
        "2 ArraysCache, 2 RotatingKVCache, 2 KVCache",
        leaks=1,
    ),
    Family(
        "gemma3n",
        "gemma3n",
        {
            "text_config": COMMON
            | {
                "model_type": "gemma3n_text",
                "num_kv_shared_layers": 2,
                "vocab_size_per_layer_input": 2048,
                "sliding_window": WINDOW,
                "rope_local_base_freq": 10_000.0,
                "final_logit_softcapping": 30.0,
                "layer_types": _layers(1) * 2,
                "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
                "hidden_size_per_layer_input": 32,
                "altup_num_inputs": 2,
                "altup_coef_clip": 120.0,
                "altup_correct_scale": True,
                "altup_active_idx": 0,
                "laurel_rank": 16,
            }
        },
        "1 RotatingKVCache, 1 KVCache",
        leaks=1,
        fill={"post_attention_layernorm.weight": 6.0, "post_feedforward_layernorm.weight": 6.0},
    ),
    Family(
        "gpt2",
        "gpt2",
        {
            "n_ctx": CONTEXT,
            "n_positions": CONTEXT,
            "n_embd": 64,
            "n_head": 4,
            "n_layer": 4,
            "layer_norm_epsilon": 1e-5,
            "num_key_value_heads": 4,
        },
        "4 KVCache",
        leaks=3,
    ),
    Family(
        "kimi_k3",
        "kimi_k3",
        {
            "text_config": COMMON
            | KIMI
            | {
                "linear_attn_config": KDA | {"kda_layers": [1, 2, 3], "full_attn_layers": [4]},
                "attn_res_block_size": 2,
                "mla_use_output_gate": True,
            }
        },
        "3 ArraysCache, 1 KVCache",
        leaks=3,
    ),
    Family(
        "lfm2_moe",
        "lfm2_moe",
        EXPERTS
        | {
            "norm_topk_prob": True,
            "use_expert_bias": True,
            "num_dense_layers": 1,
            "norm_eps": 1e-5,
            "conv_bias": False,
            "conv_L_cache": 3,
            "layer_types": ["conv", "full_attention"] * 2,
        },
        "2 ArraysCache, 2 KVCache",
        leaks=1,
    ),
    Family(
        "llama4_text",
        "llama4_text",
        {"intermediate_size_mlp": 128, "no_rope_layers": [1, 0, 1, 0], "use_qk_norm": True},
        "4 KVCache",
        leaks=2,
    ),
    Family(
        "muse_glimmer",
        "muse_glimmer",
        {"sliding_window": WINDOW, "layer_types": _layers(3), "output_multiplier": 1.0},
        "3 RotatingKVCache, 1 KVCache",
        leaks=1,
    ),
    Family(
        "olmo_hybrid",
        "olmo_hybrid",
        LINEAR | {"linear_num_key_heads": 4, "linear_allow_neg_eigval": True, "attention_bias": False},
        "3 ArraysCache, 1 KVCache",
        leaks=2,
    ),
    Family(
        "plamo2",
        "plamo2",
        {"hidden_size_per_head": 32, "mamba_d_state": 32, "mamba_num_heads": 4},
        "2 ArraysCache, 2 KVCache",
        leaks=1,
        fill={"post_mixer_norm.weight": 1.0, "post_mlp_norm.weight": 1.0},
    ),
    Family(
        "qwen3_5_moe",
        "qwen3_5_moe",
        {
            "text_config": COMMON
            | LINEAR
            | EXPERTS
            | {"model_type": "qwen3_5_moe_text", "shared_expert_intermediate_size": 64}
        },
        "3 ArraysCache, 1 KVCache",
        leaks=2,
    ),
    Family(
        "baichuan_m1",
        "baichuan_m1",
        {"sliding_window": WINDOW, "sliding_window_layers": list(range(1, 64, 2)), "conv_window": 2},
        "4 CacheList",
        fill={"model.norm.weight": 3.0},  # its output rows are scaled to 1 when loaded
    ),
    Family(
        "bailing_moe_linear",
        "bailing_moe_linear",
        EXPERTS
        | {
            "num_shared_experts": 1,
            "norm_topk_prob": True,
            "first_k_dense_replace": 1,
            "layer_group_size": 2,
            "group_norm_size": 1,
            "topk_group": 1,
            "use_qk_norm": True,
        },
        "2 ArraysCache, 2 KVCache",
    ),
    Family(
        "mamba",
        "mamba",
        {
            "state_size": 16,
            "conv_kernel": 4,
            "use_bias": False,
            "use_conv_bias": True,
            "time_step_rank": 4,
            "tie_word_embeddings": True,
        },
        "4 ArraysCache",
    ),
    Family(
        "afm7",
        "afm7",
        {"hidden_dim": 64, "num_layers": 4, "num_kv_reuse_layers": 2, "num_heads": 4, "num_kv_heads": 2},
        "2 KVCache",
        uneven="differs",
    ),
    Family("deepseek_v3", "deepseek_v3", MLA | DEEPSEEK, "4 KVCache"),
    Family(
        "deepseek_v41",
        "deepseek_v41",
        {
            "head_dim": 64,
            "q_lora_rank": 32,
            "qk_rope_head_dim": 32,
            "o_groups": 2,
            "o_lora_rank": 32,
            "moe_intermediate_size": 64,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": WINDOW,
            "compress_ratios": [1, 1, 4, 4],
            "kv_source_layer_ids": [2],
            "index_source_layer_ids": [2],
            "index_n_heads": 2,
            "index_head_dim": 32,
            "index_topk": 16,
            "hc_mult": 2,
        },
        "4 LayerCache",
        uneven="raises",
    ),
    Family(
        "gemma4",
        "gemma4",
        {
            "text_config": COMMON
            | {
                "model_type": "gemma4_text",
                "num_hidden_layers": 6,
                "global_head_dim": 32,
                "vocab_size_per_layer_input": 2048,
                "num_kv_shared_layers": 0,
                "hidden_size_per_layer_input": 32,
                "sliding_window": WINDOW,
                "sliding_window_pattern": 6,
            }
        },
        "5 RotatingKVCache, 1 KVCache",
    ),
    Family(
        "glm_moe_dsa",
        "glm_moe_dsa",
        MLA
        | DEEPSEEK
        | {
            "num_hidden_layers": 3,
            "index_head_dim": 32,
            "index_n_heads": 2,
            "index_topk": 16,
            "topk_method": "noaux_tc",
            "scoring_func": "sigmoid",
            "norm_topk_prob": True,
            "moe_layer_freq": 1,
            "attention_bias": False,
            "rope_parameters": {"rope_theta": 10_000.0, "rope_type": "default"},
        },
        "3 CacheList",
    ),
    Family(
        "iquestloopcoder",
        "iquestloopcoder",
        {"num_hidden_layers": 2, "loop_num": 2, "loop_window_size": WINDOW},
        "2 KVCache, 2 RotatingKVCache",
    ),
    Family(
        "laguna",
        "laguna",
        EXPERTS
        | {
            "sliding_window": WINDOW,
            "shared_expert_intermediate_size": 64,
            "layer_types": ["full_attention", *_layers(3, 0)],
        },
        "1 KVCache, 3 RotatingKVCache",
    ),
    Family(
        "llama_sliding",
        "llama",
        {"sliding_window": WINDOW, "layer_types": _layers(1) * 2},
        "2 RotatingKVCache, 2 KVCache",
    ),
    Family("longcat_flash", "longcat_flash", MLA | LONGCAT, "4 CacheList"),
    Family(
        "longcat_flash_ngram",
        "longcat_flash_ngram",
        MLA | LONGCAT | {"ngram_vocab_size_ratio": 4, "emb_neighbor_num": 3, "emb_split_num": 2},
        "1 ArraysCache, 4 CacheList",
        uneven="differs",  # while the window of newest tokens isn't full
    ),
    Family(
        "mellum",
        "mellum",
        EXPERTS
        | {
            "norm_topk_prob": True,
            "sliding_window": WINDOW,
            "layer_types": _layers(1) * 2,
            "rope_parameters": {kind: {"rope_theta": 10_000.0, "rope_type": "default"} for kind in _layers(1)},
        },
        "2 RotatingKVCache, 2 KVCache",
    ),
    Family(
        "mimo_v2_flash",
        "mimo_v2_flash",
        {
            "hybrid_layer_pattern": [0, 1, 0, 1],
            "moe_layer_freq": [0, 1, 1, 1],
            "num_experts_per_tok": 2,
            "n_routed_experts": 4,
            "n_shared_experts": None,
            "moe_intermediate_size": 64,
            "routed_scaling_factor": None,
            "topk_method": "noaux_tc",
            "scoring_func": "sigmoid",
            "norm_topk_prob": True,
            "n_group": 1,
            "topk_group": 1,
            "add_swa_attention_sink_bias": True,
            "add_full_attention_sink_bias": False,
            "sliding_window_size": WINDOW,
            "layernorm_epsilon": 1e-5,
            "swa_rope_theta": 10_000.0,
            "swa_num_attention_heads": 4,
            "swa_num_key_value_heads": 2,
            "v_head_dim": 32,
            "swa_head_dim": 32,
            "swa_v_head_dim": 32,
            "partial_rotary_factor": 0.5,
        },
        "2 KVCache, 2 RotatingKVCache",
    ),
    Family(
        "minimax",
        "minimax",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 0, "rotary_dim": 16},
        "4 KVCache",
    ),
    Family("nanbeige", "nanbeige", {"num_hidden_layers": 3, "num_loops": 2}, "6 KVCache"),
    Family("olmo2", "olmo2", {}, "4 KVCache"),
    Family(
        "olmo3",
        "olmo3",
        {"num_hidden_layers": 8, "sliding_window": WINDOW},
        "6 RotatingKVCache, 2 KVCache",
    ),
    Family(
        "plamo3",
        "plamo3",
        {"sliding_window": WINDOW, "sliding_window_pattern": 2},
        "2 RotatingKVCache, 2 KVCache",
    ),
    Family("qwen2", "qwen2", {"tie_word_embeddings": True}, "4 KVCache"),
    Family("qwen3", "qwen3", {}, "4 KVCache"),
    Family(
        "spark2_5",
        "spark2_5",
        {
            "sliding_window": WINDOW,
            "layer_types": _layers(3),
            "rope_parameters": {kind: {"rope_theta": 10_000.0} for kind in _layers(1)},
        },
        "3 RotatingKVCache, 1 KVCache",
    ),
    Family(
        "step3p5",
        "step3p5",
        {
            "num_attention_groups": 2,
            "sliding_window": WINDOW,
            "layer_types": ["full_attention", "sliding_attention"] * 2,
            "moe_num_experts": 4,
            "moe_top_k": 2,
            "moe_intermediate_size": 64,
            "share_expert_dim": 64,
            "attention_other_setting": {"num_attention_heads": 4, "num_attention_groups": 2},
            "moe_layers_enum": "1,2,3",
        },
        "2 KVCache, 2 RotatingKVCache",
    ),
    Family("phi3", "phi3", {}, "4 KVCache"),
    Family("gpt_neox", "gpt_neox", {"layer_norm_eps": 1e-5, "rotary_emb_base": 10_000, "rotary_pct": 0.5}, "4 KVCache"),
    Family(
        "gpt_bigcode",
        "gpt_bigcode",
        {
            "n_embd": 64,
            "n_layer": 4,
            "n_inner": 128,
            "n_head": 4,
            "n_positions": CONTEXT,
            "layer_norm_epsilon": 1e-5,
            "num_key_value_heads": 1,
        },
        "4 KVCache",
        leaks=3,
        uneven="raises",
    ),
    Family(
        "mistral4",
        "mistral4",
        MLA
        | DEEPSEEK
        | {
            "norm_topk_prob": True,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10_000.0,
                "factor": 2.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.1,
                "original_max_position_embeddings": CONTEXT // 2,
            },
        },
        "4 KVCache",
    ),
]

FAMILIES: dict[str, Family] = {family.name: family for family in _ALL}
