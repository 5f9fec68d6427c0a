//! Packings of integer codes into 32-bit words, as GPTQ, AWQ and compressed-tensors write them.

/// Reads the code at `index` of a run of packed words; the first code is in the lowest bits.
fn code(words: &[[u8; 4]], bits: usize, word: usize, place: usize) -> u8 {
    let word = words.get(word).map_or(0, |word| u32::from_le_bytes(*word));
    ((word >> (place * bits)) & ((1 << bits) - 1)) as u8
}

/// GPTQ: words `[cols × bits / 32, rows]`, packed along the inputs. Returns rows of packed codes.
pub(crate) fn unpack_gptq(data: &[u8], bits: usize, rows: usize, cols: usize) -> Vec<u8> {
    let (words, _) = data.as_chunks::<4>();
    let per_word = 32 / bits;
    pack_rows(bits, rows, cols, |row, col| {
        code(words, bits, col / per_word * rows + row, col % per_word)
    })
}

/// AWQ: words `[cols, rows × bits / 32]`, packed along the outputs in the order 0, 2, 4, 6, 1, 3, 5, 7.
pub(crate) fn unpack_awq(data: &[u8], rows: usize, cols: usize) -> Vec<u8> {
    let (words, _) = data.as_chunks::<4>();
    let per_row = rows / 8;
    pack_rows(4, rows, cols, |row, col| code(words, 4, col * per_row + row / 8, AWQ_PLACE[row % 8]))
}

/// Unpacks zero points, whose words lie as `order` says. Returns one for each row and group, `[rows, groups]`.
///
/// `add` is added to every word as a whole before it is split. GPTQ's first file format stores zero points less one,
/// and its readers add one to each field in this way, carries included.
pub(crate) fn unpack_zeros(
    data: &[u8],
    bits: usize,
    rows: usize,
    groups: usize,
    order: ZeroOrder,
    add: u32,
) -> Vec<u8> {
    let (words, _) = data.as_chunks::<4>();
    let words: Vec<[u8; 4]> = words
        .iter()
        .map(|word| u32::from_le_bytes(*word).wrapping_add(add).to_le_bytes())
        .collect();
    let words = words.as_slice();
    let per_word = 32 / bits;
    let row_words = rows.div_ceil(per_word);
    let mut zeros = Vec::with_capacity(rows * groups);
    for row in 0..rows {
        for group in 0..groups {
            zeros.push(match order {
                ZeroOrder::Gptq => {
                    code(words, bits, group * row_words + row / per_word, row % per_word)
                }
                ZeroOrder::Awq => {
                    code(words, bits, group * row_words + row / 8, AWQ_PLACE[row % 8])
                }
                ZeroOrder::CompressedTensors => {
                    code(words, bits, row / per_word * groups + group, row % per_word)
                }
            });
        }
    }
    zeros
}

/// How zero points are packed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ZeroOrder {
    /// Words `[groups, rows × bits / 32]`.
    Gptq,
    /// As GPTQ, in AWQ's order of places.
    Awq,
    /// Words `[rows × bits / 32, groups]`.
    CompressedTensors,
}

/// Packs one code for each row and column into bytes: 4-bit codes in pairs, 8-bit codes as signed bytes.
fn pack_rows(bits: usize, rows: usize, cols: usize, code: impl Fn(usize, usize) -> u8) -> Vec<u8> {
    let mut out = Vec::with_capacity(rows * cols * bits / 8);
    for row in 0..rows {
        match bits {
            4 => out.extend(
                (0..cols / 2).map(|pair| code(row, 2 * pair) | code(row, 2 * pair + 1) << 4),
            ),
            _ => out.extend((0..cols).map(|col| code(row, col) ^ 0x80)),
        }
    }
    out
}

/// Place inside of a word of output `row % 8`.
const AWQ_PLACE: [usize; 8] = [0, 4, 1, 5, 2, 6, 3, 7];
