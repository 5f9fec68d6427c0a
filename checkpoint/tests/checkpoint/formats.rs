//! One layer of every quantisation format, written by the format's own library.

use std::fs;

use half::{bf16, f16};
use switchyard_checkpoint::{Checkpoint, DType, TensorFile, WeightFormat};

use crate::arithmetic::{difference, routed};
use crate::support::data;

/// Folders whose columns are reordered by activation, which is refused.
const REORDERED: &[&str] =
    &["ct-int4-g-idx", "gptq-int4-desc-act", "gptq-int8-asym-desc-act", "gptq-v2-int4-desc-act"];

#[test]
fn every_format_has_the_values_that_its_library_reads() {
    let mut num_seen = 0;
    let mut wrong = Vec::new();
    let entries =
        fs::read_dir(data("reference-formats")).unwrap().map(|entry| entry.unwrap().path());
    let mut folders: Vec<_> = entries.filter(|path| path.is_dir()).collect();
    folders.sort();
    for folder in folders {
        let name = folder.file_name().unwrap().to_str().unwrap();
        let checkpoint = match Checkpoint::open(&folder) {
            Ok(checkpoint) => checkpoint,
            Err(error) => {
                wrong.push(format!("{name}: {error}"));
                continue;
            }
        };
        let expert = checkpoint.expert(0, 0);
        if REORDERED.contains(&name) {
            let error = expert.unwrap_err().to_string();
            assert!(error.contains("g_idx") && error.contains("reordered"), "{name}: {error}");
            continue;
        }
        let expert = match expert.and_then(|_| checkpoint.check_experts()) {
            Ok(()) => checkpoint.expert(0, 0).unwrap(),
            Err(error) => {
                wrong.push(format!("{name}: {error}"));
                continue;
            }
        };
        let reference = TensorFile::open(folder.join("reference.safetensors")).unwrap();
        let names = ["dequant.gate", "dequant.up", "dequant.down"];
        for (matrix, dequantised) in expert.matrices().zip(names) {
            let theirs = reference.tensor(dequantised).unwrap();
            let round = |value: f32| match theirs.dtype {
                DType::Bf16 => bf16::from_f32(value).to_f32(),
                DType::F16 => f16::from_f32(value).to_f32(),
                _ => value,
            };
            let theirs = theirs.to_f32().unwrap();
            let ours: Vec<f32> = matrix.to_f32().into_iter().map(round).collect();
            let differing = ours.iter().zip(&theirs).filter(|(a, b)| !is_close(**a, **b)).count();
            // The factors of the library are rounded once more than ours.
            if differing > 0 {
                let first = ours.iter().zip(&theirs).find(|(a, b)| !is_close(**a, **b));
                wrong.push(format!(
                    "{name}: {dequantised}: {differing} of {} differ, first {first:?}",
                    ours.len()
                ));
            }
        }
        let (ours, theirs) = routed(&checkpoint, 0, &reference);
        let error = difference(&ours, &theirs);
        let format = expert.up.format();
        println!("{name}: {format}, {:?}: {error:.1e}", checkpoint.config().quantization);
        // Libraries round dequantised weights to their own type.
        if error >= 5e-3 || error.is_nan() {
            wrong.push(format!("{name}: output differs by {error:.1e}"));
        }
        let packed = matches!(format.code_bits(), 4 | 8);
        assert!(packed, "{name}: {format}");
        if let WeightFormat::F8E4m3 { .. } = format {
            assert!(expert.up.minima().is_none());
        }
        num_seen += 1;
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
    assert!(num_seen >= 30, "{num_seen} formats only");
}

/// Equal, or one rounding apart: libraries multiply in their own order.
fn is_close(a: f32, b: f32) -> bool {
    a == b || (a - b).abs() <= 0.004 * b.abs()
}
