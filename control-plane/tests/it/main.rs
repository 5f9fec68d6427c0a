//! The control plane over real sockets, with the real client.

mod access;
mod api;
mod certificates;
mod crowd;
mod durability;
mod hostile;
mod kill;
mod lease;
mod models;
mod shared;
mod tickets;
mod tls;
mod watch;

use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use control_api::{Assignment, ControlClient, ModelDescriptor, ReadyRequest, RegisterRequest};
use switchyard_control_plane::{RunError, Server, ServerConfig};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

test_support::child_processes! {
    "control-plane" => kill::serve,
    "shared-control-plane" => shared::serve,
}

/// Longest wait for an expected event.
const BOUND: Duration = Duration::from_secs(20);
const TOKEN: &str = "test-token";

/// A control plane that runs on the test's runtime.
struct Plane {
    addr: SocketAddr,
    stop: Option<oneshot::Sender<()>>,
    task: JoinHandle<Result<(), RunError>>,
}

impl Plane {
    async fn start(config: ServerConfig) -> Self {
        Self::run(Server::bind(config).await.unwrap())
    }

    fn run(server: Server) -> Self {
        let addr = server.local_addr();
        let (stop, stopped) = oneshot::channel::<()>();
        let task = tokio::spawn(server.run(async {
            let _ = stopped.await;
        }));
        Self { addr, stop: Some(stop), task }
    }

    fn url(&self) -> String {
        format!("http://{}", self.addr)
    }

    fn client(&self) -> ControlClient {
        ControlClient::new(&self.url(), Some(TOKEN.to_owned())).unwrap()
    }

    /// Shuts the control plane down cleanly.
    async fn stop(mut self) {
        self.stop.take().unwrap().send(()).unwrap();
        tokio::time::timeout(BOUND, self.task).await.unwrap().unwrap().unwrap();
    }
}

/// Short leases on a free port.
fn config() -> ServerConfig {
    let mut config = ServerConfig::new("127.0.0.1:0", 4, 2);
    config.token = Some(TOKEN.to_owned());
    config.lease_ttl = Duration::from_millis(900);
    config
}

/// Lease of members that must not expire: long enough for a busy machine to renew.
const LEASE: Duration = Duration::from_secs(3);

fn patient_config() -> ServerConfig {
    let mut config = config();
    config.lease_ttl = LEASE;
    config
}

fn durable_config(dir: &Path) -> ServerConfig {
    let mut config = patient_config();
    config.data_dir = Some(dir.to_owned());
    config
}

fn model() -> ModelDescriptor {
    ModelDescriptor {
        fingerprint: "0123456789abcdef".to_owned(),
        architecture: "qwen3_moe".to_owned(),
        hidden: 256,
        moe_layers: vec![0, 1, 2, 3],
        num_experts: 16,
        top_k: 4,
    }
}

fn request(name: &str, incarnation: u64) -> RegisterRequest {
    let mut request = RegisterRequest::new(name, "127.0.0.1:7000", model());
    request.incarnation = incarnation;
    request
}

/// Registers and reports ready.
async fn serve(client: &ControlClient, name: &str, incarnation: u64) -> control_api::MemberId {
    let response = client.register(&request(name, incarnation)).await.unwrap();
    let holds: Assignment = response.assignment;
    client.ready(&response.member_id, &ReadyRequest { incarnation, holds }).await.unwrap();
    response.member_id
}

/// Sends raw bytes and reads the response until the server closes or is silent for 2 s.
async fn raw(addr: SocketAddr, bytes: &[u8]) -> String {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let mut stream = tokio::net::TcpStream::connect(addr).await.unwrap();
    // The server may close before it has read everything.
    let _ = stream.write_all(bytes).await;
    let mut answer = Vec::new();
    let mut chunk = [0; 4096];
    while let Ok(Ok(len)) =
        tokio::time::timeout(Duration::from_secs(2), stream.read(&mut chunk)).await
    {
        if len == 0 {
            break;
        }
        answer.extend_from_slice(&chunk[..len]);
    }
    String::from_utf8_lossy(&answer).into_owned()
}
