//! Peers that break the rules on purpose.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use attention_client::MoeClient;
use control_api::{LayerPlacement, MemberId, PlacementTable, ServerEntry};
use p2p_core::bootstrap::{Connection, Listener, ListenerConfig, connect};
use p2p_core::slot::{CONSUMED, PUBLISHED};
use p2p_core::{AnyEndpoint, Channel, Endpoint, RemoteRange};
use protocol::{
    ClientHello, DispatchMeta, Entry, FrameId, ServerHello, TokenRef, WireDtype, encode_dispatch,
};
use rand::RngExt;
use rand::rngs::StdRng;
use switchyard_cli::cluster::ClusterOptions;
use switchyard_tests::churn::handshake;
use switchyard_tests::worker::{metric, metric_by_label};

use crate::support::{PATIENCE, Setup, runtime};

/// The raw peers of these tests, and clients with a table of their own, have no tickets.
fn without_tickets(options: &mut ClusterOptions) {
    options.server_args = vec!["--tickets".to_owned(), "off".to_owned()];
}

/// Adds to a control word of the peer's slot.
fn add(channel: &mut Channel<AnyEndpoint>, word: usize, value: u64) {
    let offset = channel.layout().control_offset(word);
    let dst = RemoteRange { key: channel.remote_key(), offset, len: 8 };
    channel.endpoint_mut().add_flag(dst, value).expect("a flag");
}

/// Publishes `used_bytes` of the next frame's present content. Returns false without credit.
fn publish_garbage(channel: &mut Channel<AnyEndpoint>, rng: &mut StdRng) -> bool {
    let Ok(Some(frame)) = channel.try_reserve() else { return false };
    let mut bytes = vec![0u8; 512];
    rng.fill(&mut bytes[..]);
    // Half of them look like frames at first sight.
    if rng.random_bool(0.5) {
        write_frame(channel, &frame, rng);
        let at = rng.random_range(0..200);
        channel.write_view(&frame).put_bytes(at, &bytes[..4]).expect("in range");
    } else {
        channel.write_view(&frame).put_bytes(0, &bytes).expect("in range");
    }
    channel.publish(frame, 2048).is_ok()
}

fn write_frame(channel: &mut Channel<AnyEndpoint>, frame: &p2p_core::TxFrame, rng: &mut StdRng) {
    let meta = DispatchMeta {
        id: FrameId {
            epoch: 1,
            client_id: 77,
            generation: 1,
            sequence: rng.random(),
            layer: 0,
            frame_idx: 0,
            num_frames: 1,
        },
        hidden: 256,
        dtype: WireDtype::F32,
        response_dtype: WireDtype::F32,
        payload_checksum: false,
    };
    let tokens = [TokenRef { token: 0, entry_begin: 0, entry_count: 1 }];
    let entries = [Entry { expert: 3, weight: 1.0 }];
    let mut view = channel.write_view(frame);
    encode_dispatch(&mut view, &meta, &[0.5; 256], &tokens, &entries).expect("encoded");
}

#[test]
fn a_client_with_impossible_counters_loses_its_own_link_and_no_other() {
    let mut setup = Setup::start(1, 1, 32, without_tickets);
    let runtime = runtime();
    let addr = setup.members(&runtime)[0].data_addr.clone();
    for (word, value) in [
        (PUBLISHED, 3),
        (PUBLISHED, 1 << 40),
        (PUBLISHED, u64::MAX),
        (CONSUMED, 9),
        (CONSUMED, u64::MAX),
    ] {
        let (hello, config) = handshake(&setup.pool.model, setup.cluster.token(), 77);
        let connected = runtime.block_on(connect(addr.as_str(), hello, config));
        let Connection { mut channel, liveness, .. } = connected.expect("connected");
        setup.compute(3);
        add(&mut channel, word, value);
        // The server reads credit when it has an answer, and needs none at first. This test does not know how much
        // it has read so far.
        let mut rng: StdRng = rand::SeedableRng::seed_from_u64(setup.seed);
        let mut garbage = || {
            if word == CONSUMED {
                publish_garbage(&mut channel, &mut rng);
            }
        };
        setup.compute_until("the end of the hostile link", |_, _| {
            garbage();
            liveness.closed_now().is_some()
        });
    }
    assert!(setup.failovers().is_empty(), "{:?}", setup.failovers());
    setup.assert_accounts();
}

#[test]
fn corrupt_frames_end_the_link_of_their_sender_alone() {
    let mut setup = Setup::start(1, 1, 32, without_tickets);
    let runtime = runtime();
    let addr = setup.members(&runtime)[0].data_addr.clone();
    let (hello, config) = handshake(&setup.pool.model, setup.cluster.token(), 77);
    let connected = runtime.block_on(connect(addr.as_str(), hello, config));
    let Connection { mut channel, liveness, .. } = connected.expect("connected");
    let mut rng: StdRng = rand::SeedableRng::seed_from_u64(setup.seed);
    let (mut num_sent, mut num_answers) = (0, 0);
    setup.compute_until("the end of the link", |_, _| {
        num_sent += usize::from(publish_garbage(&mut channel, &mut rng));
        while let Ok(Some(_)) = channel.try_next() {
            num_answers += 1;
            if channel.release().is_err() {
                break;
            }
        }
        liveness.closed_now().is_some()
    });
    println!("{num_sent} corrupt frames, {num_answers} answers");
    assert!(num_sent > 100);
    // The last ones are lost with the link.
    assert!(num_answers > 50, "{num_answers} answers to {num_sent} frames");
    assert!(setup.failovers().is_empty(), "{:?}", setup.failovers());
    setup.assert_accounts();
}

/// An attack of a hostile server on a client's slot.
#[derive(Debug, Clone, Copy)]
enum Malice {
    Published(u64),
    Consumed(u64),
    Garbage,
}

#[test]
fn a_server_with_impossible_counters_or_garbage_is_retired_and_no_token_is_lost() {
    for malice in
        [Malice::Published(3), Malice::Published(u64::MAX), Malice::Consumed(5), Malice::Garbage]
    {
        let mut setup = Setup::start(1, 1, 32, without_tickets);
        let runtime = runtime();
        let honest = setup.members(&runtime)[0].data_addr.clone();
        let num_peers = Arc::new(AtomicUsize::new(0));
        let hostile = start_hostile(&runtime, malice, Arc::clone(&num_peers), setup.seed);
        setup.client = MoeClient::builder(setup.pool.model.clone())
            .placement(table(&setup, &[hostile, honest]))
            .secret(Some(setup.cluster.token().to_owned()))
            .replica_wait(PATIENCE)
            .build()
            .expect("a client");
        setup.client.wait_ready(PATIENCE).expect("ready");
        setup.compute_until("several hostile links", |_, done| {
            done >= 20 && num_peers.load(Ordering::Relaxed) >= 3
        });
        for what in ["lost_requests", "duplicated_requests"] {
            let name = format!("switchyard_client_{what}_total");
            assert_eq!(metric(&setup.client, &name), 0.0, "{name}");
        }
        let failovers = metric_by_label(&setup.client, "switchyard_client_failovers_total");
        println!("{malice:?}: {failovers:?}");
        let reason = match malice {
            Malice::Published(_) => "desync",
            Malice::Garbage => "invalid",
            // A client reads credits only when it needs them. This server answers nothing.
            Malice::Consumed(_) => "silent",
        };
        assert!(failovers.get(reason) > Some(&0.0), "{malice:?}: {failovers:?}");
    }
}

/// A server that accepts every client and attacks its slot as soon as it has a call in flight.
fn start_hostile(
    runtime: &tokio::runtime::Runtime,
    malice: Malice,
    num_peers: Arc<AtomicUsize>,
    seed: u64,
) -> String {
    let config = ListenerConfig::default();
    let listener = runtime.block_on(Listener::bind("127.0.0.1:0", config)).expect("bound");
    let addr = listener.local_addr().to_string();
    let accept = |hello: &p2p_core::PeerHello| {
        let client = ClientHello::decode(&hello.payload).expect("a client");
        let reply = ServerHello {
            model: client.model,
            incarnation: 1,
            epoch: 1,
            generation: hello.generation,
            progress_interval_us: 2000,
            name: "hostile".to_owned(),
        };
        Ok(reply.encode())
    };
    let on_peer = move |connection: Connection| {
        num_peers.fetch_add(1, Ordering::Relaxed);
        std::thread::spawn(move || abuse(connection, malice, seed));
    };
    runtime.spawn(listener.serve(accept, on_peer, std::future::pending()));
    addr
}

fn abuse(connection: Connection, malice: Malice, seed: u64) {
    let Connection { mut channel, liveness, .. } = connection;
    let mut rng: StdRng = rand::SeedableRng::seed_from_u64(seed);
    let begin = std::time::Instant::now();
    while !channel.has_frame() && begin.elapsed() < PATIENCE {
        if liveness.closed_now().is_some() {
            return;
        }
        std::thread::sleep(Duration::from_micros(200));
    }
    match malice {
        Malice::Published(value) => add(&mut channel, PUBLISHED, value),
        Malice::Consumed(value) => add(&mut channel, CONSUMED, value),
        Malice::Garbage => drop(publish_garbage(&mut channel, &mut rng)),
    }
    while liveness.closed_now().is_none() && begin.elapsed() < PATIENCE {
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Every expert on every server.
fn table(setup: &Setup, addrs: &[String]) -> PlacementTable {
    let model = &setup.pool.model;
    let servers = addrs.iter().enumerate().map(|(idx, addr)| ServerEntry {
        member_id: MemberId::parse(&format!("m-{idx}")).expect("an id"),
        name: format!("server-{idx}"),
        incarnation: 1,
        data_addr: addr.clone(),
        needs_tickets: false,
    });
    let everywhere: Vec<u32> = (0..addrs.len() as u32).collect();
    let replicas = vec![everywhere; model.shape.num_experts as usize];
    let layers = model.moe_layers.iter();
    PlacementTable {
        cluster_id: "hostile".to_owned(),
        epoch: 1,
        model: Some(model.descriptor()),
        servers: servers.collect(),
        layers: layers.map(|&layer| LayerPlacement { layer, replicas: replicas.clone() }).collect(),
    }
}
