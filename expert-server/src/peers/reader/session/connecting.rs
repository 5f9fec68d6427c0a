//! Connections to the peers of a session, and the experts that each of them holds.

use std::collections::{HashMap, HashSet};
use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::ScopedJoinHandle;
use std::time::{Duration, Instant};

use message_engine::{Connection, Engine};

use super::{CLOSE_PERIOD, ENOUGH_HOLDERS, Source};
use crate::experts::DeviceExperts;
use crate::peers::reader::{Fetch, Peer};
use crate::peers::wire::{self, Request, Response, VERSION};

/// Peers at the address of this host, which may have devices that this one's reaches, before the others.
pub(super) fn nearest_first(peers: &[Peer], local: IpAddr) -> Vec<Peer> {
    let mut sorted = peers.to_vec();
    sorted.sort_by_key(|peer| peer.addr.ip() != local);
    sorted
}

/// Connects to some peers at the same time, once to each. Blocks for at most [`HELLO_TIMEOUT`], and ends early when `stop`
/// becomes true.
pub(super) fn connect<'a>(
    engine: &Engine,
    fetch: &Fetch,
    peers: &'a [Peer],
    device: Option<&Arc<dyn DeviceExperts>>,
    stop: &AtomicBool,
) -> Vec<(&'a Peer, Result<Source, String>)> {
    let deadline = Instant::now() + HELLO_TIMEOUT;
    let hello = hello(fetch, device);
    let reached: Vec<_> = std::thread::scope(|scope| {
        let reaching: Vec<_> = peers
            .iter()
            .map(|peer| scope.spawn(|| reach(engine, peer, &hello, deadline)))
            .collect();
        let join = |thread: ScopedJoinHandle<'_, Result<Connection, String>>| {
            thread.join().unwrap_or_else(|_| Err("connecting panicked".to_owned()))
        };
        reaching.into_iter().map(join).collect()
    });
    let mut answers: HashMap<u64, Result<PeerIndex, String>> = HashMap::new();
    let num_awaited = |answers: &HashMap<u64, _>| {
        let awaited = reached.iter().flatten().filter(|connection| connection.closed().is_none());
        awaited.filter(|connection| !answers.contains_key(&connection.id())).count()
    };
    let is_over = || Instant::now() >= deadline || stop.load(Ordering::Relaxed);
    while num_awaited(&answers) > 0 && !is_over() {
        let until = deadline.min(Instant::now() + CLOSE_PERIOD);
        if let Ok(notification) = engine.next_notification(until) {
            answers.insert(notification.connection, index(&notification.bytes));
        }
    }
    let sources = peers.iter().zip(reached).map(|(peer, connection)| {
        let source = connection.and_then(|connection| {
            let no_answer = || match connection.closed() {
                Some(reason) => Err(reason.to_string()),
                None => Err(format!("no answer within {} s", HELLO_TIMEOUT.as_secs())),
            };
            let answer = answers.remove(&connection.id()).unwrap_or_else(no_answer)?;
            let PeerIndex { holds, share } = answer;
            let (name, state) = (peer.name.clone(), Mutex::default());
            let device = device.zip(share).and_then(|(device, share)| {
                let reached = Arc::clone(device).reach(&share);
                let warn = |error: &_| tracing::warn!(peer = name, %error, "a device is not used");
                reached.inspect_err(warn).ok()
            });
            Ok(Source { name, connections: vec![connection], holds, device, state })
        });
        (peer, source)
    });
    sources.collect()
}

/// Gives sources more connections, up to `num_connections`, where they accept them. Only sources that come first for some
/// expert get more: each expert has up to [`ENOUGH_HOLDERS`] of these. Blocks for at most [`HELLO_TIMEOUT`].
pub(super) fn add_connections(
    engine: &Engine,
    fetch: &Fetch,
    sources: &mut [(&Peer, Source)],
    wanted: &[(u32, u32)],
    num_connections: usize,
    device: Option<&Arc<dyn DeviceExperts>>,
) {
    let deadline = Instant::now() + HELLO_TIMEOUT;
    let hello = hello(fetch, device);
    let mut num_holders: HashMap<_, _> = wanted.iter().map(|&expert| (expert, 0)).collect();
    std::thread::scope(|scope| {
        for (peer, source) in sources {
            let mut is_first = false;
            for expert in &source.holds {
                if let Some(num) = num_holders.get_mut(expert).filter(|num| **num < ENOUGH_HOLDERS)
                {
                    *num += 1;
                    is_first = true;
                }
            }
            if !is_first {
                continue;
            }
            scope.spawn(|| {
                for _ in source.connections.len()..num_connections {
                    // The source answers the hello of each connection, and its first answer counts.
                    match reach(engine, peer, &hello, deadline) {
                        Ok(connection) => source.connections.push(connection),
                        Err(reason) => {
                            let (peer, num) = (&source.name, source.connections.len());
                            tracing::debug!(peer, num, reason, "a server gets no more connections");
                            break;
                        }
                    }
                }
            });
        }
    });
}

/// Connects to a peer and sends `hello`.
fn reach(
    engine: &Engine,
    peer: &Peer,
    hello: &[u8],
    deadline: Instant,
) -> Result<Connection, String> {
    let connection = engine.connect_with(peer.addr, peer.options.clone(), deadline);
    let connection = connection.map_err(|error| error.to_string())?;
    connection.notify(hello, deadline).map_err(|error| error.to_string())?;
    Ok(connection)
}

/// The first message of a connection.
fn hello(fetch: &Fetch, device: Option<&Arc<dyn DeviceExperts>>) -> Vec<u8> {
    wire::encode(&Request::Hello {
        version: VERSION,
        fingerprint: fetch.identity.fingerprint.clone(),
        parameters: fetch.identity.parameters.clone(),
        device: device.map(|device| device.form()),
    })
}

/// Experts of a peer.
struct PeerIndex {
    holds: HashSet<(u32, u32)>,
    /// The text by which its device's memory is found.
    share: Option<String>,
}

/// The answer of a peer to the hello.
fn index(bytes: &[u8]) -> Result<PeerIndex, String> {
    match wire::decode(bytes)? {
        Response::Index { version: VERSION, experts, device: share } => {
            let of_layer = experts.into_iter();
            let pairs = of_layer
                .flat_map(|entry| entry.experts.into_iter().map(move |id| (entry.layer, id)));
            Ok(PeerIndex { holds: pairs.collect(), share })
        }
        Response::Index { version, .. } => Err(format!("version {version}, expected {VERSION}")),
        Response::Refused { reason, .. } => Err(reason),
        _ => Err("an unexpected answer".to_owned()),
    }
}

/// Longest wait for a peer's connection and index.
pub(super) const HELLO_TIMEOUT: Duration = Duration::from_secs(3);
