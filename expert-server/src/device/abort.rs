//! The mask by which running kernels stop waiting for a client.

use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use kernels::abi::{DevicePtr, MAX_PEERS};
use kernels::gpu::{Gpu, GpuBuffer, GpuError};

use super::client_table::ClientTable;
use super::slots::KernelWaits;
use crate::inbox::LinkId;

/// The abort mask in host memory, which running kernels poll, and the link at each index of the client table.
/// Control tasks and the data thread share it.
#[derive(Debug)]
pub(super) struct AbortMask {
    ids: [AtomicU64; MAX_PEERS],
    mask: GpuBuffer,
    /// Waits for the paths to clients over a network. The lock is held while a link is aborted and while the
    /// links are updated, because neither may see half of the other.
    waits: Mutex<Vec<(LinkId, KernelWaits)>>,
}

impl AbortMask {
    pub(super) fn new(gpu: &Gpu) -> Result<Self, GpuError> {
        let ids = std::array::from_fn(|_| AtomicU64::new(0));
        let mask = gpu.alloc_host(size_of::<u64>() as u64)?;
        Ok(Self { ids, mask, waits: Mutex::default() })
    }

    /// Address of the mask for kernels.
    pub(super) fn ptr(&self) -> DevicePtr {
        self.mask.ptr()
    }

    /// Makes running kernels stop waiting for a client. Has no effect if the link is not in the table.
    pub(super) fn abort(&self, id: LinkId) {
        let all_waits = self.waits();
        let found = self.ids.iter().position(|at| at.load(Ordering::Acquire) == id.number());
        if let (Some(idx), Some(mask)) = (found, self.mask_word()) {
            mask.fetch_or(1 << idx, Ordering::SeqCst);
        }
        for (_, waits) in all_waits.iter().filter(|(link, _)| *link == id) {
            waits.end();
        }
    }

    /// Aborts every client whose link is to close: closing a link waits for the kernels. Must not be called
    /// between the insertion of a client and [`update`](Self::update).
    pub(super) fn abort_closing(&self, clients: &ClientTable) {
        for (idx, client) in clients.entries().iter().enumerate() {
            if let Some(client) = client
                && client.is_closing()
                && !self.is_aborted(idx)
            {
                self.abort(client.id);
            }
        }
    }

    /// Returns true if kernels do not wait for the client at this index.
    pub(super) fn is_aborted(&self, idx: usize) -> bool {
        self.mask_word().is_some_and(|mask| mask.load(Ordering::SeqCst) >> idx & 1 != 0)
    }

    /// Takes over the links of the table, between two batches.
    pub(super) fn update(&self, clients: &ClientTable) {
        let mut all_waits = self.waits();
        self.set_ids(|idx| clients.entries()[idx].as_ref().map_or(0, |client| client.id.number()));
        *all_waits =
            clients.iter().filter_map(|client| Some((client.id, client.slots.waits()?))).collect();
    }

    /// An aborted client stays aborted until another client has its index.
    fn set_ids(&self, number_of: impl Fn(usize) -> u64) {
        let mut same = 0;
        for (idx, id) in self.ids.iter().enumerate() {
            let number = number_of(idx);
            same |= u32::from(id.swap(number, Ordering::AcqRel) == number && number != 0) << idx;
        }
        if let Some(mask) = self.mask_word() {
            mask.fetch_and(same, Ordering::SeqCst);
        }
    }

    fn waits(&self) -> MutexGuard<'_, Vec<(LinkId, KernelWaits)>> {
        // No holder of the lock can leave the list half changed.
        self.waits.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn mask_word(&self) -> Option<&AtomicU32> {
        let host: NonNull<u8> = self.mask.host()?;
        // SAFETY: aligned memory of at least 4 bytes that lives as long as `self`; kernels only read it, and all
        // host code uses it atomically.
        Some(unsafe { AtomicU32::from_ptr(host.as_ptr().cast()) })
    }
}

#[cfg(test)]
mod tests {
    use kernels::abi::FrameGeometry;
    use protocol::{DispatchExpect, WireDtype};
    use tokio::sync::oneshot;

    use super::*;
    use crate::device::client::Client;
    use crate::device::slots::fake::remote_slots;
    use crate::inbox::Inbox;
    use crate::metrics::DropReason;

    /// A client over a network, and the word that ends the kernels' waits for the path to it.
    fn remote_client(gpu: &Gpu, id: LinkId) -> (Client, std::sync::Arc<GpuBuffer>) {
        let (slots, waits) = remote_slots(gpu);
        let expect = DispatchExpect {
            client_id: 1,
            generation: 1,
            hidden: 128,
            num_layers: 1,
            num_experts: 8,
            max_tokens: 8,
            top_k: 2,
            dtype: WireDtype::Bf16,
            response_dtype: WireDtype::Bf16,
        };
        (Client::new(id, slots, expect, oneshot::channel().0), waits)
    }

    /// In each order of the events.
    #[test]
    fn kernels_wait_for_no_client_whose_link_is_to_close() {
        let gpu = Gpu::open_emulated(0).expect("a GPU in software");
        let geometry = FrameGeometry::new(256, 4, kernels::abi::DTYPE_BF16, 16, 2);
        let mut clients = ClientTable::new(&gpu, &geometry.expect("a geometry")).expect("a table");
        let mask = AbortMask::new(&gpu).expect("a mask");
        let inbox = Inbox::<()>::new();
        let ids = [inbox.next_id(), inbox.next_id(), inbox.next_id()];
        let [wrong, gone, right] = ids;
        let waits = ids.map(|id| {
            let (client, waits) = remote_client(&gpu, id);
            clients.insert(client).expect("a free entry");
            waits
        });
        let ended = || {
            waits.each_ref().map(|waits| {
                let host = waits.host().expect("host memory");
                // SAFETY: a live word of page-locked memory that all code uses atomically.
                unsafe { AtomicU32::from_ptr(host.as_ptr().cast()) }.load(Ordering::SeqCst)
            })
        };
        // The connection ends after the client is in the table and before the mask knows its link.
        mask.abort(gone);
        mask.update(&clients);
        mask.abort_closing(&clients);
        assert_eq!(ended(), [0, 0, 0], "no link is to close");
        let mut close = |id, reason| {
            let client = clients.iter_mut().find(|client| client.id == id).expect("a client");
            client.close_with(reason);
            mask.abort_closing(&clients);
        };
        close(gone, DropReason::PeerClosed);
        assert_eq!((ended(), mask.is_aborted(1)), ([0, 1, 0], true));
        // The path is in service, and the connection is open.
        close(wrong, DropReason::BadFrames);
        assert_eq!((ended(), mask.is_aborted(0)), ([1, 1, 0], true));
        close(wrong, DropReason::PeerClosed);
        assert_eq!((ended(), mask.is_aborted(2)), ([1, 1, 0], false));
        let right = clients.iter().find(|client| client.id == right);
        assert_eq!(right.and_then(Client::close_reason), None);
    }

    #[test]
    fn an_aborted_client_stays_so_until_another_has_its_index() {
        let gpu = Gpu::open_emulated(0).expect("a GPU in software");
        let aborts = AbortMask::new(&gpu).expect("a mask");
        let inbox = Inbox::<()>::new();
        let [first, second, third] = [inbox.next_id(), inbox.next_id(), inbox.next_id()];
        let mask = || aborts.mask_word().expect("a mask").load(Ordering::SeqCst);
        let set = |ids: [LinkId; 2]| aborts.set_ids(|idx| ids.get(idx).map_or(0, |id| id.number()));
        set([first, second]);
        aborts.abort(second);
        assert_eq!(mask(), 0b10);
        set([first, second]);
        assert_eq!(mask(), 0b10, "the same client has the index");
        set([first, third]);
        assert_eq!(mask(), 0, "another client has the index");
        aborts.abort(second);
        assert_eq!(mask(), 0, "the index of a removed client was aborted");
    }
}
