//! Copies on a user's thread.
//!
//! The engine's thread and a user's thread announce their copies in words of their own, so neither waits for the other.
//! Users' threads take turns by a lock. The fabric takes it, too, before it gives the peer's index to another peer.

use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError};

use super::table::{Copier, OwnTable};
use super::{RemoteProcess, op_name, raw};
use crate::fabric::{DirectCopy, DirectError, DirectWait, RemoteSegment};
use p2p_core::endpoint::PostError;

/// Copies towards one peer.
#[derive(Debug)]
pub(super) struct CmaCopy {
    table: Arc<OwnTable>,
    remote: Arc<RemoteProcess>,
    /// The peer's index in the table.
    place: usize,
    /// Whether the fabric has closed the peer.
    is_closed: Mutex<bool>,
}

impl CmaCopy {
    pub(super) fn new(table: Arc<OwnTable>, remote: Arc<RemoteProcess>, place: usize) -> Self {
        Self { table, remote, place, is_closed: Mutex::new(false) }
    }

    /// Ends all copies. Waits until a copy under way has ended, which is one of a MiB at most.
    pub(super) fn close(&self) {
        *self.is_closed.lock().unwrap_or_else(PoisonError::into_inner) = true;
    }
}

impl DirectCopy for CmaCopy {
    unsafe fn copy(
        &self,
        is_write: bool,
        remote: RemoteSegment,
        here: NonNull<u8>,
        bytes: u64,
        _wait: &DirectWait<'_>,
    ) -> Option<Result<(), DirectError>> {
        let is_closed = self.is_closed.try_lock().ok()?;
        let op = op_name(is_write);
        if *is_closed {
            return Some(Err(PostError::Disconnected { op }.into()));
        }
        let address = match remote.checked(op, bytes) {
            Ok(address) => address,
            Err(error) => return Some(Err(error.into())),
        };
        let announcement = self.table.announce(self.place, Copier::User, remote.region.key);
        if !self.remote.table.admits(self.remote.our_place) {
            return Some(Err(PostError::Disconnected { op }.into()));
        }
        let mut done = 0;
        while done < bytes {
            let left = bytes - done;
            let at = address + done;
            if let Err(error) = self.remote.check(op, is_write, remote.region.key, at, left) {
                return Some(Err(error.into()));
            }
            // SAFETY: `done` is less than the length of the range.
            let here = unsafe { here.add(done as usize) };
            let here = [raw::part(here.as_ptr(), left as usize)];
            let there = [raw::part(at as *const u8, left as usize)];
            // SAFETY: `here` is registered memory by the caller's promise. The key is announced and was checked.
            match unsafe { self.remote.copy(op, is_write, &here, &there, left) } {
                Ok(copied) => done += copied,
                Err(error) => return Some(Err(error.into())),
            }
        }
        drop(announcement);
        Some(Ok(()))
    }
}
