//! Many identified members and clients behind one address, as behind a NAT: none of them is refused.

use std::sync::Arc;

use control_api::{LeaseRequest, ReadyRequest, RegisterResponse, TicketRequest};
use serde::Serialize;
use serde::de::DeserializeOwned;
use sha2::{Digest, Sha256};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::TcpStream;
use tokio::sync::Barrier;
use trust::Role;
use trust::ticket::SecretKey;
use trust::tokens;

use super::*;

/// A connection that stays open, with the token of its holder.
struct Caller {
    stream: BufReader<TcpStream>,
    token: String,
}

impl Caller {
    async fn new(addr: SocketAddr, token: String) -> Self {
        let stream = TcpStream::connect(addr).await.expect("a connection");
        Self { stream: BufReader::new(stream), token }
    }

    /// Sends a request, and returns the body of its answer, which must be a success.
    async fn ask(&mut self, method: &str, path: &str, body: &impl Serialize) -> Vec<u8> {
        self.send(method, path, body).await;
        let (head, len) = self.head().await;
        let mut answer = vec![0; len.expect("an answer with a length")];
        self.stream.read_exact(&mut answer).await.expect("the whole answer");
        let text = String::from_utf8_lossy(&answer);
        assert!(head.starts_with("HTTP/1.1 20"), "{method} {path}: {head}\n{text}");
        answer
    }

    async fn ask_for<T: DeserializeOwned>(
        &mut self,
        method: &str,
        path: &str,
        body: &impl Serialize,
    ) -> T {
        serde_json::from_slice(&self.ask(method, path, body).await).expect("JSON")
    }

    async fn send(&mut self, method: &str, path: &str, body: &impl Serialize) {
        let body = serde_json::to_string(body).expect("JSON");
        let head = format!(
            "{method} {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {}\r\ncontent-type: application/json\r\n",
            self.token
        );
        let request = match method {
            "GET" => format!("{head}\r\n"),
            _ => format!("{head}content-length: {}\r\n\r\n{body}", body.len()),
        };
        self.stream.write_all(request.as_bytes()).await.expect("the connection is open");
    }

    /// The head of an answer, with the length of the body if it has one.
    async fn head(&mut self) -> (String, Option<usize>) {
        let mut head = String::new();
        while !head.ends_with("\r\n\r\n") {
            let read = tokio::time::timeout(PATIENCE, self.stream.read_line(&mut head)).await;
            assert_ne!(read.expect("an answer in time").expect("an answer"), 0, "closed: {head}");
        }
        let len = head.lines().find_map(|line| line.strip_prefix("content-length: "));
        let len = len.and_then(|len| len.parse().ok());
        (head, len)
    }
}

/// The long form (`cargo xtask test --all`) has a thousand servers and a thousand clients.
fn num_of_each() -> usize {
    if std::env::var_os("SWITCHYARD_LONG").is_some() { 1000 } else { 100 }
}

/// All of them start at once, then each does what it does at rest, more often than usual. Each has a token of its own,
/// and all have one address. Half of them watch.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_whole_fleet_behind_one_address_is_served() {
    const ROUNDS: usize = 5;
    let num = num_of_each();
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("tokens");
    let mut lines = String::new();
    let mut token_of = |name: String, role| {
        let token = tokens::generate();
        let hash: String =
            Sha256::digest(&token).iter().map(|byte| format!("{byte:02x}")).collect();
        lines += &format!("{{\"name\":\"{name}\",\"role\":\"{role}\",\"sha256\":\"{hash}\"}}\n");
        token
    };
    let servers: Vec<_> =
        (0..num).map(|idx| token_of(format!("gpu-{idx}"), Role::Server)).collect();
    let clients: Vec<_> =
        (0..num).map(|idx| token_of(format!("engine-{idx}"), Role::Client)).collect();
    let viewer = token_of("wall".to_owned(), Role::Viewer);
    std::fs::write(&path, lines).unwrap();
    let mut config = config();
    config.num_servers = 1;
    config.replicas = 1;
    config.lease_ttl = Duration::from_secs(60);
    (config.token, config.tokens) = (None, Some(path));
    // Far too few for all of them, if they counted by their address or together.
    config.limits.rates.per_address = 1;
    config.limits.rates.per_identity = 10;
    // A host under load may take long. Rates and places are under test here.
    config.limits.head_timeout = PATIENCE;
    config.limits.request_timeout = PATIENCE;
    let plane = Plane::start(config).await;
    let addr = plane.addr;
    let start = Arc::new(Barrier::new(2 * num));
    let key = SecretKey::generate().unwrap().public().to_string();

    let mut callers = tokio::task::JoinSet::new();
    for (idx, token) in servers.into_iter().enumerate() {
        let start = Arc::clone(&start);
        callers.spawn(async move {
            start.wait().await;
            let mut caller = Caller::new(addr, token).await;
            let incarnation = idx as u64 + 1;
            let request = request(&format!("server-{idx}"), incarnation);
            let registered: RegisterResponse =
                caller.ask_for("POST", "/v1/members", &request).await;
            let member = String::from(registered.member_id);
            let ready = ReadyRequest { incarnation, holds: registered.assignment };
            caller.ask("POST", &format!("/v1/members/{member}/ready"), &ready).await;
            let lease = LeaseRequest { incarnation, assignment_version: 0, load: None };
            for _ in 0..ROUNDS {
                caller.ask("PUT", &format!("/v1/members/{member}/lease"), &lease).await;
            }
            caller
        });
    }
    for token in clients {
        let (start, key) = (Arc::clone(&start), key.clone());
        callers.spawn(async move {
            start.wait().await;
            let mut watch = Caller::new(addr, token.clone()).await;
            watch.send("GET", "/v1/placement/watch", &()).await;
            let (head, _) = watch.head().await;
            assert!(head.starts_with("HTTP/1.1 200"), "{head}");
            let mut caller = Caller::new(addr, token).await;
            for _ in 0..ROUNDS {
                caller.ask("GET", "/v1/status", &()).await;
                let request = TicketRequest::new("engine".to_owned(), key.clone());
                caller.ask("POST", "/v1/tickets", &request).await;
            }
            // Its events are read all the time, as clients do.
            tokio::spawn(async move {
                let mut event = String::new();
                while matches!(watch.stream.read_line(&mut event).await, Ok(1..)) {
                    event.clear();
                }
            });
            caller
        });
    }
    let kept = callers.join_all().await;
    assert_eq!(kept.len(), 2 * num);
    let metrics = raw(addr, b"GET /metrics HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").await;
    let mut num_checked = 0;
    for line in metrics.lines() {
        let name = line.split(['{', ' ']).next().unwrap_or_default();
        if [REFUSED, CULLED].contains(&name) {
            assert!(line.ends_with(" 0"), "{line}");
            num_checked += 1;
        }
    }
    assert!(num_checked > 2, "{metrics}");
    // The log has each of them, and as many entries as it may.
    let mut viewer = Caller::new(addr, viewer).await;
    let log: control_api::AuditList = viewer.ask_for("GET", "/v1/audit", &()).await;
    let tickets = log.entries.iter().filter(|entry| entry.action == "ticket").count();
    assert_eq!(tickets, num.min(1000));
    plane.stop().await;
}

const PATIENCE: Duration = Duration::from_secs(60);
/// Refusals of requests, and connections that gave way.
const REFUSED: &str = "switchyard_control_refused_requests_total";
const CULLED: &str = "switchyard_control_connections_culled_total";
