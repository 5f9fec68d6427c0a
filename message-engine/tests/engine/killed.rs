//! Peers that are killed in the middle of transfers.

use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use rand::RngExt;
use switchyard_message_engine::engine::{Access, Connection, Descriptor, Engine};
use test_support::bounded::{line_with, lines_of};
use test_support::child;

use crate::common::{TestTransport, config, rng, soon};
use test_support::resources::{num_descriptors, num_mappings_of, resident_bytes};

const BYTES: u64 = 3 << 20;
/// Samples of memory. The early ones are taken while one-time allocations still happen.
const NUM_SAMPLES: usize = 8;
const NUM_EARLY: usize = 2;
/// Allowed growth for each dead peer in bytes: half of a connection's receive buffers.
const MOST_KEPT: u64 = 48 << 10;

/// The process that the test below kills. Its arguments are the transport, and the metadata of the test's engine in
/// hexadecimal.
pub fn victim() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [by, hex] = &args[..] else { panic!("a transport and metadata, not {args:?}") };
    let by = TestTransport::of_name(by);
    let metadata: Vec<u8> = (0..hex.len())
        .step_by(2)
        .map(|at| u8::from_str_radix(&hex[at..at + 2], 16).unwrap())
        .collect();
    let engine = Engine::start(config(by)).unwrap();
    let connection = engine.add_remote_endpoint(&metadata, soon()).unwrap();
    let memory = engine.alloc(BYTES as usize, Access::RemoteReadWrite).unwrap();
    let descriptor = connection.advertise(&memory.whole()).unwrap();
    connection.notify(&descriptor.to_bytes(), soon()).unwrap();
    let theirs = Descriptor::from_bytes(&engine.next_notification(soon()).unwrap().bytes).unwrap();
    println!("ready");
    loop {
        let whole = memory.whole();
        let _keep = (
            connection.start_send(&whole, soon()),
            connection.start_recv(&whole, soon()),
            connection.start_write(&whole, &theirs, soon()),
            connection.start_read(&whole, &theirs, soon()),
            connection.start_notify(&[1; 3000], soon()),
        );
        std::thread::sleep(Duration::from_micros(300));
        if let (_, Ok(receive), _, Ok(read), _) = _keep {
            let _ = (receive.wait(), read.wait());
        }
    }
}

struct Victim(Child);

impl Drop for Victim {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn a_killed_peer_costs_nothing_but_its_connection() {
    let rounds = std::env::var("SWITCHYARD_KILL_ROUNDS").ok().and_then(|text| text.parse().ok());
    let rounds: usize = rounds.unwrap_or(24);
    let mut rng = rng();
    for by in TestTransport::robust() {
        let engine = Engine::start(config(by)).unwrap();
        let hex: String = engine.metadata().iter().map(|byte| format!("{byte:02x}")).collect();
        let memory = engine.alloc(BYTES as usize, Access::RemoteReadWrite).unwrap();
        let target = engine.alloc(BYTES as usize, Access::RemoteReadWrite).unwrap();
        let num_tables = num_mappings_of("memfd:switchyard-");
        let every = (rounds / NUM_SAMPLES).max(1);
        let (mut descriptors, mut resident) = (None, Vec::new());
        for round in 0..rounds {
            let mut child = child::command("victim")
                .args([&format!("{by:?}"), &hex])
                .stdout(Stdio::piped())
                .spawn()
                .unwrap();
            let stdout = child.stdout.take().unwrap();
            let mut victim = Victim(child);
            let connection = engine.accept(soon()).unwrap();
            let theirs = descriptor_of(&engine);
            let ours = connection.advertise(&target.whole()).unwrap();
            connection.notify(&ours.to_bytes(), soon()).unwrap();
            line_with(&lines_of(stdout), "ready");
            let mut transfers = Vec::new();
            for _ in 0..4 {
                transfers.extend(begin(&connection, &memory, &theirs));
            }
            std::thread::sleep(Duration::from_micros(rng.random_range(0..4000)));
            victim.0.kill().unwrap();
            let killed = Instant::now();
            // Every transfer ends, done or failed, long before its deadline.
            for transfer in transfers {
                let ended = transfer.wait();
                let waited = killed.elapsed();
                assert!(waited < Duration::from_secs(30), "{ended:?} after {waited:?}");
            }
            while connection.closed().is_none() {
                assert!(killed.elapsed() < Duration::from_secs(30), "the loss is not noticed");
                std::thread::sleep(Duration::from_millis(1));
            }
            assert!(connection.start_write(&memory.whole(), &theirs, soon()).is_err());
            drop(engine.take_notifications());
            drop(connection);
            if (round + 1) % every == 0 {
                settle(&engine);
                resident.push(resident_bytes());
            }
            if round == rounds / 3 {
                settle(&engine);
                descriptors = Some(num_descriptors());
            }
        }
        settle(&engine);
        let descriptors = descriptors.unwrap();
        let begin = Instant::now();
        loop {
            let (now, tables) = (num_descriptors(), num_mappings_of("memfd:switchyard-"));
            if now <= descriptors + 4 && tables == num_tables {
                break;
            }
            let (now, tables) =
                (format!("{now} of {descriptors}"), format!("{tables} of {num_tables}"));
            assert!(
                begin.elapsed() < Duration::from_secs(30),
                "{by:?}: {now} descriptors and {tables} tables after {rounds} rounds"
            );
            std::thread::sleep(Duration::from_millis(5));
        }
        println!("{by:?}: resident after each {every} of {rounds} rounds: {resident:?}");
        // A leak adds to every sample. The allocator's own steps come now and then.
        let late = resident.get(NUM_EARLY..).unwrap_or_default();
        let grown = late.windows(2).map(|pair| pair[1].cast_signed() - pair[0].cast_signed());
        let least = grown.min().expect("two late samples at least");
        let most = (every as u64 * MOST_KEPT).cast_signed();
        assert!(least < most, "{by:?}: {least} bytes or more after {every} peers: {resident:?}");
        assert!(engine.dereg(memory).unwrap() && engine.dereg(target).unwrap(), "in use");
    }
}

fn begin(
    connection: &Connection,
    memory: &switchyard_message_engine::engine::MemoryRegion,
    theirs: &Descriptor,
) -> Vec<switchyard_message_engine::engine::Transfer> {
    let whole = memory.whole();
    let begun = [
        connection.start_recv(&whole, soon()),
        connection.start_send(&whole, soon()),
        connection.start_write(&whole, theirs, soon()),
        connection.start_read(&whole, theirs, soon()),
        connection.start_notify(&[2; 5000], soon()),
    ];
    begun.into_iter().flatten().collect()
}

fn descriptor_of(engine: &Engine) -> Descriptor {
    loop {
        let note = engine.next_notification(soon()).unwrap();
        if let Ok(found) = Descriptor::from_bytes(&note.bytes) {
            return found;
        }
    }
}

fn settle(engine: &Engine) {
    let begin = Instant::now();
    loop {
        let stats = engine.stats();
        if stats.num_connections == 0 && stats.num_transfers == 0 {
            return;
        }
        assert!(begin.elapsed() < Duration::from_secs(20), "{stats:?}");
        std::thread::sleep(Duration::from_millis(1));
    }
}
