//! Invalid settings, descriptions and keys.

use std::time::Instant;

use p2p_core::Region;
use p2p_core::endpoint::{Endpoint, PostError, Progress, QuietError};
use p2p_core::network::{Network, SideDescription};
use rand::{Rng, RngExt};
use switchyard_verbs::{PortChoice, VerbsConfig, VerbsNetwork, device_names};

use crate::common::{
    LIMIT, ROUTE, bytes_of, exchange, is_possible, layout, network, pair, put, put_now, seeded,
};

#[test]
fn settings_that_cannot_be_are_named() {
    if !is_possible() {
        return;
    }
    let refused = |config: VerbsConfig| VerbsNetwork::open(config).unwrap_err().to_string();
    let base = VerbsConfig::default;
    for (config, part) in [
        (VerbsConfig::on("nothing0"), "there is no device nothing0; this host has"),
        (VerbsConfig::on(&format!("{}:9", device_names()[0])), "not active"),
        (VerbsConfig::on(&format!("{}:x", device_names()[0])), "is not a port"),
        (VerbsConfig::on("near=ffff:ff:1f.7"), "is not there"),
        (VerbsConfig { ports: PortChoice::Named(Vec::new()), ..base() }, "no port is named"),
        (VerbsConfig { queue_pairs_per_port: 9, ..base() }, "queue pairs"),
        (VerbsConfig { queue_pairs_per_port: 0, ..base() }, "queue pairs"),
        (VerbsConfig { send_queue_depth: 1, ..base() }, "send_queue_depth is 1"),
        (VerbsConfig { send_queue_depth: u32::MAX, ..base() }, "send_queue_depth"),
        (VerbsConfig { ack_timeout: 0, ..base() }, "ack_timeout is 0"),
        (VerbsConfig { retry_count: 8, ..base() }, "retry_count is 8"),
        (VerbsConfig { stall_timeout_ms: 0, ..base() }, "stall_timeout_ms is 0"),
        (VerbsConfig { max_message_bytes: 1, ..base() }, "max_message_bytes is 1"),
    ] {
        let text = refused(config);
        assert!(text.contains(part) && text.lines().count() == 1, "{text} lacks {part}");
    }
}

#[test]
fn a_description_that_makes_no_sense_is_refused_by_who_reads_it() {
    if !is_possible() {
        return;
    }
    let network = network(1);
    let layout = layout(64 << 10);
    let good = network.open(&layout, ROUTE).unwrap();
    let described = good.description();
    let with = |change: &dyn Fn(&mut SideDescription)| {
        let mut changed = described.clone();
        change(&mut changed);
        let side = network.open(&layout, ROUTE).unwrap();
        side.join(&changed).unwrap_err().to_string()
    };
    assert!(with(&|d| d.detail.clear()).contains("0 bytes"));
    assert!(with(&|d| d.detail.truncate(20)).contains("20 bytes"));
    assert!(with(&|d| d.detail[0] = 7).contains("version 7"));
    assert!(with(&|d| d.detail[2] = 200).contains("200 queue pairs"));
    assert!(with(&|d| d.detail[4..8].fill(0xff)).contains("queue pair"));
    assert!(with(&|d| d.bytes = 1 << 40).contains("expected 65536"));
    assert!(with(&|d| d.address = 0).contains("cannot be"));
    assert!(with(&|d| d.address = u64::MAX - 7).contains("cannot be"));
    assert!(with(&|d| d.address += 3).contains("cannot be"));
    assert!(with(&|d| d.remote_key ^= 1).contains("remote keys"));
    // Random bytes are either accepted for joining or refused, with no worse effect.
    let mut rng = seeded();
    for _ in 0..50 {
        let mut changed = described.clone();
        changed.detail = vec![0; rng.random_range(0..100)];
        rng.fill_bytes(&mut changed.detail);
        assert!(network.open(&layout, ROUTE).unwrap().join(&changed).is_err());
    }
    drop(good);
}

#[test]
fn a_wrong_key_or_address_fails_its_user_and_nobody_else() {
    if !is_possible() {
        return;
    }
    let network = network(1);
    let layout = layout(64 << 10);
    let (mut bystander, mut other) = pair(&network, &layout);
    for spoil in [spoil_key, spoil_address] {
        let (attacker, victim) =
            (network.open(&layout, ROUTE).unwrap(), network.open(&layout, ROUTE).unwrap());
        let honest = attacker.description();
        let mut spoiled = victim.description();
        spoil(&mut spoiled);
        let mut attacker = attacker.join(&spoiled).unwrap();
        let victim = victim.join(&honest).unwrap();
        // SAFETY: no other code touches the slot; its new contents are compared below.
        unsafe { victim.slot.as_ptr().write_bytes(0x5a, layout.slot_bytes()) };
        let source = Region::anonymous(4096).unwrap();
        attacker.endpoint.register(&source).unwrap();
        let put = put(&mut attacker.endpoint, &source, 0, 4096)
            .map_err(QuietError::from)
            .and_then(|()| attacker.endpoint.quiet(Instant::now() + LIMIT));
        let text = put.unwrap_err().to_string();
        for part in ["put", "denies access", "127.0.0.1", "slot of 65536", "vendor code"] {
            assert!(text.contains(part), "{text} lacks {part}");
        }
        // The endpoint stays failed, and repeats the same error.
        assert_eq!(attacker.endpoint.health().unwrap_err().to_string(), text);
        assert!(put_now(&mut attacker.endpoint, &source).is_err());
        assert!(bytes_of(&victim.slot).iter().all(|byte| *byte == 0x5a), "the slot was touched");
    }
    exchange(&mut bystander, &mut other);
}

fn spoil_key(described: &mut SideDescription) {
    described.remote_key ^= 0xff00;
    let key = (described.remote_key as u32).to_le_bytes();
    described.detail[12..16].copy_from_slice(&key);
}

fn spoil_address(described: &mut SideDescription) {
    described.address += described.bytes;
}

#[test]
fn memory_must_be_registered_and_stays_so() {
    if !is_possible() {
        return;
    }
    let network = network(2);
    let layout = layout(1 << 20);
    let (mut here, mut there) = pair(&network, &layout);
    let source = Region::anonymous(8192).unwrap();
    let unregistered = put(&mut here.endpoint, &source, 0, 100).unwrap_err();
    assert!(matches!(unregistered, PostError::Unregistered { op: "put", .. }), "{unregistered}");
    exchange(&mut here, &mut there);
    assert!(here.endpoint.health().is_ok());
}
