use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use control_api::{LeaseRequest, MemberId, ModelDescriptor, ReadyRequest, RegisterRequest};
use control_plane::{Server, ServerConfig};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

use super::*;

/// A control plane, and servers whose supervisor starts them again when they are drained.
struct Fleet {
    client: ControlClient,
    members: Vec<JoinHandle<()>>,
    /// Names of servers in the order of their drains.
    drained: Arc<Mutex<Vec<String>>>,
    /// Servers ignore drains while this is set.
    is_stuck: Arc<AtomicBool>,
    _stop: oneshot::Sender<()>,
}

impl Fleet {
    async fn start(num_servers: usize, replicas: u32) -> Self {
        let config = ServerConfig::new("127.0.0.1:0", num_servers as u32, replicas);
        let server = Server::bind(config).await.unwrap();
        let client = ControlClient::new(&format!("http://{}", server.local_addr()), None).unwrap();
        let (stop, stopped) = oneshot::channel::<()>();
        tokio::spawn(server.run(async {
            let _ = stopped.await;
        }));
        let (drained, is_stuck) = (Arc::default(), Arc::new(AtomicBool::new(false)));
        let members = (0..num_servers)
            .map(|server| {
                let (drained, is_stuck) = (Arc::clone(&drained), Arc::clone(&is_stuck));
                tokio::spawn(serve(client.clone(), format!("server-{server}"), drained, is_stuck))
            })
            .collect();
        let fleet = Self { client, members, drained, is_stuck, _stop: stop };
        fleet.rollout(30).until_complete().await.unwrap();
        fleet
    }

    fn rollout(&self, wait_s: u64) -> Rollout {
        let wait = Duration::from_secs(wait_s);
        Rollout { json: false, client: self.client.clone(), wait }
    }

    fn drained(&self) -> Vec<String> {
        std::mem::take(&mut self.drained.lock().unwrap())
    }
}

impl Drop for Fleet {
    fn drop(&mut self) {
        self.members.iter().for_each(JoinHandle::abort);
    }
}

/// One server after the other under `name`, each until it is drained.
async fn serve(
    client: ControlClient,
    name: String,
    drained: Arc<Mutex<Vec<String>>>,
    is_stuck: Arc<AtomicBool>,
) {
    loop {
        let incarnation = rand::random::<u32>().into();
        let mut request = RegisterRequest::new(&name, "127.0.0.1:7000", model());
        request.incarnation = incarnation;
        let member = client.register(&request).await.unwrap();
        let ready = ReadyRequest { incarnation, holds: member.assignment.clone() };
        client.ready(&member.member_id, &ready).await.unwrap();
        while is_stuck.load(Ordering::SeqCst)
            || renew(&client, &member.member_id, incarnation).await != MemberState::Draining
        {
            renew(&client, &member.member_id, incarnation).await;
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        drained.lock().unwrap().push(name.clone());
        client.leave(&member.member_id).await.unwrap();
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

async fn renew(client: &ControlClient, member: &MemberId, incarnation: u64) -> MemberState {
    let lease = LeaseRequest { incarnation, assignment_version: 0, load: None };
    client.renew(member, &lease).await.unwrap().state
}

fn model() -> ModelDescriptor {
    ModelDescriptor {
        fingerprint: "0123456789abcdef".to_owned(),
        architecture: "qwen3_moe".to_owned(),
        hidden: 256,
        moe_layers: vec![0, 1],
        num_experts: 8,
        top_k: 2,
    }
}

fn args() -> Args {
    Args {
        servers: Vec::new(),
        restart: None,
        wait_s: 0,
        state: None,
        force: false,
        control: crate::cmd::ControlArgs {
            control_plane: Vec::new(),
            token: None,
            token_file: None,
            tls: crate::cmd::tls::TlsArgs::default(),
        },
    }
}

#[tokio::test]
async fn every_server_is_restarted_once_and_the_fleet_is_complete() {
    let fleet = Fleet::start(3, 2).await;
    let marks = tempfile::tempdir().unwrap();
    let file = marks.path().join("restarted");
    let command = format!(
        r#"echo "$SWITCHYARD_ROLLOUT_SERVER at $SWITCHYARD_ROLLOUT_ADDR" >> {}"#,
        file.display()
    );
    let args = Args { restart: Some(command), ..args() };
    fleet.rollout(30).run(&args).await.unwrap();
    assert_eq!(fleet.drained(), ["server-0", "server-1", "server-2"]);
    let text = std::fs::read_to_string(&file).unwrap();
    let expected: String = (0..3).map(|s| format!("server-{s} at 127.0.0.1:7000\n")).collect();
    assert_eq!(text, expected);
    let status = fleet.client.status().await.unwrap();
    assert!(is_complete(&status) && status.members.serving == 3, "{status:?}");

    let args = Args { servers: vec!["server-2".to_owned()], restart: None, ..args };
    fleet.rollout(30).run(&args).await.unwrap();
    assert_eq!(fleet.drained(), ["server-2"]);
    let args = Args { servers: vec!["server-9".to_owned()], ..args };
    let error = fleet.rollout(30).run(&args).await.unwrap_err().to_string();
    assert!(error.contains("server-9") && error.contains("server-0, server-1"), "{error}");
}

#[tokio::test]
async fn a_rollout_that_ran_out_of_time_goes_on_where_it_stopped() {
    let fleet = Fleet::start(3, 2).await;
    let dir = tempfile::tempdir().unwrap();
    let state = dir.path().join("rollout.json");
    // The command for the second server fails, so the rollout stops there.
    let command = r#"[ "$SWITCHYARD_ROLLOUT_SERVER" != server-1 ]"#.to_owned();
    let args = Args { state: Some(state.clone()), restart: Some(command), ..args() };
    let error = fleet.rollout(30).run(&args).await.unwrap_err().to_string();
    assert!(error.contains("server-1") && error.contains("--restart"), "{error}");
    assert_eq!(fleet.drained()[0], "server-0");
    // Its supervisor may have restarted it all the same, or the drain was taken back.
    fleet.rollout(30).until_complete().await.unwrap();
    let others = Args { servers: vec!["server-2".to_owned()], ..args };
    let error = fleet.rollout(30).run(&others).await.unwrap_err().to_string();
    assert!(error.contains("server-0, server-1, server-2"), "{error}");

    // No server leaves any more: the rollout gives up, and no server stays drained.
    fleet.drained();
    fleet.is_stuck.store(true, Ordering::SeqCst);
    let args = Args { servers: Vec::new(), restart: None, ..others };
    let error = fleet.rollout(1).run(&args).await.unwrap_err();
    assert!(error.is::<Timeout>(), "{error}");
    let status = fleet.client.status().await.unwrap();
    assert_eq!((status.members.serving, status.members.draining), (3, 0), "{status:?}");

    fleet.is_stuck.store(false, Ordering::SeqCst);
    fleet.rollout(30).run(&args).await.unwrap();
    let drained = fleet.drained();
    assert!(!drained.contains(&"server-0".to_owned()), "{drained:?}");
    assert_eq!(drained.last().map(String::as_str), Some("server-2"));
    assert!(!state.exists());
}

#[tokio::test]
async fn a_server_whose_experts_have_no_other_replica_is_not_drained() {
    let fleet = Fleet::start(2, 1).await;
    let error = fleet.rollout(30).run(&args()).await.unwrap_err().to_string();
    assert!(error.contains("server-0 alone") && error.contains("--force"), "{error}");
    assert_eq!(fleet.drained(), [""; 0]);
    let args = Args { force: true, ..args() };
    fleet.rollout(30).run(&args).await.unwrap();
    assert_eq!(fleet.drained(), ["server-0", "server-1"]);
}

#[test]
fn a_name_that_a_command_takes_for_an_option_ends_the_rollout() {
    let step = |name: &str| Step { name: name.to_owned(), incarnation: 1, is_done: false };
    let mut plan = Plan::default();
    plan.steps.push(step("server-1"));
    check_names(&plan).unwrap();
    plan.steps.push(step("--all"));
    assert!(check_names(&plan).unwrap_err().to_string().contains("\"--all\""));
}
