//! What the two sides of `benchmark_remote` say to each other, in JSON over TCP.

use std::io::{BufRead, BufReader, ErrorKind, Write};
use std::net::{TcpListener, TcpStream, ToSocketAddrs};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
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

/// A connection to the first of the receiver's addresses that takes one, within `patience` for all of them
/// together. A name is looked up before, within the system's own limits.
pub(super) fn connect(receiver: impl ToSocketAddrs, patience: Duration) -> Result<TcpStream> {
    let deadline = Instant::now() + patience;
    let mut refused = None;
    for address in receiver.to_socket_addrs().context("the receiver's name leads nowhere")? {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            break;
        }
        match TcpStream::connect_timeout(&address, left) {
            Ok(stream) => return Ok(stream),
            Err(error) => refused = Some((address, error)),
        }
    }
    let (address, error) = refused.context("the receiver has no address")?;
    Err(error).with_context(|| format!("the receiver cannot be reached at {address}"))
}

/// The connection of both sides, line by line. Neither a line nor the wait for one is without a bound.
pub(super) struct Lines {
    reader: BufReader<TcpStream>,
    pub(super) writer: TcpStream,
    /// Held while a line is written, so that each goes out whole.
    turn: Arc<Mutex<()>>,
    /// Of a wait for the other side.
    limit: Duration,
}

/// Says on a connection, again and again, that this side is still at work. Dropping it ends that.
#[derive(Debug)]
pub(super) struct Beats {
    stop: Option<mpsc::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Drop for Beats {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            // A thread that panicked says no more, which is what is asked for.
            let _ = thread.join();
        }
    }
}

impl Lines {
    pub(super) fn new(stream: TcpStream) -> Result<Self> {
        stream.set_nodelay(true)?;
        stream.set_write_timeout(Some(LIMIT))?;
        let reader = BufReader::new(stream.try_clone()?);
        Ok(Self { reader, writer: stream, turn: Arc::default(), limit: LIMIT })
    }

    pub(super) fn write(&mut self, line: &Line) -> Result<()> {
        write(&self.turn, &mut self.writer, line)
    }

    /// Says once in `pause` that this side is at work, for as long as the result lives: a measurement may
    /// take longer than the other side waits for a word.
    pub(super) fn beats(&self, pause: Duration) -> Result<Beats> {
        let (turn, mut writer) = (Arc::clone(&self.turn), self.writer.try_clone()?);
        let (stop, stopped) = mpsc::channel();
        let beat = move || {
            while stopped.recv_timeout(pause) == Err(RecvTimeoutError::Timeout) {
                // Whoever waits for the other side finds out by itself that it is gone.
                if write(&turn, &mut writer, &Line::Busy).is_err() {
                    return;
                }
            }
        };
        let thread = std::thread::Builder::new().name("sy-bench-beats".to_owned()).spawn(beat)?;
        Ok(Beats { stop: Some(stop), thread: Some(thread) })
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
        let deadline = Instant::now() + self.limit;
        self.writer.set_read_timeout(Some(pause))?;
        let mut text = Vec::new();
        loop {
            work();
            if self.read_more(&mut text)? {
                return Ok(serde_json::from_slice(&text)?);
            }
            ensure!(Instant::now() < deadline, "the other side says nothing for {:?}", self.limit);
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

/// A whole line, whoever else writes.
fn write(turn: &Mutex<()>, writer: &mut TcpStream, line: &Line) -> Result<()> {
    let mut text = serde_json::to_string(line)?;
    text.push('\n');
    let _turn = turn.lock().unwrap_or_else(PoisonError::into_inner);
    Ok(writer.write_all(text.as_bytes())?)
}

/// Of a wait for the other side.
pub(super) const LIMIT: Duration = Duration::from_secs(120);
/// Between two words of a side that is at work: many of them within [`LIMIT`].
pub(super) const PAUSE: Duration = Duration::from_secs(2);
/// Of a wait for a connection.
pub(super) const CONNECT_LIMIT: Duration = Duration::from_secs(20);
/// A description of a slot is the longest, some hundred bytes in decimal.
const MAX_LINE_BYTES: usize = 64 << 10;

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd as _;

    use super::*;

    fn pair() -> (Lines, Lines) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let near = connect(listener.local_addr().unwrap(), LIMIT).unwrap();
        let far = accept(&listener, LIMIT).unwrap();
        (Lines::new(near).unwrap(), Lines::new(far).unwrap())
    }

    #[test]
    fn a_side_that_is_at_work_is_waited_for() {
        let (mut busy, mut waiting) = pair();
        waiting.limit = Duration::from_millis(600);
        let beats = busy.beats(Duration::from_millis(20)).unwrap();
        std::thread::scope(|scope| {
            let reader = scope.spawn(|| {
                let mut num_beats = 0;
                loop {
                    match waiting.read().unwrap() {
                        Line::Busy => num_beats += 1,
                        Line::Joined => return num_beats,
                        other => panic!("{other:?}"),
                    }
                }
            });
            // Twice as long as the other side would wait without a word.
            std::thread::sleep(Duration::from_millis(1200));
            busy.write(&Line::Joined).unwrap();
            assert!(reader.join().unwrap() > 2);
        });
        drop(beats);
        let error = loop {
            match waiting.read() {
                Ok(Line::Busy) => {}
                Ok(other) => panic!("{other:?}"),
                Err(error) => break error.to_string(),
            }
        };
        assert!(error.contains("says nothing for 600ms"), "{error}");
    }

    #[test]
    fn a_receiver_that_never_answers_is_waited_for_so_long_and_no_longer() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        // Room for one connection that nobody takes; further ones are not even refused.
        // SAFETY: a socket that listens, and goes on to with another length of its queue.
        let changed = unsafe { libc::listen(listener.as_raw_fd(), 0) };
        assert_eq!(changed, 0);
        let mut taken = Vec::new();
        let error = loop {
            let started = Instant::now();
            match connect(address, Duration::from_millis(300)) {
                Ok(stream) => taken.push(stream),
                Err(error) => {
                    assert!(started.elapsed() < LIMIT / 2, "{:?}", started.elapsed());
                    break error;
                }
            }
            assert!(taken.len() < 16, "the queue does not fill");
        };
        assert!(error.to_string().contains("cannot be reached at 127.0.0.1"), "{error:#}");
    }

    #[test]
    fn a_receiver_that_is_not_there_is_named() {
        let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let error = connect(address, LIMIT).unwrap_err();
        assert!(error.to_string().contains(&address.to_string()), "{error:#}");
    }
}
