//! Integer codes of 4 and 8 bits: compressed-tensors, GPTQ and AWQ.

use std::borrow::Cow;

use super::{odd_size, scale_dtype, size};
use crate::dtype::DType;
use crate::open::Checkpoint;
use crate::tensor::{SCALES, TensorError, TensorView};
use crate::weight::{
    Codes, Packing, Reordered, Scales, Strided, WeightFormat, WeightView, ZeroOrder, unpack_zeros,
};

impl Checkpoint {
    /// compressed-tensors `pack-quantized`: words along the inputs, scales per row and group.
    pub(super) fn packed_integers<'a>(
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
        let (group, groups) = self.groups_of_rows(&scale, rows, cols)?;
        let order = self.group_order(&format!("{name}.weight_g_idx"), group, cols)?;
        let zero_name = format!("{name}.weight_zero_point");
        let zeros = match self.contains(&zero_name) {
            false => None,
            true => {
                let zeros = self.tensor(&zero_name)?;
                Some(match zeros.dtype {
                    DType::I8 => signed_zeros(zeros.expect_shape(&[rows, groups])?, bits),
                    _ => {
                        let shape = [rows.div_ceil(32 / bits), groups];
                        let zeros = zeros.expect_shape(&shape)?.expect_dtype(&[DType::I32])?;
                        let order = ZeroOrder::CompressedTensors;
                        let zeros = unpack_zeros(zeros.data, bits, rows, groups, order, 0);
                        zeros.into_iter().map(i32::from).collect()
                    }
                })
            }
        };
        let scales =
            Scales { dtype: scale_dtype(&scale)?, data: Cow::Borrowed(scale.data), factor: 1.0 };
        let codes = match bits {
            4 => Codes::Strided(Strided::whole(packed.data, 1, rows, cols / 2)),
            _ => Codes::Packed { packing: Packing::OffsetBytes, data: packed.data },
        };
        Integers { tensor: packed, bits, rows, cols, group, codes, scales, zeros }.view(order)
    }

    /// compressed-tensors `int-quantized`: signed bytes, scales per row or group.
    pub(super) fn signed_bytes<'a>(
        &'a self,
        name: &str,
        weight: TensorView<'a>,
        rows: usize,
        cols: usize,
    ) -> Result<WeightView<'a>, TensorError> {
        let weight = weight.expect_shape(&[rows, cols])?;
        let scale = self.tensor(&format!("{name}.weight_scale"))?;
        let (group, groups) = self.groups_of_rows(&scale, rows, cols)?;
        let order = self.group_order(&format!("{name}.weight_g_idx"), group, cols)?;
        let zero_name = format!("{name}.weight_zero_point");
        let zeros = match self.contains(&zero_name) {
            false => None,
            true => {
                let zeros = self.tensor(&zero_name)?.expect_dtype(&[DType::I8])?;
                // One group may lack its dimension.
                let zeros = match zeros.shape.len() {
                    1 if groups == 1 => zeros.expect_shape(&[rows])?,
                    _ => zeros.expect_shape(&[rows, groups])?,
                };
                Some(signed_zeros(zeros, 8))
            }
        };
        let scales =
            Scales { dtype: scale_dtype(&scale)?, data: Cow::Borrowed(scale.data), factor: 1.0 };
        let codes = Codes::Strided(Strided::whole(weight.data, 1, rows, cols));
        Integers { tensor: weight, bits: 8, rows, cols, group, codes, scales, zeros }.view(order)
    }

    /// GPTQ and AWQ: words, scales and zero points with the outputs as columns.
    pub(super) fn words<'a>(
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
        let per_word = 32 / bits;
        for (what, number) in [("rows", rows), ("columns", cols)] {
            if !number.is_multiple_of(per_word) {
                return Err(odd_size(words.name, what, number, per_word));
            }
        }
        let scale = self.tensor(&format!("{name}.scales"))?.expect_dtype(SCALES)?;
        let found = match *scale.shape {
            [groups, n] if n == rows => Some(groups),
            _ => None,
        };
        let (group, groups) = self.groups(&scale, found, cols, format_args!("[groups, {rows}]"))?;
        let group_order = self.group_order(&format!("{name}.g_idx"), group, cols)?;
        let zeros = self
            .tensor(&format!("{name}.qzeros"))?
            .expect_shape(&[groups, rows * bits / 32])?
            .expect_dtype(&[DType::I32])?;
        let order = if is_awq { ZeroOrder::Awq } else { ZeroOrder::Gptq };
        let unpack = |add| unpack_zeros(zeros.data, bits, rows, groups, order, add);
        let zeros = unpack(if is_awq { 0 } else { self.gptq_addend(bits, || unpack(0)) });
        let by_row = Strided {
            data: scale.data,
            size: size(scale.dtype),
            rows,
            cols: groups,
            offset: 0,
            row_stride: 1,
            col_stride: rows,
        };
        let scales = Scales { dtype: scale.dtype, data: by_row.row_major(), factor: 1.0 };
        let packing = if is_awq { Packing::Awq } else { Packing::Gptq { bits } };
        let codes = Codes::Packed { packing, data: words.data };
        let zeros = Some(zeros.into_iter().map(i32::from).collect());
        Integers { tensor: words, bits, rows, cols, group, codes, scales, zeros }.view(group_order)
    }

    /// The number that GPTQ's readers add to each word of zero points. `stored` gives the zero points as they are
    /// stored.
    fn gptq_addend(&self, bits: usize, stored: impl Fn() -> Vec<u8>) -> u32 {
        let quantization = self.config().quantization.as_ref();
        if quantization.is_some_and(|q| !q.gptq_zeros_less_one) {
            return 0;
        }
        // Files of the second format exist under the name of the first. With symmetric codes the zero point is the
        // middle, whatever the file's reader adds.
        let middle = 1 << (bits - 1);
        let is_symmetric = quantization.is_some_and(|q| q.symmetric);
        match bits {
            _ if is_symmetric && stored().iter().all(|zero| *zero == middle) => 0,
            4 => 0x1111_1111,
            _ => 0x0101_0101,
        }
    }

    /// As [`groups`](Self::groups), for scales `[rows, groups]`, or `[rows]`.
    pub(super) fn groups_of_rows(
        &self,
        scale: &TensorView<'_>,
        rows: usize,
        cols: usize,
    ) -> Result<(usize, usize), TensorError> {
        let found = match *scale.shape {
            [n] if n == rows => Some(1),
            [n, groups] if n == rows => Some(groups),
            _ => None,
        };
        self.groups(scale, found, cols, format_args!("[{rows}, groups]"))
    }

    /// Columns of a group, and the number of groups: `found` in the shape of the scales, which is `expected`.
    fn groups(
        &self,
        scale: &TensorView<'_>,
        found: Option<usize>,
        cols: usize,
        expected: std::fmt::Arguments<'_>,
    ) -> Result<(usize, usize), TensorError> {
        let Some(groups) = found.filter(|n| *n > 0 && cols.is_multiple_of(*n)) else {
            return Err(TensorError::Format {
                name: scale.name.to_owned(),
                found: format!("has shape {:?}", scale.shape),
                expected: format!("{expected} with groups that divide {cols}"),
            });
        };
        let group = cols / groups;
        let declared = self.config().quantization.as_ref().and_then(|q| q.group_size);
        let is_integer = !matches!(scale.dtype, DType::U8 | DType::F8E8m0 | DType::F8E4m3);
        match declared {
            Some(declared) if is_integer && groups > 1 && declared != group => {
                Err(TensorError::Format {
                    name: scale.name.to_owned(),
                    found: format!("has shape {:?}, groups of {group} columns", scale.shape),
                    expected: format!("groups of {declared}, as the configuration declares"),
                })
            }
            _ => Ok((group, groups)),
        }
    }

    /// The group of each column by the tensor `name`; `None` if groups are runs of neighbouring columns.
    fn group_order(
        &self,
        name: &str,
        group: usize,
        cols: usize,
    ) -> Result<Option<Vec<u32>>, TensorError> {
        if !self.contains(name) {
            return Ok(None);
        }
        let found = self.tensor(name)?.expect_shape(&[cols])?.to_i32()?;
        // compressed-tensors writes -1 for groups in order.
        if found.contains(&-1) {
            return Ok(None);
        }
        let groups = cols / group;
        let in_range = |idx: &i32| u32::try_from(*idx).ok().filter(|idx| (*idx as usize) < groups);
        let order: Option<Vec<u32>> = found.iter().map(in_range).collect();
        let Some(order) = order else {
            let (col, idx) = found
                .iter()
                .enumerate()
                .find(|(_, idx)| in_range(idx).is_none())
                .unwrap_or((0, &0));
            return Err(TensorError::Format {
                name: name.to_owned(),
                found: format!("puts column {col} into group {idx}"),
                expected: format!("a group from 0 to {}", groups - 1),
            });
        };
        let is_in_order = order.iter().enumerate().all(|(col, idx)| *idx as usize == col / group);
        Ok((!is_in_order).then_some(order))
    }
}

/// The parts of a matrix of integer codes.
struct Integers<'a> {
    /// The tensor with the codes.
    tensor: TensorView<'a>,
    bits: usize,
    rows: usize,
    cols: usize,
    /// Columns of a group.
    group: usize,
    codes: Codes<'a>,
    scales: Scales<'a>,
    /// One zero point for each scale, in codes that start at 0.
    zeros: Option<Vec<i32>>,
}

impl<'a> Integers<'a> {
    /// The view of the codes. `order` has the group of each column, if groups are no runs of columns.
    fn view(self, order: Option<Vec<u32>>) -> Result<WeightView<'a>, TensorError> {
        let Integers { tensor, bits, rows, cols, group, codes, scales, zeros } = self;
        let middle = 1 << (bits - 1);
        let zeros = zeros.filter(|zeros| zeros.iter().any(|zero| *zero != middle));
        let stored_bytes = tensor.data.len() + scales.data.len();
        if let Some(order) = order {
            let format = match scales.dtype {
                DType::Bf16 => WeightFormat::Bf16,
                DType::F16 => WeightFormat::F16,
                DType::F32 => WeightFormat::F32,
                other => {
                    return Err(TensorError::Format {
                        name: tensor.name.to_owned(),
                        found: format!("has reordered columns and scales of type {other}"),
                        expected: "scales of type BF16, F16 or F32".to_owned(),
                    });
                }
            };
            let reordered = Reordered { codes: Box::new(codes), bits, order, scales, zeros };
            return Ok(WeightView {
                rows,
                cols,
                format,
                codes: Codes::Reordered(reordered),
                scales: None,
                minima: None,
                tensor,
                stored_bytes,
            });
        }
        let minima = zeros.map(|zeros| {
            let minimum = |(zero, scale): (i32, f32)| (middle - zero) as f32 * scale;
            zeros.into_iter().zip(scales.to_f32()).map(minimum).collect::<Vec<f32>>()
        });
        let has_minima = minima.is_some();
        let format = match bits {
            4 => WeightFormat::Int4 { group, has_minima },
            _ => WeightFormat::Int8 { group, has_minima },
        };
        Ok(WeightView {
            rows,
            cols,
            format,
            codes,
            scales: Some(scales),
            minima,
            tensor,
            stored_bytes,
        })
    }
}

/// Zero points that are stored as signed bytes, as codes that start at 0.
fn signed_zeros(zeros: TensorView<'_>, bits: usize) -> Vec<i32> {
    zeros.data.iter().map(|zero| i32::from(*zero as i8) + (1 << (bits - 1))).collect()
}
