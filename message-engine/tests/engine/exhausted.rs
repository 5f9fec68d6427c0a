//! An engine without free descriptors: it pauses, and accepts again when it has some.

use std::net::TcpStream;
use std::process::{Child, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rustix::process::{Resource, Rlimit, setrlimit};
use switchyard_message_engine::engine::Engine;
use test_support::bounded::{line_with, lines_of};
use test_support::child;

use crate::common::{TestTransport, config, soon, until};

/// Enough descriptors for one peer, and for some of the silent sockets.
const SPARE: u64 = 8;

/// The process of the test below.
pub fn engine_without_descriptors() {
    tracing::subscriber::set_global_default(Lines).unwrap();
    let engine = Engine::start(config(TestTransport::Tcp)).unwrap();
    let control = engine.endpoint().addr.port();
    let data = listening_ports().into_iter().find(|port| *port != control).unwrap();
    let limit = num_descriptors().unwrap() + SPARE;
    setrlimit(Resource::Nofile, Rlimit { current: Some(limit), maximum: Some(limit) }).unwrap();
    println!("ports {control} {data}");
    until("descriptors to run out", || num_descriptors().is_none());
    until("that to be said", || num_said(&NUM_FAILURES) > 0);
    let before = (engine.stats().num_rounds, num_said(&NUM_FAILURES));
    std::thread::sleep(Duration::from_millis(500));
    println!("rounds {}", engine.stats().num_rounds - before.0);
    println!("lines {}", num_said(&NUM_FAILURES) - before.1);
    println!("heard {}", engine.next_notification(soon()).unwrap().bytes.len());
    until("the end to be said", || num_said(&NUM_ENDS) > 0);
    println!("ends {}", num_said(&NUM_ENDS));
}

/// Counts log lines about failed and resumed accepts.
struct Lines;

static NUM_FAILURES: AtomicU64 = AtomicU64::new(0);
static NUM_ENDS: AtomicU64 = AtomicU64::new(0);

fn num_said(lines: &AtomicU64) -> u64 {
    lines.load(Ordering::SeqCst)
}

impl tracing::Subscriber for Lines {
    fn enabled(&self, metadata: &tracing::Metadata<'_>) -> bool {
        metadata.is_event()
    }

    fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
        tracing::span::Id::from_u64(1)
    }

    fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}

    fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}

    fn event(&self, event: &tracing::Event<'_>) {
        event.record(&mut |field: &tracing::field::Field, value: &dyn std::fmt::Debug| {
            let (is_message, text) = (field.name() == "message", format!("{value:?}"));
            if is_message && text.contains("cannot accept") {
                NUM_FAILURES.fetch_add(1, Ordering::SeqCst);
            } else if is_message && text.contains("accepted again") {
                NUM_ENDS.fetch_add(1, Ordering::SeqCst);
            }
        });
    }

    fn enter(&self, _: &tracing::span::Id) {}

    fn exit(&self, _: &tracing::span::Id) {}
}

struct Process(Child);

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn an_engine_that_runs_out_of_descriptors_rests_and_listens_again() {
    for is_data in [true, false] {
        let child = child::command("exhausted").stdout(Stdio::piped()).spawn().unwrap();
        let mut child = Process(child);
        let lines = lines_of(child.0.stdout.take().unwrap());
        let numbers_of = |what: &str| -> Vec<u64> {
            let line = line_with(&lines, &format!("{what} "));
            line.split(' ').map(|number| number.parse().unwrap()).collect()
        };
        let ports = numbers_of("ports");
        let sockets: Vec<_> = (0..3 * SPARE)
            .map(|_| TcpStream::connect(("127.0.0.1", ports[usize::from(is_data)] as u16)).unwrap())
            .collect();
        let rounds = numbers_of("rounds")[0];
        assert!(rounds < 3000, "{rounds} rounds in half a second, for what cannot be done");
        let num_lines = numbers_of("lines")[0];
        assert!(num_lines <= 1, "{num_lines} lines in half a second, after the first");
        drop(sockets);
        let other = Engine::start(config(TestTransport::Tcp)).unwrap();
        let addr = format!("127.0.0.1:{}", ports[0]).parse().unwrap();
        let mut connection = None;
        until("the engine to listen again", || {
            connection = other.connect(addr, Instant::now() + Duration::from_secs(2)).ok();
            connection.is_some()
        });
        connection.unwrap().notify(b"served", soon()).unwrap();
        assert_eq!(numbers_of("heard"), [6]);
        assert!(numbers_of("ends")[0] > 0);
    }
}

/// Returns `None` if no descriptor is left to count them with.
fn num_descriptors() -> Option<u64> {
    Some(std::fs::read_dir("/proc/self/fd").ok()?.count() as u64)
}

/// Ports at which sockets of this process listen.
fn listening_ports() -> Vec<u16> {
    let own: Vec<_> = std::fs::read_dir("/proc/self/fd")
        .unwrap()
        .filter_map(|entry| std::fs::read_link(entry.unwrap().path()).ok())
        .map(|link| link.to_string_lossy().into_owned())
        .collect();
    let table = std::fs::read_to_string("/proc/self/net/tcp").unwrap();
    let sockets = table.lines().skip(1).map(|line| line.split_whitespace().collect::<Vec<_>>());
    sockets
        .filter(|fields| fields[3] == "0A" && own.contains(&format!("socket:[{}]", fields[9])))
        .map(|fields| u16::from_str_radix(fields[1].split_once(':').unwrap().1, 16).unwrap())
        .collect()
}
