//! One call of `connect`: its offers in each handshake, and its retries with other offers.

use std::fmt::Display;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use tokio::net::TcpStream;

use super::close::is_over;
use super::fallback::{ExcludedOffer, Fallback};
use super::{ConnectConfig, ConnectError, RejectCode};
use crate::network::{Offer, offers};

/// The offers of one call of `connect`, and their failures.
pub(super) struct Attempt<'a> {
    name: &'a str,
    fallback: Fallback,
    all: Vec<Offer>,
    /// Offers left out in the handshake under way.
    pub(super) left_out: Vec<ExcludedOffer>,
    /// The listening side's choice in that handshake.
    choice: Option<Choice>,
    /// Offers that failed in this call.
    failed: Vec<ExcludedOffer>,
    /// The sides have nothing else in common, so offers that failed earlier are tried all the same.
    no_choice: bool,
    /// Error of the last offer in `failed`.
    error: Option<ConnectError>,
}

struct Choice {
    offer: Offer,
    /// For a network: the connection over which it was chosen. A network may reach no peer although
    /// both sides could join. `None` if the system gave no second descriptor.
    control: Option<OwnedFd>,
    since: Instant,
}

impl<'a> Attempt<'a> {
    pub(super) fn new(name: &'a str, config: &ConnectConfig) -> Self {
        Self {
            name,
            fallback: config.fallback.clone(),
            all: offers(&config.transports, &config.networks, config.device.is_some()),
            left_out: Vec::new(),
            choice: None,
            failed: Vec::new(),
            no_choice: false,
            error: None,
        }
    }

    pub(super) fn begin(&mut self) {
        self.choice = None;
        self.left_out = self.fallback.left_out();
        // An offer that works on another link is left out in this call only.
        for failed in &self.failed {
            if !self.left_out.iter().any(|left| left.offer == failed.offer) {
                self.left_out.push(failed.clone());
            }
        }
        let (all, failed, no_choice) = (&self.all, &self.failed, self.no_choice);
        let has_failed = |offer: &Offer| failed.iter().any(|failed| failed.offer == *offer);
        let is_out = |offer: &Offer| all.contains(offer) && (!no_choice || has_failed(offer));
        self.left_out.retain(|left| is_out(&left.offer));
        if self.failed.is_empty() && self.offers().is_empty() {
            self.no_choice = true;
            self.left_out.clear();
        }
    }

    pub(super) fn offers(&self) -> Vec<Offer> {
        let is_left_out = |offer: &Offer| self.left_out.iter().any(|left| left.offer == *offer);
        self.all.iter().filter(|offer| !is_left_out(offer)).cloned().collect()
    }

    /// Notes that the listening side chose `offer`, over `control` if it is a network.
    pub(super) fn choose(&mut self, offer: &Offer, control: Option<&TcpStream>) {
        let control = control.and_then(|stream| rustix::io::fcntl_dupfd_cloexec(stream, 0).ok());
        self.choice = Some(Choice { offer: offer.clone(), control, since: Instant::now() });
    }

    /// Judges the end of a handshake. `Ok` asks for a retry with other offers. Each retry has fewer
    /// offers.
    pub(super) fn judge_failure(&mut self, error: ConnectError) -> Result<(), ConnectError> {
        if error.reject().is_some_and(|reject| reject.code == RejectCode::NO_TRANSPORT) {
            if let Some(known) = self.error.take() {
                // The remaining offers are not common to both sides. The earlier error is the real
                // obstacle.
                return Err(known);
            }
            if self.left_out.is_empty() || self.no_choice {
                return Err(error);
            }
            self.no_choice = true;
            return Ok(());
        }
        let Some(choice) = self.choice.take() else { return Err(error) };
        if error.reject().is_some_and(|reject| reject.code == RejectCode::TIMEOUT) {
            self.note_unfinished(&choice, &error);
            return Err(error);
        }
        if !blames_transport(&error) {
            return Err(error);
        }
        let failed = ExcludedOffer { offer: choice.offer, reason: error.to_string() };
        if let Some(pause) = self.fallback.note_failed(&failed.offer, failed.reason.as_str()) {
            self.warn(&failed.offer, &error, pause);
        }
        let is_first = !self.failed.iter().any(|known| known.offer == failed.offer);
        self.failed.push(failed);
        if !is_first || self.failed.len() >= self.all.len() {
            return Err(error);
        }
        self.error = Some(error);
        Ok(())
    }

    /// Notes that the time for the whole handshake is over.
    pub(super) fn note_timeout(&mut self, limit: Duration) {
        // If the peer went away meanwhile, or was slow before, the timeout says nothing about the
        // network.
        if let Some(choice) = self.choice.take()
            && choice.since.elapsed() > limit / 2
            && choice.control.as_ref().is_some_and(|control| !is_over(control))
        {
            let limit = limit.as_millis();
            self.note_unfinished(&choice, &format!("joining was not complete within {limit} ms"));
        }
    }

    fn note_unfinished(&self, choice: &Choice, reason: &dyn Display) {
        let Choice { offer, control, .. } = choice;
        if control.is_some()
            && let Some(pause) = self.fallback.note_unfinished(offer, reason.to_string())
        {
            self.warn(offer, reason, pause);
        }
    }

    fn warn(&self, offer: &Offer, reason: &dyn Display, pause: Duration) {
        tracing::warn!(peer = self.name, %offer, %reason, ?pause, "a transport does not work with this peer and is left out for a while");
    }
}

/// Tells whether the chosen transport could not join the peers, so that another one may.
fn blames_transport(error: &ConnectError) -> bool {
    match error {
        ConnectError::Rejected { reject, .. } => reject.code == RejectCode::TRANSPORT,
        ConnectError::Network(_) | ConnectError::Shm(_) | ConnectError::Channel(_) => true,
        _ => false,
    }
}
