//! How soon a peer's death is known, as JSON: `deaths [GIB [TIMES [huge]]]`.
//!
//! A peer, a process of its own, touches so much memory, in huge pages if asked, and connects; then it is
//! killed. The time is from the kill until the connection is over. 1 GiB and 8 times by default.

use std::error::Error;
use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::process::{Child, Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use p2p_core::bootstrap::{
    CloseReason, ConnectConfig, Listener, ListenerConfig, PeerHello, connect,
};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous};
use switchyard_bench_harness::stats::percentile;
use tokio::sync::{mpsc, oneshot};
use tokio::time::timeout;

const LISTENER: &str = "DEATHS_LISTENER";
const MAX_TIMES: f64 = 1e4;
const PATIENCE: Duration = Duration::from_secs(60);

/// A process that does not outlive its owner.
struct Peer(Child);

impl Drop for Peer {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// What the command line says.
#[derive(Debug, Clone)]
struct Wish {
    gib: f64,
    times: usize,
    is_huge: bool,
}

impl Wish {
    fn read() -> Result<Self, String> {
        let words: Vec<String> = std::env::args().skip(1).collect();
        let bad = |found: &str| format!("found {found:?}, expected deaths [GIB [TIMES [huge]]]");
        let number = |idx: usize, default: f64| {
            words.get(idx).map_or(Ok(default), |word| {
                let read = word.parse::<f64>().ok().filter(|value| value.is_finite());
                read.filter(|value| *value >= 0.0).ok_or_else(|| bad(word))
            })
        };
        let (gib, times) = (number(0, 1.0)?, number(1, 8.0)?);
        if !(1.0..=MAX_TIMES).contains(&times) || times.fract() != 0.0 {
            return Err(bad(&words[1]));
        }
        if !matches!(words.get(2).map(String::as_str), None | Some("huge")) || words.len() > 3 {
            return Err(bad(&words[2..].join(" ")));
        }
        Ok(Self { gib, times: times as usize, is_huge: words.len() == 3 })
    }
}

fn main() -> ExitCode {
    let done = Wish::read().map_err(Box::from).and_then(|wish| {
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
        runtime.block_on(async {
            match std::env::var(LISTENER) {
                Ok(addr) => live(addr.parse()?, &wish).await,
                Err(_) => watch(&wish).await,
            }
        })
    });
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let error: Box<dyn Error> = error;
            eprintln!("deaths: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Kills peers, and looks when that is known.
async fn watch(wish: &Wish) -> Result<(), Box<dyn Error>> {
    let listener = Listener::bind("127.0.0.1:0", ListenerConfig::default()).await?;
    let addr = listener.local_addr();
    let (sender, mut peers) = mpsc::unbounded_channel();
    let on_peer = move |connection| drop(sender.send(connection));
    tokio::spawn(listener.serve(|_| Ok(Vec::new()), on_peer, std::future::pending()));
    let mut known_ms = Vec::with_capacity(wish.times);
    for time in 0..wish.times {
        let mut command = Command::new(std::env::current_exe()?);
        command.args(std::env::args().skip(1)).env(LISTENER, addr.to_string());
        let mut peer = Peer(command.stdout(Stdio::piped()).spawn()?);
        // It says so when it has its end of the connection, or nothing when it ends.
        let mut output = BufReader::new(peer.0.stdout.take().ok_or("no output")?).lines();
        let (said, heard) = oneshot::channel();
        std::thread::spawn(move || said.send(output.next()));
        timeout(PATIENCE, heard).await??.ok_or("the peer ended by itself")??;
        let connection = timeout(PATIENCE, peers.recv()).await?.ok_or("nobody listens")?;
        let start = Instant::now();
        peer.0.kill()?;
        let reason = timeout(PATIENCE, connection.liveness.closed()).await?;
        let ms = start.elapsed().as_secs_f64() * 1e3;
        if reason != CloseReason::Lost {
            return Err(format!("after a kill: {reason}").into());
        }
        eprintln!("{} of {}: known after {ms:.2} ms", time + 1, wish.times);
        known_ms.push(ms);
    }
    let [least, p50, most] = [0.0, 0.5, 1.0].map(|part| percentile(&mut known_ms, part));
    println!(
        r#"{{"gib": {}, "huge_pages": {}, "times": {}, "known_ms": {{"least": {least:.3}, "p50": {p50:.3}, "most": {most:.3}}}}}"#,
        wish.gib, wish.is_huge, wish.times
    );
    Ok(())
}

/// A peer with some memory, until it is killed.
async fn live(addr: SocketAddr, wish: &Wish) -> Result<(), Box<dyn Error>> {
    let bytes = ((wish.gib * f64::from(1 << 30)) as usize).max(1);
    // SAFETY: a new mapping, where the kernel wants it.
    let memory = unsafe {
        mmap_anonymous(
            std::ptr::null_mut(),
            bytes,
            ProtFlags::READ | ProtFlags::WRITE,
            MapFlags::PRIVATE,
        )?
    };
    let advice = if wish.is_huge { Advice::LinuxHugepage } else { Advice::LinuxNoHugepage };
    // SAFETY: the mapping above; what its pages are changes no byte.
    unsafe { madvise(memory, bytes, advice)? };
    for at in (0..bytes).step_by(4096) {
        // SAFETY: within the mapping, which nobody else uses.
        unsafe { memory.cast::<u8>().add(at).write_volatile(1) };
    }
    let connection = connect(addr, PeerHello::default(), ConnectConfig::default()).await?;
    println!("connected");
    let reason = connection.liveness.closed().await;
    Err(format!("not killed: {reason}").into())
}
