//! Faulty and hostile clients, beside one in order.

use std::time::Duration;

use p2p_core::bootstrap::CloseReason;
use protocol::WireDtype;
use rand::{Rng, RngExt};
use switchyard_expert_server::ExpertSelection;

use crate::common::{PATIENCE, Reference, Request, eventually, metric, seeded};
use crate::device::client::Outcome;
use crate::device::{SLOT, check, devices, join, server_on};

const DTYPE: WireDtype = WireDtype::Bf16;
// Codes of error frames, from docs/reference/wire-format.md.
const WRONG_LAYER: u64 = 3;
const NOT_MY_EXPERT: u64 = 4;
const STALE_CHANNEL: u64 = 6;
const INTERNAL: u64 = 9;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn wrong_frames_are_refused_with_a_code_counted_and_disturb_no_other_client() {
    let Some((device, gpu)) = devices() else { return };
    let mut rng = seeded();
    let reference = Reference::open();
    let shape = reference.shape;
    // All experts of each layer except the last; in the last layer all except the first.
    let last = shape.num_experts - 1;
    let layer = shape.num_layers - 1;
    let mut parts: Vec<String> = (0..layer).map(|l| format!("{l}:0-{}", last - 1)).collect();
    parts.push(format!("{layer}:1-{last}"));
    let selection: ExpertSelection = parts.join(";").parse().expect("a selection");
    let server = server_on(device, DTYPE, selection, |_| {}).await;
    let mut wrong = join(&gpu, &server, shape, 1, DTYPE).await;
    let mut right = join(&gpu, &server, shape, 2, DTYPE).await;
    let only = move |layer, expert| Request {
        layer,
        x: vec![0.5; shape.hidden as usize],
        routes: vec![vec![(expert, 1.0)]],
    };
    let reference = tokio::task::spawn_blocking(move || {
        let mut fine = |client: &mut crate::device::client::Client, id| {
            let mut request = Request::random(&mut rng, &shape, 6);
            request.layer = id;
            for (expert, _) in request.routes.iter_mut().flatten() {
                // Loaded in every layer.
                *expert = (*expert).clamp(1, last - 1);
            }
            for routes in &mut request.routes {
                routes.sort_by_key(|(expert, _)| *expert);
                routes.dedup_by_key(|(expert, _)| *expert);
            }
            let (outcome, rows) = client.layer(&request);
            assert_eq!(outcome, Outcome::Answered);
            check(&reference, &request, DTYPE, &rows);
        };
        for layer in 0..shape.num_layers {
            fine(&mut right, layer);
            // The loaded experts depend on the layer.
            let (missing, held) = if layer == shape.num_layers - 1 { (0, last) } else { (last, 0) };
            assert_eq!(wrong.layer(&only(layer, missing)).0, Outcome::Refused(NOT_MY_EXPERT));
            assert_eq!(wrong.layer(&only(layer, held)).0, Outcome::Answered);
        }
        assert_eq!(wrong.layer(&only(shape.num_layers, 1)).0, Outcome::Refused(WRONG_LAYER));
        fine(&mut right, 0);
        wrong.pretend(77);
        assert_eq!(wrong.layer(&only(0, 1)).0, Outcome::Refused(STALE_CHANNEL));
        wrong.pretend(1);
        fine(&mut wrong, 0);
        fine(&mut right, 0);
        reference
    })
    .await
    .expect("other clients are served");
    let bad = |code: &str| {
        let name = format!("switchyard_server_bad_frames_total{{code=\"{code}\"}}");
        metric(server.metrics(), &name)
    };
    eventually("all refusals are counted", || {
        bad("not_my_expert") == f64::from(shape.num_layers)
            && bad("wrong_layer") == 1.0
            && bad("stale_channel") == 1.0
    });
    drop(reference);
    server.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_keeps_sending_malformed_frames_is_dropped() {
    let Some((device, gpu)) = devices() else { return };
    let reference = Reference::open();
    let shape = reference.shape;
    let server = server_on(device, DTYPE, ExpertSelection::All, |config| {
        config.limits.max_bad_frames = 2;
    })
    .await;
    let mut client = join(&gpu, &server, shape, 1, DTYPE).await;
    client.pretend(3);
    client.timeout = Duration::from_secs(5);
    let request =
        Request { layer: 0, x: vec![0.5; shape.hidden as usize], routes: vec![vec![(1, 1.0)]] };
    let client = tokio::task::spawn_blocking(move || {
        for _ in 0..3 {
            assert_eq!(client.layer(&request).0, Outcome::Refused(STALE_CHANNEL));
        }
        client
    })
    .await
    .expect("refused thrice");
    let reason = tokio::time::timeout(PATIENCE, client.liveness.closed()).await.expect("dropped");
    assert_eq!(reason, CloseReason::Left);
    let dropped = "switchyard_server_links_dropped_total{reason=\"bad_frames\"}";
    assert_eq!(metric(server.metrics(), dropped), 1.0);
    server.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_keeps_withholding_announced_rows_is_dropped() {
    let Some((device, gpu)) = devices() else { return };
    let mut rng = seeded();
    let reference = Reference::open();
    let shape = reference.shape;
    let server = server_on(device, DTYPE, ExpertSelection::All, |config| {
        config.limits.max_bad_frames = 2;
    })
    .await;
    let mut hostile = join(&gpu, &server, shape, 1, DTYPE).await;
    let mut right = join(&gpu, &server, shape, 2, DTYPE).await;
    let hostile = tokio::task::spawn_blocking(move || {
        for _ in 0..SLOT.num_frames {
            let request = Request::random(&mut rng, &shape, 9);
            assert_eq!(hostile.layer(&request).0, Outcome::Answered);
        }
        for turn in 1..4 {
            let number = SLOT.num_frames as u64 + turn;
            hostile.announce(number, 9);
            // A client that shares batches with it waits, but is served.
            let request = Request::random(&mut rng, &shape, 5);
            let (outcome, rows) = right.layer(&request);
            assert_eq!(outcome, Outcome::Answered, "turn {turn}");
            check(&reference, &request, DTYPE, &rows);
            let told = number << 16 | INTERNAL;
            eventually("the frame is refused", || hostile.status(number) == told);
        }
        hostile
    })
    .await
    .expect("refused thrice, and the other client is served");
    let reason = tokio::time::timeout(PATIENCE, hostile.liveness.closed()).await.expect("dropped");
    assert_eq!(reason, CloseReason::Left);
    let dropped = "switchyard_server_links_dropped_total{reason=\"bad_frames\"}";
    assert_eq!(metric(server.metrics(), dropped), 1.0);
    server.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn random_bytes_all_over_a_slot_harm_their_writer_only() {
    let Some((device, gpu)) = devices() else { return };
    let mut rng = seeded();
    let reference = Reference::open();
    let shape = reference.shape;
    let server = server_on(device, DTYPE, ExpertSelection::All, |config| {
        config.limits.max_bad_frames = u32::MAX;
    })
    .await;
    let mut hostile = join(&gpu, &server, shape, 1, DTYPE).await;
    let mut right = join(&gpu, &server, shape, 2, DTYPE).await;
    hostile.timeout = Duration::from_millis(20);
    tokio::task::spawn_blocking(move || {
        let geometry = hostile.geometry;
        for round in 0..40 {
            // After a valid frame, so that the server reads the damaged one.
            let request = Request::random(&mut rng, &shape, 9);
            hostile.dispatch(&request);
            for _ in 0..rng.random_range(1..4) {
                let mut bytes = vec![0u8; rng.random_range(1..200)];
                rng.fill_bytes(&mut bytes);
                let region = match round % 3 {
                    0 => geometry.control_offset..geometry.slot_bytes,
                    1 => 0..geometry.frame_bytes,
                    _ => 0..geometry.slot_bytes,
                };
                let most = region.end - region.start - bytes.len() as u64;
                hostile.scribble(region.start + rng.random_range(0..most), &bytes);
            }
            let _ = hostile.combine(&request);
            let request = Request::random(&mut rng, &shape, 12);
            let (outcome, rows) = right.layer(&request);
            assert_eq!(outcome, Outcome::Answered, "round {round}");
            check(&reference, &request, DTYPE, &rows);
        }
    })
    .await
    .expect("the other client is served");
    assert!(server.ready().is_ok());
    server.shutdown().await;
    server.wait().await.expect("a shutdown is a good end");
}
