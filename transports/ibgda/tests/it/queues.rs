//! Common properties of queues of verbs and of DevX, against the stand-in of `mock/mlx5.c`: the pages that they
//! share, the numbers of their first packets, and the handling of unusable ones.

use std::collections::BTreeSet;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex};

use crate::mock::{CLEAN, Mock, MockState, PATHS, join, rejoin};
use switchyard_ibgda::access::{
    Access, AccessError, Guard, HostRange, Mapping, SharedMemory, Space,
};
use switchyard_ibgda::{HostAccess, Nic, OpenPeer, Peer, PeerConfig, QueueConfig, QueuePath};

const SLOT_BYTES: usize = 4096;
/// Offset of the first packet number in a description.
const PSN_AT: usize = 44;

fn config(path: QueuePath, num_queues: usize) -> PeerConfig {
    PeerConfig {
        peer: 1,
        num_queues,
        queue: QueueConfig { path, depth: 128, ..QueueConfig::default() },
        own_slot_bytes: SLOT_BYTES,
        peer_slot_bytes: SLOT_BYTES,
    }
}

fn open(nic: &Arc<Nic>, access: &Arc<dyn Access>, path: QueuePath) -> OpenPeer {
    OpenPeer::open(nic, access, config(path, 3)).unwrap()
}

fn pair(nic: &Arc<Nic>, path: QueuePath) -> [Peer; 2] {
    let access: Arc<dyn Access> = Arc::new(HostAccess);
    join(open(nic, &access, path), open(nic, &access, path))
}

/// Pages that are known, by their first byte.
type Known = Arc<Mutex<BTreeSet<usize>>>;

/// Takes a page once, as CUDA does for all GPUs of a process, which see it elsewhere.
#[derive(Debug)]
struct OnceAccess(Known);

/// Far from where the process has its pages.
const ELSEWHERE: u64 = 1 << 50;

#[derive(Debug)]
struct OncePages {
    known: Known,
    pages: Vec<usize>,
}

impl Guard for OncePages {}

impl Drop for OncePages {
    fn drop(&mut self) {
        let mut known = self.known.lock().unwrap();
        assert!(self.pages.iter().all(|page| known.remove(page)));
    }
}

impl Access for OnceAccess {
    fn space(&self) -> Space {
        Space("once")
    }

    fn alloc(&self, bytes: usize) -> Result<Box<dyn SharedMemory>, AccessError> {
        HostAccess.alloc(bytes)
    }

    unsafe fn map(
        &self,
        pages: NonNull<u8>,
        bytes: usize,
        kind: HostRange,
    ) -> Result<Mapping, AccessError> {
        let begin = pages.addr().get();
        let pages: Vec<usize> = (begin..begin + bytes).step_by(4096).collect();
        let mut known = self.0.lock().unwrap();
        if let Some(page) = pages.iter().find(|page| known.contains(*page)) {
            let what = format!("{kind:?} at {page:#x}");
            let detail = "712: registered already".to_owned();
            return Err(AccessError::Other { what, bytes, detail });
        }
        known.extend(&pages);
        let guard = OncePages { known: Arc::clone(&self.0), pages };
        Ok(Mapping { address: begin as u64 + ELSEWHERE, guard: Some(Box::new(guard)) })
    }
}

#[test]
fn pages_that_queues_of_many_peers_share_are_mapped_once() {
    let Some(mock) = Mock::open() else { return };
    mock.on_both_paths(|path, nic| {
        let known = Known::default();
        // Two GPUs of one process.
        let accesses: [Arc<dyn Access>; 2] =
            std::array::from_fn(|_| Arc::new(OnceAccess(Arc::clone(&known))) as Arc<dyn Access>);
        let first = open(nic, &accesses[0], path);
        let peers = join(open(nic, &accesses[1], path), open(nic, &accesses[0], path));
        for queue in peers.iter().flat_map(Peer::queues) {
            let (handle, made) = (queue.handle(), mock.queue(queue.qpn()));
            assert_eq!(handle.doorbell, made.doorbell + ELSEWHERE, "{path:?}");
            if path == QueuePath::Plain {
                assert_eq!(handle.dbrec, made.dbrec + ELSEWHERE);
                assert_eq!(handle.sq, made.sq + ELSEWHERE);
            }
        }
        // The queue that mapped the pages first may be dropped first.
        drop(first);
        let doorbell = usize::try_from(mock.queue(peers[0].queues()[0].qpn()).doorbell).unwrap();
        let is_known = || known.lock().unwrap().contains(&(doorbell / 4096 * 4096));
        assert!(is_known(), "{path:?}");
        drop(open(nic, &accesses[1], path));
        assert!(is_known(), "{path:?}");
        drop(peers);
        assert!(known.lock().unwrap().is_empty(), "{path:?}: pages stay mapped");
        drop(open(nic, &accesses[0], path));
    });
}

/// Numbers of the first packets that a peer's queues send and expect.
fn first_packets(mock: &Mock, peer: &Peer) -> Vec<(u32, u32)> {
    let made = peer.queues().iter().map(|queue| mock.queue(queue.qpn()));
    made.map(|made| (made.first_sent, made.first_expected)).collect()
}

#[test]
fn every_life_of_a_queue_begins_with_a_packet_number_of_its_own() {
    let Some(mock) = Mock::open() else { return };
    mock.on_both_paths(|path, nic| {
        let [mut one, mut other] = pair(nic, path);
        let mut before = Vec::new();
        for round in 0..4 {
            let (of_one, of_other) = (first_packets(&mock, &one), first_packets(&mock, &other));
            for ((sent, expected), (other_sent, other_expected)) in of_one.iter().zip(&of_other) {
                assert_eq!((sent, other_sent), (other_expected, expected), "{path:?} {round}");
                assert!(*sent < 1 << 24 && *other_sent < 1 << 24);
            }
            assert_eq!(of_one.len(), 3);
            let sent = vec![of_one[0].0, of_other[0].0];
            assert!(sent.iter().zip(&before).all(|(now, before)| now != before), "{round}");
            before = sent;
            [one, other] = rejoin([one, other]);
        }
    });
}

#[test]
fn peers_do_not_all_begin_with_the_same_packet_number() {
    let Some(mock) = Mock::open() else { return };
    mock.change(|state| *state = CLEAN);
    let nic = mock.nic();
    let access: Arc<dyn Access> = Arc::new(HostAccess);
    let number = |_| {
        let description = open(&nic, &access, QueuePath::Plain).description();
        description[PSN_AT..PSN_AT + 4].to_vec()
    };
    let numbers: BTreeSet<Vec<u8>> = (0..8).map(number).collect();
    assert!(numbers.len() > 1, "{numbers:?}");
    drop((access, nic));
    mock.settle();
}

#[test]
fn a_peer_that_was_not_reset_or_is_elsewhere_is_not_joined_again() {
    let Some(mock) = Mock::open() else { return };
    let cases: [(&str, usize, u8); 7] = [
        ("`mtu`", 2, 1),
        ("`lid`", 4, 1),
        ("`gid`", 8, 1),
        ("`gid`", 23, 1),
        ("`slot address`", 24, 64),
        ("`slot key`", 40, 1),
        ("`queue pair`", 48, 1),
    ];
    for path in PATHS {
        let refuse = |change: &dyn Fn(&mut [u8])| {
            mock.change(|state| *state = CLEAN);
            let nic = mock.nic();
            let [one, other] = pair(&nic, path);
            let (reset, other) = (one.reset().unwrap(), other.reset().unwrap());
            let mut description = other.description();
            change(&mut description);
            let text = reset.rejoin(&description).unwrap_err().to_string();
            drop((other, nic));
            mock.settle();
            text
        };
        for (field, at, bit) in cases {
            let text = refuse(&|description| description[at] ^= bit);
            assert!(text.contains(field) && text.contains("as before the reset"), "{text}");
        }
        // Bytes that lack something are refused as at first.
        assert!(refuse(&|description| description[0] = 1).contains("`version` is 1, expected 2"));
        mock.change(|state| *state = CLEAN);
        let nic = mock.nic();
        let access: Arc<dyn Access> = Arc::new(HostAccess);
        let (one, other) = (open(&nic, &access, path), open(&nic, &access, path));
        let former = other.description();
        let [one, other] = join(one, other);
        let text = one.reset().unwrap().rejoin(&former).unwrap_err().to_string();
        assert!(text.contains("`psn`") && text.contains("another than before"), "{text}");
        drop((other, nic));
        mock.settle();
    }
}

/// No receive is posted: a write with immediate data must fail.
#[test]
fn requests_that_wait_for_receives_end() {
    let Some(mock) = Mock::open() else { return };
    mock.on_both_paths(|path, nic| {
        let peers = pair(nic, path);
        for queue in peers.iter().flat_map(Peer::queues) {
            assert_eq!(mock.queue(queue.qpn()).rnr_retries, 6, "7 is for ever");
        }
    });
}

#[test]
fn a_queue_that_posters_cannot_use_is_refused_where_it_is_made() {
    let Some(mock) = Mock::open() else { return };
    mock.change(|state| *state = MockState { sq_skip: 16, ..CLEAN });
    let nic = mock.nic();
    let num_live = mock.get().num_live;
    let access: Arc<dyn Access> = Arc::new(HostAccess);
    let refused = OpenPeer::open(&nic, &access, config(QueuePath::Plain, 2));
    let text = refused.unwrap_err().to_string();
    for part in ["queue 0: mlx5_7: queue pair 0x", "sq is null or not aligned to 64 bytes"] {
        assert!(text.contains(part), "{text}");
    }
    assert_eq!(mock.get().num_live, num_live);
    drop(nic);
    mock.settle();
}

#[test]
fn an_address_handle_without_a_vector_is_no_success() {
    let Some(mock) = Mock::open() else { return };
    mock.change(|state| *state = MockState { has_vector: 0, ..CLEAN });
    let nic = mock.nic();
    let access: Arc<dyn Access> = Arc::new(HostAccess);
    let [one, other] = [(); 2].map(|()| open(&nic, &access, QueuePath::Devx));
    let text = one.join(&other.description()).unwrap_err().to_string();
    for part in ["mlx5dv_init_obj of an address handle failed: Protocol error", "another version"] {
        assert!(text.contains(part), "{text}");
    }
    drop((other, nic));
    mock.settle();
}
