//! Bytes on a data connection. Little-endian; specified in `docs/reference/wire-format.md`, "TCP fabric".

use std::net::{IpAddr, Ipv6Addr, SocketAddr};

/// The address for a peer to connect to, and the nonce that proves its identity.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Detail {
    pub(super) address: SocketAddr,
    pub(super) nonce: [u8; 16],
}

/// The request for one operation. The payload of a write follows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Request {
    pub(super) is_write: bool,
    pub(super) key: u64,
    pub(super) offset: u64,
    pub(super) bytes: u64,
}

/// The verdict on an operation, or one frame of a read before it. Answers come in the order of requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Response {
    pub(super) is_data: bool,
    /// 0, or the code of the refusal.
    pub(super) status: u8,
    /// Whether this is the verdict, which ends the operation and carries nothing.
    pub(super) is_last: bool,
    /// Bytes of payload that follow.
    pub(super) bytes: u64,
}

impl Detail {
    pub(super) fn encode(&self) -> Vec<u8> {
        let ip = match self.address.ip() {
            IpAddr::V4(ip) => ip.to_ipv6_mapped(),
            IpAddr::V6(ip) => ip,
        };
        let mut out = Vec::with_capacity(DETAIL_BYTES);
        out.extend(VERSION.to_le_bytes());
        out.extend(self.address.port().to_le_bytes());
        out.extend(ip.octets());
        out.extend(self.nonce);
        out
    }

    pub(super) fn decode(bytes: &[u8]) -> Result<Self, String> {
        let found: &[u8; DETAIL_BYTES] = bytes.try_into().map_err(|_| {
            format!("the peer describes itself in {} bytes, expected {DETAIL_BYTES}", bytes.len())
        })?;
        let version = u16::from_le_bytes([found[0], found[1]]);
        if version != VERSION {
            return Err(format!("the peer speaks version {version}, this side version {VERSION}"));
        }
        let port = u16::from_le_bytes([found[2], found[3]]);
        let mut ip = [0; 16];
        ip.copy_from_slice(&found[4..20]);
        let ip = Ipv6Addr::from(ip).to_canonical();
        if port == 0 || ip.is_unspecified() || ip.is_multicast() {
            return Err(format!("the peer's address {ip} port {port} cannot be connected to"));
        }
        let mut nonce = [0; 16];
        nonce.copy_from_slice(&found[20..]);
        Ok(Self { address: SocketAddr::new(ip, port), nonce })
    }
}

impl Request {
    pub(super) fn encode(&self) -> [u8; REQUEST_BYTES] {
        let mut out = [0; REQUEST_BYTES];
        out[0] = if self.is_write { WRITE } else { READ };
        out[8..16].copy_from_slice(&self.key.to_le_bytes());
        out[16..24].copy_from_slice(&self.offset.to_le_bytes());
        out[24..].copy_from_slice(&self.bytes.to_le_bytes());
        out
    }

    pub(super) fn decode(bytes: &[u8; REQUEST_BYTES]) -> Option<Self> {
        let is_write = match bytes[0] {
            WRITE => true,
            READ => false,
            _ => return None,
        };
        let request =
            Self { is_write, key: word(bytes, 8), offset: word(bytes, 16), bytes: word(bytes, 24) };
        let is_sound = bytes[1..8] == [0; 7] && request.bytes <= super::MAX_OPERATION_BYTES;
        is_sound.then_some(request)
    }
}

impl Response {
    pub(super) fn encode(&self) -> [u8; RESPONSE_BYTES] {
        let mut out = [0; RESPONSE_BYTES];
        out[0] = if self.is_data { DATA } else { ACK };
        out[1] = self.status;
        out[2] = self.is_last.into();
        out[8..].copy_from_slice(&self.bytes.to_le_bytes());
        out
    }

    pub(super) fn decode(bytes: &[u8; RESPONSE_BYTES]) -> Option<Self> {
        let is_data = match bytes[0] {
            DATA => true,
            ACK => false,
            _ => return None,
        };
        let response =
            Self { is_data, status: bytes[1], is_last: bytes[2] == 1, bytes: word(bytes, 8) };
        let is_frame = is_data && response.status == 0 && !response.is_last;
        let is_verdict = response.is_last && response.bytes == 0;
        let is_sound = bytes[2] <= 1 && bytes[3..8] == [0; 5] && (is_frame || is_verdict);
        is_sound.then_some(response)
    }
}

/// First bytes of a data connection.
pub(super) fn encode_hello(nonce: [u8; 16]) -> [u8; HELLO_BYTES] {
    let mut out = [0; HELLO_BYTES];
    out[..8].copy_from_slice(&MAGIC);
    out[8..10].copy_from_slice(&VERSION.to_le_bytes());
    out[16..].copy_from_slice(&nonce);
    out
}

/// The nonce of a hello. `None`: not a hello of this version.
pub(super) fn decode_hello(bytes: &[u8; HELLO_BYTES]) -> Option<[u8; 16]> {
    let version = u16::from_le_bytes([bytes[8], bytes[9]]);
    if bytes[..8] != MAGIC || version != VERSION || bytes[10..16] != [0; 6] {
        return None;
    }
    bytes[16..].try_into().ok()
}

fn word(bytes: &[u8], at: usize) -> u64 {
    let mut word = [0; 8];
    word.copy_from_slice(&bytes[at..at + 8]);
    u64::from_le_bytes(word)
}

/// Descriptions with addresses of both families.
#[cfg(fuzzing)]
pub(in crate::fabric) fn detail_samples() -> Vec<Vec<u8>> {
    let detail = |ip: IpAddr| Detail { address: SocketAddr::new(ip, 80), nonce: [9; 16] }.encode();
    vec![detail([10, 0, 0, 1].into()), detail(Ipv6Addr::LOCALHOST.into())]
}

/// Decodes bytes of a peer. A decoded detail must stay the same when it is encoded and decoded again.
#[cfg(fuzzing)]
pub(in crate::fabric) fn check_detail(bytes: &[u8]) {
    if let Ok(detail) = Detail::decode(bytes) {
        assert_eq!(Detail::decode(&detail.encode()), Ok(detail));
    }
}

/// One message of each kind.
#[cfg(fuzzing)]
pub(in crate::fabric) fn samples() -> Vec<Vec<u8>> {
    let request = |is_write| Request { is_write, key: 1, offset: 2, bytes: 3 }.encode().to_vec();
    let data = Response { is_data: true, status: 0, is_last: false, bytes: 4 };
    let verdict = Response { is_data: false, status: 5, is_last: true, bytes: 0 };
    let hello = encode_hello([6; 16]).to_vec();
    let responses = [data, verdict].map(|response| response.encode().to_vec());
    [vec![request(false), request(true), hello], responses.to_vec()].concat()
}

/// Decodes bytes of a peer. A decoded message must stay the same when it is encoded again.
#[cfg(fuzzing)]
pub(in crate::fabric) fn check(bytes: &[u8]) {
    if let Some(bytes) = bytes.first_chunk()
        && let Some(request) = Request::decode(bytes)
    {
        assert!(request.bytes <= super::MAX_OPERATION_BYTES);
        assert_eq!(request.encode(), *bytes);
    }
    if let Some(bytes) = bytes.first_chunk()
        && let Some(response) = Response::decode(bytes)
    {
        assert!(!response.is_last || response.bytes == 0);
        assert_eq!(response.encode(), *bytes);
    }
    if let Some(bytes) = bytes.first_chunk()
        && let Some(nonce) = decode_hello(bytes)
    {
        assert_eq!(encode_hello(nonce), *bytes);
    }
}

const MAGIC: [u8; 8] = *b"SYTCPFAB";
const VERSION: u16 = 1;
const DETAIL_BYTES: usize = 36;
/// Bytes of a hello.
pub(super) const HELLO_BYTES: usize = 32;
/// Bytes of a [`Request`].
pub(super) const REQUEST_BYTES: usize = 32;
/// Bytes of a [`Response`].
pub(super) const RESPONSE_BYTES: usize = 16;
const WRITE: u8 = 1;
const READ: u8 = 2;
const ACK: u8 = 1;
const DATA: u8 = 2;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn encoded_values_are_decoded_unchanged() {
        for address in ["10.1.2.3:4567", "[fe80::1]:9"] {
            let detail = Detail { address: address.parse().unwrap(), nonce: [7; 16] };
            assert_eq!(Detail::decode(&detail.encode()), Ok(detail));
        }
        let request = Request { is_write: true, key: u64::MAX - 3, offset: 1 << 33, bytes: 77 };
        assert_eq!(Request::decode(&request.encode()), Some(request));
        for (is_data, status, is_last, bytes) in [(true, 0, false, 9), (false, 2, true, 0)] {
            let response = Response { is_data, status, is_last, bytes };
            assert_eq!(Response::decode(&response.encode()), Some(response));
        }
        assert_eq!(decode_hello(&encode_hello([3; 16])), Some([3; 16]));
    }

    #[test]
    fn malformed_bytes_are_refused() {
        let detail = Detail { address: "10.1.2.3:4567".parse().unwrap(), nonce: [7; 16] };
        assert!(Detail::decode(&detail.encode()[1..]).is_err());
        let mut other = detail.encode();
        other[0] = 9;
        assert!(Detail::decode(&other).unwrap_err().contains("version 9"));
        let mut nowhere = detail.encode();
        nowhere[2..4].fill(0);
        assert!(Detail::decode(&nowhere).is_err());
        let request = Request { is_write: false, key: 1, offset: 0, bytes: u64::MAX };
        assert_eq!(Request::decode(&request.encode()), None);
        let odd = Response { is_data: true, status: 1, is_last: false, bytes: 5 };
        assert_eq!(Response::decode(&odd.encode()), None);
        assert_eq!(decode_hello(&[0; HELLO_BYTES]), None);
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_never_panic(bytes: [u8; 32], short in prop::collection::vec(any::<u8>(), 0..64)) {
            let _ = Detail::decode(&short);
            let _ = Request::decode(&bytes);
            let _ = decode_hello(&bytes);
            let _ = Response::decode(bytes[..16].try_into().unwrap());
        }
    }
}
