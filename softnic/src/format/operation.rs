//! Operations of requests.

/// Local memory of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Local {
    /// First byte.
    pub address: u64,
    /// Local key.
    pub lkey: u32,
    /// Bytes.
    pub num_bytes: u32,
}

/// The peer's memory of a request; the length is that of the local part.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Remote {
    /// First byte, in the peer's address space.
    pub address: u64,
    /// Remote key.
    pub rkey: u32,
}

/// Source of a write's bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Source {
    /// Out of memory, one piece after the other.
    Gather(Vec<Local>),
    /// Out of the request.
    Inline(Vec<u8>),
}

impl Source {
    /// Bytes in all.
    #[must_use]
    pub fn num_bytes(&self) -> u64 {
        match self {
            Self::Gather(pieces) => pieces.iter().map(|piece| u64::from(piece.num_bytes)).sum(),
            Self::Inline(bytes) => bytes.len() as u64,
        }
    }
}

/// Change of a word by an atomic.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Atomic {
    /// Adds to 8 bytes.
    Add8(u64),
    /// Adds to 4 bytes; a set bit of the second ends the carry behind it.
    MaskedAdd4(u32, u32),
    /// Adds to 8 bytes; likewise.
    MaskedAdd8(u64, u64),
    /// Stores `swap` over 8 bytes that are `compare`.
    Swap8 {
        /// New value.
        swap: u64,
        /// Expected value.
        compare: u64,
    },
    /// The same under masks.
    MaskedSwap8 {
        /// New value.
        swap: u64,
        /// Expected value.
        compare: u64,
        /// Bits to store.
        swap_mask: u64,
        /// Bits to compare.
        compare_mask: u64,
    },
}

impl Atomic {
    /// Bytes of the word.
    #[must_use]
    pub const fn num_bytes(self) -> u32 {
        if matches!(self, Self::MaskedAdd4(..)) { 4 } else { 8 }
    }

    /// The word after, given the word before.
    #[must_use]
    pub const fn apply(self, word: u64) -> u64 {
        // Without carries across marked bits: those are added without carry, the others with it.
        const fn add(word: u64, value: u64, boundary: u64) -> u64 {
            (word & !boundary).wrapping_add(value & !boundary) ^ ((word ^ value) & boundary)
        }
        match self {
            Self::Add8(value) => word.wrapping_add(value),
            Self::MaskedAdd4(value, boundary) => {
                add(word, value as u64, boundary as u64) & 0xffff_ffff
            }
            Self::MaskedAdd8(value, boundary) => add(word, value, boundary),
            Self::Swap8 { swap, compare } => {
                if word == compare {
                    swap
                } else {
                    word
                }
            }
            Self::MaskedSwap8 { swap, compare, swap_mask, compare_mask } => {
                if (word ^ compare) & compare_mask == 0 {
                    (word & !swap_mask) | (swap & swap_mask)
                } else {
                    word
                }
            }
        }
    }
}

/// Operation of a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Operation {
    /// Nothing.
    Nop,
    /// Reads local memory and discards it.
    Dump(Local),
    /// Copies to the peer.
    Write(Remote, Source),
    /// Copies to the peer, and puts a completion into its queue.
    WriteImm(Remote, Source, u32),
    /// Copies from the peer.
    Read(Remote, Vec<Local>),
    /// Changes a word of the peer; its old value lands locally.
    Atomic(Remote, Atomic, Local),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn carries_stop_at_boundaries() {
        // Against an addition field by field.
        let seed = rand::random::<u64>();
        println!("seed {seed}");
        let mut rng: rand::rngs::SmallRng = rand::SeedableRng::seed_from_u64(seed);
        use rand::RngExt;
        for _ in 0..2000 {
            let (word, value): (u64, u64) = (rng.random(), rng.random());
            let boundary = rng.random::<u64>() & rng.random::<u64>() & rng.random::<u64>();
            let (mut expected, mut carry) = (0u64, 0u64);
            for bit in 0..64 {
                let sum = (word >> bit & 1) + (value >> bit & 1) + carry;
                expected |= (sum & 1) << bit;
                carry = if boundary >> bit & 1 != 0 { 0 } else { sum >> 1 };
            }
            assert_eq!(Atomic::MaskedAdd8(value, boundary).apply(word), expected);
            let narrow = Atomic::MaskedAdd4(value as u32, boundary as u32);
            assert_eq!(narrow.apply(word & 0xffff_ffff), expected & 0xffff_ffff);
        }
        assert_eq!(Atomic::MaskedAdd8(0b1010, u64::MAX).apply(0b0110), 0b1100);
    }
}
