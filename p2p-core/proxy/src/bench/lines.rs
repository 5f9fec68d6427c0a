//! What the two sides of `benchmark_remote` say to each other, in JSON over TCP.

use std::io::{BufRead, BufReader, ErrorKind, Write};
use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

use super::remote::Line;

/// A connection, if one comes in time. The listener does not block afterwards.
pub(super) fn accept(listener: &TcpListener, patience: Duration) -> Result<TcpStream> {
    listener.set_nonblocking(true)?;
    let begun = Instant::now();
    loop {
        match listener.accept() {
            Ok((stream, _)) => return Ok(stream),
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                ensure!(begun.elapsed() < patience, "no sender came within {patience:?}");
                std::thread::sleep(Duration::from_millis(10));
            }
            Err(error) => return Err(error).context("no sender can come"),
        }
    }
}

/// The connection of both sides, line by line. Neither a line nor the wait for one is without a bound.
pub(super) struct Lines {
    reader: BufReader<TcpStream>,
    pub(super) writer: TcpStream,
}

impl Lines {
    pub(super) fn new(stream: TcpStream) -> Result<Self> {
        stream.set_nodelay(true)?;
        stream.set_write_timeout(Some(LIMIT))?;
        Ok(Self { reader: BufReader::new(stream.try_clone()?), writer: stream })
    }

    pub(super) fn write(&mut self, line: &Line) -> Result<()> {
        let mut text = serde_json::to_string(line)?;
        text.push('\n');
        Ok(self.writer.write_all(text.as_bytes())?)
    }

    pub(super) fn read(&mut self) -> Result<Line> {
        self.read_every(Duration::from_millis(100), || ())
    }

    /// As [`read`](Self::read), with `work` done again and again meanwhile.
    pub(super) fn read_while(&mut self, work: impl FnMut()) -> Result<Line> {
        self.read_every(Duration::from_millis(1), work)
    }

    /// A line, with `work` done at least once in `pause` until it is there.
    fn read_every(&mut self, pause: Duration, mut work: impl FnMut()) -> Result<Line> {
        let deadline = Instant::now() + LIMIT;
        self.writer.set_read_timeout(Some(pause))?;
        let mut text = Vec::new();
        loop {
            work();
            if self.read_more(&mut text)? {
                return Ok(serde_json::from_slice(&text)?);
            }
            ensure!(Instant::now() < deadline, "the other side says nothing for {LIMIT:?}");
        }
    }

    /// What has come of a line, or nothing if nothing has. Whether the line is whole.
    fn read_more(&mut self, text: &mut Vec<u8>) -> Result<bool> {
        let come = match self.reader.fill_buf() {
            Ok(come) => come,
            Err(error)
                if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) =>
            {
                return Ok(false);
            }
            Err(error) => return Err(error.into()),
        };
        ensure!(!come.is_empty(), "the other side has closed");
        let end = come.iter().position(|byte| *byte == b'\n');
        let len = end.map_or(come.len(), |end| end + 1);
        ensure!(
            text.len() + len <= MAX_LINE_BYTES,
            "the other side sends a line of more than {MAX_LINE_BYTES} bytes"
        );
        text.extend_from_slice(&come[..len]);
        self.reader.consume(len);
        Ok(end.is_some())
    }
}

/// Of a wait for the other side.
pub(super) const LIMIT: Duration = Duration::from_secs(120);
/// A description of a slot is the longest, some hundred bytes in decimal.
const MAX_LINE_BYTES: usize = 64 << 10;
