//! The devices of a fabric: its ports, the registrations with each device, and their keys.

use std::os::fd::AsRawFd;
use std::ptr::NonNull;
use std::sync::Arc;

use super::config::{MAX_QUEUE_PAIRS, PortChoice, VerbsConfig};
use super::owner::{CallError, ProtectionDomain};
use super::port::{Port, error};
use super::registration::{MemoryRegion, Rights};
use p2p_core::endpoint::PostError;
use p2p_core::fabric::DmaBuf;
use p2p_core::network::NetworkError;

/// Mechanism by which another device's memory was registered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeviceAccess {
    /// By its dma-buf.
    DmaBuf,
    /// By its address, which needs a peer-memory module of the device's driver.
    PeerMemory,
}

/// Registers memory of another device, by its dma-buf if possible, else by its address.
///
/// # Safety
/// The memory stays allocated until the registration is dropped.
pub(super) unsafe fn register_device(
    domain: &Arc<ProtectionDomain>,
    ptr: NonNull<u8>,
    bytes: usize,
    rights: Rights,
    dma_buf: Option<DmaBuf<'_>>,
) -> Result<(MemoryRegion, DeviceAccess), PostError> {
    let address = ptr.as_ptr() as u64;
    let first = match dma_buf {
        // SAFETY: the caller keeps the memory allocated.
        Some(DmaBuf { fd, offset }) => unsafe {
            MemoryRegion::of_dmabuf(domain, fd.as_raw_fd(), offset, address, bytes, rights)
        },
        None => Err(CallError { call: "ibv_reg_dmabuf_mr", code: libc::ENOENT }),
    };
    let why_not = match first {
        Ok(key) => return Ok((key, DeviceAccess::DmaBuf)),
        Err(why_not) => why_not,
    };
    // SAFETY: the caller keeps the memory allocated.
    match unsafe { MemoryRegion::of_pointer(domain, ptr, bytes, rights) } {
        Ok(key) => {
            tracing::debug!(%why_not, "registered by address instead of dma-buf");
            Ok((key, DeviceAccess::PeerMemory))
        }
        Err(error) => Err(PostError::Register {
            bytes,
            detail: format!(
                "by dma-buf: {why_not}; by address: {error}; a GPU needs dma-buf support of kernel and driver, or a module such as nvidia_peermem"
            ),
        }),
    }
}

/// Keeps the ports of at most two devices and returns their joint name. More than two named devices are an error.
pub(super) fn keep_two_devices(
    ports: &mut Vec<Port>,
    config: &VerbsConfig,
) -> Result<String, NetworkError> {
    let named = |ports: &[Port]| ports.iter().map(Port::name).collect::<Vec<_>>().join("+");
    let mut devices: Vec<String> = Vec::new();
    let all = named(ports);
    ports.retain(|port| {
        let name = port.context.name();
        let is_known = devices.iter().any(|known| known == name);
        if !is_known && devices.len() < MAX_DEVICES {
            devices.push(name.to_owned());
            return true;
        }
        is_known
    });
    let kept = named(ports);
    if kept != all {
        if matches!(config.ports, PortChoice::Named(_)) {
            let detail =
                "an engine uses ports of two devices at the most; name those next to its memory";
            return Err(error(&all, "choosing ports", None, detail));
        }
        tracing::info!(near = all, used = kept, "an engine uses ports of two devices at the most");
    }
    let most = MAX_QUEUE_PAIRS / config.queue_pairs_per_port.max(1) as usize;
    if !matches!(config.ports, PortChoice::Named(_)) {
        ports.truncate(most.max(1));
    }
    Ok(named(ports))
}

/// Packs the keys of a registration into one number. The first device's key is the lower half.
pub(super) fn keys_together(keys: impl Iterator<Item = u32>) -> u64 {
    keys.enumerate().fold(0, |all, (idx, key)| all | u64::from(key) << (32 * idx))
}

/// The key for queue pairs that lead to device `idx` of a peer.
pub(super) const fn key_of(all: u64, idx: usize) -> u32 {
    (if idx == 0 { all } else { all >> 32 }) as u32
}

/// Maximum number of devices per fabric: a memory description has room for this many keys.
pub(super) const MAX_DEVICES: usize = 2;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_description_holds_one_key_per_device() {
        let both = keys_together([0xffff_fffe, 9].into_iter());
        assert_eq!((key_of(both, 0), key_of(both, 1)), (0xffff_fffe, 9));
        // A peer with one device sees the first key, regardless of any others.
        assert_eq!(keys_together([7].into_iter()), 7);
        assert_eq!(key_of(7, 0), 7);
    }
}
