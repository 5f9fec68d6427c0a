//! The control connection between the two sides of `benchmark_remote`: lines of JSON over TCP.

use std::io::{BufRead, BufReader, ErrorKind, Write};
use std::net::{TcpListener, TcpStream, ToSocketAddrs};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

use super::Line;

/// Waits up to `patience` for a connection. Leaves the listener in non-blocking mode.
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

/// Connects to the first of the receiver's addresses that accepts. Takes up to `patience` for all addresses together.
/// The time of a name lookup before is limited only by the system.
pub(super) fn connect(receiver: impl ToSocketAddrs, patience: Duration) -> Result<TcpStream> {
    let deadline = Instant::now() + patience;
    let mut refused = None;
    for address in receiver.to_socket_addrs().context("the receiver's name cannot be resolved")? {
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

/// The control connection, line by line. The length of a line and each wait are bounded.
pub(super) struct Lines {
    reader: BufReader<TcpStream>,
    pub(super) writer: TcpStream,
    /// Locked while a line is written, so that lines do not mix.
    write_lock: Arc<Mutex<()>>,
    /// Longest wait for the other side.
    limit: Duration,
}

/// Sends [`Line::Busy`] at intervals until dropped.
#[derive(Debug)]
pub(super) struct Heartbeat {
    stop: Option<mpsc::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Drop for Heartbeat {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            // A thread that panicked sends nothing more either.
            let _ = thread.join();
        }
    }
}

impl Lines {
    pub(super) fn new(stream: TcpStream) -> Result<Self> {
        stream.set_nodelay(true)?;
        stream.set_write_timeout(Some(LIMIT))?;
        let reader = BufReader::new(stream.try_clone()?);
        Ok(Self { reader, writer: stream, write_lock: Arc::default(), limit: LIMIT })
    }

    pub(super) fn write(&mut self, line: &Line) -> Result<()> {
        write(&self.write_lock, &mut self.writer, line)
    }

    /// Sends [`Line::Busy`] once per `pause` until the result is dropped. A measurement may take longer than the other
    /// side waits for a line.
    pub(super) fn heartbeat(&self, pause: Duration) -> Result<Heartbeat> {
        let (write_lock, mut writer) = (Arc::clone(&self.write_lock), self.writer.try_clone()?);
        let (stop, stopped) = mpsc::channel();
        let send_beats = move || {
            while stopped.recv_timeout(pause) == Err(RecvTimeoutError::Timeout) {
                // A read of the connection reports its end.
                if write(&write_lock, &mut writer, &Line::Busy).is_err() {
                    return;
                }
            }
        };
        let thread =
            std::thread::Builder::new().name("sy-bench-beats".to_owned()).spawn(send_beats)?;
        Ok(Heartbeat { stop: Some(stop), thread: Some(thread) })
    }

    pub(super) fn read(&mut self) -> Result<Line> {
        self.read_every(Duration::from_millis(100), || ())
    }

    /// As [`read`](Self::read), and calls `work` repeatedly meanwhile.
    pub(super) fn read_while(&mut self, work: impl FnMut()) -> Result<Line> {
        self.read_every(Duration::from_millis(1), work)
    }

    /// Waits for a line, and calls `work` at least once per `pause` meanwhile.
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

    /// Appends the received part of a line to `text`, if there is any. Returns true once the line is complete.
    fn read_more(&mut self, text: &mut Vec<u8>) -> Result<bool> {
        let received = match self.reader.fill_buf() {
            Ok(received) => received,
            Err(error)
                if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) =>
            {
                return Ok(false);
            }
            Err(error) => return Err(error.into()),
        };
        ensure!(!received.is_empty(), "the other side has closed");
        let end = received.iter().position(|byte| *byte == b'\n');
        let len = end.map_or(received.len(), |end| end + 1);
        ensure!(
            text.len() + len <= MAX_LINE_BYTES,
            "the other side sends a line of more than {MAX_LINE_BYTES} bytes"
        );
        text.extend_from_slice(&received[..len]);
        self.reader.consume(len);
        Ok(end.is_some())
    }
}

/// Writes a line. Other threads may write lines at the same time.
fn write(write_lock: &Mutex<()>, writer: &mut TcpStream, line: &Line) -> Result<()> {
    let mut text = serde_json::to_string(line)?;
    text.push('\n');
    let _locked = write_lock.lock().unwrap_or_else(PoisonError::into_inner);
    Ok(writer.write_all(text.as_bytes())?)
}

/// Longest wait for the other side.
pub(super) const LIMIT: Duration = Duration::from_secs(120);
/// Interval of the heartbeat, a small part of [`LIMIT`].
pub(super) const PAUSE: Duration = Duration::from_secs(2);
/// Longest wait for a connection.
pub(super) const CONNECT_LIMIT: Duration = Duration::from_secs(20);
/// The longest line describes a slot: some hundred bytes in decimal.
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
    fn a_busy_side_is_waited_for() {
        let (mut busy, mut waiting) = pair();
        waiting.limit = Duration::from_millis(600);
        let heartbeat = busy.heartbeat(Duration::from_millis(20)).unwrap();
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
            // Twice the other side's limit without a line.
            std::thread::sleep(Duration::from_millis(1200));
            busy.write(&Line::Joined).unwrap();
            assert!(reader.join().unwrap() > 2);
        });
        drop(heartbeat);
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
    fn the_wait_for_a_receiver_that_never_answers_is_bounded() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        // The queue has room for one connection, which is not accepted. Further connections get no answer at all.
        // SAFETY: the socket listens already; the call only changes the length of its queue.
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
    fn an_absent_receiver_is_named() {
        let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let error = connect(address, LIMIT).unwrap_err();
        assert!(error.to_string().contains(&address.to_string()), "{error:#}");
    }
}
