//! One linear layer's weight, whatever format its tensors have.
//!
//! The tensors tell the format: their names, dtypes and shapes. Source of the formats: the code of the libraries that
//! write them (compressed-tensors 0.1x, transformers' fp8 and MXFP4 integrations, GPTQModel, AutoAWQ, ModelOpt).

use std::borrow::Cow;

use crate::dtype::DType;
use crate::open::Checkpoint;
use crate::tensor::{PLAIN_FLOATS, SCALES, TensorError, TensorView};
use crate::weight::{
    Codes, Scales, Strided, WeightFormat, WeightView, ZeroOrder, unpack_awq, unpack_gptq,
    unpack_zeros,
};

/// Where a matrix lies in a fused tensor.
#[derive(Debug, Clone, Copy)]
pub(super) struct Place {
    pub expert: usize,
    pub num_experts: usize,
    /// Gate is part 0 of 2, up part 1 of 2; a matrix of its own is part 0 of 1.
    pub part: usize,
    pub parts: usize,
    /// Rows of the parts alternate.
    pub interleaved: bool,
    /// The tensor is `[E, cols, rows]`, where its shape does not tell.
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
        let straight = [place.num_experts, place.parts * rows, cols];
        let transposed = [place.num_experts, cols, place.parts * rows];
        let is_transposed = match (tensor.shape == straight, tensor.shape == transposed) {
            (true, true) => place.transposed,
            (true, false) => false,
            (false, true) => true,
            (false, false) => {
                let expected = if place.transposed { &transposed } else { &straight };
                return tensor.expect_shape(expected).and(Err(unreachable_shape(name)));
            }
        };
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
        let grid = place.strided(scale.data, size(scale.dtype), part_rows, scale_cols, transposed);
        Ok((block, grid.row_major()))
    }

    /// compressed-tensors `pack-quantized`: words along the inputs, scales per row and group.
    fn packed_integers<'a>(
        &'a self,
        name: &str,
        packed: TensorView<'a>,
        rows: usize,
        cols: usize,
    ) -> Result<WeightView<'a>, TensorError> {
        let bits = [4, 8].into_iter().find(|bits| {
            (cols * bits).is_multiple_of(32) && packed.shape == [rows, cols * bits / 32]
        });
        let Some(bits) = bits else {
            return Err(TensorError::Format {
                name: packed.name.to_owned(),
                found: format!("has shape {:?}", packed.shape),
                expected: format!("[{rows}, {cols} × bits / 32] with 4 or 8 bits"),
            });
        };
        let scale = self.tensor(&format!("{name}.weight_scale"))?;
        let (group, groups) = self.groups(&scale, rows, cols)?;
        self.sequential_groups(&format!("{name}.weight_g_idx"), group, cols)?;
        let zeros = self.contains(&format!("{name}.weight_zero_point")).then(|| {
            let zeros = self.tensor(&format!("{name}.weight_zero_point"))?;
            let middle = 1 << (bits - 1);
            match zeros.dtype {
                DType::I8 => {
                    let zeros = zeros.expect_shape(&[rows, groups])?;
                    Ok(zeros.data.iter().map(|zero| i32::from(*zero as i8) + middle).collect())
                }
                _ => {
                    let shape = [rows.div_ceil(32 / bits), groups];
                    let zeros = zeros.expect_shape(&shape)?.expect_dtype(&[DType::I32])?;
                    let order = ZeroOrder::CompressedTensors;
                    let zeros = unpack_zeros(zeros.data, bits, rows, groups, order, 0);
                    Ok::<Vec<i32>, TensorError>(zeros.into_iter().map(i32::from).collect())
                }
            }
        });
        let zeros = zeros.transpose()?;
        let scales =
            Scales { dtype: scale_dtype(&scale)?, data: Cow::Borrowed(scale.data), factor: 1.0 };
        let codes = match bits {
            4 => Codes::Strided(Strided::whole(packed.data, 1, rows, cols / 2)),
            _ => Codes::Unpacked(packed.data.iter().map(|code| code ^ 0x80).collect()),
        };
        Ok(integers(packed, bits, [rows, cols], group, codes, scales, zeros))
    }

    /// compressed-tensors `int-quantized`: signed bytes, scales per row or group.
    fn signed_bytes<'a>(
        &'a self,
        name: &str,
        weight: TensorView<'a>,
        rows: usize,
        cols: usize,
    ) -> Result<WeightView<'a>, TensorError> {
        let weight = weight.expect_shape(&[rows, cols])?;
        let scale = self.tensor(&format!("{name}.weight_scale"))?;
        let (group, groups) = self.groups(&scale, rows, cols)?;
        let zero_name = format!("{name}.weight_zero_point");
        let zeros = match self.contains(&zero_name) {
            false => None,
            true => {
                let zeros = self.tensor(&zero_name)?.expect_dtype(&[DType::I8])?;
                if zeros.num_elements() != rows * groups {
                    return Err(zeros
                        .expect_shape(&[rows, groups])
                        .err()
                        .unwrap_or_else(|| unreachable_shape(&zero_name)));
                }
                Some(zeros.data.iter().map(|zero| i32::from(*zero as i8) + 128).collect())
            }
        };
        let scales =
            Scales { dtype: scale_dtype(&scale)?, data: Cow::Borrowed(scale.data), factor: 1.0 };
        let codes = Codes::Strided(Strided::whole(weight.data, 1, rows, cols));
        Ok(integers(weight, 8, [rows, cols], group, codes, scales, zeros))
    }

    /// GPTQ and AWQ: words, scales and zero points with the outputs as columns.
    fn words<'a>(
        &'a self,
        name: &str,
        rows: usize,
        cols: usize,
    ) -> Result<WeightView<'a>, TensorError> {
        let words = self.tensor(&format!("{name}.qweight"))?.expect_dtype(&[DType::I32])?;
        let gptq_bits = [4, 8].into_iter().find(|bits| words.shape == [cols * bits / 32, rows]);
        let is_awq = words.shape == [cols, rows / 8] && rows.is_multiple_of(8);
        if gptq_bits.is_none() && !is_awq {
            return Err(TensorError::Format {
                name: words.name.to_owned(),
                found: format!("has shape {:?}", words.shape),
                expected: format!(
                    "[{cols} × bits / 32, {rows}] with 4 or 8 bits (GPTQ), or [{cols}, {rows} / 8] (AWQ)"
                ),
            });
        }
        let bits = gptq_bits.unwrap_or(4);
        let scale = self.tensor(&format!("{name}.scales"))?.expect_dtype(SCALES)?;
        let groups = match scale.shape {
            &[groups, n] if n == rows && groups > 0 && cols.is_multiple_of(groups) => groups,
            _ => {
                return Err(TensorError::Format {
                    name: scale.name.to_owned(),
                    found: format!("has shape {:?}", scale.shape),
                    expected: format!("[groups, {rows}] with groups that divide {cols}"),
                });
            }
        };
        let group = cols / groups;
        self.sequential_groups(&format!("{name}.g_idx"), group, cols)?;
        let zeros_name = format!("{name}.qzeros");
        let zeros = self
            .tensor(&zeros_name)?
            .expect_shape(&[groups, rows * bits / 32])?
            .expect_dtype(&[DType::I32])?;
        let order = if is_awq { ZeroOrder::Awq } else { ZeroOrder::Gptq };
        let less_one =
            !is_awq && self.config().quantization.as_ref().is_none_or(|q| q.gptq_zeros_less_one);
        let add = match (less_one, bits) {
            (false, _) => 0,
            (true, 4) => 0x1111_1111,
            (true, _) => 0x0101_0101,
        };
        let zeros: Vec<i32> = unpack_zeros(zeros.data, bits, rows, groups, order, add)
            .into_iter()
            .map(i32::from)
            .collect();
        let scale_size = size(scale.dtype);
        let by_row = Strided {
            data: scale.data,
            size: scale_size,
            rows,
            cols: groups,
            offset: 0,
            row_stride: 1,
            col_stride: rows,
        };
        let scales = Scales { dtype: scale.dtype, data: by_row.row_major(), factor: 1.0 };
        let codes = match is_awq {
            true => unpack_awq(words.data, rows, cols),
            false => unpack_gptq(words.data, bits, rows, cols),
        };
        Ok(integers(words, bits, [rows, cols], group, Codes::Unpacked(codes), scales, Some(zeros)))
    }

    /// NVFP4 and MXFP4 of compressed-tensors, ModelOpt and DeepSeek-V4: 4-bit floats, two in a byte along the inputs.
    fn packed_floats<'a>(
        &'a self,
        name: &str,
        packed: TensorView<'a>,
        rows: usize,
        cols: usize,
    ) -> Result<WeightView<'a>, TensorError> {
        let packed =
            packed.expect_shape(&[rows, cols / 2])?.expect_dtype(&[DType::U8, DType::I8])?;
        let inverse = format!("{name}.weight_scale_inv");
        let scale = match self.contains(&inverse) {
            true => self.tensor(&inverse)?,
            false => self.tensor(&format!("{name}.weight_scale"))?,
        };
        let (group, _) = self.groups(&scale, rows, cols)?;
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
        let factor = match (dtype, global, second) {
            (DType::F8E4m3, Some(divisor), None) => 1.0 / divisor,
            (DType::F8E4m3, None, Some(factor)) => factor,
            (DType::F8E4m3, ..) => {
                return Err(TensorError::Format {
                    name: scale.name.to_owned(),
                    found: "is F8_E4M3".to_owned(),
                    expected: "beside it one of 'weight_global_scale' and 'weight_scale_2'"
                        .to_owned(),
                });
            }
            _ => 1.0,
        };
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

    /// Columns of a group and groups of a row of scales `[rows, groups]`, `[rows]` or of a single one.
    fn groups(
        &self,
        scale: &TensorView<'_>,
        rows: usize,
        cols: usize,
    ) -> Result<(usize, usize), TensorError> {
        let groups = match scale.shape {
            [n] if *n == rows => 1,
            &[n, groups] if n == rows && groups > 0 && cols.is_multiple_of(groups) => groups,
            _ => {
                return Err(TensorError::Format {
                    name: scale.name.to_owned(),
                    found: format!("has shape {:?}", scale.shape),
                    expected: format!("[{rows}, groups] with groups that divide {cols}"),
                });
            }
        };
        Ok((cols / groups, groups))
    }

    /// Refuses groups that are not runs of neighbouring columns.
    fn sequential_groups(&self, name: &str, group: usize, cols: usize) -> Result<(), TensorError> {
        if !self.contains(name) {
            return Ok(());
        }
        let found = self.tensor(name)?.expect_shape(&[cols])?.to_i32()?;
        let first = found.iter().enumerate().find(|(col, idx)| **idx != (col / group) as i32);
        match first {
            None => Ok(()),
            Some((col, idx)) => Err(TensorError::Format {
                name: name.to_owned(),
                found: format!("puts column {col} into group {idx}"),
                expected: format!(
                    "group {}: columns reordered by activation (desc_act, actorder) are not supported; \
                     take a checkpoint without",
                    col / group
                ),
            }),
        }
    }
}

/// A view of integer codes. `zeros` holds one zero point for each scale, in codes that start at 0.
fn integers<'a>(
    tensor: TensorView<'a>,
    bits: usize,
    [rows, cols]: [usize; 2],
    group: usize,
    codes: Codes<'a>,
    scales: Scales<'a>,
    zeros: Option<Vec<i32>>,
) -> WeightView<'a> {
    let middle = 1 << (bits - 1);
    let zeros = zeros.filter(|zeros| zeros.iter().any(|zero| *zero != middle));
    let minima = zeros.map(|zeros| {
        let minimum = |(zero, scale): (i32, f32)| (middle - zero) as f32 * scale;
        zeros.into_iter().zip(scales.to_f32()).map(minimum).collect::<Vec<f32>>()
    });
    let has_minima = minima.is_some();
    let format = match bits {
        4 => WeightFormat::Int4 { group, has_minima },
        _ => WeightFormat::Int8 { group, has_minima },
    };
    let stored_bytes = tensor.data.len() + scales.data.len();
    WeightView { rows, cols, format, codes, scales: Some(scales), minima, tensor, stored_bytes }
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

/// For a shape that was compared before and differs.
fn unreachable_shape(name: &str) -> TensorError {
    TensorError::Format {
        name: name.to_owned(),
        found: "has another shape".to_owned(),
        expected: "the shape of the configuration".to_owned(),
    }
}

/// Values that share a scale in MXFP4 and MXFP8 (OCP Microscaling Formats 1.0).
const MX_GROUP: usize = 32;
/// Dtypes of weights without packing.
const STORED: &[DType] = &[DType::Bf16, DType::F16, DType::F32, DType::F8E4m3];
