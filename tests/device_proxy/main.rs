//! Layers through the fused kernels, dispatch, expert_recv, experts, expert_send and combine, with
//! nothing but commands to a proxy between clients and servers: bit for bit what they are over direct
//! stores, also after a server has died.
//!
//! Servers are processes of their own, on GPUs in software, or with `SWITCHYARD_TEST_DEVICE=cuda` and the
//! feature `cuda` on the first GPU. The network is libfabric's `tcp;ofi_rxm`, another provider named by
//! `SWITCHYARD_TEST_TRANSPORT`, a NIC in software by the name `softnic`, or with the feature `verbs` and
//! that name RDMA.

mod rig;
#[path = "../src/skip.rs"]
mod skip;
#[path = "../src/stopped.rs"]
mod stopped;

use std::sync::Arc;
use std::time::Duration;

use protocol::WireDtype;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use rustix::process::Signal;
use switchyard_tests::inputs::printed_seed;

use crate::rig::breaking::BreakingNetwork;
use crate::rig::withholding::WithholdingNetwork;
use crate::rig::{Request, Servers, Way, child};

/// Rows of the largest requests.
const MANY: usize = 40;

#[test]
fn layers_with_fp8_requests() {
    layers(WireDtype::F8E4m3);
}

#[test]
fn layers_with_bf16_requests() {
    layers(WireDtype::Bf16);
}

fn layers(dtype: WireDtype) {
    let mut rng = StdRng::seed_from_u64(printed_seed());
    // Every expert is at one of two servers.
    let Some(servers) = Servers::start(2, 1, dtype) else { return };
    let mut clients = [servers.caller(Way::Network), servers.caller(Way::Network)];
    let mut direct = servers.caller(Way::Memory);
    let mut num_layers = 0;
    for round in 0..6 {
        let num_tokens = [1, MANY, 0, 7][round % 4];
        let requests = [(); 2].map(|()| Request::random(&mut rng, &servers.model, num_tokens));
        // Both are under way at once, so that servers gather them as they like.
        let found: Vec<_> = std::thread::scope(|scope| {
            let calls: Vec<_> = clients
                .iter_mut()
                .zip(&requests)
                .map(|(client, request)| scope.spawn(|| client.forward(request)))
                .collect();
            calls.into_iter().map(|call| call.join().expect("a client")).collect()
        });
        for (request, (found, timing)) in requests.iter().zip(found) {
            let (expected, _) = direct.forward(request);
            assert!(found == expected, "round {round}: other than over direct stores");
            assert_eq!(timing.failovers, 0);
            num_layers += 1;
        }
    }
    for client in &clients {
        client.nothing_lost();
        // A frame to each server, with its flags, at least.
        let num_commands = client.num_commands();
        assert!(num_commands > num_layers, "{num_commands} commands: they went another way");
    }
    assert_eq!(direct.num_commands(), 0);
}

#[test]
fn tokens_of_a_server_that_is_killed_go_to_a_replica() {
    let mut rng = StdRng::seed_from_u64(printed_seed());
    for dtype in [WireDtype::F8E4m3, WireDtype::Bf16] {
        let Some(mut servers) = Servers::start(2, 2, dtype) else { return };
        let (mut client, mut direct) = (servers.caller(Way::Network), servers.caller(Way::Memory));
        let request = Request::random(&mut rng, &servers.model, MANY);
        assert!(client.forward(&request).0 == direct.forward(&request).0, "with both servers");
        // A server that stands still has certainly not answered when it dies.
        let request = Request::random(&mut rng, &servers.model, MANY);
        servers.signal(0, Signal::STOP);
        let begun = client.begin(&request);
        std::thread::sleep(Duration::from_millis(50));
        servers.signal(0, Signal::KILL);
        let (found, timing) = client.finish(begun, &request);
        assert_eq!(timing.failovers, 1, "{timing:?}");
        let num_pairs = request.num_pairs();
        assert!(timing.resent_pairs > 0 && timing.resent_pairs < num_pairs, "{timing:?}");
        // Sums of one server's parts are rounded elsewhere than those of two.
        let (expected, _) = direct.forward(&request);
        let off = rig::difference(&found, &expected, &request);
        assert!(off < 0.03, "after the death: off by {off}");
        for _ in 0..4 {
            let request = Request::random(&mut rng, &servers.model, MANY);
            let (found, timing) = client.forward(&request);
            assert!(found == direct.forward(&request).0, "with the server that is left");
            assert_eq!((timing.failovers, timing.num_servers), (0, 1));
        }
        client.nothing_lost();
        direct.nothing_lost();
    }
}

#[test]
fn recorded_layers_whose_way_to_a_server_fails_are_complete_nevertheless() {
    let mut rng = StdRng::seed_from_u64(printed_seed());
    let Some(servers) = Servers::start(2, 2, WireDtype::F8E4m3) else { return };
    let Some(network) = rig::network() else { return };
    let network = Arc::new(BreakingNetwork::over(network));
    let mut client = servers.try_caller_over(network.clone()).expect("servers");
    let mut direct = servers.caller(Way::Memory);
    client.wait_for(&servers, 2);
    direct.wait_for(&servers, 2);
    let request = Request::random(&mut rng, &servers.model, MANY);
    let graph = client.record(&request);
    let (found, report) = client.replay(&graph, &request);
    let (expected, _) = direct.forward(&request);
    assert!(found == expected, "with both servers");
    assert_eq!(report.attempts, 1);
    // The server is alive and its connection stands, only nothing that kernels send gets there.
    let num_connects = client.num_connects();
    network.fail();
    let (found, report) = client.replay(&graph, &request);
    let off = rig::difference(&found, &expected, &request);
    assert!(off < 0.03, "after the failure: off by {off}, {report:?}");
    assert!(report.attempts > 1, "{report:?}");
    assert_eq!(client.num_failovers("transport"), 1.0);
    // It is reached anew by another connection. The one that failed may count as up until then.
    client.wait_for_connects(num_connects + 1);
    client.wait_for(&servers, 2);
    let (found, report) = client.replay(&graph, &request);
    assert!(found == expected && report.attempts == 1, "with both servers again: {report:?}");
}

#[test]
fn a_server_that_comes_back_is_reached_anew() {
    let mut rng = StdRng::seed_from_u64(printed_seed());
    let Some(mut servers) = Servers::start(2, 2, WireDtype::F8E4m3) else { return };
    let mut client = servers.caller(Way::Network);
    for turn in 0..3 {
        let num_tokens = rng.random_range(1..=MANY);
        let request = Request::random(&mut rng, &servers.model, num_tokens);
        let (expected, timing) = client.forward(&request);
        assert_eq!(timing.failovers, 0, "turn {turn}");
        servers.restart(1);
        client.wait_for(&servers, 2);
        let (found, timing) = client.forward(&request);
        assert!(found == expected, "turn {turn}: the successor computes something else");
        assert_eq!(timing.failovers, 0, "turn {turn}");
    }
    client.nothing_lost();
}

#[test]
fn clients_that_take_turns_at_withholding_rows_are_dropped_and_nobody_else() {
    let mut rng = StdRng::seed_from_u64(printed_seed());
    let Some(servers) = Servers::start(1, 1, WireDtype::Bf16) else { return };
    // The one withholds the rows of each odd frame, the other those of each even one, and each sends the others.
    let networks = [true, false].map(|odd| {
        let network = rig::network().expect("it was here before");
        Arc::new(WithholdingNetwork::over(network, odd, &servers.model))
    });
    let mut hostile = networks
        .each_ref()
        .map(|network| servers.try_caller_over(network.clone()).expect("servers"));
    let mut right = servers.caller(Way::Network);
    let mut direct = servers.caller(Way::Memory);
    let dropped = |clients: &[rig::Caller]| clients.iter().all(|client| client.num_connects() > 1);
    let mut num_rounds = 0;
    while !dropped(&hostile) {
        num_rounds += 1;
        assert!(num_rounds < 40, "{:?} frames were withheld", withheld(&networks));
        let requests = [(); 3].map(|()| Request::random(&mut rng, &servers.model, 7));
        let found: Vec<_> = std::thread::scope(|scope| {
            let clients = hostile.iter_mut().chain([&mut right]).zip(&requests);
            let calls: Vec<_> = clients
                .map(|(client, request)| scope.spawn(|| client.forward(request).0))
                .collect();
            calls.into_iter().map(|call| call.join().expect("a client")).collect()
        });
        // A refused frame is sent again, and a dropped client comes back: all are answered.
        for (request, found) in requests.iter().zip(found) {
            assert!(found == direct.forward(request).0, "round {num_rounds}: a wrong answer");
        }
    }
    assert!(withheld(&networks).iter().all(|&frames| frames >= 8), "{:?}", withheld(&networks));
    for client in [&right, &direct] {
        assert_eq!((client.num_connects(), client.num_failovers("closed")), (1, 0.0));
        client.nothing_lost();
    }
}

fn withheld(networks: &[Arc<WithholdingNetwork>; 2]) -> [u64; 2] {
    networks.each_ref().map(|network| network.num_withheld())
}

#[test]
fn sides_without_a_common_way_say_so() {
    let Some(servers) = Servers::reached(Way::Memory, 1, 1, WireDtype::Bf16) else { return };
    let error = servers.try_caller(Way::Network).expect_err("there is no common transport");
    let told = error.to_string();
    for part in ["the listener offers", "device slots need both sides on one host, or a network"] {
        assert!(told.contains(part), "{told}");
    }
}

/// Not a test: a server in a process of its own.
#[test]
fn child_server() {
    child::run();
}
