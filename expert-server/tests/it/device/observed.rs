//! Reports to a batch observer.

use std::sync::{Arc, Mutex};

use protocol::WireDtype;
use switchyard_expert_server::ExpertSelection;
use switchyard_expert_server::device::{BatchObserver, BatchReport};

use crate::common::{Reference, Request, eventually, metric, seeded};
use crate::device::client::Outcome;
use crate::device::{check, devices, join, server_on};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn batches_are_timed_as_far_as_their_experts_where_that_is_asked_for() {
    let Some((device, gpu)) = devices() else { return };
    let mut rng = seeded();
    let (reference, dtype) = (Reference::open(), WireDtype::F8E4m3);
    for every in [0, 1, RARELY] {
        let reports = Arc::new(Mutex::new(Vec::<BatchReport>::new()));
        let kept = Arc::clone(&reports);
        let server = server_on(device, dtype, ExpertSelection::All, |config| {
            config.batch_observer =
                Some(BatchObserver::new(move |report| kept.lock().expect("kept").push(*report)));
            config.device.as_mut().expect("a GPU").experts_timed_every = every;
        })
        .await;
        let mut client = join(&gpu, &server, reference.shape, 7, dtype).await;
        for num_tokens in 1..=NUM_LAYERS {
            let request = Request::random(&mut rng, &reference.shape, num_tokens);
            let (outcome, rows) = tokio::task::block_in_place(|| client.layer(&request));
            assert_eq!(outcome, Outcome::Answered);
            check(&reference, &request, dtype, &rows);
        }
        eventually("all batches are reported", || {
            reports.lock().expect("reports").len() == NUM_LAYERS
        });
        let reports = reports.lock().expect("reports").clone();
        for (num_rows, report) in (1..).zip(&reports) {
            assert_eq!((report.num_rows, report.num_clients), (num_rows, 1), "{report:?}");
            assert!(
                report.experts_time.is_none_or(|time| time <= report.server_time),
                "{report:?}"
            );
        }
        let num_timed = reports.iter().filter(|report| report.experts_time.is_some()).count();
        match every {
            0 => assert_eq!(num_timed, 0),
            1 => assert_eq!(num_timed, NUM_LAYERS),
            // At most the first of each of the two batches in flight, because batches without a frame count, too.
            _ => assert!(num_timed <= 2, "{reports:?}"),
        }
        server.shutdown().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn graphs_are_counted_when_they_are_recorded() {
    let Some((device, gpu)) = devices() else { return };
    let mut rng = seeded();
    let (shape, dtype) = (Reference::open().shape, WireDtype::Bf16);
    let server = server_on(device, dtype, ExpertSelection::All, |_| {}).await;
    let recorded = |part: &str| {
        metric(server.metrics(), &format!("switchyard_server_graph_record_seconds_{part}"))
    };
    assert_eq!(recorded("count"), 0.0);
    let mut clients = Vec::new();
    for id in 1..=3 {
        let before = recorded("count");
        clients.push(join(&gpu, &server, shape, id, dtype).await);
        let request = Request::random(&mut rng, &shape, 3);
        for client in &mut clients {
            let answer = tokio::task::block_in_place(|| client.layer(&request));
            assert_eq!(answer.0, Outcome::Answered);
        }
        // One graph per context and number of clients.
        eventually("graphs for one more client", || recorded("count") >= before + 2.0);
        assert!(recorded("sum") > 0.0);
    }
    server.shutdown().await;
}

const NUM_LAYERS: usize = 6;
/// More batches than the test has.
const RARELY: u32 = 1 << 30;
