//! One layer of every quantisation format, written by the format's own library.

use std::fs;

use half::{bf16, f16};
use switchyard_checkpoint::{Checkpoint, DType, TensorFile, WeightFormat};

use crate::arithmetic::{difference, routed_rounded};
use crate::support::data;

/// Folders whose columns are reordered by activation, so that the matrices are dequantised at load.
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
        let expert = match checkpoint.expert(0, 0).and_then(|_| checkpoint.check_experts()) {
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
            let ours: Vec<f32> =
                matrix.to_f32().into_iter().map(|value| round(theirs.dtype, value)).collect();
            let theirs = theirs.to_f32().unwrap();
            assert_eq!(matrix.is_reordered(), REORDERED.contains(&name), "{name}: {dequantised}");
            // Rounded to the library's type, ours are the library's bits. Zeros of either sign are equal.
            let differing = ours.iter().zip(&theirs).filter(|(a, b)| a != b).count();
            if differing > 0 {
                let first = ours.iter().zip(&theirs).find(|(a, b)| a != b);
                wrong.push(format!(
                    "{name}: {dequantised}: {differing} of {} differ, first {first:?}",
                    ours.len()
                ));
            }
        }
        let dtype = reference.tensor(names[0]).unwrap().dtype;
        let (ours, theirs) = routed_rounded(&checkpoint, 0, &reference, &|v| round(dtype, v));
        let error = difference(&ours, &theirs);
        let format = expert.up.format();
        println!("{name}: {format}, {:?}: {error:.1e}", checkpoint.config().quantization);
        if error >= 1e-5 || error.is_nan() {
            wrong.push(format!("{name}: output differs by {error:.1e}"));
        }
        let bits = if REORDERED.contains(&name) { 16 } else { format.code_bits().min(8) };
        assert_eq!(format.code_bits(), bits, "{name}: {format}");
        if let WeightFormat::F8E4m3 { .. } = format {
            assert!(expert.up.minima().is_none());
        }
        num_seen += 1;
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
    assert!(num_seen >= 36, "{num_seen} formats only");
}

/// Libraries round dequantised weights to a type of their own.
fn round(dtype: DType, value: f32) -> f32 {
    match dtype {
        DType::Bf16 => bf16::from_f32(value).to_f32(),
        DType::F16 => f16::from_f32(value).to_f32(),
        _ => value,
    }
}
