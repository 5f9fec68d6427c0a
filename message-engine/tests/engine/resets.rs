//! Data connections that end while the peers live: a middlebox drops them, or a route changes.

use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicU16, Ordering};
use std::sync::{Mutex, OnceLock};

use switchyard_message_engine::engine::{CloseReason, EngineConfig};

use crate::common::{TestTransport, config, contents, memory_of, pair_of, poisoned, soon, until};
use crate::hooked::HookedFabric;

/// A middlebox between the peers and the one data port of this test.
#[derive(Default)]
struct Middlebox {
    /// Port of the middlebox, and port behind it.
    ports: OnceLock<(u16, AtomicU16)>,
    streams: Mutex<Vec<TcpStream>>,
}

static MIDDLEBOX: Middlebox = Middlebox { ports: OnceLock::new(), streams: Mutex::new(Vec::new()) };

impl Middlebox {
    /// Port of the middlebox for data to `port`.
    fn before(&'static self, port: u16) -> u16 {
        let (own, target) = self.ports.get_or_init(|| {
            let listener = TcpListener::bind("127.0.0.1:0").unwrap();
            let own = listener.local_addr().unwrap().port();
            std::thread::spawn(move || {
                listener.incoming().for_each(|from| self.carry(from.unwrap()))
            });
            (own, AtomicU16::new(0))
        });
        target.store(port, Ordering::SeqCst);
        *own
    }

    fn carry(&self, from: TcpStream) {
        let port = self.ports.get().unwrap().1.load(Ordering::SeqCst);
        let to = TcpStream::connect(("127.0.0.1", port)).unwrap();
        for (mut from, mut to) in
            [(from.try_clone(), to.try_clone()), (to.try_clone(), from.try_clone())]
                .map(|(from, to)| (from.unwrap(), to.unwrap()))
        {
            std::thread::spawn(move || {
                let _ = std::io::copy(&mut from, &mut to);
            });
        }
        self.streams.lock().unwrap().extend([from, to]);
    }

    fn forget_all(&self) {
        for stream in self.streams.lock().unwrap().drain(..) {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }
}

/// The port in a detail of `tcp`, behind the version.
fn through_the_middlebox(mut detail: Vec<u8>) -> Vec<u8> {
    let port = u16::from_le_bytes([detail[2], detail[3]]);
    detail[2..4].copy_from_slice(&MIDDLEBOX.before(port).to_le_bytes());
    detail
}

#[test]
fn a_connection_whose_data_cannot_move_any_more_ends_and_can_be_made_again() {
    let behind = HookedFabric {
        change_detail: through_the_middlebox,
        ..HookedFabric::of(TestTransport::Tcp.fabric())
    };
    let behind = EngineConfig { fabrics: vec![Box::new(behind)], ..EngineConfig::local() };
    let pair = pair_of(config(TestTransport::Tcp), behind);
    let (source, target) = (memory_of(&pair.here, &[7; 5000]), poisoned(&pair.there, 5000));
    let span = source.span(0, 5000).unwrap();
    let remote = pair.back.advertise(&target.span(0, 5000).unwrap()).unwrap();
    pair.out.write(&span, &remote, soon()).unwrap();
    assert_eq!(pair.out.closed(), None);

    // Nothing is under way, so no side would notice by itself.
    MIDDLEBOX.forget_all();
    until("the end at the side that writes", || pair.out.closed().is_some());
    assert!(matches!(pair.out.closed(), Some(CloseReason::Lost(_))), "{:?}", pair.out.closed());
    until("the end at the other side", || pair.back.closed().is_some());
    // The new connection is another one.
    let again = pair.here.add_remote_endpoint(&pair.there.metadata(), soon()).unwrap();
    assert_ne!(again.id(), pair.out.id());
    source.copy_in(0, &[8; 5000]).unwrap();
    again.write(&span, &remote, soon()).unwrap();
    assert_eq!(contents(&target, 0, 5000), [8; 5000]);
    assert_eq!(again.closed(), None);
}
