//! Memory of the client for tensors that kernels cannot take as they are, and for numbers of tokens.

use std::time::{Duration, Instant};

use attention_client::device::{Conversion, ConvertType, DevicePtr, Gpu, GpuBuffer, GpuError};

use crate::dlpack::{ElementType, Matrix};

/// Numbers of tokens in GPU memory: entry `n` holds `n`.
#[derive(Debug, Default)]
pub struct Counts {
    /// Tables, each twice as long as the one before. Outstanding calls may read an earlier one.
    tables: Vec<GpuBuffer>,
    len: u32,
}

impl Counts {
    /// Address of the number `n`.
    pub fn at(&mut self, gpu: &Gpu, n: u32) -> Result<DevicePtr, GpuError> {
        if n >= self.len {
            let len = (n + 1).next_power_of_two().max(LEAST_COUNTS);
            let table = gpu.alloc(u64::from(len) * 4)?;
            let numbers: Vec<u8> = (0..len).flat_map(u32::to_ne_bytes).collect();
            gpu.write(&table, 0, &numbers, Instant::now() + WRITE_LIMIT)?;
            self.tables.push(table);
            self.len = len;
        }
        let table = self.tables.last().ok_or(GpuError::Deadline { what: "table of numbers" })?;
        table.at(u64::from(n) * 4, 4)
    }
}

/// Copies of a call's tensors in the types of the kernels. Each buffer grows to the largest call.
#[derive(Debug, Default)]
pub struct Staging {
    x: Option<GpuBuffer>,
    topk_idx: Option<GpuBuffer>,
    topk_weights: Option<GpuBuffer>,
    out: Option<GpuBuffer>,
}

/// One tensor of a call.
#[derive(Debug, Clone, Copy)]
pub enum Part {
    X,
    TopkIdx,
    TopkWeights,
    Out,
}

impl Staging {
    /// Address for the kernels of an input, in the type `wanted` with `cols` columns. If they cannot take `matrix` as
    /// it is, adds a conversion.
    pub fn input(
        &mut self,
        gpu: &Gpu,
        part: Part,
        matrix: &Matrix,
        (wanted, cols): (ConvertType, u32),
        conversions: &mut Vec<Conversion>,
    ) -> Result<DevicePtr, GpuError> {
        let (from, from_type) = (address(matrix), convert_type(matrix.element));
        if from_type == wanted && matrix.cols == cols as usize && is_aligned(from) {
            return Ok(from);
        }
        let rows = matrix.rows as u32;
        let to = self.reserve(gpu, part, u64::from(rows) * u64::from(cols) * wanted.bytes())?;
        let source = (from, from_type, matrix.cols as u32);
        conversions.push(Conversion::new((to, wanted, cols), source, rows));
        Ok(to)
    }

    /// Address to which the kernels write the result, and the conversion that brings it into `matrix`, if one must.
    pub fn output(
        &mut self,
        gpu: &Gpu,
        matrix: &Matrix,
    ) -> Result<(DevicePtr, Option<Conversion>), GpuError> {
        let (to, to_type) = (address(matrix), convert_type(matrix.element));
        if to_type == ConvertType::Bf16 && is_aligned(to) {
            return Ok((to, None));
        }
        let (rows, cols) = (matrix.rows as u32, matrix.cols as u32);
        let bytes = u64::from(rows) * u64::from(cols) * ConvertType::Bf16.bytes();
        let from = self.reserve(gpu, Part::Out, bytes)?;
        let source = (from, ConvertType::Bf16, cols);
        Ok((from, Some(Conversion::new((to, to_type, cols), source, rows))))
    }

    /// Whether it has no memory: no tensor had to be converted.
    pub const fn is_empty(&self) -> bool {
        let Self { x, topk_idx, topk_weights, out } = self;
        x.is_none() && topk_idx.is_none() && topk_weights.is_none() && out.is_none()
    }

    fn reserve(&mut self, gpu: &Gpu, part: Part, bytes: u64) -> Result<DevicePtr, GpuError> {
        let buffer = match part {
            Part::X => &mut self.x,
            Part::TopkIdx => &mut self.topk_idx,
            Part::TopkWeights => &mut self.topk_weights,
            Part::Out => &mut self.out,
        };
        match buffer {
            Some(buffer) if buffer.len() >= bytes => Ok(buffer.ptr()),
            _ => {
                let fresh = gpu.alloc(bytes.next_power_of_two().max(LEAST_BYTES))?;
                let ptr = fresh.ptr();
                *buffer = Some(fresh);
                Ok(ptr)
            }
        }
    }
}

fn address(matrix: &Matrix) -> DevicePtr {
    DevicePtr(matrix.data.as_ptr() as u64)
}

const fn convert_type(element: ElementType) -> ConvertType {
    match element {
        ElementType::F32 => ConvertType::F32,
        ElementType::F16 => ConvertType::F16,
        ElementType::Bf16 => ConvertType::Bf16,
        ElementType::I32 => ConvertType::I32,
        ElementType::I64 => ConvertType::I64,
    }
}

const fn is_aligned(address: DevicePtr) -> bool {
    address.0.is_multiple_of(ALIGN)
}

/// Bytes that kernels move at a time.
const ALIGN: u64 = 16;
const LEAST_COUNTS: u32 = 4096;
const LEAST_BYTES: u64 = 4096;
const WRITE_LIMIT: Duration = Duration::from_secs(10);
