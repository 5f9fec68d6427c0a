//! One linear layer's weight, whatever format its tensors have.
//!
//! The tensors tell the format: their names, dtypes and shapes. Source of the formats: the code of the libraries that
//! write them (compressed-tensors 0.1x, transformers' fp8 and MXFP4 integrations, GPTQModel, AutoAWQ, ModelOpt).

mod integers;

use std::borrow::Cow;

use crate::dtype::DType;
use crate::open::Checkpoint;
use crate::tensor::{PLAIN_FLOATS, SCALES, TensorError, TensorView};
use crate::weight::{Codes, Scales, Strided, WeightFormat, WeightView};

/// The place of a matrix in a fused tensor.
#[derive(Debug, Clone, Copy)]
pub(super) struct Place {
    pub expert: usize,
    pub num_experts: usize,
    /// Gate is part 0 of 2, up part 1 of 2; a matrix of its own is part 0 of 1.
    pub part: usize,
    pub parts: usize,
    /// Rows of the parts alternate.
    pub interleaved: bool,
    /// The tensor is `[E, cols, rows]`.
    pub transposed: bool,
}

impl Place {
    /// A `rows × cols` matrix inside of `[E, parts × rows, cols]` or, transposed, `[E, cols, parts × rows]`.
    fn strided<'a>(
        &self,
        data: &'a [u8],
        size: usize,
        rows: usize,
        cols: usize,
        transposed: bool,
    ) -> Strided<'a> {
        let all_rows = self.parts * rows;
        let (first, step) =
            if self.interleaved { (self.part, self.parts) } else { (self.part * rows, 1) };
        let base = self.expert * all_rows * cols;
        match transposed {
            false => Strided {
                data,
                size,
                rows,
                cols,
                offset: base + first * cols,
                row_stride: step * cols,
                col_stride: 1,
            },
            true => Strided {
                data,
                size,
                rows,
                cols,
                offset: base + first,
                row_stride: step,
                col_stride: all_rows,
            },
        }
    }
}

impl Checkpoint {
    /// The weight `[rows, cols]` of the linear layer called `name`, in any format. Names of its tensors start with
    /// `name`, such as `{name}.weight`.
    ///
    /// # Errors
    /// [`TensorError`] that names the tensor at fault.
    pub fn linear(
        &self,
        name: &str,
        rows: usize,
        cols: usize,
    ) -> Result<WeightView<'_>, TensorError> {
        let has = |suffix: &str| self.contains(&format!("{name}.{suffix}"));
        for suffix in ["pre_quant_scale", "smooth_scale", "weight_scale_smooth", "lora_A.weight"] {
            if has(suffix) {
                return Err(TensorError::Format {
                    name: format!("{name}.{suffix}"),
                    found: "changes the result".to_owned(),
                    expected: "a checkpoint without it: it is not supported".to_owned(),
                });
            }
        }
        let part = |suffix: &str| self.tensor(&format!("{name}.{suffix}"));
        if has("weight_packed") {
            let packed = part("weight_packed")?;
            return match packed.dtype {
                DType::I32 => self.packed_integers(name, packed, rows, cols),
                _ => self.packed_floats(name, packed, rows, cols),
            };
        }
        if has("qweight") && !has("weight") {
            return self.words(name, rows, cols);
        }
        let weight = part("weight")?;
        match weight.dtype {
            DType::I8 if weight.shape == [rows, cols] => {
                self.signed_bytes(name, weight, rows, cols)
            }
            DType::I8 | DType::U8 => self.packed_floats(name, weight, rows, cols),
            _ => {
                let weight = weight.expect_shape(&[rows, cols])?.expect_dtype(STORED)?;
                self.floats(
                    weight,
                    &[&format!("{name}.weight_scale_inv"), &format!("{name}.weight_scale")],
                    Strided::whole(weight.data, size(weight.dtype), rows, cols),
                    None,
                )
            }
        }
    }

    /// The weight `[rows, cols]` of one expert in the fused tensor called `name`.
    pub(super) fn fused_linear(
        &self,
        name: &str,
        rows: usize,
        cols: usize,
        place: Place,
    ) -> Result<WeightView<'_>, TensorError> {
        let blocks = format!("{name}_blocks");
        if self.contains(&blocks) {
            return self.mxfp4_blocks(name, self.tensor(&blocks)?, rows, cols, place);
        }
        let tensor = self.tensor(name)?.expect_dtype(STORED)?;
        let shape = match place.transposed {
            false => [place.num_experts, place.parts * rows, cols],
            true => [place.num_experts, cols, place.parts * rows],
        };
        let tensor = tensor.expect_shape(&shape)?;
        let is_transposed = place.transposed;
        let codes = place.strided(tensor.data, size(tensor.dtype), rows, cols, is_transposed);
        let scales = [&*format!("{name}_scale_inv"), &*format!("{name}_scale")];
        self.floats(tensor, &scales, codes, Some((place, is_transposed)))
    }

    /// One of the two halves `[rows, cols]` of a matrix `[2 × rows, cols]` of floats.
    pub(super) fn part_of_matrix(
        &self,
        name: &str,
        rows: usize,
        cols: usize,
        part: usize,
    ) -> Result<WeightView<'_>, TensorError> {
        let tensor =
            self.tensor(name)?.expect_shape(&[2 * rows, cols])?.expect_dtype(PLAIN_FLOATS)?;
        let place = Place {
            expert: 0,
            num_experts: 1,
            part,
            parts: 2,
            interleaved: false,
            transposed: false,
        };
        let codes = place.strided(tensor.data, size(tensor.dtype), rows, cols, false);
        self.floats(tensor, &[name], codes, None)
    }

    /// Floats as they are, or fp8 with scales under one of these names.
    fn floats<'a>(
        &'a self,
        tensor: TensorView<'a>,
        scale_names: &[&str],
        codes: Strided<'a>,
        fused: Option<(Place, bool)>,
    ) -> Result<WeightView<'a>, TensorError> {
        let (rows, cols) = (codes.rows, codes.cols);
        let code_bytes = rows * cols * codes.size;
        let plain = |format| WeightView {
            rows,
            cols,
            format,
            codes: Codes::Strided(codes),
            scales: None,
            minima: None,
            tensor,
            stored_bytes: code_bytes,
        };
        match tensor.dtype {
            DType::Bf16 => return Ok(plain(WeightFormat::Bf16)),
            DType::F16 => return Ok(plain(WeightFormat::F16)),
            DType::F32 => return Ok(plain(WeightFormat::F32)),
            _ => {}
        }
        let name = scale_names.iter().find(|name| self.contains(name));
        let scale = self.tensor(name.unwrap_or(&scale_names[0]))?;
        let (block, data) = match fused {
            None => {
                let block = self.fp8_block(&scale, scale.shape, rows, cols)?;
                (block, Cow::Borrowed(scale.data))
            }
            Some((place, transposed)) => {
                self.fused_scales(&scale, rows, cols, place, transposed)?
            }
        };
        let stored_bytes = code_bytes + data.len();
        let scales = Scales { dtype: scale_dtype(&scale)?, data, factor: 1.0 };
        let format = WeightFormat::F8E4m3 { block };
        Ok(WeightView { scales: Some(scales), stored_bytes, ..plain(format) })
    }

    /// The block size that fits the shape of fp8 scales: that of the configuration, or one scale per tensor, per row,
    /// or per row and group of 32 (MXFP8).
    fn fp8_block(
        &self,
        scale: &TensorView<'_>,
        shape: &[usize],
        rows: usize,
        cols: usize,
    ) -> Result<[usize; 2], TensorError> {
        let quantization = self.config().quantization.as_ref();
        let declared = quantization.and_then(|q| q.fp8_block);
        let is_static = quantization.is_some_and(|q| q.static_activations);
        let fits = |[r, c]: [usize; 2]| *shape == [rows.div_ceil(r), cols.div_ceil(c)];
        if let Some(block) = declared.filter(|block| fits(*block)) {
            return Ok(block);
        }
        if shape.iter().all(|dim| *dim == 1) {
            return Ok([rows, cols]);
        }
        if matches!(shape, [r] | [r, 1] if *r == rows) {
            return Ok([1, cols]);
        }
        if matches!(scale.dtype, DType::U8 | DType::F8E8m0) && fits([1, MX_GROUP]) {
            return Ok([1, MX_GROUP]);
        }
        if declared.is_none() && !is_static && fits(crate::FP8_BLOCK) {
            return Ok(crate::FP8_BLOCK);
        }
        let expected = match (declared, is_static) {
            (Some([r, c]), _) => format!(
                "[{}, {}], for scale blocks of {r} x {c} as the configuration declares",
                rows.div_ceil(r),
                cols.div_ceil(c)
            ),
            (None, true) => format!(
                "one scale or [{rows}, 1], since the configuration declares static activation scales \
                 and no weight_block_size"
            ),
            (None, false) => {
                format!("one scale, [{rows}, 1], or a weight_block_size in the configuration")
            }
        };
        Err(TensorError::Format {
            name: scale.name.to_owned(),
            found: format!("has shape {shape:?}"),
            expected,
        })
    }

    /// Block and values of one expert's scales in a fused tensor of scales.
    fn fused_scales<'a>(
        &self,
        scale: &TensorView<'a>,
        rows: usize,
        cols: usize,
        place: Place,
        transposed: bool,
    ) -> Result<([usize; 2], Cow<'a, [u8]>), TensorError> {
        let format_error = || TensorError::Format {
            name: scale.name.to_owned(),
            found: format!("has shape {:?}", scale.shape),
            expected: format!("[{}, rows, columns] of scales", place.num_experts),
        };
        let &[experts, a, b] = scale.shape else { return Err(format_error()) };
        let (all_rows, scale_cols) = if transposed { (b, a) } else { (a, b) };
        // One scale for both parts serves each of them.
        let (part_rows, place) = match all_rows {
            1 => (1, Place { part: 0, parts: 1, ..place }),
            n if n.is_multiple_of(place.parts) => (n / place.parts, place),
            _ => return Err(format_error()),
        };
        if experts != place.num_experts {
            return Err(format_error());
        }
        // Interleaved rows share blocks only if each row has its own scale.
        if place.interleaved && place.parts > 1 && part_rows != rows {
            return Err(format_error());
        }
        let block = self.fp8_block(scale, &[part_rows, scale_cols], rows, cols)?;
        if place.parts > 1 && !rows.is_multiple_of(block[0]) && block[0] != 1 {
            return Err(TensorError::Format {
                name: scale.name.to_owned(),
                found: format!(
                    "has blocks of {} rows, which gate and up of {rows} rows share",
                    block[0]
                ),
                expected: "blocks that end where the gate ends".to_owned(),
            });
        }
        let grid = place.strided(scale.data, size(scale.dtype), part_rows, scale_cols, transposed);
        Ok((block, grid.row_major()))
    }

    /// NVFP4 and MXFP4 of compressed-tensors, ModelOpt and DeepSeek-V4: 4-bit floats, two in a byte along the inputs.
    fn packed_floats<'a>(
        &'a self,
        name: &str,
        packed: TensorView<'a>,
        rows: usize,
        cols: usize,
    ) -> Result<WeightView<'a>, TensorError> {
        if !cols.is_multiple_of(2) {
            return Err(odd_size(packed.name, "columns", cols, 2));
        }
        let packed =
            packed.expect_shape(&[rows, cols / 2])?.expect_dtype(&[DType::U8, DType::I8])?;
        let inverse = format!("{name}.weight_scale_inv");
        let scale = match self.contains(&inverse) {
            true => self.tensor(&inverse)?,
            false => self.tensor(&format!("{name}.weight_scale"))?,
        };
        let (group, _) = self.groups_of_rows(&scale, rows, cols)?;
        let dtype = scale_dtype(&scale)?;
        let single = |suffix: &str| -> Result<Option<f32>, TensorError> {
            let full = format!("{name}.{suffix}");
            if !self.contains(&full) {
                return Ok(None);
            }
            let values = self.tensor(&full)?.expect_dtype(&[DType::F32])?.to_f32()?;
            match values.as_slice() {
                [value] if value.is_finite() && *value != 0.0 => Ok(Some(*value)),
                _ => Err(TensorError::Format {
                    name: full,
                    found: format!("holds {:?}", &values[..values.len().min(4)]),
                    expected: "one number other than 0".to_owned(),
                }),
            }
        };
        let global = single("weight_global_scale")?;
        let second = single("weight_scale_2")?;
        let (factor, expected_group) = match (dtype, global, second) {
            (DType::F8E4m3, Some(divisor), None) => (1.0 / divisor, NV_GROUP),
            (DType::F8E4m3, None, Some(factor)) => (factor, NV_GROUP),
            (DType::F8E8m0, None, None) => (1.0, MX_GROUP),
            _ => {
                return Err(TensorError::Format {
                    name: scale.name.to_owned(),
                    found: format!(
                        "is {dtype} with {} scale(s) of the whole tensor beside it",
                        [global, second].iter().flatten().count()
                    ),
                    expected:
                        "F8_E8M0 alone (MXFP4), or F8_E4M3 with one of 'weight_global_scale' and \
                               'weight_scale_2' (NVFP4)"
                            .to_owned(),
                });
            }
        };
        if group != expected_group {
            return Err(TensorError::Format {
                name: scale.name.to_owned(),
                found: format!("has shape {:?}", scale.shape),
                expected: format!("a scale for each {expected_group} of {cols} columns"),
            });
        }
        let scales = Scales { dtype, data: Cow::Borrowed(scale.data), factor };
        Ok(WeightView {
            rows,
            cols,
            format: WeightFormat::Fp4 { group },
            codes: Codes::Strided(Strided::whole(packed.data, 1, rows, cols / 2)),
            stored_bytes: packed.data.len() + scales.data.len(),
            scales: Some(scales),
            minima: None,
            tensor: packed,
        })
    }

    /// gpt-oss: `[E, rows, groups, 16]` bytes of 32 values, `[E, rows, groups]` scales.
    fn mxfp4_blocks<'a>(
        &'a self,
        name: &str,
        blocks: TensorView<'a>,
        rows: usize,
        cols: usize,
        place: Place,
    ) -> Result<WeightView<'a>, TensorError> {
        if !cols.is_multiple_of(MX_GROUP) {
            return Err(TensorError::Format {
                name: blocks.name.to_owned(),
                found: format!("has {cols} columns"),
                expected: format!("a multiple of {MX_GROUP}"),
            });
        }
        let groups = cols / MX_GROUP;
        let shape = [place.num_experts, place.parts * rows, groups, MX_GROUP / 2];
        let blocks = blocks.expect_shape(&shape)?.expect_dtype(&[DType::U8])?;
        let scale = self
            .tensor(&format!("{name}_scales"))?
            .expect_shape(&shape[..3])?
            .expect_dtype(&[DType::U8, DType::F8E8m0])?;
        let codes = place.strided(blocks.data, 1, rows, cols / 2, false);
        let scales = place.strided(scale.data, 1, rows, groups, false).row_major();
        Ok(WeightView {
            rows,
            cols,
            format: WeightFormat::Fp4 { group: MX_GROUP },
            codes: Codes::Strided(codes),
            stored_bytes: rows * (cols / 2 + groups),
            scales: Some(Scales { dtype: DType::F8E8m0, data: scales, factor: 1.0 }),
            minima: None,
            tensor: blocks,
        })
    }
}

/// The error for a dimension that packed words do not divide.
fn odd_size(name: &str, what: &str, number: usize, per_word: usize) -> TensorError {
    TensorError::Format {
        name: name.to_owned(),
        found: format!("packs a matrix with {number} {what}"),
        expected: format!("a multiple of {per_word}"),
    }
}

/// The dtype of scales; bytes without a sign are powers of two.
fn scale_dtype(scale: &TensorView<'_>) -> Result<DType, TensorError> {
    match scale.dtype {
        DType::U8 => Ok(DType::F8E8m0),
        _ => scale.expect_dtype(SCALES).map(|scale| scale.dtype),
    }
}

fn size(dtype: DType) -> usize {
    dtype.size_bytes().unwrap_or(1)
}

/// Values that share a scale in MXFP4 and MXFP8 (OCP Microscaling Formats 1.0).
const MX_GROUP: usize = 32;
/// Values that share a scale in NVFP4.
const NV_GROUP: usize = 16;
/// Dtypes of weights without packing.
const STORED: &[DType] = &[DType::Bf16, DType::F16, DType::F32, DType::F8E4m3];
