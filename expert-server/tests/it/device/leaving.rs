//! Clients that connect, disconnect and die, and experts that are loaded later.

use std::io::{BufRead, BufReader};
use std::process::{Child, Stdio};
use std::time::Duration;

use p2p_core::bootstrap::CloseReason;
use protocol::WireDtype;
use switchyard_expert_server::ExpertSelection;

use crate::common::{PATIENCE, Reference, Request, eventually, metric, seeded, shape_of};
use crate::device::client::{Client, Outcome};
use crate::device::{SLOT, check, devices, join, server_on};

const DTYPE: WireDtype = WireDtype::F8E4m3;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn clients_come_and_go_while_another_is_served() {
    let Some((device, gpu)) = devices() else { return };
    let mut rng = seeded();
    let reference = Reference::open();
    let shape = reference.shape;
    let server = server_on(device, DTYPE, ExpertSelection::All, |_| {}).await;
    let mut steady = join(&gpu, &server, shape, 1, DTYPE).await;
    for round in 0..6 {
        let mut guest = join(&gpu, &server, shape, 100 + round, DTYPE).await;
        (steady, rng) = tokio::task::block_in_place(|| {
            for client in [&mut guest, &mut steady] {
                let request = Request::random(&mut rng, &shape, 7);
                let (outcome, rows) = client.layer(&request);
                assert_eq!(outcome, Outcome::Answered, "round {round}");
                check(&reference, &request, DTYPE, &rows);
            }
            // Every other guest disconnects while its frame is in flight.
            if round % 2 == 0 {
                guest.dispatch(&Request::random(&mut rng, &shape, 30));
            }
            (steady, rng)
        });
        drop(guest);
    }
    eventually("all guests are gone", || server.num_links() == 1);
    let request = Request::random(&mut rng, &shape, 3);
    let (outcome, rows) = tokio::task::block_in_place(|| steady.layer(&request));
    assert_eq!(outcome, Outcome::Answered);
    check(&reference, &request, DTYPE, &rows);
    assert_eq!(metric(server.metrics(), "switchyard_server_links_opened_total"), 7.0);
    server.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_stays_but_sends_nothing_does_not_hold_up_a_drain() {
    let Some((device, gpu)) = devices() else { return };
    let mut rng = seeded();
    let reference = Reference::open();
    let shape = reference.shape;
    let server = server_on(device, DTYPE, ExpertSelection::All, |config| {
        config.drain_idle = Duration::from_millis(200);
        // Longer than the test waits, so that only the idle time ends the drain.
        config.drain_timeout = PATIENCE * 10;
    })
    .await;
    let mut client = join(&gpu, &server, shape, 1, DTYPE).await;
    let request = Request::random(&mut rng, &shape, 7);
    let (outcome, rows) = tokio::task::block_in_place(|| client.layer(&request));
    assert_eq!(outcome, Outcome::Answered);
    check(&reference, &request, DTYPE, &rows);
    // An idle server shows no progress to its client.
    tokio::task::block_in_place(|| {
        eventually("an idle server shows no progress", || {
            let before = client.progress();
            std::thread::sleep(Duration::from_millis(100));
            client.progress() == before
        });
    });
    tokio::time::timeout(PATIENCE, server.drain()).await.expect("the server is idle");
    let reason = tokio::time::timeout(PATIENCE, client.liveness.closed()).await.expect("let go");
    assert_eq!(reason, CloseReason::Left);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_is_killed_ends_its_own_link_only() {
    let Some((device, gpu)) = devices() else { return };
    let mut rng = seeded();
    let reference = Reference::open();
    let shape = reference.shape;
    let server = server_on(device, DTYPE, ExpertSelection::All, |_| {}).await;
    let mut steady = join(&gpu, &server, shape, 1, DTYPE).await;
    for _ in 0..2 {
        let mut child = ChildGuard(
            test_support::child::command("client")
                .arg(server.data_addr().to_string())
                .stdout(Stdio::piped())
                .spawn()
                .expect("a child"),
        );
        let mut lines = BufReader::new(child.0.stdout.take().expect("its output")).lines();
        let at_work = lines.by_ref().any(|line| line.is_ok_and(|line| line.contains(AT_WORK)));
        assert!(at_work, "the child failed");
        assert_eq!(server.num_links(), 2);
        child.0.kill().expect("killed");
        for _ in 0..5 {
            let request = Request::random(&mut rng, &shape, 11);
            let (outcome, rows) = tokio::task::block_in_place(|| steady.layer(&request));
            assert_eq!(outcome, Outcome::Answered);
            check(&reference, &request, DTYPE, &rows);
        }
        eventually("the dead client's link is gone", || server.num_links() == 1);
    }
    server.shutdown().await;
    server.wait().await.expect("a shutdown is a good end");
}

/// The client process of the test above. Its argument is the server's address.
#[tokio::main(flavor = "multi_thread", worker_threads = 2)]
pub async fn client() {
    let addr = std::env::args().nth(1).expect("an address");
    let (_, gpu) = devices().expect("found by the parent");
    let mut rng = seeded();
    let checkpoint = checkpoint::Checkpoint::open(crate::common::tiny_moe()).expect("it opens");
    let shape = shape_of(&checkpoint);
    let addr = addr.parse().expect("an address");
    let mut client = Client::join(&gpu, addr, shape, 9, DTYPE, SLOT).await.expect("connected");
    for layer in 0.. {
        let request = Request::random(&mut rng, &shape, 20);
        assert_eq!(client.layer(&request).0, Outcome::Answered);
        if layer == 5 {
            println!("{AT_WORK}");
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn later_experts_are_loaded_while_clients_are_served() {
    let Some((device, gpu)) = devices() else { return };
    let mut rng = seeded();
    let reference = Reference::open();
    let shape = reference.shape;
    let first: Vec<u32> = (0..shape.num_experts / 2).collect();
    let selection = ExpertSelection::EveryLayer(first.clone());
    let server = std::sync::Arc::new(server_on(device, DTYPE, selection, |_| {}).await);
    let mut client = join(&gpu, &server, shape, 1, DTYPE).await;
    let mut layer = |layer: u32, experts: &[u32]| {
        let mut request = Request::random(&mut rng, &shape, experts.len());
        request.layer = layer;
        for (routes, expert) in request.routes.iter_mut().zip(experts) {
            *routes = vec![(*expert, 0.75)];
        }
        let (outcome, rows) = client.layer(&request);
        if outcome == Outcome::Answered {
            check(&reference, &request, DTYPE, &rows);
        }
        outcome
    };
    assert_ne!(
        tokio::task::block_in_place(|| layer(1, &[shape.num_experts - 1])),
        Outcome::Answered
    );
    // In another order in each layer, so that local indices differ between layers.
    let loading = {
        let (server, num_experts) = (std::sync::Arc::clone(&server), shape.num_experts);
        tokio::task::spawn_blocking(move || {
            for step in 0..num_experts - num_experts / 2 {
                for layer in 0..shape.num_layers {
                    let later = num_experts / 2 + (step * 3 + layer) % (num_experts / 2);
                    server.load_expert(layer, later).expect("loaded");
                }
            }
        })
    };
    let mut num_layers = 0;
    while !loading.is_finished() {
        let outcome = tokio::task::block_in_place(|| layer(num_layers % shape.num_layers, &first));
        assert_eq!(outcome, Outcome::Answered);
        num_layers += 1;
    }
    loading.await.expect("all are loaded");
    let all: Vec<u32> = (0..shape.num_experts).collect();
    for idx in 0..shape.num_layers {
        let held = server.holds();
        assert_eq!(held.experts(idx), all, "layer {idx}");
        assert_eq!(tokio::task::block_in_place(|| layer(idx, &all)), Outcome::Answered);
    }
    let loaded = metric(server.metrics(), "switchyard_server_experts_loaded");
    assert_eq!(loaded, f64::from(shape.num_layers * shape.num_experts));
    assert!(server.load_expert(shape.num_layers, 0).is_err());
    server.shutdown().await;
}

/// Kills a child process at the end of its test.
struct ChildGuard(Child);

impl Drop for ChildGuard {
    fn drop(&mut self) {
        // The child may be dead already. It is waited for in any case.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

const AT_WORK: &str = "at work";
