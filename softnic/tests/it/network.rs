//! The suite that every transport must pass, over the NIC model: between threads, with a NIC that
//! delays and reorders all it may, and between processes.

use crate::parties;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::parties::{ROUTE, TransportSetup, fresh_seed, in_processes, pair, var};
use p2p_core::endpoint::{Endpoint, PostError, Progress, QuietError};
use p2p_core::network::{Network, SideDescription};
use p2p_core::region::{RemoteRange, SlotKey};
use p2p_core::{SlotConfig, SlotLayout};
use switchyard_softnic::format::Syndrome;
use switchyard_softnic::{Adversary, DoorbellMode, Fault, NicConfig, SoftNetwork};

fn nic_config(adversary: Option<u64>) -> NicConfig {
    NicConfig {
        is_strict: true,
        doorbell: DoorbellMode::Checked,
        adversary: adversary.map(|seed| Adversary { seed }),
        ..NicConfig::default()
    }
}

fn in_threads(adversary: Option<u64>) {
    let a = SoftNetwork::open(nic_config(adversary)).unwrap();
    let b = SoftNetwork::open(nic_config(adversary.map(|seed| !seed))).unwrap();
    parties::in_threads(|config| pair(&a, &b, config));
    for network in [&a, &b] {
        assert!(network.nic().violations().is_empty(), "{:?}", network.nic().violations().first());
    }
}

/// The network of this process or its child.
fn setup() -> TransportSetup {
    TransportSetup::over(Arc::new(SoftNetwork::open(nic_config(None)).unwrap()))
}

#[test]
fn threads() {
    in_threads(None);
}

#[test]
fn threads_with_a_nic_that_delays_and_reorders() {
    in_threads(Some(fresh_seed()));
}

#[test]
fn processes() {
    in_processes(&setup(), |_| true);
}

#[test]
fn a_killed_process_does_not_answer_any_more() {
    let config = SlotConfig { slot_bytes: 64 << 10, num_frames: 2 };
    let (connections, mut child) = parties::serve_one_child(config, &setup().with("HANG", 1));
    let mut connection = connections.recv_timeout(Duration::from_secs(60)).expect("peer");
    let mut add = || {
        let dst = RemoteRange { key: SlotKey, offset: 0, len: 8 };
        let endpoint = connection.channel.endpoint_mut();
        endpoint.add_flag(dst, 1).map_err(QuietError::from)?;
        endpoint.quiet(Instant::now() + Duration::from_secs(10))
    };
    add().unwrap();
    child.kill().unwrap();
    child.wait().unwrap();
    // The process is checked every millisecond.
    std::thread::sleep(Duration::from_millis(5));
    let error = add().unwrap_err();
    assert!(matches!(error, QuietError::Post(PostError::Disconnected { .. })), "{error}");
    assert!(connection.channel.endpoint().health().is_err());
}

#[test]
fn failures_of_the_nic_are_failures_of_the_endpoint() {
    let config = SlotConfig { slot_bytes: 64 << 10, num_frames: 2 };
    let a = SoftNetwork::open(nic_config(None)).unwrap();
    let b = SoftNetwork::open(nic_config(None)).unwrap();
    let (mut x, y) = pair(&a, &b, config);
    let dst = RemoteRange { key: SlotKey, offset: 0, len: 8 };
    let deadline = || Instant::now() + Duration::from_secs(10);
    x.endpoint_mut().add_flag(dst, 1).unwrap();
    x.endpoint_mut().quiet(deadline()).unwrap();
    x.endpoint().health().unwrap();
    // The first queue pair of a NIC.
    let fault = Fault::Fail { qpn: 0x40, nth: 0, syndrome: Syndrome::RemoteOp };
    a.nic().inject(fault).unwrap();
    let _ = x.endpoint_mut().add_flag(dst, 1);
    let error = x.endpoint_mut().quiet(deadline()).unwrap_err().to_string();
    assert!(error.contains("RemoteOp") && error.contains("0x14"), "{error}");
    x.endpoint().health().unwrap_err();
    x.endpoint_mut().add_flag(dst, 1).unwrap_err();

    // A peer that has dropped its end has revoked its key.
    let (mut x, z) = pair(&a, &b, config);
    drop((y, z));
    let _ = x.endpoint_mut().add_flag(dst, 1);
    x.endpoint_mut().quiet(deadline()).unwrap_err();
}

#[test]
fn descriptions_that_make_no_sense_are_refused() {
    let layout = SlotLayout::new(SlotConfig { slot_bytes: 64 << 10, num_frames: 2 }).unwrap();
    let network = SoftNetwork::open(nic_config(None)).unwrap();
    let good = network.open(&layout, ROUTE).unwrap();
    let description = good.description();
    assert_eq!(description.detail.len(), 24);
    type Change = fn(&mut SideDescription);
    let cases: [(&str, Change); 6] = [
        ("24", |d| d.detail.truncate(23)),
        ("32 bits", |d| d.remote_key = 1 << 40),
        ("65536", |d| d.bytes = 4096),
        // No such process, a descriptor that is no NIC, an impossible queue pair.
        ("fd/", |d| d.detail[0..4].copy_from_slice(&u32::MAX.to_le_bytes())),
        ("not the NIC", |d| d.detail[8] ^= 1),
        ("remote queue pair", |d| d.detail[16..20].copy_from_slice(&u32::MAX.to_le_bytes())),
    ];
    for (expected, change) in cases {
        let mut peer = description.clone();
        change(&mut peer);
        let side = network.open(&layout, ROUTE).unwrap();
        let error = side.join(&peer).unwrap_err().to_string();
        assert!(error.contains(expected), "{expected}: {error}");
    }
}

/// The other half of the tests with two processes.
pub fn child_process() {
    if var("HANG").is_some() {
        let runtime = parties::runtime();
        let _connection = parties::meet(&runtime, &setup()).unwrap();
        std::thread::sleep(Duration::from_secs(60));
    } else {
        parties::perform_all(&setup());
    }
}
