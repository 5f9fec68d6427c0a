//! A stream that reads TLS records one at a time.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// The peer's bytes are not TLS.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the peer does not speak TLS on this connection")]
pub struct NotTls;

/// Wraps a stream below TLS, so that no read passes the end of a TLS record. Bytes that follow the last record stay
/// in the stream. A record that does not begin like TLS fails with [`NotTls`].
#[derive(Debug)]
pub struct Records<IO> {
    io: IO,
    header: [u8; HEADER_BYTES],
    num_header_bytes: usize,
    /// Bytes of the header that the reader has taken.
    num_taken: usize,
    /// Bytes of the record's body that are still to be read.
    body_left: usize,
}

impl<IO> Records<IO> {
    /// Begins at the start of a record.
    pub const fn new(io: IO) -> Self {
        Self { io, header: [0; HEADER_BYTES], num_header_bytes: 0, num_taken: 0, body_left: 0 }
    }

    /// The stream.
    pub const fn get_ref(&self) -> &IO {
        &self.io
    }

    /// The stream, for the caller to write to.
    pub const fn get_mut(&mut self) -> &mut IO {
        &mut self.io
    }

    /// Gives the stream back.
    pub fn into_inner(self) -> IO {
        self.io
    }
}

impl<IO: AsyncRead + Unpin> AsyncRead for Records<IO> {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        while this.num_header_bytes < HEADER_BYTES {
            let mut part = ReadBuf::new(&mut this.header[this.num_header_bytes..]);
            ready!(Pin::new(&mut this.io).poll_read(cx, &mut part))?;
            let num_read = part.filled().len();
            if num_read == 0 {
                // An end inside of a header is an end, too: TLS notices that its closing alert is missing.
                return Poll::Ready(Ok(()));
            }
            this.num_header_bytes += num_read;
            if !CONTENT_TYPES.contains(&this.header[0])
                || this.num_header_bytes > 1 && this.header[1] != MAJOR
            {
                return Poll::Ready(Err(io::Error::new(io::ErrorKind::InvalidData, NotTls)));
            }
            if this.num_header_bytes == HEADER_BYTES {
                this.body_left = usize::from(u16::from_be_bytes([this.header[3], this.header[4]]));
            }
        }
        if this.num_taken < HEADER_BYTES {
            let rest = &this.header[this.num_taken..];
            let num_bytes = rest.len().min(buf.remaining());
            buf.put_slice(&rest[..num_bytes]);
            this.num_taken += num_bytes;
            this.begin_next();
            return Poll::Ready(Ok(()));
        }
        let num_wanted = this.body_left.min(buf.remaining());
        let mut part = ReadBuf::new(buf.initialize_unfilled_to(num_wanted));
        ready!(Pin::new(&mut this.io).poll_read(cx, &mut part))?;
        let num_read = part.filled().len();
        buf.advance(num_read);
        this.body_left -= num_read;
        this.begin_next();
        Poll::Ready(Ok(()))
    }
}

impl<IO> Records<IO> {
    /// Expects a new header if the record is complete.
    const fn begin_next(&mut self) {
        if self.num_taken == HEADER_BYTES && self.body_left == 0 {
            (self.num_header_bytes, self.num_taken) = (0, 0);
        }
    }
}

impl<IO: AsyncWrite + Unpin> AsyncWrite for Records<IO> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.io).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_shutdown(cx)
    }
}

const HEADER_BYTES: usize = 5;
/// Change of cipher, alert, handshake and data, see RFC 8446, section 5.1.
const CONTENT_TYPES: std::ops::RangeInclusive<u8> = 20..=23;
const MAJOR: u8 = 3;
