//! The server's checks of tickets, with the keys that the control plane sends with each heartbeat. It needs no control
//! plane at the time of the check.

use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::SystemTime;

use control_api::{LeaseState, TicketKeys};
use p2p_core::bootstrap::{HandshakeBinding, Reject, RejectCode, ShownTicket, TicketCheck};
use tokio::sync::watch;
use trust::Role;
use trust::ticket::{Gate, Handshake, TrustedKey, UnixTime};

/// Admits peers with a ticket for this process: clients to the data plane, servers to the port for weights.
#[derive(Debug)]
pub(crate) struct TicketGate {
    server: String,
    /// Role whose tickets it admits.
    role: Role,
    gate: Gate,
    member: OnceLock<Member>,
    keys: Mutex<Option<Arc<ParsedKeys>>>,
}

/// The process as the control plane knows it.
#[derive(Debug)]
struct Member {
    incarnation: u64,
    lease: watch::Receiver<LeaseState>,
}

/// Keys of one message of the control plane.
#[derive(Debug)]
struct ParsedKeys {
    source: Arc<TicketKeys>,
    keys: Vec<TrustedKey>,
}

impl TicketGate {
    /// A gate for tickets of `role` that refuses every peer until [`follow`](Self::follow).
    pub(crate) fn new(server: String, role: Role) -> Self {
        let (gate, member, keys) = (Gate::default(), OnceLock::new(), Mutex::new(None));
        Self { server, role, gate, member, keys }
    }

    /// Takes the keys of tickets from the lease of the process with this incarnation.
    pub(crate) fn follow(&self, incarnation: u64, lease: watch::Receiver<LeaseState>) {
        // Cannot be set yet: a server joins once.
        let _ = self.member.set(Member { incarnation, lease });
    }

    fn keys(&self, member: &Member) -> Option<Arc<ParsedKeys>> {
        let source = member.lease.borrow().ticket_keys.clone()?;
        let mut known = self.keys.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = &*known
            && Arc::ptr_eq(&known.source, &source)
        {
            return Some(Arc::clone(known));
        }
        let parsed = source.keys.iter().filter_map(|found| {
            let key = match found.key.parse() {
                Ok(key) => key,
                Err(error) => {
                    tracing::error!(%error, "the control plane sent a malformed key for tickets");
                    return None;
                }
            };
            let expires_at = UnixTime(found.expires_at);
            Some(TrustedKey { key, fleet: source.fleet.clone(), expires_at })
        });
        let keys = parsed.collect();
        Some(Arc::clone(known.insert(Arc::new(ParsedKeys { source, keys }))))
    }
}

impl TicketCheck for TicketGate {
    fn check(
        &self,
        shown: Option<&ShownTicket>,
        binding: &HandshakeBinding<'_>,
    ) -> Result<Option<Box<str>>, Reject> {
        let refused = |message: String| Err(Reject::new(RejectCode::TICKET, message));
        let Some(shown) = shown else {
            return refused(
                "no ticket was shown; this port admits peers with a ticket of the fleet's control plane only"
                    .to_owned(),
            );
        };
        let Some((member, known)) =
            self.member.get().and_then(|member| Some((member, self.keys(member)?)))
        else {
            return refused("this server has no keys for tickets yet; try again".to_owned());
        };
        let handshake = Handshake {
            server: &self.server,
            incarnation: member.incarnation,
            channel: binding.channel,
            hello: binding.hello,
        };
        let (keys, least_epoch) = (&known.keys, known.source.least_epoch);
        let now = SystemTime::now().into();
        let ShownTicket { ticket, proof } = shown;
        match self.gate.check(ticket, proof, &handshake, self.role, keys, least_epoch, now) {
            Ok(claims) => {
                tracing::debug!(client = claims.client, epoch = claims.epoch, "a ticket is used");
                Ok(counted_holder(claims.holder))
            }
            Err(error) => refused(error.to_string()),
        }
    }
}

/// The holder of a ticket if it is one identity. A holder with an address stands for all that share the cluster's token,
/// or need none: a whole fleet may be behind one address.
fn counted_holder(holder: String) -> Option<Box<str>> {
    (!holder.contains(' ')).then(|| holder.into_boxed_str())
}

#[cfg(test)]
mod tests;
