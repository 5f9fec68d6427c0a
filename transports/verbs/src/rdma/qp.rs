//! Reliable-connected queue pairs: creation, joining, posting and shutdown.

use std::mem::MaybeUninit;
use std::ptr::{NonNull, null_mut};
use std::sync::Arc;

use super::config::VerbsConfig;
use super::detail::{QueuePairAddress, Signals};
use super::owner::{
    CallError, CompletionQueue, ProtectionDomain, check, raw_domain, raw_queue, report,
};
use super::port::Port;
use super::sys;

/// Capacity of a queue pair.
#[derive(Debug, Clone, Copy)]
pub(super) struct Capacity {
    pub(super) sends: u32,
    pub(super) receives: u32,
    pub(super) inline_bytes: u32,
    /// How flags travel.
    pub(super) signals: Signals,
}

impl Capacity {
    /// Number of requests that the driver posts by itself: one answer at a time.
    pub(super) const fn answers(&self) -> u32 {
        match self.signals {
            Signals::Atomics => 0,
            Signals::Messages => 1,
        }
    }

    /// Maximum number of completions at the same time. After a failure every request makes one.
    pub(super) const fn num_completions(&self) -> u32 {
        self.sends + self.answers() + self.receives
    }
}

/// A queue pair, destroyed when dropped.
#[derive(Debug)]
pub(super) struct QueuePair {
    raw: NonNull<sys::ibv_qp>,
    capacity: Capacity,
    port: u8,
    domain: Arc<ProtectionDomain>,
    queue: Arc<CompletionQueue>,
}

// SAFETY: a queue pair has no thread affinity.
unsafe impl Send for QueuePair {}
// SAFETY: providers lock inside of posting and changing; the capacity never changes.
unsafe impl Sync for QueuePair {}

impl QueuePair {
    /// Creates a queue pair in its reset state. It may hold more requests than requested, and fewer inline bytes.
    pub(super) fn new(
        domain: &Arc<ProtectionDomain>,
        queue: &Arc<CompletionQueue>,
        port: &Port,
        wanted: Capacity,
    ) -> Result<Self, CallError> {
        let mut inline_bytes = wanted.inline_bytes;
        loop {
            // SAFETY: plain integers and pointers, for which zero is valid.
            let mut attr: sys::ibv_qp_init_attr = unsafe { MaybeUninit::zeroed().assume_init() };
            attr.send_cq = raw_queue(queue);
            attr.recv_cq = raw_queue(queue);
            attr.qp_type = sys::ibv_qp_type::IBV_QPT_RC;
            attr.cap.max_send_wr = wanted.sends + wanted.answers();
            attr.cap.max_recv_wr = wanted.receives;
            attr.cap.max_send_sge = 1;
            attr.cap.max_recv_sge = 1;
            attr.cap.max_inline_data = inline_bytes;
            // SAFETY: domain and queue live and belong to one context; `attr` is valid.
            let raw = unsafe { sys::ibv_create_qp(raw_domain(domain), &raw mut attr) };
            let Some(raw) = NonNull::new(raw) else {
                let error = CallError { call: "ibv_create_qp", code: sys::errno() };
                // Devices differ in their inline limits, and no query returns the limit.
                if error.code == libc::EINVAL && inline_bytes > 0 {
                    inline_bytes /= 2;
                    continue;
                }
                return Err(error);
            };
            let capacity = Capacity { inline_bytes: attr.cap.max_inline_data, ..wanted };
            return Ok(Self {
                raw,
                capacity,
                port: port.number,
                domain: Arc::clone(domain),
                queue: Arc::clone(queue),
            });
        }
    }

    pub(super) const fn capacity(&self) -> Capacity {
        self.capacity
    }

    pub(super) const fn number(&self) -> u32 {
        // SAFETY: the queue pair lives and its number does not change.
        unsafe { self.raw.as_ref().qp_num }
    }

    /// True if its completions go to `queue`.
    pub(super) fn reports_to(&self, queue: &Arc<CompletionQueue>) -> bool {
        Arc::ptr_eq(&self.queue, queue)
    }

    /// Name of the device.
    pub(super) fn device(&self) -> &str {
        self.domain.context().name()
    }

    /// Number of the port.
    pub(super) const fn port(&self) -> u8 {
        self.port
    }

    /// Prepares the queue pair for receives and for the peer's address. The peer may then read and write memory
    /// that it holds keys for. It may also add, if the device supports it and flags travel as atomics.
    pub(super) fn initialise(&self, port: &Port, config: &VerbsConfig) -> Result<(), CallError> {
        type Mask = sys::ibv_qp_attr_mask;
        let mut attr = zeroed_attr();
        attr.qp_state = sys::ibv_qp_state::IBV_QPS_INIT;
        attr.port_num = port.number;
        attr.pkey_index = config.pkey_index;
        attr.qp_access_flags = (sys::ibv_access_flags::IBV_ACCESS_REMOTE_WRITE
            | sys::ibv_access_flags::IBV_ACCESS_REMOTE_READ)
            .0;
        if self.capacity.signals == Signals::Atomics && port.context.has_atomics() {
            attr.qp_access_flags |= sys::ibv_access_flags::IBV_ACCESS_REMOTE_ATOMIC.0;
        }
        let mask = Mask::IBV_QP_STATE
            | Mask::IBV_QP_PKEY_INDEX
            | Mask::IBV_QP_PORT
            | Mask::IBV_QP_ACCESS_FLAGS;
        self.modify("ibv_modify_qp to INIT", &mut attr, mask)
    }

    /// Joins with the peer's queue pair. Afterwards both directions work.
    pub(super) fn join(
        &self,
        port: &Port,
        config: &VerbsConfig,
        own: &QueuePairAddress,
        peer: &QueuePairAddress,
    ) -> Result<(), CallError> {
        type Mask = sys::ibv_qp_attr_mask;
        let is_global = port.needs_global_route(own, peer);
        let (mut attr, mask) = ready_to_receive(port.number, is_global, config, own, peer);
        self.modify("ibv_modify_qp to RTR", &mut attr, mask)?;

        let mut attr = zeroed_attr();
        attr.qp_state = sys::ibv_qp_state::IBV_QPS_RTS;
        attr.timeout = config.ack_timeout;
        attr.retry_cnt = config.retry_count;
        attr.rnr_retry = RECEIVER_NOT_READY_RETRIES;
        attr.sq_psn = own.first_packet;
        attr.max_rd_atomic = port.num_requests.min(peer.num_responses);
        let mask = Mask::IBV_QP_STATE
            | Mask::IBV_QP_TIMEOUT
            | Mask::IBV_QP_RETRY_CNT
            | Mask::IBV_QP_RNR_RETRY
            | Mask::IBV_QP_SQ_PSN
            | Mask::IBV_QP_MAX_QP_RD_ATOMIC;
        self.modify("ibv_modify_qp to RTS", &mut attr, mask)
    }

    /// Stops the queue pair: operations under way complete as flushed, and no request of the peer is accepted.
    pub(super) fn stop(&self) -> Result<(), CallError> {
        let mut attr = zeroed_attr();
        attr.qp_state = sys::ibv_qp_state::IBV_QPS_ERR;
        self.modify("ibv_modify_qp to ERR", &mut attr, sys::ibv_qp_attr_mask::IBV_QP_STATE)
    }

    fn modify(
        &self,
        call: &'static str,
        attr: &mut sys::ibv_qp_attr,
        mask: sys::ibv_qp_attr_mask,
    ) -> Result<(), CallError> {
        // SAFETY: the queue pair lives, `attr` is valid, and the mask names what was filled in.
        let code = unsafe { sys::ibv_modify_qp(self.raw.as_ptr(), attr, mask.0.cast_signed()) };
        check(call, code)
    }

    /// Posts a receive. Without memory it takes one wake-up, or the number that comes with a counted write.
    ///
    /// # Safety
    /// The buffer stays registered until the receive completes. Until then no code reads or writes it.
    #[inline]
    pub(super) unsafe fn post_receive(
        &self,
        id: u64,
        into: Option<Buffer>,
    ) -> Result<(), CallError> {
        let (num_sge, Buffer { address, key, bytes }) = match into {
            Some(buffer) => (1, buffer),
            None => (0, Buffer { address: 0, key: 0, bytes: 0 }),
        };
        let mut local = sys::ibv_sge { addr: address, length: bytes, lkey: key };
        let mut request =
            sys::ibv_recv_wr { wr_id: id, next: null_mut(), sg_list: &raw mut local, num_sge };
        let mut refused = null_mut();
        // SAFETY: the queue pair lives. Request and element are read during the call only. The caller guarantees
        // the rest.
        let code =
            unsafe { sys::ibv_post_recv(self.raw.as_ptr(), &raw mut request, &raw mut refused) };
        check("ibv_post_recv", code)
    }

    /// Posts one request.
    ///
    /// # Safety
    /// Memory that `work` names stays registered until the request completes. Until then a source is not written
    /// (unless inline), and a target is neither read nor written.
    #[inline]
    pub(super) unsafe fn post(&self, work: &Work) -> Result<(), CallError> {
        // SAFETY: the caller's promise.
        unsafe { self.post_chain(std::slice::from_ref(work)) }.map_err(|refusal| refusal.error)
    }

    /// Posts up to [`MAX_CHAIN`] requests by one call, in order. If one is refused, earlier requests are posted,
    /// but the refused and later ones are not.
    ///
    /// # Safety
    /// As for [`post`](Self::post), for each.
    pub(super) unsafe fn post_chain(&self, works: &[Work]) -> Result<(), Refusal> {
        assert!(works.len() <= MAX_CHAIN, "{} requests by one call", works.len());
        let mut locals = [const { MaybeUninit::uninit() }; MAX_CHAIN];
        let mut requests: [MaybeUninit<sys::ibv_send_wr>; MAX_CHAIN] =
            [const { MaybeUninit::uninit() }; MAX_CHAIN];
        let mut next = null_mut();
        // Reverse order, because each request points to the next one.
        for ((work, local), request) in works.iter().zip(&mut locals).zip(&mut requests).rev() {
            let local = local.write(sys::ibv_sge {
                addr: work.local_address,
                length: work.bytes,
                lkey: work.local_key,
            });
            next = &raw mut *request.write(work.request(local, next));
        }
        let (first, mut refused) = (next, null_mut());
        if first.is_null() {
            return Ok(());
        }
        // SAFETY: the queue pair lives. Requests and elements are read during the call only. The caller guarantees
        // the rest.
        let code = unsafe { sys::ibv_post_send(self.raw.as_ptr(), first, &raw mut refused) };
        check("ibv_post_send", code).map_err(|error| {
            let distance = refused.addr().wrapping_sub(first.addr());
            let nth = distance / size_of::<sys::ibv_send_wr>();
            Refusal { error, nth: if nth < works.len() { nth } else { 0 } }
        })
    }
}

impl Drop for QueuePair {
    fn drop(&mut self) {
        // SAFETY: created, destroyed once. The device accesses no memory for it afterwards.
        report("ibv_destroy_qp", unsafe { sys::ibv_destroy_qp(self.raw.as_ptr()) });
    }
}

/// A call did not accept all requests.
#[derive(Debug)]
pub(super) struct Refusal {
    pub(super) error: CallError,
    /// Index of the first request that was not accepted.
    pub(super) nth: usize,
}

/// One request.
#[derive(Debug, Clone, Copy)]
pub(super) struct Work {
    pub(super) id: u64,
    pub(super) verb: Verb,
    pub(super) flags: u32,
    pub(super) local_address: u64,
    pub(super) local_key: u32,
    pub(super) bytes: u32,
    pub(super) remote_address: u64,
    pub(super) remote_key: u32,
}

impl Work {
    /// Fills in the device's form of the request, linked to `next`.
    fn request(&self, local: &mut sys::ibv_sge, next: *mut sys::ibv_send_wr) -> sys::ibv_send_wr {
        // SAFETY: plain integers and pointers, for which zero is valid.
        let mut request: sys::ibv_send_wr = unsafe { MaybeUninit::zeroed().assume_init() };
        request.wr_id = self.id;
        request.next = next;
        if self.bytes > 0 {
            request.sg_list = local;
            request.num_sge = 1;
        }
        request.send_flags = self.flags;
        let (remote_addr, rkey) = (self.remote_address, self.remote_key);
        match self.verb {
            Verb::Write => {
                request.opcode = sys::ibv_wr_opcode::IBV_WR_RDMA_WRITE;
                request.wr.rdma = sys::rdma_t { remote_addr, rkey };
            }
            Verb::Read => {
                request.opcode = sys::ibv_wr_opcode::IBV_WR_RDMA_READ;
                request.wr.rdma = sys::rdma_t { remote_addr, rkey };
            }
            Verb::WriteWithImmediate(data) => {
                request.opcode = sys::ibv_wr_opcode::IBV_WR_RDMA_WRITE_WITH_IMM;
                request.imm_data_invalidated_rkey_union.imm_data = data.to_be();
                request.wr.rdma = sys::rdma_t { remote_addr, rkey };
            }
            Verb::Send => request.opcode = sys::ibv_wr_opcode::IBV_WR_SEND,
            Verb::FetchAdd(compare_add) => {
                request.opcode = sys::ibv_wr_opcode::IBV_WR_ATOMIC_FETCH_AND_ADD;
                request.wr.atomic = sys::atomic_t { remote_addr, compare_add, swap: 0, rkey };
            }
        }
        request
    }

    /// Sends the contents of `buffer`, and signals completion.
    pub(super) const fn message(id: u64, buffer: Buffer, capacity: Capacity) -> Self {
        let Buffer { address, key, bytes } = buffer;
        let inline = if bytes <= capacity.inline_bytes { INLINE } else { 0 };
        Self {
            id,
            verb: Verb::Send,
            flags: SIGNALLED | inline,
            local_address: address,
            local_key: key,
            bytes,
            remote_address: 0,
            remote_key: 0,
        }
    }
}

/// Local memory of a request.
#[derive(Debug, Clone, Copy)]
pub(super) struct Buffer {
    pub(super) address: u64,
    pub(super) key: u32,
    pub(super) bytes: u32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Verb {
    Write,
    Read,
    WriteWithImmediate(u32),
    Send,
    FetchAdd(u64),
}

pub(super) const SIGNALLED: u32 = sys::ibv_send_flags::IBV_SEND_SIGNALED.0;
pub(super) const INLINE: u32 = sys::ibv_send_flags::IBV_SEND_INLINE.0;
pub(super) const FENCE: u32 = sys::ibv_send_flags::IBV_SEND_FENCE.0;

/// Attributes that describe the peer and the route to a queue pair of `port`. Packets carry the service level.
/// Packets with a global header also carry the traffic class.
fn ready_to_receive(
    port: u8,
    is_global: bool,
    config: &VerbsConfig,
    own: &QueuePairAddress,
    peer: &QueuePairAddress,
) -> (sys::ibv_qp_attr, sys::ibv_qp_attr_mask) {
    type Mask = sys::ibv_qp_attr_mask;
    let mut attr = zeroed_attr();
    attr.qp_state = sys::ibv_qp_state::IBV_QPS_RTR;
    attr.path_mtu = u32::from(own.mtu.min(peer.mtu));
    attr.dest_qp_num = peer.number;
    attr.rq_psn = peer.first_packet;
    attr.max_dest_rd_atomic = own.num_responses;
    attr.min_rnr_timer = RECEIVER_NOT_READY_TIMER;
    attr.ah_attr.port_num = port;
    attr.ah_attr.sl = config.service_level;
    attr.ah_attr.dlid = peer.lid;
    if is_global {
        attr.ah_attr.is_global = 1;
        attr.ah_attr.grh.dgid.raw = peer.gid;
        attr.ah_attr.grh.sgid_index = own.gid_index;
        attr.ah_attr.grh.hop_limit = 64;
        attr.ah_attr.grh.traffic_class = config.traffic_class;
    }
    let mask = Mask::IBV_QP_STATE
        | Mask::IBV_QP_AV
        | Mask::IBV_QP_PATH_MTU
        | Mask::IBV_QP_DEST_QPN
        | Mask::IBV_QP_RQ_PSN
        | Mask::IBV_QP_MAX_DEST_RD_ATOMIC
        | Mask::IBV_QP_MIN_RNR_TIMER;
    (attr, mask)
}

fn zeroed_attr() -> sys::ibv_qp_attr {
    // SAFETY: plain integers, for which zero is valid.
    unsafe { MaybeUninit::zeroed().assume_init() }
}

/// Maximum number of requests per call.
pub(super) const MAX_CHAIN: usize = 32;
/// 10 ms between retries when the peer has no receive for a wake-up.
const RECEIVER_NOT_READY_TIMER: u8 = 20;
/// Number of such retries. Seven would mean unlimited.
const RECEIVER_NOT_READY_RETRIES: u8 = 6;

#[cfg(test)]
mod tests {
    use super::*;

    fn queue_pair(first: u8) -> QueuePairAddress {
        QueuePairAddress {
            number: 0x100 + u32::from(first),
            first_packet: 0x200 + u32::from(first),
            remote_key: 0,
            lid: 0x300 + u16::from(first),
            mtu: 5 - first,
            num_responses: 16 + first,
            gid: [first; 16],
            receives: 0,
            gid_index: 4 + first,
        }
    }

    #[test]
    fn packets_take_the_settings_traffic_class_and_service_level() {
        let config = VerbsConfig { traffic_class: 106, service_level: 3, ..Default::default() };
        let (own, peer) = (queue_pair(1), queue_pair(2));
        let (attr, mask) = ready_to_receive(7, true, &config, &own, &peer);
        // Without this bit the device ignores the route to the peer.
        assert_ne!(mask.0 & sys::ibv_qp_attr_mask::IBV_QP_AV.0, 0);
        let way = &attr.ah_attr;
        assert_eq!((way.sl, way.port_num, way.dlid, way.is_global), (3, 7, peer.lid, 1));
        let global = &way.grh;
        assert_eq!((global.traffic_class, global.sgid_index), (106, own.gid_index));
        // SAFETY: all bytes of the union are initialised, and any are a valid address.
        assert_eq!(unsafe { global.dgid.raw }, peer.gid);
        assert_eq!((attr.dest_qp_num, attr.rq_psn), (peer.number, peer.first_packet));
        assert_eq!((attr.path_mtu, attr.max_dest_rd_atomic), (3, own.num_responses));
        // Within an InfiniBand subnet packets have no global header, so only the service level applies.
        let (attr, _) = ready_to_receive(7, false, &config, &own, &peer);
        let way = &attr.ah_attr;
        assert_eq!((way.sl, way.is_global, way.grh.traffic_class), (3, 0, 0));
    }
}
