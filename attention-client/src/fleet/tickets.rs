//! The client's tickets: one ticket of the control plane for all servers of the fleet, fetched ahead and renewed after
//! half of its life. While the control plane is down, the last ticket serves until it expires.

use std::sync::Arc;
use std::time::{Duration, Instant};

use control_api::{ControlClient, ControlError, ServerEntry, TicketRequest, code};
use p2p_core::bootstrap::{HandshakeBinding, ShownTicket, TicketSource};
use tokio::sync::{Notify, watch};
use tokio::time::{sleep, timeout};
use trust::ticket::{Handshake, SecretKey, SignError, prove};

/// The key of this client and its newest ticket.
#[derive(Debug)]
pub(crate) struct Tickets {
    key: Arc<SecretKey>,
    newest: watch::Sender<Newest>,
    /// Wakes the task that fetches tickets.
    wanted: Notify,
}

#[derive(Debug, Default)]
struct Newest {
    ticket: Option<Ticket>,
    /// Why the last request failed.
    problem: Option<NoTicket>,
}

/// Why there is no ticket.
#[derive(Debug, Clone, thiserror::Error)]
#[error("no ticket from the control plane: {reason}")]
pub(crate) struct NoTicket {
    reason: String,
    /// The control plane answered, and refuses until a setting changes.
    pub is_refused: bool,
}

#[derive(Debug, Clone)]
struct Ticket {
    text: Arc<str>,
    expires_at: Instant,
}

impl Tickets {
    /// Makes the client's key.
    pub fn new() -> Result<Self, SignError> {
        let key = Arc::new(SecretKey::generate()?);
        let newest = watch::Sender::new(Newest::default());
        Ok(Self { key, newest, wanted: Notify::new() })
    }

    /// Fetches tickets until it is dropped.
    pub async fn run(&self, control: ControlClient, client: String) {
        let request = TicketRequest::new(printable(&client), self.key.public().to_string());
        let mut pause = FIRST_PAUSE;
        // Grows while servers refuse fresh tickets, for instance because their clock is wrong.
        let mut least = LEAST_PAUSE;
        loop {
            let asked_at = Instant::now();
            let next = match control.ticket(&request).await {
                Ok(answer) => {
                    pause = FIRST_PAUSE;
                    let life = Duration::from_millis(answer.expires_in_ms);
                    let ticket = Ticket { text: answer.ticket.into(), expires_at: asked_at + life };
                    self.newest.send_replace(Newest { ticket: Some(ticket), problem: None });
                    life / 2
                }
                Err(error) => {
                    let is_transient = error.is_transient();
                    tracing::debug!(%error, "no ticket");
                    let problem = NoTicket::from(&error);
                    self.newest.send_modify(|newest| newest.problem = Some(problem));
                    let jitter = rand::random_range(0.5..=1.0);
                    let next = if is_transient { pause } else { REFUSED_PAUSE };
                    let next = next.mul_f64(jitter);
                    pause = (pause * 2).min(MAX_PAUSE);
                    next
                }
            };
            sleep(least.min(next)).await;
            match timeout(next.saturating_sub(least), self.wanted.notified()).await {
                Ok(()) => least = (least * 2).min(REFUSED_PAUSE),
                Err(_) => least = LEAST_PAUSE,
            }
        }
    }

    /// The source of proofs for `server`. Waits up to `bound` for a ticket that has not expired. Does not wait once the
    /// control plane has refused the last request.
    ///
    /// # Errors
    /// [`NoTicket`].
    pub async fn for_server(
        &self,
        server: &ServerEntry,
        bound: Duration,
    ) -> Result<Arc<ServerTickets>, NoTicket> {
        let mut newest = self.newest.subscribe();
        let is_live = |newest: &Newest| {
            newest.ticket.as_ref().is_some_and(|ticket| Instant::now() < ticket.expires_at)
        };
        let is_refused = |newest: &Newest| newest.problem.as_ref().is_some_and(|p| p.is_refused);
        let is_settled = |newest: &Newest| is_live(newest) || is_refused(newest);
        // An error is the end of the time: the sender lives as long as `self`.
        let _ = timeout(bound, newest.wait_for(is_settled)).await;
        let newest = self.newest.borrow();
        let Some(Ticket { text, .. }) = newest.ticket.clone().filter(|_| is_live(&newest)) else {
            return Err(newest.problem.clone().unwrap_or_else(|| NoTicket {
                reason: format!("no answer within {} ms", bound.as_millis()),
                is_refused: false,
            }));
        };
        Ok(Arc::new(ServerTickets {
            key: Arc::clone(&self.key),
            ticket: text,
            server: server.name.clone(),
            incarnation: server.incarnation,
        }))
    }

    /// A server has refused a ticket of this source. Fetches a new one soon, unless there is a newer one already.
    pub fn refused(&self, source: &ServerTickets) {
        let newest = self.newest.borrow();
        if newest.ticket.as_ref().is_some_and(|ticket| Arc::ptr_eq(&ticket.text, &source.ticket)) {
            self.wanted.notify_one();
        }
    }
}

impl From<&ControlError> for NoTicket {
    fn from(error: &ControlError) -> Self {
        // Codes of the control plane itself. A proxy in between may refuse for a moment.
        let is_refused = matches!(
            error.code(),
            Some(code::FORBIDDEN | code::UNAUTHORIZED | code::BAD_REQUEST | code::NOT_FOUND)
        );
        Self { reason: error.to_string(), is_refused }
    }
}

/// Proves to one server that this client may use its ticket.
#[derive(Debug)]
pub(crate) struct ServerTickets {
    key: Arc<SecretKey>,
    ticket: Arc<str>,
    server: String,
    incarnation: u64,
}

impl TicketSource for ServerTickets {
    fn show(&self, binding: &HandshakeBinding<'_>) -> Result<ShownTicket, String> {
        let handshake = Handshake {
            server: &self.server,
            incarnation: self.incarnation,
            channel: binding.channel,
            hello: binding.hello,
        };
        let proof =
            prove(&self.ticket, &handshake, &self.key).map_err(|error| error.to_string())?;
        Ok(ShownTicket { ticket: self.ticket.to_string(), proof })
    }
}

/// The client's name as tickets take it: 1 to 128 printable ASCII characters.
fn printable(name: &str) -> String {
    let shown = |c: char| if c.is_ascii_graphic() || c == ' ' { c } else { '?' };
    let name: String = name.chars().take(MAX_NAME).map(shown).collect();
    if name.is_empty() { "client".to_owned() } else { name }
}

const MAX_NAME: usize = 128;
const FIRST_PAUSE: Duration = Duration::from_millis(20);
const MAX_PAUSE: Duration = Duration::from_secs(1);
/// Until a control plane that refuses, or knows no tickets, is asked again.
const REFUSED_PAUSE: Duration = Duration::from_secs(10);
/// Servers that refuse tickets cause at most one request in this time.
const LEAST_PAUSE: Duration = Duration::from_millis(100);
