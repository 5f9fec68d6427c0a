//! Choice of a connection's fabric among several.

use switchyard_message_engine::engine::EngineConfig;
use switchyard_message_engine::fabric::cma::CmaFabric;

use crate::common::{TestTransport, contents, memory_of, pair_of, poisoned, soon};
use crate::hooked::HookedFabric;

/// If either side may not copy, the connection uses the next fabric, and works.
#[test]
fn a_host_that_forbids_copies_between_processes_gets_the_next_fabric() {
    for (rest, next) in [
        ([TestTransport::Tcp].as_slice(), "tcp"),
        (&[TestTransport::Shm, TestTransport::Tcp], "shm"),
    ] {
        choose(rest, next);
    }
}

fn choose(rest: &[TestTransport], next: &str) {
    let config = |is_forbidden: bool| {
        let cma = HookedFabric {
            may_join: !is_forbidden,
            ..HookedFabric::new(CmaFabric::new().unwrap())
        };
        let mut fabrics: Vec<Box<dyn p2p_core::fabric::Fabric>> = vec![Box::new(cma)];
        fabrics.extend(rest.iter().map(|by| by.fabric()));
        EngineConfig { fabrics, ..EngineConfig::local() }
    };
    for (here, there) in [(false, false), (true, false), (false, true), (true, true)] {
        let pair = pair_of(config(here), config(there));
        let expected = if here || there { next } else { "cma" };
        for connection in [&pair.out, &pair.back] {
            assert_eq!(connection.transport().to_string(), expected, "{here} {there}");
        }
        let (source, target) = (memory_of(&pair.here, &[7; 9000]), poisoned(&pair.there, 9000));
        let remote = pair.back.advertise(&target.span(0, 9000).unwrap()).unwrap();
        pair.out.write(&source.span(0, 9000).unwrap(), &remote, soon()).unwrap();
        assert_eq!(contents(&target, 0, 9000), [7; 9000]);
    }
}
