//! The calls of a link, over any path: a put of random bytes with an add and a signal behind it, and a get of the
//! put bytes. Slots and mirrors are poisoned, so that all arrived bytes come from the call.

use kernels::abi::{DevicePtr, ErrorWord, Link};
use kernels::link_calls::LinkCallsParams;
use rand::rngs::StdRng;
use rand::{Rng, RngExt};

use crate::library::Library;

/// One side's link to a slot of this process.
pub trait Ends {
    fn link(&self) -> Link;
    /// Bytes of the slot, and of the mirror.
    fn slot_bytes(&self) -> usize;
    /// Address of the slot itself.
    fn slot(&self) -> *mut u8;
}

/// Poison of the mirror and of memory that is no slot; a slot has the complement.
const POISON: u8 = 0xa5;
/// Two words at the end of a slot, which are zeros at first.
const TAIL: usize = 64;

/// Offsets of the put, of a source in the mirror and of the get: they do not overlap.
fn places(slot_bytes: usize) -> ([usize; 3], usize) {
    let part = (slot_bytes - TAIL) / 3 / 16 * 16;
    ([0, part, 2 * part], part)
}

/// Sources and targets of every alignment, in the mirror and elsewhere. Call it with a fresh link.
pub fn bytes_go_there_and_back(library: &Library, rng: &mut StdRng, ends: &dyn Ends) {
    let link = ends.link();
    let (window, slot, slot_bytes) = (link.window.0 as *mut u8, ends.slot(), ends.slot_bytes());
    let is_direct = window == slot;
    let ([there, source_at, back_at], part) = places(slot_bytes);
    let mut sum = 0u64;
    let mut lengths = vec![0, 1, 15, 16, 17, 496, 512, 529, part - 16];
    lengths.extend((0..8).map(|_| rng.random_range(0..part)));
    for (at, len) in lengths.into_iter().enumerate() {
        for (is_aligned, in_mirror) in [(true, false), (false, false), (true, true), (false, true)]
        {
            // Over stores the mirror is the peer's slot, and there is no other source in it.
            let in_mirror = in_mirror && !is_direct;
            let shift = if is_aligned { 0 } else { rng.random_range(1..16) };
            let len = len.min(part - 16);
            let mut bytes = vec![0; len];
            rng.fill_bytes(&mut bytes);
            fill(window, POISON, slot_bytes - TAIL);
            fill(slot, !POISON, slot_bytes - TAIL);
            let mut elsewhere = vec![POISON; part + 32];
            let mut got = vec![POISON; part + 32];
            let source = if in_mirror {
                let source = window.wrapping_add(source_at + shift);
                // SAFETY: within the mirror's middle part, which no other code uses between calls.
                unsafe { source.copy_from_nonoverlapping(bytes.as_ptr(), len) };
                source
            } else {
                let begin = elsewhere.as_ptr().align_offset(16) + shift;
                elsewhere[begin..begin + len].copy_from_slice(&bytes);
                elsewhere[begin..].as_mut_ptr()
            };
            let begin = got.as_ptr().align_offset(16) + shift;
            let in_place = window.wrapping_add(back_at + shift);
            let back = if is_direct { got[begin..].as_mut_ptr() } else { in_place };
            let value = rng.random::<u64>() >> 1;
            sum = sum.wrapping_add(value);
            let offset = there + shift;
            let good = call(library, ends, (source, back), (offset, len), value, true);
            let name = format!("call {at}: {len} bytes, shift {shift}, in the mirror: {in_mirror}");
            assert_eq!(good, [1; 3], "{name}");
            let found = bytes_at(slot, slot_bytes);
            assert!(found[offset..offset + len] == bytes, "{name}: other bytes came");
            let rest = [&found[..offset], &found[offset + len..slot_bytes - TAIL]];
            assert!(rest.iter().all(|p| p.iter().all(|b| *b == !POISON)), "{name}: more came");
            assert_eq!(words_of(&found), [value, sum], "{name}");
            if is_direct {
                assert!(got[begin..begin + len] == bytes, "{name}: other bytes came back");
                let rest = [&got[..begin], &got[begin + len..]];
                assert!(rest.iter().all(|p| p.iter().all(|b| *b == POISON)), "{name}: more");
            } else {
                let mirror = bytes_at(window.wrapping_add(back_at), part);
                assert!(mirror[shift..shift + len] == bytes, "{name}: other bytes came back");
                let rest = [&mirror[..shift], &mirror[shift + len..]];
                assert!(rest.iter().all(|p| p.iter().all(|b| *b == POISON)), "{name}: more");
            }
        }
    }
    no_bytes_are_moved_from_and_to_anywhere(library, rng, ends, sum);
}

/// The path stays in service, and later words arrive. `sum` is the counter's value before.
fn no_bytes_are_moved_from_and_to_anywhere(
    library: &Library,
    rng: &mut StdRng,
    ends: &dyn Ends,
    mut sum: u64,
) {
    let (window, slot, slot_bytes) =
        (ends.link().window.0 as *mut u8, ends.slot(), ends.slot_bytes());
    fill(slot, !POISON, slot_bytes - TAIL);
    let mut elsewhere = [POISON; 16];
    let elsewhere_at = elsewhere.as_mut_ptr();
    // Nowhere, memory that is no slot, and where the mirror ends.
    let places = [std::ptr::null_mut(), elsewhere_at, window.wrapping_add(slot_bytes)];
    for (source, back) in places.iter().flat_map(|a| places.map(|b| (*a, b))) {
        for offset in [0, 17, slot_bytes] {
            let value = rng.random::<u64>() >> 1;
            sum = sum.wrapping_add(value);
            let name = format!("from {source:?}, offset {offset}, to {back:?}");
            let good = call(library, ends, (source, back), (offset, 0), value, true);
            assert_eq!(good, [1; 3], "{name}");
            let found = bytes_at(slot, slot_bytes);
            assert!(found[..slot_bytes - TAIL].iter().all(|b| *b == !POISON), "{name}: bytes came");
            assert_eq!(words_of(&found), [value, sum], "{name}");
        }
    }
    assert_eq!(bytes_at(elsewhere_at, 16), [POISON; 16], "something came back");
}

/// Over a path that posts: a put that leaves the slot moves nothing, and takes the path out of service.
pub fn a_put_out_of_the_slot_is_refused(library: &Library, ends: &dyn Ends) {
    let slot_bytes = ends.slot_bytes();
    let mut source = vec![1u8; 64];
    let back = ends.link().window.0 as *mut u8;
    fill(ends.slot(), !POISON, slot_bytes);
    let range = (slot_bytes - 32, 64);
    let good = call(library, ends, (source.as_mut_ptr(), back), range, 7, false);
    assert_eq!((good[0], good[2]), (0, 0));
    let found = bytes_at(ends.slot(), slot_bytes);
    assert!(found.iter().all(|byte| *byte == !POISON), "something came");
}

/// Over a path that posts: memory outside of the mirror cannot be the target of a get. Earlier puts have arrived.
pub fn a_get_into_other_memory_is_refused(library: &Library, ends: &dyn Ends) {
    let mut source = vec![1u8; 64];
    let mut back = vec![POISON; 64];
    let good = call(library, ends, (source.as_mut_ptr(), back.as_mut_ptr()), (0, 64), 7, false);
    assert_eq!((good[0], good[2]), (1, 0));
    assert!(back.iter().all(|byte| *byte == POISON), "something came back");
}

/// Word and counter at the end of a slot's bytes.
fn words_of(slot: &[u8]) -> [u64; 2] {
    [16, 8].map(|back| {
        let at = slot.len() - back;
        u64::from_le_bytes(slot[at..at + 8].try_into().expect("eight"))
    })
}

/// A copy of the bytes. Others write slots and mirrors, so that no reference to them may be formed.
fn bytes_at(at: *const u8, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    // SAFETY: callers name memory of that size, and after a quiet it has no writer.
    unsafe { at.copy_to_nonoverlapping(bytes.as_mut_ptr(), len) };
    bytes
}

fn fill(at: *mut u8, value: u8, len: usize) {
    // SAFETY: callers name memory of that size, which no other code uses between calls.
    unsafe { at.write_bytes(value, len) };
}

fn call(
    library: &Library,
    ends: &dyn Ends,
    (source, back): (*mut u8, *mut u8),
    (offset, num_bytes): (usize, usize),
    value: u64,
    awaits_word: bool,
) -> [u32; 3] {
    let (word, counter) = (ends.slot_bytes() - 16, ends.slot_bytes() - 8);
    // In this process the peer's word is near.
    let echo = if awaits_word { ends.slot().wrapping_add(word) as u64 } else { 0 };
    let mut error: ErrorWord = bytemuck::Zeroable::zeroed();
    let mut good = [u32::MAX; 3];
    let link = ends.link();
    let params = LinkCallsParams {
        link,
        source: DevicePtr(source as u64),
        back: DevicePtr(back as u64),
        offset: offset as u64,
        num_bytes: num_bytes as u64,
        word_offset: word as u64,
        counter_offset: counter as u64,
        value,
        echo: DevicePtr(echo),
        error: DevicePtr((&raw mut error) as u64),
        timeout_ns: 60_000_000_000,
        good: DevicePtr((&raw mut good) as u64),
    };
    // SAFETY: all of it is memory of this process that lives until the call returns, and of its size.
    unsafe { library.link_calls(&params, link.path != kernels::abi::PATH_DIRECT) };
    good
}
