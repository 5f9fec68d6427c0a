//! A real etcd for tests: clusters of one or more members on loopback, which a test may kill, pause, cut off and
//! start again.
//!
//! The program is `SWITCHYARD_ETCD`, or `etcd` on the search path, or the one that `cargo xtask test` downloads. A test
//! without it fails.

mod relay;

use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

/// A cluster of etcd. Its processes end with it.
#[derive(Debug)]
pub struct EtcdCluster {
    dir: tempfile::TempDir,
    members: Vec<Member>,
    cuts: Arc<relay::Cuts>,
}

#[derive(Debug)]
struct Member {
    client_port: u16,
    peer_port: u16,
    /// Port at which the other members reach this one.
    relay_port: u16,
    /// The id of the member in hex, once it is known.
    id: Arc<Mutex<String>>,
    child: Option<Child>,
}

impl EtcdCluster {
    /// Starts a cluster and waits until it answers.
    ///
    /// # Panics
    /// When etcd is missing or does not start.
    #[must_use]
    pub fn start(num_members: usize) -> Self {
        // Another process may take a free port first, so a start is tried again with other ports.
        for _ in 0..START_ATTEMPTS {
            let dir = tempfile::tempdir().expect("a temporary folder");
            let cuts = Arc::default();
            let members = (0..num_members).map(|_| Member::new(&cuts)).collect();
            let mut cluster = Self { dir, members, cuts };
            for index in 0..num_members {
                cluster.spawn(index);
            }
            if cluster.answers(START_LIMIT) {
                cluster.learn_ids();
                return cluster;
            }
        }
        panic!("etcd does not start on this machine");
    }

    /// The URL of each member.
    #[must_use]
    pub fn endpoints(&self) -> Vec<String> {
        self.members.iter().map(Member::url).collect()
    }

    /// Number of members.
    #[must_use]
    pub fn num_members(&self) -> usize {
        self.members.len()
    }

    /// Index of the member that leads etcd.
    ///
    /// # Panics
    /// When no member leads within a minute.
    #[must_use]
    pub fn leader(&self) -> usize {
        let deadline = Instant::now() + Duration::from_secs(60);
        loop {
            for (index, member) in self.members.iter().enumerate() {
                let status = post(member.client_port, "/v3/maintenance/status");
                let (Some(id), Some(leader)) =
                    (field(&status, "member_id"), field(&status, "leader"))
                else {
                    continue;
                };
                if id == leader {
                    return index;
                }
            }
            assert!(Instant::now() < deadline, "no member of etcd leads");
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// Sends `SIGKILL` to a member and waits for its end.
    pub fn kill(&mut self, index: usize) {
        if let Some(mut child) = self.members[index].child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }

    /// Sends `SIGSTOP` to a member.
    ///
    /// # Panics
    /// When the member does not run.
    pub fn pause(&self, index: usize) {
        self.signal(index, Signal::STOP);
        super::stopped::await_stop(self.members[index].child.as_ref().expect("a member").id());
    }

    /// Continues a paused member.
    ///
    /// # Panics
    /// When the member does not run.
    pub fn resume(&self, index: usize) {
        self.signal(index, Signal::CONT);
    }

    /// Cuts a member off from the other members. Its clients still reach it.
    pub fn cut_off(&self, index: usize) {
        let id = self.members[index].id.lock().unwrap_or_else(PoisonError::into_inner).clone();
        self.cuts.cut_off(&id);
    }

    /// Ends every [`cut_off`](Self::cut_off).
    pub fn join(&self) {
        self.cuts.join();
    }

    fn learn_ids(&self) {
        for member in &self.members {
            let status = post(member.client_port, "/v3/maintenance/status");
            let id = field(&status, "member_id").and_then(|id| id.parse::<u64>().ok());
            let id = id.expect("the id of a member of etcd");
            *member.id.lock().unwrap_or_else(PoisonError::into_inner) = format!("{id:x}");
        }
    }

    /// Starts a killed member again, with its data.
    pub fn restart(&mut self, index: usize) {
        self.kill(index);
        self.spawn(index);
    }

    /// Runs `etcdctl` with the first endpoint; returns its output.
    ///
    /// # Panics
    /// When it fails.
    pub fn control(&self, args: &[&str]) -> String {
        let output = Command::new(program().with_file_name("etcdctl"))
            .env("ETCDCTL_API", "3")
            .args(["--endpoints", &self.members[0].url()])
            .args(args)
            .output()
            .expect("etcdctl");
        assert!(output.status.success(), "etcdctl {args:?}: {output:?}");
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    fn signal(&self, index: usize, signal: Signal) {
        let child = self.members[index].child.as_ref().expect("a member");
        kill_process(Pid::from_child(child), signal).expect("a signal");
    }

    fn spawn(&mut self, index: usize) {
        let peers: Vec<String> = self.members.iter().map(Member::relay_url).collect();
        let peers: Vec<String> =
            peers.iter().enumerate().map(|(i, url)| format!("m{i}={url}")).collect();
        let data = self.dir.path().join(format!("m{index}"));
        let log = std::fs::File::create(self.dir.path().join(format!("m{index}.log")));
        let member = &mut self.members[index];
        let (client, peer, relay) = (member.url(), member.peer_url(), member.relay_url());
        // Short times of etcd's own elections: the tests wait for them.
        let child = Command::new(program())
            .args(["--name", &format!("m{index}"), "--data-dir"])
            .arg(data)
            .args(["--listen-client-urls", &client, "--advertise-client-urls", &client])
            .args(["--listen-peer-urls", &peer, "--initial-advertise-peer-urls", &relay])
            .args(["--initial-cluster", &peers.join(","), "--initial-cluster-state", "new"])
            .args(["--heartbeat-interval", "50", "--election-timeout", "500"])
            .args(["--unsafe-no-fsync", "--logger", "zap", "--log-level", "error"])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log.expect("a log file"))
            .spawn()
            .expect("etcd");
        member.child = Some(child);
    }

    fn answers(&mut self, limit: Duration) -> bool {
        let deadline = Instant::now() + limit;
        loop {
            let healthy = |member: &Member| {
                request(member.client_port, "GET", "/health").contains("\"true\"")
            };
            if self.members.iter().all(healthy) {
                return true;
            }
            let ended = |member: &mut Member| {
                member.child.as_mut().is_some_and(|child| !matches!(child.try_wait(), Ok(None)))
            };
            if self.members.iter_mut().any(ended) || Instant::now() > deadline {
                return false;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

impl Drop for EtcdCluster {
    fn drop(&mut self) {
        for index in 0..self.members.len() {
            self.kill(index);
        }
    }
}

impl Member {
    fn new(cuts: &Arc<relay::Cuts>) -> Self {
        let (client_port, peer_port) = (free_port(), free_port());
        let id = Arc::<Mutex<String>>::default();
        let relay_port = relay::start(peer_port, Arc::clone(&id), Arc::clone(cuts));
        Self { client_port, peer_port, relay_port, id, child: None }
    }

    fn url(&self) -> String {
        format!("http://127.0.0.1:{}", self.client_port)
    }

    fn peer_url(&self) -> String {
        format!("http://127.0.0.1:{}", self.peer_port)
    }

    fn relay_url(&self) -> String {
        format!("http://127.0.0.1:{}", self.relay_port)
    }
}

/// The program.
///
/// # Panics
/// When it is missing.
pub fn program() -> PathBuf {
    let from_variable = std::env::var_os("SWITCHYARD_ETCD").map(PathBuf::from);
    let path = std::env::var_os("PATH").unwrap_or_default();
    let on_path = std::env::split_paths(&path).map(|dir| dir.join("etcd"));
    let cache = std::env::var_os("XDG_CACHE_HOME")
        .map(PathBuf::from)
        .or_else(|| std::env::var_os("HOME").map(|home| PathBuf::from(home).join(".cache")));
    let downloaded = cache.map(|cache| cache.join("switchyard/tools/etcd/usr/bin/etcd"));
    let mut candidates = from_variable.into_iter().chain(on_path).chain(downloaded);
    candidates.find(|path| Path::is_file(path)).expect(
        "etcd is missing: `cargo xtask test --only etcd` downloads it on Debian and Ubuntu; elsewhere install etcd \
         3.4 or later, or set SWITCHYARD_ETCD",
    )
}

fn free_port() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    listener.local_addr().expect("its address").port()
}

fn post(port: u16, path: &str) -> String {
    request(port, "POST", path)
}

/// The response to a request, empty without one within a second.
fn request(port: u16, method: &str, path: &str) -> String {
    use std::io::{Read, Write};
    let attempt = || {
        let limit = Duration::from_secs(1);
        let addr = std::net::SocketAddr::from(([127, 0, 0, 1], port));
        let mut stream = std::net::TcpStream::connect_timeout(&addr, limit)?;
        stream.set_read_timeout(Some(limit))?;
        let head = format!(
            "{method} {path} HTTP/1.1\r\nHost: etcd\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{{}}"
        );
        stream.write_all(head.as_bytes())?;
        let mut text = String::new();
        stream.read_to_string(&mut text)?;
        Ok::<_, std::io::Error>(text)
    };
    attempt().unwrap_or_default()
}

/// The value of a field of text in JSON.
fn field(json: &str, name: &str) -> Option<String> {
    let (_, rest) = json.split_once(&format!("\"{name}\":\""))?;
    rest.split('"').next().map(str::to_owned)
}

const START_ATTEMPTS: usize = 5;
const START_LIMIT: Duration = Duration::from_secs(30);
