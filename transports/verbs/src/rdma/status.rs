//! Describes failed operations in words: the operation, the peer, the codes, and the settings to check.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use super::messages::ReceiveError;
use super::sys::ibv_wc_status as wc;
use p2p_core::endpoint::PostError;

/// Cause of a peer's first failure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Cause {
    /// Reported by a completion.
    Completion { status: u32, vendor: u32 },
    /// Reported by the device, without a completion.
    Event { kind: u32, why: &'static str },
    /// Posting was refused.
    Refused { code: i32 },
    /// The device completed nothing for too long.
    Late { limit_ms: u64 },
    /// The peer's process took none of its arrivals for too long.
    Still { limit_ms: u64 },
    /// The peer sent an invalid message.
    Peer(ReceiveError),
}

/// Holds the first failure. All later ones are consequences of it.
#[derive(Debug, Default)]
pub(super) struct Health {
    has_failed: AtomicBool,
    first: OnceLock<(&'static str, Cause)>,
}

impl Health {
    pub(super) fn fail(&self, op: &'static str, cause: Cause) {
        // A second failure finds the cell already set, so the first one is kept.
        let _ = self.first.set((op, cause));
        self.has_failed.store(true, Ordering::Release);
    }

    #[inline]
    pub(super) fn has_failed(&self) -> bool {
        self.has_failed.load(Ordering::Acquire)
    }

    /// The failure as an error, if there was one. Without a failure it costs one load.
    #[inline]
    pub(super) fn check(&self, peer: impl Fn() -> String) -> Result<(), PostError> {
        if self.has_failed() { Err(self.error(peer())) } else { Ok(()) }
    }

    #[cold]
    fn error(&self, peer: String) -> PostError {
        match self.first.get() {
            Some((op, cause)) => error(op, *cause, &peer),
            None => PostError::Disconnected { op: "health" },
        }
    }
}

pub(super) fn error(op: &'static str, cause: Cause, peer: &str) -> PostError {
    let (code, detail) = match cause {
        Cause::Completion { status, vendor } => {
            let (what, check) = explain(status);
            (
                i64::from(status),
                format!("towards {peer}: {what} (vendor code {vendor:#x}); {check}"),
            )
        }
        Cause::Event { kind, why } => {
            let check = "see `dmesg` and the device's hw_counters below /sys/class/infiniband";
            (i64::from(kind), format!("towards {peer}: {why}; {check}"))
        }
        Cause::Refused { code } => {
            let what = super::sys::describe_errno(code);
            let check = "the queue pair takes no more requests; connect again";
            (i64::from(code), format!("towards {peer}: posting was refused: {what}; {check}"))
        }
        Cause::Late { limit_ms } => {
            let check = "the peer's host or the network stalls; check that its host runs, its link, and pause frames; stall_timeout_ms is the limit";
            (
                i64::from(libc::ETIMEDOUT),
                format!("towards {peer}: nothing completed for {limit_ms} ms; {check}"),
            )
        }
        Cause::Still { limit_ms } => {
            let check = "its process neither polls nor sleeps on the transport: frozen, or starved of processor time; stall_timeout_ms is the limit";
            (
                i64::from(libc::ETIMEDOUT),
                format!("towards {peer}: the peer took nothing for {limit_ms} ms; {check}"),
            )
        }
        Cause::Peer(error) => {
            let check = "use the same release on both sides";
            (i64::from(libc::EPROTO), format!("towards {peer}: the peer sent {error}; {check}"))
        }
    };
    PostError::Transport { op, code, detail }
}

/// Meaning of a completion status, and a hint for the diagnosis.
const fn explain(status: u32) -> (&'static str, &'static str) {
    match status {
        wc::IBV_WC_RETRY_EXC_ERR => (
            "retries exceeded, the peer's device does not answer",
            "check that its host runs, the link (`rdma link`), routes and MTU between both, and flow control on RoCE",
        ),
        wc::IBV_WC_RNR_RETRY_EXC_ERR => (
            "the peer takes no wake-ups",
            "its process neither polls nor sleeps on the transport: frozen, or starved of processor time",
        ),
        wc::IBV_WC_REM_ACCESS_ERR => (
            "the peer's device denies access",
            "key and range no longer match its slot: it has retired the slot, or described it wrongly",
        ),
        wc::IBV_WC_REM_INV_REQ_ERR => (
            "the peer's device refuses the request as invalid",
            "check that its memory and queue pair allow the operation, that it offers atomics, and sizes and alignment",
        ),
        wc::IBV_WC_REM_OP_ERR => {
            ("the peer's device could not carry the request out", "see `dmesg` on its host")
        }
        wc::IBV_WC_REM_ABORT_ERR => ("the peer's device aborted", "see `dmesg` on its host"),
        wc::IBV_WC_LOC_PROT_ERR => (
            "this side's memory is not registered for this",
            "a local bug: register the memory, and keep it registered until the operation completes",
        ),
        wc::IBV_WC_LOC_LEN_ERR | wc::IBV_WC_LOC_QP_OP_ERR | wc::IBV_WC_LOC_ACCESS_ERR => (
            "this side's device refuses the request",
            "a local bug, or a message longer than the device takes: see max_message_bytes",
        ),
        wc::IBV_WC_WR_FLUSH_ERR => {
            ("given up with the queue pair", "an earlier failure or the peer's leaving ended it")
        }
        wc::IBV_WC_RESP_TIMEOUT_ERR => {
            ("the peer did not respond in time", "check its host and the network")
        }
        wc::IBV_WC_FATAL_ERR => ("the device failed", "see `dmesg`; the device may need a reset"),
        _ => ("the device reports an error", "look the status up in ibv_wc_status of verbs.h"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_failure_is_kept_and_says_everything() {
        let health = Health::default();
        let peer = || "10.7.0.2".to_owned();
        assert!(health.check(peer).is_ok());
        health.fail("put", Cause::Completion { status: wc::IBV_WC_RETRY_EXC_ERR, vendor: 0x81 });
        health.fail("get", Cause::Completion { status: wc::IBV_WC_WR_FLUSH_ERR, vendor: 0 });
        let error = health.check(peer).unwrap_err();
        assert!(matches!(error, PostError::Transport { op: "put", code: 12, .. }), "{error}");
        let text = error.to_string();
        for part in ["put", "10.7.0.2", "0x81", "retries exceeded", "rdma link"] {
            assert!(text.contains(part), "{text} lacks {part}");
        }
    }

    #[test]
    fn every_status_has_words() {
        for status in 0..=wc::IBV_WC_TM_RNDV_INCOMPLETE {
            let (what, check) = explain(status);
            assert!(!what.is_empty() && !check.is_empty());
        }
    }
}
