//! Pairs of sides over NICs in software behind the calls of libibverbs and libmlx5: handles for hosts and kernels,
//! reports of failures, and invalid bytes, which must leave nothing behind.

use std::sync::Arc;

use crate::rig::{
    NUM_FRAMES, PATIENCE, ROUTE, check_drivers, gpu, host_layout, join_sides, memory, nic,
    open_sides, own_word, sides_of, turn, until, with_pair,
};
use ibgda::{Doorbell, QueueConfig, QueuePath};
use kernels::abi::{DevicePtr, PATH_IBGDA};
use kernels::gpu::Gpu;
use kernels::mlx5::{PeerHandle, QueueHandle};
use kernels::slots::{DevicePair, DeviceSide};
use p2p_core::TransportKind;
use p2p_core::endpoint::Endpoint;
use p2p_core::network::{
    JoinedSide, MAX_DETAIL_BYTES, Network, NetworkError, OpenSide, Route, SideDescription,
};
use p2p_core::slot::CONTROL_BYTES;
use softnic::SoftNetwork;
use softnic::format::Syndrome;
use switchyard_ibgda_network::detail::{Detail, HEAD_BYTES};
use switchyard_ibgda_network::{DeviceConfig, DeviceNetwork, SlotPlace};

const REQUEST_BYTES: u64 = 8192;
const RESPONSE_BYTES: u64 = 4160;

fn network(config: DeviceConfig) -> DeviceNetwork {
    let inner = SoftNetwork::open(softnic::NicConfig::default()).expect("a NIC in software");
    DeviceNetwork::new(Arc::new(inner), nic(), config)
}

fn config(path: QueuePath, num_queues: usize) -> DeviceConfig {
    let queue = QueueConfig { path, depth: 128, ..QueueConfig::default() };
    DeviceConfig { num_queues, queue, slots: SlotPlace::Gpu, wait_limit: PATIENCE }
}

/// Both sides' networks, with slots at these places.
fn networks(path: QueuePath, num_queues: usize, places: [SlotPlace; 2]) -> [DeviceNetwork; 2] {
    places.map(|slots| network(DeviceConfig { slots, ..config(path, num_queues) }))
}

/// Memory that one GPU reaches and another does not is a GPU's.
fn is_on_a_gpu(address: u64) -> bool {
    let is_known = |ordinal| {
        let gpu = Gpu::open_emulated(ordinal).expect("a GPU in software");
        gpu.is_registered(DevicePtr(address))
    };
    is_known(0) != is_known(1)
}

/// Value at an address of a GPU in software, which this process reaches as its own.
fn in_software<T: Copy>(address: u64) -> T {
    let at = usize::try_from(address).expect("an address");
    // SAFETY: a table that was written whole when the link was made, and is not written since.
    unsafe { std::ptr::with_exposed_provenance::<T>(at).read() }
}

fn sides() -> [DeviceSide; 2] {
    sides_of(REQUEST_BYTES, RESPONSE_BYTES)
}

fn open(networks: [&DeviceNetwork; 2]) -> [Box<dyn OpenSide>; 2] {
    open_sides(networks, &sides())
}

fn join(networks: [&DeviceNetwork; 2]) -> [(JoinedSide, DevicePair); 2] {
    join_sides(open(networks))
}

/// Queue pairs and registrations of the NIC that kernels post to, and free memory of GPUs, which registered
/// pages of hosts count against as well.
fn holdings() -> (Vec<u32>, usize, u64) {
    let nic = softnic_verbs::nic().expect("a NIC").lock();
    (nic.queue_pairs(), nic.num_registrations(), gpu().free_bytes().expect("software"))
}

/// libibverbs makes the host's queue, the only kind that it supports, whatever kind the kernels' queues are.
#[test]
fn the_hosts_queue_has_a_record_where_those_of_kernels_have_none() {
    let _turn = turn();
    let [one, other] = [(), ()].map(|()| {
        let mut config = config(QueuePath::Devx, 2);
        config.queue.doorbell = Doorbell::RegisterAlone;
        network(config)
    });
    let pairs = join([&one, &other]);
    let from = pairs[0].1.as_remote().expect("a remote path");
    from.show_life(0).expect("in service");
    until("a sign of life", || own_word(&pairs[1].1, 0) == 1);
}

#[test]
fn hosts_and_kernels_are_given_what_they_need_and_nothing_is_left() {
    let _turn = turn();
    let before = {
        let _nic = nic();
        holdings()
    };
    let (gpu, host) = (SlotPlace::Gpu, SlotPlace::Host);
    for (path, num_queues, places) in [
        (QueuePath::Plain, 3, [gpu, gpu]),
        (QueuePath::Devx, 1, [gpu, host]),
        (QueuePath::Devx, 2, [host, gpu]),
        (QueuePath::Plain, 3, [host, host]),
        (QueuePath::Plain, 64, [SlotPlace::Auto, SlotPlace::Auto]),
    ] {
        let networks = networks(path, num_queues, places);
        for network in &networks {
            assert_eq!(network.kind(), TransportKind::Ibgda);
            let begin = format!("ethx{num_queues}:softnic:");
            assert!(network.flavour().starts_with(&begin), "{}", network.flavour());
            assert!(network.flavour().len() <= p2p_core::network::MAX_FLAVOUR_BYTES);
            assert!(network.carries_device_slots());
            assert_eq!(network.rdma_device(), Some("softnic_0"));
        }
        let pairs = join([&networks[0], &networks[1]]);
        // Queues of the kernels, and the host's, at both ends.
        assert_eq!(holdings().0.len(), before.0.len() + 2 * (num_queues + 1));
        for (((joined, pair), [own, peer]), place) in pairs
            .iter()
            .zip([[RESPONSE_BYTES, REQUEST_BYTES], [REQUEST_BYTES, RESPONSE_BYTES]])
            .zip(places)
        {
            assert_eq!(joined.endpoint.kind(), TransportKind::Ibgda);
            // Independent of the size of device slots.
            assert_eq!(joined.slot.len(), CONTROL_BYTES + NUM_FRAMES * 4096);
            assert_eq!((pair.own_bytes(), pair.peer_bytes()), (own, peer));
            let link = pair.link();
            assert_eq!(link.path, PATH_IBGDA);
            assert!(link.window.0.is_multiple_of(64) && link.context != 0);
            assert!(pair.own().0.is_multiple_of(64) && pair.own_memory().len() >= own);
            // Auto finds that the NIC can have a GPU's memory, which this process has no address of.
            let is_in_gpu = place != SlotPlace::Host;
            assert_eq!(pair.own_memory().host().is_none(), is_in_gpu, "{place}");
            for slot in [pair.own(), link.window] {
                assert_eq!(is_on_a_gpu(slot.0), is_in_gpu, "{place}");
            }
            // Data and counts of kernels alone are near them. Data that the NIC or the host reads is not.
            let peer: PeerHandle = in_software(link.context);
            let queue: QueueHandle = in_software(peer.qps);
            for (address, is_near) in [
                (link.context, true),
                (peer.qps, true),
                (queue.state, true),
                (queue.host_error, false),
                (queue.scratch, false),
                (queue.sq, false),
                (queue.cq, false),
            ] {
                assert_eq!(is_on_a_gpu(address), is_near, "{place}: {queue:x?}");
            }
            let remote = pair.as_remote().expect("a remote path");
            remote.health().expect("in service");
        }
        // Signs of life of either side arrive in the other's slot, by the NIC.
        let num_requests = softnic_verbs::nic().expect("a NIC").lock().num_requests();
        for (from, to, offset) in [(0, 1, REQUEST_BYTES - 8), (1, 0, 264), (1, 0, 0)] {
            let remote = pairs[from].1.as_remote().expect("a remote path");
            for num in 1..=300 {
                let seen = own_word(&pairs[to].1, offset);
                remote.show_life(offset).expect("in service");
                until("a sign of life", || own_word(&pairs[to].1, offset) > seen);
                assert_eq!(own_word(&pairs[to].1, offset), num);
            }
        }
        let executed = softnic_verbs::nic().expect("a NIC").lock().num_requests() - num_requests;
        assert_eq!(executed, 900);
        // Many adds under way suffice as a sign of life.
        let remote = pairs[0].1.as_remote().expect("a remote path");
        for _ in 0..5000 {
            remote.show_life(8).expect("in service");
        }
        until("some of many", || own_word(&pairs[1].1, 8) > 0);
        for offset in [RESPONSE_BYTES, RESPONSE_BYTES - 7, 4, u64::MAX] {
            let remote = pairs[1].1.as_remote().expect("a remote path");
            let refused = remote.show_life(offset).expect_err("no word of the slot");
            let is_local = ["leave the peer's region", "is not a multiple of 8"];
            assert!(is_local.iter().any(|part| refused.detail.contains(part)), "{refused}");
            remote.health().expect("nothing was posted");
        }
        // In whichever order a link's parts go.
        let [(client, client_pair), (server, server_pair)] = pairs;
        drop(client);
        client_pair.as_remote().expect("a remote path").health().expect("the kernels' path works");
        drop((client_pair, server_pair, server));
        assert_eq!(holdings(), before);
    }
    check_drivers();
}

#[test]
fn slots_lie_in_the_memory_of_the_host_where_the_nic_cannot_have_a_gpus() {
    let _turn = turn();
    let (auto, gpu, host) = (SlotPlace::Auto, SlotPlace::Gpu, SlotPlace::Host);
    let networks = networks(QueuePath::Plain, 2, [auto, host]);
    let strict = network(DeviceConfig { slots: gpu, ..config(QueuePath::Plain, 2) });
    let before = holdings();
    softnic_verbs::refuse_memory(Some(is_on_a_gpu));
    // More than once, though it is logged once.
    for _ in 0..2 {
        let pairs = join([&networks[0], &networks[1]]);
        for (_, pair) in &pairs {
            assert!(pair.own_memory().host().is_some());
            assert!(!is_on_a_gpu(pair.own().0) && !is_on_a_gpu(pair.link().window.0));
        }
        for (from, to) in [(0, 1), (1, 0)] {
            pairs[from].1.as_remote().expect("a remote path").show_life(8).expect("in service");
            until("a sign of life", || own_word(&pairs[to].1, 8) > 0);
        }
        drop(pairs);
        assert_eq!(holdings(), before);
    }
    // A side that accepts nothing else gets the reason.
    let [client, _] = sides();
    let layout = host_layout(&strict, &client);
    let refused =
        strict.open_device(&layout, ROUTE, &*memory(&client)).expect_err("no memory of a GPU");
    softnic_verbs::refuse_memory(None);
    for part in ["softnic_0", "GPU memory", "nvidia_peermem"] {
        assert!(refused.to_string().contains(part), "{part}: {refused}");
    }
    assert_eq!(holdings(), before);
    // As soon as it can have it, it has it.
    let pairs = join([&networks[0], &strict]);
    assert!(pairs.iter().all(|(_, pair)| is_on_a_gpu(pair.own().0)));
    drop(pairs);
    assert_eq!(holdings(), before);
}

/// Another place of slots is no remedy for a GPU's exhausted memory.
#[test]
fn slots_that_a_gpu_has_no_room_for_are_refused() {
    let _turn = turn();
    let network = network(DeviceConfig { slots: SlotPlace::Auto, ..config(QueuePath::Plain, 1) });
    let before = holdings();
    let [client, _] = sides();
    let layout = host_layout(&network, &client);
    let large = DeviceSide { own_slot_bytes: 1 << 62, ..client };
    let refused = network.open_device(&layout, ROUTE, &*memory(&large)).expect_err("no room");
    assert!(refused.to_string().contains("memory of GPU 0"), "{refused}");
    assert_eq!(holdings(), before);
}

#[test]
fn a_failed_queue_is_told_from_then_on() {
    let _turn = turn();
    failed_queue([SlotPlace::Gpu, SlotPlace::Gpu]);
    failed_queue([SlotPlace::Host, SlotPlace::Host]);
}

fn failed_queue(places: [SlotPlace; 2]) {
    let networks = networks(QueuePath::Plain, 2, places);
    let known = holdings().0;
    let pairs = join([&networks[0], &networks[1]]);
    let new: Vec<u32> = holdings().0.into_iter().filter(|qpn| !known.contains(qpn)).collect();
    // The client's two and its host's, then the server's.
    let [_, _, _, _, _, servers] = new[..] else { panic!("{new:?}") };
    softnic_verbs::fail(servers, 5, Syndrome::RetryExceeded).expect("a queue pair");
    let remote = pairs[1].1.as_remote().expect("a remote path");
    let mut error = None;
    until("a failure", || {
        error = remote.show_life(0).err();
        error.is_some()
    });
    let told = error.expect("a failure").to_string();
    for part in [format!("{servers:#x}"), "syndrome 0x15".to_owned()] {
        assert!(told.contains(&part), "{told}");
    }
    assert!(remote.health().is_err() && remote.show_life(0).is_err());
    assert!(own_word(&pairs[0].1, 0) >= 5);
    // A pair that is out of service answers no request: the other end notices when it posts.
    let remote = pairs[0].1.as_remote().expect("a remote path");
    until("a failure", || remote.show_life(0).is_err());
    assert!(remote.health().is_err());
}

#[test]
fn a_nic_that_stands_still_holds_up_no_host() {
    let _turn = turn();
    let networks = [network(config(QueuePath::Plain, 2)), network(config(QueuePath::Plain, 2))];
    let known = holdings().0;
    let pairs = join([&networks[0], &networks[1]]);
    for qpn in holdings().0.into_iter().filter(|qpn| !known.contains(qpn)) {
        softnic_verbs::stall(qpn).expect("a queue pair");
    }
    let remote = pairs[0].1.as_remote().expect("a remote path");
    for _ in 0..1000 {
        remote.show_life(0).expect("it goes nowhere, and nobody knows");
    }
    remote.health().expect("nothing has failed");
    assert_eq!(own_word(&pairs[1].1, 0), 0);
    drop(pairs);
    assert_eq!(holdings().0, known);
}

#[test]
fn slots_of_hosts_are_refused() {
    let _turn = turn();
    let network = network(config(QueuePath::Plain, 1));
    let [client, _] = sides();
    let layout = host_layout(&network, &client);
    let refused = network.open(&layout, ROUTE).expect_err("no slots of hosts");
    assert!(refused.to_string().contains("slots of GPUs"), "{refused}");
    let side = network.open_device(&layout, ROUTE, &*memory(&client)).expect("a side");
    let theirs = side.description();
    side.join(&theirs).expect_err("no slots of hosts");
}

/// A network underneath that leaves no room.
#[derive(Debug)]
struct Wordy(SoftNetwork);

#[derive(Debug)]
struct WordySide(Box<dyn OpenSide>);

impl Network for Wordy {
    fn kind(&self) -> TransportKind {
        self.0.kind()
    }

    fn flavour(&self) -> &str {
        self.0.flavour()
    }

    fn open(
        &self,
        layout: &p2p_core::SlotLayout,
        route: Route,
    ) -> Result<Box<dyn OpenSide>, NetworkError> {
        Ok(Box::new(WordySide(self.0.open(layout, route)?)))
    }
}

impl OpenSide for WordySide {
    fn description(&self) -> SideDescription {
        SideDescription { detail: vec![0; MAX_DETAIL_BYTES - 100], ..self.0.description() }
    }

    fn join(self: Box<Self>, peer: &SideDescription) -> Result<JoinedSide, NetworkError> {
        self.0.join(peer)
    }
}

#[test]
fn what_a_handshake_cannot_carry_is_refused() {
    let _turn = turn();
    let before = {
        let _nic = nic();
        holdings()
    };
    let inner = SoftNetwork::open(softnic::NicConfig::default()).expect("a NIC in software");
    let network = DeviceNetwork::new(Arc::new(Wordy(inner)), nic(), config(QueuePath::Plain, 2));
    let [client, _] = sides();
    let layout = host_layout(&network, &client);
    let refused = network.open_device(&layout, ROUTE, &*memory(&client)).expect_err("no room");
    assert!(refused.to_string().contains("fewer queues"), "{refused}");
    assert_eq!(holdings(), before);
    // And numbers that no queue can have.
    let inner = || Arc::new(SoftNetwork::open(softnic::NicConfig::default()).expect("a NIC"));
    for num_queues in [0, 65] {
        let network = DeviceNetwork::new(inner(), nic(), config(QueuePath::Plain, num_queues));
        let refused =
            network.open_device(&layout, ROUTE, &*memory(&client)).expect_err("no such number");
        assert!(refused.to_string().contains("num_queues"), "{refused}");
    }
    assert_eq!(holdings(), before);
}

#[test]
fn bytes_that_make_no_sense_are_refused_and_leave_nothing() {
    let _turn = turn();
    let networks = [network(config(QueuePath::Plain, 2)), network(config(QueuePath::Plain, 2))];
    let before = holdings();
    let refuse = |what: &str, change: &dyn Fn(&mut SideDescription)| {
        let [client, server] = open([&networks[0], &networks[1]]);
        let mut theirs = server.description();
        change(&mut theirs);
        let refused = client.join_device(&theirs).map(drop);
        let error = refused.expect_err(what);
        assert!(!error.detail.is_empty(), "{what}");
        drop(server);
        assert_eq!(holdings(), before, "{what}");
        error
    };
    // The other part of the handshake.
    let error = refuse("another size", &|theirs| theirs.bytes += 64);
    assert!(error.to_string().contains("expected"), "{error}");
    // Lengths.
    let len = {
        let [client, _server] = open([&networks[0], &networks[1]]);
        client.description().detail.len()
    };
    assert!(len <= MAX_DETAIL_BYTES);
    for cut in [0, 1, HEAD_BYTES - 1, HEAD_BYTES, len / 2, len - 1] {
        refuse("too short", &|theirs| theirs.detail.truncate(cut));
    }
    refuse("too long", &|theirs| theirs.detail.push(0));
    refuse("far too long", &|theirs| theirs.detail.resize(1 << 20, 0xff));
    refuse("another version", &|theirs| theirs.detail[0] ^= 3);
    for (at, len) in [(2, "network's"), (4, "peer's"), (6, "host's")] {
        refuse(len, &|theirs| theirs.detail[at] = theirs.detail[at].wrapping_add(1));
    }
    // The parts, by field: of the kernels' queues and of the host's.
    let part = |theirs: &mut SideDescription, is_host: bool, change: &dyn Fn(&mut Vec<u8>)| {
        let detail = Detail::decode(&theirs.detail).expect("our own");
        let (inner, mut peer, mut host) =
            (detail.inner.to_vec(), detail.peer.to_vec(), detail.host.to_vec());
        change(if is_host { &mut host } else { &mut peer });
        let changed = Detail { inner: &inner, peer: &peer, host: &host };
        theirs.detail = changed.encode().expect("it fits");
    };
    for is_host in [false, true] {
        let refuse = |what: &str, change: &dyn Fn(&mut Vec<u8>)| {
            let error = refuse(what, &|theirs| part(theirs, is_host, change));
            let step = if is_host { "join the host's queue" } else { "join queues of kernels" };
            assert_eq!(error.op, step, "{error}");
        };
        refuse("version", &|bytes| bytes[0] = 77);
        refuse("link layer", &|bytes| bytes[1] = 1);
        refuse("MTU", &|bytes| bytes[2] = 6);
        refuse("number of queues", &|bytes| bytes[3] += 1);
        refuse("no slot", &|bytes| bytes[24..32].fill(0));
        refuse("slot beyond the last address", &|bytes| {
            bytes[24..32].copy_from_slice(&(u64::MAX - 63).to_le_bytes());
        });
        refuse("size of the slot", &|bytes| bytes[32] ^= 0x40);
        refuse("packet number", &|bytes| bytes[47] = 1);
        refuse("queue pair", &|bytes| bytes[51] = 1);
        refuse("a queue too few", &|bytes| bytes.truncate(48));
        refuse("nothing", &|bytes| bytes.clear());
    }
    // A queue pair with the number of another one, or of none: it joins, is unusable, and leaves nothing behind.
    for at in 0..len {
        let [client, server] = open([&networks[0], &networks[1]]);
        let mut theirs = server.description();
        theirs.detail[at] ^= 1 << (at % 8);
        if let Ok(joined) = client.join_device(&theirs) {
            let (_joined, pair) = with_pair(joined);
            let remote = pair.as_remote().expect("a remote path");
            let _ = remote.show_life(0);
            let _ = remote.health();
        }
        drop(server);
        assert_eq!(holdings(), before, "byte {at}");
    }
}
