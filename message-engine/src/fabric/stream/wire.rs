//! Bytes on a data connection. Little-endian; specified in `docs/reference/wire-format.md`, "TCP and shared-memory fabrics".

use super::unix::Name;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};

/// The address for a peer to connect to, and the nonce that proves its identity.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Detail {
    pub(super) place: Place,
    pub(super) nonce: [u8; 16],
}

/// The place that a peer connects to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Place {
    Network(SocketAddr),
    /// A Unix socket's abstract name, and the kernel and network namespace in which it is known.
    Host {
        name: Name,
        boot_id: [u8; 16],
        net_namespace: [u64; 2],
    },
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
        let mut out = Vec::with_capacity(HOST_DETAIL_BYTES);
        out.extend(VERSION.to_le_bytes());
        match self.place {
            Place::Network(address) => {
                let ip = match address.ip() {
                    IpAddr::V4(ip) => ip.to_ipv6_mapped(),
                    IpAddr::V6(ip) => ip,
                };
                out.extend(address.port().to_le_bytes());
                out.extend(ip.octets());
            }
            Place::Host { name, boot_id, net_namespace } => {
                out.extend([0; 2]);
                out.extend(name);
                out.extend(boot_id);
                out.extend(net_namespace[0].to_le_bytes());
                out.extend(net_namespace[1].to_le_bytes());
            }
        }
        out.extend(self.nonce);
        out
    }

    pub(super) fn decode(bytes: &[u8]) -> Result<Self, String> {
        let is_host = bytes.len() == HOST_DETAIL_BYTES;
        if !is_host && bytes.len() != DETAIL_BYTES {
            return Err(format!(
                "the peer describes itself in {} bytes, expected {DETAIL_BYTES} or {HOST_DETAIL_BYTES}",
                bytes.len()
            ));
        }
        let version = u16::from_le_bytes([bytes[0], bytes[1]]);
        if version != VERSION {
            return Err(format!("the peer speaks version {version}, this side version {VERSION}"));
        }
        let port = u16::from_le_bytes([bytes[2], bytes[3]]);
        let half = |at: usize| {
            let mut half = [0; 16];
            half.copy_from_slice(&bytes[at..at + 16]);
            half
        };
        let nonce = half(bytes.len() - 16);
        if is_host {
            if port != 0 {
                return Err(format!("the peer names port {port} beside a name of its host"));
            }
            let net_namespace = [word(bytes, 36), word(bytes, 44)];
            let place = Place::Host { name: half(4), boot_id: half(20), net_namespace };
            return Ok(Self { place, nonce });
        }
        let ip = Ipv6Addr::from(half(4)).to_canonical();
        if port == 0 || ip.is_unspecified() || ip.is_multicast() {
            return Err(format!("the peer's address {ip} port {port} cannot be connected to"));
        }
        Ok(Self { place: Place::Network(SocketAddr::new(ip, port)), nonce })
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

/// First bytes of a data connection. `is_direct`: users' threads make its requests.
pub(super) fn encode_hello(nonce: [u8; 16], is_direct: bool) -> [u8; HELLO_BYTES] {
    let mut out = [0; HELLO_BYTES];
    out[..8].copy_from_slice(&MAGIC);
    out[8..10].copy_from_slice(&VERSION.to_le_bytes());
    out[10] = is_direct.into();
    out[16..].copy_from_slice(&nonce);
    out
}

/// The nonce of a hello, and whether users' threads make the requests. `None`: not a hello of this version.
pub(super) fn decode_hello(bytes: &[u8; HELLO_BYTES]) -> Option<([u8; 16], bool)> {
    let version = u16::from_le_bytes([bytes[8], bytes[9]]);
    if bytes[..8] != MAGIC || version != VERSION || bytes[10] > 1 || bytes[11..16] != [0; 5] {
        return None;
    }
    Some((bytes[16..].try_into().ok()?, bytes[10] == 1))
}

fn word(bytes: &[u8], at: usize) -> u64 {
    let mut word = [0; 8];
    word.copy_from_slice(&bytes[at..at + 8]);
    u64::from_le_bytes(word)
}

/// Descriptions with addresses of both families.
#[cfg(fuzzing)]
pub(in crate::fabric) fn detail_samples() -> Vec<Vec<u8>> {
    let detail = |place| Detail { place, nonce: [9; 16] }.encode();
    let network = |ip: IpAddr| detail(Place::Network(SocketAddr::new(ip, 80)));
    let host = Place::Host { name: [1; 16], boot_id: [2; 16], net_namespace: [3, 4] };
    vec![network([10, 0, 0, 1].into()), network(Ipv6Addr::LOCALHOST.into()), detail(host)]
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
    let hello = encode_hello([6; 16], true).to_vec();
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
        && let Some((nonce, is_direct)) = decode_hello(bytes)
    {
        assert_eq!(encode_hello(nonce, is_direct), *bytes);
    }
}

const MAGIC: [u8; 8] = *b"SYTCPFAB";
const VERSION: u16 = 2;
const DETAIL_BYTES: usize = 36;
const HOST_DETAIL_BYTES: usize = 68;
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
            let place = Place::Network(address.parse().unwrap());
            let detail = Detail { place, nonce: [7; 16] };
            assert_eq!(Detail::decode(&detail.encode()), Ok(detail));
        }
        let place = Place::Host { name: [1; 16], boot_id: [2; 16], net_namespace: [3, u64::MAX] };
        let detail = Detail { place, nonce: [7; 16] };
        assert_eq!(Detail::decode(&detail.encode()), Ok(detail));
        let request = Request { is_write: true, key: u64::MAX - 3, offset: 1 << 33, bytes: 77 };
        assert_eq!(Request::decode(&request.encode()), Some(request));
        for (is_data, status, is_last, bytes) in [(true, 0, false, 9), (false, 2, true, 0)] {
            let response = Response { is_data, status, is_last, bytes };
            assert_eq!(Response::decode(&response.encode()), Some(response));
        }
        for is_direct in [false, true] {
            assert_eq!(decode_hello(&encode_hello([3; 16], is_direct)), Some(([3; 16], is_direct)));
        }
    }

    #[test]
    fn malformed_bytes_are_refused() {
        let place = Place::Network("10.1.2.3:4567".parse().unwrap());
        let detail = Detail { place, nonce: [7; 16] };
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
        fn arbitrary_bytes_never_panic(bytes: [u8; 32], short in prop::collection::vec(any::<u8>(), 0..80)) {
            let _ = Detail::decode(&short);
            let _ = Request::decode(&bytes);
            let _ = decode_hello(&bytes);
            let _ = Response::decode(bytes[..16].try_into().unwrap());
        }
    }
}
