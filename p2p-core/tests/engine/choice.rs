//! Which of several fabrics a connection goes by.

use std::os::fd::BorrowedFd;
use std::ptr::NonNull;

use p2p_core::engine::EngineConfig;
use p2p_core::fabric::cma::CmaFabric;
use p2p_core::fabric::{
    Access, Completion, Fabric, LocalSegment, PeerId, Posted, RegionId, RemoteSegment, Token,
    WireRegion,
};
use p2p_core::{PostError, TransportKind};

use p2p_core::network::NetworkError;

use crate::common::{By, contents, memory_of, pair_of, poisoned, soon};

/// `cma` on a host that does not allow copies between processes: offered, tried, and refused.
#[derive(Debug)]
struct Forbidden(CmaFabric);

impl Fabric for Forbidden {
    fn kind(&self) -> TransportKind {
        self.0.kind()
    }

    fn flavour(&self) -> &str {
        self.0.flavour()
    }

    unsafe fn register(
        &mut self,
        ptr: NonNull<u8>,
        bytes: usize,
        access: Access,
    ) -> Result<RegionId, PostError> {
        // SAFETY: the caller's promise.
        unsafe { self.0.register(ptr, bytes, access) }
    }

    fn describe(&self, region: RegionId) -> Option<WireRegion> {
        self.0.describe(region)
    }

    fn deregister(&mut self, region: RegionId) -> Result<(), PostError> {
        self.0.deregister(region)
    }

    fn open_peer(&mut self) -> Result<(PeerId, Vec<u8>), NetworkError> {
        self.0.open_peer()
    }

    fn join_peer(&mut self, _: PeerId, _: &[u8]) -> Result<(), NetworkError> {
        Err(NetworkError {
            network: "cma".to_owned(),
            op: "read the peer's memory",
            code: Some(1),
            detail: "not permitted".to_owned(),
        })
    }

    fn close_peer(&mut self, peer: PeerId) {
        self.0.close_peer(peer);
    }

    unsafe fn write(
        &mut self,
        _: PeerId,
        _: RemoteSegment,
        _: LocalSegment,
        _: Token,
    ) -> Result<Posted, PostError> {
        panic!("used although it was refused")
    }

    unsafe fn read(
        &mut self,
        _: PeerId,
        _: LocalSegment,
        _: RemoteSegment,
        _: Token,
    ) -> Result<Posted, PostError> {
        panic!("used although it was refused")
    }

    fn poll(&mut self, out: &mut Vec<Completion>) {
        self.0.poll(out);
    }

    fn wait_fd(&self) -> Option<BorrowedFd<'_>> {
        self.0.wait_fd()
    }

    fn may_sleep(&mut self) -> bool {
        self.0.may_sleep()
    }

    fn max_operation_bytes(&self) -> u64 {
        self.0.max_operation_bytes()
    }
}

/// Whoever of the two may not copy, the connection goes by the next fabric, and works.
#[test]
fn a_host_that_forbids_copies_between_processes_gets_the_next_fabric() {
    let config = |is_forbidden: bool| {
        let cma = CmaFabric::new().unwrap();
        let cma: Box<dyn Fabric> =
            if is_forbidden { Box::new(Forbidden(cma)) } else { Box::new(cma) };
        EngineConfig { fabrics: vec![cma, By::Tcp.fabric()], ..EngineConfig::local() }
    };
    for (here, there) in [(false, false), (true, false), (false, true), (true, true)] {
        let pair = pair_of(config(here), config(there));
        let expected = if here || there { "tcp" } else { "cma" };
        for connection in [&pair.out, &pair.back] {
            assert_eq!(connection.transport().to_string(), expected, "{here} {there}");
        }
        let (source, target) = (memory_of(&pair.here, &[7; 9000]), poisoned(&pair.there, 9000));
        let remote = pair.back.advertise(&target.span(0, 9000).unwrap()).unwrap();
        pair.out.write(&source.span(0, 9000).unwrap(), &remote, soon()).unwrap();
        assert_eq!(contents(&target, 0, 9000), [7; 9000]);
    }
}
