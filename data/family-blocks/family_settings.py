"""Settings of the small models that `make_family_blocks.py` builds, one entry per folder."""

BASE = dict(
    vocab_size=64,
    hidden_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    pad_token_id=None,
    bos_token_id=0,
    eos_token_id=1,
)
HEAD = dict(head_dim=16)
LATENT = dict(
    q_lora_rank=16,
    kv_lora_rank=16,
    qk_nope_head_dim=8,
    qk_rope_head_dim=8,
    v_head_dim=8,
    num_key_value_heads=4,
)
LINEAR = dict(
    linear_key_head_dim=8, linear_value_head_dim=8, linear_num_key_heads=2, linear_num_value_heads=2
)
INDEX = dict(index_topk=8, index_head_dim=16, index_n_heads=2)
WIDTHS = dict(intermediate_size=40, moe_intermediate_size=20)
SHARED = dict(shared_expert_intermediate_size=28)
TOP_2 = dict(num_experts_per_tok=2)


def mix(*parts, **own):
    """Settings of all parts; a later one wins."""
    return {k: v for part in (*parts, own) for k, v in part.items()}


def without(settings, *keys):
    return {k: v for k, v in settings.items() if k not in keys}


QWEN = mix(BASE, WIDTHS, TOP_2, num_experts=6)
LOCAL = mix(BASE, TOP_2, intermediate_size=20, num_local_experts=6)
GROUPS = mix(n_group=2, topk_group=1)
ROUTED_8 = mix(BASE, WIDTHS, TOP_2, GROUPS, n_routed_experts=8, routed_scaling_factor=1.5)
DEEPSEEK = mix(ROUTED_8, LATENT, n_shared_experts=1, first_k_dense_replace=1)
KIMI = without(DEEPSEEK, "n_routed_experts", "q_lora_rank", "first_k_dense_replace")


# Name of the folder: settings of the configuration, or of its text_config for nested ones.
# The layer with experts is the last one; where a family allows a dense layer, it comes first.
SETTINGS = {
    "qwen2_moe": mix(QWEN, SHARED, decoder_sparse_step=2),
    "qwen3_moe": mix(QWEN, HEAD, norm_topk_prob=True, mlp_only_layers=[0]),
    "qwen3_next": mix(QWEN, HEAD, LINEAR, SHARED, mlp_only_layers=[0]),
    "qwen3_vl_moe": mix(QWEN, HEAD, mlp_only_layers=[0]),
    "qwen3_5_moe": mix(without(QWEN, "intermediate_size"), HEAD, LINEAR, SHARED, num_hidden_layers=1),
    "mixtral": mix(LOCAL, num_hidden_layers=1),
    "deepseek_v2": mix(DEEPSEEK, topk_method="group_limited_greedy", n_shared_experts=2),
    "deepseek_v3": DEEPSEEK,
    "kimi_k25": DEEPSEEK,
    "deepseek_v32": mix(DEEPSEEK, INDEX),
    "kimi_linear": mix(KIMI, q_lora_rank=None, num_local_experts=8, linear_head_dim=8, linear_num_heads=2),
    "glm4_moe": mix(ROUTED_8, HEAD, n_shared_experts=1),
    "glm4_moe_lite": without(DEEPSEEK, "first_k_dense_replace"),
    "glm_moe_dsa": mix(DEEPSEEK, INDEX),
    "gpt_oss": mix(LOCAL, HEAD, swiglu_limit=1.5, num_hidden_layers=1),
    "llama4": mix(LOCAL, HEAD, intermediate_size_mlp=40, interleave_moe_layer_step=2, num_local_experts=4),
    "minimax": mix(LOCAL, HEAD, block_size=8, num_hidden_layers=1),
    "minimax_m2": mix(LOCAL, HEAD, num_hidden_layers=1),
    "olmoe": mix(without(QWEN, "moe_intermediate_size"), intermediate_size=20, num_hidden_layers=1),
    "flex_olmo": mix(
        without(QWEN, "moe_intermediate_size"), norm_topk_prob=True, intermediate_size=20, num_hidden_layers=1
    ),
    "phimoe": mix(LOCAL, router_jitter_noise=0.2, num_hidden_layers=1),
    "granitemoe": mix(LOCAL, num_hidden_layers=1),
    "granitemoeshared": mix(LOCAL, shared_intermediate_size=28, num_hidden_layers=1),
    "granitemoehybrid": mix(
        LOCAL,
        shared_intermediate_size=28,
        layer_types=["full_attention"],
        mamba_n_heads=4,
        mamba_d_state=8,
        num_hidden_layers=1,
    ),
    "dots1": mix(ROUTED_8, HEAD, n_shared_experts=1, first_k_dense_replace=1, norm_topk_prob=True),
    "ernie4_5_moe": mix(BASE, WIDTHS, moe_num_experts=6, moe_k=2, moe_num_shared_experts=2),
    "hunyuan_v1_moe": mix(
        without(LOCAL, "num_local_experts", "num_experts_per_tok"),
        HEAD,
        num_experts=6,
        moe_topk=2,
        num_hidden_layers=1,
    ),
    "jamba": mix(
        without(QWEN, "moe_intermediate_size"),
        attn_layer_period=1,
        attn_layer_offset=0,
        use_mamba_kernels=False,
        intermediate_size=20,
    ),
    "lfm2_moe": mix(QWEN, num_dense_layers=1, layer_types=["full_attention"] * 2, routed_scaling_factor=1.5),
    "afmoe": mix(QWEN, HEAD, num_shared_experts=1, route_scale=1.5),
    "nemotron_h": mix(
        without(ROUTED_8, "num_hidden_layers"),
        HEAD,
        moe_shared_expert_intermediate_size=28,
        layers_block_type=["full_attention", "moe"],
        mamba_num_heads=4,
        mamba_head_dim=8,
        n_groups=2,
        ssm_state_size=8,
    ),
    "mellum": mix(QWEN, HEAD, num_hidden_layers=1),
    "exaone_moe": mix(
        QWEN, HEAD, GROUPS, num_shared_experts=1, layer_types=["full_attention"] * 2, num_experts=8
    ),
    "bailing_hybrid": mix(KIMI, head_dim=8, num_local_experts=8, first_k_dense_replace=1, q_lora_rank=16),
    "mimo_v2_flash": mix(ROUTED_8, HEAD, v_head_dim=16),
    "gemma4": mix(
        without(QWEN, "num_experts_per_tok"),
        HEAD,
        top_k_experts=2,
        enable_moe_block=True,
        hidden_size_per_layer_input=0,
        global_head_dim=16,
        num_hidden_layers=1,
    ),
    "solar_open": mix(ROUTED_8, HEAD, n_shared_experts=1, num_hidden_layers=1),
    "hy_v3": mix(QWEN, HEAD, num_shared_experts=1, router_scaling_factor=1.5),
    "laguna": mix(QWEN, HEAD, SHARED, moe_routed_scaling_factor=1.5, moe_router_logit_softcapping=2.0),
    "cohere2_moe": mix(
        without(QWEN, "moe_intermediate_size"),
        HEAD,
        num_shared_experts=2,
        first_k_dense_replace=1,
        intermediate_size=20,
    ),
    "aria": mix(
        without(LOCAL, "num_local_experts", "num_experts_per_tok"),
        moe_num_experts=6,
        moe_topk=2,
        num_hidden_layers=1,
    ),
    "deepseek_v4": mix(
        without(ROUTED_8, "n_group", "topk_group", "intermediate_size"),
        HEAD,
        q_lora_rank=16,
        mlp_layer_types=["moe"],
        o_groups=2,
        o_lora_rank=8,
        index_n_heads=2,
        index_head_dim=8,
        index_topk=4,
        partial_rotary_factor=0.5,
        hc_mult=2,
        layer_types=["sliding_attention"],
        swiglu_limit=1.5,
        num_key_value_heads=1,
        num_hidden_layers=1,
    ),
    "mistral4": DEEPSEEK,
    "minimax_m3_vl": mix(
        LOCAL,
        HEAD,
        dense_intermediate_size=40,
        shared_intermediate_size=28,
        rotary_dim=8,
        mlp_layer_types=["dense", "sparse"],
        swiglu_alpha=1.5,
        swiglu_limit=1.5,
    ),
    "inkling": mix(
        ROUTED_8,
        HEAD,
        n_shared_experts=2,
        swa_num_attention_heads=4,
        swa_num_key_value_heads=2,
        swa_head_dim=16,
        d_rel=4,
        rel_extent=16,
        dense_mlp_idx=1,
        n_routed_experts=6,
    ),
    "openai_privacy_filter": mix(LOCAL, HEAD, swiglu_limit=1.5, num_hidden_layers=1),
    "glm4v_moe": mix(ROUTED_8, HEAD, n_shared_experts=1),
    "granitemoe_swa": mix(LOCAL, shared_intermediate_size=28, num_hidden_layers=1),
    "qwen3_omni_moe": mix(QWEN, norm_topk_prob=True, mlp_only_layers=[0]),
    "flint": mix(QWEN, HEAD, SHARED, mlp_only_layers=[0]),
    "kolibri1": mix(without(QWEN, "intermediate_size"), HEAD, SHARED, num_hidden_layers=1),
    "mistral_large4": mix(DEEPSEEK, INDEX),
    "zaya": mix(
        without(QWEN, "intermediate_size", "num_experts_per_tok"),
        HEAD,
        router_hidden_size=16,
        num_hidden_layers=1,
    ),
}
for unused in ("n_group", "topk_group", "routed_scaling_factor"):
    SETTINGS["inkling"].pop(unused)

# Other layouts and options of a family: folder name → (family, changed settings).
VARIANTS = {
    "cohere2_moe-sigmoid": (
        "cohere2_moe",
        dict(expert_selection_fn="sigmoid", shared_expert_combination_strategy="sum"),
    ),
    "deepseek_v2-greedy": ("deepseek_v2", dict(topk_method="greedy")),
    "deepseek_v4-hash": ("deepseek_v4", dict(mlp_layer_types=["hash_moe"])),
    "gpt_oss-mxfp4": ("gpt_oss", dict(hidden_size=96, intermediate_size=32, swiglu_limit=7.0)),
    "nemotron_h-latent": ("nemotron_h", dict(moe_latent_size=24)),
    "qwen3_vl_moe-transposed": ("qwen3_vl_moe", {}),
}

# Small towers, so that whole nested models can be saved.
TOWER = dict(hidden_size=16, intermediate_size=16, num_attention_heads=2)
OTHER_CONFIGS = {
    "qwen3_vl_moe": dict(
        vision_config=dict(
            depth=1,
            hidden_size=16,
            intermediate_size=16,
            num_heads=2,
            out_hidden_size=48,
            num_position_embeddings=16,
            deepstack_visual_indexes=[0],
        )
    ),
    "qwen3_omni_moe": dict(
        vision_config=dict(
            depth=1,
            hidden_size=16,
            intermediate_size=16,
            num_heads=2,
            out_hidden_size=48,
            num_position_embeddings=16,
            deepstack_visual_indexes=[0],
        ),
        audio_config=dict(
            encoder_layers=1,
            encoder_attention_heads=2,
            encoder_ffn_dim=16,
            d_model=16,
            num_mel_bins=16,
            downsample_hidden_size=8,
            output_dim=48,
        ),
    ),
    "mistral_large4": dict(
        vision_config=mix(TOWER, model_type="pixtral", num_hidden_layers=1, image_size=28, patch_size=14)
    ),
    "qwen3_5_moe": dict(
        vision_config=dict(
            depth=1,
            hidden_size=16,
            intermediate_size=16,
            num_heads=2,
            out_hidden_size=48,
            num_position_embeddings=16,
        )
    ),
    "glm4v_moe": dict(
        vision_config=dict(
            depth=1, hidden_size=16, intermediate_size=16, out_hidden_size=48, num_heads=2, image_size=28
        )
    ),
    "kimi_k25": dict(
        vision_config=mix(TOWER, num_hidden_layers=1, pos_emb_height=4, pos_emb_width=4),
        projection_hidden_size=16,
    ),
    "llama4": dict(
        vision_config=mix(
            TOWER,
            num_hidden_layers=1,
            image_size=28,
            vision_output_dim=16,
            projector_input_dim=16,
            projector_output_dim=16,
        )
    ),
    "minimax_m3_vl": dict(
        vision_config=mix(TOWER, num_hidden_layers=1, image_size=28), projector_hidden_size=16
    ),
    "aria": dict(
        vision_config=mix(TOWER, model_type="idefics3_vision", num_hidden_layers=1, image_size=64),
        projector_patch_to_query_dict={4: 4},
    ),
    "inkling": dict(
        vision_config=dict(hidden_size=16, n_layers=4, num_attention_heads=2, patch_size=8),
        audio_config=dict(n_mel_bins=4, mel_vocab_size=8),
    ),
}
