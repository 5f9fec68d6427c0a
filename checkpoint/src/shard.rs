//! A mapped and checked safetensors file.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};

use memmap2::Mmap;
use safetensors::tensor::Metadata;

use crate::dtype::DType;
use crate::tensor::{TensorError, TensorView};

/// A safetensors file mapped read-only.
///
/// Opening checks the header against the length of the file: every listed tensor lies inside the file, no
/// tensors overlap, and no byte is unused. The file must not be truncated while it is mapped. As with any
/// memory map, reading removed bytes ends the process with SIGBUS.
#[derive(Debug)]
pub struct TensorFile {
    path: PathBuf,
    map: Mmap,
    tensors: BTreeMap<String, Entry>,
}

#[derive(Debug)]
struct Entry {
    dtype: DType,
    shape: Box<[usize]>,
    bytes: Range<usize>,
}

impl TensorFile {
    /// Maps `path` and checks its header.
    pub fn open(path: impl AsRef<Path>) -> Result<TensorFile, TensorFileError> {
        let path = path.as_ref();
        let io_error = |source| TensorFileError::Io { path: path.to_owned(), source };
        let file = File::open(path).map_err(io_error)?;
        let len_bytes = file.metadata().map_err(io_error)?.len();
        if len_bytes < LENGTH_WORD_BYTES as u64 {
            return Err(truncated(path, len_bytes, LENGTH_WORD_BYTES as u64));
        }
        // SAFETY: the mapping is private to this process and read-only. The operator provides the files.
        // A file that is rewritten while it is mapped gives wrong numbers, but every offset used was
        // copied out and checked here.
        let map = unsafe { Mmap::map(&file) }.map_err(io_error)?;
        let tensors = read_header(path, &map)?;
        Ok(TensorFile { path: path.to_owned(), map, tensors })
    }

    /// The path of the file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Names of all tensors, sorted.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// Returns true if a tensor of that name exists.
    pub fn contains(&self, name: &str) -> bool {
        self.tensors.contains_key(name)
    }

    /// The tensor of that name, or [`TensorError::NotFound`].
    pub fn tensor(&self, name: &str) -> Result<TensorView<'_>, TensorError> {
        let (name, entry) =
            self.tensors.get_key_value(name).ok_or_else(|| TensorError::NotFound {
                name: name.to_owned(),
                location: self.path.display().to_string(),
            })?;
        Ok(TensorView {
            name,
            dtype: entry.dtype,
            shape: &entry.shape,
            data: &self.map[entry.bytes.clone()],
        })
    }

    /// Length of the file in bytes.
    pub fn len_bytes(&self) -> u64 {
        self.map.len() as u64
    }
}

/// Error of opening a safetensors file.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the messages name every field")]
pub enum TensorFileError {
    /// The file cannot be opened or mapped.
    #[error("cannot read {}: {source}", path.display())]
    Io { path: PathBuf, source: io::Error },
    /// The file is shorter than its header says.
    #[error(
        "{} is truncated: {found_bytes} bytes found, {expected_bytes} expected; download it again",
        path.display()
    )]
    Truncated { path: PathBuf, found_bytes: u64, expected_bytes: u64 },
    /// The file is longer than its header says.
    #[error(
        "{} is too long: {found_bytes} bytes found, {expected_bytes} expected; download it again",
        path.display()
    )]
    TrailingBytes { path: PathBuf, found_bytes: u64, expected_bytes: u64 },
    /// The file is a Git LFS pointer instead of the weights.
    #[error("{} is a Git LFS pointer, not the weights; run `git lfs pull` in its repository", path.display())]
    LfsPointer { path: PathBuf },
    /// The header is not a valid safetensors header.
    #[error("{} has no valid safetensors header: {reason}", path.display())]
    Header { path: PathBuf, reason: String },
}

fn read_header(path: &Path, bytes: &[u8]) -> Result<BTreeMap<String, Entry>, TensorFileError> {
    let header_error = |reason: String| TensorFileError::Header { path: path.to_owned(), reason };
    let found_bytes = bytes.len() as u64;
    let Some((word, rest)) = bytes.split_first_chunk::<LENGTH_WORD_BYTES>() else {
        return Err(truncated(path, found_bytes, LENGTH_WORD_BYTES as u64));
    };
    if bytes.starts_with(LFS_PREFIX) {
        return Err(TensorFileError::LfsPointer { path: path.to_owned() });
    }
    let header_bytes = u64::from_le_bytes(*word);
    if header_bytes > MAX_HEADER_BYTES {
        return Err(header_error(format!(
            "its header claims {header_bytes} bytes, at most {MAX_HEADER_BYTES} are allowed"
        )));
    }
    let header_end = LENGTH_WORD_BYTES as u64 + header_bytes;
    let Some(header) = rest.get(..header_bytes as usize) else {
        return Err(truncated(path, found_bytes, header_end));
    };
    // The deserializer of Metadata checks that tensors have no gaps and no overlaps, and that each has
    // exactly shape × dtype bytes.
    let metadata: Metadata =
        serde_json::from_slice(header).map_err(|e| header_error(e.to_string()))?;
    let expected_bytes = header_end
        .checked_add(metadata.data_len() as u64)
        .ok_or_else(|| header_error("its tensors overflow 64 bits".to_owned()))?;
    if found_bytes < expected_bytes {
        return Err(truncated(path, found_bytes, expected_bytes));
    }
    if found_bytes > expected_bytes {
        let path = path.to_owned();
        return Err(TensorFileError::TrailingBytes { path, found_bytes, expected_bytes });
    }
    let base = header_end as usize;
    let tensors = metadata.tensors().into_iter().map(|(name, info)| {
        let (start, end) = info.data_offsets;
        let dtype = DType::from_safetensors(info.dtype);
        let shape = info.shape.clone().into_boxed_slice();
        (name, Entry { dtype, shape, bytes: base + start..base + end })
    });
    Ok(tensors.collect())
}

fn truncated(path: &Path, found_bytes: u64, expected_bytes: u64) -> TensorFileError {
    TensorFileError::Truncated { path: path.to_owned(), found_bytes, expected_bytes }
}

/// A safetensors file starts with the header's length as a 64-bit little-endian word.
const LENGTH_WORD_BYTES: usize = 8;
/// The format's own limit.
const MAX_HEADER_BYTES: u64 = 100_000_000;
const LFS_PREFIX: &[u8] = b"version https://git-lfs";
