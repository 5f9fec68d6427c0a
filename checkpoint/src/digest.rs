//! Identity of the served experts, which peers compare when they connect.

use std::fmt;
use std::str::FromStr;
use std::sync::atomic::{AtomicUsize, Ordering};

use sha2::{Digest, Sha256};

use crate::open::Checkpoint;
use crate::shard::TensorFile;
use crate::tensor::{TensorError, TensorView};

/// SHA-256 over the experts' parameters and the digests of their tensors.
///
/// It covers what a server of experts serves: sizes, arithmetic, and names, dtypes, shapes and values of the routed
/// experts' tensors. It is independent of the path, the sharding, the formatting of `config.json` and of tensors
/// that are no experts.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Fingerprint(pub [u8; 32]);

/// How many bytes of each tensor a digest covers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Coverage {
    /// At least 64 KiB of each matrix, spread over it at places that its name decides, or all if it is smaller.
    #[default]
    Sampled,
    /// All bytes.
    Full,
}

/// Digests of the tensors of all routed experts, in the order of their names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorDigests {
    coverage: Coverage,
    canonical: String,
    tensors: Vec<TensorDigest>,
}

/// The digest of one tensor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorDigest {
    /// The tensor's name.
    pub name: String,
    /// The first half of BLAKE3 over dtype, shape and the covered bytes.
    pub digest: [u8; 16],
}

impl Checkpoint {
    /// Reads and digests the tensors of all routed experts on `threads` threads, on four times as many if it reads
    /// samples. Calls `progress` on the calling thread with tensors done and in total, at least once.
    ///
    /// # Errors
    /// [`TensorError::NoExperts`] if the directory holds no experts.
    pub fn digests(
        &self,
        coverage: Coverage,
        threads: usize,
        progress: &mut dyn FnMut(usize, usize),
    ) -> Result<TensorDigests, TensorError> {
        let Some(layout) = self.layout() else {
            let layer = self.config().moe_layers().first().copied().unwrap_or(0);
            // The error of the first expert says what is missing.
            self.expert(layer, 0)?;
            return Ok(TensorDigests { coverage, canonical: String::new(), tensors: Vec::new() });
        };
        let is_served = |name: &&str| {
            let layer = layout.layer_of_expert_tensor(name);
            layer.is_some_and(|layer| self.config().is_moe_layer(layer))
        };
        let names: Vec<&str> = self.names().filter(is_served).collect();
        if coverage == Coverage::Full {
            self.prefer_huge_pages();
        }
        let next = AtomicUsize::new(0);
        let done = AtomicUsize::new(0);
        let work = || {
            let mut found = Vec::new();
            let mut samples = Vec::new();
            loop {
                let first = next.fetch_add(TENSORS_AT_ONCE, Ordering::Relaxed);
                let Some(batch) = names.get(first..) else { break };
                let batch = &batch[..batch.len().min(TENSORS_AT_ONCE)];
                if batch.is_empty() {
                    break;
                }
                for (idx, name) in batch.iter().enumerate() {
                    // Every listed name resolves.
                    if let Some(stored) = self.stored(name) {
                        let experts = self.config().num_experts as usize;
                        found.push((first + idx, digest(stored, coverage, experts, &mut samples)));
                    }
                }
                done.fetch_add(batch.len(), Ordering::Relaxed);
            }
            found
        };
        let mut found = std::thread::scope(|scope| {
            let threads = match coverage {
                // They wait for the disk most of the time, unless the files are in memory.
                Coverage::Sampled => SAMPLING_THREADS.saturating_mul(threads.max(1)),
                Coverage::Full => threads.max(1),
            };
            // With fewer threads than asked for, the others do their part.
            let start = |_| std::thread::Builder::new().spawn_scoped(scope, work).ok();
            let helpers: Vec<_> = (1..threads.min(MAX_THREADS)).map_while(start).collect();
            let mut found = work();
            progress(done.load(Ordering::Relaxed), names.len());
            for helper in helpers {
                // A panic of a helper is one of this thread.
                found
                    .extend(helper.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
            }
            progress(names.len(), names.len());
            found
        });
        found.sort_by_key(|(idx, _)| *idx);
        let tensors = found
            .into_iter()
            .map(|(idx, digest)| TensorDigest { name: names[idx].to_owned(), digest })
            .collect();
        let mut canonical = self.config().canonical();
        for layer in self.config().moe_layers() {
            // An expert that cannot be read is refused when it is loaded.
            let rules = self.reading_rules(layer);
            canonical.push_str(rules.as_deref().unwrap_or("unreadable"));
            canonical.push('\n');
        }
        if let Some(quantization) = &self.config().quantization {
            let rules = (quantization.gptq_zeros_less_one, quantization.symmetric);
            canonical.push_str(&format!("zero points {rules:?}\n"));
        }
        Ok(TensorDigests { coverage, canonical, tensors })
    }

    /// The sampled digest of one tensor, as in [`digests`](Self::digests). Reads about 64 KiB of a matrix. `None` if no
    /// tensor has that name.
    #[must_use]
    pub fn sampled_digest(&self, name: &str) -> Option<[u8; 16]> {
        let stored = self.stored(name)?;
        let num_experts = self.config().num_experts as usize;
        Some(digest(stored, Coverage::Sampled, num_experts, &mut Vec::new()))
    }

    /// The fingerprint over sampled bytes. Reads at least 64 KiB of each expert's matrices on all processors. Store
    /// the result: each call computes it again.
    ///
    /// # Errors
    /// As for [`digests`](Self::digests).
    pub fn fingerprint(&self) -> Result<Fingerprint, TensorError> {
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        Ok(self.digests(Coverage::Sampled, threads, &mut |_, _| {})?.fingerprint())
    }
}

impl TensorDigests {
    /// The digests, by name.
    #[must_use]
    pub fn tensors(&self) -> &[TensorDigest] {
        &self.tensors
    }

    /// How much they cover.
    #[must_use]
    pub fn coverage(&self) -> Coverage {
        self.coverage
    }

    /// One fingerprint for all of them, the sizes and the arithmetic.
    #[must_use]
    pub fn fingerprint(&self) -> Fingerprint {
        let mut hash = Sha256::new();
        hash.update(match self.coverage {
            Coverage::Sampled => DOMAIN_SAMPLED,
            Coverage::Full => DOMAIN_FULL,
        });
        hash.update(&self.canonical);
        for tensor in &self.tensors {
            // Lengths first, so that two lists of tensors never have the same byte stream.
            hash.update((tensor.name.len() as u64).to_le_bytes());
            hash.update(&tensor.name);
            hash.update(tensor.digest);
        }
        Fingerprint(hash.finalize().into())
    }

    /// Names of the first `limit` tensors that differ from `other` or that only one of the two has.
    #[must_use]
    pub fn differences(&self, other: &[TensorDigest], limit: usize) -> Vec<String> {
        let (mut ours, mut theirs) = (self.tensors.iter().peekable(), other.iter().peekable());
        let mut found = Vec::new();
        while found.len() < limit {
            match (ours.peek(), theirs.peek()) {
                (None, None) => break,
                (Some(a), Some(b)) if a.name == b.name => {
                    if a.digest != b.digest {
                        found.push(a.name.clone());
                    }
                    ours.next();
                    theirs.next();
                }
                (Some(a), b) if b.is_none_or(|b| a.name < b.name) => {
                    found.push(format!("{} (here only)", a.name));
                    ours.next();
                }
                (_, Some(b)) => {
                    found.push(format!("{} (there only)", b.name));
                    theirs.next();
                }
                (Some(_), None) => break,
            }
        }
        found
    }
}

/// The digest of a tensor. `samples` is memory for reuse.
fn digest(
    (file, tensor): (&TensorFile, TensorView<'_>),
    coverage: Coverage,
    num_experts: usize,
    samples: &mut Vec<u8>,
) -> [u8; 16] {
    let mut hash = blake3::Hasher::new();
    hash.update(tensor.dtype.name().as_bytes());
    hash.update(&[0]);
    for dim in tensor.shape {
        hash.update(&(*dim as u64).to_le_bytes());
    }
    // A fused tensor holds one or two matrices for each expert.
    let matrices = match tensor.shape {
        [experts, _, ..] if *experts == num_experts && tensor.shape.len() > 2 => 2 * num_experts,
        _ => 1,
    };
    let num_bytes = tensor.data.len();
    if coverage == Coverage::Full {
        hash.update(tensor.data);
    } else if num_bytes <= CHUNKS * matrices * CHUNK_BYTES {
        samples.resize(num_bytes, 0);
        file.copy_from(&tensor, 0, samples);
        hash.update(samples);
    } else {
        // A whole matrix at once: the hash is fastest with long inputs.
        samples.resize(CHUNKS * CHUNK_BYTES, 0);
        let mut places = places(tensor.name, num_bytes, CHUNKS * matrices);
        for _ in 0..matrices {
            for (chunk, place) in samples.chunks_exact_mut(CHUNK_BYTES).zip(&mut places) {
                file.copy_from(&tensor, place, chunk);
            }
            hash.update(samples);
        }
    }
    let mut out = [0; 16];
    out.copy_from_slice(&hash.finalize().as_bytes()[..16]);
    out
}

/// Offsets of the samples of a tensor, ascending: one in each of `chunks` equal parts, at a place that the name decides.
fn places(name: &str, num_bytes: usize, chunks: usize) -> impl Iterator<Item = usize> {
    let seed = *blake3::hash(name.as_bytes()).as_bytes();
    let mut state = 0u64;
    (0..chunks).map(move |chunk| {
        let (words, _) = seed.as_chunks::<8>();
        state = splitmix(state ^ u64::from_le_bytes(words[chunk % words.len()]));
        let start = num_bytes * chunk / chunks;
        let room = num_bytes * (chunk + 1) / chunks - start - CHUNK_BYTES;
        start + (state % (room as u64 + 1)) as usize
    })
}

/// One step of SplitMix64 (Steele, Lea and Flood 2014).
fn splitmix(state: u64) -> u64 {
    let z = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

impl fmt::Display for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Fingerprint({self})")
    }
}

impl FromStr for Fingerprint {
    type Err = ParseFingerprintError;

    /// Reads 64 hexadecimal digits.
    fn from_str(text: &str) -> Result<Fingerprint, ParseFingerprintError> {
        let error = || ParseFingerprintError { found: text.chars().take(80).collect() };
        if text.len() != 64 || !text.bytes().all(|b| b.is_ascii_hexdigit()) {
            return Err(error());
        }
        let mut bytes = [0; 32];
        for (i, byte) in bytes.iter_mut().enumerate() {
            let pair = text.get(2 * i..2 * i + 2).ok_or_else(error)?;
            *byte = u8::from_str_radix(pair, 16).map_err(|_| error())?;
        }
        Ok(Fingerprint(bytes))
    }
}

/// Error of parsing a fingerprint.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("'{found}' is not a model fingerprint, which has 64 hexadecimal digits")]
pub struct ParseFingerprintError {
    found: String,
}

/// Change these when the meaning of the hashed bytes changes.
const DOMAIN_SAMPLED: &[u8] = b"switchyard experts fingerprint 2, sampled\n";
const DOMAIN_FULL: &[u8] = b"switchyard experts fingerprint 2, full\n";
/// Samples of a matrix, and bytes of each: 64 KiB together.
const CHUNKS: usize = 16;
const CHUNK_BYTES: usize = 4096;
/// Threads that read samples, for each thread that the caller allows.
const SAMPLING_THREADS: usize = 4;
/// More threads wait for the same disk.
const MAX_THREADS: usize = 4096;
/// Tensors that a thread takes at once.
const TENSORS_AT_ONCE: usize = 16;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_form_round_trips_and_rejects_what_is_not_hex() {
        let fingerprint = Fingerprint(std::array::from_fn(|i| (i * 37 + 5) as u8));
        let text = fingerprint.to_string();
        assert_eq!(text.len(), 64);
        assert_eq!(text.parse::<Fingerprint>().unwrap(), fingerprint);
        assert_eq!(text.to_uppercase().parse::<Fingerprint>().unwrap(), fingerprint);
        let multibyte = "é".repeat(32);
        for bad in ["", &text[1..], &format!("{text}0"), &text.replace('2', "g"), &multibyte] {
            let error = bad.parse::<Fingerprint>().unwrap_err().to_string();
            assert!(error.contains("64 hexadecimal digits"), "{error}");
        }
    }
}
