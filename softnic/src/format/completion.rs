//! Completions, and how requests end.

use super::{CQE_BYTES, be32};

/// A completion.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cqe {
    /// Success, or why not.
    pub status: Result<CqeKind, Syndrome>,
    /// Queue pair.
    pub qpn: u32,
    /// Code of the request; 0 in a receive completion.
    pub opcode: u8,
    /// Index of the request's first block, or of the receive.
    pub counter: u16,
    /// Bytes moved.
    pub num_bytes: u32,
    /// Whether it is of a receive, and not of a request.
    pub is_receive: bool,
}

/// Kinds of successful completions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CqeKind {
    /// Completion of a posted request.
    Request,
    /// Completion of a receive that a peer's write with this immediate data used.
    WriteImm(u32),
}

impl Cqe {
    /// Its bytes, with the given owner bit.
    #[must_use]
    pub fn encode(&self, owner: bool) -> [u8; CQE_BYTES] {
        let mut bytes = [0; CQE_BYTES];
        let code = match self.status {
            Ok(CqeKind::Request) => 0x0,
            Ok(CqeKind::WriteImm(imm)) => {
                bytes[36..40].copy_from_slice(&imm.to_be_bytes());
                0x1
            }
            Err(syndrome) => {
                bytes[55] = syndrome as u8;
                if self.is_receive { 0xe } else { 0xd }
            }
        };
        if self.status.is_ok() {
            bytes[44..48].copy_from_slice(&self.num_bytes.to_be_bytes());
        }
        let opcode_qpn = u32::from(self.opcode) << 24 | self.qpn;
        bytes[56..60].copy_from_slice(&opcode_qpn.to_be_bytes());
        bytes[60..62].copy_from_slice(&self.counter.to_be_bytes());
        bytes[63] = code << 4 | u8::from(owner);
        bytes
    }

    /// The completion in `bytes`, and its owner bit. `None` if there is none, or of an unknown kind.
    #[must_use]
    pub fn decode(bytes: &[u8; CQE_BYTES]) -> Option<(Self, bool)> {
        let status = match bytes[63] >> 4 {
            0x0 => Ok(CqeKind::Request),
            0x1 => Ok(CqeKind::WriteImm(be32(&bytes[36..40]))),
            0xd | 0xe => Err(Syndrome::from_code(bytes[55])?),
            _ => return None,
        };
        let opcode_qpn = be32(&bytes[56..60]);
        let cqe = Self {
            status,
            qpn: opcode_qpn & 0xff_ffff,
            opcode: (opcode_qpn >> 24) as u8,
            counter: u16::from_be_bytes([bytes[60], bytes[61]]),
            num_bytes: if status.is_ok() { be32(&bytes[44..48]) } else { 0 },
            is_receive: matches!(bytes[63] >> 4, 0x1 | 0xe),
        };
        Some((cqe, bytes[63] & 1 != 0))
    }
}

/// How a request ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
#[non_exhaustive]
pub enum Syndrome {
    /// A length beyond the limit of the queue or the peer.
    LocalLength = 0x01,
    /// The request makes no sense to the NIC.
    LocalQpOp = 0x02,
    /// A local key, range or permission.
    LocalProtection = 0x04,
    /// Not executed: the queue had failed before.
    Flushed = 0x05,
    /// A memory window.
    MemoryWindowBind = 0x06,
    /// The peer's answer makes no sense.
    BadResponse = 0x10,
    /// Local memory could not be written.
    LocalAccess = 0x11,
    /// The peer's NIC does not take such a request.
    RemoteInvalid = 0x12,
    /// A remote key, range or permission.
    RemoteAccess = 0x13,
    /// The peer's NIC could not do it.
    RemoteOp = 0x14,
    /// The peer does not answer.
    RetryExceeded = 0x15,
    /// The peer has posted no receive.
    RnrExceeded = 0x16,
    /// The peer gave up.
    RemoteAborted = 0x22,
}

impl Syndrome {
    /// All of them.
    pub const ALL: [Self; 13] = [
        Self::LocalLength,
        Self::LocalQpOp,
        Self::LocalProtection,
        Self::Flushed,
        Self::MemoryWindowBind,
        Self::BadResponse,
        Self::LocalAccess,
        Self::RemoteInvalid,
        Self::RemoteAccess,
        Self::RemoteOp,
        Self::RetryExceeded,
        Self::RnrExceeded,
        Self::RemoteAborted,
    ];

    /// The syndrome with this code.
    #[must_use]
    pub fn from_code(code: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|syndrome| *syndrome as u8 == code)
    }
}
