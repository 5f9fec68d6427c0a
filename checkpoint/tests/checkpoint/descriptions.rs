//! The keys, defaults and layers of every family against `data/family-blocks/families.json`, which was checked against
//! transformers' own classes.

use std::fs;

use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use rand::{RngExt, SeedableRng};
use serde_json::{Map, Value, json};
use switchyard_checkpoint::ModelConfig;

use crate::support::data;

/// A family as `families.json` describes it, with the configuration of its folder.
struct Described {
    name: String,
    family: Value,
    config: Value,
}

impl Described {
    /// The keys of the text model.
    fn text(&mut self) -> &mut Map<String, Value> {
        let path = self.family["config"].as_str().unwrap().split('.').filter(|key| !key.is_empty());
        path.fold(&mut self.config, |object, key| &mut object[key]).as_object_mut().unwrap()
    }

    fn parse(&self) -> Result<ModelConfig, String> {
        ModelConfig::from_json(&self.config.to_string()).map_err(|error| error.to_string())
    }

    /// The spellings of one value.
    fn keys(&self, field: &str) -> Vec<String> {
        texts(&self.family[field]["keys"])
    }
}

fn texts(list: &Value) -> Vec<String> {
    list.as_array().unwrap().iter().map(|key| key.as_str().unwrap().to_owned()).collect()
}

fn described() -> Vec<Described> {
    let dir = data("family-blocks");
    let read = |path| -> Value {
        serde_json::from_str(&fs::read_to_string(dir.join(path)).unwrap()).unwrap()
    };
    let families = read("families.json".to_owned());
    let families = families["families"].as_array().unwrap().clone();
    assert!(families.len() >= 53, "{} families only", families.len());
    let described = families.into_iter().map(|family| {
        let name = family["folder"].as_str().unwrap().to_owned();
        let config = read(format!("{name}/config.json"));
        Described { name, family, config }
    });
    described.collect()
}

#[test]
fn spellings_that_a_family_does_not_use_may_contradict_and_its_own_may_not() {
    const EXPERTS: &[&str] =
        &["num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"];
    const TOP_K: &[&str] =
        &["num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts"];
    for (field, spellings) in [("num_experts", EXPERTS), ("top_k", TOP_K)] {
        for mut family in described() {
            let name = family.name.clone();
            let own = family.keys(field);
            let plain = family.parse().unwrap_or_else(|error| panic!("{name}: {error}"));
            for spelling in spellings {
                if family.text().contains_key(*spelling) {
                    continue;
                }
                family.text().insert((*spelling).to_owned(), json!(1));
                let found = family.parse();
                family.text().remove(*spelling);
                match own.iter().any(|own| own == spelling) {
                    true => assert!(
                        found.as_ref().is_err_and(|error| error.contains("contradicts")),
                        "{name}: {spelling}: {found:?}"
                    ),
                    false => {
                        let found = found.unwrap_or_else(|e| panic!("{name}: {spelling}: {e}"));
                        assert_eq!(found.num_experts, plain.num_experts, "{name}: {spelling}");
                        assert_eq!(found.top_k, plain.top_k, "{name}: {spelling}");
                    }
                }
            }
        }
    }
}

#[test]
fn shared_experts_have_their_family_s_width_with_and_without_the_keys() {
    let mut without = 0;
    for mut family in described() {
        let name = family.name.clone();
        let shared = family.family["shared"].clone();
        let expected = |family: &mut Described| -> Option<u64> {
            let text = family.text();
            Some(number(&shared["count"], text)? * number(&shared["width_each"], text)?)
        };
        let found = |family: &Described| family.parse().map(|config| config.shared_width as u64);
        if shared.is_null() {
            assert_eq!(found(&family), Ok(0), "{name}");
            continue;
        }
        let width = expected(&mut family);
        assert_eq!(found(&family).ok(), width, "{name}");
        let routed = family.keys("expert_width");
        for part in ["count", "width_each"] {
            for key in shared[part]["keys"].as_array().into_iter().flatten() {
                let key = key.as_str().unwrap();
                if !routed.iter().any(|routed| routed == key) {
                    family.text().remove(key);
                }
            }
        }
        let width = expected(&mut family);
        match width {
            Some(width) => assert_eq!(found(&family), Ok(width), "{name}, without keys"),
            None => assert!(found(&family).unwrap_err().contains("missing"), "{name}"),
        }
        without += 1;
    }
    assert!(without >= 30, "{without} families with shared experts");
}

/// A number of the description: itself, or the first key that is present, or the default.
fn number(spec: &Value, text: &Map<String, Value>) -> Option<u64> {
    if spec.is_u64() {
        return spec.as_u64();
    }
    setting(spec, text)?.as_u64()
}

fn setting<'a>(spec: &'a Value, text: &'a Map<String, Value>) -> Option<&'a Value> {
    if !spec.is_object() {
        return Some(spec);
    }
    let keys = spec["keys"].as_array().unwrap();
    let present = keys.iter().find_map(|key| text.get(key.as_str().unwrap()));
    present.or(Some(&spec["default"])).filter(|value| !value.is_null())
}

#[test]
fn layers_with_experts_follow_the_description_whatever_other_keys_say() {
    let seed = rand::random();
    println!("seed {seed}");
    let mut rng = StdRng::seed_from_u64(seed);
    for _ in 0..20 {
        for mut family in described() {
            let name = family.name.clone();
            let rule = family.family["moe_layers"].clone();
            let takes_list = rule.to_string().contains("flags");
            for (key, value) in settings(&mut rng, takes_list) {
                if key != "num_hidden_layers" && rng.random_bool(0.5) {
                    family.text().remove(key);
                } else {
                    family.text().insert(key.to_owned(), value);
                }
            }
            let expected: Vec<u32> =
                (0..LAYERS).filter(|layer| has_experts(&rule, family.text(), *layer)).collect();
            let reads_types = rule.to_string().contains("mlp_layer_types");
            let asked =
                family.text().get("mlp_layer_types").and_then(Value::as_array).map(|types| {
                    (0..LAYERS)
                        .filter(|layer| types[*layer as usize] == "sparse")
                        .collect::<Vec<u32>>()
                });
            let found = family.parse();
            // A family that does not read the key must not ignore that it asks for other layers.
            if !reads_types && !expected.is_empty() && asked.is_some_and(|asked| asked != expected)
            {
                let text = found.unwrap_err();
                assert!(text.contains("mlp_layer_types"), "{name}: {text}");
                continue;
            }
            match expected.is_empty() {
                false => assert_eq!(
                    found.map(|config| config.moe_layers()),
                    Ok(expected),
                    "{name}: {}",
                    family.config
                ),
                true => assert!(found.is_err(), "{name}: {found:?}"),
            }
        }
    }
}

const LAYERS: u32 = 6;

/// Values of every key that gives layers in some family.
fn settings(rng: &mut StdRng, takes_list: bool) -> Vec<(&'static str, Value)> {
    let mut list = |values: &[Value]| -> Value {
        (0..LAYERS).map(|_| values.choose(rng).unwrap().clone()).collect()
    };
    let types = list(&[json!("dense"), json!("sparse")]);
    let marks = list(&[json!(0), json!(1)]);
    let blocks = list(&[json!("mamba"), json!("moe"), json!("attention")]);
    let mut small = |from: u32, to: u32| json!(rng.random_range(from..=to));
    let mut settings = vec![
        ("num_hidden_layers", json!(LAYERS)),
        ("mlp_layer_types", types),
        ("layers_block_type", blocks),
        ("moe_layer_freq", if takes_list { marks } else { small(1, 3) }),
        ("decoder_sparse_step", small(1, 3)),
        ("mlp_only_layers", json!([small(0, 5), small(0, 5)])),
        ("moe_layers", json!([small(0, 5), small(0, 5)])),
        ("enable_moe_block", json!(small(0, 1) == 1)),
    ];
    for (key, from, to) in [
        ("first_k_dense_replace", 0, 4),
        ("num_dense_layers", 0, 4),
        ("dense_mlp_idx", 0, 4),
        ("expert_layer_period", 1, 3),
        ("expert_layer_offset", 0, 2),
        ("interleave_moe_layer_step", 1, 3),
        ("moe_layer_interval", 1, 3),
        ("moe_layer_start_index", 0, 3),
        ("moe_layer_end_index", 2, 5),
    ] {
        settings.push((key, small(from, to)));
    }
    settings
}

/// The rules of `families.json`.
fn has_experts(rule: &Value, text: &Map<String, Value>, layer: u32) -> bool {
    let of = |field: &str| number(&rule[field], text).unwrap_or_default() as u32;
    let listed = |field: &str| {
        setting(&rule[field], text)
            .and_then(Value::as_array)
            .is_some_and(|layers| layers.contains(&json!(layer)))
    };
    let first_key = || {
        let keys = texts(&rule["keys"]);
        keys.iter().find_map(|key| text.get(key)).and_then(Value::as_array)
    };
    let fallback = || has_experts(&rule["fallback"], text, layer);
    match rule["rule"].as_str().unwrap() {
        "all" => match rule.get("only_if") {
            Some(flag) => setting(flag, text).and_then(Value::as_bool).unwrap(),
            None => true,
        },
        "sparse_step" => (layer + 1).is_multiple_of(of("step")) && !listed("dense_layers"),
        "first_dense" => layer >= of("count"),
        "layer_types" => match first_key() {
            Some(types) => rule["moe"].as_array().unwrap().contains(&types[layer as usize]),
            None => fallback(),
        },
        // The folder's own pattern of two layers.
        "pattern" => false,
        "listed" => match first_key() {
            Some(layers) => layers.contains(&json!(layer)),
            None => fallback(),
        },
        "every" => (layer + 1).is_multiple_of(of("step")),
        "flags" => match first_key() {
            Some(marks) => marks[layer as usize] != json!(0),
            None => fallback(),
        },
        "period" => layer % of("period") == of("offset"),
        "interval" => {
            let last = setting(&rule["last"], text).and_then(Value::as_i64).unwrap();
            let last = if last < 0 { LAYERS - 1 } else { last as u32 };
            (layer + 1).is_multiple_of(of("interval")) && (of("first")..=last).contains(&layer)
        }
        other => panic!("unknown rule {other}"),
    }
}

#[test]
fn a_jamba_with_one_expert_is_dense() {
    let mut families = described();
    let jamba = families.iter_mut().find(|family| family.name == "jamba").unwrap();
    jamba.text().insert("num_local_experts".to_owned(), json!(1));
    jamba.text().remove("num_experts");
    jamba.text().insert("num_experts_per_tok".to_owned(), json!(1));
    let error = jamba.parse().unwrap_err();
    assert!(error.contains("every layer is dense"), "{error}");
}

#[test]
fn an_inkling_with_a_dense_width_has_its_experts_width_under_another_key() {
    let mut families = described();
    let inkling = families.iter_mut().find(|family| family.name == "inkling").unwrap();
    inkling.text().insert("dense_intermediate_size".to_owned(), json!(96));
    inkling.text().insert("intermediate_size".to_owned(), json!(24));
    assert_eq!(inkling.parse().unwrap().moe_intermediate, 24);
}
