//! A mapped and checked safetensors file.

mod header;

use std::fs::File;
use std::io;
use std::num::NonZeroU64;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use memmap2::Mmap;

use crate::tensor::{TensorError, TensorView};
use crate::truncation::Registration;
use header::{Entry, Tensors};

/// A safetensors file mapped read-only.
///
/// Opening checks the header against the length of the file. Every name is unique, and every tensor has as many bytes
/// as its shape needs and lies inside the file. No tensors overlap, and no byte is unused. Equal tensors may be stored
/// once: a name that `__metadata__` maps to a stored tensor is that tensor. The file must not be truncated while it is
/// mapped: reading removed bytes ends the process with SIGBUS. See [`report_unreadable_files`](crate::report_unreadable_files).
#[derive(Debug)]
pub struct TensorFile {
    /// Before the mapping, so that it is dropped first.
    _registration: Registration,
    path: PathBuf,
    file: File,
    map: Mmap,
    /// The file system keeps its files in memory.
    is_in_memory: bool,
    /// In the order of their names.
    tensors: Vec<(Box<str>, Entry)>,
    /// Names that `__metadata__` gives to stored tensors.
    aliases: Vec<String>,
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
        let (tensors, aliases) = read_header(path, &map)?;
        let named = tensors.iter().map(|(name, entry)| (&**name, entry.bytes.clone()));
        let registration = Registration::new(path, &map, named);
        let path = path.to_owned();
        let is_in_memory = is_in_memory(&file);
        Ok(TensorFile {
            _registration: registration,
            path,
            file,
            map,
            is_in_memory,
            tensors,
            aliases,
        })
    }

    /// The path of the file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Names of all tensors, sorted.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.iter().map(|(name, _)| &**name)
    }

    /// Names of tensors that are stored once under another name.
    pub(crate) fn aliases(&self) -> impl Iterator<Item = &str> {
        self.aliases.iter().map(String::as_str)
    }

    /// Returns true if a tensor of that name exists.
    pub fn contains(&self, name: &str) -> bool {
        header::find(&self.tensors, name).is_some()
    }

    /// The tensor of that name, or [`TensorError::NotFound`].
    pub fn tensor(&self, name: &str) -> Result<TensorView<'_>, TensorError> {
        let (name, entry) =
            header::find(&self.tensors, name).ok_or_else(|| TensorError::NotFound {
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

    /// Copies bytes of a tensor of this file from `offset` on. Reads them without the mapping: samples of a tensor then
    /// cost no page faults, and from a disk no more than themselves. Bytes that were not in memory do not stay there.
    ///
    /// # Panics
    /// If the tensor is of another file, or is too short.
    pub(crate) fn copy_from(&self, tensor: &TensorView<'_>, offset: usize, out: &mut [u8]) {
        let start = tensor.data.as_ptr().addr() - self.map.as_ptr().addr() + offset;
        let cached = self.read_cached(start, out);
        if cached == Some(out.len()) {
            return;
        }
        if self.file.read_exact_at(out, start as u64).is_err() {
            // The handler of SIGBUS names a file that has become unreadable.
            out.copy_from_slice(&self.map[start..start + out.len()]);
        }
        if cached.is_some() {
            self.drop_cached(start, out.len());
        }
    }

    /// Reads bytes that are in the page cache, without the disk, and returns their number. `None` if the file system
    /// cannot tell.
    #[cfg(target_os = "linux")]
    fn read_cached(&self, start: usize, out: &mut [u8]) -> Option<usize> {
        let flags = rustix::io::ReadWriteFlags::NOWAIT;
        let parts = &mut [io::IoSliceMut::new(out)];
        match rustix::io::preadv2(&self.file, parts, start as u64, flags) {
            Ok(num_bytes) => Some(num_bytes),
            Err(rustix::io::Errno::AGAIN) => Some(0),
            Err(_) => None,
        }
    }

    #[cfg(not(target_os = "linux"))]
    fn read_cached(&self, _start: usize, _out: &mut [u8]) -> Option<usize> {
        None
    }

    /// Takes the pages of a small read out of the page cache again: the system does not put huge pages where there are
    /// small ones already.
    #[cfg(target_os = "linux")]
    fn drop_cached(&self, start: usize, len: usize) {
        let first = start / PAGE_BYTES * PAGE_BYTES;
        let len = ((start + len).next_multiple_of(PAGE_BYTES) - first) as u64;
        let advice = rustix::fs::Advice::DontNeed;
        // Best effort: pages that stay make reading slower.
        let _ = rustix::fs::fadvise(&self.file, first as u64, NonZeroU64::new(len), advice);
    }

    #[cfg(not(target_os = "linux"))]
    fn drop_cached(&self, _start: usize, _len: usize) {}

    /// Returns true if bytes of this file are in the page cache, as samples show. Returns false if the file system
    /// cannot tell. Reads nothing from the disk.
    ///
    /// # Panics
    /// If the bytes are not of this file's mapping.
    pub(crate) fn is_cached(&self, data: &[u8]) -> bool {
        // Such a file system refuses reads that must not wait.
        if self.is_in_memory {
            return true;
        }
        let start = data.as_ptr().addr() - self.map.as_ptr().addr();
        let num_samples = data.len().div_ceil(CACHE_SAMPLE_BYTES).min(CACHE_SAMPLES);
        (0..num_samples).all(|idx| {
            let place = start + data.len() * idx / num_samples;
            self.read_cached(place, &mut [0]) == Some(1)
        })
    }

    /// Asks the system to read and map the file in huge pages. Any read of a byte that is not in memory then takes 2 MiB.
    /// Has no effect on file systems without huge pages.
    pub(crate) fn prefer_huge_pages(&self) {
        // Best effort: without huge pages reading takes longer.
        #[cfg(target_os = "linux")]
        let _ = self.map.advise(memmap2::Advice::HugePage);
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

fn read_header(path: &Path, bytes: &[u8]) -> Result<Tensors, TensorFileError> {
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
    let ((mut tensors, aliases), data_bytes) = header::parse(header).map_err(header_error)?;
    let expected_bytes = header_end
        .checked_add(data_bytes as u64)
        .ok_or_else(|| header_error("its tensors overflow 64 bits".to_owned()))?;
    if found_bytes < expected_bytes {
        return Err(truncated(path, found_bytes, expected_bytes));
    }
    if found_bytes > expected_bytes {
        let path = path.to_owned();
        return Err(TensorFileError::TrailingBytes { path, found_bytes, expected_bytes });
    }
    let base = header_end as usize;
    for (_, entry) in &mut tensors {
        entry.bytes = base + entry.bytes.start..base + entry.bytes.end;
    }
    Ok((tensors, aliases))
}

/// Returns true if the file system of `file` keeps its files in memory.
#[cfg(target_os = "linux")]
fn is_in_memory(file: &File) -> bool {
    rustix::fs::fstatfs(file)
        .is_ok_and(|found| MEMORY_FILE_SYSTEMS.contains(&(found.f_type as u32)))
}

#[cfg(not(target_os = "linux"))]
fn is_in_memory(_file: &File) -> bool {
    false
}

fn truncated(path: &Path, found_bytes: u64, expected_bytes: u64) -> TensorFileError {
    TensorFileError::Truncated { path: path.to_owned(), found_bytes, expected_bytes }
}

/// A safetensors file starts with the header's length as a 64-bit little-endian word.
const LENGTH_WORD_BYTES: usize = 8;
/// The format's own limit.
const MAX_HEADER_BYTES: u64 = 100_000_000;
/// Usual size of a page. On systems with larger ones, pages may stay.
const PAGE_BYTES: usize = 4096;
/// Most places of a matrix at which [`TensorFile::is_cached`] looks.
const CACHE_SAMPLES: usize = 8;
/// Bytes for each of those places: the system reads ahead at least as much, and each look is a system call.
const CACHE_SAMPLE_BYTES: usize = 64 << 10;
/// Numbers of tmpfs and ramfs, as `statfs` returns them.
#[cfg(target_os = "linux")]
const MEMORY_FILE_SYSTEMS: [u32; 2] = [0x0102_1994, 0x8584_58f6];
const LFS_PREFIX: &[u8] = b"version https://git-lfs";

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use std::io::Write;

    use super::*;

    #[test]
    fn files_of_a_memory_file_system_are_in_memory() {
        let mut file = tempfile::NamedTempFile::new_in("/dev/shm").expect("a file in /dev/shm");
        let header = br#"{"a":{"dtype":"U8","shape":[3],"data_offsets":[0,3]}}"#;
        file.write_all(&(header.len() as u64).to_le_bytes()).expect("the length");
        file.write_all(header).expect("the header");
        file.write_all(&[1, 2, 3]).expect("the values");
        let opened = TensorFile::open(file.path()).expect("a valid file");
        let tensor = opened.tensor("a").expect("the tensor");
        assert!(opened.is_cached(tensor.data), "{:?}", file.path());
    }
}
