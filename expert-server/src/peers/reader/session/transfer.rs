//! The transfer of one expert: reads of its parts, and the check of its digest.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use message_engine::{Access, Connection, Descriptor, MemoryRegion};
use p2p_core::TransportKind;

use super::{Grant, ReadError, Session};
use crate::compute::{LoadError, WeightMemory};
use crate::experts::{Experts, Landing, Room};
use crate::peers::manifest::Digest;
use crate::peers::wire;

/// How long the reads of a grant may take.
#[derive(Debug, Clone, Copy)]
pub(super) struct ReadLimits {
    /// End of the lease.
    pub(super) deadline: Instant,
    /// Longest read of a chunk.
    pub(super) chunk_timeout: Duration,
}

impl Session {
    pub(super) fn read_granted(
        &self,
        connection: &Connection,
        (layer, expert): (u32, u32),
        grant: &Grant,
        store: &dyn Experts,
        stop: &AtomicBool,
    ) -> Result<u64, ReadError> {
        let lens = grant.manifest.part_lens(self.shape).map_err(ReadError::Damaged)?;
        let descriptors = grant.parts.iter().map(|text| wire::descriptor(text));
        let descriptors = descriptors.collect::<Result<Vec<_>, _>>().map_err(ReadError::Damaged)?;
        let found = descriptors.iter().map(|part| part.map_or(0, |part| part.bytes as usize));
        if !found.eq(lens.iter().copied()) {
            return Err(ReadError::Damaged("parts of other lengths than the layout's".to_owned()));
        }
        let mut digest = Digest::new(layer, expert, &grant.manifest);
        let forms = grant.manifest.forms();
        let room = forms.map_or(Ok(Room::Whole), |forms| store.landing(layer, expert, &forms));
        let room = room.map_err(not_loaded)?;
        if matches!(room, Room::Loaded) {
            return Ok(0);
        }
        if let Room::Pieces(mut landing) = room {
            let landed =
                self.land(connection, &mut *landing, &descriptors, grant.limits, &mut digest, stop);
            return match landed {
                Ok(()) => {
                    check_digest(&digest, grant)?;
                    landing.finish().map_err(not_loaded)
                }
                Err((error, false)) => Err(error),
                Err((error, true)) => {
                    // An operation may still write its buffers.
                    landing.abandon();
                    Err(error)
                }
            };
        }
        let mut ranges = Vec::with_capacity(lens.len());
        let mut offset = 0usize;
        for len in lens {
            ranges.push(offset..offset + len);
            offset += len.next_multiple_of(ALIGN_BYTES);
        }
        let memory = WeightMemory::new(offset.max(ALIGN_BYTES));
        let memory = memory.map_err(|error| ReadError::Memory(error.to_string()))?;
        let parts: Vec<_> = ranges.iter().cloned().zip(descriptors).collect();
        let memory = self.fill(connection, memory, &parts, grant.limits, &mut digest, stop)?;
        check_digest(&digest, grant)?;
        let weights = grant.manifest.assemble(&Arc::new(memory), &ranges);
        let weights = weights.map_err(ReadError::Damaged)?;
        let inserted = store.insert(layer, expert, weights);
        inserted.map_err(not_loaded)
    }

    /// Reads the parts of a grant into the buffers of `landing`, which passes them on, and adds them to `digest`.
    ///
    /// # Errors
    /// The reason, and true if an operation may still write the buffers.
    fn land(
        &self,
        connection: &Connection,
        landing: &mut dyn Landing,
        parts: &[Option<Descriptor>],
        limits: ReadLimits,
        digest: &mut Digest,
        stop: &AtomicBool,
    ) -> Result<(), (ReadError, bool)> {
        let buffers = landing.buffers();
        let buffers = buffers.map_err(|error| (not_loaded(error), false))?;
        let mut regions = Vec::with_capacity(buffers.len());
        let mut outcome = Ok(());
        for buffer in &buffers {
            // SAFETY: the buffers stay valid as long as `landing`, which the caller keeps until these regions are
            // deregistered, or for ever. Only `read_part` and `take` use the bytes, when no transfer does.
            match unsafe { self.engine.reg(buffer.cast(), buffer.len(), Access::Local) } {
                Ok(region) => regions.push(region),
                Err(error) => outcome = Err(ReadError::Memory(error.to_string())),
            }
        }
        let mut read = || {
            for (part_idx, part) in parts.iter().enumerate() {
                let Some(part) = part else { continue };
                let mut done = 0;
                while done < part.bytes {
                    let idx = landing.free_buffer().map_err(not_loaded)?;
                    let len = (part.bytes - done).min(buffers[idx].len() as u64);
                    let piece = part.sub(done, len);
                    let piece = piece.map_err(|error| ReadError::Failed(error.to_string()))?;
                    let range = 0..len as usize;
                    read_part(connection, &regions[idx], &range, &piece, limits, digest, stop)?;
                    // SAFETY: as many bytes of a buffer whose transfer has ended.
                    let bytes = unsafe {
                        std::slice::from_raw_parts(buffers[idx].cast().as_ptr(), len as usize)
                    };
                    landing.take(part_idx, done as usize, bytes).map_err(not_loaded)?;
                    done += len;
                }
            }
            Ok(())
        };
        if outcome.is_ok() {
            outcome = read();
        }
        let mut is_writing = false;
        for region in regions {
            if let Err(error) = self.engine.dereg(region) {
                is_writing = true;
                outcome = Err(ReadError::Failed(error.to_string()));
            }
        }
        outcome.map_err(|error| (error, is_writing))
    }

    /// Reads the parts of a grant into `memory` and adds them to `digest`. Returns the memory when no operation uses it
    /// any more.
    fn fill(
        &self,
        connection: &Connection,
        mut memory: WeightMemory,
        parts: &[(Range<usize>, Option<Descriptor>)],
        limits: ReadLimits,
        digest: &mut Digest,
        stop: &AtomicBool,
    ) -> Result<WeightMemory, ReadError> {
        let bytes = memory.as_slice().len();
        let first = memory.as_mut_ptr();
        // SAFETY: the memory is writable, and stays mapped until `dereg` below has succeeded, or for ever. Only
        // `read_part` makes references to it before, and those to bytes that no transfer uses.
        let region = unsafe { self.engine.reg(first, bytes, Access::Local) };
        let region = region.map_err(|error| ReadError::Memory(error.to_string()))?;
        let outcome = parts.iter().try_for_each(|(range, part)| match part {
            Some(part) => read_part(connection, &region, range, part, limits, digest, stop),
            None => Ok(()),
        });
        if let Err(error) = self.engine.dereg(region) {
            // An operation may still write.
            std::mem::forget(memory);
            return Err(ReadError::Failed(error.to_string()));
        }
        outcome.map(|()| memory)
    }
}

/// Why the store did not take an expert: the peer's weights, or this server.
pub(super) fn not_loaded(error: LoadError) -> ReadError {
    match error {
        LoadError::Weight { .. } | LoadError::Tensor { .. } => {
            ReadError::Damaged(error.to_string())
        }
        _ => ReadError::Memory(error.to_string()),
    }
}

fn check_digest(digest: &Digest, grant: &Grant) -> Result<(), ReadError> {
    let (found, expected) = (wire::hex(&digest.finish()), &grant.digest);
    if found == *expected {
        return Ok(());
    }
    let text = format!("checksum {found:.16}…, expected {expected:.16}…");
    Err(ReadError::Damaged(text))
}

/// Reads one part into its range of `region`, on the caller's thread if the transport allows it. Adds each chunk to the
/// digest while it is in the processor's cache.
fn read_part(
    connection: &Connection,
    region: &MemoryRegion,
    range: &Range<usize>,
    part: &Descriptor,
    limits: ReadLimits,
    digest: &mut Digest,
    stop: &AtomicBool,
) -> Result<(), ReadError> {
    let failed = |error: &dyn std::error::Error| ReadError::Failed(error.to_string());
    let is_direct = connection.transport().kind == TransportKind::Cma;
    let chunk_bytes = if is_direct { DIRECT_CHUNK_BYTES } else { CHUNK_BYTES };
    let mut done = 0;
    while done < part.bytes {
        if stop.load(Ordering::Relaxed) {
            return Err(ReadError::Stopped);
        }
        // Copies on this thread do not look at the clock.
        if Instant::now() >= limits.deadline {
            return Err(ReadError::Failed("the grant ended before the expert was read".to_owned()));
        }
        let len = (part.bytes - done).min(chunk_bytes);
        let first = range.start as u64 + done;
        let span = region.span(first, len).map_err(|error| failed(&error))?;
        let remote = part.sub(done, len).map_err(|error| failed(&error))?;
        let deadline = limits.deadline.min(Instant::now() + limits.chunk_timeout);
        let read = connection
            .read_directly(&span, &remote, deadline)
            .unwrap_or_else(|| connection.read(&span, &remote, deadline));
        read.map_err(|error| failed(&error))?;
        // SAFETY: the bytes are within the region, as `span` has checked, and initialised: the memory was zeroed. Their
        // transfer has ended, later transfers write other bytes, and peers have no right to the region.
        let bytes = unsafe {
            std::slice::from_raw_parts(region.as_ptr().as_ptr().add(first as usize), len as usize)
        };
        digest.update(bytes);
        done += len;
    }
    Ok(())
}

/// Bytes that are read at once, and then added to the digest.
const CHUNK_BYTES: u64 = 16 << 20;
/// The same for copies on the reader's thread, which cost no round trip: less than a processor's cache.
const DIRECT_CHUNK_BYTES: u64 = 256 << 10;
/// Alignment of parts: a cache line.
const ALIGN_BYTES: usize = 64;
