//! Metadata that an engine publishes, so that others can connect to it.

use std::net::{IpAddr, Ipv6Addr, SocketAddr};

use super::codec::{DecodeError, Reader, put_counted};
use p2p_core::bootstrap::wire::{transport_code, transport_of};
use p2p_core::network::{MAX_FLAVOUR_BYTES, Offer};

/// An engine's address, GPU and transports.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EndpointMetadata {
    /// Number of the engine: random, new with every start.
    pub engine_id: u64,
    /// Address to connect to.
    pub addr: SocketAddr,
    /// GPU whose memory is offered, by the numbering of its process.
    pub gpu_index: Option<u32>,
    /// PCI address of that GPU, such as `0000:3b:00.0`.
    pub pci_bdf: Option<String>,
    /// Transports, the best first.
    pub transports: Vec<Offer>,
}

impl EndpointMetadata {
    /// Encodes the metadata; below 1 KiB. Of more than 16 transports it keeps the first, which are the best.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut out = MAGIC.to_vec();
        out.extend(VERSION.to_le_bytes());
        out.extend(self.engine_id.to_le_bytes());
        put_addr(&mut out, self.addr);
        put_device(&mut out, self.gpu_index, self.pci_bdf.as_deref());
        let offers = &self.transports[..self.transports.len().min(MAX_OFFERS)];
        out.push(offers.len() as u8);
        for offer in offers {
            put_offer(&mut out, offer);
        }
        out
    }

    /// Decodes bytes that [`encode`](Self::encode) has made.
    ///
    /// # Errors
    /// A text that names the malformed field.
    pub fn decode(bytes: &[u8]) -> Result<Self, String> {
        let mut reader = Reader::new(bytes);
        if reader.bytes("magic", 4)? != MAGIC {
            return Err("these are not the bytes of an endpoint's metadata".to_owned());
        }
        let version = reader.u16("version")?;
        if version != VERSION {
            return Err(format!("it is of version {version}, this side reads version {VERSION}"));
        }
        let engine_id = reader.u64("engine id")?;
        let addr = read_addr(&mut reader)?;
        let (gpu_index, pci_bdf) = read_device(&mut reader)?;
        let mut transports = Vec::new();
        for _ in 0..read_num_offers(&mut reader)? {
            // A transport that this version does not know is skipped.
            transports.extend(read_offer(&mut reader)?);
        }
        reader.end()?;
        Ok(Self { engine_id, addr, gpu_index, pci_bdf, transports })
    }
}

pub(super) fn put_addr(out: &mut Vec<u8>, addr: SocketAddr) {
    let ip = match addr.ip() {
        IpAddr::V4(ip) => ip.to_ipv6_mapped(),
        IpAddr::V6(ip) => ip,
    };
    out.extend(ip.octets());
    out.extend(addr.port().to_le_bytes());
}

pub(super) fn read_addr(reader: &mut Reader<'_>) -> Result<SocketAddr, DecodeError> {
    let mut ip = [0; 16];
    ip.copy_from_slice(reader.bytes("address", 16)?);
    let ip = Ipv6Addr::from(ip).to_canonical();
    Ok(SocketAddr::new(ip, reader.u16("port")?))
}

pub(super) fn put_device(out: &mut Vec<u8>, gpu_index: Option<u32>, pci_bdf: Option<&str>) {
    out.extend(gpu_index.map_or(u64::MAX, u64::from).to_le_bytes());
    put_counted(out, pci_bdf.unwrap_or_default().as_bytes());
}

pub(super) fn read_device(
    reader: &mut Reader<'_>,
) -> Result<(Option<u32>, Option<String>), DecodeError> {
    let gpu_index = u32::try_from(reader.u64("GPU index")?).ok();
    let pci_bdf = reader.text("PCI address", MAX_BDF_BYTES)?;
    Ok((gpu_index, (!pci_bdf.is_empty()).then_some(pci_bdf)))
}

pub(super) fn put_offer(out: &mut Vec<u8>, offer: &Offer) {
    out.push(transport_code(offer.kind));
    put_counted(out, offer.flavour.as_bytes());
}

pub(super) fn read_num_offers(reader: &mut Reader<'_>) -> Result<usize, DecodeError> {
    match usize::from(reader.u8("number of transports")?) {
        num if num <= MAX_OFFERS => Ok(num),
        num => Err(format!("{num} transports, at most {MAX_OFFERS} are allowed")),
    }
}

/// `None`: a transport that this version does not know.
pub(super) fn read_offer(reader: &mut Reader<'_>) -> Result<Option<Offer>, DecodeError> {
    let kind = transport_of(reader.u8("transport")?);
    let flavour = reader.text("flavour", MAX_FLAVOUR_BYTES)?;
    Ok(kind.map(|kind| Offer { kind, flavour }))
}

const MAGIC: &[u8] = b"SYEM";
const VERSION: u16 = 1;
/// Most transports of an engine.
pub(super) const MAX_OFFERS: usize = 16;
/// Longest PCI address.
pub(super) const MAX_BDF_BYTES: usize = 32;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use p2p_core::endpoint::TransportKind;

    fn metadata() -> EndpointMetadata {
        EndpointMetadata {
            engine_id: 77,
            addr: "10.0.0.7:4791".parse().unwrap(),
            gpu_index: Some(3),
            pci_bdf: Some("0000:3b:00.0".to_owned()),
            transports: vec![
                Offer::plain(TransportKind::Cma),
                Offer { kind: TransportKind::Libfabric, flavour: "tcp;ofi_rxm".to_owned() },
            ],
        }
    }

    #[test]
    fn encoded_values_are_decoded_unchanged() {
        let there = metadata();
        assert_eq!(EndpointMetadata::decode(&there.encode()), Ok(there));
        let plain = EndpointMetadata {
            addr: "[fe80::2]:1".parse().unwrap(),
            gpu_index: None,
            pci_bdf: None,
            transports: Vec::new(),
            ..metadata()
        };
        assert_eq!(EndpointMetadata::decode(&plain.encode()), Ok(plain));
    }

    #[test]
    fn every_cut_is_noticed() {
        let bytes = metadata().encode();
        for len in 0..bytes.len() {
            assert!(EndpointMetadata::decode(&bytes[..len]).is_err(), "{len} bytes");
        }
        let longer = [&bytes[..], &[0]].concat();
        assert!(EndpointMetadata::decode(&longer).unwrap_err().contains("follow"));
    }

    #[test]
    fn no_more_transports_are_read_than_are_written() {
        let with = |num| EndpointMetadata {
            transports: vec![Offer::plain(TransportKind::Cma); num],
            ..metadata()
        };
        assert_eq!(EndpointMetadata::decode(&with(17).encode()), Ok(with(16)));

        let mut bytes = with(16).encode();
        let len = bytes.len();
        let offer_bytes = with(16).encode().len() - with(15).encode().len();
        let num_at = len - 16 * offer_bytes - 1;
        assert_eq!(bytes[num_at], 16);
        bytes[num_at] = 17;
        bytes.extend_from_within(len - offer_bytes..);
        let error = EndpointMetadata::decode(&bytes).unwrap_err();
        assert!(error.contains("17 transports, at most 16"), "{error}");
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = EndpointMetadata::decode(&bytes);
            let with_head = [MAGIC, &VERSION.to_le_bytes(), &bytes[..]].concat();
            let _ = EndpointMetadata::decode(&with_head);
        }
    }
}
