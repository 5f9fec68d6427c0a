//! A relay in front of a member's address for its peers, so that a test can cut a member off from the others while
//! its clients still reach it.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

/// Ids of members that are cut off, as etcd writes them in the header of a request to a peer, and the open connections.
#[derive(Debug, Default)]
pub(super) struct Cuts {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    cut_ids: Vec<String>,
    open: Vec<(TcpStream, Ends)>,
}

/// The members at both ends of a connection.
#[derive(Clone, Debug)]
struct Ends {
    from: String,
    /// Not known yet while the cluster starts.
    to: Arc<Mutex<String>>,
}

impl Ends {
    fn include(&self, id: &str) -> bool {
        self.from == id || *self.to.lock().unwrap_or_else(PoisonError::into_inner) == id
    }
}

impl Cuts {
    /// Closes the connections of a member with its peers, and keeps new ones silent.
    pub(super) fn cut_off(&self, id: &str) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.cut_ids.push(id.to_owned());
        for (stream, _) in state.open.iter().filter(|(_, ends)| ends.include(id)) {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }

    /// Joins every member again.
    pub(super) fn join(&self) {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).cut_ids.clear();
    }

    /// Registers both ends of a connection. False if it is cut.
    fn admit(&self, near: &TcpStream, far: &TcpStream, ends: &Ends) -> bool {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if state.cut_ids.iter().any(|cut| ends.include(cut)) {
            return false;
        }
        for stream in [near, far] {
            if let Ok(stream) = stream.try_clone() {
                state.open.push((stream, ends.clone()));
            }
        }
        true
    }
}

/// Passes connections of peers on to the member at `port`. Returns the port of the relay.
///
/// # Panics
/// When no port is free.
pub(super) fn start(port: u16, own_id: Arc<Mutex<String>>, cuts: Arc<Cuts>) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let relay_port = listener.local_addr().expect("its address").port();
    thread::spawn(move || {
        for near in listener.incoming().flatten() {
            let (own_id, cuts) = (Arc::clone(&own_id), Arc::clone(&cuts));
            thread::spawn(move || drop(pass(near, port, &own_id, &cuts)));
        }
    });
    relay_port
}

fn pass(
    mut near: TcpStream,
    port: u16,
    own_id: &Arc<Mutex<String>>,
    cuts: &Cuts,
) -> std::io::Result<()> {
    let mut head = vec![0; 8192];
    let length = near.read(&mut head)?;
    head.truncate(length);
    let text = String::from_utf8_lossy(&head);
    let from = text.lines().find_map(|line| line.strip_prefix("X-Server-From: "));
    let from = from.unwrap_or_default().trim().to_owned();
    let mut far = TcpStream::connect(("127.0.0.1", port))?;
    let ends = Ends { from, to: Arc::clone(own_id) };
    if !cuts.admit(&near, &far, &ends) {
        // As a network that loses every packet: the peer waits for its own timeout.
        thread::sleep(Duration::from_secs(5));
        return Ok(());
    }
    far.write_all(&head)?;
    let (mut far_in, mut near_out) = (far.try_clone()?, near.try_clone()?);
    let back = thread::spawn(move || {
        let _ = std::io::copy(&mut far_in, &mut near_out);
        let _ = near_out.shutdown(Shutdown::Both);
    });
    let _ = std::io::copy(&mut near, &mut far);
    let _ = far.shutdown(Shutdown::Both);
    let _ = back.join();
    Ok(())
}
