//! Connections to the peers of a session, and the experts that each of them holds.

use std::collections::{HashMap, HashSet};
use std::net::IpAddr;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use message_engine::{Connection, Engine};

use super::{CLOSE_PERIOD, Source};
use crate::experts::DeviceExperts;
use crate::peers::reader::{Fetch, Peer};
use crate::peers::wire::{self, Request, Response, VERSION};

/// Peers at the address of this host, which may have devices that this one's reaches, before the others.
pub(super) fn nearest_first(peers: &[Peer], local: IpAddr) -> Vec<Peer> {
    let mut sorted = peers.to_vec();
    sorted.sort_by_key(|peer| peer.addr.ip() != local);
    sorted
}

/// Connects to some peers at the same time.
pub(super) fn connect<'a>(
    engine: &Engine,
    fetch: &Fetch,
    peers: &'a [Peer],
    num_threads: usize,
    device: Option<&Arc<dyn DeviceExperts>>,
) -> Vec<(&'a Peer, Result<Source, String>)> {
    let deadline = Instant::now() + HELLO_TIMEOUT;
    let hello = wire::encode(&Request::Hello {
        version: VERSION,
        fingerprint: fetch.identity.fingerprint.clone(),
        parameters: fetch.identity.parameters.clone(),
        device: device.map(|device| device.form()),
    });
    let reach = |peer: &Peer| {
        let connect = |_| {
            let connection = engine.connect_with(peer.addr, peer.options.clone(), deadline);
            let connection = connection.map_err(|error| error.to_string())?;
            connection.notify(&hello, deadline).map_err(|error| error.to_string())?;
            Ok::<_, String>(connection)
        };
        (0..num_threads).map(connect).collect::<Result<Vec<_>, _>>()
    };
    let reached: Vec<_> = std::thread::scope(|scope| {
        let reaching: Vec<_> = peers.iter().map(|peer| scope.spawn(|| reach(peer))).collect();
        let join = |thread: std::thread::ScopedJoinHandle<'_, Result<Vec<Connection>, String>>| {
            thread.join().unwrap_or_else(|_| Err("connecting panicked".to_owned()))
        };
        reaching.into_iter().map(join).collect()
    });
    let mut answers: HashMap<u64, Result<PeerIndex, String>> = HashMap::new();
    // All connections of a peer get the same answer.
    let num_awaited = |answers: &HashMap<u64, _>| {
        let first = reached.iter().flatten().filter_map(|connections| connections.first());
        let awaited = first.filter(|connection| connection.closed().is_none());
        awaited.filter(|connection| !answers.contains_key(&connection.id())).count()
    };
    while num_awaited(&answers) > 0 && Instant::now() < deadline {
        let until = deadline.min(Instant::now() + CLOSE_PERIOD);
        if let Ok(notification) = engine.next_notification(until) {
            answers.insert(notification.connection, index(&notification.bytes));
        }
    }
    let sources = peers.iter().zip(reached).map(|(peer, connections)| {
        let source = connections.and_then(|connections| {
            let Some(connection) = connections.first() else {
                return Err("it has no connection".to_owned());
            };
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
            Ok(Source { name, connections, holds, device, state })
        });
        (peer, source)
    });
    sources.collect()
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
