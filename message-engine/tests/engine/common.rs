//! Pairs of engines, and memory with known contents.

use std::net::Ipv4Addr;
use std::time::{Duration, Instant};

use p2p_core::fabric::Fabric;
use p2p_core::network::NetworkError;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use switchyard_message_engine::engine::{
    Access, Connection, Engine, EngineConfig, MemoryRegion, open_fabric,
};
use switchyard_message_engine::fabric::cma::CmaFabric;
use switchyard_message_engine::fabric::stream::{StreamFabric, TcpConfig};

use test_support::skip;

/// Long enough for any machine, short enough to end a test.
pub fn soon() -> Instant {
    Instant::now() + Duration::from_secs(60)
}

/// The transports to test.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TestTransport {
    Tcp,
    Cma,
    Shm,
    /// libfabric between hosts, by `tcp;ofi_rxm`.
    LibfabricTcp,
    /// libfabric within a host.
    LibfabricShm,
    /// The fabric that `SWITCHYARD_TEST_TRANSPORT` names, in the syntax of `open_fabric`.
    Named,
}

/// Opens a fabric by name, on the loopback interface.
fn open(name: &str) -> Result<Box<dyn Fabric>, NetworkError> {
    let others = std::iter::once(libfabric_transport::fabric_opener());
    let others: Vec<_> = others.chain(verbs_transport::fabric_opener()).collect();
    open_fabric(name, Some(Ipv4Addr::LOCALHOST.into()), &others)
}

impl TestTransport {
    /// The transports of this host, or the requested one.
    pub fn all() -> Vec<Self> {
        if std::env::var(TRANSPORT).is_ok() {
            return vec![Self::Named];
        }
        let mut all = vec![Self::Tcp, Self::Cma, Self::Shm];
        for by in [Self::LibfabricTcp, Self::LibfabricShm] {
            match open(by.name()) {
                Ok(_) => all.push(by),
                // The library or its provider is missing.
                Err(error) if matches!(error.op, "load" | "fi_getinfo") => {
                    skip("libfabric", &format!("{by:?}: {error}"));
                }
                Err(error) => panic!("{by:?} is here and does not open: {error}"),
            }
        }
        all
    }

    /// The name for `open_fabric`.
    fn name(self) -> &'static str {
        match self {
            Self::Tcp => "tcp",
            Self::Cma => "cma",
            Self::Shm => "shm",
            Self::LibfabricTcp => "libfabric:tcp;ofi_rxm",
            Self::LibfabricShm => "libfabric:shm",
            Self::Named => "",
        }
    }

    /// The transport whose `Debug` form is `name`.
    pub fn of_name(name: &str) -> Self {
        let all =
            [Self::Tcp, Self::Cma, Self::Shm, Self::LibfabricTcp, Self::LibfabricShm, Self::Named];
        all.into_iter().find(|by| format!("{by:?}") == name).expect("a transport")
    }

    /// Whether a refused request ends the connection, as it does if a device checks requests.
    pub fn ends_with_a_refusal(self) -> bool {
        let is_verbs = std::env::var(TRANSPORT).is_ok_and(|name| name.starts_with("verbs"));
        self.is_over_rxm() || self == Self::Named && is_verbs
    }

    /// Whether libfabric's `ofi_rxm` keeps the connections.
    pub fn is_over_rxm(self) -> bool {
        let is_named = std::env::var(TRANSPORT).is_ok_and(|name| name.contains("ofi_rxm"));
        self == Self::LibfabricTcp || self == Self::Named && is_named
    }

    /// All transports except libfabric's `shm`. Its processes keep locks in shared memory, and a killed one never
    /// releases its own. It does not answer a request that it refuses either.
    pub fn robust() -> Vec<Self> {
        let is_robust = |by: &Self| {
            *by != Self::LibfabricShm
                && std::env::var(TRANSPORT).map_or(true, |name| name != Self::LibfabricShm.name())
        };
        Self::all().into_iter().filter(is_robust).collect()
    }

    pub fn fabric(self) -> Box<dyn Fabric> {
        match self {
            Self::Tcp => Box::new(
                StreamFabric::new(TcpConfig {
                    bind: "127.0.0.1:0".parse().unwrap(),
                    ..TcpConfig::default()
                })
                .unwrap(),
            ),
            Self::Cma => Box::new(CmaFabric::new().unwrap()),
            Self::Shm => Box::new(StreamFabric::shm().unwrap()),
            Self::LibfabricTcp | Self::LibfabricShm => open(self.name()).unwrap(),
            Self::Named => {
                let name = std::env::var(TRANSPORT).unwrap();
                open(&name).unwrap()
            }
        }
    }
}

const TRANSPORT: &str = "SWITCHYARD_TEST_TRANSPORT";

pub fn config(by: TestTransport) -> EngineConfig {
    EngineConfig { fabrics: vec![by.fabric()], ..EngineConfig::local() }
}

/// Two engines and the connection between them, from both ends.
pub struct Pair {
    pub here: Engine,
    pub there: Engine,
    pub out: Connection,
    pub back: Connection,
}

pub fn pair(by: TestTransport) -> Pair {
    pair_of(config(by), config(by))
}

pub fn pair_of(here: EngineConfig, there: EngineConfig) -> Pair {
    let (here, there) = (Engine::start(here).unwrap(), Engine::start(there).unwrap());
    let out = here.connect(there.endpoint().addr, soon()).unwrap();
    let back = there.accept(soon()).unwrap();
    assert_eq!(out.peer().engine_id, there.endpoint().engine_id);
    assert_eq!(back.peer().engine_id, here.endpoint().engine_id);
    Pair { here, there, out, back }
}

/// Connects another engine and checks that it is served. A busy machine may exceed the time limit of a handshake, so
/// this retries for 20 s.
pub fn connect_and_notify(engine: &Engine, by: TestTransport) -> (Engine, Connection) {
    let other = Engine::start(config(by)).unwrap();
    let (begin, addr) = (Instant::now(), engine.endpoint().addr);
    let connection = loop {
        match other.connect(addr, soon()) {
            Ok(connection) => break connection,
            Err(error) => assert!(begin.elapsed() < Duration::from_secs(20), "{error}"),
        }
    };
    connection.notify(b"served", soon()).unwrap();
    assert_eq!(engine.next_notification(soon()).unwrap().bytes, b"served");
    (other, connection)
}

/// A generator whose seed is printed.
pub fn rng() -> StdRng {
    let seed = rand::random();
    println!("seed {seed}");
    StdRng::seed_from_u64(seed)
}

pub fn random_bytes(rng: &mut StdRng, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    rng.fill_bytes(&mut bytes);
    bytes
}

/// Registered memory that holds `bytes`, one byte longer than these.
pub fn memory_of(engine: &Engine, bytes: &[u8]) -> MemoryRegion {
    let memory = engine.alloc(bytes.len() + 1, Access::RemoteReadWrite).unwrap();
    memory.copy_in(0, bytes).unwrap();
    memory
}

/// Registered memory full of bytes that no test sends.
pub fn poisoned(engine: &Engine, len: usize) -> MemoryRegion {
    memory_of(engine, &vec![0xa5; len])
}

pub fn contents(memory: &MemoryRegion, offset: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    memory.copy_out(offset, &mut bytes).unwrap();
    bytes
}

/// Waits until `done`.
pub fn until(what: &str, mut done: impl FnMut() -> bool) {
    let deadline = soon();
    while !done() {
        assert!(Instant::now() < deadline, "still waiting for {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}
