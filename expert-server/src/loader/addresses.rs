//! Addresses of peers, many names at a time.

use std::future::Future;
use std::net::SocketAddr;
use std::time::Duration;

use tokio::task::JoinSet;
use tokio::time::{Instant, timeout, timeout_at};

/// The address of each of `names`, which have the form `HOST:PORT`. `None` for a name that the resolver does not know,
/// or not in time. Waits for at most [`Limits::total`], and not at all if every host is an address.
pub(super) async fn resolve(names: &[&str]) -> Vec<Option<SocketAddr>> {
    resolve_by(names, LIMITS, async |name: String| tokio::net::lookup_host(name).await.ok()?.next())
        .await
}

/// Limits on the lookups of one call.
#[derive(Debug, Clone, Copy)]
struct Limits {
    /// Lookups under way at the same time.
    at_once: usize,
    /// Longest wait for one name.
    each: Duration,
    /// Longest wait for all names.
    total: Duration,
}

async fn resolve_by<L, F>(names: &[&str], limits: Limits, lookup: L) -> Vec<Option<SocketAddr>>
where
    L: Fn(String) -> F,
    F: Future<Output = Option<SocketAddr>> + Send + 'static,
{
    let mut addrs: Vec<Option<SocketAddr>> = names.iter().map(|name| name.parse().ok()).collect();
    let unknown: Vec<usize> = (0..names.len()).filter(|&idx| addrs[idx].is_none()).collect();
    let mut waiting = unknown.into_iter();
    let mut lookups = JoinSet::new();
    let deadline = Instant::now() + limits.total;
    loop {
        let free = limits.at_once - lookups.len();
        for idx in waiting.by_ref().take(free) {
            let lookup = timeout(limits.each, lookup(names[idx].to_owned()));
            lookups.spawn(async move { (idx, lookup.await.ok().flatten()) });
        }
        match timeout_at(deadline, lookups.join_next()).await {
            Ok(Some(Ok((idx, addr)))) => addrs[idx] = addr,
            // A lookup that panicked gives no address.
            Ok(Some(Err(_))) => {}
            Ok(None) | Err(_) => return addrs,
        }
    }
}

/// The system's resolver blocks a thread for each lookup, and goes on after the wait for it has ended. A resolver that
/// does not answer holds at most 96 threads of the runtime's 512 at the end: 32 for each 2 s that have begun.
const LIMITS: Limits =
    Limits { at_once: 32, each: Duration::from_secs(2), total: Duration::from_secs(5) };

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use tokio::sync::Barrier;

    use super::*;

    const HOUR: Duration = Duration::from_secs(3600);

    fn addr(port: u16) -> SocketAddr {
        (Ipv4Addr::LOCALHOST, port).into()
    }

    #[tokio::test]
    async fn names_are_looked_up_at_the_same_time_up_to_the_limit() {
        let names: Vec<String> = (0..20).map(|port| format!("peer:{port}")).collect();
        let names: Vec<&str> = names.iter().map(|name| &**name).collect();
        // Each lookup waits until four are under way.
        let (barrier, num_running) = (Arc::new(Barrier::new(4)), Arc::new(AtomicUsize::new(0)));
        let limits = Limits { at_once: 4, each: HOUR, total: HOUR };
        let found = resolve_by(&names, limits, |name| {
            let (barrier, num_running) = (Arc::clone(&barrier), Arc::clone(&num_running));
            async move {
                assert!(num_running.fetch_add(1, Ordering::SeqCst) < 4, "too many lookups");
                barrier.wait().await;
                num_running.fetch_sub(1, Ordering::SeqCst);
                Some(addr(name.rsplit_once(':')?.1.parse().ok()?))
            }
        });
        let expected: Vec<_> = (0..20).map(|port| Some(addr(port))).collect();
        assert_eq!(found.await, expected);
    }

    #[tokio::test]
    async fn a_resolver_that_does_not_answer_costs_the_total_and_other_names_nothing() {
        let mut names = vec!["silent:1"; 1000];
        (names[0], names[1], names[999]) = ("known:7", "unknown:1", "127.0.0.1:9");
        let limits = Limits { at_once: 8, each: HOUR, total: Duration::from_millis(50) };
        let num_lookups = Arc::new(AtomicUsize::new(0));
        let found = resolve_by(&names, limits, |name| {
            num_lookups.fetch_add(1, Ordering::SeqCst);
            async move {
                match &*name {
                    "known:7" => Some(addr(7)),
                    "unknown:1" => None,
                    _ => std::future::pending().await,
                }
            }
        });
        let mut expected = vec![None; 1000];
        (expected[0], expected[999]) = (Some(addr(7)), Some(addr(9)));
        assert_eq!(found.await, expected);
        assert_eq!(num_lookups.load(Ordering::SeqCst), 8 + 2);
    }

    #[tokio::test]
    async fn a_silent_name_gives_its_turn_to_the_next() {
        let names = ["silent:1", "silent:2", "known:7"];
        let limits = Limits { at_once: 1, each: Duration::from_millis(10), total: HOUR };
        let found = resolve_by(&names, limits, async |name: String| match &*name {
            "known:7" => Some(addr(7)),
            _ => std::future::pending().await,
        });
        assert_eq!(found.await, [None, None, Some(addr(7))]);
    }
}
