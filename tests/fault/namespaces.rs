//! Client, replicas and control plane in network namespaces of their own, over libfabric's `tcp;ofi_rxm`. Links go down
//! and packets get lost.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use p2p_core::OpenNetworks;
use rand::RngExt;
use switchyard_tests::worker::{is_whole, metric};
use test_support::model::tiny_moe;
use test_support::namespaces::{Site, Star};
use test_support::{child, printed_seed, skip};

use crate::support::{PATIENCE, Setup, binary};

/// Name of the star, for the process that runs in its hub.
const STAR: &str = "SWITCHYARD_TEST_STAR";
const TRANSPORT: &str = "libfabric:tcp;ofi_rxm";
const NUM_SERVERS: usize = 2;

#[test]
fn servers_whose_links_go_down_are_replaced_and_come_back() {
    run_in_hub("cut-links");
}

/// The process of that test in the hub.
pub fn cut_links() {
    let mut setup =
        Fleet::start(star_of_parent(), Duration::from_secs(3), Duration::from_millis(500));
    setup.compute(30);
    // The client misses the second server only if the first one computes again.
    for server in 0..NUM_SERVERS {
        let star = setup.cluster.star.clone();
        let delay = Duration::from_micros(setup.rng.random_range(0..20_000));
        let before = num_failovers(&setup);
        let cut = std::thread::spawn(move || {
            std::thread::sleep(delay);
            star.set_link(server, false)
        });
        let begin = Instant::now();
        let num_layers = setup.compute_until("a failover", |setup, _| {
            cut.is_finished() && num_failovers(setup) > before
        });
        cut.join().expect("no panic").expect("the link goes down");
        println!("server {server} missed after {num_layers} layers, {:?}", begin.elapsed());
        setup.compute(40);
        setup.cluster.star.set_link(server, true).expect("the link comes up");
        setup.compute_until("a whole fleet", |setup, _| {
            is_whole(&setup.client, NUM_SERVERS, NUM_SERVERS)
        });
        println!("server {server} back, {:?} after its link went down", begin.elapsed());
        setup.compute(10);
    }
    setup.assert_accounts();
}

#[test]
fn lost_packets_between_hosts_cost_no_token() {
    run_in_hub("lose-packets");
}

/// The process of that test in the hub.
pub fn lose_packets() {
    let mut setup = Fleet::start(star_of_parent(), Duration::from_secs(10), Duration::from_secs(2));
    setup.compute(10);
    if let Err(error) = setup.cluster.star.lose(1) {
        return skip("netns", &format!("packets cannot be lost here: {error}"));
    }
    let star = setup.cluster.star.clone();
    let num_lost = || star.num_lost().expect("a counter");
    let num_layers =
        setup.compute_until("lost packets", |_, done| done >= 60 && num_lost() >= NUM_LOST);
    let (num_lost, failovers) = (num_lost(), num_failovers(&setup));
    println!("{num_layers} layers, {num_lost} packets lost, {failovers} failovers");
    setup.assert_accounts();
}

fn star_of_parent() -> Star {
    Star::of_parent(&std::env::var(STAR).expect("the star's name"), NUM_SERVERS)
}

/// Makes a star and runs a process of this binary in its hub.
fn run_in_hub(name: &str) {
    if let Err(error) = OpenNetworks::default()
        .with(libfabric_transport::opener())
        .open(&TRANSPORT.parse().expect("a transport"))
    {
        return skip("libfabric", &error.to_string());
    }
    let star = match Star::lay(NUM_SERVERS) {
        Ok(star) => star,
        Err(error) => return skip("netns", &error),
    };
    let this = std::env::current_exe().expect("the path of this test");
    let output = star
        .command(Site::Hub, this.to_str().expect("a path of Unicode"))
        .envs(child::variables(name))
        .env(STAR, star.name())
        .output()
        .expect("ip starts");
    println!("{}", String::from_utf8_lossy(&output.stdout));
    println!("{}", String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{}", output.status);
}

/// Failovers for any reason.
fn num_failovers(setup: &Setup<Fleet>) -> f64 {
    metric(&setup.client, "switchyard_client_failovers_total")
}

/// A control plane in the hub, and a server in every spoke with all experts.
struct Fleet {
    star: Star,
    _processes: Vec<Process>,
}

impl Fleet {
    /// The fleet, and a client in this process, which is in the hub.
    fn start(star: Star, lease_ttl: Duration, deadline: Duration) -> Setup<Self> {
        let seed = printed_seed();
        let token = format!("{:032x}", rand::random::<u128>());
        let num_servers = NUM_SERVERS.to_string();
        let mut control = Command::new(binary());
        control
            .args(["control-plane", "--listen", "0.0.0.0:7070"])
            .args(["--servers", &num_servers, "--replicas", &num_servers])
            .args(["--lease-ttl-ms", &lease_ttl.as_millis().to_string()]);
        let mut processes = vec![Process::start(control, &token)];
        processes[0].wait("listening");
        let this = binary();
        processes.extend((0..NUM_SERVERS).map(|idx| {
            let mut server =
                star.command(Site::Spoke(idx), this.to_str().expect("a path of Unicode"));
            server
                .args(["expert-server", "--name", &format!("server-{idx}")])
                .args(["--control-plane", &format!("http://{}:7070", star.hub_address(idx))])
                .args(["--listen", &format!("{}:7171", star.spoke_address(idx))])
                .args(["--transport", TRANSPORT, "--threads", "1", "--model"])
                .arg(tiny_moe());
            Process::start(server, &token)
        }));
        // No server serves before all have registered.
        processes[1..].iter().for_each(|server| server.wait("serving"));
        let transports = OpenNetworks::default()
            .with(libfabric_transport::opener())
            .open(&TRANSPORT.parse().expect("a transport"))
            .expect("libfabric, which the parent has found");
        let reach = ("http://127.0.0.1:7070".to_owned(), token);
        let fleet = Self { star, _processes: processes };
        Setup::of(fleet, &reach, seed, 48, |builder| {
            // A hedge would answer for a server that is gone, and leave no failover to wait for.
            let security = control_api::Security { tls: None, insecure: true };
            let builder = builder.transports(transports).security(security);
            builder.deadline(deadline).hedge_budget(0.0)
        })
    }
}

/// Ends with its owner.
struct Process {
    child: Child,
    events: Receiver<String>,
}

impl Process {
    fn start(mut command: Command, token: &str) -> Self {
        let mut child = command
            .args(["--json", "--exit-with-parent"])
            .env("SWITCHYARD_TOKEN", token)
            .env("SWITCHYARD_INSECURE", "1")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .expect("a process starts");
        let stdout = child.stdout.take().expect("its output");
        let (sender, events) = channel();
        // To the end: otherwise the process would find its pipe broken.
        std::thread::spawn(move || {
            for line in BufReader::new(stdout).lines().map_while(Result::ok) {
                drop(sender.send(line));
            }
        });
        Self { child, events }
    }

    /// Waits until it reports `event`.
    fn wait(&self, event: &str) {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let line = self.events.recv_timeout(left);
            let line = line.unwrap_or_else(|error| panic!("no `{event}`: {error}"));
            let found: serde_json::Value = serde_json::from_str(&line).expect("an event");
            if found["event"] == event {
                return;
            }
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // A process that has ended cannot be killed, and need not be.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// So many that some of them carry frames and answers.
const NUM_LOST: u64 = 40;
