//! Checksums of memory that both GPUs and processors compute, to find damage after a copy between GPUs.
//!
//! A checksum is two sums over all words of four bytes. Each word is mixed with its position, in one of two ways, by
//! the finaliser of SplitMix64 (Steele, Lea and Flood 2014) with two pairs of its known multipliers. It finds accidental
//! damage. It is no protection against a party that chooses the bytes.

use bytemuck::{Pod, Zeroable};

use crate::abi::DevicePtr;

/// The checksum of some ranges of memory, as one run of words.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Pod, Zeroable)]
#[repr(C)]
pub struct Checksum(pub [u64; 2]);

impl Checksum {
    /// The checksum of `parts`, computed here. A part's last bytes do not count if they are no whole word.
    #[must_use]
    pub fn of(parts: &[&[u8]]) -> Self {
        let words = parts.iter().flat_map(|part| part.as_chunks::<4>().0);
        Self::of_words(words.map(|word| u32::from_le_bytes(*word)))
    }

    /// The checksum of a run of words.
    pub(super) fn of_words(words: impl Iterator<Item = u32>) -> Self {
        let mut sums = [0u64; 2];
        for (at, word) in (1u64..).zip(words) {
            let x = u64::from(word).wrapping_add(at.wrapping_mul(STEP));
            for (sum, factors) in sums.iter_mut().zip(FACTORS) {
                *sum = sum.wrapping_add(mix(x, factors));
            }
        }
        Self(sums)
    }
}

const fn mix(x: u64, [first, second]: [u64; 2]) -> u64 {
    let x = (x ^ (x >> 30)).wrapping_mul(first);
    let x = (x ^ (x >> 27)).wrapping_mul(second);
    x ^ (x >> 31)
}

/// Memory for [`Stream::checksum`](super::Stream::checksum).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct ChecksumRange {
    from: DevicePtr,
    words: u64,
}

impl ChecksumRange {
    /// `bytes` bytes from `from` on.
    ///
    /// # Panics
    /// If they are no whole words of four bytes, or not aligned to words.
    #[must_use]
    pub const fn new(from: DevicePtr, bytes: u64) -> Self {
        assert!(bytes.is_multiple_of(4) && from.0.is_multiple_of(4), "whole words");
        Self { from, words: bytes / 4 }
    }

    #[cfg(any(feature = "cuda", feature = "emulated"))]
    pub(super) const fn words(&self) -> u64 {
        self.words
    }

    #[cfg(feature = "emulated")]
    pub(super) const fn from(&self) -> DevicePtr {
        self.from
    }
}

/// Parameters of `sy_checksum`.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(super) struct ChecksumParams {
    pub(super) ranges: [ChecksumRange; MAX_CHECKSUM_RANGES],
    pub(super) to: DevicePtr,
}

impl ChecksumParams {
    pub(super) fn new(ranges: &[ChecksumRange], to: DevicePtr) -> Self {
        let mut params = Self::zeroed();
        params.ranges[..ranges.len()].copy_from_slice(ranges);
        params.to = to;
        params
    }
}

const STEP: u64 = 0x9e37_79b9_7f4a_7c15;
const FACTORS: [[u64; 2]; 2] = [
    [0xbf58_476d_1ce4_e5b9, 0x94d0_49bb_1331_11eb],
    [0xff51_afd7_ed55_8ccd, 0xc4ce_b9fe_1a85_ec53],
];
/// Most ranges of one checksum.
pub const MAX_CHECKSUM_RANGES: usize = 4;

const _: () = assert!(size_of::<ChecksumParams>() == 72 && size_of::<Checksum>() == 16);

#[cfg(all(test, feature = "emulated"))]
mod tests {
    use std::time::{Duration, Instant};

    use rand::rngs::StdRng;
    use rand::{RngExt, SeedableRng};

    use super::*;
    use crate::gpu::Gpu;

    /// Zeros give the sums of SplitMix64's first numbers from the seed 0, as its authors publish them.
    #[test]
    fn the_first_sum_of_zeros_is_that_of_splitmix64() {
        let published = [0xe220_a839_7b1d_cdaf_u64, 0x6e78_9e6a_a1b9_65f4, 0x06c4_5d18_8009_454f];
        for num_words in 1..=published.len() {
            let expected = published[..num_words].iter().fold(0u64, |sum, x| sum.wrapping_add(*x));
            assert_eq!(Checksum::of(&[&vec![0; num_words * 4]]).0[0], expected);
        }
    }

    #[test]
    fn a_gpu_computes_the_checksum_and_any_damage_changes_it() {
        let seed = rand::random::<u64>();
        println!("seed {seed}");
        let mut rng = StdRng::seed_from_u64(seed);
        let gpu = Gpu::open_emulated(0).expect("a GPU in software");
        let deadline = Instant::now() + Duration::from_secs(30);
        let lens: Vec<usize> = (0..3).map(|_| rng.random_range(1..3000usize) * 4).collect();
        let mut parts: Vec<Vec<u8>> =
            lens.iter().map(|len| (0..*len).map(|_| rng.random()).collect()).collect();
        let of = |parts: &[Vec<u8>]| Checksum::of(&parts.iter().map(|p| &**p).collect::<Vec<_>>());
        let stream = gpu.stream().expect("a stream");
        let sum = gpu.alloc(16).expect("memory");
        let buffers: Vec<_> = parts
            .iter()
            .map(|part| {
                let buffer = gpu.alloc(part.len() as u64).expect("memory");
                gpu.write(&buffer, 0, part, deadline).expect("written");
                buffer
            })
            .collect();
        let ranges: Vec<_> = buffers
            .iter()
            .zip(&lens)
            .map(|(buffer, len)| ChecksumRange::new(buffer.ptr(), *len as u64))
            .collect();
        // SAFETY: live memory of these lengths, and nothing else uses it.
        unsafe { stream.checksum(&ranges, sum.ptr()) }.expect("launched");
        stream.wait(deadline).expect("done");
        let mut found = [0; 16];
        gpu.read(&sum, 0, &mut found, deadline).expect("read");
        let expected = of(&parts);
        assert_eq!(bytemuck::pod_read_unaligned::<Checksum>(&found), expected);
        // A changed bit, and two words that change places.
        let part = rng.random_range(0..parts.len());
        let at = rng.random_range(0..parts[part].len());
        parts[part][at] ^= 1 << rng.random_range(0..8);
        assert_ne!(of(&parts), expected);
        parts[part][at] ^= 0xff;
        assert_ne!(of(&parts), expected);
        let [first, second] = [[1, 2, 3, 4, 5, 6, 7, 8], [5, 6, 7, 8, 1, 2, 3, 4]];
        assert_ne!(Checksum::of(&[&first]), Checksum::of(&[&second]));
    }
}
