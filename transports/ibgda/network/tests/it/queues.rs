//! Queues of a pair, for every combination of kinds on both sides: handles for kernels, and arrival of their data.
//! The device functions post, on this machine's processor (`posts/posts.cpp`), to NICs in software behind the
//! calls of libibverbs and libmlx5.

use std::ffi::{CString, c_char, c_int, c_void};
use std::path::Path;
use std::process::Command;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::rig::{
    PATIENCE, ROUTE, check_drivers, gpu, host_layout, join_sides, memory, nic, open_sides,
    own_word, sides_of, turn, until,
};
use ibgda::{Doorbell, QueueConfig, QueuePath};
use kernels::mlx5::{CQ_COLLAPSED, NO_RECORD, PeerHandle, QueueHandle};
use kernels::slots::DevicePair;
use p2p_core::network::Network;
use softnic::SoftNetwork;
use switchyard_ibgda_network::{DeviceConfig, DeviceNetwork, SlotPlace};

const NUM_QUEUES: usize = 3;
/// Of either slot: a piece for each queue, and flags behind them.
const SLOT_BYTES: u64 = 8192;
const PIECE_BYTES: u64 = 2048;
const FLAGS: u64 = 3 * PIECE_BYTES;
/// Two requests each, so that indices go around the queue many times.
const NUM_PUTS: u64 = 1000;

/// A kind of queue, and a doorbell.
type Choice = (QueuePath, Doorbell);

const PLAIN: Choice = (QueuePath::Plain, Doorbell::WithRecord);
const DEVX: Choice = (QueuePath::Devx, Doorbell::WithRecord);
const REGISTER: Choice = (QueuePath::Devx, Doorbell::RegisterAlone);

fn config((path, doorbell): Choice) -> DeviceConfig {
    let queue = QueueConfig { path, doorbell, depth: 128, ..QueueConfig::default() };
    let slots = SlotPlace::Host;
    DeviceConfig { num_queues: NUM_QUEUES, queue, slots, wait_limit: PATIENCE }
}

fn network(choice: Choice) -> DeviceNetwork {
    let inner = SoftNetwork::open(softnic::NicConfig::default()).expect("a NIC in software");
    DeviceNetwork::new(Arc::new(inner), nic(), config(choice))
}

/// Handles of this side's kernels, and its queues.
fn given(pair: &DevicePair) -> (*const PeerHandle, Vec<QueueHandle>) {
    let peer: *const PeerHandle = ptr::with_exposed_provenance(pair.link().context as usize);
    // SAFETY: the context of a link over queues, which lie in pages of this process as long as the pair.
    let (qps, num) = unsafe { ((*peer).qps, (*peer).num_qps) };
    let first: *const QueueHandle = ptr::with_exposed_provenance(qps as usize);
    // SAFETY: this number of handles lies there, and no thread writes them.
    let queues = (0..num as usize).map(|idx| unsafe { first.add(idx).read() }).collect();
    (peer, queues)
}

/// The send word of a queue's doorbell record.
fn record(queue: &QueueHandle) -> u32 {
    let word: *mut u32 = ptr::with_exposed_provenance_mut(queue.dbrec as usize + 4);
    // SAFETY: the record lies in pages of this process, and the pair is there.
    unsafe { AtomicU32::from_ptr(word) }.load(Ordering::Relaxed)
}

fn memory_of(pair: &DevicePair) -> *mut u8 {
    pair.own_memory().host().expect("pages of the host").as_ptr()
}

#[test]
fn what_kernels_post_arrives_however_either_side_makes_its_queues() {
    let _turn = turn();
    let Some(post) = poster() else { return };
    for choices in [
        [PLAIN, PLAIN],
        [DEVX, DEVX],
        [PLAIN, DEVX],
        [REGISTER, REGISTER],
        [REGISTER, PLAIN],
        [DEVX, REGISTER],
    ] {
        let networks = choices.map(network);
        // Nothing that both must have alike.
        assert_eq!(networks[0].flavour(), networks[1].flavour());
        let sides = open_sides([&networks[0], &networks[1]], &sides_of(SLOT_BYTES, SLOT_BYTES));
        let pairs = join_sides(sides).map(|(joined, pair)| {
            drop(joined);
            pair
        });
        for (from, (path, doorbell)) in choices.into_iter().enumerate() {
            let to = 1 - from;
            let (peer, queues) = given(&pairs[from]);
            assert_eq!(queues.len(), NUM_QUEUES);
            let is_devx = path == QueuePath::Devx;
            let is_alone = doorbell == Doorbell::RegisterAlone;
            for queue in &queues {
                assert_eq!(queue.flags & CQ_COLLAPSED != 0, is_devx, "{path}");
                assert_eq!(queue.flags & NO_RECORD != 0, is_alone, "{doorbell}");
            }
            let bytes: Vec<u8> = (0..FLAGS).map(|i| (i * 7 + i / 251) as u8 ^ from as u8).collect();
            let mirror = ptr::with_exposed_provenance_mut(pairs[from].link().window.0 as usize);
            // SAFETY: the mirror has as many bytes as the peer's slot, and nothing is under way.
            unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), mirror, bytes.len()) };
            let executed = || softnic_verbs::nic().expect("a NIC").lock().num_requests();
            let before = executed();
            // SAFETY: the objects of a link, and a slot that has room for pieces and flags.
            let status = unsafe { post(peer, PIECE_BYTES, FLAGS, NUM_PUTS) };
            assert_eq!(status, 0, "{choices:?}, from {from}");
            assert_eq!(executed() - before, 2 * NUM_PUTS * NUM_QUEUES as u64);
            for (queue_idx, queue) in queues.iter().enumerate() {
                let flag = own_word(&pairs[to], FLAGS + 8 * queue_idx as u64);
                assert_eq!(flag, NUM_PUTS, "{choices:?}, queue {queue_idx}");
                assert_eq!(record(queue) == 0, is_alone, "{doorbell}, queue {queue_idx}");
            }
            let mut found = vec![0; bytes.len()];
            // SAFETY: the slot has that many bytes, and nothing is under way.
            unsafe {
                ptr::copy_nonoverlapping(memory_of(&pairs[to]), found.as_mut_ptr(), found.len())
            };
            assert!(found == bytes, "{choices:?}, from {from}: other bytes came");
            // The host's queue is beside them.
            pairs[from]
                .as_remote()
                .expect("a remote path")
                .show_life(SLOT_BYTES - 8)
                .expect("in service");
            until("a sign of life", || own_word(&pairs[to], SLOT_BYTES - 8) == 1);
        }
    }
    check_drivers();
}

#[test]
fn a_choice_that_the_nic_cannot_make_is_refused_before_there_is_a_peer() {
    let _turn = turn();
    let nic = nic();
    for choice in [PLAIN, DEVX, REGISTER] {
        config(choice).queue.check(&nic).expect("all of them");
    }
    let wrong = (QueuePath::Plain, Doorbell::RegisterAlone);
    let error = config(wrong).queue.check(&nic).expect_err("libibverbs makes none").to_string();
    assert!(error.contains("only DevX does"), "{error}");
    let deep = QueueConfig { depth: 65_536, ..config(DEVX).queue };
    let error = deep.check(&nic).expect_err("no such depth").to_string();
    assert!(error.contains("`depth` is 65536"), "{error}");
    // And so it is where a peer comes.
    let network = network(wrong);
    let [client, _] = sides_of(SLOT_BYTES, SLOT_BYTES);
    let free_bytes = gpu().free_bytes().expect("software");
    let layout = host_layout(&network, &client);
    let error = network.open_device(&layout, ROUTE, &*memory(&client)).expect_err("no such queue");
    assert!(error.to_string().contains("only DevX does"), "{error}");
    assert_eq!(gpu().free_bytes().expect("software"), free_bytes);
}

type Post = unsafe extern "C" fn(*const PeerHandle, u64, u64, u64) -> u32;

/// `None` without a C++ compiler. Opened until the process ends.
fn poster() -> Option<Post> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../..");
    let object =
        Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("posts-{}.so", std::process::id()));
    let compiled = Command::new("c++")
        .args(["-std=c++17", "-O1", "-fPIC", "-shared", "-Wall", "-Wextra", "-Werror", "-I"])
        .arg(root.join("kernels/include"))
        .arg(root.join("transports/ibgda/network/tests/it/posts/posts.cpp"))
        .arg("-o")
        .arg(&object)
        .output();
    let compiled = match compiled {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            test_support::skip("cxx", "there is no C++ compiler: install g++");
            return None;
        }
        other => other.expect("a compiler that starts"),
    };
    assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
    let path = CString::new(object.to_str().expect("a path")).expect("a path");
    // SAFETY: a library that was made here, without constructors.
    let symbol = unsafe {
        let library = dlopen(path.as_ptr(), RTLD_NOW);
        assert!(!library.is_null(), "{} cannot be opened", object.display());
        dlsym(library, c"sy_post_on_every_queue".as_ptr())
    };
    std::fs::remove_file(&object).expect("a file of this process");
    assert!(!symbol.is_null());
    // SAFETY: that is its signature in posts.cpp.
    Some(unsafe { std::mem::transmute::<*mut c_void, Post>(symbol) })
}

unsafe extern "C" {
    fn dlopen(path: *const c_char, flags: c_int) -> *mut c_void;
    fn dlsym(handle: *mut c_void, name: *const c_char) -> *mut c_void;
}

const RTLD_NOW: c_int = 2;
