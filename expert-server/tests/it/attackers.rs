//! Peers with tickets of their own making, certificates, and a relay between peers.

use std::fmt;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use p2p_core::bootstrap::{HandshakeBinding, ShownTicket, TicketSource};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use trust::Role;
use trust::certs::{Authority, Request, validity_from_now};
use trust::ticket::{Handshake, SecretKey, prove};
use trust::tls::{ClientCertificates, Tls, TlsFiles};

/// Makes what a peer shows.
pub struct Shows(pub Box<dyn Fn(&HandshakeBinding<'_>) -> ShownTicket + Send + Sync>);

impl fmt::Debug for Shows {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Shows")
    }
}

impl TicketSource for Shows {
    fn show(&self, binding: &HandshakeBinding<'_>) -> Result<ShownTicket, String> {
        Ok((self.0)(binding))
    }
}

/// Shows `ticket` with a proof by `key` for the server called `server`.
pub fn proves(
    ticket: impl Into<String>,
    key: &Arc<SecretKey>,
    server: &str,
    incarnation: u64,
) -> Shows {
    let (ticket, key, server) = (ticket.into(), Arc::clone(key), server.to_owned());
    Shows(Box::new(move |binding| {
        let (channel, hello) = (binding.channel, binding.hello);
        let handshake = Handshake { server: &server, incarnation, channel, hello };
        let proof = prove(&ticket, &handshake, &key).unwrap();
        ShownTicket { ticket: ticket.clone(), proof }
    }))
}

/// Certificates of one authority, for a process on `address` as far as it says. Its files land in a folder of `dir`.
pub fn issue(authority: &Authority, dir: &Path, name: &str, address: &str) -> Tls {
    let (not_before, not_after) = validity_from_now(30);
    let addresses = vec![address.to_owned()];
    let folder = dir.join(name);
    let name = name.to_owned();
    let request = Request { name, role: Role::Server, addresses, not_before, not_after };
    authority.issue_into(&folder, &request, false).unwrap();
    Tls::open(TlsFiles::in_folder(&folder).unwrap(), ClientCertificates::Optional).unwrap()
}

/// A process between client and server that ends TLS on both sides with a certificate of its own, and passes every byte
/// on. Returns its address and the number of bytes that it has passed on from clients.
pub async fn tls_relay(own: Tls, target: SocketAddr) -> (SocketAddr, Arc<AtomicU64>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let (addr, passed) = (listener.local_addr().unwrap(), Arc::new(AtomicU64::new(0)));
    let num_passed = Arc::clone(&passed);
    tokio::spawn(async move {
        while let Ok((near, _)) = listener.accept().await {
            let Ok(mut near) = own.accept(near).await else { continue };
            let far = TcpStream::connect(target).await.unwrap();
            let mut far = own.connect("127.0.0.1", far).await.unwrap();
            let mut bytes = vec![0; 64 << 10];
            let len = near.read(&mut bytes).await.unwrap_or(0);
            num_passed.fetch_add(len as u64, Ordering::Relaxed);
            if far.write_all(&bytes[..len]).await.is_ok() {
                drop(tokio::io::copy_bidirectional(&mut near, &mut far).await);
            }
        }
    });
    (addr, passed)
}
