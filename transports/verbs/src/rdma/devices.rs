//! The devices of a fabric: which ports it uses, what is registered with each, and their keys.

use std::os::fd::AsRawFd;
use std::ptr::NonNull;
use std::sync::Arc;

use super::config::{MAX_LANES, PortChoice, VerbsConfig};
use super::owner::{CallError, ProtectionDomain};
use super::port::{Port, error};
use super::registration::{MemoryRegion, Rights};
use p2p_core::endpoint::PostError;
use p2p_core::fabric::DmaBuf;
use p2p_core::network::NetworkError;

/// How memory of another device was registered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeviceAccess {
    /// By its dma-buf.
    DmaBuf,
    /// By its address, which needs a peer-memory module of the device's driver.
    PeerMemory,
}

/// Memory of another device, registered by its dma-buf or else by its address.
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

/// Leaves ports of two devices; an error where more were named. Gives what they are called together.
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
    let most = MAX_LANES / config.queue_pairs_per_port.max(1) as usize;
    if !matches!(config.ports, PortChoice::Named(_)) {
        ports.truncate(most.max(1));
    }
    Ok(named(ports))
}

/// The keys of a registration as one number, the first device's in the lower half.
pub(super) fn keys_together(keys: impl Iterator<Item = u32>) -> u64 {
    keys.enumerate().fold(0, |all, (idx, key)| all | u64::from(key) << (32 * idx))
}

/// The key for queue pairs that lead to device `idx` of a peer.
pub(super) const fn key_of(all: u64, idx: usize) -> u32 {
    (if idx == 0 { all } else { all >> 32 }) as u32
}

/// Most devices of a fabric: a description of memory has room for as many keys.
pub(super) const MAX_DEVICES: usize = 2;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_description_holds_one_key_per_device() {
        let both = keys_together([0xffff_fffe, 9].into_iter());
        assert_eq!((key_of(both, 0), key_of(both, 1)), (0xffff_fffe, 9));
        // A peer with one device sees the first key, whatever else there is.
        assert_eq!(keys_together([7].into_iter()), 7);
        assert_eq!(key_of(7, 0), 7);
    }
}
