//! The client and a control plane, as far as their HTTP goes: a stub speaks the control plane's part.

mod client_common;

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use client_common::fake::{Act, FakeFleet, Script, expected};
use client_common::{Request, difference, not_ready_because, poisoned, seeded, table};
use control_api::PlacementTable;
use p2p_core::SlotConfig;
use switchyard_attention_client::MoeClient;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

const SLOT: SlotConfig = SlotConfig { slot_bytes: 20 << 10, num_frames: 2 };

/// Serves one table for ever and remembers what is reported.
struct Stub {
    url: String,
    reports: Arc<Mutex<Vec<String>>>,
}

impl Stub {
    async fn start(table: PlacementTable) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let reports: Arc<Mutex<Vec<String>>> = Arc::default();
        let kept = Arc::clone(&reports);
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                tokio::spawn(answer(stream, table.clone(), Arc::clone(&kept)));
            }
        });
        Self { url, reports }
    }
}

async fn answer(mut stream: TcpStream, table: PlacementTable, reports: Arc<Mutex<Vec<String>>>) {
    let mut request = String::new();
    while !is_complete(&request) {
        let mut chunk = [0; 4096];
        match stream.read(&mut chunk).await {
            Ok(num_bytes) if num_bytes > 0 => {
                request.push_str(&String::from_utf8_lossy(&chunk[..num_bytes]));
            }
            _ => return,
        }
    }
    if !request.to_lowercase().contains("authorization: bearer sesame\r\n") {
        let body = r#"{"code":"unauthorized","message":"the stub wants its token"}"#;
        let head = "HTTP/1.1 401 Unauthorized\r\nconnection: close\r\n";
        let text = format!("{head}content-length: {}\r\n\r\n{body}", body.len());
        let _ = stream.write_all(text.as_bytes()).await;
    } else if request.starts_with("POST /v1/tickets ") {
        // A control plane of a version without tickets.
        let body = r#"{"code":"not_found","message":"no such route"}"#;
        let head = "HTTP/1.1 404 Not Found\r\nconnection: close\r\n";
        let text = format!("{head}content-length: {}\r\n\r\n{body}", body.len());
        let _ = stream.write_all(text.as_bytes()).await;
    } else if request.starts_with("POST") {
        reports.lock().unwrap().push(request);
        let body = r#"{"must_renew_within_ms":100}"#;
        let head = "HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-type: application/json\r\n";
        let text = format!("{head}content-length: {}\r\n\r\n{body}", body.len());
        let _ = stream.write_all(text.as_bytes()).await;
    } else {
        let head =
            "HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-type: text/event-stream\r\n\r\n";
        let data = serde_json::to_string(&table).unwrap();
        let text = format!("{head}event: placement\ndata: {data}\n\n");
        let _ = stream.write_all(text.as_bytes()).await;
        // The stream stays open.
        while stream.write_all(b": alive\n\n").await.is_ok() {
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
    }
}

fn is_complete(request: &str) -> bool {
    let Some((head, body)) = request.split_once("\r\n\r\n") else { return false };
    let length = head.lines().find_map(|line| {
        let (name, value) = line.split_once(':')?;
        name.eq_ignore_ascii_case("content-length").then(|| value.trim().parse().unwrap_or(0))
    });
    body.len() >= length.unwrap_or(0)
}

#[test]
fn a_placement_is_followed_and_a_dead_server_reported_once() {
    let mut rng = seeded("a_placement_is_followed_and_a_dead_server_reported_once");
    let right: Script = Arc::new(|_| Act::Answer);
    let dies: Script = Arc::new(|seen| if seen.before == 3 { Act::Die } else { Act::Answer });
    let fleet = FakeFleet::start(SLOT, vec![dies, right]);
    let addrs: Vec<String> = fleet.servers.iter().map(|server| server.addr.clone()).collect();
    let stub = fleet.runtime.block_on(Stub::start(table(
        &fleet.model,
        41,
        &addrs,
        &vec![vec![0, 1]; fleet.model.shape.num_experts as usize],
    )));
    let client = MoeClient::builder(fleet.model.clone())
        .control_plane(&stub.url, Some("sesame".to_owned()))
        .name("tester")
        .slot(SLOT)
        .deadline(Duration::from_secs(5))
        .build()
        .unwrap();
    client.wait_ready(Duration::from_secs(20)).unwrap();
    assert_eq!(client.epoch(), 41);
    for _ in 0..10 {
        let request = Request::random(&mut rng, &fleet.model, 60, 4);
        let mut out = poisoned(request.x.len());
        client
            .forward(request.layer, &request.x, &request.idx, &request.weights, &mut out)
            .unwrap();
        assert!(difference(&out, &expected(&request, client.hidden())) < 1e-5);
    }
    let until = Instant::now() + Duration::from_secs(20);
    while stub.reports.lock().unwrap().is_empty() {
        assert!(Instant::now() < until, "no report");
        std::thread::sleep(Duration::from_millis(5));
    }
    let reports = stub.reports.lock().unwrap();
    assert_eq!(reports.len(), 1, "{reports:?}");
    assert!(reports[0].starts_with("POST /v1/members/m-0/suspect "), "{}", reports[0]);
    assert!(reports[0].contains("tester"), "{}", reports[0]);
}

#[test]
fn a_control_plane_that_refuses_or_is_not_there_is_named() {
    let fleet = FakeFleet::start(SLOT, vec![]);
    let no_servers = table(&fleet.model, 1, &[], &vec![vec![]; 8]);
    let stub = fleet.runtime.block_on(Stub::start(no_servers));
    let refuse = |url: &str, words: &[&str]| {
        let client = MoeClient::builder(fleet.model.clone())
            .control_plane(url, Some("wrong".to_owned()))
            .slot(SLOT)
            .build()
            .unwrap();
        not_ready_because(&client, words);
    };
    refuse(&stub.url, &["refuses the token"]);
    refuse("http://127.0.0.1:9", &["127.0.0.1:9", "unreachable"]);
}
