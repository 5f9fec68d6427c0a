//! One layer of every family, written by transformers' own classes.

use std::fs;
use std::path::PathBuf;

use serde_json::json;
use switchyard_checkpoint::{Checkpoint, Family, ModelConfig, TensorFile};

use crate::arithmetic::{difference, routed};
use crate::support::data;

fn folders() -> Vec<PathBuf> {
    let entries = fs::read_dir(data("family-blocks")).unwrap().map(|entry| entry.unwrap().path());
    let mut folders: Vec<PathBuf> = entries.filter(|path| path.is_dir()).collect();
    folders.sort();
    folders
}

#[test]
fn the_experts_of_every_family_compute_what_transformers_computes() {
    let mut seen = Vec::new();
    let mut wrong = Vec::new();
    for folder in folders() {
        let name = folder.file_name().unwrap().to_str().unwrap();
        let checkpoint = match Checkpoint::open(&folder) {
            Ok(checkpoint) => checkpoint,
            Err(error) => {
                wrong.push(format!("{name}: {error}"));
                continue;
            }
        };
        let layers = checkpoint.config().moe_layers();
        let stored = layers.into_iter().find(|layer| checkpoint.expert(*layer, 0).is_ok());
        let Some(layer) = stored else {
            let layer = checkpoint.config().moe_layers()[0];
            wrong.push(format!("{name}: {}", checkpoint.expert(layer, 0).unwrap_err()));
            continue;
        };
        let reference = TensorFile::open(folder.join("reference.safetensors")).unwrap();
        let (ours, theirs) = routed(&checkpoint, layer, &reference);
        let error = difference(&ours, &theirs);
        println!(
            "{name}: layer {layer}, {}: {error:.1e}",
            checkpoint.config().arithmetic.activation
        );
        if error >= 1e-5 || error.is_nan() {
            wrong.push(format!("{name}: differs by {error:.1e}"));
        }
        seen.push(checkpoint.config().family.model_type);
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
    seen.sort_unstable();
    seen.dedup();
    assert!(seen.len() >= 53, "{} families only", seen.len());
}

#[test]
fn the_table_of_families_has_no_two_rows_with_one_name() {
    let mut names: Vec<&str> = Family::ALL.iter().map(|family| family.model_type).collect();
    let rows = names.len();
    names.sort_unstable();
    names.dedup();
    assert_eq!(names.len(), rows);
    for family in Family::ALL {
        assert_eq!(Family::by_model_type(family.model_type), Some(family));
        assert!(Family::by_class(family.class_name()).is_none_or(|found| found == family));
    }
}

#[test]
fn families_with_other_arithmetic_are_refused_by_name() {
    for (model_type, class) in [
        ("beam", "BeamForCausalLM"),
        ("ernie4_5_vl_moe", "Ernie4_5_VLMoeForConditionalGeneration"),
        ("inkling2", "Inkling2ForConditionalGeneration"),
        ("longcat_flash", "LongcatFlashForCausalLM"),
        ("muse_spark", "MuseSparkForConditionalGeneration"),
        ("step3p7", "Step3p7ForConditionalGeneration"),
    ] {
        let plain = json!({"model_type": model_type, "hidden_size": 64});
        let nested = json!({
            "architectures": [class],
            "model_type": model_type,
            "text_config": {"model_type": format!("{model_type}_text"), "hidden_size": 64},
        });
        for (config, name) in [(plain, model_type), (nested, class)] {
            let error = ModelConfig::from_json(&config.to_string()).unwrap_err().to_string();
            let expected = format!("architecture '{name}' is not supported");
            assert!(error.starts_with(&expected), "{model_type}: {error}");
        }
    }
}

#[test]
fn the_documentation_lists_every_family() {
    let text = fs::read_to_string(data("../docs/reference/checkpoints.md")).unwrap();
    let listed: Vec<&str> = text
        .lines()
        .filter_map(|line| line.strip_prefix("| `")?.split_once("` | ").map(|(name, _)| name))
        .filter(|name| Family::by_model_type(name).is_some())
        .collect();
    let table: Vec<&str> = Family::ALL.iter().map(|family| family.model_type).collect();
    assert_eq!(listed, table);
}
