//! Weight matrices in the formats of checkpoints, and their form for computing.
//!
//! Quantised formats differ in packing, order and kinds of zero points. A [`WeightView`] brings each of them into
//! one of few forms, see [`WeightFormat`]: rows of packed codes with scales. Where a file already has that form, the
//! bytes are borrowed from it.

mod packed;
mod reordered;

use std::borrow::Cow;
use std::fmt;

use crate::convert::{self, FP4_VALUES, f32_from_e4m3};
use crate::dtype::DType;
use crate::tensor::TensorView;
pub(crate) use packed::{ZeroOrder, unpack_zeros};
use packed::{unpack_awq, unpack_gptq};
pub(crate) use reordered::Reordered;

/// The form of a weight matrix for computing. Values are `code × scale`, or `code × scale + minimum`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum WeightFormat {
    /// bfloat16.
    Bf16,
    /// IEEE half precision.
    F16,
    /// IEEE single precision.
    F32,
    /// fp8-e4m3 with one scale for each block of rows and columns.
    F8E4m3 {
        /// Rows and columns of a block.
        block: [usize; 2],
    },
    /// Signed bytes with one scale for each row and group of columns.
    Int8 {
        /// Columns of a group.
        group: usize,
        /// Groups have minima, too.
        has_minima: bool,
    },
    /// Codes 0 to 15 for −8 to 7, two in a byte, the lower half first; scales as for `Int8`.
    Int4 {
        /// Columns of a group.
        group: usize,
        /// Groups have minima, too.
        has_minima: bool,
    },
    /// 4-bit floats (E2M1, see [`FP4_VALUES`]), two in a byte, the lower half first; scales as for `Int8`.
    Fp4 {
        /// Columns of a group.
        group: usize,
    },
}

impl WeightFormat {
    /// Bits of one code.
    #[must_use]
    pub const fn code_bits(self) -> usize {
        match self {
            WeightFormat::F32 => 32,
            WeightFormat::Bf16 | WeightFormat::F16 => 16,
            WeightFormat::F8E4m3 { .. } | WeightFormat::Int8 { .. } => 8,
            WeightFormat::Int4 { .. } | WeightFormat::Fp4 { .. } => 4,
        }
    }

    /// Rows and columns that share a scale; `None` for formats without scales.
    #[must_use]
    pub const fn scale_block(self) -> Option<[usize; 2]> {
        match self {
            WeightFormat::Bf16 | WeightFormat::F16 | WeightFormat::F32 => None,
            WeightFormat::F8E4m3 { block } => Some(block),
            WeightFormat::Int8 { group, .. }
            | WeightFormat::Int4 { group, .. }
            | WeightFormat::Fp4 { group } => Some([1, group]),
        }
    }

    /// Rows and columns of the scales of a `rows × cols` matrix; `None` for formats without scales.
    #[must_use]
    pub fn scale_shape(self, rows: usize, cols: usize) -> Option<[usize; 2]> {
        self.scale_block().map(|[r, c]| [rows.div_ceil(r), cols.div_ceil(c)])
    }
}

impl fmt::Display for WeightFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            WeightFormat::Bf16 => f.write_str("bf16"),
            WeightFormat::F16 => f.write_str("f16"),
            WeightFormat::F32 => f.write_str("f32"),
            WeightFormat::F8E4m3 { block: [rows, cols] } => write!(f, "fp8-e4m3/{rows}x{cols}"),
            WeightFormat::Int8 { group, has_minima } => {
                write!(f, "int8/{group}{}", if *has_minima { "+min" } else { "" })
            }
            WeightFormat::Int4 { group, has_minima } => {
                write!(f, "int4/{group}{}", if *has_minima { "+min" } else { "" })
            }
            WeightFormat::Fp4 { group } => write!(f, "fp4/{group}"),
        }
    }
}

/// A weight matrix `[rows, cols]` of an expert: outputs by inputs.
#[derive(Debug, Clone)]
pub struct WeightView<'a> {
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    pub(crate) format: WeightFormat,
    pub(crate) codes: Codes<'a>,
    pub(crate) scales: Option<Scales<'a>>,
    /// One for each scale.
    pub(crate) minima: Option<Vec<f32>>,
    /// The tensor with the codes.
    pub(crate) tensor: TensorView<'a>,
    /// Bytes of all tensors, or of this matrix's parts of them.
    pub(crate) stored_bytes: usize,
}

/// Codes as they are stored.
#[derive(Debug, Clone)]
pub(crate) enum Codes<'a> {
    /// Elements of whole bytes, or packed rows whose elements are bytes.
    Strided(Strided<'a>),
    /// Packed in another order, which every use unpacks anew.
    Packed {
        /// The order.
        packing: Packing,
        /// The stored bytes.
        data: &'a [u8],
    },
    /// Integer codes whose groups are no runs of columns. Every use dequantises them.
    Reordered(Reordered<'a>),
}

impl<'a> Codes<'a> {
    /// Row-major codes of a `rows × cols` matrix.
    fn row_major(&self, rows: usize, cols: usize) -> Cow<'a, [u8]> {
        match self {
            Codes::Strided(strided) => strided.row_major(),
            Codes::Packed { packing, data } => Cow::Owned(match packing {
                Packing::Gptq { bits } => unpack_gptq(data, *bits, rows, cols),
                Packing::Awq => unpack_awq(data, rows, cols),
                Packing::OffsetBytes => data.iter().map(|code| code ^ 0x80).collect(),
            }),
            Codes::Reordered(reordered) => Cow::Owned(reordered.dequantise(rows, cols)),
        }
    }
}

/// An order of codes that differs from rows of packed codes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Packing {
    /// GPTQ's words, along the inputs.
    Gptq {
        /// Bits of a code, 4 or 8.
        bits: usize,
    },
    /// AWQ's words, along the outputs.
    Awq,
    /// Bytes with an offset of 128.
    OffsetBytes,
}

/// A matrix of elements of whole bytes inside of a tensor.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Strided<'a> {
    pub data: &'a [u8],
    /// Bytes of an element.
    pub size: usize,
    pub rows: usize,
    pub cols: usize,
    /// First element.
    pub offset: usize,
    /// Elements from a row to the next.
    pub row_stride: usize,
    /// Elements from a column to the next.
    pub col_stride: usize,
}

impl<'a> Strided<'a> {
    /// All of a row-major matrix.
    pub fn whole(data: &'a [u8], size: usize, rows: usize, cols: usize) -> Strided<'a> {
        Strided { data, size, rows, cols, offset: 0, row_stride: cols, col_stride: 1 }
    }

    /// The bytes, if they are stored row-major without gaps.
    pub fn contiguous(&self) -> Option<&'a [u8]> {
        let Strided { data, size, rows, cols, .. } = *self;
        let is_contiguous = self.col_stride == 1 && (self.row_stride == cols || rows == 1);
        is_contiguous.then(|| &data[self.offset * size..][..rows * cols * size])
    }

    /// Row-major bytes: borrowed if they are stored so.
    pub fn row_major(&self) -> Cow<'a, [u8]> {
        if let Some(bytes) = self.contiguous() {
            return Cow::Borrowed(bytes);
        }
        let Strided { data, size, rows, cols, .. } = *self;
        let mut out = Vec::with_capacity(rows * cols * size);
        for row in 0..rows {
            let first = self.offset + row * self.row_stride;
            if self.col_stride == 1 {
                out.extend_from_slice(&data[first * size..][..cols * size]);
                continue;
            }
            for col in 0..cols {
                let at = (first + col * self.col_stride) * size;
                out.extend_from_slice(&data[at..at + size]);
            }
        }
        Cow::Owned(out)
    }
}

/// Scales of a matrix, row-major, in their stored dtype.
#[derive(Debug, Clone)]
pub struct Scales<'a> {
    /// F32, BF16, F16, F8_E8M0 or F8_E4M3.
    pub dtype: DType,
    /// The stored values.
    pub data: Cow<'a, [u8]>,
    /// Multiplies every scale; 1 in most formats.
    pub factor: f32,
}

impl Scales<'_> {
    /// All scales as f32, the factor applied.
    #[must_use]
    pub fn to_f32(&self) -> Vec<f32> {
        let size = self.dtype.size_bytes().unwrap_or(1).max(1);
        let mut out = vec![0.0; self.data.len() / size];
        convert::to_f32(self.dtype, &self.data, &mut out);
        if self.factor != 1.0 {
            out.iter_mut().for_each(|scale| *scale *= self.factor);
        }
        out
    }
}

impl<'a> WeightView<'a> {
    /// Output features.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Input features.
    #[must_use]
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// The form for computing.
    #[must_use]
    pub fn format(&self) -> WeightFormat {
        self.format
    }

    /// The name of the tensor that holds the codes.
    #[must_use]
    pub fn tensor_name(&self) -> &'a str {
        self.tensor.name
    }

    /// Packed codes, row-major: `rows × cols × code_bits / 8` bytes. Borrowed from the mapped file if it has them in
    /// this order.
    #[must_use]
    pub fn codes(&self) -> Cow<'a, [u8]> {
        self.codes.row_major(self.rows, self.cols)
    }

    /// Bytes of the file that hold the codes, or the whole tensor if the codes are no run of bytes.
    pub(crate) fn stored_codes(&self) -> &'a [u8] {
        match &self.codes {
            Codes::Strided(strided) => strided.contiguous().unwrap_or(self.tensor.data),
            Codes::Packed { data, .. } => data,
            Codes::Reordered(_) => self.tensor.data,
        }
    }

    /// Returns true if the file has integer codes whose columns are reordered by activation (GPTQ's `desc_act`,
    /// `actorder` of compressed-tensors). Such a matrix is dequantised when it is read: [`format`](Self::format) is the
    /// type of its scales, and [`codes`](Self::codes) has the values rounded to that type.
    #[must_use]
    pub fn is_reordered(&self) -> bool {
        matches!(self.codes, Codes::Reordered(_))
    }

    /// The scales, `[rows, cols]` of [`WeightFormat::scale_shape`]; `None` for formats without scales.
    #[must_use]
    pub fn scales(&self) -> Option<&Scales<'a>> {
        self.scales.as_ref()
    }

    /// One minimum for each scale, in the same order, if the format has them.
    #[must_use]
    pub fn minima(&self) -> Option<&[f32]> {
        self.minima.as_deref()
    }

    /// Bytes of the codes, scales and zero points as stored.
    #[must_use]
    pub fn stored_bytes(&self) -> usize {
        self.stored_bytes
    }

    /// Bytes of the form for computing.
    #[must_use]
    pub fn computing_bytes(&self) -> usize {
        self.rows * self.cols * self.format.code_bits() / 8
            + self.scales.as_ref().map_or(0, |scales| scales.data.len())
            + self.minima.as_ref().map_or(0, |minima| size_of_val(minima.as_slice()))
    }

    /// The matrix as f32, row-major, scales and minima applied.
    #[must_use]
    pub fn to_f32(&self) -> Vec<f32> {
        let scales = self.scales.as_ref().map(Scales::to_f32);
        let minima = self.minima.as_deref();
        let size = [self.rows, self.cols];
        dequantize(self.format, size, &self.codes(), scales.as_deref(), minima)
    }
}

/// A matrix of `[rows, cols]` as f32, row-major, scales and minima applied. The codes are packed as the format says.
/// There is a scale, and a minimum if there are any, for every [block](WeightFormat::scale_shape).
#[must_use]
pub fn dequantize(
    format: WeightFormat,
    [rows, cols]: [usize; 2],
    codes: &[u8],
    scales: Option<&[f32]>,
    minima: Option<&[f32]>,
) -> Vec<f32> {
    let mut out = vec![0.0; rows * cols];
    match format {
        WeightFormat::Bf16 => convert::to_f32(DType::Bf16, codes, &mut out),
        WeightFormat::F16 => convert::to_f32(DType::F16, codes, &mut out),
        WeightFormat::F32 => convert::to_f32(DType::F32, codes, &mut out),
        WeightFormat::F8E4m3 { .. } => {
            out.iter_mut().zip(codes).for_each(|(o, c)| *o = f32_from_e4m3(*c));
        }
        WeightFormat::Int8 { .. } => {
            out.iter_mut().zip(codes).for_each(|(o, c)| *o = f32::from(*c as i8));
        }
        WeightFormat::Int4 { .. } => nibbles(codes, &mut out, |code| f32::from(code) - 8.0),
        WeightFormat::Fp4 { .. } => {
            nibbles(codes, &mut out, |code| FP4_VALUES[usize::from(code & 15)]);
        }
    }
    if let (Some([block_rows, block_cols]), Some(scales)) = (format.scale_block(), scales) {
        let per_row = cols.div_ceil(block_cols);
        for (row_idx, row) in out.chunks_exact_mut(cols).enumerate() {
            let first = row_idx / block_rows * per_row;
            for (group_idx, values) in row.chunks_mut(block_cols).enumerate() {
                let scale = scales[first + group_idx];
                let minimum = minima.map_or(0.0, |minima| minima[first + group_idx]);
                values.iter_mut().for_each(|value| *value = *value * scale + minimum);
            }
        }
    }
    out
}

fn nibbles(codes: &[u8], out: &mut [f32], value: impl Fn(u8) -> f32) {
    for (pair, code) in out.chunks_exact_mut(2).zip(codes) {
        pair[0] = value(code & 15);
        pair[1] = value(code >> 4);
    }
}
