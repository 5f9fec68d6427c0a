//! The calls of a link over the proxy, by a kernel on this machine's processor, against threads of the proxy.

#[path = "../../../../kernels/tests/against_rust/link_calls.rs"]
mod calls;

use crate::common;
use crate::library;
use std::sync::Arc;
use std::time::Duration;

use crate::common::{LIMIT, Posters, SLOT, config, fresh_seed, lanes, peer_config};
use kernels::abi::{DevicePtr, Link, PATH_PROXY};
use p2p_core::backend::mapped::MappedEndpoint;
use p2p_core::backend::staged::{Disorder, StagedEndpoint};
use p2p_core::wait::event_fd;
use p2p_core::{Region, TransportKind};
use rand::SeedableRng;
use rand::rngs::StdRng;
use switchyard_proxy::{Proxy, ProxyPeer};

struct Posted {
    posters: Posters,
    slot: Region,
    mirror: Region,
    _peer: ProxyPeer<StagedEndpoint>,
    _proxy: Proxy<StagedEndpoint>,
}

impl Posted {
    /// Over a transport that delays and reorders all it may. `None` without a C++ compiler.
    fn join(seed: u64) -> Option<Self> {
        let slot = Region::anonymous(SLOT).unwrap();
        let event = Arc::new(event_fd().unwrap());
        let endpoint =
            MappedEndpoint::new(TransportKind::Local, slot.clone(), Arc::clone(&event), event);
        let disorder = Disorder { seed, max_delay: Duration::from_micros(3) };
        let endpoint = StagedEndpoint::new(endpoint, Some(disorder));
        let mirror = Region::anonymous(SLOT).unwrap();
        let lanes = lanes(2, 16, 8);
        let proxy = Proxy::start(&config(1)).unwrap();
        let peer = proxy.add(endpoint, peer_config(0, &lanes, &mirror)).unwrap();
        let posters = Posters::new(common::driver()?, &lanes, &mirror, LIMIT);
        Some(Self { posters, slot, mirror, _peer: peer, _proxy: proxy })
    }
}

impl calls::Ends for Posted {
    fn link(&self) -> Link {
        let window = DevicePtr(self.mirror.as_ptr().as_ptr() as u64);
        Link { window, context: self.posters.handle() as u64, path: PATH_PROXY, reserved: 0 }
    }

    fn slot_bytes(&self) -> usize {
        SLOT
    }

    fn slot(&self) -> *mut u8 {
        self.slot.as_ptr().as_ptr()
    }
}

#[test]
fn bytes_go_to_a_slot_and_back_through_the_proxy() {
    let Some(library) = library::library() else { return };
    let seed = fresh_seed();
    let Some(ends) = Posted::join(seed) else { return };
    let mut rng = StdRng::seed_from_u64(seed);
    calls::bytes_go_there_and_back(library, &mut rng, &ends);
    let fresh = || Posted::join(seed).expect("as before");
    calls::a_put_out_of_the_slot_is_refused(library, &fresh());
    calls::a_get_into_other_memory_is_refused(library, &fresh());
}
