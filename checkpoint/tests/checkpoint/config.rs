//! `config.json` of all supported forms.

use serde_json::{Value, json};
use switchyard_checkpoint::{
    Checkpoint, ConfigError, Family, GroupScore, Groups, ModelConfig, Normalisation, Preset,
    Scoring,
};

use crate::support::{config_text, data, tiny};

#[test]
fn the_shipped_model_reads_as_its_readme_says() {
    let checkpoint = Checkpoint::open(data("tiny-moe")).unwrap();
    let config = checkpoint.config();
    assert_eq!(config.family.model_type, "qwen3_moe");
    let language = config.language().unwrap();
    assert_eq!((config.hidden, config.moe_intermediate, config.num_layers), (256, 64, 4));
    assert_eq!((config.num_experts, config.top_k), (16, 4));
    assert_eq!(config.moe_layers(), [0, 1, 2, 3]);
    assert!(
        config.router().unwrap().normalisation == Normalisation::SUM
            && language.tie_word_embeddings
    );
    assert_eq!((language.vocab, language.max_positions), (2048, 1024));
    assert_eq!((language.bos_id, language.eos_ids.as_slice()), (Some(0), &[0][..]));
    let attention = language.attention.as_ref().unwrap();
    assert_eq!((attention.num_heads, attention.num_kv_heads, attention.head_dim), (4, 2, 64));
    assert_eq!((attention.rope_theta, attention.rope_type.as_str()), (10_000.0, "default"));
    assert!(attention.qk_norm && !attention.bias && attention.sliding_window.is_none());
    assert_eq!(config.quantization, None);
    assert!(!config.ignored_keys.is_empty());
    assert!(!config.ignored_keys.iter().any(|key| key == "num_experts" || key == "hidden_size"));
}

#[test]
fn old_and_new_spellings_mean_the_same() {
    let (dir, _checkpoint) = tiny(Preset::TinyQwen3Moe, 2);
    let mut json: Value = serde_json::from_str(&config_text(dir.path())).unwrap();
    let old = ModelConfig::from_json(&json.to_string()).unwrap();
    let fields = json.as_object_mut().unwrap();
    let experts = fields.remove("num_experts").unwrap();
    fields.insert("num_local_experts".into(), experts);
    let theta = fields.remove("rope_theta").unwrap();
    let rope = json!({ "rope_theta": theta, "rope_type": "default" });
    fields.insert("rope_parameters".into(), rope);
    fields.remove("rope_scaling");
    fields.insert("sliding_window".into(), json!(4096));
    let new = ModelConfig::from_json(&json.to_string()).unwrap();
    assert_eq!(new.language(), old.language());
    assert_eq!(new.num_experts, old.num_experts);
    assert_eq!(old.language().unwrap().attention.as_ref().unwrap().rope_theta, 1_000_000.0);
}

#[test]
fn a_deepseek_v3_that_leaves_the_routing_to_its_family_gets_that_family_s_routing() {
    let (dir, _checkpoint) = tiny(Preset::TinyDeepseekV3, 4);
    let mut json: Value = serde_json::from_str(&config_text(dir.path())).unwrap();
    let full = ModelConfig::from_json(&json.to_string()).unwrap();
    for field in ["scoring_func", "topk_method", "moe_layer_freq", "norm_topk_prob"] {
        json.as_object_mut().unwrap().remove(field).unwrap();
    }
    let short = ModelConfig::from_json(&json.to_string()).unwrap();
    assert_eq!(short.router(), full.router());
    let router = short.router().unwrap();
    assert_eq!(router.scoring, Scoring::Sigmoid);
    assert!(router.has_bias && router.normalisation != Normalisation::None);
    let groups = Groups { num_groups: 4, topk_groups: 2, score: GroupScore::TopTwoSum };
    assert_eq!(router.groups, Some(groups));
    assert_eq!(router.scale, 2.5);
    assert_eq!(short.quantization.as_ref().unwrap().fp8_block, Some([128, 128]));
    assert_eq!((short.moe_layers(), short.shared_width), (vec![3], short.moe_intermediate));
}

#[test]
fn layers_with_experts_follow_each_family_s_rule() {
    let layers = |preset, patch: Value| {
        let (dir, _checkpoint) = tiny(preset, 4);
        let mut json: Value = serde_json::from_str(&config_text(dir.path())).unwrap();
        json.as_object_mut().unwrap().extend(patch.as_object().unwrap().clone());
        json["num_hidden_layers"] = 6.into();
        ModelConfig::from_json(&json.to_string()).unwrap().moe_layers()
    };
    let qwen = |patch| layers(Preset::TinyQwen3Moe, patch);
    assert_eq!(qwen(json!({})), [0, 1, 2, 3, 4, 5]);
    assert_eq!(qwen(json!({ "decoder_sparse_step": 2 })), [1, 3, 5]);
    let both = json!({ "decoder_sparse_step": 2, "mlp_only_layers": [3, 4] });
    assert_eq!(qwen(both), [1, 5]);
    let deepseek = |patch| layers(Preset::TinyDeepseekV3, patch);
    assert_eq!(deepseek(json!({ "first_k_dense_replace": 1 })), [1, 2, 3, 4, 5]);
    // transformers ignores the frequency for this family.
    let both = json!({ "first_k_dense_replace": 1, "moe_layer_freq": 2 });
    assert_eq!(deepseek(both), [1, 2, 3, 4, 5]);
    assert_eq!(layers(Preset::TinyMixtral, json!({})), [0, 1, 2, 3, 4, 5]);
}

#[test]
fn an_unknown_architecture_is_named_beside_those_supported() {
    let (dir, _checkpoint) = tiny(Preset::TinyMixtral, 1);
    let text = config_text(dir.path())
        .replace("MixtralForCausalLM", "LlamaForCausalLM")
        .replace("\"mixtral\"", "\"llama\"");
    std::fs::write(dir.path().join("config.json"), text).unwrap();
    let error = Checkpoint::open(dir.path()).unwrap_err().to_string();
    assert!(error.contains("config.json"), "{error}");
    assert!(error.contains("'LlamaForCausalLM'"), "{error}");
    for known in Family::ALL {
        assert!(error.contains(known.class_name()), "{error}");
    }
}

#[test]
fn a_class_that_contradicts_the_model_type_is_refused_with_both() {
    let (dir, _checkpoint) = tiny(Preset::TinyMixtral, 1);
    let text = config_text(dir.path());
    let other = text.replace("MixtralForCausalLM", "Qwen3MoeForCausalLM");
    let error = ModelConfig::from_json(&other).unwrap_err().to_string();
    assert!(error.contains("'Qwen3MoeForCausalLM'") && error.contains("'mixtral'"), "{error}");
    // A type or a class that no family has leaves the choice to the other.
    for (from, to) in [("\"mixtral\"", "\"my_mixtral\""), ("MixtralForCausalLM", "MyMixtral")] {
        let config = ModelConfig::from_json(&text.replace(from, to)).unwrap();
        assert_eq!(config.family.model_type, "mixtral");
    }
}

#[test]
fn bad_numbers_are_refused_by_field_value_and_expectation() {
    let cases = [
        (Preset::TinyQwen3Moe, "num_experts_per_tok", json!(9), "at most the number of experts, 8"),
        (Preset::TinyQwen3Moe, "hidden_size", json!(0), "a whole number from 1"),
        (Preset::TinyQwen3Moe, "hidden_size", json!(1u64 << 40), "a whole number from 1"),
        (Preset::TinyQwen3Moe, "num_hidden_layers", json!(1u64 << 30), "a whole number from 1"),
        (Preset::TinyQwen3Moe, "decoder_sparse_step", json!(0), "at least 1"),
        (Preset::TinyQwen3Moe, "decoder_sparse_step", json!(99), "at least one has experts"),
        (Preset::TinyQwen3Moe, "num_key_value_heads", json!(3), "a divisor of"),
        (Preset::TinyQwen3Moe, "head_dim", json!(33), "an even number"),
        (Preset::TinyMixtral, "hidden_act", json!("tanh"), "'silu'"),
        (Preset::TinyDeepseekV3, "n_group", json!(3), "a divisor of 8 experts"),
        (Preset::TinyDeepseekV3, "n_group", json!(8), "has two experts"),
        (Preset::TinyDeepseekV3, "n_group", json!(0), "a divisor of"),
        (Preset::TinyDeepseekV3, "topk_group", json!(5), "1 to 4 groups"),
        (Preset::TinyDeepseekV3, "topk_group", json!(1), "hold at least 3 experts"),
        (Preset::TinyDeepseekV3, "scoring_func", json!("tanh"), "'softmax', 'sigmoid' or"),
        (Preset::TinyDeepseekV3, "topk_method", json!("random"), "'noaux_tc'"),
        (Preset::TinyDeepseekV3, "first_k_dense_replace", json!(4), "at least one has experts"),
        (
            Preset::TinyDeepseekV3,
            "quantization_config",
            json!({ "quant_method": "fp8", "weight_block_size": [0, 128] }),
            "two whole numbers",
        ),
        (Preset::TinyMixtral, "quantization_config", json!({ "quant_method": "exl2" }), "'fp8'"),
    ];
    for (preset, field, value, expected) in cases {
        let (dir, _checkpoint) = tiny(preset, 4);
        let mut json: Value = serde_json::from_str(&config_text(dir.path())).unwrap();
        json[field] = value.clone();
        let config = ModelConfig::from_json(&json.to_string());
        let error = config
            .and_then(|c| c.router().and(c.language()).map(|_| ()))
            .expect_err("the value is invalid");
        assert!(matches!(error, ConfigError::Invalid { .. }), "{field} = {value}: {error}");
        let text = error.to_string();
        assert!(text.contains(expected), "{field} = {value}: {text}");
    }
}

#[test]
fn a_missing_field_is_named() {
    let (dir, _checkpoint) = tiny(Preset::TinyDeepseekV3, 4);
    let needed = [
        "architectures",
        "hidden_size",
        "num_hidden_layers",
        "n_routed_experts",
        "num_experts_per_tok",
        "moe_intermediate_size",
        "intermediate_size",
        "vocab_size",
        "max_position_embeddings",
    ];
    for field in needed {
        let mut json: Value = serde_json::from_str(&config_text(dir.path())).unwrap();
        json.as_object_mut().unwrap().remove(field).unwrap();
        if field == "architectures" {
            // The model type alone is enough.
            assert!(ModelConfig::from_json(&json.to_string()).is_ok());
            json.as_object_mut().unwrap().remove("model_type").unwrap();
        }
        let config = ModelConfig::from_json(&json.to_string());
        let error = config.and_then(|c| c.language().map(|_| ())).unwrap_err().to_string();
        assert!(error.contains(field) && error.contains("is missing"), "{field}: {error}");
    }
}

#[test]
fn end_tokens_come_from_the_generation_config_where_there_is_one() {
    let (dir, checkpoint) = tiny(Preset::TinyMixtral, 1);
    assert_eq!(checkpoint.config().language().unwrap().eos_ids, [2]);
    let path = dir.path().join("generation_config.json");
    let eos = |text: &str| {
        std::fs::write(&path, text).unwrap();
        Checkpoint::open(dir.path()).map(|c| c.config().language().unwrap().eos_ids.clone())
    };
    assert_eq!(eos(r#"{"eos_token_id": [5, 7]}"#).unwrap(), [5, 7]);
    assert_eq!(eos(r#"{"eos_token_id": 9}"#).unwrap(), [9]);
    assert_eq!(eos(r#"{"do_sample": true}"#).unwrap(), [2]);
    assert_eq!(eos(r#"{"eos_token_id": "end"}"#).unwrap(), [2]);
    let warnings = Checkpoint::open(dir.path()).unwrap().warnings().join("\n");
    assert!(warnings.contains("generation_config.json") && warnings.contains("end"), "{warnings}");
}
