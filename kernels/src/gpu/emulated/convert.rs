//! Conversions of matrices, as `sy_convert` does them.

use half::{bf16, f16};

use crate::gpu::convert::{Conversion, ConvertType};

/// Runs one conversion.
///
/// # Safety
/// Source and target are valid, as large as it says, and nothing else accesses them.
pub(super) unsafe fn run(it: &Conversion) {
    let (from_type, to_type) = it.types();
    let (rows, from_cols, to_cols) = (it.rows as usize, it.from_cols as usize, it.to_cols as usize);
    for (row, col) in (0..rows).flat_map(|row| (0..to_cols).map(move |col| (row, col))) {
        let source = (col < from_cols).then_some(row * from_cols + col);
        let target = row * to_cols + col;
        // SAFETY: within the matrices, says the caller.
        unsafe {
            if to_type == ConvertType::I32 {
                let index = source.map_or(-1, |at| load_index(it.from.0, at, from_type));
                (it.to.0 as *mut i32).add(target).write(index);
            } else {
                let value = source.map_or(0.0, |at| load_float(it.from.0, at, from_type));
                store_float(it.to.0, target, to_type, value);
            }
        }
    }
}

/// # Safety
/// The matrix at `from` has element `at`.
unsafe fn load_index(from: u64, at: usize, of: ConvertType) -> i32 {
    // SAFETY: the caller's promise.
    unsafe {
        match of {
            ConvertType::I64 => {
                let wide = (from as *const i64).add(at).read();
                wide.clamp(i32::MIN.into(), i32::MAX.into()) as i32
            }
            _ => (from as *const i32).add(at).read(),
        }
    }
}

/// # Safety
/// As for [`load_index`].
unsafe fn load_float(from: u64, at: usize, of: ConvertType) -> f32 {
    // SAFETY: the caller's promise.
    unsafe {
        match of {
            ConvertType::F16 => (from as *const f16).add(at).read().to_f32(),
            ConvertType::Bf16 => (from as *const bf16).add(at).read().to_f32(),
            _ => (from as *const f32).add(at).read(),
        }
    }
}

/// # Safety
/// As for [`load_index`].
unsafe fn store_float(to: u64, at: usize, of: ConvertType, value: f32) {
    // SAFETY: the caller's promise.
    unsafe {
        match of {
            ConvertType::F16 => (to as *mut f16).add(at).write(f16::from_f32(value)),
            ConvertType::Bf16 => (to as *mut bf16).add(at).write(bf16::from_f32(value)),
            _ => (to as *mut f32).add(at).write(value),
        }
    }
}
