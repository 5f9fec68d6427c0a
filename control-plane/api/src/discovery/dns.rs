//! Control planes by DNS: all addresses of a name, such as that of a headless Service.

use std::fmt::Debug;
use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use super::{Refreshes, Report};
use crate::backoff::Backoff;

/// The outcome of a lookup that runs.
pub(super) type Lookup<'a> = Pin<Box<dyn Future<Output = io::Result<Vec<SocketAddr>>> + Send + 'a>>;

/// Looks up the addresses of a host.
pub(super) trait Resolver: Debug + Send + Sync {
    /// All addresses of a host, with the port.
    fn look_up<'a>(&'a self, host: &'a str, port: u16) -> Lookup<'a>;
}

/// The resolver of the operating system.
#[derive(Debug)]
pub(super) struct SystemResolver;

impl Resolver for SystemResolver {
    fn look_up<'a>(&'a self, host: &'a str, port: u16) -> Lookup<'a> {
        Box::pin(async move { Ok(tokio::net::lookup_host((host, port)).await?.collect()) })
    }
}

/// Looks up a name again and again until the task is dropped.
pub(super) async fn follow(
    host: String,
    port: u16,
    resolver: Arc<dyn Resolver>,
    report: Report,
    mut refreshes: Refreshes,
) {
    let mut backoff = Backoff::new(MIN_INTERVAL, PERIOD);
    loop {
        let began = refreshes.begin();
        let outcome = tokio::time::timeout(TIMEOUT, resolver.look_up(&host, port)).await;
        let pause = match outcome {
            Ok(Ok(addresses)) if !addresses.is_empty() => {
                backoff.reset();
                report.found(addresses);
                PERIOD
            }
            Ok(Ok(_)) => {
                report.failed(format!("{host} has no address"));
                backoff.next_delay()
            }
            Ok(Err(err)) => {
                report.failed(format!("{host}: {err}"));
                backoff.next_delay()
            }
            Err(_) => {
                report.failed(format!("{host}: no answer within {} s", TIMEOUT.as_secs()));
                backoff.next_delay()
            }
        };
        refreshes.pause(pause, began + MIN_INTERVAL).await;
    }
}

/// Time between lookups that succeed.
const PERIOD: Duration = Duration::from_secs(15);
/// Least time between lookups.
const MIN_INTERVAL: Duration = Duration::from_millis(250);
const TIMEOUT: Duration = Duration::from_secs(3);
