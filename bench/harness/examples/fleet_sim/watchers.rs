//! Simulated clients.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use rand::RngExt as _;
use tokio::io::{AsyncBufRead, AsyncBufReadExt, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::TcpStream;
use tokio::task::JoinSet;

use crate::PATIENCE;

/// All simulated clients. They end when it is dropped.
pub(crate) struct Watchers {
    watchers: Arc<Vec<Watcher>>,
    _tasks: JoinSet<()>,
}

impl Watchers {
    pub(crate) fn start(num_clients: u64, addr: &str) -> Self {
        let watchers: Arc<Vec<Watcher>> =
            Arc::new((0..num_clients).map(|_| Watcher::default()).collect());
        let mut tasks = JoinSet::new();
        for idx in 0..watchers.len() {
            let (watchers, addr) = (Arc::clone(&watchers), addr.to_owned());
            tasks.spawn(async move { watchers[idx].run(&addr).await });
        }
        Self { watchers, _tasks: tasks }
    }

    /// Waits until every client has read a table of `epoch` or later.
    pub(crate) async fn reached(&self, epoch: u64) -> Result<()> {
        let deadline = Instant::now() + PATIENCE;
        let is_behind = |watcher: &&Watcher| watcher.epoch.load(Ordering::Relaxed) < epoch;
        loop {
            let num_behind = self.watchers.iter().filter(is_behind).count();
            if num_behind == 0 {
                return Ok(());
            }
            if Instant::now() > deadline {
                bail!("{num_behind} clients have no table of epoch {epoch} after {PATIENCE:?}");
            }
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    }
}

/// A simulated client. It reads every table whole and looks at its epoch only.
#[derive(Default)]
struct Watcher {
    epoch: AtomicU64,
}

impl Watcher {
    /// Watches until the task is aborted, and connects again after an error.
    async fn run(&self, addr: &str) {
        loop {
            let _ = self.follow(addr).await;
            let pause = rand::rng().random_range(50..500);
            tokio::time::sleep(Duration::from_millis(pause)).await;
        }
    }

    async fn follow(&self, addr: &str) -> Result<()> {
        let mut stream = TcpStream::connect(addr).await?;
        let request = format!("GET /v1/placement/watch HTTP/1.1\r\nhost: {addr}\r\n\r\n");
        stream.write_all(request.as_bytes()).await?;
        let mut stream = BufReader::with_capacity(256 << 10, stream);
        let mut line = String::new();
        while stream.read_line(&mut line).await? > 2 {
            line.clear();
        }
        // An event is a chunk of the transfer coding, and so is a comment.
        loop {
            line.clear();
            if stream.read_line(&mut line).await? == 0 {
                bail!("the watch ended");
            }
            let length = u64::from_str_radix(line.trim_end(), 16)?;
            let epoch = read_chunk(&mut stream, length + 2).await?;
            if let Some(epoch) = epoch {
                self.epoch.fetch_max(epoch, Ordering::Relaxed);
            }
        }
    }
}

/// Reads `length` bytes. Returns the number of the event that they are, if they are one.
async fn read_chunk(stream: &mut (impl AsyncBufRead + Unpin), length: u64) -> Result<Option<u64>> {
    let mut head = vec![0; length.min(64) as usize];
    stream.read_exact(&mut head).await?;
    let mut left = length - head.len() as u64;
    while left > 0 {
        let found = stream.fill_buf().await?.len() as u64;
        if found == 0 {
            bail!("the watch ended within an event");
        }
        let taken = found.min(left);
        stream.consume(taken as usize);
        left -= taken;
    }
    let head = String::from_utf8_lossy(&head);
    let id = head.lines().find_map(|line| line.strip_prefix("id: "));
    Ok(id.and_then(|id| id.parse().ok()))
}
