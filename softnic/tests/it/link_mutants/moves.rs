//! Copies over links, from and to any memory of this side: `comm/put_get.cuh`.

use std::sync::atomic::Ordering;
use std::time::Duration;

use softnic_driver::{Call, Job};
use switchyard_softnic::format::opcode;
use switchyard_softnic::{Fault, Segment};

use super::{Rig, SLOT_BYTES, WORDS_AT, job, name_of};
use crate::common::Wait;

/// Memory of this side that no NIC knows, 16-byte aligned.
#[repr(C, align(16))]
struct Elsewhere([u8; 8192]);

impl Elsewhere {
    fn new(seed: u8) -> Box<Self> {
        let mut bytes = Box::new(Self([0; 8192]));
        for (at, byte) in bytes.0.iter_mut().enumerate() {
            *byte = (at as u8).wrapping_mul(31).wrapping_add(seed) | 1;
        }
        bytes
    }
}

/// The put bytes are there and no others; the bytes got are those of the source.
pub fn content(rig: &Rig) -> Result<(), String> {
    for (offset, num_bytes) in [(4096, 5000), (4096, 4096), (4099, 77), (4112, 1)] {
        // From another place of the mirror.
        let local = at(&rig.mirror, 64 << 10);
        move_and_wait(rig, Call::PutCopy, offset, local, num_bytes)?;
        let expected = bytes_of(local, num_bytes);
        expect(rig, "a put from the mirror", offset, &expected)?;
        rig.renew();
        for shift in [0, 3] {
            let mut source = Elsewhere::new(7);
            let local = source.0[shift..].as_mut_ptr();
            move_and_wait(rig, Call::PutCopy, offset, local, num_bytes)?;
            let expected = bytes_of(local, num_bytes);
            expect(rig, "a put from elsewhere", offset, &expected)?;
            if bytes_of(at(&rig.mirror, offset), num_bytes) != expected {
                return Err("a put from elsewhere is not in the mirror at its offset".to_owned());
            }
            rig.renew();
        }
        // Back, to another place.
        let pattern = Elsewhere::new(9);
        for word in 0..pattern.0.len() / 8 {
            let bytes = pattern.0[8 * word..][..8].try_into().expect("eight");
            let place = rig.target_word((offset / 8 * 8 + 8 * word) as u64);
            place.store(u64::from_le_bytes(bytes), Ordering::Relaxed);
        }
        let num_executed = rig.client.lock().executed().len();
        let local = at(&rig.mirror, 128 << 10);
        let before = bytes_of(local, 8192);
        move_and_wait(rig, Call::GetCopy, offset, local, num_bytes)?;
        let found = bytes_of(local, 8192);
        if found[..num_bytes] != pattern.0[offset % 8..][..num_bytes]
            || found[num_bytes..] != before[num_bytes..]
        {
            return Err(format!("a get of {num_bytes} bytes at {offset} brings others"));
        }
        // The NIC reads behind its own write, on the same queue.
        let executed = rig.client.lock().executed()[num_executed..].to_vec();
        let is_dump = executed.last().is_some_and(|last| last.opcode == opcode::DUMP);
        if !is_dump || executed.iter().any(|done| done.qpn != rig.queues[1].qpn()) {
            return Err(format!("requests of a get and its wait: {executed:x?}"));
        }
        rig.renew();
    }
    by_stores(rig)?;
    // Nothing is moved from and to anywhere, and the link stays in service.
    let mut elsewhere = Elsewhere::new(5);
    let end = at(&rig.mirror, SLOT_BYTES);
    for local in [std::ptr::null_mut(), elsewhere.0.as_mut_ptr(), end] {
        for call in [Call::PutCopy, Call::GetCopy] {
            for offset in [0, SLOT_BYTES] {
                let num_executed = rig.client.lock().executed().len();
                move_and_wait(rig, call, offset, local, 0)?;
                if rig.client.lock().executed().len() != num_executed {
                    return Err(format!("{call:?} of no bytes makes a request"));
                }
            }
        }
    }
    expect(rig, "a put of nothing", 0, &[])?;
    rig.renew();
    Ok(())
}

/// Over stores, all data that the warp moved is visible to each lane.
fn by_stores(rig: &Rig) -> Result<(), String> {
    for (offset, num_bytes) in [(0, 4096), (16, 77), (3, 500), (16, 31), (0, 15)] {
        for call in [Call::PutByStores, Call::GetByStores] {
            let (mut near, mut far) = (Elsewhere::new(7), Elsewhere::new(100));
            let (local, stores) = (near.0.as_mut_ptr(), far.0.as_mut_ptr());
            let (mut here, mut there) = (bytes_of(local, 8192), bytes_of(stores, 8192));
            let job = Job { stores, ..moving(call, offset, local, num_bytes) };
            if rig.call(job, &Wait::new(rig.limit)) != 1 {
                return Err(format!("{call:?}: a lane does not see what the others moved"));
            }
            let range = offset..offset + num_bytes;
            match call {
                Call::PutByStores => there[range].copy_from_slice(&here[..num_bytes]),
                _ => here[..num_bytes].copy_from_slice(&there[range]),
            }
            if bytes_of(local, 8192) != here || bytes_of(stores, 8192) != there {
                return Err(format!("{call:?} of {num_bytes} bytes at {offset} moves others"));
            }
        }
    }
    Ok(())
}

/// A copy uses its block's queue, and its wait waits for that queue.
pub fn lanes(rig: &Rig) -> Result<(), String> {
    let marker = WORDS_AT + 1024;
    let local = at(&rig.mirror, 128 << 10);
    let before = bytes_of(local, 2000);
    for (call, wait_call) in [(Call::PutCopy, Call::QuietCopies), (Call::GetCopy, Call::QuietGets)]
    {
        let qpn = rig.queues[1].qpn();
        rig.client.lock().inject(Fault::Stall { qpn }).unwrap();
        rig.put(moving(call, 0, local, 2000));
        rig.put(Job { word_offset: marker, value: 3, ..job(Call::Set, 0) });
        rig.await_word(marker, 3)?;
        expect(rig, "a put on another lane", 0, &[])?;
        if bytes_of(local, 2000) != before {
            return Err("a get on another lane arrives".to_owned());
        }
        let wait = Wait::new(Duration::from_millis(20));
        // `SY_TAG_MLX5_QUIET`
        if rig.call(moving(wait_call, 0, local, 0), &wait) != 0 || wait.error().tag != 34 {
            return Err(format!("{wait_call:?} does not wait for a queue that stands still"));
        }
        rig.client.lock().inject(Fault::Resume { qpn }).unwrap();
        rig.renew();
    }
    Ok(())
}

/// Invalid arguments take the link out of service before any request is posted, and move nothing.
pub fn failures(rig: &Rig) -> Result<(), String> {
    let mut elsewhere = Elsewhere::new(3);
    let (inside, outside) = (at(&rig.mirror, 0), elsewhere.0.as_mut_ptr());
    let (put, get, far) = (Call::PutCopy, Call::GetCopy, SLOT_BYTES);
    for (what, job) in [
        ("a put beyond the slot", moving(put, far - 8, inside, 16)),
        ("a put far beyond the slot", moving(put, usize::MAX - 7, inside, 16)),
        ("a put of nothing beyond the slot", moving(put, far + 1, inside, 0)),
        ("a get beyond the slot", moving(get, far - 8, inside, 16)),
        ("a get of nothing beyond the slot", moving(get, far + 1, outside, 0)),
        ("a get into other memory", moving(get, 0, outside, 16)),
        ("a get beyond the mirror", moving(get, 0, at(&rig.mirror, far - 8), 16)),
    ] {
        let (wait, num_executed) = (Wait::new(rig.limit), rig.client.lock().executed().len());
        rig.call(job, &wait);
        let is_quiet = rig.call(moving(Call::QuietCopies, 0, inside, 0), &wait) != 0;
        // `SY_TAG_MLX5_ARGUMENT`
        if wait.error().tag != 37 || is_quiet || !rig.has_failed(&wait) {
            let tag = name_of(wait.error().tag);
            return Err(format!("{what}: {tag}, or the link is still in service"));
        }
        if rig.client.lock().executed().len() != num_executed {
            return Err(format!("{what} is executed"));
        }
        rig.renew();
    }
    Ok(())
}

fn moving(call: Call, offset: usize, local: *mut u8, num_bytes: usize) -> Job {
    Job { offset: offset as u64, num_bytes: num_bytes as u64, local, ..job(call, 1) }
}

/// Copies, and waits for it.
fn move_and_wait(
    rig: &Rig,
    call: Call,
    offset: usize,
    local: *mut u8,
    num_bytes: usize,
) -> Result<(), String> {
    let wait = Wait::new(rig.limit);
    rig.call(moving(call, offset, local, num_bytes), &wait);
    let wait_call = if call == Call::GetCopy { Call::QuietGets } else { Call::QuietCopies };
    let is_good = rig.call(moving(wait_call, 0, local, 0), &wait) != 0;
    match wait.error() {
        error if is_good && error.tag == 0 => Ok(()),
        error => Err(format!(
            "{call:?} of {num_bytes} bytes at {offset}: good {is_good}, {}, observed {:#x}",
            name_of(error.tag),
            error.observed
        )),
    }
}

/// Whether exactly these bytes are in the target before its words.
fn expect(rig: &Rig, what: &str, offset: usize, expected: &[u8]) -> Result<(), String> {
    let found = bytes_of(at(&rig.target, 0), WORDS_AT as usize);
    let end = offset + expected.len();
    if found[offset..end] != *expected {
        return Err(format!("{what}: other bytes at {offset} of the target"));
    }
    if found[..offset].iter().chain(&found[end..]).any(|byte| *byte != 0) {
        return Err(format!("{what}: the target has too much"));
    }
    Ok(())
}

fn at(segment: &Segment, offset: usize) -> *mut u8 {
    segment.region().as_ptr().as_ptr().wrapping_add(offset)
}

/// A copy: NICs write the original.
fn bytes_of(from: *const u8, num_bytes: usize) -> Vec<u8> {
    let mut bytes = vec![0; num_bytes];
    // SAFETY: callers stay within memory of this process. They have waited for its writer, or stopped it.
    unsafe { from.copy_to_nonoverlapping(bytes.as_mut_ptr(), num_bytes) };
    bytes
}
