//! The ticket with which a server reads weights of others, and the check of a server that only reads.

use std::sync::Arc;
use std::time::{Duration, Instant};

use control_api::{ControlClient, MemberInfo, TicketRequest, TicketRole};
use p2p_core::bootstrap::{
    HandshakeBinding, Reject, RejectCode, ShownTicket, TicketCheck, TicketSource,
};
use trust::ticket::{Handshake, SecretKey, prove};

/// A key of its own for each read, and the control plane's ticket for it.
#[derive(Debug, Clone)]
pub(crate) struct ReaderTicket {
    key: Arc<SecretKey>,
    ticket: Arc<str>,
}

impl ReaderTicket {
    /// Asks for a ticket in the name of the server `name`. After a change of the leader there is none for a short time, so
    /// this retries for up to [`PATIENCE`].
    ///
    /// # Errors
    /// The reason, for people, why there is none.
    pub(crate) async fn fetch(control: &ControlClient, name: &str) -> Result<Self, String> {
        let key = SecretKey::generate().map_err(|error| error.to_string())?;
        let client = format!("weights for {name}");
        let public = key.public().to_string();
        let request =
            TicketRequest { role: TicketRole::Server, ..TicketRequest::new(client, public) };
        let begin = Instant::now();
        loop {
            match control.ticket(&request).await {
                Ok(answer) => return Ok(Self { key: Arc::new(key), ticket: answer.ticket.into() }),
                Err(error) if !error.is_transient() || begin.elapsed() >= PATIENCE => {
                    return Err(error.to_string());
                }
                Err(_) => tokio::time::sleep(PAUSE).await,
            }
        }
    }

    /// The source of proofs for a member.
    pub(crate) fn for_member(&self, member: &MemberInfo) -> Arc<dyn TicketSource> {
        let (server, incarnation) = (member.name.clone(), member.incarnation);
        Arc::new(MemberTicket { of: self.clone(), server, incarnation })
    }
}

/// Proves to one server that this one may read its weights.
#[derive(Debug)]
struct MemberTicket {
    of: ReaderTicket,
    server: String,
    incarnation: u64,
}

impl TicketSource for MemberTicket {
    fn show(&self, binding: &HandshakeBinding<'_>) -> Result<ShownTicket, String> {
        let HandshakeBinding { channel, hello } = *binding;
        let (server, incarnation) = (&*self.server, self.incarnation);
        let handshake = Handshake { server, incarnation, channel, hello };
        let ReaderTicket { key, ticket } = &self.of;
        let proof = prove(ticket, &handshake, key).map_err(|error| error.to_string())?;
        Ok(ShownTicket { ticket: ticket.to_string(), proof })
    }
}

/// Refuses every peer: a reader connects to others, and no peer has a reason to connect to it.
#[derive(Debug)]
pub(super) struct NoPeers;

impl TicketCheck for NoPeers {
    fn check(&self, _: Option<&ShownTicket>, _: &HandshakeBinding<'_>) -> Result<(), Reject> {
        let text = "this port belongs to a server that reads weights, and gives none";
        Err(Reject::new(RejectCode::TICKET, text.to_owned()))
    }
}

const PATIENCE: Duration = Duration::from_secs(5);
const PAUSE: Duration = Duration::from_millis(200);
