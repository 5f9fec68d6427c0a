//! The connection between both sides: who is there, where their queues are, and in which stage they are.
//!
//! All input is bounded, has a deadline, and is checked by field. The connection is not encrypted, and its other
//! end may write into this side's slot: use it between hosts that trust each other.

use std::fmt;
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use thiserror::Error;

use crate::stage::Stage;

/// Settings that both sides must agree on, and the seed of this side's data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Hello {
    pub(crate) is_connector: bool,
    pub(crate) is_devx: bool,
    pub(crate) is_software: bool,
    /// Whether the stage `fused` can run on this side.
    pub(crate) has_gpu: bool,
    pub(crate) first: Stage,
    pub(crate) last: Stage,
    pub(crate) num_queues: u32,
    pub(crate) depth: u32,
    pub(crate) num_wraps: u32,
    pub(crate) slot_bytes: u64,
    pub(crate) seed: u64,
}

/// The other side is not reachable, or sends invalid messages.
#[derive(Debug, Error)]
pub(crate) enum ExchangeError {
    #[error("{what} failed: {source}")]
    Io { what: String, source: io::Error },
    #[error(
        "no peer connected within {seconds} s; start `connect` with this side's address on the other host"
    )]
    Nobody { seconds: u64 },
    #[error(
        "the peer stalls: {got} of {expected} bytes of its {what} came within {millis} ms; see its output"
    )]
    Stalled { what: Kind, got: usize, expected: usize, millis: u128 },
    #[error(
        "the peer closed the connection after {got} of {expected} bytes of its {what}; see its output"
    )]
    Closed { what: Kind, got: usize, expected: usize },
    #[error(
        "the peer's first bytes are {found:02x?}, expected {expected:02x?}: is that another program, or another version of this one?"
    )]
    Magic { found: [u8; 8], expected: [u8; 8] },
    #[error("the peer's {what} has a length of {found}, expected {expected}")]
    Length { what: Kind, found: u32, expected: String },
    #[error("the peer's message is of kind {found}, expected {expected} ({})", *.expected as u16)]
    Kind { found: u16, expected: Kind },
    #[error("the peer's {what}: `{field}` is {found}, expected {expected}")]
    Field { what: Kind, field: &'static str, found: u64, expected: String },
    #[error(
        "the peer runs with {option} {theirs}, this side with {ours}: give both sides the same"
    )]
    Differs { option: &'static str, ours: String, theirs: String },
    #[error("the peer failed at stage `{stage}`: {text}")]
    PeerFailed { stage: Stage, text: String },
}

/// Kinds of messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u16)]
pub(crate) enum Kind {
    Hello = 1,
    Description = 2,
    Mark = 3,
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Hello => "greeting",
            Self::Description => "description of its queues",
            Self::Mark => "note of a stage",
        })
    }
}

/// The other side.
#[derive(Debug)]
pub(crate) struct Channel {
    stream: TcpStream,
}

impl Channel {
    /// Takes the first connection that comes.
    pub(crate) fn accept(
        listener: &TcpListener,
        patience: Duration,
    ) -> Result<Self, ExchangeError> {
        let failed =
            |source| ExchangeError::Io { what: "accepting a connection".to_owned(), source };
        listener.set_nonblocking(true).map_err(failed)?;
        let deadline = Instant::now() + patience;
        loop {
            match listener.accept() {
                Ok((stream, _)) => return Self::new(stream),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Err(failed(error)),
            }
            if Instant::now() >= deadline {
                return Err(ExchangeError::Nobody { seconds: patience.as_secs() });
            }
            std::thread::sleep(ACCEPT_INTERVAL);
        }
    }

    /// Connects with a side that listens, which may still be about to.
    pub(crate) fn connect(address: SocketAddr, patience: Duration) -> Result<Self, ExchangeError> {
        let deadline = Instant::now() + patience;
        loop {
            let left = deadline.saturating_duration_since(Instant::now()).max(ACCEPT_INTERVAL);
            match TcpStream::connect_timeout(&address, left) {
                Ok(stream) => return Self::new(stream),
                Err(error)
                    if error.kind() == io::ErrorKind::ConnectionRefused
                        && Instant::now() < deadline =>
                {
                    std::thread::sleep(ACCEPT_INTERVAL);
                }
                Err(source) => {
                    let what = format!("connecting with {address}");
                    return Err(ExchangeError::Io { what, source });
                }
            }
        }
    }

    fn new(stream: TcpStream) -> Result<Self, ExchangeError> {
        let failed =
            |source| ExchangeError::Io { what: "preparing the connection".to_owned(), source };
        stream.set_nonblocking(false).map_err(failed)?;
        stream.set_nodelay(true).map_err(failed)?;
        Ok(Self { stream })
    }

    /// Greets, and finds out whether both sides were started alike.
    pub(crate) fn greet(
        &mut self,
        own: &Hello,
        patience: Duration,
    ) -> Result<Hello, ExchangeError> {
        self.send(Kind::Hello, &own.encode(), patience)?;
        let theirs =
            Hello::decode(&self.receive(Kind::Hello, HELLO_BYTES..=HELLO_BYTES, patience)?)?;
        own.compare(&theirs)?;
        Ok(theirs)
    }

    /// Exchanges descriptions of queues, before they are joined and after each reset. The result has as
    /// many bytes as `own`; its fields, the number of the peer's first packet among them, are for
    /// [`ibgda::OpenPeer::join`] and [`ibgda::ResetPeer::rejoin`] to check.
    pub(crate) fn describe(
        &mut self,
        own: &[u8],
        patience: Duration,
    ) -> Result<Vec<u8>, ExchangeError> {
        self.send(Kind::Description, own, patience)?;
        self.receive(Kind::Description, own.len()..=own.len(), patience)
    }

    /// Waits until the peer, too, has come to `step` of `stage`.
    pub(crate) fn meet(
        &mut self,
        stage: Stage,
        step: u16,
        patience: Duration,
    ) -> Result<(), ExchangeError> {
        let mut mark = vec![stage as u8, IS_HERE];
        mark.extend(step.to_le_bytes());
        self.send(Kind::Mark, &mark, patience)?;
        let theirs = self.receive(Kind::Mark, MARK_BYTES..=MARK_BYTES + MAX_TEXT, patience)?;
        let wrong = |field, found, expected: String| ExchangeError::Field {
            what: Kind::Mark,
            field,
            found,
            expected,
        };
        let found = Stage::from_code(theirs[0])
            .ok_or_else(|| wrong("stage", theirs[0].into(), "a stage's number".to_owned()))?;
        match theirs[1] {
            IS_HERE => {}
            HAS_FAILED => {
                return Err(ExchangeError::PeerFailed { stage: found, text: clean(&theirs[4..]) });
            }
            other => return Err(wrong("state", other.into(), "1 (here) or 2 (failed)".to_owned())),
        }
        let their_step = u16::from_le_bytes([theirs[2], theirs[3]]);
        if found != stage {
            return Err(wrong("stage", theirs[0].into(), format!("{} ({stage})", stage as u8)));
        }
        if their_step != step {
            return Err(wrong("step", their_step.into(), step.to_string()));
        }
        if theirs.len() != MARK_BYTES {
            let (found, expected) = (theirs.len() as u32, MARK_BYTES.to_string());
            return Err(ExchangeError::Length { what: Kind::Mark, found, expected });
        }
        Ok(())
    }

    /// Why the peer has ended, if it has said so.
    pub(crate) fn reason(&mut self) -> Option<ExchangeError> {
        let mark =
            self.receive(Kind::Mark, MARK_BYTES..=MARK_BYTES + MAX_TEXT, REASON_PATIENCE).ok()?;
        let stage = Stage::from_code(mark[0]).filter(|_| mark[1] == HAS_FAILED)?;
        Some(ExchangeError::PeerFailed { stage, text: clean(&mark[4..]) })
    }

    /// Sends the peer the reason why this side ends, if the connection permits.
    pub(crate) fn give_up(&mut self, stage: Stage, text: &str) {
        let mut mark = vec![stage as u8, HAS_FAILED, 0, 0];
        mark.extend(text.bytes().take(MAX_TEXT));
        // The peer finds out by itself otherwise: the connection ends.
        let _ = self.send(Kind::Mark, &mark, GIVE_UP_PATIENCE);
    }

    fn send(
        &mut self,
        kind: Kind,
        payload: &[u8],
        patience: Duration,
    ) -> Result<(), ExchangeError> {
        let len = u32::try_from(payload.len()).unwrap_or(u32::MAX);
        let mut bytes = Vec::with_capacity(HEADER_BYTES + payload.len());
        bytes.extend(MAGIC);
        bytes.extend((kind as u16).to_le_bytes());
        bytes.extend([0; 2]);
        bytes.extend(len.to_le_bytes());
        bytes.extend(payload);
        let sent = self
            .stream
            .set_write_timeout(Some(patience.max(LEAST_TIMEOUT)))
            .and_then(|()| self.stream.write_all(&bytes));
        sent.map_err(|source| ExchangeError::Io { what: format!("sending the {kind}"), source })
    }

    fn receive(
        &mut self,
        kind: Kind,
        lengths: std::ops::RangeInclusive<usize>,
        patience: Duration,
    ) -> Result<Vec<u8>, ExchangeError> {
        let start = Instant::now();
        let mut header = [0; HEADER_BYTES];
        self.fill(&mut header, kind, start, patience)?;
        let magic: [u8; 8] = std::array::from_fn(|idx| header[idx]);
        if magic != MAGIC {
            return Err(ExchangeError::Magic { found: magic, expected: MAGIC });
        }
        let found = u16::from_le_bytes([header[8], header[9]]);
        let len = u32::from_le_bytes([header[12], header[13], header[14], header[15]]);
        // A failing peer sends its reason at any time, whatever this side waits for.
        let is_failure = found == Kind::Mark as u16 && kind != Kind::Mark;
        let lengths = if is_failure { MARK_BYTES..=MARK_BYTES + MAX_TEXT } else { lengths };
        if found != kind as u16 && !is_failure {
            return Err(ExchangeError::Kind { found, expected: kind });
        }
        let reserved = u16::from_le_bytes([header[10], header[11]]);
        if reserved != 0 {
            let (field, found) = ("reserved", reserved.into());
            let expected = "0".to_owned();
            return Err(ExchangeError::Field { what: kind, field, found, expected });
        }
        // Checked before memory is allocated for it.
        let expected_len = usize::try_from(len).ok().filter(|len| lengths.contains(len));
        let Some(len) = expected_len else {
            let (least, most) = (lengths.start(), lengths.end());
            let expected =
                if least == most { least.to_string() } else { format!("from {least} to {most}") };
            return Err(ExchangeError::Length { what: kind, found: len, expected });
        };
        let mut payload = vec![0; len];
        self.fill(&mut payload, kind, start, patience)?;
        if !is_failure {
            return Ok(payload);
        }
        match (Stage::from_code(payload[0]), payload[1]) {
            (Some(stage), HAS_FAILED) => {
                Err(ExchangeError::PeerFailed { stage, text: clean(&payload[4..]) })
            }
            _ => Err(ExchangeError::Kind { found, expected: kind }),
        }
    }

    /// Reads all of `bytes` by the deadline, however slowly they come.
    fn fill(
        &mut self,
        bytes: &mut [u8],
        what: Kind,
        start: Instant,
        patience: Duration,
    ) -> Result<(), ExchangeError> {
        let expected = bytes.len();
        let mut got = 0;
        while got < expected {
            let left = patience.saturating_sub(start.elapsed());
            let stalled =
                ExchangeError::Stalled { what, got, expected, millis: patience.as_millis() };
            if left.is_zero() {
                return Err(stalled);
            }
            let read = self
                .stream
                .set_read_timeout(Some(left.max(LEAST_TIMEOUT)))
                .and_then(|()| self.stream.read(&mut bytes[got..]));
            match read {
                Ok(0) => return Err(ExchangeError::Closed { what, got, expected }),
                Ok(num) => got += num,
                Err(error) => match error.kind() {
                    io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => return Err(stalled),
                    io::ErrorKind::Interrupted => {}
                    io::ErrorKind::ConnectionReset => {
                        return Err(ExchangeError::Closed { what, got, expected });
                    }
                    _ => {
                        let what = format!("receiving the {what}");
                        return Err(ExchangeError::Io { what, source: error });
                    }
                },
            }
        }
        Ok(())
    }
}

impl Hello {
    fn encode(&self) -> [u8; HELLO_BYTES] {
        let mut bytes = [0; HELLO_BYTES];
        bytes[0] = u8::from(self.is_connector);
        bytes[1] = u8::from(self.is_devx);
        bytes[2] = u8::from(self.is_software);
        bytes[3] = self.first as u8;
        bytes[4] = self.last as u8;
        bytes[5] = u8::from(self.has_gpu);
        bytes[8..12].copy_from_slice(&self.num_queues.to_le_bytes());
        bytes[12..16].copy_from_slice(&self.depth.to_le_bytes());
        bytes[16..20].copy_from_slice(&self.num_wraps.to_le_bytes());
        bytes[24..32].copy_from_slice(&self.slot_bytes.to_le_bytes());
        bytes[32..40].copy_from_slice(&self.seed.to_le_bytes());
        bytes
    }

    fn decode(bytes: &[u8]) -> Result<Self, ExchangeError> {
        let wrong = |field, found, expected: &str| ExchangeError::Field {
            what: Kind::Hello,
            field,
            found,
            expected: expected.to_owned(),
        };
        let bytes: &[u8; HELLO_BYTES] =
            bytes.try_into().map_err(|_| wrong("length", bytes.len() as u64, "40 bytes"))?;
        let bit = |at: usize, field| match bytes[at] {
            0 => Ok(false),
            1 => Ok(true),
            found => Err(wrong(field, found.into(), "0 or 1")),
        };
        let stage = |at: usize, field| {
            Stage::from_code(bytes[at])
                .ok_or_else(|| wrong(field, bytes[at].into(), "a stage's number"))
        };
        let word = |at: usize| {
            u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
        };
        let long = |at: usize| u64::from(word(at)) | u64::from(word(at + 4)) << 32;
        if bytes[6..8] != [0; 2] || word(20) != 0 {
            return Err(wrong("reserved", word(20).into(), "0"));
        }
        Ok(Self {
            is_connector: bit(0, "role")?,
            is_devx: bit(1, "path")?,
            is_software: bit(2, "software")?,
            has_gpu: bit(5, "gpu")?,
            first: stage(3, "first stage")?,
            last: stage(4, "last stage")?,
            num_queues: word(8),
            depth: word(12),
            num_wraps: word(16),
            slot_bytes: long(24),
            seed: long(32),
        })
    }

    fn compare(&self, theirs: &Self) -> Result<(), ExchangeError> {
        let role = |is_connector| if is_connector { "connect" } else { "listen" }.to_owned();
        if self.is_connector == theirs.is_connector {
            let (option, ours) = ("the role", role(self.is_connector));
            let theirs = format!("{} as well; one side listens, one connects", ours);
            return Err(ExchangeError::Differs { option, ours, theirs });
        }
        let path = |is_devx| if is_devx { "devx" } else { "plain" }.to_owned();
        let stages = |hello: &Self| format!("{}..{}", hello.first, hello.last);
        let pairs = [
            ("--path", path(self.is_devx), path(theirs.is_devx)),
            ("--software-nic", self.is_software.to_string(), theirs.is_software.to_string()),
            ("--stage", stages(self), stages(theirs)),
            ("--queues", self.num_queues.to_string(), theirs.num_queues.to_string()),
            ("--depth", self.depth.to_string(), theirs.depth.to_string()),
            ("--wraps", self.num_wraps.to_string(), theirs.num_wraps.to_string()),
            ("slots of bytes", self.slot_bytes.to_string(), theirs.slot_bytes.to_string()),
        ];
        for (option, ours, theirs) in pairs {
            if ours != theirs {
                return Err(ExchangeError::Differs { option, ours, theirs });
            }
        }
        Ok(())
    }
}

/// The peer's text, for a terminal.
fn clean(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).chars().map(|c| if c.is_control() { ' ' } else { c }).collect()
}

const MAGIC: [u8; 8] = *b"SYBRING4";
const HEADER_BYTES: usize = 16;
const HELLO_BYTES: usize = 40;
/// Number of a mark without text.
const MARK_BYTES: usize = 4;
/// Most bytes of a peer's reason.
const MAX_TEXT: usize = 1024;
const IS_HERE: u8 = 1;
const HAS_FAILED: u8 = 2;
const ACCEPT_INTERVAL: Duration = Duration::from_millis(10);
/// A time-out of 0 would be none.
const LEAST_TIMEOUT: Duration = Duration::from_millis(1);
/// Reads the peer's messages before its queues are destroyed.
const REASON_PATIENCE: Duration = Duration::from_millis(200);
const GIVE_UP_PATIENCE: Duration = Duration::from_secs(1);

#[cfg(test)]
mod tests;
