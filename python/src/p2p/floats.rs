//! A lossless codec for arrays of floats.
//!
//! The exponents of a model's weights and activations take few values, and their other bits look random. So each element
//! is rotated left by one bit, which moves its exponent into the highest byte. The highest bytes go through the entropy
//! coder of `rans`, and the others are stored.
//!
//! | part of a frame | content |
//! |---|---|
//! | header | 16 bytes: `SYFC`, version, type, two zeros, the length of the array in bytes |
//! | blocks of up to 131,072 elements | a word with the length of the coded bytes, these bytes, the other bytes |
//! | end | the bytes behind the last whole element |
//!
//! The top bit of a block's word is set if its highest bytes are stored as they are. All numbers are little-endian.

use super::rans;

/// A frame that cannot be made or read.
#[derive(Debug)]
pub(super) enum FloatError {
    /// The caller's ranges do not fit.
    Argument(String),
    /// The bytes are no frame of the array's type.
    Frame(String),
}

impl FloatError {
    fn argument(message: impl Into<String>) -> Self {
        Self::Argument(message.into())
    }

    fn frame(message: impl Into<String>) -> Self {
        Self::Frame(message.into())
    }
}

/// Element type of an array.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Dtype {
    Bf16,
    F16,
    F32,
}

impl Dtype {
    /// The type called `name`: `bf16`, `f16` or `f32`.
    pub(super) fn of(name: &str) -> Option<Self> {
        match name {
            "bf16" => Some(Self::Bf16),
            "f16" => Some(Self::F16),
            "f32" => Some(Self::F32),
            _ => None,
        }
    }

    const fn width(self) -> usize {
        match self {
            Self::Bf16 | Self::F16 => 2,
            Self::F32 => 4,
        }
    }

    const fn code(self) -> u8 {
        match self {
            Self::Bf16 => 1,
            Self::F16 => 2,
            Self::F32 => 3,
        }
    }
}

/// Memory to read. Peers may write it meanwhile, so it is copied before use.
pub(super) struct Input {
    at: u64,
    left: u64,
}

impl Input {
    /// The `size` bytes at the address `at`.
    ///
    /// # Safety
    /// The range stays readable as long as the value is in use.
    pub(super) const unsafe fn new(at: u64, size: u64) -> Self {
        Self { at, left: size }
    }

    /// Copies the next bytes, all of `out` or none.
    fn read(&mut self, out: &mut [u8]) -> bool {
        if (out.len() as u64) > self.left {
            return false;
        }
        // SAFETY: the range lies in that of `new`; `out` is ours.
        unsafe { std::ptr::copy(self.at as *const u8, out.as_mut_ptr(), out.len()) };
        self.at += out.len() as u64;
        self.left -= out.len() as u64;
        true
    }
}

/// Memory to write.
pub(super) struct Output {
    at: u64,
    left: u64,
    written: u64,
}

impl Output {
    /// The `capacity` bytes at the address `at`.
    ///
    /// # Safety
    /// The range stays writable as long as the value is in use.
    pub(super) const unsafe fn new(at: u64, capacity: u64) -> Self {
        Self { at, left: capacity, written: 0 }
    }

    /// Bytes written.
    pub(super) const fn written(&self) -> u64 {
        self.written
    }

    fn write(&mut self, bytes: &[u8]) -> Result<(), FloatError> {
        if (bytes.len() as u64) > self.left {
            let all = self.left + self.written;
            return Err(FloatError::argument(format!(
                "the destination of {all} bytes is too small"
            )));
        }
        // SAFETY: the range lies in that of `new`.
        unsafe { std::ptr::copy(bytes.as_ptr(), self.at as *mut u8, bytes.len()) };
        self.at += bytes.len() as u64;
        self.left -= bytes.len() as u64;
        self.written += bytes.len() as u64;
        Ok(())
    }
}

/// Most bytes of the frame of an array of `size` bytes.
pub(super) fn bound(dtype: Dtype, size: u64) -> Result<u64, FloatError> {
    let num_blocks = (size / dtype.width() as u64).div_ceil(BLOCK as u64);
    let bound = size.checked_add(HEAD as u64 + 4 * num_blocks);
    bound.ok_or_else(|| FloatError::argument(format!("{size} bytes are too many")))
}

/// Writes the frame of the array of `size` bytes in `input`.
pub(super) fn compress(
    dtype: Dtype,
    mut input: Input,
    size: u64,
    out: &mut Output,
) -> Result<(), FloatError> {
    let width = dtype.width();
    let mut head = *b"SYFC\x01\0\0\0\0\0\0\0\0\0\0\0";
    head[5] = dtype.code();
    head[8..].copy_from_slice(&size.to_le_bytes());
    out.write(&head)?;
    let mut elements = Vec::new();
    let (mut high, mut low, mut coded) = (Vec::new(), Vec::new(), Vec::new());
    let mut left = size / width as u64;
    while left > 0 {
        let num = left.min(BLOCK as u64) as usize;
        left -= num as u64;
        elements.resize(num * width, 0);
        if !input.read(&mut elements) {
            return Err(FloatError::argument("the source ends too early"));
        }
        split(dtype, &elements, &mut high, &mut low);
        coded.clear();
        if rans::encode(&high, &mut coded) {
            out.write(&(coded.len() as u32).to_le_bytes())?;
            out.write(&coded)?;
        } else {
            out.write(&(num as u32 | STORED).to_le_bytes())?;
            out.write(&high)?;
        }
        out.write(&low)?;
    }
    copy_tail(size, width, &mut input, out)
}

/// Length in bytes of the array whose frame is in `input`.
pub(super) fn size_of(dtype: Dtype, mut input: Input) -> Result<u64, FloatError> {
    header(dtype, &mut input)
}

/// Writes the array whose frame is in `input`. After an error the content of `out` is undefined.
pub(super) fn decompress(
    dtype: Dtype,
    mut input: Input,
    out: &mut Output,
) -> Result<(), FloatError> {
    let size = header(dtype, &mut input)?;
    if size > out.left {
        let found = out.left;
        return Err(FloatError::argument(format!(
            "the array has {size} bytes, the destination {found}"
        )));
    }
    let width = dtype.width();
    let cut = || FloatError::frame("the frame is cut off");
    let (mut coded, mut high, mut low) = (Vec::new(), Vec::new(), Vec::new());
    let mut elements = Vec::new();
    let mut left = size / width as u64;
    while left > 0 {
        let num = left.min(BLOCK as u64) as usize;
        left -= num as u64;
        let mut word = [0; 4];
        if !input.read(&mut word) {
            return Err(cut());
        }
        let word = u32::from_le_bytes(word);
        let coded_len = (word & !STORED) as usize;
        if coded_len > num {
            return Err(FloatError::frame(format!(
                "a block of {num} elements has {coded_len} coded bytes"
            )));
        }
        coded.resize(coded_len, 0);
        low.resize(num * (width - 1), 0);
        if !input.read(&mut coded) || !input.read(&mut low) {
            return Err(cut());
        }
        high.resize(num, 0);
        if word & STORED == 0 {
            rans::decode(&coded, &mut high).map_err(FloatError::frame)?;
        } else if coded_len == num {
            high.copy_from_slice(&coded);
        } else {
            return Err(FloatError::frame("a stored block has another length than its array"));
        }
        join(dtype, &high, &low, &mut elements);
        out.write(&elements)?;
    }
    copy_tail(size, width, &mut input, out)?;
    if input.left > 0 {
        return Err(FloatError::frame(format!("{} bytes follow the frame", input.left)));
    }
    Ok(())
}

/// Reads a header. Returns the length of the array in bytes.
fn header(dtype: Dtype, input: &mut Input) -> Result<u64, FloatError> {
    let mut head = [0; HEAD];
    if !input.read(&mut head) || head[..5] != *b"SYFC\x01" || head[6..8] != [0; 2] {
        return Err(FloatError::frame(
            "these are not the bytes of a compressed array of version 1",
        ));
    }
    if head[5] != dtype.code() {
        let (found, expected) = (head[5], dtype.code());
        return Err(FloatError::frame(format!(
            "the array has type {found}, expected type {expected}"
        )));
    }
    let mut size = [0; 8];
    size.copy_from_slice(&head[8..]);
    let size = u64::from_le_bytes(size);
    // The lower bytes of every element are stored, so a short frame cannot announce a long array.
    let (num, width) = (size / dtype.width() as u64, dtype.width() as u64);
    if num.saturating_mul(width - 1) > input.left {
        return Err(FloatError::frame(format!(
            "the frame is too short for the {size} bytes that it announces"
        )));
    }
    Ok(size)
}

/// Copies the bytes behind the last whole element.
fn copy_tail(
    size: u64,
    width: usize,
    input: &mut Input,
    out: &mut Output,
) -> Result<(), FloatError> {
    let mut tail = [0; 4];
    let tail = &mut tail[..(size % width as u64) as usize];
    if !input.read(tail) {
        return Err(FloatError::frame("the frame is cut off"));
    }
    out.write(tail)
}

/// Splits elements into their highest bytes and the rest, after a rotation by one bit.
fn split(dtype: Dtype, elements: &[u8], high: &mut Vec<u8>, low: &mut Vec<u8>) {
    high.clear();
    low.clear();
    match dtype {
        Dtype::Bf16 | Dtype::F16 => {
            let turned = elements.chunks_exact(2).map(|element| {
                u16::from_le_bytes([element[0], element[1]]).rotate_left(1).to_le_bytes()
            });
            turned.for_each(|[rest, top]| {
                high.push(top);
                low.push(rest);
            });
        }
        Dtype::F32 => {
            let turned = elements.chunks_exact(4).map(|element| {
                let bytes = [element[0], element[1], element[2], element[3]];
                u32::from_le_bytes(bytes).rotate_left(1).to_le_bytes()
            });
            turned.for_each(|[first, second, third, top]| {
                high.push(top);
                low.extend([first, second, third]);
            });
        }
    }
}

/// Reverses [`split`].
fn join(dtype: Dtype, high: &[u8], low: &[u8], elements: &mut Vec<u8>) {
    elements.clear();
    match dtype {
        Dtype::Bf16 | Dtype::F16 => {
            let turned = high.iter().zip(low).map(|(top, rest)| u16::from_le_bytes([*rest, *top]));
            turned.for_each(|element| elements.extend(element.rotate_right(1).to_le_bytes()));
        }
        Dtype::F32 => {
            let turned = high
                .iter()
                .zip(low.chunks_exact(3))
                .map(|(top, rest)| u32::from_le_bytes([rest[0], rest[1], rest[2], *top]));
            turned.for_each(|element| elements.extend(element.rotate_right(1).to_le_bytes()));
        }
    }
}

const HEAD: usize = 16;
/// Elements of a block.
const BLOCK: usize = 1 << 17;
/// Marks a block whose highest bytes are stored.
const STORED: u32 = 1 << 31;
