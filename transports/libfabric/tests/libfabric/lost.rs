//! Peers that end without a farewell, in large numbers: the resources they leave and the effect on
//! other peers.

use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;

use message_engine::engine::{Engine, EngineConfig, open_fabric};

use super::*;

/// Pairs of one process that is killed.
pub(crate) const CROWD: usize = 250;
pub(crate) const SLOT: SlotConfig = SlotConfig { slot_bytes: 64 << 10, num_frames: 2 };
const NUM_CROWDS: usize = 4;

/// The other process: answers each message until it is killed or its peer leaves.
pub(crate) fn answer(connections: &mut [Connection]) {
    while connections.iter_mut().any(|connection| connection.liveness.closed_now().is_none()) {
        for Connection { channel, .. } in &mut *connections {
            drive(&[channel]);
            let _ = step(channel, &[5; 64]);
        }
    }
}

/// A peer that ends without a farewell keeps the addresses of its slot and of its mailbox, because
/// no event reports its last write. It must not keep their pages.
#[test]
fn a_thousand_lost_peers_keep_no_memory() {
    let Some(network) = network(TCP) else { return };
    let (connections, addr) = serve(network, SLOT);
    let mut resident = Vec::new();
    for _ in 0..=NUM_CROWDS {
        let mut child = child("crowd", TCP, &addr);
        let mut pairs: Vec<Connection> =
            (0..CROWD).map(|_| connections.recv_timeout(LIMIT).expect("a peer")).collect();
        for Connection { channel, .. } in &mut pairs {
            // Into the slot, and small enough for mail.
            let mut has_come = false;
            eventually("an answer", || {
                drive(&[channel]);
                has_come |= step(channel, &[7; 64]).unwrap();
                has_come
            });
        }
        child.kill().unwrap();
        child.wait().unwrap();
        drop(pairs);
        wait_for_farewells();
        resident.push(resident_bytes());
    }
    println!("resident after each {CROWD} lost peers: {resident:?}");
    // The library's pools grow by megabytes, or shrink, with some crowds and not with others. A
    // page per peer would show nearly every time, and as twice this limit.
    let usual = usual_growth(&resident);
    let most = (CROWD as u64 * 4096 / 2).cast_signed();
    assert!(usual < most, "usually {usual} bytes for each {CROWD} lost peers: {resident:?}");
}

/// Waits longer than a device waits for a farewell.
fn wait_for_farewells() {
    std::thread::sleep(Duration::from_secs(7));
}

/// A process that is killed while it holds a lock of this provider leaves it locked forever.
/// Processes that share the lock get an error within a bound, continue, and get new pairs.
#[test]
fn peers_killed_over_shared_memory_of_the_library_hold_nobody_up() {
    let Some(network) = network("shm") else { return };
    let (connections, addr) = serve(network, super::SLOT);
    let seed = rand::random();
    println!("seed {seed}");
    let mut rng = StdRng::seed_from_u64(seed);
    let (mut num_taken, mut num_refused) = (0, 0);
    for _ in 0..num_deaths() {
        let (mut child, Connection { mut channel, liveness, .. }) =
            meet(&connections, &addr, &mut num_refused);
        let (start, kill_after) =
            (Instant::now(), Duration::from_micros(rng.random_range(0..20_000)));
        let (bytes, mut is_killed) = (vec![9; 10_000], false);
        loop {
            if !is_killed && start.elapsed() >= kill_after {
                child.kill().unwrap();
                is_killed = true;
            }
            if liveness.closed_now().is_some() {
                break;
            }
            drive(&[&channel]);
            match step(&mut channel, &bytes) {
                Ok(has_come) => num_taken += u32::from(has_come),
                Err(_) => break,
            }
            assert!(start.elapsed() < LIMIT, "the loss of the peer was not noticed");
        }
        child.wait().unwrap();
        bury(child.id());
        let before = Instant::now();
        let result = channel.endpoint_mut().quiet(before + Duration::from_millis(50));
        assert!(before.elapsed() < Duration::from_secs(30), "{result:?}");
    }
    println!("{num_taken} frames, {num_refused} peers refused while the library stood still");
    assert!(num_taken > 0, "nothing was ever exchanged");
}

/// The provider `shm` names memory after the process id. A process with the reused id of a killed
/// one finds the memory that it left.
#[test]
fn what_a_killed_process_left_is_in_nobodys_way() {
    if network("shm").is_none() {
        return;
    }
    // A child process, because other tests of this process use the same names.
    let mut command = test_support::child::command("leftovers");
    let output =
        test_support::bounded::output_of(&mut command, "the process", test_support::bounded::LIMIT);
    println!("{}", String::from_utf8_lossy(&output.stdout));
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}: {said}", output.status);
}

/// Opens endpoints whose names are taken by memory that a process of the same id left.
pub(crate) fn meet_leftovers() {
    // Leftovers of an earlier process with this id.
    bury(std::process::id());
    let networks = [(); 3].map(|()| network("shm").unwrap());
    let [first, second, third] = &networks;
    let opened = first.open(&layout(), route()).unwrap();
    let own = memory_of(std::process::id());
    let [own] = own.as_slice() else { panic!("expected memory of one endpoint, found {own:?}") };
    let name = own.to_str().unwrap();
    let (process, number) = name.rsplit_once(':').expect("a name that ends with a number");
    let number: u32 = number.parse().expect("a number");
    // Of two devices, of two engines, and of either end of their connection.
    let left =
        [1, 2, 3, 4, 5, 6].map(|ahead| PathBuf::from(format!("{process}:{}", number + ahead)));
    let number_of = |path: &PathBuf| std::fs::metadata(path).map(|file| file.ino()).ok();
    let before = left.each_ref().map(|path| {
        std::fs::copy(own, path).unwrap();
        number_of(path)
    });
    let (mut a, mut b) = pair(second, third);
    exchange(&mut a, &mut b, b"in spite of it");
    let [here, there] = [(); 2].map(|()| {
        let fabrics = vec![
            open_fabric("libfabric:shm", None, &[switchyard_libfabric::fabric_opener()]).unwrap(),
        ];
        Engine::start(EngineConfig { fabrics, ..EngineConfig::local() }).unwrap()
    });
    let until = Instant::now() + LIMIT;
    let out = here.connect(there.endpoint().addr, until).unwrap();
    let back = there.accept(until).unwrap();
    let after = left.each_ref().map(number_of);
    for nth in 0..left.len() {
        assert!(
            before[nth].is_some() && before[nth] != after[nth],
            "no endpoint met {:?}",
            left[nth]
        );
    }
    // Within one process the library follows pointers into closed endpoints.
    std::mem::forget(((a, b), (out, back), (here, there), opened, networks));
    bury(std::process::id());
}

/// A process that exits in order leaves no memory in `/dev/shm`.
#[test]
fn whoever_ends_in_order_leaves_no_memory_behind() {
    let Some(network) = network("shm") else { return };
    let (connections, addr) = serve(network, super::SLOT);
    for _ in 0..3 {
        let mut child = child("leaver", "shm", &addr);
        let Connection { mut channel, liveness, .. } =
            connections.recv_timeout(LIMIT).expect("a peer");
        let mut has_come = false;
        eventually("an answer", || {
            drive(&[&channel]);
            has_come |= step(&mut channel, &[7; 64]).unwrap();
            has_come
        });
        assert!(!memory_of(child.id()).is_empty(), "a peer without memory of its own");
        drop((channel, liveness));
        let status = test_support::bounded::status_of(
            &mut child,
            "the peer that leaves",
            test_support::bounded::LIMIT,
        );
        assert!(status.success(), "{status}");
        assert_eq!(memory_of(child.id()), Vec::<PathBuf>::new());
    }
}

/// Memory in `/dev/shm` that the provider `shm` has named after a process.
fn memory_of(process: u32) -> Vec<PathBuf> {
    let entries = std::fs::read_dir("/dev/shm").unwrap();
    let mut found: Vec<PathBuf> = entries
        .map(|entry| entry.unwrap().path())
        .filter(|path| {
            let name = path.file_name().unwrap().to_string_lossy();
            name.starts_with(&format!("{process}:"))
        })
        .collect();
    found.sort();
    found
}

/// Removes memory that a killed process left.
fn bury(process: u32) {
    for path in memory_of(process) {
        // A process with the reused id may have removed it.
        let _ = std::fs::remove_file(path);
    }
}

/// A connected peer. Starts another one if the library is stuck and that is not known yet.
fn meet(
    connections: &Receiver<Connection>,
    addr: &str,
    num_refused: &mut u32,
) -> (Child, Connection) {
    let deadline = Instant::now() + LIMIT;
    loop {
        let mut child = child("echo", "shm", addr);
        loop {
            if let Ok(connection) = connections.recv_timeout(Duration::from_millis(50)) {
                return (child, connection);
            }
            assert!(Instant::now() < deadline, "no peer can connect any more");
            if child.try_wait().unwrap().is_some() {
                bury(child.id());
                *num_refused += 1;
                break;
            }
        }
    }
}
