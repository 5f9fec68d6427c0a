//! After warm-up, transfers of the message engine allocate nothing, on neither side. The counting allocator counts for
//! the whole process, in which both engines live, so the test runs alone. Allocations of libfabric are the C library's
//! and are not counted.

use std::net::Ipv4Addr;
use std::sync::atomic::Ordering;

use switchyard_message_engine::engine::{
    Access, Connection, Descriptor, Engine, EngineConfig, MemoryRegion, Span, open_fabric,
};
use test_support::allocations::PROCESS_ALLOCATIONS;
use test_support::own_process::is_alone;
use test_support::skip;

use crate::common::soon;

/// Short messages, announced ones, and one that is longer than the bytes that may go without credit.
const SIZES: [u64; 4] = [0, 100, 60_000, 3 << 20];
const NUM_PARTS: u64 = 8;
const ROUNDS_OF_A_BATCH: usize = 60;
/// Queues grow with the interleaving of the two threads. Several batches may pass until every interleaving has
/// occurred.
const MAX_BATCHES: usize = 20;

#[test]
fn transfers_allocate_nothing_after_warm_up() {
    if !is_alone("allocations::transfers_allocate_nothing_after_warm_up") {
        return;
    }
    for transport in ["tcp", "cma", "libfabric:tcp;ofi_rxm"] {
        let Some(rig) = Rig::start(transport) else { continue };
        let mut per_batch = Vec::new();
        loop {
            let before = PROCESS_ALLOCATIONS.load(Ordering::Relaxed);
            (0..ROUNDS_OF_A_BATCH).for_each(|_| rig.round());
            per_batch.push(PROCESS_ALLOCATIONS.load(Ordering::Relaxed) - before);
            if per_batch.last() == Some(&0) {
                break;
            }
            assert!(per_batch.len() < MAX_BATCHES, "{transport}: allocations {per_batch:?}");
        }
        println!("{transport}: allocations per batch {per_batch:?}");
    }
}

/// Two engines, their connection and their memory, made before anything is counted.
struct Rig {
    _engines: [Engine; 2],
    out: Connection,
    back: Connection,
    here: MemoryRegion,
    there: MemoryRegion,
    remote: Vec<Descriptor>,
    local: Vec<Span>,
    distant: Vec<Span>,
}

impl Rig {
    /// Starts both engines. Returns `None`, and prints the skip, if this host lacks the transport.
    fn start(transport: &str) -> Option<Self> {
        let engine = || {
            let fabric = open_fabric(
                transport,
                Some(Ipv4Addr::LOCALHOST.into()),
                &[libfabric_transport::fabric_opener()],
            )?;
            let config = EngineConfig { fabrics: vec![fabric], ..EngineConfig::local() };
            Ok(Engine::start(config).unwrap())
        };
        let started: Result<_, p2p_core::network::NetworkError> =
            engine().and_then(|first| Ok([first, engine()?]));
        let engines = match started {
            Ok(engines) => engines,
            // The library or its provider is missing.
            Err(error) if matches!(error.op, "load" | "fi_getinfo") => {
                skip("libfabric", &format!("{transport}: {error}"));
                return None;
            }
            Err(error) => panic!("{transport} is here and does not open: {error}"),
        };
        let [first, second] = &engines;
        let out = first.connect(second.endpoint().addr, soon()).unwrap();
        let back = second.accept(soon()).unwrap();
        let bytes = SIZES[3];
        let here = first.alloc(bytes as usize, Access::RemoteReadWrite).unwrap();
        let there = second.alloc(bytes as usize, Access::RemoteReadWrite).unwrap();
        here.copy_in(0, &vec![7; bytes as usize]).unwrap();
        let whole = back.advertise(&there.whole()).unwrap();
        let part = bytes / NUM_PARTS;
        let spans = |memory: &MemoryRegion| -> Vec<Span> {
            (0..NUM_PARTS).map(|idx| memory.span(idx * part, part).unwrap()).collect()
        };
        let remote = (0..NUM_PARTS).map(|idx| whole.sub(idx * part, part).unwrap()).collect();
        let (local, distant) = (spans(&here), spans(&there));
        Some(Self { _engines: engines, out, back, here, there, remote, local, distant })
    }

    /// Runs every kind of transfer with every size.
    fn round(&self) {
        for bytes in SIZES {
            let (here, there) =
                (self.here.span(0, bytes).unwrap(), self.there.span(0, bytes).unwrap());
            // The message is sent before its receive, and after it.
            for receives_first in [false, true] {
                let receive = || self.back.start_recv(&there, soon()).unwrap();
                let early = receives_first.then(receive);
                let sent = self.out.start_send(&here, soon()).unwrap();
                let late = (!receives_first).then(receive);
                assert_eq!(early.or(late).map(|got| got.wait().unwrap()), Some(bytes));
                assert_eq!(sent.wait().unwrap(), bytes);
            }
            let remote = self.whole(bytes);
            assert_eq!(self.out.write(&here, &remote, soon()).unwrap(), bytes);
            assert_eq!(self.out.read(&here, &remote, soon()).unwrap(), bytes);
        }
        let total = self.here.len() / NUM_PARTS * NUM_PARTS;
        assert_eq!(self.out.writev(&self.local, &self.remote, soon()).unwrap(), total);
        assert_eq!(self.out.readv(&self.local, &self.remote, soon()).unwrap(), total);
        let got = self.back.start_recvv(&self.distant, soon()).unwrap();
        assert_eq!(self.out.sendv(&self.local, soon()).unwrap(), total);
        assert_eq!(got.wait().unwrap(), total);
    }

    /// The first `bytes` of the other side's memory.
    fn whole(&self, bytes: u64) -> Descriptor {
        let region = self.remote[0];
        Descriptor { bytes, ..region }
    }
}
