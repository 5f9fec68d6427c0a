//! What the verbs transport does beyond the suite: faults, refusals, whole devices, counters. Runs where
//! there is a device; `tests/rxe/` provides one.
#![cfg(all(feature = "verbs", not(loom)))]

use std::io::{BufRead, BufReader, Write};
use std::net::{IpAddr, Ipv4Addr};
use std::os::fd::AsFd;
use std::process::{Child, Command, Stdio};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use p2p_core::backend::verbs::{
    DeviceAccess, DmaBuf, PortChoice, VerbsConfig, VerbsFabric, VerbsNetwork, device_names,
};
use p2p_core::endpoint::{Endpoint, PostError, QuietError};
use p2p_core::fabric::{
    Access, Completion, Fabric, LocalSegment, PeerId, Posted, RegionId, RemoteSegment, Token,
};
use p2p_core::network::{Joined, Network, Route, SideDescription};
use p2p_core::{AnyEndpoint, Region, RemoteRange, SlotConfig, SlotKey, SlotLayout};
use rand::rngs::StdRng;
use rand::{Rng, RngExt, SeedableRng};

const LIMIT: Duration = Duration::from_secs(30);
const ROUTE: Route = Route { local: LOCALHOST, remote: LOCALHOST };
const LOCALHOST: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

#[test]
fn settings_that_cannot_be_are_named() {
    if !is_possible() {
        return;
    }
    let refused = |config: VerbsConfig| VerbsNetwork::open(config).unwrap_err().to_string();
    let base = VerbsConfig::default;
    for (config, part) in [
        (VerbsConfig::on("nothing0"), "there is no device nothing0; this host has"),
        (VerbsConfig::on(&format!("{}:9", device_names()[0])), "not active"),
        (VerbsConfig::on(&format!("{}:x", device_names()[0])), "is not a port"),
        (VerbsConfig::on("near=ffff:ff:1f.7"), "is not there"),
        (VerbsConfig { ports: PortChoice::Named(Vec::new()), ..base() }, "no port is named"),
        (VerbsConfig { queue_pairs_per_port: 9, ..base() }, "queue pairs"),
        (VerbsConfig { queue_pairs_per_port: 0, ..base() }, "queue pairs"),
        (VerbsConfig { send_queue_depth: 1, ..base() }, "send_queue_depth is 1"),
        (VerbsConfig { send_queue_depth: u32::MAX, ..base() }, "send_queue_depth"),
        (VerbsConfig { ack_timeout: 0, ..base() }, "ack_timeout is 0"),
        (VerbsConfig { retry_count: 8, ..base() }, "retry_count is 8"),
        (VerbsConfig { max_message_bytes: 1, ..base() }, "max_message_bytes is 1"),
    ] {
        let text = refused(config);
        assert!(text.contains(part) && text.lines().count() == 1, "{text} lacks {part}");
    }
}

#[test]
fn a_description_that_makes_no_sense_is_refused_by_who_reads_it() {
    if !is_possible() {
        return;
    }
    let network = network(1);
    let layout = layout(64 << 10);
    let good = network.open(&layout, ROUTE).unwrap();
    let described = good.description();
    let with = |change: &dyn Fn(&mut SideDescription)| {
        let mut changed = described.clone();
        change(&mut changed);
        let side = network.open(&layout, ROUTE).unwrap();
        side.join(&changed).unwrap_err().to_string()
    };
    assert!(with(&|d| d.detail.clear()).contains("0 bytes"));
    assert!(with(&|d| d.detail.truncate(20)).contains("20 bytes"));
    assert!(with(&|d| d.detail[0] = 7).contains("version 7"));
    assert!(with(&|d| d.detail[2] = 200).contains("200 queue pairs"));
    assert!(with(&|d| d.detail[4..8].fill(0xff)).contains("queue pair"));
    assert!(with(&|d| d.bytes = 1 << 40).contains("expected 65536"));
    assert!(with(&|d| d.address = 0).contains("cannot be"));
    assert!(with(&|d| d.address = u64::MAX - 7).contains("cannot be"));
    assert!(with(&|d| d.address += 3).contains("cannot be"));
    assert!(with(&|d| d.remote_key ^= 1).contains("remote keys"));
    // Random bytes, too, are joined with or refused, never worse.
    let mut rng = seeded();
    for _ in 0..50 {
        let mut changed = described.clone();
        changed.detail = vec![0; rng.random_range(0..100)];
        rng.fill_bytes(&mut changed.detail);
        assert!(network.open(&layout, ROUTE).unwrap().join(&changed).is_err());
    }
    drop(good);
}

#[test]
fn a_wrong_key_or_address_fails_its_user_and_nobody_else() {
    if !is_possible() {
        return;
    }
    let network = network(1);
    let layout = layout(64 << 10);
    let (mut bystander, mut other) = pair(&network, &layout);
    for spoil in [spoil_key, spoil_address] {
        let (attacker, victim) =
            (network.open(&layout, ROUTE).unwrap(), network.open(&layout, ROUTE).unwrap());
        let honest = attacker.description();
        let mut spoiled = victim.description();
        spoil(&mut spoiled);
        let mut attacker = attacker.join(&spoiled).unwrap();
        let victim = victim.join(&honest).unwrap();
        // SAFETY: nobody else touches the slot; what is put into it here is compared below.
        unsafe { victim.slot.as_ptr().write_bytes(0x5a, layout.slot_bytes()) };
        let source = Region::anonymous(4096).unwrap();
        attacker.endpoint.register(&source).unwrap();
        let put = put(&mut attacker.endpoint, &source, 0, 4096)
            .map_err(QuietError::from)
            .and_then(|()| attacker.endpoint.quiet(Instant::now() + LIMIT));
        let text = put.unwrap_err().to_string();
        for part in ["put", "denies access", "127.0.0.1", "slot of 65536", "vendor code"] {
            assert!(text.contains(part), "{text} lacks {part}");
        }
        // It stays failed, and says the same again.
        assert_eq!(attacker.endpoint.health().unwrap_err().to_string(), text);
        assert!(put_now(&mut attacker.endpoint, &source).is_err());
        assert!(bytes_of(&victim.slot).iter().all(|byte| *byte == 0x5a), "the slot was touched");
    }
    exchange(&mut bystander, &mut other);
}

fn spoil_key(described: &mut SideDescription) {
    described.remote_key ^= 0xff00;
    let key = (described.remote_key as u32).to_le_bytes();
    described.detail[12..16].copy_from_slice(&key);
}

fn spoil_address(described: &mut SideDescription) {
    described.address += described.bytes;
}

#[test]
fn memory_must_be_registered_and_stays_so() {
    if !is_possible() {
        return;
    }
    let network = network(2);
    let layout = layout(1 << 20);
    let (mut here, mut there) = pair(&network, &layout);
    let source = Region::anonymous(8192).unwrap();
    let unregistered = put(&mut here.endpoint, &source, 0, 100).unwrap_err();
    assert!(matches!(unregistered, PostError::Unregistered { op: "put", .. }), "{unregistered}");
    exchange(&mut here, &mut there);
    assert!(here.endpoint.health().is_ok());
}

#[test]
fn a_side_that_goes_is_noticed_when_it_is_written_to() {
    if !is_possible() {
        return;
    }
    let network = network(1);
    let layout = layout(64 << 10);
    let (mut here, there) = pair(&network, &layout);
    let source = Region::anonymous(4096).unwrap();
    here.endpoint.register(&source).unwrap();
    drop(there);
    let start = Instant::now();
    let failed = put(&mut here.endpoint, &source, 0, 64)
        .map_err(QuietError::from)
        .and_then(|()| here.endpoint.quiet(Instant::now() + LIMIT));
    assert!(matches!(failed, Err(QuietError::Post(_))), "{failed:?} after {:?}", start.elapsed());
    // The other side of a pair that works is not concerned.
    let (mut here, mut there) = pair(&network, &layout);
    exchange(&mut here, &mut there);
}

#[test]
fn a_device_moves_what_its_tokens_say() {
    if !is_possible() {
        return;
    }
    let mut rng = seeded();
    let (mut a, mut b) = (fabric(), fabric());
    let (at_a, at_b) = join(&mut a, &mut b);
    let longest = a.max_operation_bytes() as usize;
    let bytes = 2 * longest;
    let (source, target) = (Region::anonymous(bytes).unwrap(), Region::anonymous(bytes).unwrap());
    let (from, into) = (
        register(&mut a, &source, Access::Local),
        register(&mut b, &target, Access::RemoteReadWrite),
    );
    let wire = b.describe(into).unwrap();
    assert!(a.describe(from).is_none());
    for len in [0, 1, 7, 64, 4096, 5000, 100_000, longest] {
        let mut expected = vec![0; len];
        rng.fill_bytes(&mut expected);
        store(&source, &expected);
        // SAFETY: nobody else touches the target.
        unsafe { target.as_ptr().write_bytes(0xa5, bytes) };
        let offset = rng.random_range(0..=(bytes - len) as u64);
        let dst = RemoteSegment { region: wire, offset };
        let src = LocalSegment { region: from, offset: 0, bytes: len as u64 };
        // SAFETY: the source is not written before the completion.
        let posted = unsafe { a.write(at_a, dst, src, Token(len as u64)) }.unwrap();
        assert_eq!(posted, Posted::Accepted);
        let done = wait_one(&mut a);
        assert_eq!((done.token, done.result.is_ok()), (Token(len as u64), true));
        let found = bytes_of(&target);
        let (start, end) = (offset as usize, offset as usize + len);
        assert_eq!(&found[start..end], &expected[..], "{len} bytes at {offset}");
        assert!(found[..start].iter().chain(&found[end..]).all(|byte| *byte == 0xa5));
        // And back, to another place of the source.
        let back = LocalSegment { region: from, offset: longest as u64, bytes: len as u64 };
        // SAFETY: nobody touches that part before the completion.
        let posted = unsafe { a.read(at_a, back, dst, Token(1)) }.unwrap();
        assert_eq!(posted, Posted::Accepted);
        assert!(wait_one(&mut a).result.is_ok());
        assert_eq!(&bytes_of(&source)[longest..longest + len], &expected[..]);
    }
    // A full queue says so, and everything that it took completes.
    let src = LocalSegment { region: from, offset: 0, bytes: 64 };
    let dst = RemoteSegment { region: wire, offset: 0 };
    let mut num_posted = 0;
    // SAFETY: the source is not written any more.
    while unsafe { a.write(at_a, dst, src, Token(num_posted)) }.unwrap() == Posted::Accepted {
        num_posted += 1;
        assert!(num_posted <= 1000, "the queue has no end");
    }
    for token in 0..num_posted {
        let done = wait_one(&mut a);
        assert_eq!((done.token, done.result.is_ok()), (Token(token), true));
    }
    // Ranges are checked before anything is posted.
    for (offset, len) in [(bytes as u64, 1), (u64::MAX, 1), (bytes as u64 - 10, 11)] {
        let dst = RemoteSegment { region: wire, offset };
        let src = LocalSegment { region: from, offset: 0, bytes: len };
        // SAFETY: nothing is posted.
        let refused = unsafe { a.write(at_a, dst, src, Token(0)) };
        assert!(matches!(refused, Err(PostError::RemoteRange { .. })), "{refused:?}");
    }
    let src = LocalSegment { region: from, offset: bytes as u64 - 1, bytes: 2 };
    // SAFETY: nothing is posted.
    let refused = unsafe { a.write(at_a, dst, src, Token(0)) };
    assert!(matches!(refused, Err(PostError::Unregistered { .. })), "{refused:?}");
    assert!(a.deregister(RegionId(99)).is_err());
    a.close_peer(at_a);
    // SAFETY: nothing is posted.
    assert!(unsafe { a.write(at_a, dst, src, Token(0)) }.is_err());
    b.close_peer(at_b);
}

#[test]
fn what_was_accepted_completes_once_whatever_happens() {
    if !is_possible() {
        return;
    }
    let (mut a, mut b) = (fabric(), fabric());
    let (source, target) =
        (Region::anonymous(1 << 20).unwrap(), Region::anonymous(1 << 20).unwrap());
    let from = register(&mut a, &source, Access::Local);
    let into = register(&mut b, &target, Access::RemoteReadWrite);
    let wire = b.describe(into).unwrap();
    let src = LocalSegment { region: from, offset: 0, bytes: 60_000 };
    let dst = RemoteSegment { region: wire, offset: 0 };
    enum End {
        ClosedHere,
        ClosedThere,
        Revoked,
    }
    for (round, end) in [End::ClosedHere, End::ClosedThere, End::Revoked].into_iter().enumerate() {
        let (at_a, at_b) = join(&mut a, &mut b);
        let first = round as u64 * 100;
        let mut accepted = first + 20;
        for token in first..accepted {
            // SAFETY: the source is not written.
            let posted = unsafe { a.write(at_a, dst, src, Token(token)) }.unwrap();
            assert_eq!(posted, Posted::Accepted);
        }
        match end {
            End::ClosedHere => a.close_peer(at_a),
            End::ClosedThere => b.close_peer(at_b),
            End::Revoked => b.deregister(into).unwrap(),
        }
        for token in accepted..accepted + 10 {
            // SAFETY: the source is not written.
            match unsafe { a.write(at_a, dst, src, Token(token)) } {
                Ok(Posted::Accepted) => accepted += 1,
                Ok(Posted::Full) | Err(_) => break,
            }
        }
        let mut seen = Vec::new();
        let deadline = Instant::now() + LIMIT;
        let mut out = Vec::new();
        while (seen.len() as u64) < accepted - first {
            assert!(Instant::now() < deadline, "only {seen:?} completed of {accepted}");
            a.poll(&mut out);
            seen.extend(out.drain(..).map(|done| done.token.0));
            std::thread::yield_now();
        }
        seen.sort_unstable();
        assert_eq!(seen, (first..accepted).collect::<Vec<_>>());
        a.close_peer(at_a);
        b.close_peer(at_b);
    }
}

#[test]
fn a_sleeper_is_woken_by_the_end_of_its_operation() {
    if !is_possible() {
        return;
    }
    let (mut a, mut b) = (fabric(), fabric());
    let (at_a, _) = join(&mut a, &mut b);
    let (source, target) = (Region::anonymous(4096).unwrap(), Region::anonymous(4096).unwrap());
    let from = register(&mut a, &source, Access::Local);
    let into = register(&mut b, &target, Access::RemoteReadWrite);
    let dst = RemoteSegment { region: b.describe(into).unwrap(), offset: 0 };
    let src = LocalSegment { region: from, offset: 0, bytes: 4096 };
    for round in 0..200 {
        // SAFETY: the source is not written.
        let posted = unsafe { a.write(at_a, dst, src, Token(round)) }.unwrap();
        assert_eq!(posted, Posted::Accepted);
        let mut out = Vec::new();
        let deadline = Instant::now() + LIMIT;
        while out.is_empty() {
            if a.may_sleep() {
                let fd = a.wait_fd().unwrap();
                let mut watched =
                    [rustix::event::PollFd::from_borrowed_fd(fd, rustix::event::PollFlags::IN)];
                let timeout = rustix::event::Timespec { tv_sec: 30, tv_nsec: 0 };
                let num_ready = rustix::event::poll(&mut watched, Some(&timeout)).unwrap();
                assert_ne!(num_ready, 0, "nobody woke the sleeper in round {round}");
            }
            assert!(Instant::now() < deadline);
            a.poll(&mut out);
        }
    }
}

#[test]
fn memory_without_a_working_dma_buf_is_registered_by_address() {
    if !is_possible() {
        return;
    }
    let mut fabric = fabric();
    let memory = Region::anonymous(1 << 16).unwrap();
    // A file is no dma-buf, and a software device takes none anyway.
    let file = std::fs::File::open("/proc/self/exe").unwrap();
    for dma_buf in [None, Some(DmaBuf { fd: file.as_fd(), offset: 0 })] {
        // SAFETY: `memory` outlives `fabric`'s use of it.
        let registered = unsafe {
            fabric.register_device_memory(
                memory.as_ptr(),
                memory.len(),
                Access::RemoteRead,
                dma_buf,
            )
        };
        let (id, how) = registered.unwrap();
        assert_eq!(how, DeviceAccess::PeerMemory);
        assert_eq!(fabric.describe(id).unwrap().bytes, 1 << 16);
        fabric.deregister(id).unwrap();
    }
    // SAFETY: nothing is registered there.
    let refused = unsafe {
        let nowhere = NonNull::new(0x1000 as *mut u8).unwrap();
        fabric.register_device_memory(nowhere, 4096, Access::Local, None)
    };
    let text = refused.unwrap_err().to_string();
    assert!(text.contains("dma-buf") && text.contains("by address"), "{text}");
}

#[test]
fn the_device_counts_what_was_put() {
    if !is_possible() {
        return;
    }
    let device = &device_names()[0];
    let counter = |name: &str| -> Option<u64> {
        let ports = format!("/sys/class/infiniband/{device}/ports/1");
        let found = ["hw_counters", "counters"]
            .map(|folder| std::fs::read_to_string(format!("{ports}/{folder}/{name}")).ok());
        found.into_iter().flatten().next()?.trim().parse().ok()
    };
    let Some(before) = counter("sent_pkts") else {
        println!("SKIPPED: {device} does not count packets");
        return;
    };
    let network = network(1);
    let layout = layout(4 << 20);
    let (mut here, _there) = pair(&network, &layout);
    let source = Region::anonymous(1 << 20).unwrap();
    here.endpoint.register(&source).unwrap();
    put(&mut here.endpoint, &source, 0, 1 << 20).unwrap();
    here.endpoint.quiet(Instant::now() + LIMIT).unwrap();
    let sent = counter("sent_pkts").unwrap() - before;
    println!("{sent} packets for 1 MiB");
    // No packet carries more than 4 KiB.
    assert!(sent >= 256, "only {sent} packets left the device");
    let errors = ["packet_seq_err", "out_of_seq_request", "rx_icrc_errors"];
    assert!(errors.iter().all(|name| counter(name).unwrap_or(0) == 0));
}

/// A peer is killed while everything goes on towards it: at once an error, all memory free again.
#[test]
fn a_killed_peer_is_an_error_within_the_limit() {
    if !is_possible() {
        return;
    }
    let mut rng = seeded();
    let network = network(1);
    let layout = layout(1 << 20);
    let source = Region::anonymous(512 << 10).unwrap();
    let (mut bystander, mut other) = pair(&network, &layout);
    for round in 0..6 {
        let side = network.open(&layout, ROUTE).unwrap();
        let mut child = child_process(&side.description());
        let theirs = read_description(&mut child);
        let Joined { mut endpoint, slot } = side.join(&theirs).unwrap();
        endpoint.register(&source).unwrap();
        writeln!(child.stdin.as_mut().unwrap()).unwrap();
        // Some operations to begin with, then the peer dies among more of them.
        let num_before = rng.random_range(0..40);
        let mut num_done = 0;
        let mut died = None;
        let failed = loop {
            if num_done == num_before {
                child.kill().unwrap();
                died = Some(Instant::now());
            }
            let failed = one_operation(&mut endpoint, &source, &mut rng);
            num_done += 1;
            if let Err(error) = failed {
                break error;
            }
            let waited = died.map_or(Duration::ZERO, |died: Instant| died.elapsed());
            assert!(waited < LIMIT, "no error {waited:?} after the death in round {round}");
        };
        let waited = died.map(|died| died.elapsed());
        println!("round {round}: {num_done} operations, after {waited:?}: {failed}");
        assert!(matches!(failed, QuietError::Post(PostError::Transport { .. })), "{failed}");
        child.wait().unwrap();
        drop((endpoint, slot));
        // Nothing of the dead pair holds the memory: it can be written and is the bystander's source.
        store(&source, &[round as u8; 1000]);
        exchange(&mut bystander, &mut other);
    }
}

/// The link goes down under a peer: its health fails without any operation.
#[test]
fn a_port_that_goes_down_is_noticed_without_an_operation() {
    // Takes the device away from other tests, so only on request.
    let Ok(interface) = std::env::var("SWITCHYARD_TEST_LINK") else { return };
    if !is_possible() {
        return;
    }
    let network = network(1);
    let layout = layout(64 << 10);
    let (mut here, mut there) = pair(&network, &layout);
    exchange(&mut here, &mut there);
    let set = |state: &str| {
        let done = Command::new("ip").args(["link", "set", &interface, state]).status();
        assert!(done.unwrap().success());
    };
    set("down");
    let deadline = Instant::now() + LIMIT;
    while here.endpoint.health().is_ok() {
        assert!(Instant::now() < deadline, "the port is down and nobody noticed");
        std::thread::sleep(Duration::from_millis(1));
    }
    let text = here.endpoint.health().unwrap_err().to_string();
    set("up");
    assert!(text.contains("port of this side went down"), "{text}");
    let refused = put_now(&mut here.endpoint, &Region::anonymous(4096).unwrap());
    assert!(refused.is_err());
}

/// The peer of a test. Does nothing when run on its own.
#[test]
fn peer_process() {
    let Ok(described) = std::env::var("P2P_VERBS_PEER") else { return };
    let network = network(1);
    let side = network.open(&layout(1 << 20), ROUTE).unwrap();
    println!("\ndescription {}", encode(&side.description()));
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).unwrap();
    let _joined = side.join(&decode(&described)).unwrap();
    println!("\njoined");
    std::thread::sleep(Duration::from_secs(120));
}

fn child_process(described: &SideDescription) -> Child {
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "peer_process", "--nocapture"])
        .env("P2P_VERBS_PEER", encode(described))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap()
}

fn read_description(child: &mut Child) -> SideDescription {
    let stdout = child.stdout.as_mut().unwrap();
    let mut reader = BufReader::new(stdout);
    let mut find = |mark: &str| loop {
        let mut line = String::new();
        assert_ne!(reader.read_line(&mut line).unwrap(), 0, "the child ended");
        if let Some(rest) = line.trim().strip_prefix(mark) {
            break rest.trim().to_owned();
        }
    };
    let described = find("description");
    writeln!(child.stdin.as_mut().unwrap()).unwrap();
    find("joined");
    decode(&described)
}

fn encode(described: &SideDescription) -> String {
    let SideDescription { address, remote_key, bytes, detail } = described;
    let detail: Vec<_> = detail.iter().map(u8::to_string).collect();
    format!("{address} {remote_key} {bytes} {}", detail.join(","))
}

fn decode(text: &str) -> SideDescription {
    let parts: Vec<_> = text.split(' ').collect();
    SideDescription {
        address: parts[0].parse().unwrap(),
        remote_key: parts[1].parse().unwrap(),
        bytes: parts[2].parse().unwrap(),
        detail: parts[3].split(',').map(|byte| byte.parse().unwrap()).collect(),
    }
}

fn one_operation(
    endpoint: &mut AnyEndpoint,
    source: &Region,
    rng: &mut StdRng,
) -> Result<(), QuietError> {
    let len = rng.random_range(1..=source.len());
    let remote = RemoteRange { key: SlotKey, offset: 0, len };
    match rng.random_range(0..4) {
        0 => put(endpoint, source, 0, len)?,
        // SAFETY: nobody reads the memory meanwhile, and its content is of no interest.
        1 => unsafe { endpoint.get(source.range(0, len).unwrap(), remote)? },
        2 => endpoint.add_flag(RemoteRange { key: SlotKey, offset: 0, len: 8 }, 1)?,
        _ => endpoint.quiet(Instant::now() + LIMIT)?,
    }
    Ok(())
}

/// Sends random bytes each way and compares.
fn exchange(a: &mut Joined, b: &mut Joined) {
    let mut rng = seeded();
    let (slot_a, slot_b) = (a.slot.clone(), b.slot.clone());
    for (from, to) in [(a, &slot_b), (b, &slot_a)] {
        let mut expected = vec![0; 50_000];
        rng.fill_bytes(&mut expected);
        let source = Region::anonymous(expected.len()).unwrap();
        from.endpoint.register(&source).unwrap();
        store(&source, &expected);
        put(&mut from.endpoint, &source, 4096, expected.len()).unwrap();
        let flag = to.len() - 4096;
        let before = word(to, flag);
        from.endpoint.add_flag(RemoteRange { key: SlotKey, offset: flag, len: 8 }, 3).unwrap();
        let deadline = Instant::now() + LIMIT;
        while word(to, flag) != before + 3 {
            assert!(Instant::now() < deadline, "no flag");
            std::thread::yield_now();
        }
        assert_eq!(&bytes_of(to)[4096..4096 + expected.len()], &expected[..]);
        from.endpoint.quiet(Instant::now() + LIMIT).unwrap();
    }
}

fn network(queue_pairs_per_port: u32) -> VerbsNetwork {
    let config = VerbsConfig {
        queue_pairs_per_port,
        stripe_bytes: 16 << 10,
        // A death is noticed within a second, and emulation may take its time.
        ack_timeout: 16,
        retry_count: 3,
        stall_timeout_ms: 4_000,
        ..Default::default()
    };
    VerbsNetwork::open(config).unwrap()
}

fn fabric() -> VerbsFabric {
    VerbsFabric::open(VerbsConfig { ack_timeout: 16, retry_count: 3, ..Default::default() })
        .unwrap()
}

fn pair(network: &VerbsNetwork, layout: &SlotLayout) -> (Joined, Joined) {
    let (a, b) = (network.open(layout, ROUTE).unwrap(), network.open(layout, ROUTE).unwrap());
    let (at_a, at_b) = (a.description(), b.description());
    (a.join(&at_b).unwrap(), b.join(&at_a).unwrap())
}

fn join(a: &mut VerbsFabric, b: &mut VerbsFabric) -> (PeerId, PeerId) {
    let ((at_a, from_a), (at_b, from_b)) = (a.open_peer_on(ROUTE).unwrap(), b.open_peer().unwrap());
    assert!(a.join_peer(at_a, &from_b[..10]).is_err());
    a.join_peer(at_a, &from_b).unwrap();
    assert!(a.join_peer(at_a, &from_b).is_err());
    b.join_peer(at_b, &from_a).unwrap();
    (at_a, at_b)
}

fn register(fabric: &mut VerbsFabric, region: &Region, access: Access) -> RegionId {
    // SAFETY: the tests keep their regions longer than the registrations are used.
    unsafe { fabric.register(region.as_ptr(), region.len(), access) }.unwrap()
}

fn wait_one(fabric: &mut VerbsFabric) -> Completion {
    // One at a time, so that none is lost between calls.
    thread_local!(static LEFT: std::cell::RefCell<Vec<Completion>> = const { std::cell::RefCell::new(Vec::new()) });
    LEFT.with_borrow_mut(|left| {
        let deadline = Instant::now() + LIMIT;
        while left.is_empty() {
            assert!(Instant::now() < deadline, "nothing completes");
            fabric.poll(left);
            std::thread::yield_now();
        }
        left.remove(0)
    })
}

fn put(
    endpoint: &mut AnyEndpoint,
    source: &Region,
    offset: usize,
    len: usize,
) -> Result<(), PostError> {
    let remote = RemoteRange { key: SlotKey, offset, len };
    // SAFETY: the tests write sources only after a quiet or a failure.
    unsafe { endpoint.put(remote, source.range(0, len).unwrap()) }
}

fn put_now(endpoint: &mut AnyEndpoint, source: &Region) -> Result<(), PostError> {
    put(endpoint, source, 0, 64)
}

fn layout(slot_bytes: usize) -> SlotLayout {
    SlotLayout::new(SlotConfig { slot_bytes, num_frames: 2 }).unwrap()
}

fn word(region: &Region, offset: usize) -> u64 {
    // SAFETY: aligned, in range, mapped, and only added to by the device.
    let word = unsafe { AtomicU64::from_ptr(region.as_ptr().add(offset).as_ptr().cast()) };
    word.load(Ordering::Acquire)
}

fn bytes_of(region: &Region) -> Vec<u8> {
    let mut bytes = vec![0; region.len()];
    // SAFETY: in range, not overlapping; the device is not writing at this point of the tests.
    unsafe {
        std::ptr::copy_nonoverlapping(region.as_ptr().as_ptr(), bytes.as_mut_ptr(), bytes.len());
    }
    bytes
}

fn store(region: &Region, bytes: &[u8]) {
    assert!(bytes.len() <= region.len());
    // SAFETY: in range, not overlapping; the device is not reading at this point of the tests.
    unsafe {
        std::ptr::copy_nonoverlapping(bytes.as_ptr(), region.as_ptr().as_ptr(), bytes.len());
    }
}

fn seeded() -> StdRng {
    let seed = std::env::var("SWITCHYARD_TEST_SEED")
        .ok()
        .and_then(|text| text.parse().ok())
        .unwrap_or_else(rand::random);
    println!("seed {seed} (set SWITCHYARD_TEST_SEED to repeat)");
    StdRng::seed_from_u64(seed)
}

/// Whether there is a device. If not, says so, and fails where one is required.
fn is_possible() -> bool {
    if !device_names().is_empty() {
        return true;
    }
    let required = std::env::var("SWITCHYARD_REQUIRE")
        .is_ok_and(|list| list.split(',').any(|item| item == "rdma" || item == "all"));
    let error = VerbsNetwork::open(VerbsConfig::default()).unwrap_err();
    assert!(!required, "required by SWITCHYARD_REQUIRE: {error}");
    println!("SKIPPED: {error}");
    false
}
