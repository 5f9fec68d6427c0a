//! Servers as members of a fleet: assignments, a control plane that restarts, leaving, supersession.

use std::path::Path;
use std::time::{Duration, Instant};

use checkpoint::{Checkpoint, Coverage};
use control_api::{ControlClient, ModelDigests, PlacementTable};
use control_plane::{Server, ServerConfig as ControlConfig};
use rand::RngExt;
use rand::rngs::StdRng;
use switchyard_expert_server::{
    ExpertSelection, ExpertServer, Placement, RunningServer, ServerConfig, ServerError, StartError,
};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

use super::lifecycle::get;
use crate::common::{PATIENCE, seeded, start_server};

struct ControlPlane {
    url: String,
    stop: oneshot::Sender<()>,
    task: JoinHandle<()>,
}

impl ControlPlane {
    /// Two servers, every expert on one of them, short leases.
    async fn start(listen: &str, dir: &Path) -> Self {
        Self::start_with_token(listen, dir, None).await
    }

    async fn start_with_token(listen: &str, dir: &Path, token: Option<&str>) -> Self {
        let mut config = ControlConfig::new(listen, 2, 1);
        config.token = token.map(str::to_owned);
        config.lease_ttl = Duration::from_secs(2);
        config.data_dir = Some(dir.to_owned());
        let server = Server::bind(config).await.expect("the control plane binds");
        let url = format!("http://{}", server.local_addr());
        let (stop, stopped) = oneshot::channel::<()>();
        let task = tokio::spawn(async move {
            let shutdown = async move {
                // A dropped sender stops the server, too.
                let _ = stopped.await;
            };
            server.run(shutdown).await.expect("the control plane runs");
        });
        Self { url, stop, task }
    }

    async fn stop(self) {
        self.stop.send(()).expect("it runs");
        self.task.await.expect("it ends well");
    }

    async fn member(&self, name: &str) -> RunningServer {
        start_server(name, ExpertSelection::All, |config| {
            config.placement = Placement::ControlPlane { url: self.url.clone(), token: None };
            config.metrics_addr = Some(([127, 0, 0, 1], 0).into());
            config.drain_idle = Duration::from_millis(50);
        })
        .await
    }

    async fn digests_when(
        &self,
        what: &str,
        holds: impl Fn(&ModelDigests) -> bool,
    ) -> ModelDigests {
        let client = ControlClient::new(&self.url, None).expect("a client");
        let deadline = Instant::now() + PATIENCE;
        loop {
            if let Ok(digests) = client.model_digests().await
                && holds(&digests)
            {
                return digests;
            }
            assert!(Instant::now() < deadline, "no digests in time: {what}");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    async fn placement_when(&self, what: &str, holds: impl Fn(&PlacementTable) -> bool) {
        let client = ControlClient::new(&self.url, None).expect("a client");
        let deadline = Instant::now() + PATIENCE;
        loop {
            if client.placement().await.is_ok_and(|table| holds(&table)) {
                return;
            }
            assert!(Instant::now() < deadline, "not in time: {what}");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn members_share_the_experts_outlive_a_restart_of_the_control_plane_and_leave() {
    let dir = tempfile::tempdir().expect("a directory");
    let control = ControlPlane::start("127.0.0.1:0", dir.path()).await;
    let (a, b) = tokio::join!(control.member("a"), control.member("b"));
    a.serving(PATIENCE).await.expect("a serves");
    b.serving(PATIENCE).await.expect("b serves");
    let (held_a, held_b) = (a.holds(), b.holds());
    assert_eq!(held_a.num_experts() + held_b.num_experts(), 64);
    for entry in &held_a.layers {
        let twice = entry.experts.iter().find(|&&expert| held_b.contains(entry.layer, expert));
        assert_eq!(twice, None, "held by both in layer {}", entry.layer);
    }
    control.placement_when("every expert has a place", PlacementTable::is_complete).await;

    let listen = control.url.strip_prefix("http://").expect("a URL").to_owned();
    control.stop().await;
    // Longer than a lease, so both servers must register again by themselves.
    let deadline = Instant::now() + PATIENCE;
    for server in [&a, &b] {
        let addr = server.metrics_addr().expect("metrics are served");
        loop {
            // Data flows without a control plane, so load balancers must not act.
            let answer = get(addr, "/readyz").await;
            assert!(answer.starts_with("HTTP/1.1 200") && server.ready().is_ok(), "{answer}");
            if answer.ends_with("ok, but the control plane's lease is not held\n") {
                break;
            }
            assert!(Instant::now() < deadline, "a lost lease shows in readiness: {answer}");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        let text = get(addr, "/metrics").await;
        assert!(text.contains("switchyard_server_ready 1"), "{text}");
        assert!(text.contains("switchyard_server_lease_held 0"), "{text}");
    }
    // A token that the servers lack is named, although the outage began without a control plane.
    let control = ControlPlane::start_with_token(&listen, dir.path(), Some("another")).await;
    let addr = a.metrics_addr().expect("metrics are served");
    loop {
        let answer = get(addr, "/readyz").await;
        if answer
            .ends_with("lease is not held: it refuses the token or certificate of this server\n")
        {
            break;
        }
        assert!(Instant::now() < deadline, "a refused token shows in readiness: {answer}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    control.stop().await;
    let control = ControlPlane::start(&listen, dir.path()).await;
    a.serving(PATIENCE).await.expect("a is back");
    b.serving(PATIENCE).await.expect("b is back");
    control.placement_when("every expert has a place again", PlacementTable::is_complete).await;
    assert_eq!((a.holds(), b.holds()), (held_a, held_b), "no server loads again");

    a.drain().await;
    a.wait().await.expect("a drain is a good end");
    let is_gone = |table: &PlacementTable| table.servers.iter().all(|entry| entry.name != "a");
    control.placement_when("a is out of the placement", is_gone).await;
    b.shutdown().await;
    b.wait().await.expect("a shutdown is a good end");
    control.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_member_sends_the_digests_again_to_a_control_plane_that_restarted() {
    let dir = tempfile::tempdir().expect("a directory");
    let control = ControlPlane::start("127.0.0.1:0", dir.path()).await;
    let member = control.member("a").await;
    let sent = control.digests_when("sent at the start", |_| true).await;
    assert!(sent.tensors.len() > 100 && sent.full.is_empty());
    let listen = control.url.strip_prefix("http://").expect("a URL").to_owned();
    control.stop().await;
    let control = ControlPlane::start(&listen, dir.path()).await;
    let again = control.digests_when("sent again", |_| true).await;
    assert_eq!(again, sent);
    member.shutdown().await;
    control.stop().await;
}

/// A changed byte that no sample covers.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_two_servers_that_read_all_bytes_the_one_with_a_changed_byte_does_not_start() {
    let mut rng = seeded();
    let (plain, changed) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    write_large_matrices(plain.path());
    write_large_matrices(changed.path());
    let name = "model.layers.0.block_sparse_moe.experts.1.w3.weight";
    change_an_unsampled_byte(&mut rng, changed.path(), name);

    let dir = tempfile::tempdir().unwrap();
    let control = ControlPlane::start("127.0.0.1:0", dir.path()).await;
    let start = async |name: &str, model: &Path, verify| {
        let placement = Placement::ControlPlane { url: control.url.clone(), token: None };
        let mut config = ServerConfig::new(model, name, placement);
        config.verify = verify;
        ExpertServer::start(config, |_| {}).await
    };
    // Digests of all bytes replace those of samples.
    let sampled = start("sampled", plain.path(), Coverage::Sampled).await.unwrap();
    assert_eq!(sampled.full_digest(), None);
    let full = start("full", plain.path(), Coverage::Full).await.unwrap();
    let expected = Checkpoint::open(plain.path()).unwrap();
    let expected = expected.digests(Coverage::Full, 2, &mut |_, _| {}).unwrap().fingerprint();
    assert_eq!(full.full_digest(), Some(expected));
    let kept = control.digests_when("all bytes", |digests| !digests.full.is_empty()).await;
    assert_eq!(kept.full.len(), kept.tensors.len());

    let refused = start("changed", changed.path(), Coverage::Full).await.unwrap_err();
    let text = refused.to_string();
    assert!(matches!(refused, StartError::Digests { .. }), "{text}");
    assert!(text.ends_with(&format!("tensors that differ first: {name}")), "{text}");
    // Samples do not show it.
    let unseen = start("changed", changed.path(), Coverage::Sampled).await.unwrap();
    assert_eq!(control.digests_when("no change", |_| true).await, kept);
    for server in [unseen, full, sampled] {
        server.shutdown().await;
    }
    control.stop().await;
}

/// Writes a Mixtral of one layer and two experts, whose matrices are larger than a sample. Each byte of a matrix is the
/// number of the matrix.
fn write_large_matrices(dir: &Path) {
    const CONFIG: &str = r#"{"model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "hidden_size": 512,
        "intermediate_size": 256, "num_hidden_layers": 1, "num_local_experts": 2, "num_experts_per_tok": 1,
        "num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": 64, "rms_norm_eps": 1e-5,
        "rope_theta": 1e6, "max_position_embeddings": 4096, "hidden_act": "silu", "bos_token_id": 1, "eos_token_id": 2}"#;
    const BYTES: usize = 512 * 256 * 2;
    let (mut header, mut data) = (Vec::new(), Vec::new());
    for expert in 0..2 {
        for (matrix, shape) in [("w1", "[256, 512]"), ("w2", "[512, 256]"), ("w3", "[256, 512]")] {
            let (begin, end) = (data.len(), data.len() + BYTES);
            header.push(format!(
                r#""model.layers.0.block_sparse_moe.experts.{expert}.{matrix}.weight": {{"dtype": "BF16",
                "shape": {shape}, "data_offsets": [{begin}, {end}]}}"#
            ));
            data.resize(end, header.len() as u8);
        }
    }
    let header = format!("{{{}}}", header.join(","));
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend_from_slice(header.as_bytes());
    file.extend_from_slice(&data);
    std::fs::write(dir.join("model.safetensors"), file).unwrap();
    std::fs::write(dir.join("config.json"), CONFIG).unwrap();
}

/// Changes one bit of a tensor such that the fingerprint stays the same.
fn change_an_unsampled_byte(rng: &mut StdRng, dir: &Path, name: &str) {
    let file = dir.join("model.safetensors");
    let mut bytes = std::fs::read(&file).unwrap();
    let checkpoint = Checkpoint::open(dir).unwrap();
    let fingerprint = checkpoint.fingerprint().unwrap();
    let data = checkpoint.tensor(name).unwrap().data.to_vec();
    drop(checkpoint);
    let start = bytes.windows(256).position(|window| *window == data[..256]).unwrap();
    for _ in 0..200 {
        let place = start + rng.random_range(0..data.len());
        bytes[place] ^= 1;
        std::fs::write(&file, &bytes).unwrap();
        if Checkpoint::open(dir).unwrap().fingerprint().unwrap() == fingerprint {
            return;
        }
        bytes[place] ^= 1;
    }
    panic!("every byte of {name} is sampled");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_whose_name_is_taken_over_ends_with_an_error() {
    let dir = tempfile::tempdir().expect("a directory");
    let control = ControlPlane::start("127.0.0.1:0", dir.path()).await;
    let old = control.member("same").await;
    old.serving(PATIENCE).await.expect("the old one serves");
    let new = control.member("same").await;
    let end = tokio::time::timeout(PATIENCE, old.wait()).await.expect("the old one ends");
    assert!(matches!(end, Err(ServerError::Membership { .. })), "{end:?}");
    new.serving(PATIENCE).await.expect("the new one serves");
    new.shutdown().await;
    control.stop().await;
}
