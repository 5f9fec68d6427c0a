//! Many connections of one message engine.

use std::collections::HashMap;
use std::net::Ipv4Addr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use message_engine::credit::CreditConfig;
use message_engine::engine::{Connection, Engine, EngineConfig, open_fabric};
use p2p_core::bootstrap::raise_descriptor_limit;
use p2p_core::network::NetworkError;
use tokio::task::JoinSet;

/// One hub engine, other engines around it, and many connections to the hub.
pub struct Engines {
    /// The engine that all others connect to.
    pub hub: Arc<Engine>,
    /// The connecting engines' ends.
    pub out: Vec<Connection>,
    /// The hub's ends, in the same order.
    pub back: Vec<Connection>,
    /// Time from the first connect until the last end exists.
    pub took: Duration,
    /// The engines that connect, each with the same number of connections.
    pub others: Vec<Arc<Engine>>,
}

impl Engines {
    /// Creates an engine over `transport`, written as [`open_fabric`] takes it. If `spins` is set, the engine polls
    /// for work without sleeping.
    ///
    /// # Errors
    /// The transport is not available.
    pub fn engine(transport: &str, spins: bool) -> Result<Arc<Engine>, NetworkError> {
        let local = EngineConfig::local();
        let config = EngineConfig {
            fabrics: vec![open_fabric(
                transport,
                Some(Ipv4Addr::LOCALHOST.into()),
                &[libfabric_transport::fabric_opener()],
            )?],
            spin: if spins { Duration::from_secs(3600) } else { local.spin },
            handshake_timeout: LIMIT,
            max_transfers: 1024,
            queue_len: 1024,
            credit: CreditConfig { max_senders: 2048, ..local.credit },
            ..local
        };
        Ok(Arc::new(Engine::start(config).expect("an engine")))
    }

    /// Opens `num_peers` connections to `hub` at the same time, from separate engines.
    pub fn gather(hub: Arc<Engine>, num_peers: usize, transport: &str) -> Self {
        let others: Vec<Arc<Engine>> = (0..num_peers.min(NUM_OTHERS))
            .map(|_| Self::engine(transport, false).expect("a transport that was here before"))
            .collect();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let runtime = runtime.expect("a runtime");
        let start = Instant::now();
        let mut out = runtime.block_on(async {
            let mut connecting = JoinSet::new();
            for idx in 0..num_peers {
                let (other, addr) = (Arc::clone(&others[idx % others.len()]), hub.endpoint().addr);
                connecting.spawn(async move {
                    let connected = other.connect_async(addr, Instant::now() + LIMIT).await;
                    (idx, connected.expect("a connection"))
                });
            }
            connecting.join_all().await
        });
        out.sort_by_key(|(idx, _)| *idx);
        let out: Vec<Connection> = out.into_iter().map(|(_, connection)| connection).collect();
        let deadline = Instant::now() + LIMIT;
        let accept = |_| hub.accept(deadline).expect("a connection in time");
        let accepted: Vec<Connection> = (0..num_peers).map(accept).collect();
        let took = start.elapsed();
        // Matches both ends of each connection.
        for (idx, connection) in out.iter().enumerate() {
            connection.notify(&idx.to_le_bytes(), Instant::now() + LIMIT).expect("a notification");
        }
        let idx_of: HashMap<u64, usize> = (0..num_peers)
            .map(|_| {
                let told = hub.next_notification(deadline).expect("a notification in time");
                let idx = told.bytes.try_into().expect("a number");
                (told.connection, usize::from_le_bytes(idx))
            })
            .collect();
        let mut back: Vec<Option<Connection>> = out.iter().map(|_| None).collect();
        for connection in accepted {
            let idx = idx_of[&connection.id()];
            assert!(back[idx].replace(connection).is_none(), "two connections say they are {idx}");
        }
        let back = back.into_iter().map(|found| found.expect("a connection of every peer"));
        Self { hub, back: back.collect(), out, took, others }
    }

    /// Number of peers this process can hold, up to `wanted`. Both ends of a connection have sockets of the fabric.
    pub fn possible(wanted: usize) -> usize {
        let limit = raise_descriptor_limit();
        wanted.min((limit.saturating_sub(500) / 10) as usize)
    }

    /// Mean time of one round of a spinning engine, in nanoseconds, measured over `duration`.
    pub fn round_ns(engine: &Engine, duration: Duration) -> f64 {
        let (start, before) = (Instant::now(), engine.stats().num_rounds);
        std::thread::sleep(duration);
        let rounds = engine.stats().num_rounds - before;
        start.elapsed().as_nanos() as f64 / rounds.max(1) as f64
    }
}

const NUM_OTHERS: usize = 32;
const LIMIT: Duration = Duration::from_secs(60);
