//! The ticket with which a server reads weights of others, and the check of a server that only reads.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use control_api::{ControlClient, MemberInfo, TicketRequest, TicketRole};
use p2p_core::bootstrap::{
    HandshakeBinding, Reject, RejectCode, ShownTicket, TicketCheck, TicketSource,
};
use trust::ticket::{Handshake, MAX_CLIENT_BYTES, SecretKey, prove};

/// A key of its own for each read, and the control plane's ticket for it.
#[derive(Debug, Clone)]
pub(crate) struct ReaderTicket {
    key: Arc<SecretKey>,
    ticket: Arc<str>,
}

impl ReaderTicket {
    /// Asks for a ticket in the name of the server `name`. A new leader gives none for up to a quarter of a ticket's life,
    /// so this retries for up to `patience`. It ends early when `stop` becomes true.
    ///
    /// # Errors
    /// The reason, for people, why there is none.
    pub(crate) async fn fetch(
        control: &ControlClient,
        name: &str,
        patience: Duration,
        stop: &AtomicBool,
    ) -> Result<Self, String> {
        let key = SecretKey::generate().map_err(|error| error.to_string())?;
        // The name of a server may be as long as that of a ticket's client. It tells people which server reads.
        let client: String = format!("weights for {name}").chars().take(MAX_CLIENT_BYTES).collect();
        let public = key.public().to_string();
        let request =
            TicketRequest { role: TicketRole::Server, ..TicketRequest::new(client, public) };
        let begin = Instant::now();
        loop {
            match control.ticket(&request).await {
                Ok(answer) => return Ok(Self { key: Arc::new(key), ticket: answer.ticket.into() }),
                Err(error)
                    if !error.is_transient()
                        || begin.elapsed() >= patience
                        || stop.load(Ordering::Relaxed) =>
                {
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
        let HandshakeBinding { channel, hello, .. } = *binding;
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
    fn check(
        &self,
        _: Option<&ShownTicket>,
        _: &HandshakeBinding<'_>,
    ) -> Result<Option<Box<str>>, Reject> {
        let text = "this port belongs to a server that reads weights, and gives none";
        Err(Reject::new(RejectCode::TICKET, text.to_owned()))
    }
}

const PAUSE: Duration = Duration::from_millis(200);

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::TcpListener;
    use std::sync::atomic::AtomicUsize;

    use super::*;

    const REFUSAL: &str =
        r#"{"code":"request_timeout","message":"the servers do not know the key yet"}"#;

    /// A control plane whose new leader refuses the first `num_refusals` requests. Returns its URL, and the number of
    /// requests so far. Its thread ends with the process.
    fn new_leader(num_refusals: usize) -> (String, Arc<AtomicUsize>) {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let url = format!("http://{}", listener.local_addr().expect("an address"));
        let num_requests = Arc::new(AtomicUsize::new(0));
        let count = Arc::clone(&num_requests);
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let mut stream = stream.expect("a connection");
                let mut request = Vec::new();
                while !request.ends_with(b"}") {
                    let mut bytes = [0; 4096];
                    let got = stream.read(&mut bytes).expect("a request");
                    request.extend_from_slice(&bytes[..got]);
                    if got == 0 {
                        break;
                    }
                }
                let (status, body) = match count.fetch_add(1, Ordering::SeqCst) < num_refusals {
                    true => ("503 Service Unavailable", REFUSAL),
                    false => ("200 OK", r#"{"ticket":"one","epoch":3,"expires_in_ms":1000}"#),
                };
                let len = body.len();
                let head = format!(
                    "HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {len}\r\nconnection: close"
                );
                write!(stream, "{head}\r\n\r\n{body}").expect("an answer");
            }
        });
        (url, num_requests)
    }

    #[tokio::test]
    async fn a_reader_waits_for_a_new_leader_as_long_as_its_patience() {
        // More than five seconds of refusals.
        let (url, num_requests) = new_leader(27);
        let control = ControlClient::new(&url, None).expect("a client");
        let stop = AtomicBool::new(false);
        let error = ReaderTicket::fetch(&control, "b", Duration::ZERO, &stop).await;
        assert!(error.expect_err("refused").contains("do not know the key"));
        assert_eq!(num_requests.load(Ordering::SeqCst), 1);
        let long = Duration::from_secs(60);
        let ticket = ReaderTicket::fetch(&control, "b", long, &stop).await.expect("a ticket");
        assert_eq!((&*ticket.ticket, num_requests.load(Ordering::SeqCst)), ("one", 28));
    }

    #[tokio::test]
    async fn a_load_that_is_stopped_does_not_wait_for_a_ticket() {
        let (url, num_requests) = new_leader(usize::MAX);
        let control = ControlClient::new(&url, None).expect("a client");
        let stop = AtomicBool::new(true);
        let long = Duration::from_secs(60);
        let error = ReaderTicket::fetch(&control, "b", long, &stop).await;
        assert!(error.expect_err("the load is stopped").contains("do not know the key"));
        assert_eq!(num_requests.load(Ordering::SeqCst), 1);
    }
}
