//! Conversions of a caller's matrices into the element types that kernels read, and back.

use bytemuck::{Pod, Zeroable};

use crate::abi::DevicePtr;

/// Element types that [`Stream::convert`](super::Stream::convert) reads and writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[allow(missing_docs, reason = "the names say it")]
pub enum ConvertType {
    F32,
    F16,
    Bf16,
    I32,
    I64,
}

impl ConvertType {
    /// Number of the type in `sy_convert`.
    const fn code(self) -> u32 {
        self as u32
    }

    const fn is_index(self) -> bool {
        matches!(self, Self::I32 | Self::I64)
    }

    /// Bytes of an element.
    #[must_use]
    pub const fn bytes(self) -> u64 {
        match self {
            Self::F16 | Self::Bf16 => 2,
            Self::F32 | Self::I32 => 4,
            Self::I64 => 8,
        }
    }
}

/// One matrix in C order, and the place of its copy in another element type.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
pub struct Conversion {
    pub(super) to: DevicePtr,
    pub(super) from: DevicePtr,
    pub(super) rows: u32,
    pub(super) from_cols: u32,
    pub(super) to_cols: u32,
    types: u32,
}

impl Conversion {
    /// A conversion of `rows` rows. Where the target has more columns than the source, they hold -1 for indices and 0
    /// for floats. Indices beyond 32 bits become the nearest number within them. Floats are rounded to nearest even.
    ///
    /// # Panics
    /// If one side holds indices and the other floats, if indices are to be 64 bits wide, or if the target has fewer
    /// columns.
    #[must_use]
    pub const fn new(
        (to, to_type, to_cols): (DevicePtr, ConvertType, u32),
        (from, from_type, from_cols): (DevicePtr, ConvertType, u32),
        rows: u32,
    ) -> Self {
        assert!(to_type.is_index() == from_type.is_index(), "indices are no floats");
        assert!(!matches!(to_type, ConvertType::I64), "kernels read indices of 32 bits");
        assert!(to_cols >= from_cols, "no column is left out");
        let types = from_type.code() | to_type.code() << 16;
        Self { to, from, rows, from_cols, to_cols, types }
    }

    /// Elements of the target.
    pub(super) const fn num_elements(&self) -> u64 {
        self.rows as u64 * self.to_cols as u64
    }

    #[cfg(feature = "emulated")]
    pub(super) fn types(&self) -> (ConvertType, ConvertType) {
        let of = |code| {
            let all = [
                ConvertType::F32,
                ConvertType::F16,
                ConvertType::Bf16,
                ConvertType::I32,
                ConvertType::I64,
            ];
            all[code as usize]
        };
        (of(self.types & 0xffff), of(self.types >> 16))
    }
}

/// Conversions of one launch, as `sy_convert` takes them.
#[repr(C)]
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
pub(super) struct Conversions {
    pieces: [Conversion; MAX_CONVERSIONS],
    num: u64,
}

#[cfg(feature = "cuda")]
impl Conversions {
    pub(super) fn of(pieces: &[Conversion]) -> Self {
        let mut of = Self::zeroed();
        of.pieces[..pieces.len()].copy_from_slice(pieces);
        of.num = pieces.len() as u64;
        of
    }
}

/// Most conversions of one launch.
pub const MAX_CONVERSIONS: usize = 3;

const _: () = assert!(size_of::<Conversion>() == 32 && size_of::<Conversions>() == 104);
