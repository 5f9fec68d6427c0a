//! Generated checkpoints.

use std::fs;

use switchyard_checkpoint::{
    Checkpoint, MakeError, MakeOptions, Preset, WeightFormat, make_checkpoint, planned_bytes,
};

use crate::support::{all_tensors, config_text, tiny};

const TINY: [Preset; 4] =
    [Preset::TinyQwen3Moe, Preset::TinyMixtral, Preset::TinyDeepseekV3, Preset::MiniDeepseekV3];

#[test]
fn every_layout_opens_with_every_expert_finite_and_of_sensible_size() {
    for preset in TINY {
        for num_layers in 1..=preset.max_layers() {
            let (_dir, checkpoint) = tiny(preset, num_layers);
            let config = checkpoint.config();
            let is_deepseek = matches!(preset, Preset::TinyDeepseekV3 | Preset::MiniDeepseekV3);
            assert_eq!(config.num_layers, num_layers);
            let total: usize = all_tensors(&checkpoint).iter().map(|t| t.data.len()).sum();
            assert_eq!(total as u64, planned_bytes(preset, num_layers).unwrap());
            checkpoint.check_moe().unwrap();
            for layer in config.moe_layers() {
                let router = checkpoint.router(layer).unwrap();
                assert_eq!(router.bias.is_some(), is_deepseek);
                check_values(&router.weight.to_f32().unwrap(), config.hidden);
                let shared = checkpoint.shared_expert(layer).unwrap();
                assert_eq!(shared.is_some(), is_deepseek);
                let routed = (0..config.num_experts).map(|e| checkpoint.expert(layer, e).unwrap());
                for expert in routed.chain(shared) {
                    let shape = (expert.up.rows(), expert.up.cols());
                    assert_eq!(shape, (config.moe_intermediate, config.hidden));
                    for weight in expert.matrices() {
                        check_values(&weight.to_f32(), weight.cols());
                    }
                }
            }
        }
    }
}

/// Finite, centred, and a root mean square of 1/√fan_in within a factor of two.
fn check_values(values: &[f32], fan_in: usize) {
    assert!(values.iter().all(|v| v.is_finite()));
    let mean = values.iter().map(|v| f64::from(*v)).sum::<f64>() / values.len() as f64;
    let square = values.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>() / values.len() as f64;
    let gain = (square * fan_in as f64).sqrt();
    assert!((0.5..2.0).contains(&gain), "gain {gain}");
    assert!(mean.abs() < 0.2 * square.sqrt(), "mean {mean}, root mean square {}", square.sqrt());
}

#[test]
fn fp8_weights_are_stored_value_times_block_scale() {
    let (_dir, checkpoint) = tiny(Preset::TinyDeepseekV3, 1);
    assert_eq!(checkpoint.config().quantization.as_ref().unwrap().fp8_block, Some([128, 128]));
    let down = checkpoint.expert(0, 3).unwrap().down;
    let format = WeightFormat::F8E4m3 { block: [128, 128] };
    assert_eq!((down.format(), down.rows(), down.cols()), (format, 160, 136));
    let factors = down.scales().unwrap().to_f32();
    assert_eq!(factors.len(), 4);
    let codes = down.codes();
    assert!(factors.windows(2).all(|w| w[0] != w[1]), "blocks cannot be told apart");
    let values = down.to_f32();
    for row in 0..160 {
        for col in 0..136 {
            let stored = switchyard_checkpoint::f32_from_e4m3(codes[row * 136 + col]);
            let expected = stored * factors[row / 128 * 2 + col / 128];
            assert_eq!(values[row * 136 + col], expected, "row {row}, column {col}");
        }
    }
}

#[test]
fn the_seed_decides_the_bytes_and_sharding_does_not() {
    for preset in TINY {
        let (_dir, single) = tiny(preset, 2);
        let tensors = all_tensors(&single);
        let dir = tempfile::tempdir().unwrap();
        let mut options = MakeOptions::new(preset, 2);
        options.max_shard_bytes = 100_000;
        let mut reports = Vec::new();
        let summary =
            make_checkpoint(dir.path(), &options, &mut |done, total| reports.push((done, total)))
                .unwrap();
        let sharded = Checkpoint::open(dir.path()).unwrap();
        assert!(summary.num_shards > 2 && sharded.num_shards() == summary.num_shards);
        assert_eq!(summary.num_tensors, tensors.len());
        assert_eq!(all_tensors(&sharded), tensors, "{preset}");
        assert_eq!(sharded.fingerprint().unwrap(), single.fingerprint().unwrap());
        for entry in fs::read_dir(dir.path()).unwrap() {
            // A header of JSON comes on top of the tensors.
            assert!(entry.unwrap().metadata().unwrap().len() < 100_000 + 50_000);
        }
        assert!(reports.is_sorted(), "progress runs backwards");
        let total = summary.tensor_bytes;
        assert!(reports.iter().all(|r| r.1 == total) && reports.last() == Some(&(total, total)));

        let other_dir = tempfile::tempdir().unwrap();
        options.seed = 1;
        make_checkpoint(other_dir.path(), &options, &mut |_, _| {}).unwrap();
        let other = all_tensors(&Checkpoint::open(other_dir.path()).unwrap());
        let same = other.iter().zip(&tensors).filter(|(a, b)| a.data == b.data).count();
        assert_eq!(same, 0, "{preset}: another seed, equal tensors");
    }
}

#[test]
fn a_directory_in_use_is_refused_unless_asked() {
    let (dir, checkpoint) = tiny(Preset::TinyMixtral, 1);
    let before = all_tensors(&checkpoint);
    let note = dir.path().join("notes.txt");
    fs::write(&note, "mine").unwrap();
    let mut options = MakeOptions::new(Preset::TinyQwen3Moe, 2);
    options.max_shard_bytes = 100_000;
    let error = make_checkpoint(dir.path(), &options, &mut |_, _| {}).unwrap_err();
    assert!(matches!(error, MakeError::NotEmpty { .. }), "{error}");
    assert!(error.to_string().contains(&dir.path().display().to_string()), "{error}");
    assert_eq!(all_tensors(&Checkpoint::open(dir.path()).unwrap()), before);

    options.overwrite = true;
    make_checkpoint(dir.path(), &options, &mut |_, _| {}).unwrap();
    let sharded = Checkpoint::open(dir.path()).unwrap();
    assert!(sharded.num_shards() > 1 && config_text(dir.path()).contains("Qwen3Moe"));
    drop(sharded);
    // And back to a single file: no shard or index of the former stays.
    let mut options = MakeOptions::new(Preset::TinyMixtral, 1);
    options.overwrite = true;
    make_checkpoint(dir.path(), &options, &mut |_, _| {}).unwrap();
    let mut names: Vec<_> =
        fs::read_dir(dir.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
    names.sort();
    assert_eq!(names, ["config.json", "model.safetensors", "notes.txt"]);
    assert_eq!(all_tensors(&Checkpoint::open(dir.path()).unwrap()), before);
    assert_eq!(fs::read_to_string(note).unwrap(), "mine");
}

#[test]
fn a_disk_that_is_too_small_is_refused_before_anything_is_written() {
    let dir = tempfile::tempdir().unwrap();
    let target = dir.path().join("big");
    let needed = planned_bytes(Preset::DeepseekV3, 61).unwrap();
    let stat = rustix::fs::statvfs(dir.path()).unwrap();
    if stat.f_bavail * stat.f_frsize > needed {
        println!("SKIPPED: this disk has room for all of DeepSeek-V3");
        return;
    }
    let options = MakeOptions::new(Preset::DeepseekV3, 61);
    let error = make_checkpoint(&target, &options, &mut |_, _| {}).unwrap_err();
    let MakeError::NoSpace { found_bytes, expected_bytes, .. } = error else { panic!("{error}") };
    assert!(found_bytes < expected_bytes && expected_bytes > needed);
    assert_eq!(fs::read_dir(&target).unwrap().count(), 0);
}

#[test]
fn layers_that_a_model_does_not_have_are_refused() {
    for num_layers in [0, 49, u32::MAX] {
        let text = planned_bytes(Preset::Qwen3_30bA3b, num_layers).unwrap_err().to_string();
        assert!(text.contains(&num_layers.to_string()) && text.contains("1 to 48"), "{text}");
    }
}

/// `total_size` of the Hub's index for the first two. DeepSeek-V3's index counts one prediction layer more,
/// so its bytes were added up independently of this code. It has 671,026,419,200 parameters, as published,
/// with linear layers in fp8 and one f32 per 128×128 block.
#[test]
fn whole_models_have_their_published_size() {
    assert_eq!(planned_bytes(Preset::Qwen3_30bA3b, 48).unwrap(), 61_064_245_248);
    assert_eq!(planned_bytes(Preset::Mixtral8x7b, 32).unwrap(), 93_405_585_408);
    assert_eq!(planned_bytes(Preset::DeepseekV3, 61).unwrap(), 673_150_611_808);
}

#[test]
fn preset_names_round_trip_and_a_wrong_one_lists_them() {
    for preset in Preset::ALL {
        assert_eq!(preset.name().parse::<Preset>().unwrap(), preset);
    }
    let text = "gpt-2".parse::<Preset>().unwrap_err().to_string();
    assert!(text.contains("'gpt-2'") && text.contains("qwen3-30b-a3b"), "{text}");
}
