//! Opening and closing of a device's pairs.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::super::endpoint::Lease;
use super::super::inbound::Inbound;
use super::super::link::{IDX_MASK, Link};
use super::super::mailbox::{Mailbox, NUM_CELLS};
use super::super::outbox::Outbox;
use super::super::owner::CallError;
use super::super::port::{MemoryRegistration, Rights, network_error};
use super::super::sys;
use super::super::table::{Address, CloseRequest, CloseState, Entry, Source};
use super::{Device, lock};
use p2p_core::network::NetworkError;
use p2p_core::region::Region;
use p2p_core::wait::event_fd;

impl Device {
    /// Adds a pair with a fresh slot to the table. Waits for the library thread, if there is one,
    /// for at most [`Timeouts::call`](super::super::library_thread::Timeouts::call).
    pub(in super::super) fn add(
        self: &Arc<Self>,
        slot_bytes: usize,
        waiting_offset: usize,
    ) -> Result<Lease, NetworkError> {
        match &self.library_thread {
            Some(library_thread) => library_thread
                .call("make a slot", move |device| device.add_here(slot_bytes, waiting_offset))?,
            None => self.add_here(slot_bytes, waiting_offset),
        }
    }

    fn add_here(
        self: &Arc<Self>,
        slot_bytes: usize,
        waiting_offset: usize,
    ) -> Result<Lease, NetworkError> {
        let provider = &self.port.traits().provider;
        let failed = |op: &'static str, detail: String| NetworkError {
            network: format!("libfabric {provider}"),
            op,
            code: None,
            detail,
        };
        let slot =
            Region::anonymous(slot_bytes).map_err(|e| failed("make a slot", e.to_string()))?;
        let outbox = Outbox::new(self.max_message_bytes);
        if self.library_thread.is_some() {
            // All posts go through it, and later posts must not allocate.
            outbox.prepare().map_err(|e| failed("make an outbox", e.to_string()))?;
        }
        let wake = event_fd().map_err(|e| failed("make an event", e.to_string()))?;
        let registered = self.port.register_region(&slot, Rights::ReadWrite);
        let registered = registered.map_err(|e| network_error(provider, e.op, &e))?;
        let mailbox = self.port.traits().has_mailbox.then(|| Mailbox::new(&self.port)).transpose();
        let mailbox = mailbox.map_err(|e| network_error(provider, e.op, &e))?;
        let mut state = lock(&self.state);
        let idx = match state.free.pop() {
            Some(idx) => idx,
            None if state.table.len() <= IDX_MASK as usize => {
                state.table.push(Entry::default());
                state.cursors.push(None);
                (state.table.len() - 1) as u16
            }
            None => return Err(failed("make a slot", "65536 pairs are open".to_owned())),
        };
        let entry = &mut state.table[usize::from(idx)];
        let id = u32::from(entry.generation) << 16 | u32::from(idx);
        let offer = mailbox.as_ref().map(Mailbox::address);
        let link = Arc::new(Link::new(id, slot, offer, waiting_offset, wake, outbox));
        entry.link = Some(Arc::clone(&link));
        // SAFETY: closing the pair removes the cursor before the mailbox.
        let cursor = mailbox.as_ref().map(|mailbox| unsafe { mailbox.cursor(link.token) });
        entry.inbound = Inbound::new(if mailbox.is_some() { NUM_CELLS } else { 0 });
        entry.mailbox = mailbox;
        state.cursors[usize::from(idx)] = cursor;
        if let Some(library_thread) = &self.library_thread {
            library_thread.add_link(&link);
        }
        Ok(Lease::new(Arc::clone(self), link, registered))
    }

    /// Returns the provider's handle of the peer at `address`, and inserts the address if it is
    /// new. Waits as [`add`](Self::add) does.
    pub(in super::super) fn locate(
        &self,
        link: &Link,
        address: &[u8],
    ) -> Result<sys::FiAddr, NetworkError> {
        let provider = &self.port.traits().provider;
        let failed = |error: CallError| network_error(provider, error.op, &error);
        let Some(library_thread) = &self.library_thread else {
            return self.locate_here(link.id, address).map_err(failed);
        };
        let (id, address) = (link.id, address.to_vec());
        library_thread.call("join", move |device| device.locate_here(id, &address))?.map_err(failed)
    }

    fn locate_here(&self, id: u32, address: &[u8]) -> Result<sys::FiAddr, CallError> {
        let mut state = lock(&self.state);
        let addr = match state.addresses.get_mut(address) {
            Some(known) => {
                known.num_pairs += 1;
                known.addr
            }
            None => {
                let addr = self.port.insert(address)?;
                state.addresses.insert(address.to_vec(), Address { addr, num_pairs: 1 });
                addr
            }
        };
        if let Some(entry) = state.table.get_mut((id & IDX_MASK) as usize) {
            entry.address = Some(address.to_vec());
        }
        Ok(addr)
    }

    /// Closes a pair whose endpoint was dropped. The key of its slot is revoked first.
    ///
    /// With a library thread this only queues the request.
    pub(in super::super) fn close(
        &self,
        link: &Arc<Link>,
        slot: Option<MemoryRegistration>,
        sources: Vec<Source>,
    ) {
        match &self.library_thread {
            Some(library_thread) => {
                let link = Arc::clone(link);
                library_thread.submit(move |device| {
                    let request = CloseRequest { since: Instant::now(), link, slot, sources };
                    lock(&device.state).close_requests.push(request);
                });
            }
            None => self.close_here(link, slot, sources),
        }
    }

    /// Carries out requested closes. A pair is closed once its outbox is empty or `timeout` after
    /// the request. Without a library thread its posts are already with the library by then.
    ///
    /// Returns true if no request is left.
    pub(in super::super) fn close_requested(&self, timeout: Duration) -> bool {
        let is_due = |request: &mut CloseRequest| {
            let link = &request.link;
            link.backlog() == 0
                || link.is_failed()
                || link.is_peer_closed()
                || request.since.elapsed() >= timeout
        };
        loop {
            let mut state = lock(&self.state);
            let Some(due) = state.close_requests.iter_mut().position(is_due) else {
                return state.close_requests.is_empty();
            };
            let CloseRequest { link, slot, sources, .. } = state.close_requests.swap_remove(due);
            drop(state);
            self.close_here(&link, slot, sources);
        }
    }

    fn close_here(&self, link: &Arc<Link>, slot: Option<MemoryRegistration>, sources: Vec<Source>) {
        drop(slot);
        if link.discard() {
            self.num_backlogged.fetch_sub(1, Ordering::AcqRel);
        }
        link.fail("close", 0, "closed by this side".to_owned());
        let mut state = lock(&self.state);
        let idx = (link.id & IDX_MASK) as u16;
        state.remove_cursor(idx);
        if let Some(entry) = state.table.get_mut(usize::from(idx)) {
            let close_state =
                CloseState { since: Instant::now(), is_farewell_sent: false, _sources: sources };
            entry.close_state = Some(close_state);
            state.closing.push(idx);
        }
        state.sweep_closing(&self.port);
    }
}
