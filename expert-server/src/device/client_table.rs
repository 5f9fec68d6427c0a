//! The table of clients. A client's index in it is the number by which kernels know the client.

use std::sync::Arc;

use bytemuck::Zeroable;
use kernels::abi::{ClientPeer, FrameGeometry, Link, MAX_PEERS, PATH_DIRECT};
use kernels::gpu::{Gpu, GpuBuffer, GpuError};

use super::client::Client;

/// Clients by index, and the slot that stands for free entries. No client ever writes that slot, so kernels see a
/// client there that sends nothing.
#[derive(Debug)]
pub(super) struct ClientTable {
    entries: [Option<Client>; MAX_PEERS],
    empty_slot: Arc<GpuBuffer>,
}

impl ClientTable {
    pub(super) fn new(gpu: &Gpu, geometry: &FrameGeometry) -> Result<Self, GpuError> {
        let bytes = geometry.slot_bytes.max(geometry.response_slot_bytes);
        let empty_slot = Arc::new(gpu.alloc(bytes)?);
        Ok(Self { entries: [const { None }; MAX_PEERS], empty_slot })
    }

    /// Puts a client into the first free entry and returns its index. Returns the client if no entry is free.
    pub(super) fn insert(&mut self, client: Client) -> Result<usize, Box<Client>> {
        match self.entries.iter().position(Option::is_none) {
            Some(idx) => {
                self.entries[idx] = Some(client);
                Ok(idx)
            }
            None => Err(Box::new(client)),
        }
    }

    /// Removes the clients whose links are to close.
    pub(super) fn remove_closing(&mut self) -> impl Iterator<Item = Client> + '_ {
        self.entries.iter_mut().filter_map(|entry| entry.take_if(|client| client.is_closing()))
    }

    /// Removes all clients, but leaks their slots: a kernel may still use them.
    pub(super) fn leak_slots(&mut self) {
        for Client { slots, .. } in self.entries.iter_mut().filter_map(Option::take) {
            std::mem::forget(slots);
        }
        std::mem::forget(Arc::clone(&self.empty_slot));
    }

    /// All entries, in the order of their indices.
    pub(super) fn entries(&self) -> &[Option<Client>; MAX_PEERS] {
        &self.entries
    }

    pub(super) fn get_mut(&mut self, idx: usize) -> Option<&mut Client> {
        self.entries.get_mut(idx).and_then(Option::as_mut)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Client> {
        self.entries.iter().flatten()
    }

    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = &mut Client> {
        self.entries.iter_mut().flatten()
    }

    /// Mask of the entries that have a client.
    pub(super) fn occupied(&self) -> u32 {
        self.mask_of(|_| true)
    }

    /// Mask of the clients whose answers have a flag per row.
    pub(super) fn flagged(&self) -> u32 {
        self.mask_of(|client| !client.slots.is_stored_to())
    }

    fn mask_of(&self, is_one: impl Fn(&Client) -> bool) -> u32 {
        let entries = self.entries.iter().enumerate();
        let ones = entries.filter(|(_, client)| client.as_ref().is_some_and(&is_one));
        ones.fold(0, |mask, (idx, _)| mask | 1 << idx)
    }

    pub(super) fn len(&self) -> usize {
        self.iter().count()
    }

    pub(super) fn has_closing(&self) -> bool {
        self.iter().any(Client::is_closing)
    }

    /// Entries that kernels read: all up to the last client.
    pub(super) fn num_entries(&self) -> u32 {
        self.entries.iter().rposition(Option::is_some).map_or(0, |last| last as u32 + 1)
    }

    /// The table in the form that kernels read.
    pub(super) fn peers(&self) -> [ClientPeer; MAX_PEERS] {
        let slot = self.empty_slot.ptr();
        let empty = ClientPeer {
            request: slot,
            response: Link { window: slot, context: 0, path: PATH_DIRECT, reserved: 0 },
            ..ClientPeer::zeroed()
        };
        std::array::from_fn(|idx| self.entries[idx].as_ref().map_or(empty, Client::peer))
    }
}
