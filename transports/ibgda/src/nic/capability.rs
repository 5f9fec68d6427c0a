//! Capabilities of a NIC that queues need.

use std::ffi::{c_int, c_void};
use std::ptr::NonNull;

use super::{DEVX_ADVICE, DevxCapabilities, NicError, code_error};
use crate::ffi::{self, DeviceAttributes};
use crate::library::Libraries;
use crate::prm::{self, AtomicCapabilities, CapabilityKind};

/// Capabilities that libibverbs reports for a device, with DevX or without.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceLimits {
    /// Version of the firmware.
    pub firmware: String,
    /// The vendor's number of the kind of device.
    pub part_id: u32,
    /// Ports.
    pub num_ports: u8,
    /// `IBV_ATOMIC_*`
    pub atomics: u32,
    /// Reads and atomics under way of a requesting queue pair, `max_qp_init_rd_atom`.
    pub max_reads: u32,
    /// The same of a responding queue pair, `max_qp_rd_atom`.
    pub max_peer_reads: u32,
    /// Most basic blocks of a send queue, `max_qp_wr`.
    pub max_blocks: u32,
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
    let firmware: Vec<u8> = attributes.fw_ver.iter().flat_map(|word| word.to_ne_bytes()).collect();
    let firmware = firmware.split(|byte| *byte == 0).next().unwrap_or_default();
    Ok(DeviceLimits {
        firmware: String::from_utf8_lossy(firmware).into_owned(),
        part_id: attributes.vendor_part_id,
        num_ports: attributes.phys_port_cnt,
        atomics: attributes.atomic_cap,
        max_reads: limit(attributes.max_qp_init_rd_atom),
        max_peer_reads: limit(attributes.max_qp_rd_atom),
        max_blocks: limit(attributes.max_qp_wr),
    })
}

/// Capabilities of a device that queues need.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Capabilities {
    pub(super) device: String,
    /// Of libibverbs.
    pub limits: DeviceLimits,
    /// Capabilities that the firmware reports, or the reason why it cannot be queried.
    pub devx: Result<DevxCapabilities, String>,
}

impl Capabilities {
    /// Whether the device executes the requests of posters, on both kinds of queues. Without DevX, no query tells
    /// whether masked atomics exist: if not, the first one fails with syndrome 02 or 14.
    ///
    /// # Errors
    /// [`NicError::Capability`].
    pub fn check_requests(&self) -> Result<(), NicError> {
        self.check_reads()?;
        self.check_fetch_add()?;
        self.check_masked()
    }

    /// Whether enough reads and atomics may be under way.
    ///
    /// # Errors
    /// [`NicError::Capability`].
    pub fn check_reads(&self) -> Result<(), NicError> {
        let few = "at least 16 reads and atomics under way for each queue pair";
        let limits = &self.limits;
        for (what, found) in
            [("max_qp_init_rd_atom", limits.max_reads), ("max_qp_rd_atom", limits.max_peer_reads)]
        {
            if found < MAX_READS {
                return Err(self.lacks(what, found.to_string(), few));
            }
        }
        Ok(())
    }

    /// Whether fetch-add exists. Where DevX reports it, that report counts.
    ///
    /// # Errors
    /// [`NicError::Capability`].
    pub fn check_fetch_add(&self) -> Result<(), NicError> {
        match &self.devx {
            Ok(caps) => self.check_atomics(&caps.atomic, FETCH_ADD),
            Err(_) if self.limits.atomics == ffi::ATOMIC_NONE => {
                let expected = "1 (IBV_ATOMIC_HCA) or more: flags are atomics; enable them in the firmware, \
                                or for this virtual function";
                Err(self.lacks("atomic_cap", self.limits.atomics.to_string(), expected))
            }
            Err(_) => Ok(()),
        }
    }

    /// Whether there is masked fetch-add, as far as DevX says.
    ///
    /// # Errors
    /// [`NicError::Capability`].
    pub fn check_masked(&self) -> Result<(), NicError> {
        match &self.devx {
            Ok(caps) => self.check_atomics(&caps.atomic, MASKED_FETCH_ADD),
            Err(_) => Ok(()),
        }
    }

    /// DevX features of this device.
    ///
    /// # Errors
    /// [`NicError::NoDevx`], [`NicError::Capability`].
    pub fn devx(&self) -> Result<DevxCapabilities, NicError> {
        let caps = match &self.devx {
            Ok(caps) => *caps,
            Err(detail) => {
                return Err(NicError::NoDevx {
                    device: self.device.clone(),
                    detail: detail.clone(),
                });
            }
        };
        self.check_completions(&caps)?;
        self.check_atomics(&caps.atomic, FETCH_ADD | MASKED_FETCH_ADD)?;
        Ok(caps)
    }

    /// Whether completions have the format that posters read.
    ///
    /// # Errors
    /// [`NicError::Capability`].
    pub fn check_completions(&self, caps: &DevxCapabilities) -> Result<(), NicError> {
        if caps.general.cqe_version == 1 {
            return Ok(());
        }
        Err(self.lacks("cqe_version", caps.general.cqe_version.to_string(), "1"))
    }

    /// Whether DevX makes send queues of `depth` basic blocks.
    ///
    /// # Errors
    /// [`NicError::Capability`].
    pub fn check_depth(&self, caps: &DevxCapabilities, depth: u32) -> Result<(), NicError> {
        if depth.trailing_zeros() <= u32::from(caps.general.log_max_qp_blocks) {
            return Ok(());
        }
        let found = caps.general.log_max_qp_blocks.to_string();
        Err(self.lacks("log_max_qp_sz", found, "at least the logarithm of the queue's depth"))
    }

    /// Whether DevX makes queue pairs without a doorbell record for requests.
    ///
    /// # Errors
    /// [`NicError::Capability`].
    pub fn check_register_alone(&self, caps: &DevxCapabilities) -> Result<(), NicError> {
        if caps.can_do_without_record {
            return Ok(());
        }
        let expected = "1: a newer NIC or firmware; until then queues need `Doorbell::WithRecord`";
        Err(self.lacks("send_dbr_mode_no_dbr_ext", "0".to_owned(), expected))
    }

    /// Operations of `needed`, of 4 and 8 bytes.
    fn check_atomics(&self, atomic: &AtomicCapabilities, needed: u16) -> Result<(), NicError> {
        if atomic.operations & needed != needed {
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
        NicError::Capability { device: self.device.clone(), what, found, expected }
    }
}

/// Asks the firmware.
pub(super) fn query_devx(
    libraries: &Libraries,
    context: NonNull<c_void>,
    device: &str,
) -> Result<DevxCapabilities, NicError> {
    let query = |kind| {
        let mut answer = [0; prm::CAPABILITY_BYTES];
        let command = prm::query_capabilities(kind);
        send_command(libraries, context, device, "QUERY_HCA_CAP", &command, &mut answer)
            .map(|()| answer)
    };
    let general = prm::general_capabilities(&query(CapabilityKind::General)?);
    Ok(DevxCapabilities {
        general,
        atomic: prm::atomic_capabilities(&query(CapabilityKind::Atomic)?),
        can_do_without_record: general.has_general_2
            && prm::can_do_without_record(&query(CapabilityKind::General2)?),
    })
}

/// Sends a command that makes nothing.
fn send_command(
    libraries: &Libraries,
    context: NonNull<c_void>,
    device: &str,
    name: &'static str,
    command: &[u8],
    answer: &mut [u8],
) -> Result<(), NicError> {
    // SAFETY: the context is open; both buffers have the lengths that are given.
    let code = unsafe {
        (libraries.mlx5.mlx5dv_devx_general_cmd)(
            context.as_ptr(),
            command.as_ptr().cast(),
            command.len(),
            answer.as_mut_ptr().cast(),
            answer.len(),
        )
    };
    // The answer's own status says more than the code.
    prm::check(name, answer)
        .map_err(|source| NicError::Refused { device: device.to_owned(), source })?;
    if code != 0 {
        return Err(code_error(device, "mlx5dv_devx_general_cmd", code, DEVX_ADVICE));
    }
    Ok(())
}

/// Reads and atomics under way of a queue pair.
pub(crate) const MAX_READS: u32 = 16;
/// Bits of [`AtomicCapabilities::operations`].
const FETCH_ADD: u16 = 1 << 1;
const MASKED_FETCH_ADD: u16 = 1 << 3;
