//! Commands to the NIC's firmware that the DevX path sends, as bytes.
//!
//! Names and places of the fields are those of `mlx5_ifc.h` (Linux, rdma-core's mlx5 provider). A place
//! is a bit's distance from the first bit of the first byte; a field's most significant bit comes
//! first. Whether a firmware takes these commands is *not yet run on a ConnectX*; `tests/it/control.rs`
//! decodes them with a second transcription of the same tables.

use thiserror::Error;

/// Bytes of most answers, and of commands without a context.
pub const ANSWER_BYTES: usize = 16;
/// Bytes of the answer to [`query_capabilities`].
pub const CAPABILITY_BYTES: usize = 16 + 4096;
/// Bytes of [`create_queue_pair`] and [`create_completion_queue`].
pub const CREATE_BYTES: usize = 272;
/// Bytes of the transitions.
pub const TRANSITION_BYTES: usize = 272;

/// The firmware refused a command.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error("{command} was refused with status {status:#04x} ({}), syndrome {syndrome:#010x}", status_name(*.status))]
pub struct Refused {
    /// Name of the command.
    pub command: &'static str,
    /// Class of the error.
    pub status: u8,
    /// For the vendor.
    pub syndrome: u32,
}

/// Kinds of capabilities.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CapabilityKind {
    /// `cmd_hca_cap`
    General,
    /// `cmd_hca_cap_2`, where there is one
    General2,
    /// `atomic_caps`
    Atomic,
    /// `roce_caps`
    Roce,
}

/// The fields of `cmd_hca_cap` that this crate uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GeneralCapabilities {
    /// Must be 1: completions then have the fields that our poller reads.
    pub cqe_version: u8,
    /// Logarithm of the bytes of a BlueFlame register.
    pub log_bf_reg_bytes: u8,
    /// Logarithm of the most basic blocks of a send queue.
    pub log_max_qp_blocks: u8,
    /// Whether there is `cmd_hca_cap_2`.
    pub has_general_2: bool,
}

/// The fields of `atomic_caps` that this crate uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AtomicCapabilities {
    /// Bit 0 compare-and-swap, 1 fetch-add, 2 masked compare-and-swap, 3 masked fetch-add.
    pub operations: u16,
    /// A set bit is a size in bytes.
    pub sizes_bytes: u16,
}

/// Memory of a completion queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CompletionQueueSpec {
    /// Logarithm of its entries.
    pub log_entries: u8,
    /// Whether entry 0 is overwritten by every completion.
    pub is_collapsed: bool,
    /// Registered memory of the entries.
    pub umem_id: u32,
    /// First byte of the entries in it.
    pub offset: u64,
    /// Registered memory of the doorbell record.
    pub dbrec_umem_id: u32,
    /// First byte of the record in it.
    pub dbrec_offset: u64,
    /// Page of doorbell registers.
    pub uar_page: u32,
    /// Event queue.
    pub eqn: u32,
}

/// Memory of a queue pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QueuePairSpec {
    /// Protection domain.
    pub pdn: u32,
    /// Logarithm of the basic blocks of the send queue.
    pub log_sq_blocks: u8,
    /// Completion queue of requests, and of receives that there are not.
    pub cqn: u32,
    /// Receives, if there are any.
    pub receives: Option<ReceiveSpec>,
    /// Registered memory of both queues.
    pub umem_id: u32,
    /// First byte of the receives in it, which the send queue follows; of the send queue where there are none.
    pub offset: u64,
    /// Registered memory of the doorbell record.
    pub dbrec_umem_id: u32,
    /// First byte of the record in it.
    pub dbrec_offset: u64,
    /// Whether the NIC reads the record for requests. Receives always have one.
    pub has_send_record: bool,
    /// Page of doorbell registers.
    pub uar_page: u32,
    /// User index, returned in completions.
    pub user_index: u32,
}

/// Receives of a queue pair, 16 bytes each.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReceiveSpec {
    /// Logarithm of how many there is room for.
    pub log_depth: u8,
    /// Their completion queue.
    pub cqn: u32,
}

/// The route to the peer's queue pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PathSpec {
    /// `IBV_MTU_*`
    pub mtu: u8,
    /// The peer's queue pair.
    pub remote_qpn: u32,
    /// Number of the peer's first packet, 24 bits.
    pub remote_psn: u32,
    /// Port of this NIC.
    pub port: u8,
    /// Index of this side's address.
    pub gid_idx: u8,
    /// InfiniBand or Ethernet.
    pub link: LinkSpec,
    /// Hops that a packet may take.
    pub hop_limit: u8,
    /// Differentiated services and congestion bits.
    pub traffic_class: u8,
    /// InfiniBand: service level; Ethernet: priority.
    pub service_level: u8,
}

/// The part of the route that differs by link layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LinkSpec {
    /// Within a subnet.
    InfiniBand {
        /// The peer's port.
        lid: u16,
    },
    /// RoCE v2.
    Ethernet {
        /// Next hop.
        mac: [u8; 6],
        /// The peer's address.
        gid: [u8; 16],
        /// Source port of the UDP packets: spreads queue pairs over paths.
        udp_port: u16,
    },
}

/// Limits of retransmission, as in verbs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RetrySpec {
    /// Local acknowledgement timeout, 4.096 µs × 2^n.
    pub ack_timeout: u8,
    /// Retries of an unacknowledged packet, at most 7.
    pub retries: u8,
    /// Retries after receiver-not-ready; 7 is for ever.
    pub rnr_retries: u8,
    /// Logarithm of the most outstanding reads and atomics.
    pub log_max_reads: u8,
}

/// QUERY_HCA_CAP of the values in force.
#[must_use]
pub fn query_capabilities(kind: CapabilityKind) -> [u8; ANSWER_BYTES] {
    let kind: u32 = match kind {
        CapabilityKind::General => 0,
        CapabilityKind::Atomic => 3,
        CapabilityKind::Roce => 4,
        CapabilityKind::General2 => 0x20,
    };
    let mut command = [0; ANSWER_BYTES];
    set(&mut command, 0, 16, 0x100);
    set(&mut command, 0x30, 16, kind << 1 | 1);
    command
}

/// Reads the answer to [`query_capabilities`] of general capabilities.
#[must_use]
pub fn general_capabilities(answer: &[u8; CAPABILITY_BYTES]) -> GeneralCapabilities {
    let narrow = |value: u32| u8::try_from(value).unwrap_or(u8::MAX);
    GeneralCapabilities {
        cqe_version: narrow(get(answer, CAPABILITY_BITS + 0x1fc, 4)),
        log_bf_reg_bytes: narrow(get(answer, CAPABILITY_BITS + 0x26b, 5)),
        log_max_qp_blocks: narrow(get(answer, CAPABILITY_BITS + 0x88, 8)),
        has_general_2: get(answer, CAPABILITY_BITS + 0x20, 1) == 1,
    }
}

/// Reads from the answer to [`query_capabilities`] of [`CapabilityKind::General2`] whether there are queue pairs
/// without a record for requests, `send_dbr_mode_no_dbr_ext`.
///
/// This place, `send_dbr_mode` of the context and [`REGISTER_ALONE_OFFSET`] are those of rdma-core's tests
/// (`tests/mlx5_prm_structs.py`) and of DOCA's open library, not of `mlx5_ifc.h`.
#[must_use]
pub fn can_do_without_record(answer: &[u8; CAPABILITY_BYTES]) -> bool {
    get(answer, CAPABILITY_BITS + 0x2e1, 1) == 1
}

/// Reads the answer to [`query_capabilities`] of atomic capabilities.
#[must_use]
pub fn atomic_capabilities(answer: &[u8; CAPABILITY_BYTES]) -> AtomicCapabilities {
    let narrow = |value: u32| u16::try_from(value).unwrap_or(u16::MAX);
    AtomicCapabilities {
        operations: narrow(get(answer, CAPABILITY_BITS + 0x90, 16)),
        sizes_bytes: narrow(get(answer, CAPABILITY_BITS + 0xb0, 16)),
    }
}

/// CREATE_CQ with 64-byte entries.
#[must_use]
pub fn create_completion_queue(spec: &CompletionQueueSpec) -> [u8; CREATE_BYTES] {
    // cq_context
    const CQC: usize = 0x80;
    let mut command = [0; CREATE_BYTES];
    set(&mut command, 0, 16, 0x400);
    set(&mut command, CQC + 0x06, 1, 1); // dbr_umem_valid
    set(&mut command, CQC + 0x08, 3, 0); // cqe_sz: 64 bytes
    set(&mut command, CQC + 0x0b, 1, u32::from(spec.is_collapsed)); // cc
    // Entries are consumed long after they were written, and never given back one by one.
    set(&mut command, CQC + 0x0e, 1, u32::from(spec.is_collapsed)); // oi
    set(&mut command, CQC + 0x20, 32, spec.dbrec_umem_id);
    set(&mut command, CQC + 0x63, 5, u32::from(spec.log_entries));
    set(&mut command, CQC + 0x68, 24, spec.uar_page);
    set(&mut command, CQC + 0xa0, 32, spec.eqn);
    set64(&mut command, CQC + 0x1c0, spec.dbrec_offset);
    set64(&mut command, 0x280, spec.offset); // cq_umem_offset
    set(&mut command, 0x2c0, 32, spec.umem_id);
    set(&mut command, 0x2e0, 1, 1); // cq_umem_valid
    command
}

/// CREATE_QP: reliable connected. Without receives it has no receive queue.
#[must_use]
pub fn create_queue_pair(spec: &QueuePairSpec) -> [u8; CREATE_BYTES] {
    let mut command = [0; CREATE_BYTES];
    set(&mut command, 0, 16, 0x500);
    set(&mut command, QPC + 0x08, 8, 0); // st: reliable connected
    set(&mut command, QPC + 0x13, 2, PM_MIGRATED);
    set(&mut command, QPC + 0x28, 24, spec.pdn);
    if let Some(receives) = spec.receives {
        set(&mut command, QPC + 0x49, 4, u32::from(receives.log_depth)); // log_rq_size
        set(&mut command, QPC + 0x4d, 3, 0); // log_rq_stride: 16 bytes
    }
    set(&mut command, QPC + 0x51, 4, u32::from(spec.log_sq_blocks));
    set(&mut command, QPC + 0x68, 24, spec.uar_page);
    set(&mut command, QPC + 0x80, 2, u32::from(!spec.has_send_record)); // send_dbr_mode
    set(&mut command, QPC + 0x88, 24, spec.user_index);
    set(&mut command, QPC + 0x3e8, 24, spec.cqn); // cqn_snd
    let cqn_receive = spec.receives.map_or(spec.cqn, |receives| receives.cqn);
    set(&mut command, QPC + 0x4e8, 24, cqn_receive); // cqn_rcv
    set64(&mut command, QPC + 0x500, spec.dbrec_offset);
    // rq_type: of its own, or none
    set(&mut command, QPC + 0x565, 3, if spec.receives.is_some() { 0 } else { 3 });
    set(&mut command, QPC + 0x683, 1, 1); // dbr_umem_valid
    set(&mut command, QPC + 0x720, 32, spec.dbrec_umem_id);
    set64(&mut command, 0x800, spec.offset); // wq_umem_offset
    set(&mut command, 0x840, 32, spec.umem_id);
    set(&mut command, 0x860, 1, 1); // wq_umem_valid
    command
}

/// RST2INIT_QP with all remote rights.
#[must_use]
pub fn to_init(qpn: u32, port: u8) -> [u8; TRANSITION_BYTES] {
    let mut command = transition(0x502, qpn);
    set(&mut command, QPC + 0x13, 2, PM_MIGRATED);
    set(&mut command, QPC + PRIMARY + 0x128, 8, u32::from(port));
    set(&mut command, QPC + 0x48c, 4, 3); // atomic_mode: up to 8 bytes
    set(&mut command, QPC + 0x490, 1, 1); // rre
    set(&mut command, QPC + 0x491, 1, 1); // rwe
    set(&mut command, QPC + 0x492, 1, 1); // rae
    command
}

/// INIT2RTR_QP.
#[must_use]
pub fn to_ready_to_receive(qpn: u32, path: &PathSpec, retry: &RetrySpec) -> [u8; TRANSITION_BYTES] {
    const PATH: usize = QPC + PRIMARY;
    let mut command = transition(0x503, qpn);
    set(&mut command, QPC + 0x40, 3, u32::from(path.mtu));
    set(&mut command, QPC + 0x43, 5, 30); // log_msg_max
    set(&mut command, QPC + 0xa8, 24, path.remote_qpn);
    set(&mut command, QPC + 0x488, 3, u32::from(retry.log_max_reads)); // log_rra_max
    set(&mut command, QPC + 0x4a3, 5, 12); // min_rnr_nak
    set(&mut command, QPC + 0x4a8, 24, path.remote_psn); // next_rcv_psn
    set(&mut command, PATH + 0x128, 8, u32::from(path.port));
    set(&mut command, PATH + 0x48, 8, u32::from(path.gid_idx)); // src_addr_index
    match path.link {
        LinkSpec::InfiniBand { lid } => {
            set(&mut command, PATH + 0x30, 16, u32::from(lid));
            set(&mut command, PATH + 0x124, 4, u32::from(path.service_level));
        }
        LinkSpec::Ethernet { mac, gid, udp_port } => {
            set(&mut command, PATH + 0x58, 8, u32::from(path.hop_limit));
            for (idx, byte) in gid.iter().enumerate() {
                set(&mut command, PATH + 0x80 + idx * 8, 8, u32::from(*byte));
            }
            set(&mut command, PATH + 0x10a, 6, u32::from(path.traffic_class >> 2)); // dscp
            set(&mut command, PATH + 0x108, 2, u32::from(path.traffic_class & 3)); // ecn
            set(&mut command, PATH + 0x110, 16, u32::from(udp_port));
            set(&mut command, PATH + 0x121, 3, u32::from(path.service_level & 7)); // eth_prio
            for (idx, byte) in mac.iter().enumerate() {
                set(&mut command, PATH + 0x130 + idx * 8, 8, u32::from(*byte));
            }
        }
    }
    command
}

/// RTR2RTS_QP. The first packet has the number `psn`, of 24 bits.
#[must_use]
pub fn to_ready_to_send(qpn: u32, retry: &RetrySpec, psn: u32) -> [u8; TRANSITION_BYTES] {
    let mut command = transition(0x504, qpn);
    set(&mut command, QPC + PRIMARY + 0x40, 5, u32::from(retry.ack_timeout));
    set(&mut command, QPC + 0x388, 3, u32::from(retry.log_max_reads)); // log_sra_max
    set(&mut command, QPC + 0x38d, 3, u32::from(retry.retries));
    set(&mut command, QPC + 0x390, 3, u32::from(retry.rnr_retries));
    set(&mut command, QPC + 0x3c8, 24, psn); // next_send_psn
    command
}

/// 2RST_QP, from any state.
#[must_use]
pub fn to_reset(qpn: u32) -> [u8; ANSWER_BYTES] {
    let mut command = [0; ANSWER_BYTES];
    set(&mut command, 0, 16, 0x50a);
    set(&mut command, 0x48, 24, qpn);
    command
}

/// Number of a queue that CREATE_CQ or CREATE_QP made.
#[must_use]
pub fn created_number(answer: &[u8; ANSWER_BYTES]) -> u32 {
    get(answer, 0x48, 24)
}

/// Whether the firmware did it.
///
/// # Errors
/// [`Refused`].
pub fn check(command: &'static str, answer: &[u8]) -> Result<(), Refused> {
    match answer.first() {
        Some(0) => Ok(()),
        status => {
            let syndrome = if answer.len() >= 8 { get(answer, 0x20, 32) } else { 0 };
            Err(Refused { command, status: status.copied().unwrap_or(u8::MAX), syndrome })
        }
    }
}

fn transition(opcode: u32, qpn: u32) -> [u8; TRANSITION_BYTES] {
    let mut command = [0; TRANSITION_BYTES];
    set(&mut command, 0, 16, opcode);
    set(&mut command, 0x48, 24, qpn);
    command
}

/// Sets a field of at most 32 bits.
fn set(bytes: &mut [u8], bit: usize, width: usize, value: u32) {
    debug_assert!(width <= 32 && (width == 32 || value >> width == 0));
    for idx in 0..width {
        let is_set = value >> (width - 1 - idx) & 1 == 1;
        let at = bit + idx;
        let mask = 0x80 >> (at % 8);
        if is_set {
            bytes[at / 8] |= mask;
        } else {
            bytes[at / 8] &= !mask;
        }
    }
}

fn set64(bytes: &mut [u8], bit: usize, value: u64) {
    bytes[bit / 8..bit / 8 + 8].copy_from_slice(&value.to_be_bytes());
}

fn get(bytes: &[u8], bit: usize, width: usize) -> u32 {
    (bit..bit + width)
        .fold(0, |value, at| value << 1 | u32::from(bytes[at / 8] >> (7 - at % 8) & 1))
}

const fn status_name(status: u8) -> &'static str {
    match status {
        0x01 => "internal error",
        0x02 => "unknown command: the firmware is too old",
        0x03 => "bad parameter",
        0x04 => "bad state of the system",
        0x05 => "bad resource",
        0x06 => "resource busy",
        0x08 => "limit exceeded",
        0x09 => "bad state of the resource",
        0x0a => "bad index",
        0x0f => "no resources left",
        0x10 => "bad state of the queue pair",
        0x50 => "bad length of the command",
        0x51 => "bad length of the answer",
        _ => "unknown status",
    }
}

/// Offset of the doorbell in its page of registers, for queue pairs without a record for requests.
pub const REGISTER_ALONE_OFFSET: usize = 0x600;
/// First bit of the capabilities in their answer.
const CAPABILITY_BITS: usize = 0x80;
/// First bit of the queue pair's context in its commands.
const QPC: usize = 0xc0;
/// First bit of `primary_address_path` in the context.
const PRIMARY: usize = 0xc0;
/// `pm_state`: the path is the first one.
const PM_MIGRATED: u32 = 3;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_stand_where_they_are_put() {
        let mut bytes = [0xff; 12];
        set(&mut bytes, 12, 3, 0b010);
        assert_eq!(bytes[1], 0b1111_0101);
        assert_eq!(get(&bytes, 12, 3), 0b010);
        set(&mut bytes, 24, 32, 0x1234_5678);
        assert_eq!(bytes[3..7], [0x12, 0x34, 0x56, 0x78]);
        set(&mut bytes, 59, 5, 0);
        assert_eq!((bytes[7], bytes[8]), (0b1110_0000, 0xff));
    }

    #[test]
    fn a_refusal_says_what_and_why() {
        let mut answer = [0; ANSWER_BYTES];
        assert_eq!(check("CREATE_QP", &answer), Ok(()));
        answer[0] = 3;
        answer[4..8].copy_from_slice(&[0x00, 0x45, 0x9b, 0x7a]);
        let refused = check("CREATE_QP", &answer).unwrap_err().to_string();
        assert!(refused.contains("CREATE_QP was refused with status 0x03 (bad parameter)"));
        assert!(refused.contains("0x00459b7a"), "{refused}");
        assert!(check("CREATE_QP", &[]).is_err());
    }
}
