//! The bootstrap connection during the handshake: plain TCP or TLS.
//!
//! After the handshake nothing but a goodbye travels on it, so TLS ends there. Each side has computed
//! both goodbyes from the keys of TLS, so a stranger between the peers cannot forge one. The socket
//! is then watched as one without TLS: no thread needs the keys, and the end of the connection shows
//! as early.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use trust::Identity;
use trust::tls::{
    HandshakeError, Records, Side, Tls, TlsStream, channel_binding, exported, peer_identity,
};

use super::close::Goodbyes;

/// The stream of a handshake.
#[derive(Debug)]
pub(super) enum Stream {
    Plain(TcpStream),
    Tls(Box<TlsStream<Records<TcpStream>>>),
}

impl Stream {
    /// Carries out the TLS handshake of the connecting side, if there is TLS. `host` is the peer's
    /// name or address.
    pub(super) async fn connect(
        tcp: TcpStream,
        host: &str,
        tls: Option<&Tls>,
    ) -> Result<Self, HandshakeError> {
        match tls {
            Some(tls) => Ok(Self::Tls(Box::new(tls.connect(host, Records::new(tcp)).await?))),
            None => Ok(Self::Plain(tcp)),
        }
    }

    /// Carries out the TLS handshake of the listening side.
    pub(super) async fn accept(tcp: TcpStream, tls: &Tls) -> Result<Self, HandshakeError> {
        Ok(Self::Tls(Box::new(tls.accept(Records::new(tcp)).await?)))
    }

    /// The socket. Reading or writing it directly breaks the stream.
    pub(super) fn tcp(&self) -> &TcpStream {
        match self {
            Self::Plain(tcp) => tcp,
            Self::Tls(stream) => stream.get_ref().0.get_ref(),
        }
    }

    /// The value that binds a proof to this TLS connection: `tls-exporter` of RFC 9266. `None`
    /// without TLS.
    pub(super) fn channel_binding(&self) -> Option<[u8; 32]> {
        match self {
            Self::Plain(_) => None,
            Self::Tls(stream) => channel_binding(stream),
        }
    }

    /// The holder of the certificate that the peer has shown. `None` without TLS or a certificate.
    pub(super) fn peer_identity(&self) -> Option<Identity> {
        match self {
            Self::Plain(_) => None,
            Self::Tls(stream) => peer_identity(stream),
        }
    }

    /// Ends TLS, and gives the socket back with the goodbyes that end the connection.
    ///
    /// # Errors
    /// The peer has sent more than the handshake.
    pub(super) fn into_parts(self) -> io::Result<(TcpStream, Goodbyes)> {
        let stream = match self {
            Self::Plain(tcp) => return Ok((tcp, Goodbyes::plain())),
            Self::Tls(stream) => *stream,
        };
        let exported = |label: &[u8]| {
            exported(&stream, label).ok_or_else(|| io::Error::other("TLS exports no keys"))
        };
        let of_client = exported(b"EXPORTER-switchyard-goodbye-client")?;
        let of_listener = exported(b"EXPORTER-switchyard-goodbye-listener")?;
        let unread = |num_bytes: usize| match num_bytes {
            0 => Ok(()),
            _ => Err(io::Error::other(format!("{num_bytes} bytes behind the handshake"))),
        };
        match stream {
            TlsStream::Client(stream) => {
                let (records, mut tls) = stream.into_inner();
                unread(
                    tls.process_new_packets().map_err(io::Error::other)?.plaintext_bytes_to_read(),
                )?;
                Ok((records.into_inner(), Goodbyes::secret(of_client, of_listener)))
            }
            TlsStream::Server(stream) => {
                let (records, mut tls) = stream.into_inner();
                unread(
                    tls.process_new_packets().map_err(io::Error::other)?.plaintext_bytes_to_read(),
                )?;
                Ok((records.into_inner(), Goodbyes::secret(of_listener, of_client)))
            }
        }
    }
}

/// The reason why TLS broke after its handshake, in plain words, if TLS is to blame.
pub(super) fn explain(side: Side, error: &io::Error) -> Option<String> {
    trust::tls::explain(side, error)
}

impl AsyncRead for Stream {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Plain(tcp) => Pin::new(tcp).poll_read(cx, buf),
            Self::Tls(stream) => Pin::new(stream).poll_read(cx, buf),
        }
    }
}

impl AsyncWrite for Stream {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Self::Plain(tcp) => Pin::new(tcp).poll_write(cx, buf),
            Self::Tls(stream) => Pin::new(stream).poll_write(cx, buf),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Plain(tcp) => Pin::new(tcp).poll_flush(cx),
            Self::Tls(stream) => Pin::new(stream).poll_flush(cx),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Plain(tcp) => Pin::new(tcp).poll_shutdown(cx),
            Self::Tls(stream) => Pin::new(stream).poll_shutdown(cx),
        }
    }
}
