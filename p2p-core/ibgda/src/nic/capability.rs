//! What a NIC can do of what queues need.

use std::ffi::{c_int, c_void};
use std::ptr::NonNull;

use super::{DevxCapabilities, Nic, NicError, code_error};
use crate::ffi::{self, DeviceAttributes};
use crate::library::Libraries;
use crate::prm::AtomicCapabilities;

/// What libibverbs says of a device, with DevX or without.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct DeviceLimits {
    /// `IBV_ATOMIC_*`
    atomics: u32,
    /// Reads and atomics under way of a queue pair that asks.
    max_reads: u32,
    /// The same of one that is asked.
    max_peer_reads: u32,
}

pub(super) fn query_limits(
    libraries: &Libraries,
    context: NonNull<c_void>,
    name: &str,
) -> Result<DeviceLimits, NicError> {
    let mut attributes = DeviceAttributes::default();
    // SAFETY: the context is open; a place for the attributes.
    let code = unsafe { (libraries.verbs.ibv_query_device)(context.as_ptr(), &raw mut attributes) };
    if code != 0 {
        let advice = "has the device been reset or taken away?";
        return Err(code_error(name, "ibv_query_device", code, advice));
    }
    let limit = |value: c_int| u32::try_from(value).unwrap_or(0);
    Ok(DeviceLimits {
        atomics: attributes.atomic_cap,
        max_reads: limit(attributes.max_qp_init_rd_atom),
        max_peer_reads: limit(attributes.max_qp_rd_atom),
    })
}

impl Nic {
    /// Whether the device executes the requests of posters, whoever makes the queue. Without DevX nobody
    /// says whether there are masked atomics: the first one fails then, with syndrome 02 or 14.
    ///
    /// # Errors
    /// [`NicError::Capability`].
    pub fn check_requests(&self) -> Result<(), NicError> {
        let few = "at least 16 reads and atomics under way for each queue pair";
        let limits = &self.limits;
        for (what, found) in
            [("max_qp_init_rd_atom", limits.max_reads), ("max_qp_rd_atom", limits.max_peer_reads)]
        {
            if found < MAX_READS {
                return Err(self.lacks(what, found.to_string(), few));
            }
        }
        match &self.devx {
            Ok(caps) => self.check_atomics(&caps.atomic),
            Err(_) if limits.atomics == ffi::ATOMIC_NONE => {
                let expected = "1 (IBV_ATOMIC_HCA) or more: flags are atomics; enable them in the firmware, \
                                or for this virtual function";
                Err(self.lacks("atomic_cap", limits.atomics.to_string(), expected))
            }
            Err(_) => Ok(()),
        }
    }

    /// What DevX offers here.
    ///
    /// # Errors
    /// [`NicError::NoDevx`], [`NicError::Capability`].
    pub fn devx(&self) -> Result<DevxCapabilities, NicError> {
        let caps = match &self.devx {
            Ok(caps) => *caps,
            Err(detail) => {
                return Err(NicError::NoDevx { device: self.name.clone(), detail: detail.clone() });
            }
        };
        if caps.general.cqe_version != 1 {
            return Err(self.lacks("cqe_version", caps.general.cqe_version.to_string(), "1"));
        }
        self.check_atomics(&caps.atomic)?;
        Ok(caps)
    }

    /// Fetch-add and masked fetch-add, of 4 and 8 bytes.
    fn check_atomics(&self, atomic: &AtomicCapabilities) -> Result<(), NicError> {
        if atomic.operations & 0b1010 != 0b1010 {
            let expected = "fetch-add and masked fetch-add (0x000a): enable atomics in the firmware, or for \
                            this virtual function";
            let found = format!("{:#06x}", atomic.operations);
            return Err(self.lacks("atomic_operations", found, expected));
        }
        if atomic.sizes_bytes & 0b1100 != 0b1100 {
            let found = format!("{:#06x}", atomic.sizes_bytes);
            return Err(self.lacks("atomic_size_qp", found, "4 and 8 bytes (0x000c)"));
        }
        Ok(())
    }

    fn lacks(&self, what: &'static str, found: String, expected: &'static str) -> NicError {
        NicError::Capability { device: self.name.clone(), what, found, expected }
    }
}

/// Reads and atomics under way of a queue pair.
pub(crate) const MAX_READS: u32 = 16;
