//! Identity of a process and its host, to tell whether two peers share a process or can share
//! memory.

use std::os::unix::fs::MetadataExt;
use std::sync::OnceLock;

#[cfg(not(loom))]
use crate::network::Offer;

/// Identity of a running kernel, of a network namespace within it, and of a process, as far as they
/// can be read.
///
/// Equal identities are a necessary sign, not a proof: a virtual machine that was cloned while it
/// ran keeps its identity. The proof is the rendezvous over an abstract Unix socket, which is not
/// reachable from outside the kernel and the network namespace.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HostIdentity {
    /// `boot_id` of the kernel. Random if the system does not tell it, so that it equals no other.
    pub boot_id: [u8; 16],
    /// Device and inode of the network namespace, which abstract Unix sockets do not cross.
    pub net_namespace: [u64; 2],
    /// A random number of this process, and its process id, which differs after a fork.
    pub process: [u64; 2],
}

impl HostIdentity {
    /// Returns the identity of this process and its host.
    #[must_use]
    pub fn of_this_process() -> Self {
        let boot_id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id")
            .ok()
            .and_then(|text| parse_uuid(text.trim()))
            .unwrap_or_else(rand::random);
        let net_namespace = std::fs::metadata("/proc/self/ns/net")
            .map_or_else(|_| rand::random(), |meta| [meta.dev(), meta.ino()]);
        static PROCESS: OnceLock<u64> = OnceLock::new();
        let process = [*PROCESS.get_or_init(rand::random), std::process::id().into()];
        Self { boot_id, net_namespace, process }
    }

    /// Tells whether `peer` is this very process.
    #[must_use]
    pub fn is_same_process(&self, peer: &Self) -> bool {
        self == peer
    }

    /// Returns the reason why shared memory cannot join this process and `peer`, or `None` if there
    /// is none.
    #[must_use]
    pub fn obstacle_to_sharing(&self, peer: &Self) -> Option<&'static str> {
        if self.boot_id != peer.boot_id {
            Some("the peers run on different hosts")
        } else if self.net_namespace != peer.net_namespace {
            Some("the peers run in different network namespaces of one host")
        } else {
            None
        }
    }
}

/// Names of transports, for messages.
#[cfg(not(loom))]
pub fn names(offers: &[Offer]) -> String {
    match offers {
        [] => "nothing".to_owned(),
        all => all.iter().map(ToString::to_string).collect::<Vec<_>>().join(", "),
    }
}

fn parse_uuid(text: &str) -> Option<[u8; 16]> {
    let digits: Vec<u8> = text
        .bytes()
        .filter(|b| *b != b'-')
        .map(|b| (b as char).to_digit(16).map(|d| d as u8))
        .collect::<Option<_>>()?;
    let mut out = [0; 16];
    if digits.len() != 32 {
        return None;
    }
    for (byte, pair) in out.iter_mut().zip(digits.chunks_exact(2)) {
        *byte = pair[0] << 4 | pair[1];
    }
    Some(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_identity_is_stable_and_differences_are_named() {
        let here = HostIdentity::of_this_process();
        assert_eq!(here, HostIdentity::of_this_process());
        assert_eq!(here.obstacle_to_sharing(&here), None);
        assert!(here.is_same_process(&here));
        let mut other = here;
        other.process[1] ^= 1;
        assert!(!here.is_same_process(&other) && here.obstacle_to_sharing(&other).is_none());
        other.net_namespace[1] ^= 1;
        assert!(here.obstacle_to_sharing(&other).is_some_and(|why| why.contains("namespaces")));
        other.boot_id[3] ^= 1;
        assert!(here.obstacle_to_sharing(&other).is_some_and(|why| why.contains("hosts")));
    }

    #[test]
    fn identifiers_are_parsed_or_refused() {
        assert_eq!(
            parse_uuid("00112233-4455-6677-8899-aabbccddeeff"),
            Some([
                0, 0x11, 0x22, 0x33, 0x44, 0x55, 0x66, 0x77, 0x88, 0x99, 0xaa, 0xbb, 0xcc, 0xdd,
                0xee, 0xff
            ])
        );
        for bad in ["", "0011", "zz112233-4455-6677-8899-aabbccddeeff"] {
            assert_eq!(parse_uuid(bad), None);
        }
    }
}
