//! The task of a leader that connects to members.

use std::collections::HashSet;
use std::future::Future;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use futures_util::stream::FuturesUnordered;
use futures_util::{FutureExt, StreamExt};
use tokio::sync::Semaphore;

use super::{Coordinator, lock};
use crate::fleet::ProbeError;

impl Coordinator {
    /// Connects to every member as soon as it serves, again until that works, when a client suspects it, and when it
    /// renews late. So experts on a server that nothing can reach do not count, and a death has a second observer.
    /// Ends when the task is aborted.
    pub(crate) async fn run_probes(&self) {
        let lookups = Arc::new(Semaphore::new(MAX_LOOKUPS));
        let probe = |addr: String| {
            let lookups = Arc::clone(&lookups);
            async move { connect(&addr, &lookups).await }
        };
        self.probe_by(max_probes(), probe).await;
    }

    /// [`run_probes`](Self::run_probes) with at most `max_probes` attempts of `probe` at a time.
    async fn probe_by<F>(&self, max_probes: usize, probe: impl Fn(String) -> F)
    where
        F: Future<Output = Result<(), ProbeError>>,
    {
        let mut under_way = FuturesUnordered::new();
        // Members with an attempt under way. One that takes long delays no others.
        let mut probed = HashSet::new();
        loop {
            // A suspicion is looked into at once, but many of them cause few attempts.
            tokio::time::sleep(PROBE_PAUSE).await;
            tokio::select! {
                () = self.probes_due.notified() => {}
                () = tokio::time::sleep(PROBE_CHECK) => {}
                Some(attempt) = under_way.next() => self.record_attempt(&mut probed, attempt),
            }
            while let Some(Some(attempt)) = under_way.next().now_or_never() {
                self.record_attempt(&mut probed, attempt);
            }
            let due = lock(&self.fleet).due_probes(self.clock.now());
            for of in due {
                if probed.len() < max_probes && probed.insert(of.clone()) {
                    let attempt = probe(of.2.clone());
                    under_way.push(async move { Attempt { of, outcome: attempt.await } });
                }
            }
        }
    }

    fn record_attempt(&self, probed: &mut HashSet<Probed>, attempt: Attempt) {
        let Attempt { of, outcome } = attempt;
        let (name, incarnation, addr) = &of;
        self.with_fleet(|fleet, now| {
            fleet.record_attempt((name, *incarnation), addr, outcome, now);
        });
        probed.remove(&of);
    }
}

/// Name, incarnation and address of a member to connect to.
type Probed = (String, u64, String);

/// One attempt to connect to a member.
struct Attempt {
    of: Probed,
    outcome: Result<(), ProbeError>,
}

/// Connects to `addr` and closes the connection. A name waits for a permit of `lookups` first, and then up to
/// [`PROBE_TIMEOUT`] for the resolver. The connection takes up to [`PROBE_TIMEOUT`].
async fn connect(addr: &str, lookups: &Semaphore) -> Result<(), ProbeError> {
    let addrs = match addr.parse() {
        Ok(addr) => vec![addr],
        Err(_) => {
            let _permit = lookups.acquire().await;
            within(PROBE_TIMEOUT, look_up(addr)).await?
        }
    };
    within(PROBE_TIMEOUT, connect_any(&addrs)).await
}

async fn within<T>(
    limit: Duration,
    attempt: impl Future<Output = Result<T, ProbeError>>,
) -> Result<T, ProbeError> {
    tokio::time::timeout(limit, attempt).await.unwrap_or_else(|_| {
        let reason = format!("no answer within {} s", limit.as_secs());
        Err(ProbeError { reason, is_refused: false })
    })
}

async fn look_up(addr: &str) -> Result<Vec<SocketAddr>, ProbeError> {
    let failed = |reason| ProbeError { reason, is_refused: false };
    let addrs = tokio::net::lookup_host(addr).await.map_err(|err| failed(err.to_string()))?;
    let addrs: Vec<_> = addrs.collect();
    if addrs.is_empty() {
        return Err(failed("the name has no address".to_owned()));
    }
    Ok(addrs)
}

/// Connects to the first address that accepts.
async fn connect_any(addrs: &[SocketAddr]) -> Result<(), ProbeError> {
    let mut error = ProbeError { reason: "no address".to_owned(), is_refused: false };
    let mut is_refused = true;
    for addr in addrs {
        match tokio::net::TcpStream::connect(addr).await {
            Ok(_) => return Ok(()),
            Err(err) => {
                is_refused &= err.kind() == std::io::ErrorKind::ConnectionRefused;
                error = ProbeError { reason: err.to_string(), is_refused };
            }
        }
    }
    Err(error)
}

/// Attempts at a time under this process's limit on open files: each holds one. An eighth of the limit leaves the quarter
/// for HTTP, the store, and what else there is untouched.
fn max_probes() -> usize {
    let files = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
    let share = files.unwrap_or(u64::MAX) / 8;
    MAX_PROBES.min(usize::try_from(share).unwrap_or(usize::MAX)).max(1)
}

/// Time between two looks for members to connect to, unless something wakes the task before.
const PROBE_CHECK: Duration = Duration::from_millis(100);
const PROBE_PAUSE: Duration = Duration::from_millis(20);
/// Systems repeat the first packet of a connection after one second and again after three. A host that answers the first
/// repetition has two seconds for that. Less would call a loaded host silent, and more waits for the next repetition.
const PROBE_TIMEOUT: Duration = Duration::from_secs(3);
/// Attempts at a time. A thousand members that answer nothing take four rounds of [`PROBE_TIMEOUT`], so each other member
/// is tried within 12 s. Each attempt costs a descriptor and a few packets.
const MAX_PROBES: usize = 256;
/// Names looked up at a time. The system's resolver blocks a thread for each, longer than [`PROBE_TIMEOUT`] if no name
/// server answers. The runtime has 512 of these threads, and plans need one.
const MAX_LOOKUPS: usize = 32;

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use tokio::sync::watch;

    use super::super::tests::{join, start};
    use super::*;
    use crate::clock::Clock as _;

    const NUM_MEMBERS: u32 = 1000;

    /// Attempts end in rounds, as those of silent hosts do. Four rounds reach a thousand members, each once.
    #[tokio::test]
    async fn a_thousand_silent_members_are_probed_in_four_rounds() {
        let (coordinator, clock) = start();
        // So that all members share one placement table.
        lock(&coordinator.pace).note(clock.now(), Duration::from_secs(1), 0);
        (0..NUM_MEMBERS).for_each(|nth| join(&coordinator, nth));
        let (round, _) = watch::channel(0u32);
        let (num_begun, num_running) = (AtomicUsize::new(0), AtomicUsize::new(0));
        let probing = coordinator.probe_by(MAX_PROBES, |_addr| {
            num_begun.fetch_add(1, Ordering::SeqCst);
            let running = num_running.fetch_add(1, Ordering::SeqCst) + 1;
            assert!(running <= MAX_PROBES, "{running} attempts at a time");
            let mut rounds = round.subscribe();
            let num_running = &num_running;
            async move {
                rounds.changed().await.expect("a round");
                num_running.fetch_sub(1, Ordering::SeqCst);
                Err(ProbeError { reason: "silent".to_owned(), is_refused: false })
            }
        });
        let ending = async {
            for nth in 1..=4 {
                let expected = (nth * MAX_PROBES).min(NUM_MEMBERS as usize);
                while num_begun.load(Ordering::SeqCst) < expected {
                    tokio::time::sleep(Duration::from_millis(5)).await;
                }
                round.send_modify(|round| *round += 1);
            }
            while coordinator.with_fleet(|fleet, _| fleet.num_unreachable()) < NUM_MEMBERS as usize
            {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::select! {
            () = probing => panic!("the probes have ended"),
            outcome = tokio::time::timeout(Duration::from_secs(60), ending) => {
                let begun = num_begun.load(Ordering::SeqCst);
                outcome.unwrap_or_else(|_| panic!("{begun} attempts in four rounds"));
            }
        }
        assert_eq!(num_begun.load(Ordering::SeqCst), NUM_MEMBERS as usize);
    }

    /// A resolver that answers nothing holds back names alone.
    #[tokio::test]
    async fn addresses_do_not_wait_for_lookups_and_names_do() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let lookups = Arc::new(Semaphore::new(0));
        assert_eq!(connect(&format!("127.0.0.1:{port}"), &lookups).await, Ok(()));
        let name = format!("localhost:{port}");
        let waiting = connect(&name, &lookups);
        tokio::pin!(waiting);
        assert!(tokio::time::timeout(Duration::from_millis(20), &mut waiting).await.is_err());
        lookups.add_permits(1);
        assert_eq!(waiting.await, Ok(()));
        assert_eq!(lookups.available_permits(), 1);
    }
}
