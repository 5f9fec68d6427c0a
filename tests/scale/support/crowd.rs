//! Many peers of one process.

use std::time::{Duration, Instant};

use p2p_core::bootstrap::{
    ConnectConfig, Listener, ListenerConfig, connect, raise_descriptor_limit,
};
use p2p_core::transports::Transports;
use p2p_core::{Connection, PeerHello, SlotConfig};
use tokio::sync::mpsc;
use tokio::task::JoinSet;

/// Both ends of many connections, all in this process.
pub struct Crowd {
    /// The connecting ends, by peer.
    pub here: Vec<Connection>,
    /// The listening ends, by peer.
    pub there: Vec<Connection>,
    /// Time from the first connect until the last end exists.
    pub took: Duration,
}

impl Crowd {
    /// Connects `num_peers` at the same time, over loopback, to a listener with `config`.
    pub async fn gather(num_peers: usize, config: ListenerConfig) -> Self {
        let (slot, kinds, networks) =
            (config.slot, config.transports.clone(), config.networks.clone());
        let listener = Listener::bind("127.0.0.1:0", config).await.expect("a listener");
        let addr = listener.local_addr();
        let (sender, mut peers) = mpsc::unbounded_channel();
        let on_peer = move |connection| drop(sender.send(connection));
        let serving =
            tokio::spawn(listener.serve(|_| Ok(Vec::new()), on_peer, std::future::pending()));
        let start = Instant::now();
        let mut connecting = JoinSet::new();
        for peer_id in 0..num_peers as u64 {
            let config = ConnectConfig {
                slot,
                transports: kinds.clone(),
                networks: networks.clone(),
                timeout: LIMIT,
                ..ConnectConfig::default()
            };
            let hello = PeerHello { peer_id, ..PeerHello::default() };
            connecting.spawn(async move { connect(addr, hello, config).await });
        }
        let mut here = Vec::with_capacity(num_peers);
        while let Some(connected) = connecting.join_next().await {
            here.push(connected.expect("a task that ends").expect("a connection"));
        }
        let mut there = Vec::with_capacity(num_peers);
        while there.len() < num_peers {
            let next = tokio::time::timeout(LIMIT, peers.recv()).await.expect("a peer in time");
            there.push(next.expect("a listener that serves"));
        }
        let took = start.elapsed();
        serving.abort();
        for ends in [&mut here, &mut there] {
            ends.sort_by_key(|connection| connection.peer.peer_id);
        }
        Self { here, there, took }
    }

    /// Listener settings for slots of this kind and these transports.
    pub fn listener(slot: SlotConfig, transports: Transports) -> ListenerConfig {
        ListenerConfig {
            slot,
            transports: transports.kinds,
            networks: transports.networks,
            handshake_timeout: LIMIT,
            ..ListenerConfig::default()
        }
    }

    /// Number of peers this process can hold, up to `wanted`. Each end takes five descriptors, and some more during
    /// the handshake.
    pub fn possible(wanted: usize) -> usize {
        let limit = raise_descriptor_limit();
        wanted.min((limit.saturating_sub(200) / 12) as usize)
    }
}

const LIMIT: Duration = Duration::from_secs(60);
