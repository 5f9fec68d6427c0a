//! The reference model against transformers' outputs and against a naive implementation.

use std::collections::BTreeMap;

use checkpoint::Checkpoint;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use serde_json::{Value, json};
use switchyard_reference_model::model::{ForwardError, LoadError};
use switchyard_reference_model::{
    GenerateOptions, Generator, LocalExperts, LogitsOf, MoeBlock, MoeRecord, Qwen3Moe,
};

use crate::common::naive::Naive;
use crate::common::{
    Failing, Stored, data, difference, golden_tensors, goldens, seed, tiny_moe, write_checkpoint,
};

#[test]
fn greedy_tokens_equal_the_reference_for_every_prompt() {
    let checkpoint = tiny_moe();
    let mut generator =
        Generator::open(&checkpoint, LocalExperts::new(checkpoint.clone())).unwrap();
    for golden in goldens() {
        let new = &golden.greedy[golden.ids.len()..];
        let options = GenerateOptions { max_new_tokens: 64, ..GenerateOptions::default() };
        let (mut streamed, mut text) = (Vec::new(), String::new());
        let mut on_token = |event: switchyard_reference_model::TokenEvent<'_>| {
            assert_eq!(event.idx, streamed.len());
            streamed.push(event.id);
            text.push_str(event.text);
        };
        let generation = generator.generate(&golden.text, &options, &mut on_token).unwrap();
        assert_eq!(generation.prompt_ids, golden.ids, "{}", golden.text);
        assert_eq!(generation.token_ids, new, "{}", golden.text);
        assert_eq!(streamed, new);
        assert_eq!(text, generation.text);
        assert_eq!(format!("{}{}", golden.text, generation.text), golden.text_out);
        assert_eq!(generation.timings.decode.len(), new.len() - 1);
    }
}

#[test]
fn prompt_logits_match_the_reference() {
    let checkpoint = tiny_moe();
    let mut model = Qwen3Moe::load(&checkpoint).unwrap();
    let mut experts = LocalExperts::new(checkpoint);
    let reference = golden_tensors();
    let mut worst = 0.0f32;
    for (idx, golden) in goldens().iter().enumerate() {
        let mut cache = model.new_cache();
        let logits =
            model.forward(&golden.ids, &mut cache, LogitsOf::All, &mut experts, None).unwrap();
        let expected = reference.tensor(&format!("p{idx}.logits")).unwrap().to_f32().unwrap();
        let (difference, _) = difference(&logits, &expected);
        assert!(difference < 2e-4, "prompt {idx}: {difference}");
        worst = worst.max(difference);
    }
    println!("largest difference of a logit: {worst:e}");
}

#[test]
fn moe_blocks_match_the_reference_inside_the_model_and_alone() {
    let checkpoint = tiny_moe();
    let mut model = Qwen3Moe::load(&checkpoint).unwrap();
    let mut experts = LocalExperts::new(checkpoint.clone());
    let reference = golden_tensors();
    let read = |name: &str| reference.tensor(name).unwrap().to_f32().unwrap();
    let mut worst = 0.0f32;
    for (idx, golden) in goldens().iter().take(2).enumerate() {
        let mut seen = BTreeMap::new();
        let mut observer = |record: &MoeRecord<'_>| {
            assert_eq!(record.topk_idx.len(), golden.ids.len() * record.top_k);
            seen.insert(record.layer, (record.input.to_vec(), record.output.to_vec()));
        };
        let (mut cache, all) = (model.new_cache(), LogitsOf::All);
        model.forward(&golden.ids, &mut cache, all, &mut experts, Some(&mut observer)).unwrap();
        assert_eq!(seen.keys().copied().collect::<Vec<_>>(), checkpoint.config().moe_layers());
        for (layer, (input, output)) in &seen {
            let expected_in = read(&format!("p{idx}.l{layer}.mlp_in"));
            let expected_out = read(&format!("p{idx}.l{layer}.mlp_out"));
            let mut block = MoeBlock::load(&checkpoint, *layer).unwrap();
            let mut alone = vec![f32::NAN; expected_in.len()];
            block.forward(&expected_in, &mut alone, &mut experts, None).unwrap();
            for (found, expected) in
                [(input, &expected_in), (output, &expected_out), (&alone, &expected_out)]
            {
                let (_, relative) = difference(found, expected);
                assert!(relative < 1e-4, "prompt {idx} layer {layer}: {relative}");
                worst = worst.max(relative);
            }
        }
    }
    println!("largest relative difference at a block: {worst:e}");
}

#[test]
fn a_cached_decode_equals_a_full_prefill() {
    let checkpoint = tiny_moe();
    let mut model = Qwen3Moe::load(&checkpoint).unwrap();
    let mut experts = LocalExperts::new(checkpoint.clone());
    let vocab = checkpoint.config().language().unwrap().vocab;
    let mut rng = StdRng::seed_from_u64(seed());
    // Beyond one growth of the cache.
    let tokens: Vec<u32> = (0..90).map(|_| rng.random_range(0..vocab as u32)).collect();
    let mut cache = model.new_cache();
    let full = model.forward(&tokens, &mut cache, LogitsOf::All, &mut experts, None).unwrap();
    let mut cache = model.new_cache();
    let mut rest = &tokens[..];
    while !rest.is_empty() {
        let (chunk, tail) = rest.split_at(rng.random_range(1..=7).min(rest.len()));
        let logits = model.forward(chunk, &mut cache, LogitsOf::All, &mut experts, None).unwrap();
        let end = tokens.len() - tail.len();
        assert_eq!(cache.len(), end);
        let expected = &full[(end - chunk.len()) * vocab..end * vocab];
        let (difference, _) = difference(&logits, expected);
        assert!(difference < 1e-4, "up to token {end}: {difference}");
        rest = tail;
    }
    // Going back and taking the last token again gives the same.
    cache.truncate(tokens.len() - 1);
    let last = tokens[tokens.len() - 1..].to_vec();
    let logits = model.forward(&last, &mut cache, LogitsOf::Last, &mut experts, None).unwrap();
    assert_eq!(logits.len(), vocab);
    let (difference, _) = difference(&logits, &full[(tokens.len() - 1) * vocab..]);
    assert!(difference < 1e-4, "{difference}");
}

#[test]
fn dense_layers_biases_and_a_head_of_its_own_match_the_naive_model() {
    let mut rng = StdRng::seed_from_u64(seed());
    for (tied, bias, renormalise) in [(false, true, false), (true, false, true)] {
        let config = json!({
            "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 24, "intermediate_size": 40,
            "moe_intermediate_size": 12, "num_hidden_layers": 4, "num_attention_heads": 6,
            "num_key_value_heads": 3, "head_dim": 10, "num_experts": 6, "num_experts_per_tok": 2,
            "norm_topk_prob": renormalise, "attention_bias": bias, "vocab_size": 31,
            "tie_word_embeddings": tied, "decoder_sparse_step": 2, "mlp_only_layers": [3],
            "max_position_embeddings": 20, "rope_theta": 500.0, "rms_norm_eps": 1e-5,
            "eos_token_id": [3, 5],
        });
        let dir = tempfile::tempdir().unwrap();
        let checkpoint = write_checkpoint(dir.path(), &config, &random_qwen3(&mut rng, &config));
        let naive = Naive { checkpoint: &checkpoint, dense_layers: vec![0, 2, 3], has_bias: bias };
        let tokens: Vec<u32> = (0..20).map(|_| rng.random_range(0..31)).collect();
        let expected = naive.logits(&tokens);
        let mut model = Qwen3Moe::load(&checkpoint).unwrap();
        let mut experts = LocalExperts::new(checkpoint.clone());
        let mut cache = model.new_cache();
        let logits = model.forward(&tokens, &mut cache, LogitsOf::All, &mut experts, None).unwrap();
        let (_, relative) = difference(&logits, &expected);
        assert!(relative < 1e-4, "tied {tied}: {relative}");
    }
}

/// Every tensor of layers 0, 2, 3 dense and 1 sparse.
fn random_qwen3(rng: &mut StdRng, config: &Value) -> Vec<Stored> {
    let num = |key: &str| config[key].as_u64().unwrap() as usize;
    let (hidden, vocab, head) = (num("hidden_size"), num("vocab_size"), num("head_dim"));
    let mut tensors = Vec::new();
    let mut add = |name: String, shape: &[usize], center: f32| {
        tensors.push(Stored::random(rng, name, shape, center, 0.4));
    };
    add("model.embed_tokens.weight".into(), &[vocab, hidden], 0.0);
    add("model.norm.weight".into(), &[hidden], 1.0);
    if !config["tie_word_embeddings"].as_bool().unwrap() {
        add("lm_head.weight".into(), &[vocab, hidden], 0.0);
    }
    let has_bias = config["attention_bias"].as_bool().unwrap();
    for layer in 0..num("num_hidden_layers") {
        let prefix = format!("model.layers.{layer}");
        add(format!("{prefix}.input_layernorm.weight"), &[hidden], 1.0);
        add(format!("{prefix}.post_attention_layernorm.weight"), &[hidden], 1.0);
        let (q, kv) = (num("num_attention_heads") * head, num("num_key_value_heads") * head);
        for (name, out, inner) in
            [("q", q, hidden), ("k", kv, hidden), ("v", kv, hidden), ("o", hidden, q)]
        {
            add(format!("{prefix}.self_attn.{name}_proj.weight"), &[out, inner], 0.0);
            if has_bias {
                add(format!("{prefix}.self_attn.{name}_proj.bias"), &[out], 0.0);
            }
        }
        add(format!("{prefix}.self_attn.q_norm.weight"), &[head], 1.0);
        add(format!("{prefix}.self_attn.k_norm.weight"), &[head], 1.0);
        let mut swiglu = |prefix: String, width: usize| {
            add(format!("{prefix}.gate_proj.weight"), &[width, hidden], 0.0);
            add(format!("{prefix}.up_proj.weight"), &[width, hidden], 0.0);
            add(format!("{prefix}.down_proj.weight"), &[hidden, width], 0.0);
        };
        if layer == 1 {
            for expert in 0..num("num_experts") {
                swiglu(format!("{prefix}.mlp.experts.{expert}"), num("moe_intermediate_size"));
            }
            add(format!("{prefix}.mlp.gate.weight"), &[num("num_experts"), hidden], 0.0);
        } else {
            swiglu(format!("{prefix}.mlp"), num("intermediate_size"));
        }
    }
    tensors
}

#[test]
fn a_failed_pass_names_the_layer_and_can_be_repeated() {
    let checkpoint = tiny_moe();
    let mut model = Qwen3Moe::load(&checkpoint).unwrap();
    let golden = &goldens()[0];
    let (start, next) = golden.ids.split_at(4);
    let mut experts = Failing { inner: LocalExperts::new(checkpoint), calls_left: usize::MAX };
    let mut cache = model.new_cache();
    model.forward(start, &mut cache, LogitsOf::Last, &mut experts, None).unwrap();
    for failing_layer in 0..4 {
        experts.calls_left = failing_layer;
        match model.forward(next, &mut cache, LogitsOf::Last, &mut experts, None) {
            Err(ForwardError::Backend(error)) => {
                assert_eq!(error.layer(), failing_layer as u32);
                let message = error.to_string();
                assert!(message.contains(&format!("layer {failing_layer}")), "{message}");
                assert!(message.contains("no live replica"), "{message}");
            }
            other => panic!("{other:?}"),
        }
        assert_eq!(cache.len(), start.len());
    }
    experts.calls_left = usize::MAX;
    let again = model.forward(next, &mut cache, LogitsOf::All, &mut experts, None).unwrap();
    let expected = golden_tensors().tensor("p0.logits").unwrap().to_f32().unwrap();
    let (difference, _) = difference(&again, &expected[start.len() * 2048..]);
    assert!(difference < 2e-4, "{difference}");
}

#[test]
fn bad_input_is_a_clear_error() {
    let checkpoint = tiny_moe();
    let mut model = Qwen3Moe::load(&checkpoint).unwrap();
    let mut experts = LocalExperts::new(checkpoint);
    let mut cache = model.new_cache();
    let mut run = |tokens: &[u32]| {
        let result = model.forward(tokens, &mut cache, LogitsOf::Last, &mut experts, None);
        result.unwrap_err().to_string()
    };
    assert!(run(&[]).contains("no tokens"));
    assert_eq!(run(&[1, 2048]), "token 1 has id 2048, but the vocabulary has 2048 entries");
    let message = run(&[1; 1025]);
    assert!(message.contains("1025") && message.contains("1024"), "{message}");
    assert!(cache.is_empty());
}

#[test]
fn settings_that_are_not_implemented_are_refused() {
    let base: Value =
        serde_json::from_str(&std::fs::read_to_string(data("tiny-moe/config.json")).unwrap())
            .unwrap();
    let load = |changes: Value| {
        let mut config = base.clone();
        let fields = changes.as_object().unwrap().clone();
        config.as_object_mut().unwrap().extend(fields);
        let dir = tempfile::tempdir().unwrap();
        let checkpoint = write_checkpoint(dir.path(), &config, &[]);
        Qwen3Moe::load(&checkpoint as &Checkpoint).unwrap_err()
    };
    let yarn = json!({"rope_parameters": {"rope_theta": 1e4, "rope_type": "yarn"}});
    assert!(matches!(load(yarn), LoadError::Unsupported { setting: "rope_type", .. }));
    let window = json!({"use_sliding_window": true, "sliding_window": 128});
    assert!(matches!(load(window), LoadError::Unsupported { setting: "sliding_window", .. }));
    let mixtral = json!({
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "num_local_experts": 16,
        "intermediate_size": 128,
    });
    assert!(matches!(load(mixtral), LoadError::Architecture { .. }));
    match load(json!({})) {
        LoadError::Tensor(error) => assert!(error.to_string().contains("model."), "{error}"),
        other => panic!("{other}"),
    }
}
