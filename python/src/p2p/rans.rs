//! An entropy coder for bytes: range variant of asymmetric numeral systems (Duda, arXiv 1311.2540), with eight states in
//! turn and a static table per block.
//!
//! Coded form: 256 frequencies of 16 bits with the sum 4096, eight states of 32 bits, then words of 16 bits; all
//! little-endian.

/// Appends the coded form of `symbols` to `out`. Returns false, and leaves `out` as it was, if that is not shorter.
pub(super) fn encode(symbols: &[u8], out: &mut Vec<u8>) -> bool {
    if symbols.len() <= HEAD_BYTES {
        return false;
    }
    let freqs = frequencies(symbols);
    let starts = starts(&freqs);
    let mut states = [LOW; NUM_STATES];
    // The decoder reads the words backwards.
    let mut words: Vec<u16> = Vec::with_capacity(symbols.len() / 2);
    let most_words = (symbols.len() - HEAD_BYTES) / 2;
    for (idx, symbol) in symbols.iter().enumerate().rev() {
        let (freq, start) = (u32::from(freqs[usize::from(*symbol)]), starts[usize::from(*symbol)]);
        let state = &mut states[idx % NUM_STATES];
        if u64::from(*state) >= u64::from(freq) << (32 - TABLE_BITS) {
            words.push(*state as u16);
            *state >>= 16;
        }
        *state = ((*state / freq) << TABLE_BITS) + *state % freq + u32::from(start);
    }
    if words.len() >= most_words {
        return false;
    }
    out.reserve(HEAD_BYTES + 2 * words.len());
    freqs.iter().for_each(|freq| out.extend(freq.to_le_bytes()));
    states.iter().for_each(|state| out.extend(state.to_le_bytes()));
    words.iter().rev().for_each(|word| out.extend(word.to_le_bytes()));
    true
}

/// Decodes into `symbols`, which sets their number.
///
/// # Errors
/// A text that names the malformed part.
pub(super) fn decode(coded: &[u8], symbols: &mut [u8]) -> Result<(), &'static str> {
    let (head, words) =
        coded.split_at_checked(HEAD_BYTES).ok_or("the table of frequencies is cut off")?;
    let (table, head_states) = head.split_at(TABLE_BYTES);
    let mut freqs = [0u16; 256];
    for (freq, bytes) in freqs.iter_mut().zip(table.chunks_exact(2)) {
        *freq = u16::from_le_bytes([bytes[0], bytes[1]]);
    }
    if freqs.iter().map(|freq| u32::from(*freq)).sum::<u32>() != TABLE_SIZE as u32 {
        return Err("the frequencies do not add up to 4096");
    }
    let entries = entries(&freqs);
    let mut states = [0u32; NUM_STATES];
    for (state, bytes) in states.iter_mut().zip(head_states.chunks_exact(4)) {
        *state = u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
    }
    if words.len() % 2 != 0 {
        return Err("half a word is left over");
    }
    let mut words = words.chunks_exact(2).map(|bytes| u16::from_le_bytes([bytes[0], bytes[1]]));
    for group in symbols.chunks_mut(NUM_STATES) {
        for (symbol, state) in group.iter_mut().zip(&mut states) {
            let place = *state & (TABLE_SIZE as u32 - 1);
            let entry = entries[place as usize];
            *symbol = entry.symbol;
            *state = u32::from(entry.freq) * (*state >> TABLE_BITS) + u32::from(entry.offset);
            if *state < LOW {
                let word = words.next().ok_or("words are missing")?;
                *state = *state << 16 | u32::from(word);
            }
        }
    }
    if states != [LOW; NUM_STATES] || words.next().is_some() {
        return Err("the coded bytes do not end where they must");
    }
    Ok(())
}

/// Symbol of one of the 4096 places of a state, and how the state continues.
#[derive(Clone, Copy, Default)]
struct Entry {
    freq: u16,
    /// The place, counted from the symbol's first one.
    offset: u16,
    symbol: u8,
}

/// The table of places for frequencies with the sum 4096.
fn entries(freqs: &[u16; 256]) -> Box<[Entry; TABLE_SIZE]> {
    let mut entries = Box::new([Entry::default(); TABLE_SIZE]);
    let mut places = entries.iter_mut();
    for (symbol, freq) in (0..=u8::MAX).zip(freqs) {
        for (offset, entry) in (0..*freq).zip(&mut places) {
            *entry = Entry { freq: *freq, offset, symbol };
        }
    }
    entries
}

/// Counts of `symbols`, scaled to the sum 4096. Every symbol that occurs gets 1 or more.
fn frequencies(symbols: &[u8]) -> [u16; 256] {
    let mut counts = [0u64; 256];
    symbols.iter().for_each(|symbol| counts[usize::from(*symbol)] += 1);
    let total = symbols.len() as u64;
    let mut freqs = counts.map(|count| match count {
        0 => 0,
        count => (count * TABLE_SIZE as u64 / total).max(1) as u16,
    });
    let mut sum: usize = freqs.iter().map(|freq| usize::from(*freq)).sum();
    // Rounding moves the sum by less than 256. The most frequent symbols pay for it.
    while sum != TABLE_SIZE {
        let Some(most) = freqs.iter_mut().max() else { break };
        let change = sum.abs_diff(TABLE_SIZE).min(usize::from(*most) / 2).max(1) as u16;
        if sum < TABLE_SIZE {
            *most += change;
            sum += usize::from(change);
        } else {
            *most -= change;
            sum -= usize::from(change);
        }
    }
    freqs
}

/// First place of every symbol.
fn starts(freqs: &[u16; 256]) -> [u16; 256] {
    let mut next = 0;
    freqs.map(|freq| {
        let start = next;
        next += freq;
        start
    })
}

const TABLE_BITS: u32 = 12;
const TABLE_SIZE: usize = 1 << TABLE_BITS;
/// Lowest value of a state between two symbols.
const LOW: u32 = 1 << 16;
const NUM_STATES: usize = 8;
const TABLE_BYTES: usize = 256 * 2;
const HEAD_BYTES: usize = TABLE_BYTES + NUM_STATES * 4;
