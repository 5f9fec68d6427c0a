//! Slow, silent and malicious peers, for server and client.

use control_api::{ControlError, LeaseRequest, MemberId, PlacementWatch, WatchOptions};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use super::*;

const NUM_PEERS: usize = 1000;

/// Both ends of every connection live in this process.
fn allow_files(wanted: u64) {
    let limit = getrlimit(Resource::Nofile);
    if limit.current.is_some_and(|current| current < wanted) {
        let current = limit.maximum.map_or(wanted, |maximum| maximum.min(wanted));
        assert!(current >= wanted, "{wanted} open files needed, {current} allowed");
        setrlimit(Resource::Nofile, Rlimit { current: Some(current), ..limit }).unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_thousand_silent_or_dripping_peers_delay_no_request_and_are_closed() {
    allow_files(4 * NUM_PEERS as u64);
    let mut config = config();
    config.lease_ttl = Duration::from_secs(60);
    let plane = Plane::start(config).await;
    let mut peers = tokio::task::JoinSet::new();
    for i in 0..NUM_PEERS {
        let addr = plane.addr;
        peers.spawn(async move {
            let mut stream = TcpStream::connect(addr).await.unwrap();
            let (mut reader, mut writer) = stream.split();
            let drip = async {
                // A third is silent, a third sends a head slowly, a third sends a body slowly.
                let text = match i % 3 {
                    0 => String::new(),
                    1 => format!("GET /v1/status HTTP/1.1\r\nx: {}", "x".repeat(1000)),
                    _ => {
                        let head = format!(
                            "POST /v1/members HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {TOKEN}\r\n\
                             content-type: application/json\r\ncontent-length: 1000\r\n\r\n"
                        );
                        writer.write_all(head.as_bytes()).await.unwrap();
                        "x".repeat(1000)
                    }
                };
                for byte in text.as_bytes() {
                    if writer.write_all(&[*byte]).await.is_err() {
                        break;
                    }
                    tokio::time::sleep(Duration::from_secs(1)).await;
                }
                std::future::pending::<()>().await;
            };
            let closed = async {
                let mut chunk = [0; 1024];
                while matches!(reader.read(&mut chunk).await, Ok(len) if len > 0) {}
            };
            tokio::select! {
                () = drip => {}
                () = closed => {}
            }
        });
    }
    // Valid requests succeed meanwhile; the client's timeout bounds each.
    let client = plane.client();
    let member = serve(&client, "healthy", 1).await;
    let lease = LeaseRequest { incarnation: 1, assignment_version: 0, load: None };
    let mut waits = Vec::new();
    let culled = tokio::time::timeout(Duration::from_secs(60), async {
        while peers.join_next().await.is_some() {}
    });
    tokio::pin!(culled);
    loop {
        tokio::select! {
            outcome = &mut culled => {
                outcome.expect("not all silent peers were closed within 60 s");
                break;
            }
            // A member may renew a hundred times a second.
            () = tokio::time::sleep(Duration::from_millis(20)) => {
                client.renew(&member, &lease).await.unwrap();
                // A new connection each, through the accept path.
                let started = std::time::Instant::now();
                plane.client().status().await.unwrap();
                waits.push(started.elapsed());
            }
        }
    }
    assert!(!waits.is_empty(), "everybody was closed before the first request was through");
    waits.sort();
    println!("{} healthy connects", waits.len());
    println!(
        "p50 {:?}, p99 {:?}, most {:?}",
        waits[waits.len() / 2],
        waits[waits.len() * 99 / 100],
        waits[waits.len() - 1]
    );
    plane.stop().await;
}

/// With silent peers on all connections, a new connection is still accepted.
#[tokio::test]
async fn silent_peers_give_way_when_all_places_are_taken() {
    let mut config = config();
    config.limits.max_connections = 8;
    config.limits.head_timeout = Duration::from_secs(60);
    let plane = Plane::start(config).await;
    let mut silent = Vec::new();
    for _ in 0..50 {
        silent.push(TcpStream::connect(plane.addr).await.unwrap());
    }
    for _ in 0..20 {
        plane.client().status().await.unwrap();
    }
    plane.stop().await;
}

/// Connections that have sent one request and then nothing give way, too. A watch does not: its response goes on.
#[tokio::test]
async fn idle_peers_give_way_and_watches_stay() {
    let mut config = config();
    config.limits.max_connections = 8;
    config.limits.head_timeout = Duration::from_secs(60);
    let plane = Plane::start(config).await;
    let ask = |path: &str| {
        format!("GET {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {TOKEN}\r\n\r\n")
    };
    let mut watch = TcpStream::connect(plane.addr).await.unwrap();
    watch.write_all(ask("/v1/placement/watch").as_bytes()).await.unwrap();
    let mut head = [0; 15];
    watch.read_exact(&mut head).await.unwrap();
    assert_eq!(&head, b"HTTP/1.1 200 OK");
    let mut idle = Vec::new();
    for _ in 0..30 {
        let mut stream = TcpStream::connect(plane.addr).await.unwrap();
        stream.write_all(ask("/v1/status").as_bytes()).await.unwrap();
        stream.read_exact(&mut head).await.expect("a newcomer is served");
        idle.push(stream);
    }
    // Keep-alive comments come once a second.
    let mut byte = [0; 1];
    let deadline = tokio::time::Instant::now() + Duration::from_millis(2500);
    let mut num_bytes = 0;
    while let Ok(read) = tokio::time::timeout_at(deadline, watch.read(&mut byte)).await {
        assert_eq!(read.expect("the watch broke"), 1, "the watch was closed");
        num_bytes += 1;
    }
    assert!(num_bytes > 0, "the watch is silent");
    plane.stop().await;
}

/// A connection whose peer does not read the response is closed.
#[tokio::test]
async fn a_peer_that_reads_nothing_is_closed() {
    let mut config = config();
    config.limits.write_timeout = Duration::from_millis(300);
    let plane = Plane::start(config).await;
    let mut stream = TcpStream::connect(plane.addr).await.unwrap();
    // Pipelined requests whose responses overflow all buffers.
    let request = b"GET /openapi.json HTTP/1.1\r\nhost: x\r\n\r\n".repeat(100);
    let flood = async { while stream.write_all(&request).await.is_ok() {} };
    tokio::time::timeout(BOUND, flood).await.expect("the connection was not closed");
    plane.stop().await;
}

#[tokio::test]
async fn oversize_heads_and_bodies_are_refused() {
    let mut config = config();
    config.limits.max_body_bytes = 10_000;
    let plane = Plane::start(config).await;
    let head = |extra: &str| {
        format!(
            "GET /v1/status HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {TOKEN}\r\n{extra}\r\n"
        )
    };
    let answer = raw(plane.addr, head("connection: close\r\n").as_bytes()).await;
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    let long = format!("x-long: {}\r\n", "x".repeat(100_000));
    let answer = raw(plane.addr, head(&long).as_bytes()).await;
    assert!(answer.starts_with("HTTP/1.1 431"), "{answer}");
    let many: String = (0..1000).map(|i| format!("x-{i}: 1\r\n")).collect();
    let answer = raw(plane.addr, head(&many).as_bytes()).await;
    assert!(answer.starts_with("HTTP/1.1 431"), "{answer}");
    let post = |length: usize, body: &str| {
        format!(
            "POST /v1/members HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {TOKEN}\r\n\
             content-type: application/json\r\ncontent-length: {length}\r\n\r\n{body}"
        )
    };
    let answer = raw(plane.addr, post(10_001, &"x".repeat(10_001)).as_bytes()).await;
    assert!(answer.starts_with("HTTP/1.1 413"), "{answer}");
    assert!(answer.contains("\"code\":\"body_too_large\""), "{answer}");
    // The announced length is enough to refuse the body.
    let answer = raw(plane.addr, post(1 << 40, "").as_bytes()).await;
    assert!(answer.starts_with("HTTP/1.1 413"), "{answer}");
    plane.client().status().await.unwrap();
    plane.stop().await;
}

#[tokio::test]
async fn nonsense_gets_one_clear_line() {
    let plane = Plane::start(config()).await;
    let send = async |method: &str, path: &str, content_type: &str, body: &str| {
        let length = body.len();
        let request = format!(
            "{method} {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {TOKEN}\r\n\
             content-type: {content_type}\r\ncontent-length: {length}\r\nconnection: close\r\n\r\n\
             {body}"
        );
        raw(plane.addr, request.as_bytes()).await
    };
    let json = "application/json";
    let deep = format!("{{\"later\": {}", "[".repeat(100_000));
    for (body, wanted) in [
        ("{", "EOF"),
        ("", "missing field"),
        ("null", "expected struct"),
        ("{\"name\": 5}", "expected a string"),
        (&deep, "EOF"),
    ] {
        let answer = send("POST", "/v1/members", json, body).await;
        assert!(answer.starts_with("HTTP/1.1 400"), "{answer}");
        assert!(answer.contains("\"code\":\"bad_request\"") && answer.contains(wanted), "{answer}");
    }
    let answer = send("POST", "/v1/members", "text/plain", "{}").await;
    assert!(answer.starts_with("HTTP/1.1 400") && answer.contains("Content-Type"), "{answer}");
    let answer = send("GET", "/v2/none", json, "").await;
    assert!(answer.starts_with("HTTP/1.1 404") && answer.contains("\"not_found\""), "{answer}");
    let answer = send("PATCH", "/v1/members", json, "").await;
    assert!(answer.starts_with("HTTP/1.1 405"), "{answer}");
    let answer = send("PUT", "/v1/members/%00/lease", json, "{\"incarnation\": 1}").await;
    assert!(answer.starts_with("HTTP/1.1 404"), "{answer}");
    let answer = send("DELETE", &format!("/v1/members/{}", MemberId::random()), json, "").await;
    assert!(answer.starts_with("HTTP/1.1 404") && answer.contains("unknown_member"), "{answer}");
    for bytes in [&b"\0\xff\xfe"[..], b"GET", b"\r\n\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"]
    {
        raw(plane.addr, bytes).await;
    }
    plane.client().status().await.unwrap();
    plane.stop().await;
}

/// A control plane that sends malformed responses. The client returns typed errors and never panics.
#[tokio::test]
async fn the_client_survives_a_garbage_server() {
    use rand::rngs::StdRng;
    use rand::{RngExt, SeedableRng};
    let seed: u64 = rand::random();
    println!("seed {seed}");
    let mut rng = StdRng::seed_from_u64(seed);
    let bad_table = concat!(
        r#"{"cluster_id":"c","epoch":1,"model":{"fingerprint":"0123456789","architecture":"a","#,
        r#""hidden":1,"moe_layers":[0],"num_experts":1,"top_k":1},"servers":[],"#,
        r#""layers":[{"layer":0,"replicas":[[7]]}]}"#
    );
    let mut answers: Vec<Vec<u8>> = vec![
        b"".to_vec(),
        b"HTTP/1.1 200 OK\r\n\r\n".to_vec(),
        b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\n{".to_vec(),
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}".to_vec(),
        b"HTTP/1.1 302 Found\r\nlocation: http://127.0.0.1:1/\r\ncontent-length: 0\r\n\r\n"
            .to_vec(),
        b"HTTP/1.1 500 Oops\r\ncontent-length: 4\r\n\r\n<ht>".to_vec(),
        b"HTTP/1.1 401 No\r\ncontent-length: 4\r\n\r\nnope".to_vec(),
        b"HTTP/1.1 999 X\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n".to_vec(),
        format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n{bad_table}", bad_table.len())
            .into_bytes(),
        format!("HTTP/1.1 200 OK\r\n\r\nevent: placement\ndata: {bad_table}\n\n").into_bytes(),
        b"HTTP/1.1 200 OK\r\n\r\nevent: placement\ndata: {\n\n".to_vec(),
        [b"HTTP/1.1 200 OK\r\n\r\n".to_vec(), vec![b'x'; 2 << 20]].concat(),
    ];
    for _ in 0..50 {
        let mut noise = vec![0u8; rng.random_range(1..2000)];
        rng.fill(&mut noise[..]);
        if rng.random_bool(0.5) {
            noise.splice(0..0, b"HTTP/1.1 200 OK\r\n\r\n".iter().copied());
        }
        answers.push(noise);
    }
    let mut options = control_api::ClientOptions::default();
    options.timeout = Duration::from_millis(500);
    options.watch_idle_timeout = Duration::from_millis(500);
    options.max_response_bytes = 1 << 20;
    for answer in answers {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let text = String::from_utf8_lossy(&answer).chars().take(80).collect::<String>();
        let server = tokio::spawn(async move {
            loop {
                let (mut stream, _) = listener.accept().await.unwrap();
                let mut chunk = [0; 4096];
                let _ = stream.read(&mut chunk).await;
                let _ = stream.write_all(&answer).await;
            }
        });
        let client = ControlClient::with_options(&url, None, options.clone()).unwrap();
        let errors: [Result<(), ControlError>; 6] = [
            client.register(&request("a", 1)).await.map(drop),
            client.placement().await.map(drop),
            client.members().await.map(drop),
            client.status().await.map(drop),
            client
                .renew(
                    &MemberId::random(),
                    &LeaseRequest { incarnation: 1, assignment_version: 0, load: None },
                )
                .await
                .map(drop),
            match client.watch_placement().await {
                Ok(mut stream) => stream.next().await.map(drop),
                Err(err) => Err(err),
            },
        ];
        for error in errors {
            let error = error.expect_err(&text);
            assert!(!error.to_string().is_empty());
        }
        let watch = PlacementWatch::spawn_thread(&client, WatchOptions::default()).unwrap();
        let mut state = watch.state();
        let failed = state.wait_for(|state| state.last_error.is_some());
        drop(tokio::time::timeout(BOUND, failed).await.unwrap().unwrap());
        assert_eq!(watch.current().epoch, 0);
        server.abort();
    }
}
