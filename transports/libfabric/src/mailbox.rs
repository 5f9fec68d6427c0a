//! Mailboxes: small messages (*mail*) that one write puts into a ring of cells in the receiver's
//! memory.
//!
//! Over TCP a write of one cell costs the provider less than a message: it matches no receive,
//! completes nothing and signals no thread. The provider also promises nothing about such a write.
//! So every cell carries its number and a checksum over all of its words, and is valid once both
//! match:
//!
//! ```text
//! 0     8                14    16
//! | sum | number of mail | len | message: header, then parts | … | 128
//! ```
//!
//! A cell that is still incomplete, or still from the lap before, is read again later. Messages
//! that do not fit a cell, or find no free one, are sent as messages. Both share sequence numbers,
//! which restore the order ([`Inbound`](super::inbound::Inbound)). Every message of the receiver
//! says how many cells it has read.

use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

use super::owner::CallError;
use super::port::{MemoryRegistration, Port, Rights};
use p2p_core::region::Region;

/// Bytes of a cell. Providers over TCP inject this much without a copy of their own.
pub(super) const CELL_BYTES: usize = 128;
/// Longest message that fits a cell.
pub(super) const MAX_MAIL_BYTES: usize = CELL_BYTES - CELL_HEAD_BYTES;
/// Cells of a mailbox. They fill one page.
pub(super) const NUM_CELLS: u32 = 32;

/// Address of a mailbox, as a peer writes to it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct MailboxAddress {
    pub(super) address: u64,
    pub(super) key: u64,
}

/// The mailbox of one pair, at its receiver.
#[derive(Debug)]
pub(super) struct Mailbox {
    // Dropped before the memory.
    registered: MemoryRegistration,
    pub(super) memory: Region,
}

/// Position of the next mail of a pair.
#[derive(Debug, Clone, Copy)]
pub(super) struct MailboxCursor {
    first: NonNull<u8>,
    number: u64,
    token: u64,
}

// SAFETY: points into a mailbox that stays mapped as long as the cursor is in use; see
// `Mailbox::cursor`.
unsafe impl Send for MailboxCursor {}

/// A message that was copied out of a cell.
#[derive(Debug)]
pub(super) struct Mail {
    words: [u64; NUM_WORDS],
    len: usize,
}

impl Mailbox {
    /// An empty mailbox.
    pub(super) fn new(port: &Port) -> Result<Self, CallError> {
        let memory = Region::anonymous(MAILBOX_BYTES).map_err(|error| CallError {
            op: "make a mailbox",
            code: 12,
            text: error.to_string(),
        })?;
        let registered = port.register_region(&memory, Rights::ReadWrite)?;
        Ok(Self { registered, memory })
    }

    /// Revokes the peer's key. Returns the memory, which writes on their way may still reach.
    pub(super) fn retire(self) -> Region {
        let Self { registered, memory } = self;
        drop(registered);
        memory
    }

    /// The address to send to the peer.
    pub(super) fn address(&self) -> MailboxAddress {
        MailboxAddress { address: self.registered.base, key: self.registered.key() }
    }

    /// Position of the first mail. Valid mail carries `token`.
    ///
    /// # Safety
    /// Neither the cursor nor a copy of it is used once the mailbox is dropped.
    pub(super) unsafe fn cursor(&self, token: u64) -> MailboxCursor {
        MailboxCursor { first: self.memory.as_ptr(), number: 1, token }
    }
}

impl MailboxCursor {
    /// True if the cell carries the expected number. The rest may still be on its way. One load.
    #[inline]
    pub(super) fn has_started(&self) -> bool {
        self.word(1).load(Ordering::Acquire) & NUMBER_MASK == self.number & NUMBER_MASK
    }

    /// The mail, if it has arrived completely.
    #[inline]
    pub(super) fn read(&self) -> Option<Mail> {
        let mut words = [0; NUM_WORDS];
        // SYNC POINT `mail`: a concurrent write makes the checksum wrong, but is no data race.
        words[1] = self.word(1).load(Ordering::Acquire);
        let number_and_len = u64::from_le(words[1]);
        let len = (number_and_len >> NUMBER_BITS) as usize;
        if len > MAX_MAIL_BYTES || number_and_len & NUMBER_MASK != self.number & NUMBER_MASK {
            return None;
        }
        let num_words = CELL_HEAD_WORDS + len.div_ceil(8);
        words[0] = self.word(0).load(Ordering::Relaxed);
        for (nth, word) in words.iter_mut().enumerate().take(num_words).skip(CELL_HEAD_WORDS) {
            *word = self.word(nth).load(Ordering::Relaxed);
        }
        (u64::from_le(words[0]) == sum(self.token, &words[1..num_words]))
            .then_some(Mail { words, len })
    }

    /// Position of the next mail.
    pub(super) const fn next(self) -> Self {
        Self { number: self.number + 1, ..self }
    }

    /// Mails read, modulo 2³².
    pub(super) const fn num_read(self) -> u32 {
        (self.number - 1) as u32
    }

    fn word(&self, nth: usize) -> &AtomicU64 {
        let cell = cell_of(self.number);
        // SAFETY: within the mailbox, which is mapped (see `Mailbox::cursor`) and starts at a page;
        // `nth < NUM_WORDS`. Words of a mailbox are only accessed atomically.
        unsafe { AtomicU64::from_ptr(self.first.as_ptr().add(cell * CELL_BYTES + nth * 8).cast()) }
    }
}

impl Mail {
    pub(super) fn message(&self) -> &[u8] {
        let bytes: &[u8] = bytemuck::cast_slice(&self.words[CELL_HEAD_WORDS..]);
        &bytes[..self.len]
    }
}

/// Encodes mail `number`, counted from 1, for the receiver that chose `token`. Returns the cell and
/// the number of bytes to write, or `None` if the message does not fit.
#[inline]
pub(super) fn encode_cell(
    number: u64,
    token: u64,
    message: &[u8],
) -> Option<([u64; NUM_WORDS], usize)> {
    let len = message.len();
    if len > MAX_MAIL_BYTES {
        return None;
    }
    let mut words = [0u64; NUM_WORDS];
    bytemuck::cast_slice_mut::<u64, u8>(&mut words[CELL_HEAD_WORDS..])[..len]
        .copy_from_slice(message);
    words[1] = (number & NUMBER_MASK | (len as u64) << NUMBER_BITS).to_le();
    let num_words = CELL_HEAD_WORDS + len.div_ceil(8);
    words[0] = sum(token, &words[1..num_words]).to_le();
    Some((words, num_words * 8))
}

/// Offset of the cell of mail `number` in the mailbox.
pub(super) const fn offset_of(number: u64) -> u64 {
    (cell_of(number) * CELL_BYTES) as u64
}

const fn cell_of(number: u64) -> usize {
    ((number - 1) % NUM_CELLS as u64) as usize
}

/// A checksum that depends on every bit of every word and on their order. It rejects torn cells and
/// cells that another peer wrote. A peer can only deceive itself.
fn sum(token: u64, words: &[u64]) -> u64 {
    words.iter().fold(token ^ words.len() as u64, |sum, word| {
        let mixed = (sum ^ u64::from_le(*word)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        mixed ^ mixed >> 32
    })
}

/// Reads `bytes` as a cell, first unchanged and then with the expected number and checksum. Passes
/// each message found to `each`.
#[cfg(fuzzing)]
pub(super) fn check(bytes: &[u8], mut each: impl FnMut(&[u8])) {
    use bytemuck::{bytes_of_mut, cast_slice};

    const TOKEN: u64 = 0x0123_4567_89ab_cdef;
    thread_local! {
        static MEMORY: Region = Region::anonymous(MAILBOX_BYTES).expect("memory");
    }
    let Some((number, cell)) = bytes.split_first_chunk() else { return };
    let number = u64::from_le_bytes(*number).max(1);
    let mut words = [0u64; NUM_WORDS];
    let used = cell.len().min(CELL_BYTES);
    bytes_of_mut(&mut words)[..used].copy_from_slice(&cell[..used]);
    MEMORY.with(|memory| {
        let cursor = MailboxCursor { first: memory.as_ptr(), number, token: TOKEN };
        let mut read = |words: &[u64; NUM_WORDS]| {
            for (nth, word) in words.iter().enumerate() {
                cursor.word(nth).store(*word, Ordering::Relaxed);
            }
            let mail = cursor.read()?;
            assert!(cursor.has_started() && mail.message().len() <= MAX_MAIL_BYTES);
            each(mail.message());
            Some(mail.len)
        };
        read(&words);
        let len = (u64::from_le(words[1]) >> NUMBER_BITS) as usize;
        let message = &cast_slice(&words)[CELL_HEAD_BYTES..];
        let encoded = message.get(..len).and_then(|message| encode_cell(number, TOKEN, message));
        let Some((encoded, _)) = encoded else { return };
        assert_eq!(read(&encoded), Some(len));
    });
}

const CELL_HEAD_BYTES: usize = 16;
const CELL_HEAD_WORDS: usize = CELL_HEAD_BYTES / 8;
const NUM_WORDS: usize = CELL_BYTES / 8;
/// Bytes of a mailbox.
pub(super) const MAILBOX_BYTES: usize = NUM_CELLS as usize * CELL_BYTES;
const NUMBER_BITS: u32 = 48;
const NUMBER_MASK: u64 = (1 << NUMBER_BITS) - 1;

#[cfg(test)]
mod tests {
    use rand::rngs::StdRng;
    use rand::{Rng, RngExt, SeedableRng};

    use super::*;

    const TOKEN: u64 = 0x0123_4567_89ab_cdef;

    fn place(memory: &Region, number: u64, bytes: &[u8]) {
        // SAFETY: a cell of a mailbox of the test's own.
        unsafe {
            let cell = memory.as_ptr().add(offset_of(number) as usize).as_ptr();
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), cell, bytes.len());
        }
    }

    fn cursor(memory: &Region, number: u64) -> MailboxCursor {
        MailboxCursor { first: memory.as_ptr(), number, token: TOKEN }
    }

    #[test]
    fn mails_of_all_lengths_and_laps_arrive_whole() {
        let seed = rand::random();
        println!("seed {seed}");
        let mut rng = StdRng::seed_from_u64(seed);
        let memory = Region::anonymous(MAILBOX_BYTES).unwrap();
        let mut at = cursor(&memory, 1);
        for number in 1..1000 {
            let mut message = vec![0; rng.random_range(0..=MAX_MAIL_BYTES)];
            rng.fill_bytes(&mut message);
            assert!(at.read().is_none(), "seed {seed}: mail {number} before it was sent");
            let (words, len) = encode_cell(number, TOKEN, &message).unwrap();
            place(&memory, number, &bytemuck::cast_slice(&words)[..len]);
            assert!(at.has_started());
            assert!(MailboxCursor { token: !TOKEN, ..at }.read().is_none(), "mail of another peer");
            assert_eq!(at.read().unwrap().message(), message, "seed {seed}");
            at = at.next();
            assert_eq!(u64::from(at.num_read()), number);
        }
        assert!(encode_cell(1, TOKEN, &[0; MAX_MAIL_BYTES + 1]).is_none());
    }

    /// A random mix of a cell and the one of the lap before is not read.
    #[test]
    fn torn_cells_are_not_read() {
        let seed = rand::random();
        println!("seed {seed}");
        let mut rng = StdRng::seed_from_u64(seed);
        let memory = Region::anonymous(MAILBOX_BYTES).unwrap();
        for _ in 0..500 {
            let number = rng.random_range(1..1u64 << 40);
            let mut message = vec![0; rng.random_range(1..=MAX_MAIL_BYTES)];
            rng.fill_bytes(&mut message);
            let (new, len) = encode_cell(number, TOKEN, &message).unwrap();
            rng.fill_bytes(&mut message);
            let (old, _) =
                encode_cell(number.wrapping_sub(NUM_CELLS.into()), TOKEN, &message).unwrap();
            let new: &[u8] = &bytemuck::cast_slice(&new)[..len];
            let old: &[u8] = &bytemuck::cast_slice(&old)[..len];
            let mut torn = old.to_vec();
            for byte in 0..len {
                if rng.random() {
                    torn[byte] = new[byte];
                }
            }
            place(&memory, number, &torn);
            let found = cursor(&memory, number).read().map(|mail| mail.message().to_vec());
            assert!(torn == new || found.is_none(), "seed {seed}");
            place(&memory, number, new);
            assert!(cursor(&memory, number).read().is_some(), "seed {seed}");
        }
    }

    #[test]
    fn random_bytes_are_neither_read_nor_followed() {
        let seed = rand::random();
        println!("seed {seed}");
        let mut rng = StdRng::seed_from_u64(seed);
        let memory = Region::anonymous(MAILBOX_BYTES).unwrap();
        for _ in 0..2000 {
            let mut bytes = [0; CELL_BYTES];
            rng.fill_bytes(&mut bytes);
            // The right number, any length.
            bytes[8..14].copy_from_slice(&7u64.to_le_bytes()[..6]);
            place(&memory, 7, &bytes);
            assert!(cursor(&memory, 7).read().is_none(), "seed {seed}");
        }
    }
}
