//! Messages of the handshake between engines, as bytes. Specified in `docs/reference/wire-format.md`, "Message
//! engine".

use crate::engine::codec::{DecodeError, Reader, put_counted};
use crate::engine::link::Limits;
use crate::engine::metadata::{
    MAX_OFFERS, put_device, put_offer, read_device, read_num_offers, read_offer,
};
use p2p_core::bootstrap::ShownTicket;
use p2p_core::bootstrap::wire::{self, printable};
use p2p_core::network::{MAX_DETAIL_BYTES, Offer};

/// Bytes of the header of a handshake message.
pub(super) const HEADER_BYTES: usize = 16;
/// Longest body of a handshake message.
pub(super) const MAX_BODY_BYTES: usize = 32 << 10;
/// Longest shared secret.
pub(in crate::engine) const MAX_TICKET_BYTES: usize = 512;

/// A side's description of itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct PeerHello {
    pub(super) engine_id: u64,
    /// Port at which it listens.
    pub(super) port: u16,
    pub(super) gpu_index: Option<u32>,
    pub(super) pci_bdf: Option<String>,
    pub(super) limits: Limits,
}

/// A transport, and the detail of the sender's fabric that the peer needs to join.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Side {
    pub(super) offer: Offer,
    pub(super) detail: Vec<u8>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Message {
    /// From the connecting side: its description, its ticket, and all its transports.
    Hello { hello: PeerHello, ticket: Vec<u8>, sides: Vec<Side> },
    /// From the connecting side, before its hello: a ticket, with a proof that covers the hello.
    Ticket(ShownTicket),
    /// From the listening side: its description, and the transport that it has joined.
    Welcome { hello: PeerHello, side: Side },
    /// From the connecting side: it has joined as well, and frames may follow.
    Ready,
    /// From the connecting side: it cannot join over this transport, and asks for the next.
    Next,
    /// From the listening side: it refuses, with the reason.
    Reject { message: String },
}

impl Message {
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut body = Vec::new();
        let kind: u16 = match self {
            Self::Hello { hello, ticket, sides } => {
                put_peer_hello(&mut body, hello);
                put_counted(&mut body, ticket);
                body.push(sides.len().min(MAX_OFFERS) as u8);
                sides.iter().take(MAX_OFFERS).for_each(|side| put_side(&mut body, side));
                1
            }
            Self::Welcome { hello, side } => {
                put_peer_hello(&mut body, hello);
                put_side(&mut body, side);
                2
            }
            Self::Ready => 3,
            Self::Next => 4,
            Self::Ticket(ShownTicket { ticket, proof }) => {
                put_counted(&mut body, ticket.as_bytes());
                put_counted(&mut body, proof.as_bytes());
                6
            }
            Self::Reject { message } => {
                body.extend(&message.as_bytes()[..message.floor_char_boundary(MAX_REJECT_BYTES)]);
                5
            }
        };
        let mut out = MAGIC.to_vec();
        out.extend(VERSION.to_le_bytes());
        out.extend(kind.to_le_bytes());
        out.extend((body.len() as u32).to_le_bytes());
        out.extend(body);
        out
    }

    /// Bytes of the body that follows a header.
    pub(super) fn body_bytes(header: &[u8; HEADER_BYTES]) -> Result<usize, DecodeError> {
        if header[..8] != MAGIC {
            return Err(
                "the other side is no engine: its first bytes are not an engine's".to_owned()
            );
        }
        let version = u16::from_le_bytes([header[8], header[9]]);
        if version != VERSION {
            return Err(format!("the peer speaks version {version}, this side version {VERSION}"));
        }
        let bytes = u32::from_le_bytes([header[12], header[13], header[14], header[15]]) as usize;
        if bytes > MAX_BODY_BYTES {
            return Err(format!(
                "a message of {bytes} bytes, at most {MAX_BODY_BYTES} are allowed"
            ));
        }
        Ok(bytes)
    }

    pub(super) fn decode(header: &[u8; HEADER_BYTES], body: &[u8]) -> Result<Self, DecodeError> {
        let mut reader = Reader::new(body);
        let message = match u16::from_le_bytes([header[10], header[11]]) {
            1 => {
                let hello = read_peer_hello(&mut reader)?;
                let ticket = reader.counted("ticket", MAX_TICKET_BYTES)?.to_vec();
                let mut sides = Vec::new();
                for _ in 0..read_num_offers(&mut reader)? {
                    sides.extend(read_side(&mut reader)?);
                }
                Self::Hello { hello, ticket, sides }
            }
            2 => {
                let hello = read_peer_hello(&mut reader)?;
                let side = read_side(&mut reader)?;
                let side = side.ok_or("it chose a transport that this side does not know")?;
                Self::Welcome { hello, side }
            }
            3 => Self::Ready,
            4 => Self::Next,
            6 => {
                let ticket = reader.text("ticket", wire::MAX_TICKET_BYTES)?;
                let proof = reader.text("proof", wire::MAX_PROOF_BYTES)?;
                Self::Ticket(ShownTicket { ticket, proof })
            }
            5 => {
                let bytes = reader.bytes("message", body.len().min(MAX_REJECT_BYTES))?;
                let message = printable(bytes);
                return Ok(Self::Reject { message });
            }
            kind => return Err(format!("a message of unknown kind {kind}")),
        };
        reader.end()?;
        Ok(message)
    }
}

fn put_peer_hello(out: &mut Vec<u8>, hello: &PeerHello) {
    out.extend(hello.engine_id.to_le_bytes());
    out.extend(hello.port.to_le_bytes());
    put_device(out, hello.gpu_index, hello.pci_bdf.as_deref());
    let limits = &hello.limits;
    for word in [
        limits.eager_bytes,
        limits.eager_window,
        limits.notify_window,
        limits.max_notification,
        limits.unscheduled_bytes,
        limits.max_demand_bytes,
    ] {
        out.extend(word.to_le_bytes());
    }
}

fn read_peer_hello(reader: &mut Reader<'_>) -> Result<PeerHello, DecodeError> {
    let engine_id = reader.u64("engine id")?;
    let port = reader.u16("port")?;
    let (gpu_index, pci_bdf) = read_device(reader)?;
    let limits = Limits {
        eager_bytes: reader.u64("eager_bytes")?,
        eager_window: reader.u64("eager_window")?,
        notify_window: reader.u64("notify_window")?,
        max_notification: reader.u64("max_notification")?,
        unscheduled_bytes: reader.u64("unscheduled_bytes")?,
        max_demand_bytes: reader.u64("max_demand_bytes")?,
    };
    let most = crate::engine::wire::MAX_BODY_BYTES as u64;
    if limits.eager_bytes > most {
        return Err(format!("`eager_bytes` is {}, at most {most} are allowed", limits.eager_bytes));
    }
    for (what, found) in [
        ("eager_window", limits.eager_window),
        ("notify_window", limits.notify_window),
        ("max_notification", limits.max_notification),
        ("unscheduled_bytes", limits.unscheduled_bytes),
        ("max_demand_bytes", limits.max_demand_bytes),
    ] {
        // Sums of the limits must not overflow.
        if found > u64::MAX >> 1 {
            return Err(format!("`{what}` is {found}, at most 2^63 - 1 is allowed"));
        }
    }
    Ok(PeerHello { engine_id, port, gpu_index, pci_bdf, limits })
}

fn put_side(out: &mut Vec<u8>, side: &Side) {
    put_offer(out, &side.offer);
    put_counted(out, &side.detail);
}

/// Reads a side. Returns `None` for a transport that this version does not know.
fn read_side(reader: &mut Reader<'_>) -> Result<Option<Side>, DecodeError> {
    let offer = read_offer(reader)?;
    let detail = reader.counted("detail of a transport", MAX_DETAIL_BYTES)?.to_vec();
    Ok(offer.map(|offer| Side { offer, detail }))
}

const MAGIC: [u8; 8] = *b"SYENGINE";
const VERSION: u16 = 2;
const MAX_REJECT_BYTES: usize = 1024;

/// One message of each kind.
#[cfg(any(test, fuzzing))]
fn messages() -> Vec<Message> {
    let limits = Limits {
        eager_bytes: 1,
        eager_window: 2,
        notify_window: 3,
        max_notification: 4,
        unscheduled_bytes: 5,
        max_demand_bytes: 6,
    };
    let hello = PeerHello {
        engine_id: 9,
        port: 10,
        gpu_index: Some(1),
        pci_bdf: Some("0000:3b:00.0".to_owned()),
        limits,
    };
    let offer = Offer::plain(p2p_core::endpoint::TransportKind::Tcp);
    let side = Side { offer, detail: vec![1, 2, 3] };
    let sides = vec![side.clone(), side.clone()];
    vec![
        Message::Hello { hello: hello.clone(), ticket: b"secret".to_vec(), sides },
        Message::Welcome { hello, side },
        Message::Ready,
        Message::Next,
        Message::Ticket(ShownTicket {
            ticket: "v4.public.AA".to_owned(),
            proof: "v4.public.BB".to_owned(),
        }),
        Message::Reject { message: "no".to_owned() },
    ]
}

/// The encoded messages.
#[cfg(fuzzing)]
pub(in crate::engine) fn samples() -> Vec<Vec<u8>> {
    messages().iter().map(Message::encode).collect()
}

/// Decodes bytes of a peer. A decoded message must stay the same when it is encoded and decoded again.
#[cfg(fuzzing)]
pub(in crate::engine) fn check(header: &[u8; HEADER_BYTES], body: &[u8]) {
    let _ = Message::body_bytes(header);
    let Ok(message) = Message::decode(header, body) else { return };
    if matches!(message, Message::Reject { .. }) {
        // Bytes that are no text were replaced, so the text may be too long to encode.
        return;
    }
    let bytes = message.encode();
    let again = bytes.split_first_chunk().map(|(header, body)| Message::decode(header, body));
    assert_eq!(again, Some(Ok(message)));
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn decode(bytes: &[u8]) -> Result<Message, DecodeError> {
        let (header, body) = bytes.split_first_chunk().unwrap();
        assert_eq!(Message::body_bytes(header), Ok(body.len()));
        Message::decode(header, body)
    }

    #[test]
    fn encoded_values_are_decoded_unchanged() {
        for message in messages() {
            assert_eq!(decode(&message.encode()), Ok(message));
        }
    }

    #[test]
    fn a_reason_cannot_steer_a_terminal() {
        let bytes = Message::Reject { message: "no\n\x1b[2J".to_owned() }.encode();
        let replaced = "no\u{fffd}\u{fffd}[2J".to_owned();
        assert_eq!(decode(&bytes), Ok(Message::Reject { message: replaced }));
    }

    #[test]
    fn every_cut_of_a_body_is_noticed() {
        for message in &messages()[..2] {
            let bytes = message.encode();
            let (header, body) = bytes.split_first_chunk().unwrap();
            for len in 0..body.len() {
                assert!(Message::decode(header, &body[..len]).is_err(), "{len} of {message:?}");
            }
        }
    }

    #[test]
    fn foreign_headers_are_refused() {
        let mut header = [0; HEADER_BYTES];
        assert!(Message::body_bytes(&header).unwrap_err().contains("no engine"));
        header[..8].copy_from_slice(&MAGIC);
        header[8] = 9;
        assert!(Message::body_bytes(&header).unwrap_err().contains("version 9"));
        (header[8], header[15]) = (VERSION as u8, 1);
        assert!(Message::body_bytes(&header).unwrap_err().contains("at most"));
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_never_panic(kind in 0u16..8, body in prop::collection::vec(any::<u8>(), 0..300)) {
            let mut header = [0; HEADER_BYTES];
            header[10..12].copy_from_slice(&kind.to_le_bytes());
            let _ = Message::decode(&header, &body);
        }
    }
}
