//! The listening side's checks of a peer, in order, and its reasons to refuse.

use std::hint::black_box;

use super::wire::{DeviceDescription, Hello, WireError};
use super::{ListenerConfig, Reject, RejectCode};
use crate::endpoint::TransportKind;
use crate::host::{HostIdentity, names};
use crate::network::{Offer, network_of, offers};
use crate::slot::SlotConfig;

/// Checks that the peer knows the listener's secret, if there is one.
pub(super) fn check_secret(config: &ListenerConfig, hello: &Hello) -> Result<(), Reject> {
    let Some(expected) = &config.secret else { return Ok(()) };
    if equal_in_constant_time(expected.as_bytes(), &hello.secret) {
        return Ok(());
    }
    let found = if hello.secret.is_empty() { "no secret" } else { "a wrong secret" };
    let message = format!("{found} was shown; this listener wants its own, see its configuration");
    Err(Reject::new(RejectCode::SECRET, message))
}

/// Checks that both sides want the same slots.
pub(super) fn check_slot(config: &ListenerConfig, hello: &Hello) -> Result<(), Reject> {
    let SlotConfig { slot_bytes, num_frames } = config.slot;
    if hello.slot_bytes == slot_bytes as u64 && hello.num_frames as usize == num_frames {
        return Ok(());
    }
    let message = format!(
        "the listener has slots of {slot_bytes} bytes with {num_frames} frames, the connecting side wants {} bytes with {} frames; set both alike",
        hello.slot_bytes, hello.num_frames
    );
    Err(Reject::new(RejectCode::SLOT_MISMATCH, message))
}

/// Checks that both sides want the same device slots, or neither wants any.
pub(super) fn check_device(config: &ListenerConfig, hello: &Hello) -> Result<(), Reject> {
    let reject = |message: String| Err(Reject::new(RejectCode::DEVICE, message));
    match (&config.device, &hello.device) {
        (None, None) => Ok(()),
        (Some(_), None) => reject(
            "the listener serves from the memory of its GPU, the connecting side brings no GPU; connect with a device, or to a listener on CPUs".to_owned(),
        ),
        (None, Some(_)) => reject(
            "the connecting side brings a GPU, the listener has no device slots; connect without a device, or to a listener on a GPU".to_owned(),
        ),
        (Some(side), Some(theirs)) => {
            let sizes = (side.own_slot_bytes(), side.peer_slot_bytes());
            if sizes == (theirs.peer_bytes, theirs.own_bytes) && side.shape() == theirs.shape {
                return Ok(());
            }
            let ours = DeviceDescription {
                own_bytes: sizes.1,
                peer_bytes: sizes.0,
                shape: side.shape().to_vec(),
            };
            reject(format!(
                "the listener has device slots of {}, the connecting side wants {}; set both alike",
                text_of(&ours),
                text_of(theirs)
            ))
        }
    }
}

/// Returns the transports of the peer's list that this side offers and that can work, in the peer's
/// order. There is at least one.
pub(super) fn choose_transports(
    config: &ListenerConfig,
    host: &HostIdentity,
    hello: &Hello,
) -> Result<Vec<Offer>, Reject> {
    let obstacle = host.obstacle_to_sharing(&hello.host);
    let mut here = offers(&config.transports, &config.networks, config.device.is_some());
    if config.device.is_some() {
        // Descriptors of GPU memory travel like descriptors of shared memory. A network must be
        // able to carry device slots.
        here.retain(|offer| {
            let network = network_of(offer, &config.networks);
            !offer.kind.is_network() || network.is_some_and(|n| n.carries_device_slots())
        });
    }
    let works = |offer: &&Offer| {
        here.contains(offer)
            && match offer.kind {
                TransportKind::Shm | TransportKind::CudaIpc => obstacle.is_none(),
                #[cfg(feature = "test-transports")]
                TransportKind::Staged => obstacle.is_none(),
                TransportKind::Local => host.is_same_process(&hello.host),
                // These belong to the message engine and have no endpoints.
                TransportKind::Tcp | TransportKind::Cma => false,
                TransportKind::Verbs | TransportKind::Libfabric | TransportKind::Ibgda => true,
                #[cfg(feature = "test-transports")]
                TransportKind::SoftNic => true,
            }
    };
    let choices: Vec<Offer> = hello.offers.iter().filter(works).cloned().collect();
    if choices.is_empty() {
        let mut message = format!(
            "the listener offers {}, the connecting side offers {}",
            names(&here),
            names(&hello.offers)
        );
        if let Some(obstacle) = obstacle {
            message.push_str(&format!("; shared memory is out because {obstacle}"));
        }
        if config.device.is_some() {
            message.push_str(
                "; device slots need both sides on one host, or a network that both name",
            );
        }
        return Err(Reject::new(RejectCode::NO_TRANSPORT, message));
    }
    Ok(choices)
}

/// Shows both sizes and the shape. A peer may have written any byte of them.
fn text_of(device: &DeviceDescription) -> String {
    let shape: String = String::from_utf8_lossy(&device.shape)
        .chars()
        .map(|c| if c.is_control() { char::REPLACEMENT_CHARACTER } else { c })
        .collect();
    format!(
        "{} bytes at the connecting side and {} at the listener ({shape})",
        device.own_bytes, device.peer_bytes
    )
}

/// Makes the rejection for a message that was not understood.
pub(super) fn refusal_of(error: &WireError) -> Reject {
    let code = match error {
        WireError::Magic { found } if found[0] == TLS_HANDSHAKE => {
            let message = "the connecting side speaks TLS, and the listener has no certificate; start the listener with --tls DIR";
            return Reject::new(RejectCode::TLS, message);
        }
        WireError::Version { .. } => RejectCode::VERSION,
        _ => RejectCode::MALFORMED,
    };
    Reject::new(code, error.to_string())
}

/// Compares in a time that does not depend on the contents. The lengths are not secret.
pub fn equal_in_constant_time(expected: &[u8], found: &[u8]) -> bool {
    expected.len() == found.len()
        && black_box(expected.iter().zip(found).fold(0, |diff, (a, b)| black_box(diff | (a ^ b))))
            == 0
}

/// First byte of a TLS handshake, see RFC 8446, section 5.1.
const TLS_HANDSHAKE: u8 = 22;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secrets_are_equal_only_when_they_are() {
        for (a, b, equal) in [
            ("", "", true),
            ("secret", "secret", true),
            ("secret", "secreT", false),
            ("secret", "secre", false),
            ("secret", "", false),
        ] {
            assert_eq!(equal_in_constant_time(a.as_bytes(), b.as_bytes()), equal, "{a} {b}");
        }
    }
}
