//! Layers through the fused kernels: dispatch, expert_recv, experts, expert_send and combine. Only commands to a
//! proxy go between clients and servers. Results are bit for bit those of direct stores, also after a server has
//! died.
//!
//! Servers are processes of their own, on GPUs in software, or with `SWITCHYARD_TEST_DEVICE=cuda` and the
//! feature `cuda` on the first GPU. The network is libfabric's `tcp;ofi_rxm`, another provider named by
//! `SWITCHYARD_TEST_TRANSPORT`, a NIC in software by the name `softnic`, or with the feature `verbs` and
//! that name RDMA.

#[allow(dead_code, reason = "some of it is for requests that kernels post themselves")]
mod rig;
mod way;

use protocol::WireDtype;
use rand::SeedableRng;
use rand::rngs::StdRng;
use test_support::{printed_seed, stopped};

use crate::rig::breaking::Breaker;
use crate::rig::layers::{self, MANY};
use crate::rig::withholding::Withheld;
use crate::rig::{Request, Servers, Way, child};

#[test]
fn layers_with_fp8_requests() {
    layers::layers(WireDtype::F8E4m3);
}

#[test]
fn layers_with_bf16_requests() {
    layers::layers(WireDtype::Bf16);
}

#[test]
fn tokens_of_a_server_that_is_killed_go_to_a_replica() {
    layers::after_a_death();
}

#[test]
fn tokens_of_a_server_that_stands_still_go_to_a_replica_at_the_deadline() {
    layers::beside_one_that_stands_still(std::time::Duration::from_secs(5));
}

#[test]
fn recorded_layers_whose_way_to_a_server_fails_are_complete_nevertheless() {
    let mut rng = StdRng::seed_from_u64(printed_seed());
    let Some(servers) = Servers::start(2, 2, WireDtype::F8E4m3) else { return };
    let Some(network) = way::network() else { return };
    let breaker = Breaker::default();
    let mut client = servers.try_caller_over(breaker.over(network)).expect("servers");
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
    breaker.fail();
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
    layers::with_successors();
}

#[test]
fn clients_that_take_turns_at_withholding_rows_are_dropped_and_nobody_else() {
    let mut rng = StdRng::seed_from_u64(printed_seed());
    let Some(servers) = Servers::start(1, 1, WireDtype::Bf16) else { return };
    // The one withholds the rows of each odd frame, the other those of each even one, and each sends the others.
    let withheld = [(); 2].map(|()| Withheld::default());
    let mut hostile = [true, false].map(|odd| {
        let network = way::network().expect("it was here before");
        let network = withheld[usize::from(odd)].over(network, odd, &servers.model);
        servers.try_caller_over(network).expect("servers")
    });
    let num_withheld = || withheld.each_ref().map(Withheld::num_frames);
    let mut right = servers.caller(Way::Network);
    let mut direct = servers.caller(Way::Memory);
    let dropped = |clients: &[rig::Caller]| clients.iter().all(|client| client.num_connects() > 1);
    let mut num_rounds = 0;
    while !dropped(&hostile) {
        num_rounds += 1;
        assert!(num_rounds < 40, "{:?} frames were withheld", num_withheld());
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
    assert!(num_withheld().iter().all(|&frames| frames >= 8), "{:?}", num_withheld());
    for client in [&right, &direct] {
        assert_eq!((client.num_connects(), client.num_failovers("closed")), (1, 0.0));
        client.nothing_lost();
    }
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

test_support::child_processes! { "server" => child::run }
