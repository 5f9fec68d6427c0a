//! Pairs of engines, and memory with known contents.

use std::time::{Duration, Instant};

use p2p_core::engine::{Access, Connection, Engine, EngineConfig, MemoryRegion};
use p2p_core::fabric::Fabric;
use p2p_core::fabric::cma::CmaFabric;
use p2p_core::fabric::tcp::{TcpConfig, TcpFabric};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

/// Long enough for any machine, short enough to end a test.
pub fn soon() -> Instant {
    Instant::now() + Duration::from_secs(60)
}

/// The transports to test.
#[derive(Debug, Clone, Copy)]
pub enum By {
    Tcp,
    Cma,
}

impl By {
    pub const ALL: [Self; 2] = [Self::Tcp, Self::Cma];

    pub fn fabric(self) -> Box<dyn Fabric> {
        match self {
            Self::Tcp => Box::new(
                TcpFabric::new(TcpConfig {
                    bind: "127.0.0.1:0".parse().unwrap(),
                    ..TcpConfig::default()
                })
                .unwrap(),
            ),
            Self::Cma => Box::new(CmaFabric::new().unwrap()),
        }
    }
}

pub fn config(by: By) -> EngineConfig {
    EngineConfig { fabrics: vec![by.fabric()], ..EngineConfig::local() }
}

/// Two engines and the connection between them, from both ends.
pub struct Pair {
    pub here: Engine,
    pub there: Engine,
    pub out: Connection,
    pub back: Connection,
}

pub fn pair(by: By) -> Pair {
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

/// Registered memory that holds `bytes`, one more at the least.
pub fn memory_of(engine: &Engine, bytes: &[u8]) -> MemoryRegion {
    let memory = engine.alloc(bytes.len() + 1, Access::RemoteReadWrite).unwrap();
    memory.copy_in(0, bytes).unwrap();
    memory
}

/// Registered memory full of what no test sends.
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
