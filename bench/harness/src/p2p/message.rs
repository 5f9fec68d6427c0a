//! Messages of any size over a channel: divided into frames, poisoned before, compared after.

use std::sync::Arc;
use std::time::{Duration, Instant};

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use p2p_core::channel::{Channel, RxFrame};
use p2p_core::transport::AnyEndpoint;
use p2p_core::wait::Driver;

/// The payloads of all messages, known to both sides: message `number` is a window of one random buffer.
pub(super) struct Pattern {
    bytes: Vec<u8>,
    max_bytes: usize,
}

impl Pattern {
    pub(super) fn new(seed: u64, max_bytes: usize) -> Self {
        let mut bytes = vec![0; max_bytes + NUM_WINDOWS * WINDOW_STEP];
        StdRng::seed_from_u64(seed).fill_bytes(&mut bytes);
        Self { bytes, max_bytes }
    }

    pub(super) fn message(&self, number: u64, len: usize) -> &[u8] {
        self.at(Self::start(number), len)
    }

    /// Returns the offset of message `number`, for [`at`](Self::at). Callers compute it before the timed part.
    pub(super) fn start(number: u64) -> usize {
        number as usize % NUM_WINDOWS * WINDOW_STEP
    }

    #[inline]
    pub(super) fn at(&self, start: usize, len: usize) -> &[u8] {
        &self.bytes[start..start + len.min(self.max_bytes)]
    }
}

/// A wait that polls, and yields the processor to other processes from time to time.
#[derive(Debug, Clone)]
pub(super) struct Spin {
    polls_before_yield: u32,
    /// Makes progress for transports without mapped memory. All channels of a process share it.
    driver: Option<Arc<dyn Driver>>,
}

impl Spin {
    /// Returns a wait for one of `num_processes` that poll on this machine at the same time.
    pub(super) fn among(num_processes: usize, driver: Option<Arc<dyn Driver>>) -> Self {
        let num_cpus = std::thread::available_parallelism().map_or(1, usize::from);
        Self { polls_before_yield: if num_processes > num_cpus { 50 } else { 20_000 }, driver }
    }

    /// Polls until `ready` returns true, for 60 s at most.
    #[inline]
    pub(super) fn until(
        &self,
        what: &'static str,
        mut ready: impl FnMut() -> Result<bool, String>,
    ) -> Result<(), String> {
        let mut deadline = None;
        loop {
            for _ in 0..self.polls_before_yield {
                if ready()? {
                    return Ok(());
                }
                if let Some(driver) = &self.driver {
                    driver.drive();
                }
                std::hint::spin_loop();
            }
            let now = Instant::now();
            if now > *deadline.get_or_insert(now + TIMEOUT) {
                return Err(format!("waited {} s for {what}", TIMEOUT.as_secs()));
            }
            std::thread::yield_now();
        }
    }
}

/// Puts the message from byte `sent` on, as far as there is credit. Returns true once all of it is sent.
#[inline]
pub(super) fn try_put(
    channel: &mut Channel<AnyEndpoint>,
    message: &[u8],
    sent: &mut usize,
) -> Result<bool, String> {
    let frame_bytes = channel.layout().frame_bytes();
    while *sent < message.len() {
        let Some(frame) = channel.try_reserve().map_err(text)? else { return Ok(false) };
        let chunk = &message[*sent..message.len().min(*sent + frame_bytes)];
        channel.write_view(&frame).put_bytes(0, chunk).map_err(text)?;
        channel.publish(frame, chunk.len()).map_err(text)?;
        *sent += chunk.len();
    }
    Ok(true)
}

/// The receiving end of the messages of one channel.
pub(super) struct Inbox {
    frames: Vec<RxFrame>,
    num_frames: usize,
    /// Payload of messages that are larger than the ring, copied out as it arrives.
    overflow: Vec<u8>,
    scratch: Vec<u8>,
}

impl Inbox {
    pub(super) fn new(channel: &Channel<AnyEndpoint>, max_bytes: usize) -> Self {
        let layout = channel.layout();
        let ring_bytes = layout.frame_bytes() * layout.num_frames();
        Self {
            frames: Vec::with_capacity(layout.num_frames()),
            num_frames: 0,
            overflow: Vec::with_capacity(if max_bytes > ring_bytes { max_bytes } else { 0 }),
            scratch: vec![0; layout.frame_bytes()],
        }
    }

    /// Poisons the frames of the next `num` messages of `len` bytes, and up to 64 bytes after each chunk.
    pub(super) fn poison(
        &self,
        channel: &Channel<AnyEndpoint>,
        len: usize,
        num: usize,
        next_seq: u64,
    ) {
        let layout = channel.layout();
        let frame_bytes = layout.frame_bytes();
        let per_message = num_chunks(len, frame_bytes);
        for frame in 0..(num * per_message).min(layout.num_frames()) {
            let chunk = chunk_bytes(len, frame_bytes, frame % per_message);
            let offset = layout.frame_offset(next_seq + frame as u64);
            let poisoned = (chunk + GUARD_BYTES).min(frame_bytes);
            // SAFETY: within a frame of the local slot; the peer waits for the next step.
            unsafe { channel.local_slot().as_ptr().add(offset).write_bytes(POISON, poisoned) };
        }
    }

    /// Takes all frames that have arrived. Returns true once `num` messages of `len` bytes are complete.
    #[inline]
    pub(super) fn collect(
        &mut self,
        channel: &mut Channel<AnyEndpoint>,
        len: usize,
        num: usize,
    ) -> Result<bool, String> {
        let frame_bytes = channel.layout().frame_bytes();
        let per_message = num_chunks(len, frame_bytes);
        let wanted = per_message * num;
        while self.num_frames < wanted && channel.has_frame() {
            let Some(frame) = channel.try_next().map_err(text)? else { break };
            if wanted > channel.layout().num_frames() {
                let chunk = chunk_bytes(len, frame_bytes, self.num_frames % per_message);
                let end = self.overflow.len();
                self.overflow.resize(end + chunk, 0);
                channel.view(&frame).copy_to(0, &mut self.overflow[end..]).map_err(text)?;
                channel.release().map_err(text)?;
            } else {
                self.frames.push(frame);
            }
            self.num_frames += 1;
        }
        Ok(self.num_frames == wanted)
    }

    /// Compares every byte of the messages that [`collect`](Self::collect) completed, and releases their frames.
    /// Returns the number of bytes compared.
    pub(super) fn verify<'p>(
        &mut self,
        channel: &mut Channel<AnyEndpoint>,
        messages: impl Iterator<Item = &'p [u8]>,
    ) -> Result<u64, String> {
        let frame_bytes = channel.layout().frame_bytes();
        let mut verified = 0;
        let mut frames = self.frames.drain(..);
        let mut copied = self.overflow.as_slice();
        for message in messages {
            for (idx, expected) in chunks(message, frame_bytes).enumerate() {
                let found = if let Some(frame) = frames.next() {
                    let view = channel.view(&frame);
                    let with_guard = (expected.len() + GUARD_BYTES).min(frame_bytes);
                    let found = &mut self.scratch[..with_guard];
                    view.copy_to(0, found).map_err(text)?;
                    if found[expected.len()..].iter().any(|byte| *byte != POISON) {
                        return Err(format!("frame {} was written beyond its end", frame.seq()));
                    }
                    &found[..expected.len()]
                } else {
                    let (found, rest) =
                        copied.split_at_checked(expected.len()).ok_or("a chunk is missing")?;
                    copied = rest;
                    found
                };
                if found != expected {
                    let at = found.iter().zip(expected).position(|(a, b)| a != b).unwrap_or(0);
                    return Err(format!(
                        "wrong data: chunk {idx} of a message of {} bytes differs at byte {at}: {:#04x}, expected {:#04x}",
                        message.len(),
                        found[at],
                        expected[at]
                    ));
                }
                verified += expected.len() as u64;
            }
        }
        drop(frames);
        self.overflow.clear();
        self.num_frames = 0;
        while channel.held() > 0 {
            channel.release().map_err(text)?;
        }
        Ok(verified)
    }
}

/// Returns the number of messages of `len` bytes that fit the ring at once, and at least 1.
pub(super) fn messages_per_window(channel: &Channel<AnyEndpoint>, len: usize) -> usize {
    let layout = channel.layout();
    (layout.num_frames() / num_chunks(len, layout.frame_bytes())).max(1)
}

/// Returns the number of frames of a message of `len` bytes. An empty message takes one.
pub(super) fn num_chunks(len: usize, frame_bytes: usize) -> usize {
    len.div_ceil(frame_bytes).max(1)
}

pub(super) fn text(error: impl std::fmt::Display) -> String {
    error.to_string()
}

fn chunk_bytes(len: usize, frame_bytes: usize, chunk: usize) -> usize {
    len.saturating_sub(chunk * frame_bytes).min(frame_bytes)
}

fn chunks(message: &[u8], frame_bytes: usize) -> impl Iterator<Item = &[u8]> {
    (0..num_chunks(message.len(), frame_bytes)).map(move |chunk| {
        let start = chunk * frame_bytes;
        &message[start..start + chunk_bytes(message.len(), frame_bytes, chunk)]
    })
}

const POISON: u8 = 0xa5;
const GUARD_BYTES: usize = 64;
const NUM_WINDOWS: usize = 127;
const WINDOW_STEP: usize = 64;
const TIMEOUT: Duration = Duration::from_secs(60);
