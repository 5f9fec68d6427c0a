//! A network whose first connection withholds rows that kernels have announced.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};

use kernels::abi::{CONTROL_BYTES, DTYPE_BF16, FrameGeometry};
use p2p_core::PostError;
use p2p_core::region::{RemoteRange, SlotKey};
use test_support::endpoint::{Fault, FaultyNetwork};

use super::*;

/// Frames without their rows, on the first connection of a network. Later connections send all rows.
#[derive(Debug, Default)]
pub struct Withheld {
    num_frames: Arc<AtomicU64>,
}

impl Withheld {
    /// The network `inner`, whose first connection withholds the rows of all frames with odd numbers, or with even
    /// ones.
    pub fn over(
        &self,
        inner: Arc<dyn Network>,
        odd: bool,
        model: &ClientModel,
    ) -> Arc<dyn Network> {
        let shape = &model.shape;
        let (frames, bytes) = (SLOT.num_frames as u32, SLOT.slot_bytes as u64);
        let tokens =
            FrameGeometry::tokens_for_slot(shape.hidden, shape.top_k, DTYPE_BF16, frames, bytes);
        let geometry = FrameGeometry::new(shape.hidden, shape.top_k, DTYPE_BF16, tokens, frames);
        let control_offset = geometry.expect("a geometry").slot_bytes - CONTROL_BYTES;
        let control_offset = control_offset as usize;
        let num_frames = Arc::clone(&self.num_frames);
        let num_connections = AtomicU64::new(0);
        Arc::new(FaultyNetwork::new(inner, move || {
            let is_first = num_connections.fetch_add(1, Ordering::SeqCst) == 0;
            let num_frames = Arc::clone(&num_frames);
            let (last, words) = (0, HashMap::new());
            is_first.then_some(Withholding { odd, last, num_frames, control_offset, words })
        }))
    }

    /// Number of frames that were sent without their rows.
    pub fn num_frames(&self) -> u64 {
        self.num_frames.load(Ordering::SeqCst)
    }
}

#[derive(Debug)]
struct Withholding {
    odd: bool,
    /// The last frame whose rows were withheld.
    last: u64,
    num_frames: Arc<AtomicU64>,
    /// Offset of the words about frames in a slot, behind its rows.
    control_offset: usize,
    /// For each row's flag: its value at the sender, and the part that the receiver lacks.
    words: HashMap<usize, (u64, u64)>,
}

impl Fault for Withholding {
    fn add_flag(
        &mut self,
        dst: RemoteRange<SlotKey>,
        value: u64,
    ) -> Result<Option<u64>, PostError> {
        if dst.offset >= self.control_offset {
            return Ok(Some(value));
        }
        // A row's flag, whose value is the number of its frame.
        let (number, missing) = self.words.entry(dst.offset).or_default();
        *number = number.wrapping_add(value);
        *missing = missing.wrapping_add(value);
        if (*number % 2 == 1) == self.odd {
            if std::mem::replace(&mut self.last, *number) != *number {
                self.num_frames.fetch_add(1, Ordering::SeqCst);
            }
            return Ok(None);
        }
        Ok(Some(std::mem::take(missing)))
    }
}
