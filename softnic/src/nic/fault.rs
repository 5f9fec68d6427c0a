//! Injected faults.

use std::ops::Range;

use super::{ControlError, Nic};
use crate::format::Syndrome;

/// A fault.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Fault {
    /// The `nth` request from the next one on fails; 0 is the next.
    Fail {
        /// Queue pair.
        qpn: u32,
        /// Requests before it.
        nth: u64,
        /// Syndrome of the failure.
        syndrome: Syndrome,
    },
    /// Requests to these addresses of the peer fail.
    FailRange {
        /// Queue pair.
        qpn: u32,
        /// Addresses.
        addresses: Range<u64>,
        /// Syndrome of the failure.
        syndrome: Syndrome,
    },
    /// Doorbells do not reach the NIC.
    DropDoorbells {
        /// Queue pair.
        qpn: u32,
        /// Number of doorbells.
        num: u32,
    },
    /// The queue pair does nothing until resumed.
    Stall {
        /// Queue pair.
        qpn: u32,
    },
    /// Ends a stall.
    Resume {
        /// Queue pair.
        qpn: u32,
    },
    /// The peer does not answer.
    Disconnect {
        /// Queue pair.
        qpn: u32,
    },
}

impl Nic {
    /// Injects a fault.
    ///
    /// # Errors
    /// [`ControlError::Unknown`].
    pub fn inject(&mut self, fault: Fault) -> Result<(), ControlError> {
        match fault {
            Fault::Fail { qpn, nth, syndrome } => {
                let qp = self.qp(qpn)?;
                qp.failures.push((qp.num_requests + nth, syndrome));
            }
            Fault::FailRange { qpn, addresses, syndrome } => {
                self.qp(qpn)?.failing_ranges.push((addresses, syndrome));
            }
            Fault::DropDoorbells { qpn, num } => self.qp(qpn)?.num_dropped = num,
            Fault::Stall { qpn } => self.qp(qpn)?.is_stalled = true,
            Fault::Resume { qpn } => self.qp(qpn)?.is_stalled = false,
            Fault::Disconnect { qpn } => self.qp(qpn)?.remote = None,
        }
        Ok(())
    }
}
