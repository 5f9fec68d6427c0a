//! Layers through the fused kernels, with only requests that the kernels post themselves between clients and
//! servers. Results are bit for bit those of direct stores, also after a server has died or a queue has failed.
//!
//! Servers are processes of their own, on GPUs in software or, with `SWITCHYARD_TEST_DEVICE=cuda`, on others, over
//! NICs in software. Those reach no memory of a real GPU: slots are in the host's there.
//! `SWITCHYARD_TEST_QUEUES=devx` makes the queues by commands to the firmware.

#[path = "../device_proxy/rig.rs"]
#[allow(dead_code, reason = "some of it is for the proxy")]
mod rig;
mod way;

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use protocol::WireDtype;
use rand::SeedableRng;
use rand::rngs::StdRng;
use softnic::format::Syndrome;
use test_support::{printed_seed, skip, stopped};

use crate::rig::layers::{self, MANY};
use crate::rig::{Request, Servers, Way, child};
use crate::way::Place;

#[test]
fn layers_with_fp8_requests() {
    let _turn = turn();
    layers::layers(WireDtype::F8E4m3);
    if !way::is_on_cuda() {
        let num = way::num_registrations_of_gpus();
        assert_ne!(num, 0, "slots are in the GPU's memory where they can be");
    }
    check_drivers();
}

#[test]
fn layers_with_bf16_requests() {
    let _turn = turn();
    layers::layers(WireDtype::Bf16);
    check_drivers();
}

#[test]
fn layers_with_slots_in_the_memory_of_hosts() {
    let _turn = turn();
    way::place(Place::Host, Place::Host);
    let before = way::num_registrations_of_gpus();
    layers::layers(WireDtype::F8E4m3);
    assert_eq!(way::num_registrations_of_gpus(), before);
    check_drivers();
}

/// Each side chooses for itself.
#[test]
fn layers_with_slots_of_one_side_only_in_a_gpus_memory() {
    let _turn = turn();
    if way::is_on_cuda() {
        return skip("emulated", "a NIC in software reaches no memory of a real GPU");
    }
    way::place(Place::Host, Place::Auto);
    let before = way::num_registrations_of_gpus();
    layers::layers(WireDtype::Bf16);
    let between = way::num_registrations_of_gpus();
    assert!(between > before, "the client's slots are in its GPU's memory");
    way::place(Place::Auto, Place::Host);
    layers::layers(WireDtype::F8E4m3);
    assert_eq!(way::num_registrations_of_gpus(), between, "the client's slots are in the host's");
    check_drivers();
}

#[test]
fn layers_with_nics_that_cannot_have_a_gpus_memory() {
    let _turn = turn();
    if way::is_on_cuda() {
        return skip("emulated", "slots are in the host's memory beside a real GPU in any case");
    }
    way::place(Place::Refused, Place::Refused);
    layers::layers(WireDtype::F8E4m3);
    check_drivers();
}

#[test]
fn tokens_of_a_server_that_is_killed_go_to_a_replica() {
    let _turn = turn();
    layers::after_a_death();
    check_drivers();
}

#[test]
fn tokens_of_a_server_that_is_killed_go_to_a_replica_with_slots_in_the_memory_of_hosts() {
    let _turn = turn();
    way::place(Place::Host, Place::Host);
    layers::after_a_death();
    check_drivers();
}

#[test]
fn a_server_that_comes_back_is_reached_anew() {
    let _turn = turn();
    layers::with_successors();
    check_drivers();
}

#[test]
fn layers_one_of_whose_queues_fails_are_complete_nevertheless() {
    let _turn = turn();
    let mut rng = StdRng::seed_from_u64(printed_seed());
    for syndrome in [Syndrome::RetryExceeded, Syndrome::RemoteAccess] {
        let Some(servers) = Servers::start(2, 2, WireDtype::F8E4m3) else { return };
        let known = queue_pairs();
        let mut client = servers.caller(Way::Network);
        let mut direct = servers.caller(Way::Memory);
        client.wait_for(&servers, 2);
        direct.wait_for(&servers, 2);
        let request = Request::random(&mut rng, &servers.model, MANY);
        assert!(client.forward(&request).0 == direct.forward(&request).0, "with both servers");
        // The kernels' first queue to the server that was reached first: both processes are alive, and
        // their connection stands.
        let first = queue_pairs().into_iter().find(|qpn| !known.contains(qpn));
        softnic_verbs::fail(first.expect("queue pairs"), 0, syndrome).expect("a queue pair");
        let num_connects = client.num_connects();
        let request = Request::random(&mut rng, &servers.model, MANY);
        let (found, timing) = client.forward(&request);
        assert_eq!(timing.failovers, 1, "{timing:?}");
        assert!(timing.resent_pairs > 0 && timing.resent_pairs < request.num_pairs(), "{timing:?}");
        let (expected, _) = direct.forward(&request);
        let off = rig::difference(&found, &expected, &request);
        assert!(off < 0.03, "after the failure: off by {off}");
        assert_eq!(client.num_failovers("transport"), 1.0);
        // It is reached anew, by other queues.
        client.wait_for_connects(num_connects + 1);
        client.wait_for(&servers, 2);
        for _ in 0..3 {
            let request = Request::random(&mut rng, &servers.model, MANY);
            let (found, timing) = client.forward(&request);
            assert!(found == direct.forward(&request).0, "with both servers again");
            assert_eq!(timing.failovers, 0);
        }
        client.nothing_lost();
        check_drivers();
    }
}

#[test]
fn a_client_whose_nic_acknowledges_nothing_holds_up_nobody() {
    let _turn = turn();
    let mut rng = StdRng::seed_from_u64(printed_seed());
    let Some(mut servers) = Servers::start(1, 1, WireDtype::Bf16) else { return };
    let (mut right, mut direct) = (servers.caller(Way::Network), servers.caller(Way::Memory));
    let known = servers.order(0, "queues");
    let mut silent = servers.caller(Way::Network);
    let mut request = || Request::random(&mut rng, &servers.model, 7);
    for client in [&mut right, &mut silent] {
        let request = request();
        assert!(client.forward(&request).0 == direct.forward(&request).0);
    }
    // A frame whose answers are never acknowledged, and one behind it. The bound of a wait for the former is
    // PATIENCE here, so that it cannot be missed.
    let requests = [(); 2].map(|()| request());
    let more: Vec<_> = (0..20).map(|_| request()).collect();
    let its_own = but_for(&servers.order(0, "queues"), &known);
    servers.order(0, &format!("stall {its_own}"));
    let sent = requests.each_ref().map(|request| silent.send(request));
    let begin = Instant::now();
    for request in &more {
        let (found, timing) = right.forward(request);
        assert!(found == direct.forward(request).0, "other than over direct stores");
        assert_eq!(timing.failovers, 0);
    }
    let elapsed = begin.elapsed();
    assert!(elapsed < rig::PATIENCE / 2, "20 calls took {elapsed:?}");
    assert_eq!((right.num_connects(), right.num_failovers("transport")), (1, 0.0));
    drop((sent, silent));
    let limit = Instant::now() + rig::PATIENCE;
    while servers.order(0, "queues") != known {
        assert!(Instant::now() < limit, "its queues are not given back");
        std::thread::sleep(Duration::from_millis(5));
    }
    right.nothing_lost();
    check_drivers();
}

#[test]
fn a_client_whose_nic_is_given_up_is_dropped_and_comes_again() {
    let _turn = turn();
    let mut rng = StdRng::seed_from_u64(printed_seed());
    let Some(mut servers) = Servers::start(1, 1, WireDtype::F8E4m3) else { return };
    let (mut right, mut direct) = (servers.caller(Way::Network), servers.caller(Way::Memory));
    let known = servers.order(0, "queues");
    let mut client = servers.caller(Way::Network);
    client.wait_for(&servers, 1);
    let its_own = but_for(&servers.order(0, "queues"), &known);
    servers.order(0, &format!("fail {its_own}"));
    // Its answers get nowhere. Nothing comes behind them, and nevertheless the server notices.
    for client in [&mut client, &mut right] {
        let request = Request::random(&mut rng, &servers.model, MANY);
        let (found, _) = client.forward(&request);
        assert!(found == direct.forward(&request).0, "other than over direct stores");
    }
    assert_eq!((client.num_connects(), right.num_connects()), (2, 1));
    client.nothing_lost();
    check_drivers();
}

/// Those of `all` that are not in `known`.
fn but_for(all: &str, known: &str) -> String {
    let known: Vec<_> = known.split(' ').collect();
    all.split(' ').filter(|word| !known.contains(word)).collect::<Vec<_>>().join(" ")
}

#[test]
fn nothing_is_left_of_clients_that_are_gone() {
    let _turn = turn();
    let mut rng = StdRng::seed_from_u64(printed_seed());
    let Some(servers) = Servers::start(2, 1, WireDtype::Bf16) else { return };
    let before = queue_pairs();
    for _ in 0..3 {
        let mut client = servers.caller(Way::Network);
        let request = Request::random(&mut rng, &servers.model, 7);
        client.forward(&request);
        // Those of kernels and that of the host, to each server.
        assert_eq!(queue_pairs().len(), before.len() + 2 * 4);
        drop(client);
        let limit = Instant::now() + rig::PATIENCE;
        while queue_pairs() != before {
            assert!(Instant::now() < limit, "{:?}", queue_pairs());
            std::thread::sleep(Duration::from_millis(5));
        }
    }
    check_drivers();
}

/// A process has one NIC behind the libraries, whose queue pairs are counted. Slots lie where the command has
/// them, unless a test says otherwise.
fn turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    way::place(Place::Auto, Place::Auto);
    turn
}

/// Queue pairs of this process's NIC.
fn queue_pairs() -> Vec<u32> {
    softnic_verbs::nic().expect("a NIC").lock().queue_pairs()
}

/// Nothing was posted that no correct driver posts.
fn check_drivers() {
    let violations = softnic_verbs::violations();
    assert!(violations.is_empty(), "{}", violations.join("; "));
}

test_support::child_processes! { "server" => child::run }
