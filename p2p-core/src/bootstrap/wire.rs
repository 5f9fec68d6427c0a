//! Encodes and decodes handshake messages, without I/O.
//!
//! Numbers are little-endian. Fixed fields come first, then variable ones of limited length. Every
//! length is checked before it is used, and bytes left over are an error.
//! `docs/reference/wire-format.md`, "Bootstrap handshake", specifies the layout.

use thiserror::Error;

use super::{MAX_PAYLOAD_BYTES, PeerHello, Reject, RejectCode, ShownTicket};
use crate::endpoint::TransportKind;
use crate::host::HostIdentity;
use crate::network::{MAX_DETAIL_BYTES, MAX_FLAVOUR_BYTES, Offer, SideDescription};

/// Version of the handshake and of everything that follows it.
pub const PROTOCOL_VERSION: u16 = 1;
/// Bytes of the header before every message.
pub const HEADER_BYTES: usize = 16;
/// Longest secret in bytes.
pub const MAX_SECRET_BYTES: usize = 512;
/// Longest ticket in bytes.
pub const MAX_TICKET_BYTES: usize = 1536;
/// Longest proof of a ticket in bytes.
pub const MAX_PROOF_BYTES: usize = 256;
/// Longest message of a [`Reject`] in bytes. The rest is cut off.
pub const MAX_REJECT_BYTES: usize = 1024;
/// Longest description of left-out offers in bytes.
pub const MAX_LEFT_OUT_BYTES: usize = 512;
/// Longest shape of device slots in bytes.
pub const MAX_SHAPE_BYTES: usize = 256;
/// Longest body of any message in bytes.
pub const MAX_BODY_BYTES: usize = 8192;

/// Bytes that are not a message of this handshake.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the messages explain the fields")]
pub enum WireError {
    /// The peer does not speak this protocol at all.
    #[error("the first bytes are {found:02x?}, expected {MAGIC:02x?}: not a Switchyard peer")]
    Magic { found: [u8; 8] },
    /// The peer speaks another version.
    #[error("the peer speaks protocol version {found}, this side version {PROTOCOL_VERSION}")]
    Version { found: u16 },
    /// A message that this side does not know, or does not expect at this point.
    #[error("message kind {found}, expected {expected}")]
    Kind { found: u16, expected: &'static str },
    /// A field claims to be longer than allowed.
    #[error("`{field}` is {found} bytes, at most {max} are allowed")]
    TooLong { field: &'static str, found: usize, max: usize },
    /// The body ends within a field.
    #[error("the message ends within `{field}`")]
    Truncated { field: &'static str },
    /// The body goes on after the last field.
    #[error("{num_bytes} bytes follow the last field")]
    Trailing { num_bytes: usize },
    /// A field holds a value without a meaning.
    #[error("`{field}` holds {found}, expected {expected}")]
    Value { field: &'static str, found: u64, expected: &'static str },
}

/// Header of a message, after magic and lengths were checked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    /// Version of the sender.
    pub version: u16,
    /// One of the `KIND_` constants.
    pub kind: u16,
    /// Bytes of the body.
    pub body_bytes: usize,
}

/// First message of the connecting side.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hello {
    /// Bytes of a slot.
    pub slot_bytes: u64,
    /// Frames in a slot.
    pub num_frames: u32,
    /// Host and process of the sender.
    pub host: HostIdentity,
    /// Transports, in order of preference. Decoding leaves out unknown ones.
    pub offers: Vec<Offer>,
    /// Shared secret; empty for none.
    pub secret: Vec<u8>,
    /// Description by the upper layers.
    pub peer: PeerHello,
    /// Offers that the sender left out, with reasons, for people; at most [`MAX_LEFT_OUT_BYTES`].
    pub left_out: String,
    /// Device slots that the sender wants beside the host slots.
    pub device: Option<DeviceDescription>,
}

/// Device slots that the connecting side wants.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceDescription {
    /// Bytes of the sender's own slot.
    pub own_bytes: u64,
    /// Bytes of the receiver's slot.
    pub peer_bytes: u64,
    /// Properties that must be equal on both sides, at most [`MAX_SHAPE_BYTES`].
    pub shape: Vec<u8>,
}

/// Answer of the listening side.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Welcome {
    /// Transport chosen.
    pub offer: Offer,
    /// The listening side's slot for this peer. Address, key and detail are empty if descriptors
    /// are exchanged instead.
    pub side: SideDescription,
    /// Ties the exchange of descriptors to this handshake.
    pub nonce: [u8; 16],
    /// Name of the Unix socket on which descriptors are exchanged.
    pub rendezvous: [u8; 16],
    /// Reply by the upper layers.
    pub payload: Vec<u8>,
}

/// Kind of [`Hello`].
pub const KIND_HELLO: u16 = 1;
/// Kind of [`Welcome`].
pub const KIND_WELCOME: u16 = 2;
/// Kind of the connecting side's last message: its [`SideDescription`].
pub const KIND_READY: u16 = 3;
/// Kind of [`Reject`]. Its layout is the same in every version.
pub const KIND_REJECT: u16 = 4;
/// Kind of the message that announces an orderly leave. No body.
pub const KIND_GOODBYE: u16 = 5;

/// Kind of the listening side's last message on a network: it has joined too. No body.
pub const KIND_GO: u16 = 6;
/// Kind of [`ShownTicket`]. It comes before the hello, if the connecting side has a ticket.
pub const KIND_TICKET: u16 = 7;

/// Checks a header. Only a [`Reject`] may come from another version.
///
/// # Errors
/// [`WireError`].
pub fn decode_header(bytes: &[u8; HEADER_BYTES]) -> Result<Header, WireError> {
    let mut reader = Reader { rest: bytes };
    let magic: [u8; 8] = reader.array("magic")?;
    if magic != MAGIC {
        return Err(WireError::Magic { found: magic });
    }
    let version = u16::from_le_bytes(reader.array("version")?);
    let kind = u16::from_le_bytes(reader.array("kind")?);
    let body_bytes = u32::from_le_bytes(reader.array("body_bytes")?) as usize;
    if version != PROTOCOL_VERSION && kind != KIND_REJECT {
        return Err(WireError::Version { found: version });
    }
    if body_bytes > MAX_BODY_BYTES {
        return Err(WireError::TooLong { field: "body", found: body_bytes, max: MAX_BODY_BYTES });
    }
    Ok(Header { version, kind, body_bytes })
}

/// Encodes a header again, as it came.
#[must_use]
pub fn encode_header(header: &Header) -> [u8; HEADER_BYTES] {
    let mut out = [0; HEADER_BYTES];
    out[..8].copy_from_slice(&MAGIC);
    out[8..10].copy_from_slice(&header.version.to_le_bytes());
    out[10..12].copy_from_slice(&header.kind.to_le_bytes());
    out[12..].copy_from_slice(&(header.body_bytes as u32).to_le_bytes());
    out
}

/// Encodes a [`Hello`] with its header.
#[must_use]
pub fn encode_hello(hello: &Hello) -> Vec<u8> {
    let mut out = begin(KIND_HELLO);
    out.extend(hello.slot_bytes.to_le_bytes());
    out.extend(hello.num_frames.to_le_bytes());
    out.extend(hello.peer.generation.to_le_bytes());
    out.extend(hello.peer.peer_id.to_le_bytes());
    out.extend(hello.host.boot_id);
    for part in hello.host.net_namespace.into_iter().chain(hello.host.process) {
        out.extend(part.to_le_bytes());
    }
    out.extend((hello.offers.len() as u16).to_le_bytes());
    out.extend((hello.secret.len() as u16).to_le_bytes());
    out.extend((hello.peer.payload.len() as u32).to_le_bytes());
    out.extend((hello.left_out.len() as u16).to_le_bytes());
    for offer in &hello.offers {
        put_offer(&mut out, offer);
    }
    out.extend(&hello.secret);
    out.extend(&hello.peer.payload);
    out.extend(hello.left_out.as_bytes());
    if let Some(device) = &hello.device {
        out.extend(device.own_bytes.to_le_bytes());
        out.extend(device.peer_bytes.to_le_bytes());
        out.extend((device.shape.len() as u16).to_le_bytes());
        out.extend(&device.shape);
    }
    finish(out)
}

/// Encodes a [`ShownTicket`] with its header.
#[must_use]
pub fn encode_ticket(shown: &ShownTicket) -> Vec<u8> {
    let mut out = begin(KIND_TICKET);
    out.extend((shown.ticket.len() as u16).to_le_bytes());
    out.extend((shown.proof.len() as u16).to_le_bytes());
    out.extend(shown.ticket.as_bytes());
    out.extend(shown.proof.as_bytes());
    finish(out)
}

/// Decodes the body of a [`ShownTicket`]. Both texts are visible ASCII.
///
/// # Errors
/// [`WireError`].
pub fn decode_ticket(body: &[u8]) -> Result<ShownTicket, WireError> {
    let mut reader = Reader { rest: body };
    let ticket_bytes = reader.u16("ticket_bytes")?.into();
    let proof_bytes = reader.u16("proof_bytes")?.into();
    let ticket = reader.limited("ticket", ticket_bytes, MAX_TICKET_BYTES)?;
    let proof = reader.limited("proof", proof_bytes, MAX_PROOF_BYTES)?;
    reader.end()?;
    Ok(ShownTicket { ticket: visible("ticket", ticket)?, proof: visible("proof", proof)? })
}

/// Decodes the body of a [`Hello`].
///
/// # Errors
/// [`WireError`].
pub fn decode_hello(body: &[u8]) -> Result<Hello, WireError> {
    let mut reader = Reader { rest: body };
    let slot_bytes = reader.u64("slot_bytes")?;
    let num_frames = reader.u32("num_frames")?;
    let generation = reader.u32("generation")?;
    let peer_id = reader.u64("peer_id")?;
    let boot_id = reader.array("boot_id")?;
    let net_namespace = [reader.u64("net_namespace")?, reader.u64("net_namespace")?];
    let process = [reader.u64("process")?, reader.u64("process")?];
    let num_offers: usize = reader.u16("num_offers")?.into();
    let secret_bytes = reader.u16("secret_bytes")?.into();
    let payload_bytes = reader.u32("payload_bytes")? as usize;
    let left_out_bytes = reader.u16("left_out_bytes")?.into();
    if num_offers > MAX_OFFERS {
        return Err(WireError::TooLong { field: "offers", found: num_offers, max: MAX_OFFERS });
    }
    let mut offers = Vec::with_capacity(num_offers);
    for _ in 0..num_offers {
        offers.extend(reader.offer()?);
    }
    let secret = reader.limited("secret", secret_bytes, MAX_SECRET_BYTES)?;
    let payload = reader.limited("payload", payload_bytes, MAX_PAYLOAD_BYTES)?;
    let left_out = reader.limited("left_out", left_out_bytes, MAX_LEFT_OUT_BYTES)?;
    let mut left_out = printable(left_out);
    // The replacement of a character may be longer than the character.
    left_out.truncate(left_out.floor_char_boundary(MAX_LEFT_OUT_BYTES));
    let device = if reader.rest.is_empty() { None } else { Some(reader.device()?) };
    reader.end()?;
    Ok(Hello {
        slot_bytes,
        num_frames,
        host: HostIdentity { boot_id, net_namespace, process },
        offers,
        secret: secret.to_vec(),
        peer: PeerHello { peer_id, generation, payload: payload.to_vec() },
        left_out,
        device,
    })
}

/// Encodes a [`Welcome`] with its header.
#[must_use]
pub fn encode_welcome(welcome: &Welcome) -> Vec<u8> {
    let mut out = begin(KIND_WELCOME);
    out.extend(welcome.nonce);
    out.extend(welcome.rendezvous);
    put_offer(&mut out, &welcome.offer);
    put_side(&mut out, &welcome.side);
    out.extend((welcome.payload.len() as u32).to_le_bytes());
    out.extend(&welcome.payload);
    finish(out)
}

/// Decodes the body of a [`Welcome`].
///
/// # Errors
/// [`WireError`].
pub fn decode_welcome(body: &[u8]) -> Result<Welcome, WireError> {
    let mut reader = Reader { rest: body };
    let nonce = reader.array("nonce")?;
    let rendezvous = reader.array("rendezvous")?;
    let offer = reader.offer()?.ok_or(WireError::Value {
        field: "offer",
        found: 0,
        expected: "a transport that was offered",
    })?;
    let side = reader.side()?;
    let payload_bytes = reader.u32("payload_bytes")? as usize;
    let payload = reader.limited("payload", payload_bytes, MAX_PAYLOAD_BYTES)?.to_vec();
    reader.end()?;
    Ok(Welcome { offer, side, nonce, rendezvous, payload })
}

/// Encodes the connecting side's last message, with its header.
#[must_use]
pub fn encode_ready(side: &SideDescription) -> Vec<u8> {
    let mut out = begin(KIND_READY);
    put_side(&mut out, side);
    finish(out)
}

/// Decodes the body of the connecting side's last message.
///
/// # Errors
/// [`WireError`].
pub fn decode_ready(body: &[u8]) -> Result<SideDescription, WireError> {
    let mut reader = Reader { rest: body };
    let side = reader.side()?;
    reader.end()?;
    Ok(side)
}

/// Encodes a [`Reject`] with its header.
#[must_use]
pub fn encode_reject(reject: &Reject) -> Vec<u8> {
    let mut out = begin(KIND_REJECT);
    let mut len = reject.message.len().min(MAX_REJECT_BYTES);
    while !reject.message.is_char_boundary(len) {
        len -= 1;
    }
    out.extend(reject.code.0.to_le_bytes());
    out.extend((len as u16).to_le_bytes());
    out.extend(&reject.message.as_bytes()[..len]);
    finish(out)
}

/// Decodes the body of a [`Reject`]. Control characters of the message are replaced, so that it can
/// be printed.
///
/// # Errors
/// [`WireError`].
pub fn decode_reject(body: &[u8]) -> Result<Reject, WireError> {
    let mut reader = Reader { rest: body };
    let code = RejectCode(reader.u16("code")?);
    let len = reader.u16("message_bytes")?.into();
    let bytes = reader.limited("message", len, MAX_REJECT_BYTES)?;
    let message = printable(bytes);
    reader.end()?;
    Ok(Reject { code, message })
}

/// Replaces control characters in a peer's text. They would steer a terminal or break a line of a
/// log.
#[must_use]
pub fn printable(bytes: &[u8]) -> String {
    let shown = |c: char| if c.is_control() { char::REPLACEMENT_CHARACTER } else { c };
    String::from_utf8_lossy(bytes).chars().map(shown).collect()
}

/// Encodes the listening side's last message on a network.
#[must_use]
pub fn encode_go() -> Vec<u8> {
    finish(begin(KIND_GO))
}

/// Encodes the message that announces an orderly leave.
#[must_use]
pub fn encode_goodbye() -> Vec<u8> {
    finish(begin(KIND_GOODBYE))
}

fn begin(kind: u16) -> Vec<u8> {
    let mut out = Vec::with_capacity(128);
    out.extend(MAGIC);
    out.extend(PROTOCOL_VERSION.to_le_bytes());
    out.extend(kind.to_le_bytes());
    out.extend(0u32.to_le_bytes());
    out
}

fn finish(mut out: Vec<u8>) -> Vec<u8> {
    let body_bytes = (out.len() - HEADER_BYTES) as u32;
    out[HEADER_BYTES - 4..HEADER_BYTES].copy_from_slice(&body_bytes.to_le_bytes());
    out
}

fn put_side(out: &mut Vec<u8>, side: &SideDescription) {
    for field in [side.bytes, side.address, side.remote_key] {
        out.extend(field.to_le_bytes());
    }
    out.extend((side.detail.len() as u32).to_le_bytes());
    out.extend(&side.detail);
}

fn put_offer(out: &mut Vec<u8>, offer: &Offer) {
    out.push(transport_code(offer.kind));
    out.push(offer.flavour.len() as u8);
    out.extend(offer.flavour.as_bytes());
}

/// Number of a transport kind on the wire.
#[must_use]
pub const fn transport_code(kind: TransportKind) -> u8 {
    match kind {
        TransportKind::Local => 0,
        TransportKind::Shm => 1,
        #[cfg(feature = "test-transports")]
        TransportKind::Staged => 2,
        TransportKind::Verbs => 3,
        TransportKind::Libfabric => 4,
        TransportKind::CudaIpc => 5,
        #[cfg(feature = "test-transports")]
        TransportKind::SoftNic => 6,
        TransportKind::Tcp => 7,
        TransportKind::Cma => 8,
        TransportKind::Ibgda => 9,
    }
}

/// Transport kind of a number on the wire; `None` for an unknown one.
#[must_use]
pub const fn transport_of(code: u8) -> Option<TransportKind> {
    match code {
        0 => Some(TransportKind::Local),
        1 => Some(TransportKind::Shm),
        #[cfg(feature = "test-transports")]
        2 => Some(TransportKind::Staged),
        3 => Some(TransportKind::Verbs),
        4 => Some(TransportKind::Libfabric),
        5 => Some(TransportKind::CudaIpc),
        #[cfg(feature = "test-transports")]
        6 => Some(TransportKind::SoftNic),
        7 => Some(TransportKind::Tcp),
        8 => Some(TransportKind::Cma),
        9 => Some(TransportKind::Ibgda),
        _ => None,
    }
}

/// Takes a text of visible ASCII characters.
fn visible(field: &'static str, bytes: &[u8]) -> Result<String, WireError> {
    match bytes.iter().find(|byte| !byte.is_ascii_graphic()) {
        Some(&byte) => {
            Err(WireError::Value { field, found: byte.into(), expected: "printable ASCII" })
        }
        None => Ok(String::from_utf8_lossy(bytes).into_owned()),
    }
}

struct Reader<'a> {
    rest: &'a [u8],
}

impl<'a> Reader<'a> {
    fn bytes(&mut self, field: &'static str, len: usize) -> Result<&'a [u8], WireError> {
        let (head, rest) = self.rest.split_at_checked(len).ok_or(WireError::Truncated { field })?;
        self.rest = rest;
        Ok(head)
    }

    fn array<const N: usize>(&mut self, field: &'static str) -> Result<[u8; N], WireError> {
        self.bytes(field, N)?.try_into().map_err(|_| WireError::Truncated { field })
    }

    fn limited(
        &mut self,
        field: &'static str,
        len: usize,
        max: usize,
    ) -> Result<&'a [u8], WireError> {
        if len > max {
            return Err(WireError::TooLong { field, found: len, max });
        }
        self.bytes(field, len)
    }

    fn u16(&mut self, field: &'static str) -> Result<u16, WireError> {
        Ok(u16::from_le_bytes(self.array(field)?))
    }

    fn u32(&mut self, field: &'static str) -> Result<u32, WireError> {
        Ok(u32::from_le_bytes(self.array(field)?))
    }

    fn u64(&mut self, field: &'static str) -> Result<u64, WireError> {
        Ok(u64::from_le_bytes(self.array(field)?))
    }

    fn side(&mut self) -> Result<SideDescription, WireError> {
        let bytes = self.u64("side.bytes")?;
        let address = self.u64("side.address")?;
        let remote_key = self.u64("side.remote_key")?;
        let detail_bytes = self.u32("side.detail_bytes")? as usize;
        let detail = self.limited("side.detail", detail_bytes, MAX_DETAIL_BYTES)?.to_vec();
        Ok(SideDescription { address, remote_key, bytes, detail })
    }

    fn device(&mut self) -> Result<DeviceDescription, WireError> {
        let own_bytes = self.u64("device.own_bytes")?;
        let peer_bytes = self.u64("device.peer_bytes")?;
        let shape_bytes = self.u16("device.shape_bytes")?.into();
        let shape = self.limited("device.shape", shape_bytes, MAX_SHAPE_BYTES)?.to_vec();
        Ok(DeviceDescription { own_bytes, peer_bytes, shape })
    }

    /// Reads an offer; `None` for a transport that this side does not know.
    fn offer(&mut self) -> Result<Option<Offer>, WireError> {
        let [code, flavour_bytes] = self.array("offer")?;
        let flavour = self.limited("offer.flavour", flavour_bytes.into(), MAX_FLAVOUR_BYTES)?;
        let flavour = visible("offer.flavour", flavour)?;
        Ok(transport_of(code).map(|kind| Offer { kind, flavour }))
    }

    const fn end(&self) -> Result<(), WireError> {
        match self.rest.len() {
            0 => Ok(()),
            num_bytes => Err(WireError::Trailing { num_bytes }),
        }
    }
}

/// First bytes of every message.
pub const MAGIC: [u8; 8] = *b"SWITCHYD";
const MAX_OFFERS: usize = 16;

// The longest messages fit the limit on bodies.
const _: () = assert!(
    96 + MAX_OFFERS * (2 + MAX_FLAVOUR_BYTES)
        + MAX_DETAIL_BYTES
        + MAX_SECRET_BYTES
        + MAX_PAYLOAD_BYTES
        + MAX_LEFT_OUT_BYTES
        + (18 + MAX_SHAPE_BYTES)
        <= MAX_BODY_BYTES
);

#[cfg(test)]
mod tests {
    use rand::rngs::StdRng;
    use rand::{Rng, RngExt, SeedableRng};

    use super::*;

    fn random_bytes(rng: &mut StdRng, most: usize) -> Vec<u8> {
        let mut bytes = vec![0; rng.random_range(0..=most)];
        rng.fill_bytes(&mut bytes);
        bytes
    }

    fn random_hello(rng: &mut StdRng) -> Hello {
        let mut offers = vec![
            Offer::plain(TransportKind::Shm),
            Offer { kind: TransportKind::Libfabric, flavour: "tcp;ofi_rxm".to_owned() },
        ];
        offers.truncate(rng.random_range(0..=2));
        Hello {
            slot_bytes: rng.random(),
            num_frames: rng.random(),
            host: HostIdentity {
                boot_id: rng.random(),
                net_namespace: rng.random(),
                process: rng.random(),
            },
            offers,
            secret: random_bytes(rng, MAX_SECRET_BYTES),
            peer: PeerHello {
                peer_id: rng.random(),
                generation: rng.random(),
                payload: random_bytes(rng, MAX_PAYLOAD_BYTES),
            },
            left_out: "x".repeat(rng.random_range(0..=MAX_LEFT_OUT_BYTES)),
            device: rng.random::<bool>().then(|| DeviceDescription {
                own_bytes: rng.random(),
                peer_bytes: rng.random(),
                shape: random_bytes(rng, MAX_SHAPE_BYTES),
            }),
        }
    }

    fn random_ticket(rng: &mut StdRng) -> ShownTicket {
        let mut text = |most| -> String {
            (0..rng.random_range(0..=most)).map(|_| rng.random_range('!'..='~')).collect()
        };
        ShownTicket { ticket: text(MAX_TICKET_BYTES), proof: text(MAX_PROOF_BYTES) }
    }

    fn random_welcome(rng: &mut StdRng) -> Welcome {
        Welcome {
            offer: Offer { kind: TransportKind::Verbs, flavour: "roce".to_owned() },
            side: random_side(rng),
            nonce: rng.random(),
            rendezvous: rng.random(),
            payload: random_bytes(rng, MAX_PAYLOAD_BYTES),
        }
    }

    fn random_side(rng: &mut StdRng) -> SideDescription {
        let detail = random_bytes(rng, MAX_DETAIL_BYTES);
        let (bytes, address, remote_key) = (rng.random(), rng.random(), rng.random());
        SideDescription { bytes, address, remote_key, detail }
    }

    fn split(message: &[u8]) -> Result<(Header, &[u8]), WireError> {
        let (head, body) = message
            .split_first_chunk::<HEADER_BYTES>()
            .ok_or(WireError::Truncated { field: "header" })?;
        Ok((decode_header(head)?, body))
    }

    /// Decodes by the kind in the header. Returns true if the bytes are a message.
    fn decode_any(message: &[u8]) -> bool {
        let Ok((header, body)) = split(message) else { return false };
        if header.body_bytes != body.len() {
            return false;
        }
        match header.kind {
            KIND_HELLO => decode_hello(body).is_ok(),
            KIND_WELCOME => decode_welcome(body).is_ok(),
            KIND_READY => decode_ready(body).is_ok(),
            KIND_REJECT => decode_reject(body).is_ok(),
            KIND_GOODBYE => body.is_empty(),
            KIND_TICKET => decode_ticket(body).is_ok(),
            _ => false,
        }
    }

    #[test]
    fn messages_survive_the_wire() {
        let seed = rand::random();
        println!("seed {seed}");
        let mut rng = StdRng::seed_from_u64(seed);
        for _ in 0..200 {
            let hello = random_hello(&mut rng);
            let bytes = encode_hello(&hello);
            let (header, body) = split(&bytes).unwrap();
            assert_eq!(encode_header(&header), bytes[..HEADER_BYTES]);
            assert_eq!((header.kind, header.body_bytes), (KIND_HELLO, body.len()));
            assert_eq!(decode_hello(body).unwrap(), hello);
            let shown = random_ticket(&mut rng);
            let bytes = encode_ticket(&shown);
            let (header, body) = split(&bytes).unwrap();
            assert_eq!((header.kind, decode_ticket(body).as_ref()), (KIND_TICKET, Ok(&shown)));
            let welcome = random_welcome(&mut rng);
            let bytes = encode_welcome(&welcome);
            assert_eq!(decode_welcome(split(&bytes).unwrap().1).unwrap(), welcome);
            let region = random_side(&mut rng);
            assert_eq!(decode_ready(split(&encode_ready(&region)).unwrap().1).unwrap(), region);
        }
        assert!(decode_any(&encode_goodbye()));
    }

    #[test]
    fn a_hello_has_the_specified_bytes() {
        let hello = Hello {
            slot_bytes: 0x0102,
            num_frames: 3,
            host: HostIdentity { boot_id: [9; 16], net_namespace: [4, 5], process: [6, 7] },
            offers: vec![Offer { kind: TransportKind::Verbs, flavour: "abc".to_owned() }],
            secret: b"t".to_vec(),
            peer: PeerHello { peer_id: 6, generation: 7, payload: b"pl".to_vec() },
            left_out: "lo?".to_owned(),
            device: None,
        };
        let mut expected = b"SWITCHYD\x01\0\x01\0\x5d\0\0\0".to_vec();
        expected.extend(b"\x02\x01\0\0\0\0\0\0\x03\0\0\0\x07\0\0\0\x06\0\0\0\0\0\0\0");
        expected.extend([9; 16]);
        expected.extend(b"\x04\0\0\0\0\0\0\0\x05\0\0\0\0\0\0\0");
        expected.extend(b"\x06\0\0\0\0\0\0\0\x07\0\0\0\0\0\0\0");
        expected.extend(b"\x01\0\x01\0\x02\0\0\0\x03\0\x03\x03abctpllo?");
        assert_eq!(encode_hello(&hello), expected);
        let shape = b"sh".to_vec();
        let device = Some(DeviceDescription { own_bytes: 0x0506, peer_bytes: 8, shape });
        expected[12] = 0x5d + 20;
        expected.extend(b"\x06\x05\0\0\0\0\0\0\x08\0\0\0\0\0\0\0\x02\0sh");
        assert_eq!(encode_hello(&Hello { device, ..hello }), expected);
    }

    #[test]
    fn mutated_messages_are_decoded_or_refused_and_never_panic() {
        let seed = rand::random();
        println!("seed {seed}");
        let mut rng = StdRng::seed_from_u64(seed);
        let mut num_refused = 0;
        for _ in 0..30_000 {
            let mut bytes = match rng.random_range(0..5) {
                4 => encode_ticket(&random_ticket(&mut rng)),
                0 => encode_hello(&random_hello(&mut rng)),
                1 => encode_welcome(&random_welcome(&mut rng)),
                2 => encode_ready(&random_side(&mut rng)),
                _ => {
                    let message = String::from_utf8_lossy(&random_bytes(&mut rng, 40)).into_owned();
                    encode_reject(&Reject { code: RejectCode(rng.random()), message })
                }
            };
            for _ in 0..rng.random_range(1..4) {
                let at = rng.random_range(0..bytes.len().min(120));
                match rng.random_range(0..4) {
                    0 => bytes[at] ^= 1 << rng.random_range(0..8),
                    1 => bytes[at] = [0, 0xff, 0x7f, 0x80][rng.random_range(0..4)],
                    2 => bytes.truncate(at.max(1)),
                    _ => bytes.insert(at, rng.random()),
                }
            }
            num_refused += u32::from(!decode_any(&bytes));
            // Also decodes the body alone, so that mutated lengths within it are reached more
            // often.
            if let Some(body) = bytes.get(HEADER_BYTES..) {
                let _ = (decode_hello(body).is_ok(), decode_welcome(body).is_ok());
                let _ = (decode_ready(body).is_ok(), decode_reject(body).is_ok());
                let _ = decode_ticket(body).is_ok();
            }
        }
        assert!(num_refused > 1000, "mutations are hardly ever refused: {num_refused}");
    }

    #[test]
    fn rejections_are_cut_and_made_printable() {
        let message = "\u{e9}".repeat(MAX_REJECT_BYTES);
        let bytes = encode_reject(&Reject { code: RejectCode::TICKET, message });
        let found = decode_reject(split(&bytes).unwrap().1).unwrap();
        assert_eq!(found.message.len(), MAX_REJECT_BYTES);
        let evil = Reject { code: RejectCode::FULL, message: "a\x1b[31mb\n".to_owned() };
        let found = decode_reject(split(&encode_reject(&evil)).unwrap().1).unwrap();
        assert!(!found.message.chars().any(char::is_control));
    }
}
